"""What a collector asks of a policy beyond acting: that it takes weights, and values of its settings."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

from parallelenv.collect.checks import check_policy_maker
from parallelenv.contract.arguments import check_name, check_policy
from parallelenv.contract.copying import own
from parallelenv.contract.env_specs import told
from parallelenv.errors import AbsentAttributeError, ArgumentError

Policy = Callable[..., Any]
_LOADERS = ("set_weights", "load_state_dict")


def make_policy(make: Any, rank: int, world_size: int, seed: int | None) -> Policy:
    """Return a policy; ``make`` gets those of ``rank``, ``world_size`` and ``seed`` that it has parameters for.

    Raises:
        ArgumentError: If what makes it, or the policy itself, cannot be called.
    """
    check_policy_maker(make)
    policy: Policy = told(make, rank, world_size, seed)()
    check_policy(policy)
    return policy


def load_weights(policy: Policy, weights: Any) -> None:
    """Give a policy weights, as they are.

    Raises:
        ArgumentError: If it has no method that takes them.
    """
    for name in _LOADERS:
        load = getattr(policy, name, None)
        if callable(load):
            load(weights)
            return
    raise ArgumentError(
        f"The policy, a {type(policy).__name__}, takes no weights. Give it a method set_weights(weights), or let it be "
        "a torch module, which has load_state_dict."
    )


def set_existing(policy: Policy, name: str, value: Any) -> None:
    """Set an attribute that a policy has; ``"a.b"`` sets ``b`` of the object ``a``.

    Raises:
        ArgumentError: If the name is none.
        AbsentAttributeError: If there is no such attribute.
    """
    check_name("name", name)
    *way, last = name.split(".")
    owner: Any = policy
    for part in way:
        owner = _existing(owner, part, name, policy)
    _existing(owner, last, name, policy)
    setattr(owner, last, own(value))


def _existing(owner: Any, part: str, name: str, policy: Policy) -> Any:
    if not hasattr(owner, part):
        raise AbsentAttributeError(
            f"name={name!r}: the policy, a {type(policy).__name__}, has no {part!r} there. Set what it has, or give "
            "another one by replace('policy', make_policy)."
        )
    return getattr(owner, part)


def as_deterministic(policy: Policy) -> Policy:
    """Return a policy that is called with ``deterministic=True``, if it takes that."""
    parameters: Any = ()
    try:
        parameters = inspect.signature(policy).parameters
        if any(one.kind is one.VAR_KEYWORD for one in parameters.values()) and hasattr(policy, "forward"):
            parameters = inspect.signature(policy.forward).parameters  # a torch module takes anything
    except (TypeError, ValueError):  # a builtin without a signature
        pass
    return functools.partial(policy, deterministic=True) if "deterministic" in parameters else policy
