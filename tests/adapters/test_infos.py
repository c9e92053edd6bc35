"""Infos of several envs as one dict of arrays: where Gymnasium would lose values or fail, ours are complete."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from parallelenv.adapters.gymnasium import gather_infos


def gather(*values: Any) -> Any:
    """Return the array gathered from the values of three envs under one key; the third has none."""
    infos = [{"k": value} for value in values]
    gathered = gather_infos(enumerate(infos), 3)
    assert gathered["_k"].tolist() == [index < len(infos) for index in range(3)]
    return gathered["k"]


@pytest.mark.parametrize(
    ("values", "dtype"),
    [
        ((1, 1.5), np.float64),
        ((np.float32(0.1), 0.1), np.float64),
        ((np.int8(1), 1000), np.int64),
        ((np.float32(1), np.float64(0.1)), np.float64),
        ((float("nan"), 1), np.float64),
        ((2**62, 1), np.int64),
    ],
)
def test_numbers_get_a_dtype_that_holds_all_of_them(values: tuple[Any, ...], dtype: Any) -> None:
    column = gather(*values)
    assert column.dtype == dtype
    np.testing.assert_array_equal(column, [*values, 0])


MASKED = np.ma.MaskedArray([1, 2], [True, False])


@pytest.mark.parametrize(
    "values",
    [
        (MASKED, np.array([3, 4])),
        (np.array([3, 4]), MASKED),
        (MASKED, MASKED),
        (np.array([2**53 + 1]), np.array([0.5])),
        (np.bool_(True), np.bool_(False)),
        (np.array("x", dtype=object), "word"),
        (True, 7),
        (1, None),
        (None, 1),
        (1, {"a": 1}),
        ({"a": 1}, 1),
        (2**53 + 1, 1.5),
        (2**70, 1),
        (np.zeros(2), np.zeros(3)),
        (np.zeros(2), 1.0),
        (np.zeros(2, bool), np.zeros(2)),
        ([1, 2], [3, 4]),
    ],
    ids=repr,
)
def test_values_without_a_common_dtype_stay_objects(values: tuple[Any, ...]) -> None:
    column = gather(*values)
    assert column.dtype == object
    assert all(found is value for found, value in zip(column, values, strict=False))
    assert column[2] is None


def test_arrays_get_a_dtype_that_holds_all_of_them() -> None:
    assert gather(np.array([1, 2]), np.array([0.5, 1.5])).tolist() == [[1, 2], [0.5, 1.5], [0, 0]]
    assert gather(np.array(["a"]), np.array(["abc"])).tolist() == [["a"], ["abc"], [""]]


def test_mask_replaces_an_info_key_of_the_same_name() -> None:
    gathered = gather_infos([(0, {"a": 1, "_a": 5})], 2)
    assert gathered["_a"].tolist() == [True, False]
