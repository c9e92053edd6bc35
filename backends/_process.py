"""Worker processes: the caller starts them, waits for them and ends them."""

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
from collections.abc import Callable, Iterator
from multiprocessing import connection, reduction, resource_tracker
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any

from parallelenv.contract.interrupts import DeferSignals, Ignore

_REPORT_TIMEOUT = 1.0
"""Seconds to wait for the fork server's report that a process has ended."""
_CHECK_INTERVAL = 0.05
"""Seconds between checks whether a process has ended, because its child processes may keep its sentinel open."""
_BLAS_TIMEOUT = "OPENBLAS_THREAD_TIMEOUT"
UNKNOWN = 256
"""Value for the exit code of a process whose fork server has ended, and so cannot report the exit code.

No process can have this exit code.
"""
CLOSED_IN_CHILDREN: weakref.WeakSet[Connection] = weakref.WeakSet()
"""Connections that forked children of the caller close.

If a child kept its copy open, the process at the other end would not notice that the caller has died.
"""
_STARTING = threading.Lock()
_HIDDEN: dict[str, object] = {}  # attributes of the main module that are removed while a process is being started


class WorkerProcess:
    """A started worker process, with methods that are safe if Ctrl-C interrupts them.

    If Ctrl-C comes between a system call and the storing of its result, `multiprocessing` may wait for a process that
    has already ended, leak the descriptors of the process, or raise an `AssertionError` at the next call. The methods
    of this class delay Ctrl-C at these places, but Ctrl-C can interrupt `join` while it waits.

    Args:
        lifeline: A connection that is closed together with this object; the worker ends when the caller dies and the
            system closes it. ``None`` if ``process`` has such a connection itself.
    """

    def __init__(
        self,
        process: BaseProcess | ForkedProcess,
        last_words: Callable[[], str] = str,
        lifeline: Connection | None = None,
    ) -> None:
        self._lifeline = lifeline
        self._process = process
        self.pid = process.pid or 0
        self.last_words = last_words  # returns what is known about the death besides the exit code; it may be empty

    def await_exitcode(self) -> int | None:
        """Return the exit code of a process that has ended.

        The result is ``None`` if nothing reports the exit code. For example, a fork server reports it late while the
        server imports a module.
        """
        connection.wait([self._process.sentinel], _REPORT_TIMEOUT)
        with DeferSignals():
            code = self._process.exitcode
        return None if code == UNKNOWN else code

    def is_alive(self) -> bool:
        with DeferSignals():
            # Other code in this process may already have waited for the worker process. `multiprocessing` then never
            # learns that the worker process has ended. After a fork server has ended, nothing reports the ends of its
            # workers.
            may_run = self._process.is_alive() or self._process.exitcode == UNKNOWN
            return may_run and process_exists(self.pid)

    def join(self, timeout: float = math.inf) -> None:
        deadline = time.monotonic() + timeout
        while self.is_alive() and (left := deadline - time.monotonic()) > 0:
            with Ignore(OSError):  # the process does not exist, or this system has no /proc
                fields = _status(self.pid)
                if fields[_STATE] == b"Z" and int(fields[_PARENT]) != os.getpid():
                    return  # it has ended, but its fork server, which is importing a module, has not noticed yet
            if connection.wait([self._process.sentinel], min(left, _CHECK_INTERVAL)):
                with DeferSignals():
                    self._process.join(_CHECK_INTERVAL)
                return

    def terminate(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGTERM)

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)

    def hand_over(self, connection: Connection, pid: int) -> object:
        """Let another process receive the exit code; return an object that keeps the worker alive.

        The worker ends when nothing refers to that object any more. Only workers of a fork server can be handed over.
        Afterwards, this `WorkerProcess` must not be used any more.
        """
        forked: Any = self._process
        reduction.send_handle(connection, forked.sentinel.fileno(), pid)
        forked.sentinel.close()
        return forked

    def close(self) -> None:
        with DeferSignals():
            if self._lifeline is not None:
                self._lifeline.close()
            self._process.close()


