"""Worker processes whose bookkeeping an interrupt cannot corrupt."""

from __future__ import annotations

import contextlib
import math
import os
import signal
import time
import weakref
from multiprocessing import connection
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any

from parallelenv.contract.interrupts import DeferSigint

_IS_POSIX = os.name == "posix"
_MOMENT = 1.0
"""Seconds for the fork server to report the end of a process."""
_GLANCE = 0.05
"""Seconds between checks whether a process has ended, if a child of its own keeps its sentinel open."""
UNKNOWN = 255
"""Exit code of a process whose fork server can no longer report it."""
_FORKED: weakref.WeakSet[ForkedProcess] = weakref.WeakSet()


class WorkerProcess:
    """A started `multiprocessing.Process`, or a similar object, with the methods that a channel needs.

    Ctrl-C between a system call and the record of its result made `multiprocessing` wait for a process that had ended,
    leak its descriptors, or raise an `AssertionError` at the next call. Waiting for the process can be interrupted.

    Args:
        process: The process.
    """

    def __init__(self, process: BaseProcess | ForkedProcess) -> None:
        self._process = process
        self.pid = process.pid or 0

    @property
    def exitcode(self) -> int | None:
        """Exit code, or the negative number of a signal; ``None`` while it runs, or if another waiter received it."""
        with DeferSigint():
            return self._process.exitcode

    def is_alive(self) -> bool:
        """Whether it has not ended."""
        with DeferSigint():
            # Another part of this process may have reaped it; then `multiprocessing` never learns of its end.
            return self._process.is_alive() and (not _IS_POSIX or process_exists(self.pid))

    def join(self, timeout: float | None = None) -> None:
        """Wait for its end, at most ``timeout`` seconds; ``None``: no limit."""
        deadline = math.inf if timeout is None else time.monotonic() + timeout
        while self.is_alive() and (left := deadline - time.monotonic()) > 0:
            if connection.wait([self._process.sentinel], min(left, _GLANCE)):
                with DeferSigint():
                    self._process.join(_GLANCE)
                return
        if not self.is_alive():  # the fork server reports the end a moment later; only then can it be closed
            connection.wait([self._process.sentinel], _MOMENT)

    def terminate(self) -> None:
        """Ask it to end."""
        with DeferSigint():
            self._process.terminate()

    def close(self) -> None:
        """Release its resources.

        Raises:
            ValueError: If it runs.
        """
        with DeferSigint():
            self._process.close()


class ForkedProcess:
    """A process that a fork server has forked, with the part of `multiprocessing.Process` that a `WorkerProcess` needs.

    Args:
        pid: Its id.
        status: The connection that delivers its exit code.
        lifeline: The process ends when this is closed.
        server: The fork server, which reports the exit code; it ends when nothing refers to it any more.

    Attributes:
        sentinel: Becomes readable when the process has ended.
        lifeline: See the arguments.
    """

    def __init__(self, pid: int, status: Connection, lifeline: Connection, server: Any) -> None:
        self.pid = pid
        self.sentinel = status
        self.lifeline = lifeline
        self._server = server
        self._exitcode: int | None = None
        _FORKED.add(self)

    @property
    def exitcode(self) -> int | None:
        """Exit code, or the negative number of a signal; ``None`` while it runs; `UNKNOWN` if the server has ended."""
        if self.lifeline.closed:
            raise ValueError("process object is closed")
        if self._exitcode is None and self.sentinel.poll(0):
            try:
                self._exitcode = self.sentinel.recv()
            except (EOFError, OSError):
                self._exitcode = UNKNOWN
        return self._exitcode

    def is_alive(self) -> bool:
        """Whether its end has not been reported."""
        return self.exitcode is None

    def join(self, timeout: float | None = None) -> None:
        """Wait for its end, at most ``timeout`` seconds; ``None``: no limit."""
        if self.exitcode is None:
            connection.wait([self.sentinel], timeout)

    def terminate(self) -> None:
        """Ask it to end."""
        if self.is_alive():
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGTERM)

    def close(self) -> None:
        """Release its resources.

        Raises:
            ValueError: If it runs.
        """
        if self.is_alive():
            raise ValueError(f"process {self.pid} is still running")
        self.sentinel.close()
        self.lifeline.close()
        self._server = None


def _cut_in_child() -> None:
    """Close the parent's lifelines in a forked child, so that it does not keep the processes alive."""
    for forked in list(_FORKED):
        forked.lifeline.close()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_cut_in_child)


def process_exists(pid: int) -> bool:
    """Whether such a process exists. ``False`` on Windows, where the check would send it Ctrl-C."""
    if not _IS_POSIX:
        return False
    try:
        os.kill(pid, 0)
    except OSError:
        return False
    return True
