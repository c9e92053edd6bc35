"""Counts of samples that collectors made and did not send, readable by the caller after their death."""

from __future__ import annotations

import mmap
import os
import secrets
import sys
from collections.abc import Callable
from typing import Any

import numpy as np

from parallelenv.contract.batch import Array
from parallelenv.contract.interrupts import DeferSigint

UNKNOWN = -1
Way = tuple[str, str]
"""Path of the memory, and the target of that link."""


class UnsentSamples:
    """Samples that each collector has made and the caller has not received, in shared memory.

    It is pickled as the path of that memory, so Ray can carry it. A process that does not find it, on another machine
    or a system without `os.memfd_create`, counts in memory of its own, which is never read.

    Args:
        samples: See the attribute.
        way: Path of the memory; ``None`` if it is not shared.
        fileno: File descriptor of the memory, in the process that made it. Owned by this object.

    Attributes:
        samples: ``(num_workers,)`` int64; `UNKNOWN` for collectors that do not share it.
    """

    def __init__(self, samples: Array, way: Way | None = None, fileno: int | None = None) -> None:
        self.samples = samples
        self._way = way
        self._fileno = fileno

    @classmethod
    def create(cls, num_workers: int) -> UnsentSamples:
        """Return one without any counts."""
        samples = np.full(num_workers, UNKNOWN, dtype=np.int64)
        if not hasattr(os, "memfd_create"):  # not Linux
            return cls(samples)
        name = f"parallelenv-{secrets.token_hex(8)}"  # unique: elsewhere another file may have the same path
        with DeferSigint():  # a Ctrl-C in between would leak the descriptor
            fileno = os.memfd_create(name)
            os.write(fileno, samples.tobytes())
            return cls(_mapped(fileno), (f"/proc/{os.getpid()}/fd/{fileno}", f"/memfd:{name} (deleted)"), fileno)

    @classmethod
    def find(cls, num_workers: int, way: Way | None) -> UnsentSamples:
        """Return one created in another process."""
        try:
            if way is not None and os.readlink(way[0]) == way[1]:
                with open(way[0], "r+b", buffering=0) as file:
                    return cls(_mapped(file.fileno()), way)
        except OSError:  # it does not exist, or is not accessible
            pass
        return cls(np.zeros(num_workers, dtype=np.int64))

    def close(self) -> None:
        """Release the memory. Can be called more than once."""
        with DeferSigint():
            self.samples = self.samples.copy()
            fileno, self._fileno = self._fileno, None
            if fileno is not None:
                os.close(fileno)

    def __del__(self, is_finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        if not is_finalizing():  # else this module's globals may be gone; the descriptor is closed with the process
            self.close()

    def __reduce__(self) -> tuple[Any, ...]:
        return UnsentSamples.find, (len(self.samples), self._way)

    def take(self, rank: int) -> int | None:
        """Return a collector's count and set it to 0; ``None`` if the collector does not share it."""
        number = int(self.samples[rank])
        if number == UNKNOWN:
            return None
        self.samples[rank] = 0
        return number


def _mapped(fileno: int) -> Array:
    return np.frombuffer(mmap.mmap(fileno, 0), dtype=np.int64)
