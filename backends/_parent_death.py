"""How a process that the caller did not start itself, such as Ray's, learns at once that the caller has died.

The caller keeps one end of a pipe open as long as it lives. A process of the same user on the same machine can open the
other end by the caller's pid and a descriptor number, whichever process started it.
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
    """Address of the other end of a `ParentDeathPipe`.

    Attributes:
        pid: Process id of the caller.
        fileno: Descriptor number in the caller.
        place: Identifies the machine, its boot, and its namespace of process ids.
        pipe: The system's name of the pipe.
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
        """Address of the other end, until `keep` is called."""
        return Address(self._pid, self._offered, _place(), os.readlink(f"/proc/self/fd/{self._offered}"))

    def keep(self, *, is_held: bool) -> None:
        """Record whether the other process has opened it."""
        with DeferSigint():
            self._offered = _close(self._offered)
        if not is_held:
            self.cut()

    def cut_when_free(self, timeout: float) -> None:
        """Close the pipe when the other process has ended, or after ``timeout`` seconds."""
        if self._held >= 0 and self._offered < 0:
            poll = select.poll()
            poll.register(self._held, 0)  # reports only that there is no reader
            poll.poll(timeout * 1000)  # may be interrupted and repeated
        self.cut()

    def cut(self) -> None:
        """Close the pipe, so that the other process sees the caller as dead."""
        with DeferSigint():
            self._offered, self._held = _close(self._offered), _close(self._held)

    def __del__(self, is_finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        if not is_finalizing():  # at exit this module's globals may be gone, and the system closes the descriptor
            self.cut()


class CallerGoneError(Exception):
    """The caller has died, or no longer wants this process."""


def death_descriptor(address: Address | None) -> int | None:
    """Return a descriptor that becomes readable when the caller dies; ``None`` if that cannot be watched from here.

    Raises:
        CutError: If it could be watched, but has died or closed the pipe.
    """
    if address is None or _place() != address.place:  # another machine or container
        return None
    try:
        fileno = os.open(f"/proc/{address.pid}/fd/{address.fileno}", os.O_RDONLY | os.O_NONBLOCK)
    except PermissionError:  # another user's
        return None
    except OSError as error:
        raise CallerGoneError("the caller is gone") from error
    if os.readlink(f"/proc/self/fd/{fileno}") == address.pipe:
        return fileno
    os.close(fileno)
    raise CallerGoneError("the caller has let go")


def _place() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text() + os.readlink("/proc/self/ns/pid")


def _close(fileno: int) -> int:
    if fileno >= 0:
        with contextlib.suppress(OSError):
            os.close(fileno)
    return -1


def _cut_in_child() -> None:
    """Close the parent's pipes in a forked child."""
    for lifeline in list(_OPEN):
        lifeline.cut()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_cut_in_child)
