"""Worker processes: the caller starts them, waits for them and ends them."""

from __future__ import annotations

import contextlib
import io
import math
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from multiprocessing import connection, context, popen_spawn_posix, reduction, resource_tracker, spawn, util
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from multiprocessing.process import BaseProcess
from typing import Any

from parallelenv.contract.interrupts import DeferSignals, signal_behind
from parallelenv.contract.packed_worker_spec import environment_variables
from parallelenv.errors import WorkerStartError

_REPORT_TIMEOUT = 1.0
"""Seconds to wait for the fork server's report that a process has ended."""
_CHECK_INTERVAL = 0.05
"""Seconds between checks whether a process has ended, because its child processes may keep its sentinel open."""
UNKNOWN = 256
"""Value for the exit code of a process whose fork server has ended, and so cannot report the exit code.

No process can have this exit code.
"""
CLOSED_IN_CHILDREN: weakref.WeakSet[CallerEnd] = weakref.WeakSet()
"""Connections that forked children of the caller close."""
_STARTING = threading.Lock()
_OPENING = threading.RLock()
"""Held while a `CallerEnd` is opened or closed, and during each fork.

Otherwise, a forked child could keep a connection that was just being opened. And it could close a connection that was
just being closed by another thread a second time, and thereby a new descriptor with the same number.
"""


class CallerEnd(Connection):
    """The caller's end of a connection to another process. Forked children of the caller close their copies of it.

    If a child kept its copy open, the other process would not notice that the caller has closed the connection or died.
    """

    def __init__(self, handle: int, readable: bool = True, writable: bool = True) -> None:
        super().__init__(handle, readable, writable)
        CLOSED_IN_CHILDREN.add(self)

    # The base class calls this method in `close` and in `__del__`. The lock is an argument because, at exit, this
    # module's globals may be gone.
    def _close(self, lock: Any = _OPENING) -> None:
        base: Any = super()
        with lock:
            base._close()
            self._handle = None


def open_pipe(*, duplex: bool = True) -> tuple[CallerEnd, Connection]:
    """Return the two ends of a new pipe. If it is not duplex, the caller's end is the one to write to."""
    with _OPENING:
        if not duplex:
            reading, writing = os.pipe()
            return CallerEnd(writing, readable=False), Connection(reading, writable=False)
        ours, theirs = socket.socketpair()
        return CallerEnd(ours.detach()), Connection(theirs.detach())


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
        self._pidfd = _open_pidfd(self.pid)

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
            code = self._process.exitcode  # raises `ValueError` after `close`
            if self._pidfd is not None:
                return not self._has_ended(self._pidfd, 0)
            # Other code in this process may already have waited for the worker process. `multiprocessing` then never
            # learns that the worker process has ended. After a fork server has ended, nothing reports the ends of its
            # workers.
            return code in (None, UNKNOWN) and process_exists(self.pid) and not _is_foreign_zombie(self.pid)

    def join(self, timeout: float = math.inf) -> None:
        if self._pidfd is not None:
            self._has_ended(self._pidfd, None if timeout == math.inf else timeout)
            with DeferSignals():
                _ = self._process.exitcode  # `multiprocessing` now waits for the process, so that no zombie is left
            return
        deadline = time.monotonic() + timeout
        while self.is_alive() and (left := deadline - time.monotonic()) > 0:
            if connection.wait([self._process.sentinel], min(left, _CHECK_INTERVAL)):
                with DeferSignals():
                    self._process.join(_CHECK_INTERVAL)
                return

    @staticmethod
    def _has_ended(pidfd: Connection, timeout: float | None) -> bool:
        try:
            return bool(connection.wait([pidfd], timeout))
        except OSError as error:
            if signal_behind(error) is not None:
                raise
            raise ValueError("process object is closed") from error  # by another thread

    def terminate(self) -> None:
        self._send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self._send_signal(signal.SIGKILL)

    def _send_signal(self, number: signal.Signals) -> None:
        with DeferSignals(), contextlib.suppress(ProcessLookupError):
            if self._pidfd is None:
                os.kill(self.pid, number)
            elif not self._pidfd.closed:
                signal.pidfd_send_signal(self._pidfd.fileno(), number)

    def hand_over(self, connection: Connection, pid: int) -> object:
        """Let another process receive the exit code; return an object that keeps the worker alive.

        The worker ends when nothing refers to that object any more. Only workers of a fork server can be handed over.
        Afterwards, this `WorkerProcess` must not be used any more.
        """
        forked: Any = self._process
        reduction.send_handle(connection, forked.sentinel.fileno(), pid)
        with DeferSignals():
            forked.sentinel.close()
            if self._pidfd is not None:
                self._pidfd.close()
        return forked

    def close(self) -> None:
        with DeferSignals():
            try:
                if self._lifeline is not None:
                    self._lifeline.close()
                self._process.close()
            finally:
                if self._pidfd is not None:
                    self._pidfd.close()


