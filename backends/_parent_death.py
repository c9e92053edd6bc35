"""How a process that was started by somebody else, as Ray does it, learns at once that the caller is gone.

The caller holds the one end of a pipe as long as it lives. A process of the same user on the same machine can open
the other end by the caller's id and the number of a descriptor, wherever it comes from.
"""

from __future__ import annotations

import contextlib
import os
import select
import sys
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from parallelenv.contract.interrupts import DeferSigint

_OPEN: weakref.WeakSet[ParentDeathPipe] = weakref.WeakSet()


class Address(NamedTuple):
    """Where a lifeline can be taken hold of.

    Attributes:
        pid: Process id of the caller.
        fileno: Number of the descriptor there.
        place: What tells one machine, one run of it, and one space of process ids there from all others.
        pipe: What the system calls the pipe.
    """

    pid: int
    fileno: int
    place: str
    pipe: str


class ParentDeathPipe:
    """The caller's end, for one other process: a signal at the loss of one reader would reach the others too."""

    def __init__(self) -> None:
        with DeferSigint():
            self._offered, self._held = os.pipe()
        self._pid = os.getpid()
        _OPEN.add(self)

    @classmethod
    def create(cls) -> ParentDeathPipe | None:
        """Return a new one; ``None`` on systems where the other end could not be opened."""
        return cls() if sys.platform == "linux" else None

    @property
    def address(self) -> Address:
        """Where the other end is, until `keep` was called."""
        return Address(self._pid, self._offered, _place(), os.readlink(f"/proc/self/fd/{self._offered}"))

    def keep(self, *, is_held: bool) -> None:
        """Take note of whether the other process has taken hold of it."""
        with DeferSigint():
            self._offered = _close(self._offered)
        if not is_held:
            self.cut()

    def cut_when_free(self, timeout: float) -> None:
        """Wait until the other process has gone, after ``timeout`` seconds no longer, and let go."""
        if self._held >= 0 and self._offered < 0:
            poll = select.poll()
            poll.register(self._held, 0)  # says only that nobody can read any more
            poll.poll(timeout * 1000)  # can be interrupted, and waited for once more
        self.cut()

    def cut(self) -> None:
        """Let the other process think that the caller is gone."""
        with DeferSigint():
            self._offered, self._held = _close(self._offered), _close(self._held)

    def __del__(self, is_finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        if not is_finalizing():  # then the globals of this module may be gone, and the descriptor goes with the process
            self.cut()


class CutError(Exception):
    """The caller is gone, or does not want this process any more."""


def take_hold(address: Address | None) -> int | None:
    """Return a descriptor that can be read when the caller is gone; ``None`` if the caller is out of reach.

    Raises:
        CutError: If it is not out of reach, and not there.
    """
    if address is None or _place() != address.place:  # another machine or container
        return None
    try:
        fileno = os.open(f"/proc/{address.pid}/fd/{address.fileno}", os.O_RDONLY | os.O_NONBLOCK)
    except PermissionError:  # another user's
        return None
    except OSError as error:
        raise CutError("the caller is gone") from error
    if os.readlink(f"/proc/self/fd/{fileno}") == address.pipe:
        return fileno
    os.close(fileno)
    raise CutError("the caller has let go")


def _place() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text() + os.readlink("/proc/self/ns/pid")


def _close(fileno: int) -> int:
    if fileno >= 0:
        with contextlib.suppress(OSError):
            os.close(fileno)
    return -1


def _cut_in_child() -> None:
    """Let a forked child not hold on to what is its parent's."""
    for lifeline in list(_OPEN):
        lifeline.cut()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_cut_in_child)
