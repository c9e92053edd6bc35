"""Processes from which workers are forked, with the envs' modules already imported.

A root is started once and imports only what every worker needs. Servers are forked from it, in about 10 ms each; they
import the modules that envs come from and then fork workers. The effects of an import on a server cannot be undone, so
each set of packages has a server of its own.
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
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Collection, Iterator, Sequence
from multiprocessing import process, reduction, resource_tracker, spawn
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from parallelenv.backends._pipe_host import serve
from parallelenv.backends._process import ForkedProcess
from parallelenv.contract.interrupts import DeferSigint
from parallelenv.worker.worker_log import WorkerLog, redirect_descriptors, redirect_streams
from parallelenv.worker.worker_loop import end_with_caller, forget_launcher

_BLAS_TIMEOUT = "OPENBLAS_THREAD_TIMEOUT"
_VOLATILE = ("PYTEST_CURRENT_TEST", "RAY_", "PYTHONBREAKPOINT")
"""Prefixes of variables that change with every test, or when Ray starts: they must not cause new imports."""
_SEED_SIZE = 1 << 64
"""Entropy above this is from the system: users write smaller seeds."""
_MOST_SERVERS = 4
"""Not counting the root; the least recently used one is dropped first."""
_UNKNOWN = (-1, -1)
"""The state of a file that counts as changed."""

_STARTING = threading.Lock()
_HIDDEN: dict[str, object] = {}  # attributes of the main module that are removed while a process is being started
_PRISTINE: list[object] = []  # in a server: the global generators as they were before imports
_UNSEEDED: list[np.random.Generator] = []  # in a server: those that imports have made


# -------------------------------------------------------------------- the servers' end


class ImportResult(NamedTuple):
    """The result of an import in a server."""

    seconds: float
    modules: frozenset[str]  # the new ones in ``sys.modules``
    files: dict[str, tuple[int, int]]  # theirs, each with its state when it was read
    error: str  # the one that it raised; empty if none
    reason: str  # why workers must not be forked from this server any more; empty if they may


def serve_forks(requests: Connection) -> None:
    """Run a server: import and fork on request, until the caller closes the pipe or dies.

    A request is the name of a method of `_Server`, its arguments, and the number of descriptors that follow.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; it is meant for the caller
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})  # blocked while this process started
    caller: Any = multiprocessing.parent_process()
    server = _Server(requests, caller.sentinel)
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
    def __init__(self, requests: Connection, sentinel: int) -> None:
        self._requests = requests
        self._sentinel = sentinel
        self._children: dict[int, Connection] = {}  # where to report the exit code of each
        self._news, self._wake = os.pipe()
        os.set_blocking(self._news, False)
        os.set_blocking(self._wake, False)

    def await_request(self) -> None:
        """Wait for the next request; meanwhile report children that have ended.

        A pipe wakes it, not a handler of SIGCHLD: Python runs none for a signal that comes right before a call blocks.
        """
        # Each time again: an import may have set its own handlers.
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
            ready = list(wait([self._requests, self._news]))
            if self._news in ready:
                os.read(self._news, 4096)

    def modules(self) -> frozenset[str]:
        """Return the names of all imported modules."""
        return frozenset(sys.modules)

    def fork(
        self, target: Callable[..., None], settings: dict[str, Any], sentinel: int, report: int, *ends: int
    ) -> int:
        """Fork a process that calls ``target`` with the descriptors ``ends``, of a pipe and maybe a log; return its id.

        ``settings`` are for `multiprocessing.spawn`, with ``environment`` for a server. ``sentinel`` becomes readable
        when the caller dies; ``report`` is for the exit code.
        """
        context: Any = multiprocessing.get_context("forkserver")
        child = context.Process(target=_run, args=(target, *ends), name=settings["name"])
        numbers = random.getstate()
        pid = os.fork()
        if pid:
            self._children[pid] = Connection(os.dup(report), readable=False)
            return pid
        code = 1
        try:
            self._leave(report)
            if "environment" in settings:  # a server
                random.setstate(numbers)
                os.environ.clear()
                os.environ.update(settings["environment"])
                forget_launcher()
            else:
                _reseed_generators(numbers)
            spawn.prepare(settings)
            # Private, but called in a new process by all start methods of `multiprocessing`: nothing public makes a
            # process object from here that is not a child of this process and has the caller's sentinel.
            code = child._bootstrap(parent_sentinel=sentinel)
        except BaseException:  # noqa: BLE001 (whatever it is: this copy of the server must not go on)
            traceback.print_exc()
        finally:
            os._exit(code)

    def _leave(self, report: int) -> None:
        """Detach a forked process from the server."""
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        for other in (self._requests, *self._children.values()):
            other.close()
        for fileno in (self._news, self._wake, self._sentinel, report):
            os.close(fileno)

    def load(self, module: str, silence: bool, output: int) -> ImportResult:
        """Import a module and find its side effects. Its output goes to the descriptor ``output``."""
        log = WorkerLog(os.dup(output))
        redirect_descriptors(log)
        redirect_streams(lambda: None, (1, 2))
        known, before = set(sys.modules), _unforkable_resources()
        # Warnings are not hidden by a filter, which the workers of a later pool may not want.
        show, hide = warnings.showwarning, lambda *_, **__: None
        warnings.showwarning = hide if silence else show
        begin = time.time_ns()
        error, files = _import(module)
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
        stamps = {file: _stamp(file) for file in files}
        stamps |= {
            file: _UNKNOWN for file, stamp in stamps.items() if begin <= stamp[0] <= end
        }  # which state was read?
        return ImportResult((end - begin) / 1e9, frozenset(modules), stamps, error, reason)


