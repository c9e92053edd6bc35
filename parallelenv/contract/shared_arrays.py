"""Read-only arrays that all envs share, stored once."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import numpy as np

from parallelenv.contract.batch import Array
from parallelenv.contract.protocol import Backend
from parallelenv.errors import ArgumentError, WorkerStartError

NOTHING_SHARED: Mapping[str, Array] = MappingProxyType({})


def check_shared(shared: Any) -> Mapping[str, Array]:
    """Return the user's arrays, checked.

    Raises:
        ArgumentError: If they are not a dict of arrays of plain dtypes.
    """
    if shared is None:
        return NOTHING_SHARED
    if not isinstance(shared, Mapping):
        raise ArgumentError(f"shared is a {type(shared).__name__}. Give a dict of numpy arrays, {{'name': array}}.")
    for name, array in shared.items():
        if not isinstance(name, str):
            raise ArgumentError(f"shared has the name {name!r}, which is no str.")
        what = f"a {type(array).__name__}"
        if isinstance(array, np.ma.MaskedArray):
            raise ArgumentError(
                f"shared[{name!r}] is {what}, whose mask would be left out. Give array.data and array.mask as two "
                "arrays."
            )
        if not isinstance(array, np.ndarray) or array.dtype.hasobject:
            what = f"an array of {array.dtype}" if isinstance(array, np.ndarray) else what
            raise ArgumentError(
                f"shared[{name!r}] is {what}. What all workers read in one place is a numpy array of numbers, bools or "
                "fixed-length texts; anything else goes into the env fns."
            )
    return dict(shared)


def share(backend: Backend, arrays: Mapping[str, Array]) -> Mapping[str, Array]:
    """Return arrays as stored by a backend.

    Raises:
        ArgumentError: If the backend cannot share arrays.
        WorkerStartError: If there is not enough memory.
    """
    place = getattr(backend, "share", None)
    if place is None:
        raise ArgumentError(
            f"shared={list(arrays)} was given, but {type(backend).__name__} has no share(). Let the envs load what "
            "they need, or choose another mode."
        )
    try:
        return place(arrays)  # type: ignore[no-any-return]
    except MemoryError as error:
        nbytes = sum(array.nbytes for array in arrays.values())
        raise WorkerStartError(f"shared= needs {nbytes:,} bytes of memory, which cannot be had. Share less.") from error


def frozen(arrays: Mapping[str, Array]) -> dict[str, Array]:
    """Return read-only views of arrays."""
    views = {name: array.view() for name, array in arrays.items()}
    for view in views.values():
        view.flags.writeable = False
    return views


def copied(arrays: Mapping[str, Array]) -> dict[str, Array]:
    """Return copies of arrays, for hosts in this process, over `bytes`, so that they cannot be made writable."""
    return {name: np.ndarray(array.shape, array.dtype, array.tobytes()) for name, array in arrays.items()}
