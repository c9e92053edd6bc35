"""Anonymous memory shared with worker processes.

It has no name, so nothing can be left behind: it is freed when the last process closes it.
"""

from __future__ import annotations

import errno
import math
import mmap
import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from multiprocessing import reduction
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np

from parallelenv.contract.batch import Array
from parallelenv.contract.interrupts import DeferSigint
from parallelenv.errors import WorkerStartError


class SharedMemory:
    """A zeroed memory map that is sent to other processes by its file descriptor.

    Args:
        fileno: Descriptor of an open unnamed file. Owned by this object.
        nbytes: Size in bytes.
        access: Whether this process may write, see `mmap.mmap`.
    """

    def __init__(self, fileno: int, nbytes: int, access: int = mmap.ACCESS_WRITE) -> None:
        self._fileno = fileno
        self.nbytes = nbytes
        self.map = mmap.mmap(fileno, nbytes, access=access)

    @classmethod
    def create(
        cls, nbytes: int, what: str = "The batch needs", way_out: str = "Use fewer envs or smaller states"
    ) -> SharedMemory:
        """Return new memory. ``what`` and ``way_out`` are for the error message.

        Raises:
            WorkerStartError: If there is not enough.
        """
        with DeferSigint():
            fileno = _open_nameless()
            try:
                _reserve(fileno, nbytes)
            except OSError as error:
                os.close(fileno)
                raise WorkerStartError(
                    f"{what} {nbytes:,} bytes of shared memory, which cannot be had: {error}. {way_out}, or "
                    "para_mode='thread'."
                ) from error
            return cls(fileno, nbytes)

    @classmethod
    def receive(cls, connection: Connection, nbytes: int, access: int = mmap.ACCESS_WRITE) -> SharedMemory:
        """Return memory that another process sent with `send`."""
        return cls(reduction.recv_handle(connection), nbytes, access)

    def send(self, connection: Connection, pid: int) -> None:
        """Give a process access, over a duplex pipe to it."""
        with DeferSigint():
            reduction.send_handle(connection, self._fileno, pid)

    def __del__(self, is_finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        if not is_finalizing():  # at exit this module's globals may be gone, and the system closes the descriptor
            with DeferSigint():
                os.close(self._fileno)


def _open_nameless() -> int:
    if hasattr(os, "memfd_create"):  # Linux: needs no file system, /dev/shm may be full
        return os.memfd_create("parallelenv", os.MFD_CLOEXEC)
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


def _available() -> float:
    """Return the available memory in bytes; infinity if the system does not report it."""
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    except OSError:  # not Linux
        return math.inf
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")), math.inf)


def _reserve(fileno: int, nbytes: int) -> None:
    """Set the file's size and, if possible, allocate its pages: a lack shows now, not as SIGBUS."""
    available = _available()
    if nbytes > available:  # if more is requested, the system may kill a process rather than return an error
        raise OSError(errno.ENOMEM, f"{available:,} bytes of memory are available")
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(fileno, 0, nbytes)
    else:
        os.ftruncate(fileno, nbytes)


_ALIGNMENT = 64
ArrayHeader = tuple[str, tuple[int, ...], "np.dtype[Any]"]
"""Name, shape and dtype of an array."""


class SharedArrays(Mapping[str, Array]):
    """Arrays in shared memory, by name.

    Args:
        forms: Header of each of them, in the order in memory.
        memory: The memory.

    Attributes:
        forms: The headers, which another process needs in addition to the memory.
    """

    def __init__(self, forms: tuple[ArrayHeader, ...], memory: SharedMemory) -> None:
        self.forms = forms
        self._memory = memory
        # Read-only even if the memory is writable, so that the arrays cannot be made writable, not even in the caller.
        # By way of bytes: `np.ndarray` would see the memory behind the memoryview.
        self._arrays = _arrays(forms, np.frombuffer(memoryview(memory.map).toreadonly(), np.uint8))

    @classmethod
    def place(cls, arrays: Mapping[str, Array]) -> SharedArrays:
        """Return copies of arrays in new memory, read-only.

        Raises:
            WorkerStartError: If there is not enough memory.
        """
        forms = tuple((name, array.shape, array.dtype) for name, array in arrays.items())
        memory = SharedMemory.create(_lay_out(forms)[1], "shared= needs", "Share less")
        for name, writable in _arrays(forms, memory.map).items():
            writable[...] = arrays[name]
        return cls(forms, memory)

    def send(self, connection: Connection, pid: int) -> None:
        """Give another process, which has the headers, access over a duplex pipe to it."""
        self._memory.send(connection, pid)

    @classmethod
    def receive(cls, connection: Connection, forms: tuple[ArrayHeader, ...]) -> SharedArrays:
        """Return the arrays that another process sent with `send`; this process cannot write to them."""
        return cls(forms, SharedMemory.receive(connection, _lay_out(forms)[1], mmap.ACCESS_READ))

    def __getitem__(self, name: str) -> Array:
        return self._arrays[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._arrays)

    def __len__(self) -> int:
        return len(self._arrays)


def _arrays(forms: tuple[ArrayHeader, ...], memory: Any) -> dict[str, Array]:
    """Return the arrays in memory."""
    places, _ = _lay_out(forms)
    return {
        name: np.ndarray(shape, dtype, buffer=memory, offset=offset)
        for (name, shape, dtype), offset in zip(forms, places, strict=True)
    }


def _lay_out(forms: tuple[ArrayHeader, ...]) -> tuple[list[int], int]:
    """Return the offset of each array, and the bytes needed: at least one, since memory cannot be empty."""
    places, end = [], 0
    for _, shape, dtype in forms:
        places.append(end)
        nbytes = dtype.itemsize * int(np.prod(shape, dtype=np.int64))
        end += -(-nbytes // _ALIGNMENT) * _ALIGNMENT
    return places, max(end, 1)
