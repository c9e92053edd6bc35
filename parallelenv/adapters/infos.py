"""Infos of several envs as one dict of arrays, in the form of Gymnasium's vector envs.

Differs from `gymnasium.vector.VectorEnv._add_info` where that loses values: it gives all values the type of the
first, so 1.5 after 1 becomes 1, and raises errors for arrays of different shapes or ``None`` after a number.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from parallelenv.contract.batch import Array, DType
from parallelenv.contract.spaces import Info

_AS_THEY_ARE = "final_obs"
"""Gymnasium never batches these."""


def gather_infos(infos: Iterable[tuple[int, Mapping[str, object]]], num_envs: int) -> Info:
    """Return one dict for all envs, from pairs of an env id and its info; envs may be left out.

    Returns:
        For each key ``k`` an array with one row per env, zero or ``None`` for envs without the key; and under ``_k`` an
        array ``(num_envs,)`` bool of the envs with it, which replaces an env's own key of that name. The dtype keeps
        all values: numbers become ``(num_envs,)``, arrays of one shape ``(num_envs, *shape)``, dicts are gathered
        recursively, and all else, including mixtures, becomes an object array ``(num_envs,)``.
    """
    columns: dict[str, dict[int, object]] = {}
    for row, info in infos:
        for key, value in info.items():
            columns.setdefault(key, {})[row] = value
    gathered = {key: _column(key, values, num_envs) for key, values in columns.items()}
    for key, values in columns.items():
        gathered[f"_{key}"] = mask = np.zeros(num_envs, dtype=bool)
        mask[list(values)] = True
    return gathered


def _column(key: object, by_row: Mapping[int, Any], num_envs: int) -> Info | Array:
    values = list(by_row.values())
    if key != _AS_THEY_ARE:
        if all(isinstance(value, dict) for value in values):
            return gather_infos(by_row.items(), num_envs)
        dtype = _common_dtype(values)
        if dtype is not None:
            column: Array = np.zeros((num_envs, *np.shape(values[0])), dtype=dtype)
            column[list(by_row)] = values
            return column
    objects: Array = np.full(num_envs, None, dtype=object)
    for row, value in by_row.items():
        objects[row] = value  # one by one: numpy would split lists
    return objects


def _common_dtype(values: list[object]) -> DType | None:
    """Return the dtype that keeps all values; ``None`` if they are neither numbers nor arrays of one shape."""
    are_arrays = all(isinstance(value, np.ndarray) for value in values)
    are_numbers = all(type(value) in (int, float) or isinstance(value, np.number) for value in values)
    if not (are_arrays or are_numbers or all(type(value) is bool for value in values)):
        return None
    arrays = [np.asarray(value) for value in values]
    # A plain array would lose a mask.
    if len({array.shape for array in arrays}) > 1 or any(isinstance(value, np.ma.MaskedArray) for value in values):
        return None
    dtypes = {array.dtype for array in arrays}
    if len(dtypes) == 1:
        return dtypes.pop()
    kinds = {"number" if dtype.kind in "iufc" else dtype.kind for dtype in dtypes}
    if kinds not in ({"number"}, {"U"}, {"S"}):
        return None
    common = np.result_type(*dtypes)
    with np.errstate(all="ignore"):
        kept = [(one.astype(common).astype(one.dtype) == one) | (one != one) for one in arrays]  # noqa: PLR0124 (NaN)
    return common if all(same.all() for same in kept) else None