def _run(target: Callable[..., None], connection: int, *log: int) -> None:
    target(Connection(connection), *map(WorkerLog, log))


def _import(module: str) -> tuple[str, set[str]]:
    """Import a module; return the error that it raised, or an empty text, and the files that this comes from."""
    try:
        importlib.invalidate_caches()
        importlib.import_module(module)
    except BaseException as error:  # noqa: BLE001 (the worker imports it again, and raises it to the user)
        files = {frame.f_code.co_filename for frame, _ in traceback.walk_tb(error.__traceback__)}
        files.add(str(getattr(error, "filename", "")))  # for a SyntaxError
        return f"{type(error).__name__}: {error}", files
    return "", set()


def _generator_state() -> list[object]:
    """Return the part of both global generators' state that seeding changes and drawing a few numbers does not."""
    state: Any = np.random.get_state(legacy=True)
    return [random.getstate()[1][:-1], state[1].tobytes()]


def _reseed_generators(numbers: Any) -> None:
    """Make random generators differ from those of other workers, unless imports have seeded them."""
    # `numbers` is the state of `random` in the server; Python reseeds it in each forked process.
    if numbers[1][:-1] != _PRISTINE[0]:
        random.setstate(numbers)
    if _generator_state()[1] == _PRISTINE[1]:
        np.random.seed()
    for generator in _UNSEEDED:
        fresh: Any = type(generator.bit_generator)
        generator.bit_generator.state = fresh().state


def _unforkable_resources() -> set[tuple[str, str]]:
    """Return the parts of this process that forked processes cannot share: kind and id of each."""
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


def _stamp(file: str) -> tuple[int, int]:
    """Return a stamp that changes with a file's content."""
    try:
        found = os.stat(file)
    except OSError:
        return (0, 0)
    return found.st_mtime_ns, found.st_size


# -------------------------------------------------------------------- the caller's end


Surroundings = tuple[tuple[str, ...], str, dict[str, str]]
"""What affects imports: ``sys.path``, the current folder if modules may be found there, environment variables."""


def _surroundings() -> Surroundings:
    environment = {name: value for name, value in os.environ.items() if not name.startswith(_VOLATILE)}
    is_absolute = all(os.path.isabs(folder) for folder in sys.path if isinstance(folder, str))
    return tuple(sys.path), "" if is_absolute else os.getcwd(), environment


