"""Worker processes whose bookkeeping an interrupt cannot corrupt."""

from __future__ import annotations

import contextlib
import math
import os
import signal
import time
import weakref
from multiprocessing import connection, reduction
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any

from parallelenv.contract.interrupts import DeferSigint

_MOMENT = 1.0
"""Seconds for the fork server to report the end of a process."""
_GLANCE = 0.05
"""Seconds between checks whether a process has ended, if a child of its own keeps its sentinel open."""
UNKNOWN = 255
"""Exit code of a process whose fork server can no longer report it."""
CLOSED_IN_CHILDREN: weakref.WeakSet[Connection] = weakref.WeakSet()
"""Connections that forked children close: they would hide the caller's death from the processes at the other ends."""


class WorkerProcess:
    """A started `multiprocessing.Process`, or a similar object, with the methods that a channel needs.

    Ctrl-C between a system call and the record of its result made `multiprocessing` wait for a process that had ended,
    leak its descriptors, or raise an `AssertionError` at the next call. Waiting for the process can be interrupted.
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
            return self._process.is_alive() and process_exists(self.pid)

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
        """Ask it to end, if it has not ended."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGTERM)

    def kill(self) -> None:
        """End it, if it has not ended."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)

    def last_words(self) -> str:
        """Return what is known of its death beside its exit code."""
        return ""

    def hand_over(self, connection: Connection, pid: int) -> object:
        """Give another process its exit code, over a connection to that. Return what keeps it alive.

        Only for a process of a fork server, which is no longer used here.
        """
        forked: Any = self._process
        reduction.send_handle(connection, forked.sentinel.fileno(), pid)
        forked.sentinel.close()
        return forked

    def close(self) -> None:
        """Release its resources. Raises `ValueError` if it runs."""
        with DeferSigint():
            self._process.close()


class ForkedProcess:
    """A process that a fork server has forked, with the part of `multiprocessing.Process` that a `WorkerProcess` needs.

    Args:
        pid: Its process id.
        status: Where its exit code comes from.
        lifeline: When this is closed, it ends; ``None`` if another process has it.
        server: The fork server, which ends when nothing refers to it any more.
    """

    def __init__(self, pid: int, status: Connection, lifeline: Connection | None = None, server: object = None) -> None:
        self.pid = pid
        self.sentinel = status  # readable when the process has ended
        self._lifeline = lifeline
        self._server = server
        self._exitcode: int | None = None
        if lifeline is not None:
            CLOSED_IN_CHILDREN.add(lifeline)

    @property
    def exitcode(self) -> int | None:
        """Exit code, or the negative number of a signal; ``None`` while it runs; `UNKNOWN` if the server has ended."""
        if self.sentinel.closed:
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

    def close(self) -> None:
        """Release its resources. Raises `ValueError` if it runs."""
        if self.is_alive():
            raise ValueError(f"process {self.pid} is still running")
        self.sentinel.close()
        if self._lifeline is not None:
            self._lifeline.close()
        self._server = None


def _close_in_child() -> None:
    for end in list(CLOSED_IN_CHILDREN):
        end.close()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_close_in_child)


def process_exists(pid: int) -> bool:
    """Whether such a process exists."""
    try:
        os.kill(pid, 0)
    except OSError:
        return False
    return True
