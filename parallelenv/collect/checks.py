"""Checks of what a collector, and a set of them, is given."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from parallelenv.errors import ArgumentError

COMPONENTS = ("policy", "envs", "test_envs")


def listening(listen_to: Iterable[Any]) -> Callable[[], bool]:
    """Return what says whether one of these has spoken.

    Raises:
        ArgumentError: If one is neither an event nor a function.
    """
    if isinstance(listen_to, str) or not isinstance(listen_to, Iterable):
        raise ArgumentError(
            f"listen_to={listen_to!r} is no list. Give a list of events, as threading.Event, or of functions."
        )
    asked = []
    for one in listen_to:
        ask = getattr(one, "is_set", one)
        if not callable(ask):
            raise ArgumentError(
                f"listen_to has {one!r} in it. Give events, as threading.Event, or functions without arguments."
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
        raise ArgumentError(f"version={version!r} must be an int of 0 or more, or None for the next one.")
    return int(version)


def check_component(component: Any) -> None:
    """Refuse what a collector has not.

    Raises:
        ArgumentError: If it is none of its components.
    """
    if component not in COMPONENTS:
        raise ArgumentError(f"component={component!r} is not known; expected one of {COMPONENTS}.")