class ForkServer:
    """A server, as seen by the caller. It ends when nothing refers to this object any more.

    Attributes:
        surroundings: Those of its imports, ``None`` for the root.
        packages: The packages from which it may import.
        loaded: Modules that it has imported on request, with the seconds that each took.
        files: Files of its imports, each with its state at that time.
    """

    def __init__(
        self,
        process: BaseProcess | ForkedProcess,
        requests: Connection,
        surroundings: Surroundings | None = None,
        packages: frozenset[str] = frozenset(),
    ) -> None:
        self.surroundings = surroundings
        self.packages = packages
        self.pid = process.pid or 0
        self._process = process
        self._requests = requests
        self._lock = threading.Lock()
        self._known: frozenset[str] = frozenset()
        self.loaded: dict[str, float] = {}
        self.files: dict[str, tuple[int, int]] = {}

    @classmethod
    def start(cls) -> ForkServer:
        """Start a root; `OSError` if no process can be started."""
        context = multiprocessing.get_context("spawn")
        with starting("spawn"):
            ours, theirs = context.Pipe()
            with theirs:
                root = context.Process(target=serve_forks, args=(theirs,), name="parallelenv-fork-server")
                root.start()
            # Private: else it is in `multiprocessing.active_children()`, and joining all of them never ends.
            vars(process)["_children"].discard(root)
            return cls(root, ours)

    def fork_server(self, surroundings: Surroundings, packages: frozenset[str]) -> ForkServer:
        """Return a server forked from this one; `OSError` for lack of resources or if this server has ended."""
        settings = {**_settings("parallelenv-fork-server"), "environment": surroundings[2]}
        with DeferSigint():
            ours, theirs = multiprocessing.Pipe()
            with theirs:
                forked = self._fork(serve_forks, settings, theirs.fileno())
            server = ForkServer(forked, ours, surroundings, packages)
            server.loaded, server.files = dict(self.loaded), dict(self.files)
            return server

    def fork_worker(self, connection: Connection, log: WorkerLog) -> ForkedProcess:
        """Return a worker forked from this server. Errors: see `fork_server`."""
        return self._fork(serve, _settings("parallelenv-worker"), connection.fileno(), log.fileno)

    def _fork(self, target: Callable[..., None], settings: dict[str, Any], *ends: int) -> ForkedProcess:
        sentinel, lifeline = multiprocessing.Pipe(duplex=False)
        status, report = multiprocessing.Pipe(duplex=False)
        with sentinel, report:
            pid = self._ask("fork", (target, settings), sentinel.fileno(), report.fileno(), *ends)
        return ForkedProcess(pid, status, lifeline, self)

    def load(self, module: str, log: WorkerLog, *, silence: bool) -> ImportResult:
        """Import a module in the server. An interrupt ends the server; `ConnectionError` if it has ended."""
        loaded: ImportResult = self._ask("load", (module, silence), log.fileno)
        self._known |= loaded.modules
        self.files.update(loaded.files)
        if not loaded.error:
            self.loaded[module] = loaded.seconds
        return loaded

    def knows(self, module: str) -> bool:
        """Whether it has imported a module."""
        self._known = self._known or self._ask("modules", ())
        return module in self._known

    def _ask(self, name: str, arguments: tuple[object, ...], *filenos: int) -> Any:
        """Return the reply to a request. If it is interrupted or cannot be sent completely, the server ends."""
        try:
            with self._lock:
                self._requests.send((name, arguments, len(filenos)))
                for fileno in filenos:
                    reduction.send_handle(self._requests, fileno, self.pid)
                answer = self._requests.recv()
        except BaseException as error:
            self.end()
            if isinstance(error, EOFError):
                raise ConnectionResetError(f"the fork server, process {self.pid}, has ended") from error
            raise
        if isinstance(answer, OSError):
            raise answer
        return answer

    def end(self) -> None:
        """End it at once. Its workers continue."""
        with DeferSigint():
            self._requests.close()
            if self._process.is_alive():
                with contextlib.suppress(ProcessLookupError):  # it has ended since the check
                    os.kill(self.pid, signal.SIGKILL)
                self._process.join(1.0)

    def is_alive(self) -> bool:
        """Whether it can take requests."""
        return not self._requests.closed and bool(self._process.is_alive())


