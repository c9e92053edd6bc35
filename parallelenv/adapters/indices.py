"""Env ids in the form of other libraries: positions in a list."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from parallelenv.contract.arguments import parse_ids


def positions(argument: Any, num_envs: int, name: str) -> list[int]:
    """Return the env ids at these positions in the list of all envs, in order.

    Args:
        argument: A form of `parse_ids`. Positions may be negative (from the end) or duplicates; sets are allowed.
        num_envs: Number of envs.
        name: The user's name of the argument.

    Raises:
        ArgumentError: If it has none of these forms.
        IdRangeError: If a position does not exist.
    """
    given = argument.tolist() if isinstance(argument, np.ndarray | np.generic) else argument
    if isinstance(given, Iterable) and not isinstance(given, str | bytes | Mapping):
        given = list(given)
    listed = given if isinstance(given, list) else [given]
    if not all(isinstance(one, int | np.integer) and not isinstance(one, bool) for one in listed):
        return list(parse_ids(given, num_envs, name))
    found = [int(one) + num_envs if -num_envs <= one < 0 else int(one) for one in listed]
    parse_ids(list(dict.fromkeys(found)), num_envs, name)
    return found
