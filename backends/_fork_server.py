"""The code of a fork server: a process from which workers are forked, with the envs' modules already imported.

A root is started once and imports only what every worker needs. Servers are forked from it, in about 10 ms each; they
import the modules that envs come from and then fork workers. The effects of an import on a server cannot be undone, so
each set of packages has its own server. `_fork_server_client` decides which server imports what.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import multiprocessing
import os
import random
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Mapping
from multiprocessing import reduction, spawn
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from parallelenv.worker.worker_log import WorkerLog, redirect_descriptors, redirect_streams
from parallelenv.worker.worker_loop import end_with_caller, forget_launcher

ServeWorker = Callable[[Connection, WorkerLog], None]
_SEED_SIZE = 1 << 64
"""Entropy above this comes from the system, because users write smaller seeds."""
FileState = tuple[int, int]
"""Time of the latest change, and size of a file."""
CHANGED: FileState = (-1, -1)
"""The state of a file that counts as changed."""

_PRISTINE: list[object] = []  # the global generators as they were before imports
_UNSEEDED: list[np.random.Generator] = []  # those that imports have made


class ImportResult(NamedTuple):
    """The result of an import in a server."""

    seconds: float
    modules: frozenset[str]  # the new ones in ``sys.modules``
    files: dict[str, FileState]  # theirs, each with its state when it was read
    error: str  # the error that the import raised; empty if none
    reason: str  # why workers must not be forked from this server any more; empty if they may


def serve_forks(requests: Connection, serve: ServeWorker) -> None:
    """Import and fork on request, until the caller closes the pipe or dies. ``serve`` runs a worker.

    A request is the name of a method of `_Server`, its arguments, and the number of descriptors that follow.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; it is meant for the caller
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})  # blocked while this process started
    caller: Any = multiprocessing.parent_process()
    server = _Server(requests, serve, caller.sentinel)
    _PRISTINE[:] = _PRISTINE or _generator_state()
    try:
        server.await_request()
        end_with_caller(caller.sentinel)  # not earlier: a root's process object came through that pipe, as in a worker
        while True:
            server.await_request()
            name, arguments, count = requests.recv()
            filenos = [reduction.recv_handle(requests) for _ in range(count)]
            try:
                answer = getattr(server, name)(*arguments, *filenos)
            except OSError as error:
                answer = error
            for fileno in filenos:
                os.close(fileno)
            requests.send(answer)
    except (EOFError, OSError):  # the caller closed the pipe or died
        os._exit(0)  # does not wait for threads that an import has started


