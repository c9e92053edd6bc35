"""Bitwise comparison of values, and descriptions of differences."""

from __future__ import annotations

import re
from typing import Any

import cloudpickle
import numpy as np
import pytest

from parallelenv.results import difference


class Opaque:
    """Is equal only to itself, as most objects."""

    def __init__(self, value: int) -> None:
        self.value = value

    def __repr__(self) -> str:
        return f"Opaque({self.value})"


class Tensor:
    """Like tensors of other libraries: == returns a tensor, numpy can read it."""

    def __init__(self, values: list[float]) -> None:
        self.values = np.array(values)

    def __eq__(self, other: object) -> Any:
        return self.values == (other.values if isinstance(other, Tensor) else other)

    __hash__ = None  # type: ignore[assignment]

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
        return self.values


OBJECTS = [1, "text", None, float("nan"), np.float32("nan"), Opaque(1), Tensor([1.0, 2.0]), np.random.default_rng(0)]
ARRAYS = {
    "numbers": np.array([1.0, float("nan")]),
    "objects": np.array([{"a": np.zeros(2)}, None], dtype=object),
    3: np.array([], dtype=object),
    "mixed": {"a": [1, (2.5, b"x")], 3: np.int64(4)},
}


@pytest.mark.parametrize("value", [OBJECTS, ARRAYS])
def test_difference_of_two_copies_is_none(value: Any) -> None:
    pickled = cloudpickle.dumps(value)
    assert difference(cloudpickle.loads(pickled), cloudpickle.loads(pickled)) is None


@pytest.mark.parametrize(
    ("left", "right", "where"),
    [
        (1, 1.0, r"^x: 1 \(int\) against 1.0 \(float\)"),
        (True, 1, r"^x: True \(bool\)"),
        (0.0, -0.0, r"^x: 0.0 against -0.0"),
        (np.zeros(2), np.zeros(2, dtype=np.float32), r"^x: float64\(2,\) against float32\(2,\)"),
        (np.zeros(2), np.zeros((2, 1)), r"against float64\(2, 1\)"),
        (np.array([[1, 2], [3, 4]]), np.array([[1, 2], [3, 5]]), r"^x\[1\]\[1\]: np.int64\(4\) against"),
        (np.array(1), np.array(2), "^x: "),
        (np.array([0.0]), np.array([-0.0]), r"^x\[0\]: "),
        (np.array([None, 1], dtype=object), np.array([None, 2], dtype=object), r"^x\[1\]: 1 against 2"),
        (np.float64(0.0), np.float64(-0.0), "^x: "),
        ({"a": 1}, {"b": 1}, r"^x: keys \['a'\] against \['b'\]"),
        ({"a": {"b": 1}}, {"a": {"b": 2}}, r"^x\['a'\]\['b'\]: 1 against 2"),
        ([1, 2], [1], "^x: 2 items against 1"),
        ((1, 2), (1, 3), r"^x\[1\]: 2 against 3"),
        (Opaque(1), Opaque(2), r"^x: Opaque\(1\) against Opaque\(2\)"),
        (Tensor([1.0]), Tensor([2.0]), "^x: "),
        ("a" * 100, "b" * 100, r"^x: 'a{36}\.\.\. against 'b{36}\.\.\.$"),
    ],
)
def test_difference_names_the_path_of_the_first_difference(left: Any, right: Any, where: str) -> None:
    found = difference(left, right, "x")
    assert found is not None
    assert re.search(where, found), found
