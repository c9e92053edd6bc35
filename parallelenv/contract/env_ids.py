"""Converts every form of the argument ``id`` to env ids."""

from __future__ import annotations

import operator
from typing import Any

import numpy as np

from parallelenv.contract.error_text import show
from parallelenv.errors import ArgumentError, IdRangeError

_FORMS = "an int, a list, tuple or array of ints, a slice, or a bool mask"


def parse_ids(argument: Any, num_envs: int, name: str = "id") -> tuple[int, ...]:
    """Return the env ids that an ``id`` argument names, in the order given.

    Args:
        argument: An int, a sequence or array of ints, a slice, or a bool mask of length ``num_envs``. The caller
            handles ``None``, which depends on which envs are paused.
        num_envs: Number of envs.
        name: Name of the argument in the public call.

    Raises:
        ArgumentError: If it has none of these forms, an id occurs twice or a mask has the wrong length.
        IdRangeError: If an id is negative or too large.
    """
    if isinstance(argument, slice):
        try:
            return tuple(range(*argument.indices(num_envs)))
        except (TypeError, ValueError) as error:
            raise ArgumentError(f"{name}={show(argument)} is no usable slice: {error}.") from None
    if is_int(argument):
        return _checked((int(argument),), argument, num_envs, name)
    if isinstance(argument, (str, bytes, dict, set, frozenset, bool, np.bool_)):
        raise ArgumentError(f"{name}={show(argument)} names no envs. Give {_FORMS}.")
    return _from_sequence(argument, num_envs, name)


def _from_sequence(argument: Any, num_envs: int, name: str) -> tuple[int, ...]:
    try:
        items = argument.tolist() if hasattr(argument, "tolist") else list(argument)
    except TypeError:
        raise ArgumentError(f"{name}={show(argument)} names no envs. Give {_FORMS}.") from None
    if not isinstance(items, list):  # a zero-dimensional array
        return parse_ids(items, num_envs, name)
    if set(map(type, items)) == {int}:  # the usual case
        return _checked(tuple(items), argument, num_envs, name)
    if items and all(isinstance(item, (bool, np.bool_)) for item in items):
        if len(items) != num_envs:
            raise ArgumentError(
                f"{name} is a mask of length {len(items)}, but there are {num_envs} envs. Give one bool per env."
            )
        return tuple(index for index, chosen in enumerate(items) if chosen)
    for item in items:
        if not is_int(item):
            raise ArgumentError(f"{name}={show(argument)} has {show(item)} in it, which is no int. Give {_FORMS}.")
    return _checked(tuple(map(operator.index, items)), argument, num_envs, name)


def _checked(env_ids: tuple[int, ...], argument: Any, num_envs: int, name: str) -> tuple[int, ...]:
    if env_ids and not 0 <= min(env_ids) <= max(env_ids) < num_envs:
        outside = next(env_id for env_id in env_ids if not 0 <= env_id < num_envs)
        raise IdRangeError(f"{name}={show(argument)} names env {outside}, but ids run from 0 to {num_envs - 1}.")
    if len(set(env_ids)) != len(env_ids):
        twice = next(env_id for env_id in env_ids if env_ids.count(env_id) > 1)
        raise ArgumentError(f"{name}={show(argument)} names env {twice} twice. Name each env once.")
    return env_ids


def is_int(value: Any) -> bool:
    """Whether a value is an int of Python or NumPy, and not a bool."""
    return isinstance(value, (int, np.integer)) and not isinstance(value, bool)