class ForkServers:
    """The servers of this process.

    Attributes:
        root: The server that the others are forked from; ``None`` until it is started.
        servers: The others, the most recently used last.
        refused: Modules after whose import workers must not be forked: each worker imports them itself.
    """

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """Start with no servers, as a forked child must: the servers belong to its parent."""
        self._lock = threading.Lock()
        self.root: ForkServer | None = None
        self.servers: list[ForkServer] = []
        self.refused: dict[str, ImportResult] = {}
        self._surroundings: Surroundings | None = None  # in which they were refused

    def server_with(
        self, modules: Collection[str], log: WorkerLog, *, silence: bool
    ) -> tuple[ForkServer, dict[str, str]]:
        """Return a server that has imported these modules, and why some are missing; `OSError` if none can be started.

        Output of the imports goes to the log; ``silence``: without warnings.
        """
        with self._lock:
            if self.root is None or not self.root.is_alive():
                self.root = ForkServer.start()
            wanted = [module for module in modules if not self.root.knows(module)]
            if not wanted:
                return self.root, {}
            known = self.refused if self._surroundings == _surroundings() else {}
            self._surroundings = _surroundings()
            self.refused = {module: found for module, found in known.items() if not _have_changed(found.files)}
            self.servers = [one for one in self.servers if one.is_alive() and not _have_changed(one.files)]
            while True:
                server = self._server(self.root, self._surroundings, frozenset(name.split(".")[0] for name in wanted))
                try:
                    missing = self._load(server, wanted, log, silence)
                except BaseException:  # an interrupt: the import's side effects are unknown
                    server.end()
                    raise
                if server in self.servers:
                    return server, missing

    def _server(self, root: ForkServer, surroundings: Surroundings, packages: frozenset[str]) -> ForkServer:
        """Return the server for these packages; a new one is forked from the one that has most of them."""
        fitting = [one for one in self.servers if one.surroundings == surroundings and one.packages <= packages]
        server = max(fitting, key=lambda one: len(one.packages), default=root)
        if server.packages != packages:
            server = server.fork_server(surroundings, packages)
        self.servers = [*(one for one in self.servers if one is not server), server][-_MOST_SERVERS:]
        return server

    def _load(self, server: ForkServer, wanted: Sequence[str], log: WorkerLog, silence: bool) -> dict[str, str]:
        """Let a server import missing modules; return why others are missing. Drop a server that became unfit."""
        missing: dict[str, str] = {}
        for module in wanted:
            if server.knows(module):
                continue
            if module in self.refused:
                missing[module] = self.refused[module].reason
                continue
            try:
                loaded = server.load(module, log, silence=silence)
            except ConnectionError:  # the import may not be the cause: it is tried again for the next pool
                loaded = ImportResult(0.0, frozenset(), {"": _UNKNOWN}, "", "ends the process")
            if loaded.reason:
                self.refused[module] = loaded
                self.servers.remove(server)
                break
            if loaded.error:
                missing[module] = loaded.error
        return missing


def _have_changed(files: dict[str, tuple[int, int]]) -> bool:
    return any(state != _stamp(file) for file, state in files.items())


SERVERS = ForkServers()


# -------------------------------------------------------------------- how processes are started


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
        # what they need of it.
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


def _settings(name: str) -> dict[str, Any]:
    """Return the settings that `multiprocessing.spawn` prepares in a new process, without the main module."""
    settings = {key: value for key, value in spawn.get_preparation_data(name).items() if not key.startswith("init_")}
    return {**settings, "authkey": bytes(settings["authkey"])}


def _show_main() -> None:
    sys.modules["__main__"].__dict__.update(_HIDDEN)
    _HIDDEN.clear()


def _reset_after_fork() -> None:
    """Let a forked child start workers itself, even if it was forked while its parent was starting one."""
    global _STARTING  # noqa: PLW0603 (the parent's lock, locked by a thread that is not here, cannot be had)
    _STARTING = threading.Lock()
    _show_main()
    SERVERS.forget()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_reset_after_fork)
