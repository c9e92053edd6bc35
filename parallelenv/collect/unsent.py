"""What collectors have made and not sent, counted where the caller finds it when they are dead."""

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
"""The path of memory, and what the system says that is there."""


class Unsent:
    """Samples that each collector has made and the caller has not received, in memory that they share.

    It travels as the way to that memory, so also past Ray. Who does not find it, because he is on another machine or
    the system knows no files without names, counts in memory of his own, which nobody reads.

    Args:
        samples: As below.
        way: To their memory, ``None`` if nobody shares it.
        fileno: Descriptor of their memory, where it was made. Owned by this object.

    Attributes:
        samples: ``(num_workers,)`` int64; `UNKNOWN_PROCESS` of those that do not share it.
    """

    def __init__(self, samples: Array, way: Way | None = None, fileno: int | None = None) -> None:
        self.samples = samples
        self._way = way
        self._fileno = fileno

    @classmethod
    def create(cls, num_workers: int) -> Unsent:
        """Return one in which nobody counts yet."""
        samples = np.full(num_workers, UNKNOWN, dtype=np.int64)
        if not hasattr(os, "memfd_create"):  # not Linux
            return cls(samples)
        name = f"parallelenv-{secrets.token_hex(8)}"  # elsewhere another file may have the same path
        with DeferSigint():  # else Ctrl-C in between would leave the descriptor open
            fileno = os.memfd_create(name)
            os.write(fileno, samples.tobytes())
            return cls(_mapped(fileno), (f"/proc/{os.getpid()}/fd/{fileno}", f"/memfd:{name} (deleted)"), fileno)

    @classmethod
    def find(cls, num_workers: int, way: Way | None) -> Unsent:
        """Return one that was created in another process."""
        try:
            if way is not None and os.readlink(way[0]) == way[1]:
                with open(way[0], "r+b", buffering=0) as file:
                    return cls(_mapped(file.fileno()), way)
        except OSError:  # it is not there, or not for us
            pass
        return cls(np.zeros(num_workers, dtype=np.int64))

    def close(self) -> None:
        """Let go of the memory. Harmless when repeated."""
        with DeferSigint():
            self.samples = self.samples.copy()
            fileno, self._fileno = self._fileno, None
            if fileno is not None:
                os.close(fileno)

    def __del__(self, is_finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        if not is_finalizing():  # then the globals of this module may be gone, and the descriptor goes with the process
            self.close()

    def __reduce__(self) -> tuple[Any, ...]:
        return Unsent.find, (len(self.samples), self._way)

    def take(self, rank: int) -> int | None:
        """Return the samples of a collector, 0 from now on; ``None`` if it does not share them."""
        number = int(self.samples[rank])
        if number == UNKNOWN:
            return None
        self.samples[rank] = 0
        return number


def _mapped(fileno: int) -> Array:
    return np.frombuffer(mmap.mmap(fileno, 0), dtype=np.int64)
