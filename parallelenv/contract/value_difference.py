"""Whether two results are the same, bit for bit, and where they first differ."""

from __future__ import annotations

import contextlib
import pickle
import struct
from collections.abc import Iterable, Mapping
from typing import Any

import cloudpickle
import numpy as np


def difference(left: Any, right: Any, where: str = "") -> str | None:
    """Return where two nested values first differ, or ``None`` if they are the same bit for bit.

    Types, dtypes and shapes count. NaN equals the same NaN; 0.0 and -0.0 differ. Objects other than numbers, texts,
    arrays, and dicts, lists and tuples of them are the same if they are equal or pickle to the same bytes. ``where``
    names the value.
    """
    if type(left) is not type(right):
        return f"{where}: {_shown(left)} ({type(left).__name__}) against {_shown(right)} ({type(right).__name__})"
    keys: Iterable[object] = ()
    if isinstance(left, np.ndarray):
        if left.dtype != right.dtype or left.shape != right.shape:
            return f"{where}: {left.dtype}{left.shape} against {right.dtype}{right.shape}"
        if left.dtype != object and left.tobytes() == right.tobytes():
            return None
        keys = range(len(left)) if left.ndim else [()]
    elif isinstance(left, Mapping):
        if left.keys() != right.keys():
            return f"{where}: keys {sorted(map(str, left))} against {sorted(map(str, right))}"
        keys = left
    elif isinstance(left, (list, tuple)):
        if len(left) != len(right):
            return f"{where}: {len(left)} items against {len(right)}"
        keys = range(len(left))
    elif not _is_same(left, right):
        return f"{where}: {_shown(left)} against {_shown(right)}"
    found = (difference(left[key], right[key], where if key == () else f"{where}[{key!r}]") for key in keys)
    return next((text for text in found if text is not None), None)


def _is_same(left: Any, right: Any) -> bool:
    if isinstance(left, float):
        return struct.pack("d", left) == struct.pack("d", right)
    if isinstance(left, np.generic):
        return bool(left.dtype == right.dtype and left.tobytes() == right.tobytes())
    if hasattr(left, "__array__"):  # tensors of other libraries, whose == returns a tensor
        return difference(np.asarray(left), np.asarray(right)) is None
    with contextlib.suppress(Exception):  # an __eq__ that fails does not say that they are equal
        if left == right:
            return True
    with contextlib.suppress(pickle.PicklingError, TypeError, AttributeError):  # of objects equal only to themselves
        return bool(cloudpickle.dumps(left) == cloudpickle.dumps(right))
    return False


def _shown(value: object) -> str:
    text = " ".join(repr(value).split())
    return text if len(text) <= 40 else f"{text[:37]}..."
