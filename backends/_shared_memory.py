"""Anonymous memory that the caller shares with worker processes.

The memory has no name in a file system, so nothing is left behind: the system frees it when the last process closes it.
"""

from __future__ import annotations

import errno
import itertools
import mmap
import os
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np

from parallelenv.contract.batch import Array, DType, Layout, aligned
from parallelenv.contract.cpu_cores import cgroup_files
from parallelenv.contract.interrupts import DeferSignals, Ignore
from parallelenv.errors import WorkerStartError

_CGROUP_FILES = (
    ("memory.max", "memory.current", ""),
    ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_"),
)
"""The files with the limit and the use of memory, and the prefix of statistics, for version 2 and version 1."""


def available_memory(root: Path = Path("/")) -> int | None:
    """Return how many bytes of memory new processes and arrays can use; ``None`` if the system does not say.

    ``root`` is the parent folder of ``proc`` and ``sys``; tests pass a temporary folder.
    """
    found: list[int] = []
    with Ignore(OSError):  # not Linux, or no descriptor is available
        lines = (root / "proc/meminfo").read_text(encoding="ascii").splitlines()
        found += [int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")]
    for limit, usage, prefix in _CGROUP_FILES:
        for most, used, statistics in cgroup_files("memory", (limit, usage, "memory.stat"), root):
            if most.strip().isdigit() and used.strip().isdigit():  # not "max"
                # The system takes back the memory of cached files before it ends a process because of the limit.
                fields = dict(line.partition(" ")[::2] for line in statistics.splitlines())
                cached = sum(int(fields.get(f"{prefix}{kind}_file", 0)) for kind in ("active", "inactive"))
                found.append(int(most) - int(used) + cached)
    return min(found, default=None)


class SharedMemory:
    """Memory that other processes can map once they receive its file descriptor. New memory is filled with zeros.

    Args:
        fileno: The file descriptor, which is closed when this object is deleted.
    """

    def __init__(self, fileno: int, nbytes: int, access: int = mmap.ACCESS_WRITE) -> None:
        self.fileno = fileno
        self.map = mmap.mmap(fileno, nbytes, access=access)

    @classmethod
    def create(
        cls, nbytes: int, what: str = "The batch needs", way_out: str = "Use fewer envs or smaller states"
    ) -> SharedMemory:
        with DeferSignals():
            fileno = -1
            try:
                if hasattr(os, "memfd_create"):  # on Linux, without a file system, because /dev/shm may be full
                    fileno = os.memfd_create("parallelenv", os.MFD_CLOEXEC)
                else:
                    with tempfile.TemporaryFile() as file:
                        fileno = os.dup(file.fileno())
                # Allocate the pages now if possible, so that a lack of memory raises an error here. Otherwise, a later
                # access would end the process with SIGBUS.
                available = available_memory()
                if available is not None and nbytes > available:  # the system may kill a process instead
                    raise OSError(errno.ENOMEM, f"{available:,} bytes of memory are available")
                if hasattr(os, "posix_fallocate"):
                    os.posix_fallocate(fileno, 0, nbytes)
                else:
                    os.ftruncate(fileno, nbytes)
                owned, fileno = fileno, -1
                return cls(owned, nbytes)  # the new object closes it, even if it cannot be mapped
            except OSError as error:
                if fileno >= 0:
                    os.close(fileno)
                way = f"{way_out}, or para_mode='thread'."
                if error.errno == errno.EMFILE:
                    way = "Raise the limit on open files (ulimit -n)."
                elif error.errno == errno.EFBIG:  # shared memory counts as a file
                    way = "Raise the limit on the size of files (ulimit -f)."
                text = f"{what} {nbytes:,} bytes of shared memory, which are not available: {error}. {way}"
                raise WorkerStartError(text) from error

    def __del__(self, is_finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        # When the interpreter exits, the system closes the descriptor, and globals of this module may be missing.
        if not is_finalizing():
            with DeferSignals():
                fileno, self.fileno = self.fileno, -1
                os.close(fileno)


class BatchAccess(NamedTuple):
    """Tells a worker that the descriptor of the memory of a batch with this layout follows."""

    layout: Layout


ArrayHeaders = tuple[tuple[str, tuple[int, ...], DType], ...]
"""Name, shape and dtype of each array, in the order of the arrays in memory."""


class SharedArrays(dict[str, Array]):
    """A dict of read-only arrays in shared memory, by name."""

    def __init__(self, headers: ArrayHeaders, memory: SharedMemory) -> None:
        self.headers = headers
        self.memory = memory
        # Users must not be able to make the arrays writable, even if this process can write to the memory. Therefore,
        # the arrays are made from an array of bytes: `np.ndarray` would find the writable memory behind a memoryview.
        super().__init__(_arrays(headers, np.frombuffer(memoryview(memory.map).toreadonly(), np.uint8)))

    @classmethod
    def place(cls, arrays: Mapping[str, Array]) -> SharedArrays:
        headers = tuple((name, array.shape, array.dtype) for name, array in arrays.items())
        memory = SharedMemory.create(_offsets(headers)[-1], "shared= needs", "Share less")
        for name, writable in _arrays(headers, memory.map).items():
            writable[...] = arrays[name]
        return cls(headers, memory)

    @classmethod
    def open(cls, fileno: int, headers: ArrayHeaders) -> SharedArrays:
        """Return the arrays in the memory of another process. This process cannot write to them."""
        return cls(headers, SharedMemory(fileno, _offsets(headers)[-1], mmap.ACCESS_READ))


def _arrays(headers: ArrayHeaders, memory: mmap.mmap | Array) -> dict[str, Array]:
    return {
        name: np.ndarray(shape, dtype, buffer=memory, offset=offset)
        for (name, shape, dtype), offset in zip(headers, _offsets(headers), strict=False)
    }


def _offsets(headers: ArrayHeaders) -> list[int]:
    """Return the offset of each array in bytes, followed by the total size of the memory."""
    sizes = (dtype.itemsize * int(np.prod(shape, dtype=np.int64)) for _, shape, dtype in headers)
    # Even an empty array gets some bytes, because shared memory cannot be empty.
    return list(itertools.accumulate((aligned(max(1, size)) for size in sizes), initial=0))
