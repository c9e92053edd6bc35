"""The code of a fork server: a process that has imported the envs' modules and from which workers are forked.

The root server is started once and imports only the modules that every worker needs. Every other server is forked from
an existing one in about 10 ms; these servers import the modules that define the envs, and then fork workers. The
effects of an import on a server cannot be undone, so envs that need a different set of packages get a server of their
own. `_fork_server_client` decides which server imports which modules.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import multiprocessing
import os
import random
import signal
import stat
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

from parallelenv.backends._pipe_host import serve
from parallelenv.worker.worker_log import (
    WorkerLog,
    open_standard_descriptors,
    redirect_descriptors,
    redirect_streams,
)
from parallelenv.worker.worker_loop import end_with_caller, forget_launcher

_SEED_SIZE = 1 << 64
"""A generator whose seed is this large or larger counts as seeded by the system, because users choose smaller seeds."""
FileState = tuple[int, int]
"""The time of a file's latest change in nanoseconds, and the file's size in bytes."""
CHANGED: FileState = (-1, -1)
"""A state that no file has, so that a file recorded with this state always counts as changed."""

_PRISTINE: list[object] = []  # the states of the global random generators before any import
_UNSEEDED: list[np.random.Generator] = []  # generators that imports have made without a seed


class ImportResult(NamedTuple):
    seconds: float
    modules: frozenset[str]  # names that the import added to ``sys.modules``
    files: dict[str, FileState]  # the files of these modules, with the state of each file when it was imported
    error: str  # the error that the import raised; empty if there was none
    reason: str  # why workers must not be forked from this server any more; empty if they may be forked
    variables: Mapping[str, str | None]  # environment variables that the import has changed; ``None``: it removed them
    folders: Mapping[int, str]  # entries that it has added to ``sys.path``, by index


def serve_forks(requests: Connection) -> None:
    """Import modules and fork processes on request, until the caller closes the pipe or dies.

    A request consists of the name of a method of `_Server`, the arguments of the method, and the number of descriptors
    that follow the request.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; it is meant for the caller
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})  # blocked while this process started
    open_standard_descriptors([])
    caller: Any = multiprocessing.parent_process()
    server = _Server(requests, caller.sentinel)
    _PRISTINE[:] = _PRISTINE or _generator_state()
    try:
        server.await_request()
        # Not earlier: `multiprocessing` sends the root's process object through the pipe that is watched here, and the
        # system would treat that write like the caller's death. `_pipe_host.serve` waits for the same reason.
        end_with_caller(caller.sentinel)
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
        os._exit(0)  # unlike ``sys.exit``, does not wait for threads that an import has started


