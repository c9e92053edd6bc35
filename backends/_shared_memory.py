"""Anonymous memory shared with worker processes.

It has no name, so nothing can be left behind: it is freed when the last process closes it.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import mmap
import os
import sys
import tempfile
from collections.abc import Callable, Mapping
from multiprocessing import reduction
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NamedTuple

import numpy as np

from parallelenv.contract.batch import Array, DType, Layout
from parallelenv.contract.interrupts import DeferSigint
from parallelenv.errors import WorkerStartError


class SharedMemory:
    """A zeroed memory map that is sent to other processes by its file descriptor, which this object owns."""

    def __init__(self, fileno: int, nbytes: int, access: int = mmap.ACCESS_WRITE) -> None:
        self._fileno = fileno
        self.map = mmap.mmap(fileno, nbytes, access=access)

    @classmethod
    def create(
        cls, nbytes: int, what: str = "The batch needs", way_out: str = "Use fewer envs or smaller states"
    ) -> SharedMemory:
        """Return new memory; raise `WorkerStartError`, with ``what`` and ``way_out``, if there is not enough."""
        with DeferSigint():
            fileno = -1
            try:
                if hasattr(os, "memfd_create"):  # Linux: needs no file system, /dev/shm may be full
                    fileno = os.memfd_create("parallelenv", os.MFD_CLOEXEC)
                else:
                    with tempfile.TemporaryFile() as file:
                        fileno = os.dup(file.fileno())
                # Allocate the pages, if possible, so that a lack is an error now, not SIGBUS later.
                lines: list[str] = []
                with contextlib.suppress(OSError):  # not Linux, or no descriptor is left to read it
                    lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
                available = [int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")]
                if available and nbytes > available[0]:  # the system may then kill a process, not return an error
                    raise OSError(errno.ENOMEM, f"{available[0]:,} bytes of memory are available")
                if hasattr(os, "posix_fallocate"):
                    os.posix_fallocate(fileno, 0, nbytes)
                else:
                    os.ftruncate(fileno, nbytes)
                owned, fileno = fileno, -1
                return cls(owned, nbytes)  # this closes it, even if it cannot be mapped
            except OSError as error:
                if fileno >= 0:
                    os.close(fileno)
                way = f"{way_out}, or para_mode='thread'."
                if error.errno == errno.EMFILE:
                    way = "Raise the limit on open files (ulimit -n)."
                text = f"{what} {nbytes:,} bytes of shared memory, which are not available: {error}. {way}"
                raise WorkerStartError(text) from error

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


class BatchAccess(NamedTuple):
    """Announces to a worker that `SharedMemory.send` follows, with the memory of a batch of this layout."""

    layout: Layout


_ALIGNMENT = 64
ArrayHeaders = tuple[tuple[str, tuple[int, ...], DType], ...]
"""Name, shape and dtype of each array, in the order in memory."""


class SharedArrays(dict[str, Array]):
    """Read-only arrays in shared memory, by name.

    Attributes:
        headers: Their headers, which another process needs in addition to the memory.
    """

    def __init__(self, headers: ArrayHeaders, memory: SharedMemory) -> None:
        self.headers = headers
        self._memory = memory
        # Read-only even if the memory is writable, so that the arrays cannot be made writable, not even in the caller.
        # By way of bytes: `np.ndarray` would see the memory behind the memoryview.
        super().__init__(_arrays(headers, np.frombuffer(memoryview(memory.map).toreadonly(), np.uint8)))

    @classmethod
    def place(cls, arrays: Mapping[str, Array]) -> SharedArrays:
        """Return copies of arrays in new memory; raise `WorkerStartError` if there is not enough memory."""
        headers = tuple((name, array.shape, array.dtype) for name, array in arrays.items())
        memory = SharedMemory.create(_offsets(headers)[-1], "shared= needs", "Share less")
        for name, writable in _arrays(headers, memory.map).items():
            writable[...] = arrays[name]
        return cls(headers, memory)

    def send(self, connection: Connection, pid: int) -> None:
        """Give another process, which has the headers, access over a duplex pipe to it."""
        self._memory.send(connection, pid)

    @classmethod
    def receive(cls, connection: Connection, headers: ArrayHeaders) -> SharedArrays:
        """Return the arrays that another process sent with `send`; this process cannot write to them."""
        return cls(headers, SharedMemory.receive(connection, _offsets(headers)[-1], mmap.ACCESS_READ))


def _arrays(headers: ArrayHeaders, memory: mmap.mmap | Array) -> dict[str, Array]:
    return {
        name: np.ndarray(shape, dtype, buffer=memory, offset=offset)
        for (name, shape, dtype), offset in zip(headers, _offsets(headers), strict=False)
    }


def _offsets(headers: ArrayHeaders) -> list[int]:
    """Return the offset of each array, and the bytes needed."""
    sizes = (dtype.itemsize * int(np.prod(shape, dtype=np.int64)) for _, shape, dtype in headers)
    # At least one byte in all, since memory cannot be empty.
    return list(
        itertools.accumulate((max(_ALIGNMENT, -(-size // _ALIGNMENT) * _ALIGNMENT) for size in sizes), initial=0)
    )
