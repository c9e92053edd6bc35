"""Argument checks of collectors and sets of collectors. Each raises `ArgumentError`."""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from parallelenv.contract.arguments import check_positive
from parallelenv.contract.env_specs import bind_arguments
from parallelenv.contract.error_text import show
from parallelenv.env import ParallelEnv
from parallelenv.errors import ArgumentError

_COMPONENTS = ("policy", "envs", "test_envs")
_ENV_MAKER = (
    "Give a function without arguments that returns a ParallelEnv, with what wrappers do put into its envs or into the "
    "policy."
)
_taken: weakref.WeakSet[ParallelEnv] = weakref.WeakSet()
"""Envs that collectors of this process use."""


def any_of(listen_to: Iterable[Any]) -> Callable[[], bool]:
    """Return a function that is true once an event is set or a function returns ``True``."""
    is_list = isinstance(listen_to, Iterable) and not isinstance(listen_to, str)
    asked: list[Any] = [getattr(one, "is_set", one) for one in listen_to] if is_list else [None]
    if not all(map(callable, asked)):
        raise ArgumentError(
            f"listen_to={show(listen_to)} must be a list. Give a list of events, as threading.Event, or of functions "
            "without arguments."
        )
    return lambda: any(ask() for ask in asked)


def check_version(version: Any, before: int) -> int:
    """Return the version of new weights, an int of at least 0."""
    if version is None:
        return before + 1
    if not isinstance(version, int | np.integer) or isinstance(version, bool) or version < 0:
        raise ArgumentError(f"version={show(version)} must be an int of 0 or more, or None for the next one.")
    return int(version)


def check_component(component: Any) -> None:
    """Check the name of a component."""
    if component not in _COMPONENTS:
        raise ArgumentError(f"component={show(component)} is not known; expected one of {_COMPONENTS}.")


def check_rank(rank: Any, world_size: Any) -> None:
    """Check that ``rank`` is an int from 0 to ``world_size - 1``."""
    check_positive("world_size", world_size)
    if not isinstance(rank, int | np.integer) or isinstance(rank, bool) or not 0 <= rank < world_size:
        raise ArgumentError(
            f"rank={show(rank)} must be an int from 0 to {world_size - 1}: below world_size={world_size}."
        )


def check_policy_maker(make: Any) -> None:
    """Check that a function can be called with those of rank, world_size and seed that it has."""
    if not callable(make):
        raise ArgumentError(f"make_policy={show(make)} cannot be called. Give a function that returns a policy.")
    if needed := _needed(bind_arguments(make, 0, 1, 0)):
        raise ArgumentError(
            f"make_policy={show(make)} needs {needed}, but is given no more than rank, world_size and seed. "
            "Give a function that returns a policy; if this is the policy itself, lambda: policy."
        )


def check_env_maker(make: Any, name: str) -> None:
    """Check that a function can be called without arguments. ``name`` is its name in messages."""
    if not callable(make):
        raise ArgumentError(f"{name}={show(make)} cannot be called. {_ENV_MAKER}")
    if needed := _needed(make):
        raise ArgumentError(f"{name}={show(make)} needs {needed}. {_ENV_MAKER}")


def _needed(make: Callable[..., Any]) -> str:
    """Return the names of a function's required arguments."""
    try:
        parameters = inspect.signature(make).parameters.values()
    except (TypeError, ValueError):  # a builtin without a signature
        return ""
    is_open = inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD
    return ", ".join(one.name for one in parameters if one.default is one.empty and one.kind not in is_open)


def checked_env(make: Any, name: str, *, must_restart: bool) -> ParallelEnv:
    """Return the new `ParallelEnv` of a function, if a collector can use it.

    Args:
        make: Returns it.
        name: Name of that function in messages.
        must_restart: Whether ``asynchronous`` must be ``"restart"``.
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
        env.close()
        raise ArgumentError(
            f"{name}() returned a ParallelEnv with asynchronous={env.asynchronous!r}. A collector does not stop where "
            "an episode ends: make it with asynchronous='restart'."
        )
    _taken.add(env)
    return env
