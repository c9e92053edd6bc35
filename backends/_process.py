"""Processes of workers: starts, waits for and ends them so that no interrupt corrupts the bookkeeping.

For each kind of process, and for a channel, `is_alive` returns whether the process is running.
"""

from __future__ import annotations

import contextlib
import math
import multiprocessing
import os
import signal
import sys
import threading
import time
import weakref
from collections.abc import Iterator
from multiprocessing import connection, reduction, resource_tracker
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any

from parallelenv.contract.interrupts import DeferSigint

_REPORT_TIMEOUT = 1.0
"""Seconds that the fork server has to report the end of a process."""
_CHECK_INTERVAL = 0.05
"""Seconds between checks that a process has ended, if a child of its own keeps its sentinel open."""
_BLAS_TIMEOUT = "OPENBLAS_THREAD_TIMEOUT"
UNKNOWN = 255
"""Exit code of a process whose fork server can no longer report it."""
CLOSED_IN_CHILDREN: weakref.WeakSet[Connection] = weakref.WeakSet()
"""Connections that forked children close: these would hide the caller's death from the processes at the other ends."""
_STARTING = threading.Lock()
_HIDDEN: dict[str, object] = {}  # attributes of the main module that are removed while a process is being started


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
        """Return whether the process is running."""
        with DeferSigint():
            # Another part of this process may have reaped it; then `multiprocessing` never learns of its end.
            return self._process.is_alive() and process_exists(self.pid)

    def join(self, timeout: float | None = None) -> None:
        """Wait at most ``timeout`` seconds for the process to end; ``None``: no limit."""
        deadline = math.inf if timeout is None else time.monotonic() + timeout
        while self.is_alive() and (left := deadline - time.monotonic()) > 0:
            if connection.wait([self._process.sentinel], min(left, _CHECK_INTERVAL)):
                with DeferSigint():
                    self._process.join(_CHECK_INTERVAL)
                return
        if not self.is_alive():  # the fork server reports the end a moment later; only then can it be closed
            connection.wait([self._process.sentinel], _REPORT_TIMEOUT)

    def terminate(self) -> None:
        """Ask the process to end, if it has not ended."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGTERM)

    def kill(self) -> None:
        """End the process, if it has not ended."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)

    def last_words(self) -> str:
        """Return the known facts about the death of the process, apart from the exit code."""
        return ""

    def hand_over(self, connection: Connection, pid: int) -> object:
        """Give a different process the exit code over a connection to it. Return the object that keeps it alive.

        It is only for a process of a fork server, which must not be used here afterwards.
        """
        forked: Any = self._process
        reduction.send_handle(connection, forked.sentinel.fileno(), pid)
        forked.sentinel.close()
        return forked

    def close(self) -> None:
        """Release the resources of the process; raise `ValueError` if it is running."""
        with DeferSigint():
            self._process.close()


class ForkedProcess:
    """A process that a fork server has forked, with the part of `multiprocessing.Process` that a `WorkerProcess` needs.

    Args:
        pid: Its process id.
        status: Where its exit code comes from.
        lifeline: The process ends when this connection is closed; ``None`` if a different process owns the connection.
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
        """The exit code of the process, or the negative number of the signal that ended it.

        ``None`` while the process runs; `UNKNOWN` if the server has ended.
        """
        if self.sentinel.closed:
            raise ValueError("process object is closed")
        if self._exitcode is None and self.sentinel.poll(0):
            try:
                self._exitcode = self.sentinel.recv()
            except (EOFError, OSError):
                self._exitcode = UNKNOWN
        return self._exitcode

    def is_alive(self) -> bool:
        """Return whether the process is running, that is, whether its end was not reported."""
        return self.exitcode is None

    def join(self, timeout: float | None = None) -> None:
        """Wait at most ``timeout`` seconds for the process to end; ``None``: no limit."""
        if self.exitcode is None:
            connection.wait([self.sentinel], timeout)

    def close(self) -> None:
        """Release the resources of the process; raise `ValueError` if it is running."""
        if self.is_alive():
            raise ValueError(f"process {self.pid} is still running")
        self.sentinel.close()
        if self._lifeline is not None:
            self._lifeline.close()
        self._server = None


def process_exists(pid: int) -> bool:
    """Return whether such a process exists."""
    try:
        os.kill(pid, 0)
    except OSError:
        return False
    return True


def start_methods() -> list[str]:
    """Return the start methods of this system, the default one first."""
    methods = multiprocessing.get_all_start_methods()
    default = "forkserver" if "forkserver" in methods else "spawn"
    return [default, *(method for method in methods if method != default)]


@contextlib.contextmanager
def starting(method: str) -> Iterator[None]:
    """Start a process in the block, one at a time; an interrupt is delayed until its end."""
    with _STARTING, DeferSigint():
        if method != "fork":
            resource_tracker.ensure_running()  # its start would unblock the signal that is blocked below
        # Workers do not import the main module again, so it need not be importable or guarded: cloudpickle includes
        # the parts of it that they need.
        main = sys.modules["__main__"]
        _HIDDEN.update({name: main.__dict__[name] for name in ("__file__", "__spec__") if name in main.__dict__})
        main.__dict__.pop("__file__", None)
        main.__spec__ = None
        # OpenBLAS has threads as soon as `threadpoolctl` limits them, which spin for 100 ms before they sleep. During
        # that time a step of 16 CartPoles on 2 cores took 4 ms, a tick of the scheduler, instead of 0.14 ms.
        is_set_by_user = _BLAS_TIMEOUT in os.environ
        if not is_set_by_user:
            os.environ[_BLAS_TIMEOUT] = "4"  # the logarithm of a number of cycles; 4 is the minimum
        # Ctrl-C reaches the whole process group, and would end a process that does not ignore it yet.
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            yield
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
            _show_main()
            if not is_set_by_user:
                os.environ.pop(_BLAS_TIMEOUT, None)


def _show_main() -> None:
    sys.modules["__main__"].__dict__.update(_HIDDEN)
    _HIDDEN.clear()


def _reset_after_fork() -> None:
    """Let a forked child start processes itself, even if it was forked while its parent was starting one."""
    global _STARTING  # noqa: PLW0603 (the parent's lock, locked by a thread that is not here, cannot be had)
    _STARTING = threading.Lock()
    _show_main()
    for end in list(CLOSED_IN_CHILDREN):
        end.close()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_reset_after_fork)