class ForkedProcess:
    """A process that a fork server has forked.

    This class has those methods of `multiprocessing.Process` that `WorkerProcess` calls.

    Args:
        lifeline: A connection that ends the process when it is closed; ``None`` if another process owns it.
        server: The fork server. This object keeps a reference to it, because the server ends when nothing refers to it.
    """

    def __init__(self, pid: int, status: Connection, lifeline: Connection | None = None, server: object = None) -> None:
        self.pid = pid
        self.sentinel = status  # becomes readable when the process has ended
        self._lifeline = lifeline
        self._server = server
        self._exitcode: int | None = None
        if lifeline is not None:
            CLOSED_IN_CHILDREN.add(lifeline)

    @property
    def exitcode(self) -> int | None:
        """``None`` while the process runs; `UNKNOWN` if the fork server has ended without reporting the exit code."""
        if self.sentinel.closed:
            raise ValueError("process object is closed")
        if self._exitcode is None and self.sentinel.poll(0):
            try:
                self._exitcode = self.sentinel.recv()
            except (EOFError, OSError):
                self._exitcode = UNKNOWN
        return self._exitcode

    def is_alive(self) -> bool:
        """The process is assumed to be running until its end is reported or the fork server ends."""
        return self.exitcode is None

    def join(self, timeout: float | None = None) -> None:
        if self.exitcode is None:
            connection.wait([self.sentinel], timeout)

    def close(self) -> None:
        self.sentinel.close()
        if self._lifeline is not None:
            self._lifeline.close()
        self._server = None


def process_exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except OSError:
        return False
    return True


def start_methods() -> list[str]:
    """Return the start methods of `multiprocessing` on this system, with this package's default first."""
    methods = multiprocessing.get_all_start_methods()
    default = "forkserver" if "forkserver" in methods else "spawn"
    return [default, *(method for method in methods if method != default)]


@contextlib.contextmanager
def starting(method: str) -> Iterator[None]:
    """Prepare the caller for the start of a process in the ``with`` block.

    Only one thread at a time can be in such a block, and Ctrl-C is delayed until the block ends.
    """
    with _STARTING, DeferSignals():
        if method != "fork":
            resource_tracker.ensure_running()  # if it started later, it would unblock the signal that is blocked below
        # Hide the main module from workers, so that they do not import it and it needs no guard. Pickles made by
        # cloudpickle include the parts of the main module that workers need.
        main = sys.modules["__main__"]
        _HIDDEN.update({name: main.__dict__[name] for name in ("__file__", "__spec__") if name in main.__dict__})
        main.__dict__.pop("__file__", None)
        main.__spec__ = None
        # When `threadpoolctl` limits the threads of OpenBLAS, OpenBLAS first starts its threads, which spin for 100 ms
        # before they sleep. During that time, a step of 16 CartPoles on 2 cores took 4 ms, which is one tick of the
        # scheduler, instead of 0.14 ms.
        is_set_by_user = _BLAS_TIMEOUT in os.environ
        if not is_set_by_user:
            os.environ[_BLAS_TIMEOUT] = "4"  # the logarithm of a number of cycles; 4 is the minimum
        # Ctrl-C reaches the whole process group, and would end a new process that does not ignore it yet.
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
    """In a forked child, close the connections in `CLOSED_IN_CHILDREN` and reset the state that `starting` had changed.

    The child can then start processes itself, even if it was forked while its parent was starting one.
    """
    global _STARTING  # noqa: PLW0603 (the parent's lock may be held by a thread that does not exist in the child)
    _STARTING = threading.Lock()
    _show_main()
    for end in list(CLOSED_IN_CHILDREN):
        end.close()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_reset_after_fork)


_STATE, _PARENT = 0, 1  # indices in the result of `_status`


def _status(pid: int) -> list[bytes]:
    """Return the fields of /proc/PID/stat after the name."""
    with DeferSignals(), open(f"/proc/{pid}/stat", "rb", buffering=0) as file:
        return file.read(4096).rpartition(b")")[2].split()
