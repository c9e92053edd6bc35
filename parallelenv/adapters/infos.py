"""Infos of several envs as one dict of arrays, in the form of Gymnasium's vector envs.

Differs from `gymnasium.vector.VectorEnv._add_info` where that loses values: it gives all values the type of the
first, so 1.5 after 1 becomes 1, and raises errors for arrays of different shapes or ``None`` after a number.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from parallelenv.contract.batch import Array

_AS_THEY_ARE = "final_obs"
"""Gymnasium never batches these."""
_NUMBERS = (int, float)


def gather_infos(infos: Iterable[Mapping[Any, Any]], num_envs: int) -> dict[str, Any]:
    """Return one dict for all envs.

    Args:
        infos: One per env, in env id order; may be empty.
        num_envs: Number of envs.

    Returns:
        For each key ``k`` an array with one row per env, zero or ``None`` for envs without the key; and under ``_k`` an
        array ``(num_envs,)`` bool of the envs with it, which replaces an env's own key of that name. The dtype keeps
        all values: numbers become ``(num_envs,)``, arrays of one shape ``(num_envs, *shape)``, dicts are gathered
        recursively, and all else, including mixtures, becomes an object array ``(num_envs,)``.
    """
    return _gather(enumerate(infos), num_envs)


def _gather(infos: Iterable[tuple[int, Mapping[Any, Any]]], num_envs: int) -> dict[str, Any]:
    rows: dict[Any, list[int]] = {}
    values: dict[Any, list[Any]] = {}
    for row, info in infos:
        for key, value in info.items():
            rows.setdefault(key, []).append(row)
            values.setdefault(key, []).append(value)
    gathered = {key: _column(key, rows[key], values[key], num_envs) for key in rows}
    for key, having in rows.items():
        gathered[f"_{key}"] = mask = np.zeros(num_envs, dtype=bool)
        mask[having] = True
    return gathered


def _column(key: Any, rows: Sequence[int], values: Sequence[Any], num_envs: int) -> Any:
    if key != _AS_THEY_ARE:
        if all(isinstance(value, dict) for value in values):
            return _gather(zip(rows, values, strict=True), num_envs)
        arrays = _as_arrays(values)
        dtype = None if arrays is None else _common_dtype(arrays)
        if arrays is not None and dtype is not None:
            column: Array = np.zeros((num_envs, *arrays[0].shape), dtype=dtype)
            column[list(rows)] = arrays
            return column
    objects: Array = np.full(num_envs, None, dtype=object)
    for row, value in zip(rows, values, strict=True):
        objects[row] = value  # one by one: numpy would split lists
    return objects


def _as_arrays(values: Sequence[Any]) -> Sequence[Array] | None:
    """Return arrays of one shape, or the numbers; ``None`` if they are neither. Bools do not count as numbers."""
    if any(isinstance(value, np.ma.MaskedArray) for value in values):  # a plain array would lose the mask
        return None
    if isinstance(values[0], np.ndarray):
        shape = values[0].shape
        return values if all(isinstance(value, np.ndarray) and value.shape == shape for value in values) else None
    if all(map(_is_number, values)) or all(type(value) is bool for value in values):
        return [np.asarray(value) for value in values]
    return None


def _is_number(value: Any) -> bool:
    return type(value) in _NUMBERS or isinstance(value, np.number)


def _common_dtype(arrays: Sequence[Array]) -> np.dtype[Any] | None:
    """Return the dtype that keeps the values of all arrays, or ``None``."""
    dtypes = {array.dtype for array in arrays}
    if len(dtypes) == 1:
        return dtypes.pop()
    kinds = {"number" if dtype.kind in "iufc" else dtype.kind for dtype in dtypes}
    if kinds not in ({"number"}, {"U"}, {"S"}):
        return None
    common = np.result_type(*dtypes)
    return common if all(_is_kept(array, common) for array in arrays) else None


def _is_kept(array: Array, dtype: np.dtype[Any]) -> bool:
    with np.errstate(all="ignore"):
        same = array.astype(dtype).astype(array.dtype) == array
    return bool((same | (array != array)).all())  # noqa: PLR0124 (NaN alone differs from itself)