def _open_pidfd(pid: int) -> Connection | None:
    """Return a descriptor of a process that becomes readable when the process ends, even if nothing has waited for it.

    Unlike the process id, the descriptor never refers to another process, to which the system may give the id later.
    The result is ``None`` if the system has no such descriptors (only Linux has, from 5.3 on), or forbids them, or if
    something has already waited for the process. The type of the result has no meaning here, except that the descriptor
    is closed at the latest when nothing refers to the object any more.
    """
    if not hasattr(os, "pidfd_open"):
        return None
    with DeferSignals(), contextlib.suppress(OSError):
        return Connection(os.pidfd_open(pid), writable=False)
    return None


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


def _is_foreign_zombie(pid: int) -> bool:
    """Return whether a process has ended although its parent, such as a fork server that imports, has not noticed."""
    with contextlib.suppress(OSError):  # the process does not exist, or this system has no /proc
        fields = _status(pid)
        return fields[_STATE] == b"Z" and int(fields[_PARENT]) != os.getpid()
    return False


def start_methods() -> list[str]:
    """Return the start methods of `multiprocessing` on this system, with this package's default first."""
    methods = multiprocessing.get_all_start_methods()
    default = "forkserver" if "forkserver" in methods else "spawn"
    return [default, *(method for method in methods if method != default)]


@contextlib.contextmanager
def starting(method: str) -> Iterator[None]:
    """Prepare this thread for the start of a process in the ``with`` block.

    Only one thread at a time can be in such a block, and Ctrl-C is delayed until the block ends.
    """
    with _STARTING, DeferSignals():
        if method != "fork":
            resource_tracker.ensure_running()  # if it started later, it would unblock the signal that is blocked below
        # Ctrl-C reaches the whole process group, and would end a new process that does not ignore it yet.
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            yield
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def new_process(method: str, target: Callable[..., None], arguments: tuple[object, ...], name: str) -> BaseProcess:
    """Return a process of `multiprocessing` that calls ``target``. It must be started in a `starting` block."""
    if method == "spawn":
        return _SpawnedProcess(target=target, args=arguments, name=name)
    methods: Any = multiprocessing.get_context(method)
    process: BaseProcess = methods.Process(target=target, args=arguments, name=name)
    return process


def start_settings(name: str) -> dict[str, Any]:
    """Return the settings for ``multiprocessing.spawn.prepare`` in a new process with this name.

    The main module is left out, so that the process does not import it and it needs no guard. Pickles made by
    cloudpickle include the parts of the main module that workers need.
    """
    process: Any = multiprocessing.process
    return {
        "name": name,
        "authkey": bytes(process.current_process().authkey),
        # `multiprocessing` replaces an empty entry, the current directory, by an earlier current directory.
        "sys_path": list(sys.path),
        "sys_argv": list(sys.argv),
        "orig_dir": process.ORIGINAL_DIR,
        "dir": os.getcwd(),
    }


def check_working_directory() -> None:
    """Raise an error if a new process could not enter the caller's working directory."""
    try:
        folder = os.getcwd()
    except FileNotFoundError as error:
        with contextlib.suppress(OSError):
            error.filename = os.readlink("/proc/self/cwd")  # the name, and that the folder was deleted
        raise WorkerStartError(
            f"The working directory does not exist any more, so workers cannot start in it ({error}). Change to "
            "another folder with os.chdir()."
        ) from error
    if not os.access(folder, os.X_OK, effective_ids=os.access in os.supports_effective_ids):
        raise WorkerStartError(
            f"The user may not enter the working directory {folder!r}, so workers cannot start in it. Change to "
            "another folder with os.chdir()."
        )


