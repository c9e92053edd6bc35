"""Read-only arrays in memory that worker processes of this machine share."""

from __future__ import annotations

import mmap
from collections.abc import Iterator, Mapping
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

from parallelenv.backends.memory import SharedMemory
from parallelenv.batch import Array

_ALIGNMENT = 64
Form = tuple[str, tuple[int, ...], "np.dtype[Any]"]
"""Name, shape and dtype of an array."""


class SharedArrays(Mapping[str, Array]):
    """Arrays in shared memory, by name.

    Args:
        forms: Of each of them, in the order in which they lie there.
        memory: Where they lie.

    Attributes:
        forms: As given: all that another process needs beside the memory.
    """

    def __init__(self, forms: tuple[Form, ...], memory: SharedMemory) -> None:
        self.forms = forms
        self._memory = memory
        # Read-only also where the memory is not: so nobody can make the arrays writable, not in the caller either.
        # By way of bytes: `np.ndarray` would look through the memoryview to the memory.
        self._arrays = _arrays(forms, np.frombuffer(memoryview(memory.map).toreadonly(), np.uint8))

    @classmethod
    def place(cls, arrays: Mapping[str, Array]) -> SharedArrays:
        """Return copies of arrays in new memory, read-only.

        Raises:
            SharedMemoryError: If there is no room.
        """
        forms = tuple((name, array.shape, array.dtype) for name, array in arrays.items())
        memory = SharedMemory.create(_lay_out(forms)[1], "shared= needs", "Share less")
        for name, writable in _arrays(forms, memory.map).items():
            writable[...] = arrays[name]
        return cls(forms, memory)

    def send(self, connection: Connection, pid: int) -> None:
        """Give another process access, which knows the forms already, over a duplex pipe to it."""
        self._memory.send(connection, pid)

    @classmethod
    def receive(cls, connection: Connection, forms: tuple[Form, ...]) -> SharedArrays:
        """Return what another process sent with `send`; this one cannot write into it."""
        return cls(forms, SharedMemory.receive(connection, _lay_out(forms)[1], mmap.ACCESS_READ))

    def __getitem__(self, name: str) -> Array:
        return self._arrays[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._arrays)

    def __len__(self) -> int:
        return len(self._arrays)


def _arrays(forms: tuple[Form, ...], memory: Any) -> dict[str, Array]:
    """Return the arrays that lie in memory."""
    places, _ = _lay_out(forms)
    return {
        name: np.ndarray(shape, dtype, buffer=memory, offset=offset)
        for (name, shape, dtype), offset in zip(forms, places, strict=True)
    }


def _lay_out(forms: tuple[Form, ...]) -> tuple[list[int], int]:
    """Return where each array begins, and how many bytes they need: one at least, for memory cannot be empty."""
    places, end = [], 0
    for _, shape, dtype in forms:
        places.append(end)
        nbytes = dtype.itemsize * int(np.prod(shape, dtype=np.int64))
        end += -(-nbytes // _ALIGNMENT) * _ALIGNMENT
    return places, max(end, 1)
