"""Checks of what a collector, and a set of them, is given."""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from parallelenv.contract.arguments import check_positive
from parallelenv.contract.env_specs import told
from parallelenv.contract.messages import show
from parallelenv.env import ParallelEnv
from parallelenv.errors import ArgumentError

COMPONENTS = ("policy", "envs", "test_envs")
_taken: weakref.WeakSet[ParallelEnv] = weakref.WeakSet()
"""Envs of collectors of this process."""


def listening(listen_to: Iterable[Any]) -> Callable[[], bool]:
    """Return what says whether one of these has spoken.

    Raises:
        ArgumentError: If one is neither an event nor a function.
    """
    if isinstance(listen_to, str) or not isinstance(listen_to, Iterable):
        raise ArgumentError(
            f"listen_to={show(listen_to)} is no list. Give a list of events, as threading.Event, or of functions."
        )
    asked = []
    for one in listen_to:
        ask = getattr(one, "is_set", one)
        if not callable(ask):
            raise ArgumentError(
                f"listen_to has {show(one)} in it. Give events, as threading.Event, or functions without arguments."
            )
        asked.append(ask)
    return lambda: any(ask() for ask in asked)


def check_version(version: Any, before: int) -> int:
    """Return the version of new weights.

    Raises:
        ArgumentError: If it is no int of 0 or more.
    """
    if version is None:
        return before + 1
    if not isinstance(version, int | np.integer) or isinstance(version, bool) or version < 0:
        raise ArgumentError(f"version={show(version)} must be an int of 0 or more, or None for the next one.")
    return int(version)


def check_component(component: Any) -> None:
    """Refuse what a collector has not.

    Raises:
        ArgumentError: If it is none of its components.
    """
    if component not in COMPONENTS:
        raise ArgumentError(f"component={show(component)} is not known; expected one of {COMPONENTS}.")


def check_rank(rank: Any, world_size: Any) -> None:
    """Refuse what is no number of a collector among so many.

    Raises:
        ArgumentError: If it is none.
    """
    check_positive("world_size", world_size)
    if not isinstance(rank, int | np.integer) or isinstance(rank, bool) or not 0 <= rank < world_size:
        raise ArgumentError(
            f"rank={show(rank)} must be an int from 0 to {world_size - 1}: below world_size={world_size}."
        )


def check_policy_maker(make: Any) -> None:
    """Refuse what cannot make a policy.

    Raises:
        ArgumentError: If it cannot be called with what it is given.
    """
    if not callable(make):
        raise ArgumentError(f"make_policy={show(make)} cannot be called. Give a function that returns a policy.")
    if needed := _needed(told(make, 0, 1, 0)):
        raise ArgumentError(
            f"make_policy={show(make)} needs {', '.join(needed)}, but is given no more than rank, world_size and seed. "
            "Give a function that returns a policy; if this is the policy itself, lambda: policy."
        )


def check_env_maker(make: Any, name: str) -> None:
    """Refuse what cannot make a `ParallelEnv`.

    Args:
        make: What should make it.
        name: Of that, for messages.

    Raises:
        ArgumentError: If it cannot be called, or not without arguments.
    """
    needed = _needed(make) if callable(make) else []
    if needed or not callable(make):
        what = f"needs {', '.join(needed)}" if needed else "cannot be called"
        raise ArgumentError(f"{name}={show(make)} {what}. {_ENV_MAKER}")


_ENV_MAKER = (
    "Give a function without arguments that returns a ParallelEnv, with what wrappers do put into its envs or into the "
    "policy."
)


def _needed(make: Callable[..., Any]) -> list[str]:
    """Return the names of arguments that a function must be given."""
    try:
        parameters = inspect.signature(make).parameters.values()
    except (TypeError, ValueError):  # a builtin without a signature
        return []
    is_open = inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD
    return [one.name for one in parameters if one.default is one.empty and one.kind not in is_open]


def checked_env(make: Any, name: str, *, must_restart: bool) -> ParallelEnv:
    """Return a new `ParallelEnv`.

    Args:
        make: What makes it.
        name: Of that, for messages.
        must_restart: Whether episodes must go on by themselves.

    Raises:
        ArgumentError: If it is none, or not one that a collector can use.
    """
    check_env_maker(make, name)
    env = make()
    if not isinstance(env, ParallelEnv):
        raise ArgumentError(f"{name}() returned a {type(env).__name__}. {_ENV_MAKER}")
    if env in _taken:
        raise ArgumentError(
            f"{name}() returned a ParallelEnv that a collector has already. Let it make a new one: collectors, "
            "and envs to collect from and test envs, play apart, and what is replaced is closed."
        )
    if must_restart and env.asynchronous != "restart":
        policy = env.asynchronous
        env.close()
        raise ArgumentError(
            f"{name}() returned a ParallelEnv with asynchronous={policy!r}. A collector does not stop where an episode "
            "ends: make it with asynchronous='restart'."
        )
    _taken.add(env)
    return env
