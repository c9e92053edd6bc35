"""Anonymous memory shared with worker processes.

No name, so nothing can be left behind: the last process that has it open frees it.
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
from parallelenv.errors import ParallelEnvError


class SharedMemoryError(ParallelEnvError, OSError):
    """There is no room for the batch in shared memory."""


class SharedMemory:
    """A zeroed memory map that travels to other processes by its file descriptor.

    Args:
        fileno: Descriptor of an open file without a name. Owned by this object.
        nbytes: Size.
        access: As of `mmap.mmap`: whether this process may write.
    """

    def __init__(self, fileno: int, nbytes: int, access: int = mmap.ACCESS_WRITE) -> None:
        self._fileno = fileno
        self.nbytes = nbytes
        self.map = mmap.mmap(fileno, nbytes, access=access)

    @classmethod
    def create(
        cls, nbytes: int, what: str = "The batch needs", way_out: str = "Use fewer envs or smaller states"
    ) -> SharedMemory:
        """Return new memory. What it is for, and the way out where there is none, are for the message.

        Raises:
            SharedMemoryError: If there is no room for it.
        """
        with DeferSigint():
            fileno = _open_nameless()
            try:
                _reserve(fileno, nbytes)
            except OSError as error:
                os.close(fileno)
                raise SharedMemoryError(
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
        if not is_finalizing():  # then the globals of this module may be gone, and the descriptor goes with the process
            with DeferSigint():
                os.close(self._fileno)


def _open_nameless() -> int:
    if hasattr(os, "memfd_create"):  # Linux: needs no file system, /dev/shm may be full
        return os.memfd_create("parallelenv", os.MFD_CLOEXEC)
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


def _available() -> float:
    """Return how many bytes of memory the system can give; infinitely many where it does not say."""
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    except OSError:  # not Linux
        return math.inf
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")), math.inf)


def _reserve(fileno: int, nbytes: int) -> None:
    """Give the file its size, and its pages where possible: a lack shows now, not as SIGBUS."""
    available = _available()
    if nbytes > available:  # to be asked for more, the system would rather kill a process than say no
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
        forms: Of each of them, in the order in which they lie there.
        memory: Where they lie.

    Attributes:
        forms: As given: all that another process needs beside the memory.
    """

    def __init__(self, forms: tuple[ArrayHeader, ...], memory: SharedMemory) -> None:
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
    def receive(cls, connection: Connection, forms: tuple[ArrayHeader, ...]) -> SharedArrays:
        """Return what another process sent with `send`; this one cannot write into it."""
        return cls(forms, SharedMemory.receive(connection, _lay_out(forms)[1], mmap.ACCESS_READ))

    def __getitem__(self, name: str) -> Array:
        return self._arrays[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._arrays)

    def __len__(self) -> int:
        return len(self._arrays)


def _arrays(forms: tuple[ArrayHeader, ...], memory: Any) -> dict[str, Array]:
    """Return the arrays that lie in memory."""
    places, _ = _lay_out(forms)
    return {
        name: np.ndarray(shape, dtype, buffer=memory, offset=offset)
        for (name, shape, dtype), offset in zip(forms, places, strict=True)
    }


def _lay_out(forms: tuple[ArrayHeader, ...]) -> tuple[list[int], int]:
    """Return where each array begins, and how many bytes they need: one at least, for memory cannot be empty."""
    places, end = [], 0
    for _, shape, dtype in forms:
        places.append(end)
        nbytes = dtype.itemsize * int(np.prod(shape, dtype=np.int64))
        end += -(-nbytes // _ALIGNMENT) * _ALIGNMENT
    return places, max(end, 1)