class _Server:
    """The methods of a fork server that the caller can call through a pipe, and a record of the server's children."""

    def __init__(self, requests: Connection, sentinel: int) -> None:
        self._requests = requests
        self._sentinel = sentinel
        self._children: dict[int, Connection] = {}  # by process id: where to report the exit code
        self._wakeups, self._wake = os.pipe()
        os.set_blocking(self._wakeups, False)
        os.set_blocking(self._wake, False)

    def await_request(self) -> None:
        """Wait for the next request; report the exit codes of children that end in the meantime.

        When a child ends, SIGCHLD makes Python write to a pipe, which ends the wait. A signal handler would not be
        enough: if the signal arrives just before a call blocks, Python runs the handler only after that call
        has returned.
        """
        # Set again for each request, because an import may have replaced the handlers.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGCHLD, lambda signum, frame: None)
        signal.set_wakeup_fd(self._wake, warn_on_full_buffer=False)
        ready: list[object] = []
        while self._requests not in ready:
            for pid in list(self._children):
                try:
                    ended, status = os.waitpid(pid, os.WNOHANG)
                except ChildProcessError:  # code of an imported module has already waited for the child
                    self._children.pop(pid).close()
                    continue
                if ended:
                    # An OSError means that the caller does not wait for this child any more.
                    with self._children.pop(pid) as report, contextlib.suppress(OSError):
                        report.send(os.waitstatus_to_exitcode(status))
            ready = list(wait([self._requests, self._wakeups]))
            if self._wakeups in ready:
                os.read(self._wakeups, 4096)

    def modules(self) -> frozenset[str]:
        return frozenset(sys.modules)

    def fork_worker(self, settings: dict[str, Any], sentinel: int, report: int, pipe: int, log: int) -> int:
        return self._fork(lambda: serve(Connection(pipe), WorkerLog(log)), settings, None, sentinel, report)

    def fork_server(
        self, settings: dict[str, Any], environment: Mapping[str, str], sentinel: int, report: int, requests: int
    ) -> int:
        return self._fork(lambda: serve_forks(Connection(requests)), settings, environment, sentinel, report)

    def _fork(
        self,
        target: Callable[[], None],
        settings: dict[str, Any],
        environment: Mapping[str, str] | None,  # of a new server; a worker receives the caller's variables later
        sentinel: int,
        report: int,
    ) -> int:
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
                # Give this worker different random states than other workers, except for generators that imports have
                # seeded. Python has already reseeded `random` in the forked process.
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
            # This method is private, but every start method of `multiprocessing` calls it in a new process. No public
            # function can run a process object here with the caller, instead of this server, as the parent to watch.
            code = child._bootstrap(parent_sentinel=sentinel)
        except BaseException:  # noqa: BLE001 (after any error, this copy of the server must not continue)
            traceback.print_exc()
        finally:
            os._exit(code)

    def _leave(self, report: int) -> None:
        """In a forked process, undo the server's signal settings and close the server's descriptors."""
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        for other in (self._requests, *self._children.values()):
            other.close()
        for fileno in (self._wakeups, self._wake, self._sentinel, report):
            os.close(fileno)

    def load(self, module: str, silence: bool, output: int) -> ImportResult:
        log = WorkerLog(os.dup(output))
        redirect_descriptors(log)
        redirect_streams(lambda: None, (1, 2))
        known, before = set(sys.modules), _unforkable_resources()
        # Replace the function that shows warnings instead of adding a filter: workers of a later pool would inherit the
        # filter, although that pool may show warnings.
        show, hide = warnings.showwarning, lambda *_, **__: None
        warnings.showwarning = hide if silence else show
        begin, environment, path = time.time_ns(), dict(os.environ), list(sys.path)
        error, files = "", set[str]()
        try:
            importlib.invalidate_caches()
            importlib.import_module(module)
        except BaseException as failure:  # noqa: BLE001 (the worker imports it again, and the user gets that error)
            error = f"{type(failure).__name__}: {failure}"
            files = {frame.f_code.co_filename for frame, _ in traceback.walk_tb(failure.__traceback__)}
            files.add(str(getattr(failure, "filename", "")))  # of a SyntaxError: not in the traceback
        end = time.time_ns()
        if warnings.showwarning is hide:
            warnings.showwarning = show
        modules = sys.modules.keys() - known
        files |= {file for name in modules if (file := getattr(sys.modules[name], "__file__", None))}
        gc.collect()  # also closes files that nothing uses any more
        reason = ", ".join(sorted({what for what, _ in _unforkable_resources() - before}))
        if error and modules:
            reason = f"raises {error}"  # the server may contain a part of the module
        _UNSEEDED.extend(
            one
            for one in gc.get_objects()
            if type(one) is np.random.Generator
            and isinstance(entropy := getattr(getattr(one.bit_generator, "seed_seq", None), "entropy", None), int)
            and entropy >= _SEED_SIZE
        )
        gc.freeze()  # otherwise, garbage collection in workers would copy the memory pages that they share
        states = {file: _state(file) for file in files}
        # If a file was written during the import, it is unknown which state was imported.
        states |= {file: CHANGED for file, state in states.items() if begin <= state[0] <= end}
        names = {name for name, _ in environment.items() ^ os.environ.items()}
        variables = {name: os.environ.get(name) for name in names}
        folders = {index: folder for index, folder in enumerate(sys.path) if folder not in path}
        return ImportResult((end - begin) / 1e9, frozenset(modules), states, error, reason, variables, folders)


def _generator_state() -> list[object]:
    """Return those parts of the states of `random` and `numpy.random` that a new seed changes.

    They do not change when only a few numbers are drawn.
    """
    state: Any = np.random.get_state(legacy=True)
    return [random.getstate()[1][:-1], state[1].tobytes()]


def _unforkable_resources() -> set[tuple[str, str]]:
    """Return the threads, child processes, sockets and files of this process that forked processes cannot share."""
    tasks = Path("/proc/self/task")
    if len(os.listdir(tasks)) > 1:
        # OpenBLAS ends its threads before each fork and restarts them when it needs them, so fork once to end them.
        # Threads that are left afterwards would be missing in a forked process.
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            pid = os.fork()
        if not pid:
            os._exit(0)
        os.waitpid(pid, 0)
    found = {("starts a thread", task) for task in os.listdir(tasks) if int(task) != os.getpid()}
    for children in tasks.glob("*/children"):
        with contextlib.suppress(OSError):  # the thread has ended since it was listed
            found |= {("starts a process", pid) for pid in children.read_text().split()}
    mapped = Path("/proc/self/maps").read_text(errors="surrogateescape")  # `mmap` keeps the files that it maps open
    for entry in os.scandir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # the descriptor was closed after it was listed
            if (link := os.readlink(entry.path)).startswith("socket:"):
                found.add(("opens a connection", link))
            # A forked process reads on from where another one has read. Writing, as to a log file, has no such effect.
            is_read = bool(entry.stat(follow_symlinks=False).st_mode & stat.S_IRUSR)  # how the descriptor was opened
            if is_read and entry.is_file() and not link.startswith("/memfd:") and f" {link}\n" not in mapped:
                found.add(("opens a file", link))
    return found


def _state(file: str) -> FileState:
    try:
        found = os.stat(file)
    except OSError:
        return (0, 0)
    return found.st_mtime_ns, found.st_size


def have_changed(files: Mapping[str, FileState]) -> bool:
    return any(state != _state(file) for file, state in files.items())