def open_standard_descriptors() -> None:
    """Open /dev/null as each of the standard input, output and error of this process that is closed.

    Otherwise, a pipe to a worker could get its number. C code would write its messages to the pipe, and a new process
    would take the pipe for its own output.
    """
    with DeferSignals():
        for number in range(3):
            try:
                os.fstat(number)
            except OSError:
                opened = os.open(os.devnull, os.O_RDWR)
                if opened == number:
                    os.set_inheritable(number, True)  # like the standard descriptors of any process
                else:  # another thread has just used the number
                    os.close(opened)


class _SpawnedProcess(SpawnProcess):
    """A process of the start method ``spawn`` that gets other settings and variables than those of the caller.

    `multiprocessing` would get them from the caller's main module and ``os.environ``, so these would have to be changed
    during the start, and other threads could see that.
    """

    @staticmethod
    def _Popen(process_obj: BaseProcess) -> Any:  # noqa: N802 (named by `multiprocessing`)
        return _Spawning(process_obj)


class _Spawning(popen_spawn_posix.Popen):
    def _launch(self, process_obj: BaseProcess) -> None:
        # The same as in the base class, except for the settings and the variables. `multiprocessing` has no public way
        # to run one of its process objects in a new interpreter.
        internal: Any = self
        content = io.BytesIO()
        context.set_spawning_popen(self)
        try:
            reduction.dump(start_settings(process_obj.name), content)
            reduction.dump(process_obj, content)
        finally:
            context.set_spawning_popen(None)
        variables = environment_variables()
        # When `threadpoolctl` limits the threads of OpenBLAS, OpenBLAS first starts its threads, which spin for 100 ms
        # before they sleep. During that time, a step of 16 CartPoles on 2 cores took 4 ms, which is one tick of the
        # scheduler, instead of 0.14 ms. The value is the logarithm of a number of cycles; 4 is the minimum.
        variables.setdefault("OPENBLAS_THREAD_TIMEOUT", "4")
        tracker: Any = resource_tracker.getfd()
        with contextlib.ExitStack() as kept, contextlib.ExitStack() as passed:
            self.sentinel, ended = os.pipe()
            kept.callback(os.close, self.sentinel)
            passed.callback(os.close, ended)
            read, lifeline = os.pipe()
            kept.callback(os.close, lifeline)
            passed.callback(os.close, read)
            started = subprocess.Popen(
                [spawn.get_executable(), *spawn.get_command_line(tracker_fd=tracker, pipe_handle=read)[1:]],
                env=variables,
                pass_fds=[*internal._fds, tracker, read, ended],
                restore_signals=False,
            )
            self.finalizer = util.Finalize(self, kept.pop_all().close)
        self.pid = started.pid
        started.returncode = 0  # only `multiprocessing` waits for the process
        with open(lifeline, "wb", closefd=False) as file:
            file.write(content.getbuffer())


def _reset_after_fork() -> None:
    """In a forked child, close the connections in `CLOSED_IN_CHILDREN` and release the locks.

    The child can then start processes itself, even if it was forked while its parent was starting one.
    """
    global _STARTING  # noqa: PLW0603 (the parent's lock may be held by a thread that does not exist in the child)
    _STARTING = threading.Lock()
    for end in list(CLOSED_IN_CHILDREN):
        end.close()
    _OPENING.release()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_OPENING.acquire, after_in_parent=_OPENING.release, after_in_child=_reset_after_fork)


_STATE, _PARENT = 0, 1  # indices in the result of `_status`


def _status(pid: int) -> list[bytes]:
    """Return the fields of /proc/PID/stat after the name."""
    with DeferSignals(), open(f"/proc/{pid}/stat", "rb", buffering=0) as file:
        return file.read(4096).rpartition(b")")[2].split()