class _Server:
    """The requests that a server executes, and its children.

    Args:
        requests: The pipe from the caller.
        serve: Runs a worker, at its end of a pipe and with its log.
        sentinel: A descriptor that becomes readable when the caller dies.
    """

    def __init__(self, requests: Connection, serve: ServeWorker, sentinel: int) -> None:
        self._requests, self._serve = requests, serve
        self._sentinel = sentinel
        self._children: dict[int, Connection] = {}  # where to report the exit code of each
        self._wakeups, self._wake = os.pipe()
        os.set_blocking(self._wakeups, False)
        os.set_blocking(self._wake, False)

    def await_request(self) -> None:
        """Wait for the next request, and report children that have ended in the meantime.

        A pipe ends the wait, not a handler of SIGCHLD: Python runs no handler for a signal that arrives right
        before a call blocks.
        """
        # Repeated each time: an import may have set its own handlers.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGCHLD, lambda signum, frame: None)
        signal.set_wakeup_fd(self._wake, warn_on_full_buffer=False)
        ready: list[object] = []
        while self._requests not in ready:
            for pid in list(self._children):
                try:
                    ended, status = os.waitpid(pid, os.WNOHANG)
                except ChildProcessError:  # an imported module has waited for it
                    self._children.pop(pid).close()
                    continue
                if ended:
                    with self._children.pop(pid) as report, contextlib.suppress(OSError):  # OSError: no longer awaited
                        report.send(os.waitstatus_to_exitcode(status))
            ready = list(wait([self._requests, self._wakeups]))
            if self._wakeups in ready:
                os.read(self._wakeups, 4096)

    def modules(self) -> frozenset[str]:
        """Return the names of all imported modules."""
        return frozenset(sys.modules)

    def fork_worker(self, settings: dict[str, Any], sentinel: int, report: int, pipe: int, log: int) -> int:
        """Fork a worker with these ends of a pipe and a log; return its process id. See `_fork` for other arguments."""
        return self._fork(lambda: self._serve(Connection(pipe), WorkerLog(log)), settings, None, sentinel, report)

    def fork_server(
        self, settings: dict[str, Any], environment: Mapping[str, str], sentinel: int, report: int, requests: int
    ) -> int:
        """Fork a server with these environment variables; return its process id. See `_fork` for other arguments."""
        return self._fork(
            lambda: serve_forks(Connection(requests), self._serve), settings, environment, sentinel, report
        )

    def _fork(
        self,
        target: Callable[[], None],
        settings: dict[str, Any],
        environment: Mapping[str, str] | None,
        sentinel: int,
        report: int,
    ) -> int:
        """Fork a process and return its id.

        Args:
            target: The function that it runs.
            settings: For `multiprocessing.spawn`.
            environment: The environment variables of a server; ``None`` for a worker, which gets the caller's later.
            sentinel: A descriptor that becomes readable when the caller dies.
            report: A descriptor for the exit code.
        """
        context: Any = multiprocessing.get_context("forkserver")
        child = context.Process(target=target, name=settings["name"])
        numbers = random.getstate()
        pid = os.fork()
        if pid:
            self._children[pid] = Connection(os.dup(report), readable=False)
            return pid
        code = 1
        try:
            self._leave(report)
            if environment is None:
                # Generators differ from those of other workers, unless imports have seeded them. Python has reseeded
                # `random` in the forked process.
                if numbers[1][:-1] != _PRISTINE[0]:
                    random.setstate(numbers)
                if _generator_state()[1] == _PRISTINE[1]:
                    np.random.seed()
                for generator in _UNSEEDED:
                    fresh: Any = type(generator.bit_generator)
                    generator.bit_generator.state = fresh().state
            else:
                random.setstate(numbers)
                os.environ.clear()
                os.environ.update(environment)
                forget_launcher()
            spawn.prepare(settings)
            # Private, but called in a new process by all start methods of `multiprocessing`: nothing public makes a
            # process object from here that is not a child of this process and has the caller's sentinel.
            code = child._bootstrap(parent_sentinel=sentinel)
        except BaseException:  # noqa: BLE001 (whatever it is, this copy of the server must not go on)
            traceback.print_exc()
        finally:
            os._exit(code)

    def _leave(self, report: int) -> None:
        """Detach a forked process from the server."""
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        for other in (self._requests, *self._children.values()):
            other.close()
        for fileno in (self._wakeups, self._wake, self._sentinel, report):
            os.close(fileno)

    def load(self, module: str, silence: bool, output: int) -> ImportResult:
        """Import a module and find its side effects. Its output goes to the descriptor ``output``."""
        log = WorkerLog(os.dup(output))
        redirect_descriptors(log)
        redirect_streams(lambda: None, (1, 2))
        known, before = set(sys.modules), _unforkable_resources()
        # No filter hides warnings, because the workers of a later pool may not want it.
        show, hide = warnings.showwarning, lambda *_, **__: None
        warnings.showwarning = hide if silence else show
        begin = time.time_ns()
        error, files = "", set[str]()
        try:
            importlib.invalidate_caches()
            importlib.import_module(module)
        except BaseException as failure:  # noqa: BLE001 (the worker imports it again, and raises it to the user)
            error = f"{type(failure).__name__}: {failure}"
            files = {frame.f_code.co_filename for frame, _ in traceback.walk_tb(failure.__traceback__)}
            files.add(str(getattr(failure, "filename", "")))  # for a SyntaxError
        end = time.time_ns()
        if warnings.showwarning is hide:
            warnings.showwarning = show
        modules = sys.modules.keys() - known
        files |= {file for name in modules if (file := getattr(sys.modules[name], "__file__", None))}
        reason = ", ".join(sorted({what for what, _ in _unforkable_resources() - before}))
        if error and modules:
            reason = f"raises {error}"  # partly imported
        gc.collect()
        _UNSEEDED.extend(
            one
            for one in gc.get_objects()
            if type(one) is np.random.Generator
            and isinstance(entropy := getattr(getattr(one.bit_generator, "seed_seq", None), "entropy", None), int)
            and entropy >= _SEED_SIZE
        )
        gc.freeze()  # else garbage collection in workers would copy the shared pages
        states = {file: _state(file) for file in files}
        states |= {file: CHANGED for file, state in states.items() if begin <= state[0] <= end}  # which one was read?
        return ImportResult((end - begin) / 1e9, frozenset(modules), states, error, reason)


def _generator_state() -> list[object]:
    """Return the part of both global generators' state that seeding changes, but not drawing a few numbers."""
    state: Any = np.random.get_state(legacy=True)
    return [random.getstate()[1][:-1], state[1].tobytes()]


def _unforkable_resources() -> set[tuple[str, str]]:
    """Return the kind and id of each part of this process that forked processes cannot share."""
    tasks = Path("/proc/self/task")
    if len(os.listdir(tasks)) > 1:
        # OpenBLAS ends its threads before each fork and restarts them when needed. Other threads stay, and would be
        # missing in a forked process.
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            pid = os.fork()
        if not pid:
            os._exit(0)
        os.waitpid(pid, 0)
    found = {("starts a thread", task) for task in os.listdir(tasks) if int(task) != os.getpid()}
    for children in tasks.glob("*/children"):
        found |= {("starts a process", pid) for pid in children.read_text().split()}
    for entry in os.scandir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # the descriptor that lists them
            if (link := os.readlink(entry.path)).startswith("socket:"):
                found.add(("opens a connection", link))
    return found


def _state(file: str) -> FileState:
    try:
        found = os.stat(file)
    except OSError:
        return (0, 0)
    return found.st_mtime_ns, found.st_size


def have_changed(files: Mapping[str, FileState]) -> bool:
    """Return whether the state of any of these files has changed."""
    return any(state != _state(file) for file, state in files.items())
