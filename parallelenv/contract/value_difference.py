"""Whether two results are the same, bit for bit, and where they first differ."""

from __future__ import annotations

import pickle
import struct
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import cloudpickle
import numpy as np


def difference(left: Any, right: Any, where: str = "") -> str | None:
    """Return where two nested values first differ, or ``None`` if they are the same bit for bit.

    Types, dtypes and shapes count. NaN equals the same NaN; 0.0 and -0.0 differ.

    Args:
        left: Numbers, texts, arrays, and dicts, lists and tuples of them. Other objects are the same if they are equal
            or pickle to the same bytes.
        right: The value to compare with.
        where: Name of the value, for the result.
    """
    if type(left) is not type(right):
        return f"{where}: {_kind(left)} against {_kind(right)}"
    if isinstance(left, np.ndarray):
        return _difference_of_arrays(left, right, where)
    if isinstance(left, Mapping):
        return _difference_of_mappings(left, right, where)
    if isinstance(left, (list, tuple)):
        return _difference_of_sequences(left, right, where)
    if _is_same(left, right):
        return None
    return f"{where}: {_shown(left)} against {_shown(right)}"


def _difference_of_arrays(left: Any, right: Any, where: str) -> str | None:
    if left.dtype != right.dtype or left.shape != right.shape:
        return f"{where}: {left.dtype}{left.shape} against {right.dtype}{right.shape}"
    if left.dtype == object:
        return _first(
            difference(left[index], right[index], f"{where}{list(index)}") for index in np.ndindex(left.shape)
        )
    if left.tobytes() == right.tobytes():
        return None
    if left.ndim == 0:
        return f"{where}: {_shown(left[()])} against {_shown(right[()])}"
    return _first(difference(left[row], right[row], f"{where}[{row}]") for row in range(len(left)))


def _difference_of_mappings(left: Mapping[Any, Any], right: Mapping[Any, Any], where: str) -> str | None:
    if left.keys() != right.keys():
        return f"{where}: keys {sorted(map(str, left))} against {sorted(map(str, right))}"
    return _first(difference(left[key], right[key], f"{where}[{key!r}]") for key in left)


def _difference_of_sequences(left: Sequence[Any], right: Sequence[Any], where: str) -> str | None:
    if len(left) != len(right):
        return f"{where}: {len(left)} items against {len(right)}"
    return _first(difference(left[index], right[index], f"{where}[{index}]") for index in range(len(left)))


def _first(found: Iterable[str | None]) -> str | None:
    return next((text for text in found if text is not None), None)


def _is_same(left: Any, right: Any) -> bool:
    if isinstance(left, float):
        return struct.pack("d", left) == struct.pack("d", right)
    if isinstance(left, np.generic):
        return bool(left.dtype == right.dtype and left.tobytes() == right.tobytes())
    if hasattr(left, "__array__"):  # tensors of other libraries, whose == returns a tensor
        return difference(np.asarray(left), np.asarray(right)) is None
    return _is_equal(left, right) or _pickles_alike(left, right)


def _is_equal(left: Any, right: Any) -> bool:
    try:
        return bool(left == right)
    except Exception:  # noqa: BLE001 (an __eq__ that fails has not said that they are equal)
        return False


def _pickles_alike(left: Any, right: Any) -> bool:
    """Compare the contents of objects whose equality is identity."""
    try:
        return bool(cloudpickle.dumps(left) == cloudpickle.dumps(right))
    except (pickle.PicklingError, TypeError, AttributeError):
        return False


def _kind(value: Any) -> str:
    return f"{_shown(value)} ({type(value).__name__})"


def _shown(value: Any) -> str:
    text = " ".join(repr(value).split())
    return text if len(text) <= 40 else f"{text[:37]}..."
