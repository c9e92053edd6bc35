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
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from parallelenv.backends._process import ForkedProcess
from parallelenv.backends._worker_process import serve
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
_SILENT = ("ignore", None, Warning, None, 0)  # the filter of `warnings.simplefilter("ignore")`

_STARTING = threading.Lock()
_HIDDEN: dict[str, Any] = {}  # attributes of the main module that are removed while a process is being started
_PRISTINE: list[Any] = []  # in a server: the global generators as they were before imports
_UNSEEDED: list[np.random.Generator] = []  # in a server: those that imports have made


# -------------------------------------------------------------------- the servers' end


class ImportResult(NamedTuple):
    """The result of an import in a server.

    Attributes:
        seconds: Duration.
        modules: The new modules in ``sys.modules``.
        files: Their files, each with its state when it was read.
        error: The error that it raised; empty if none.
        obstacle: Why workers must not be forked from this server any more; empty if they may.
    """

    seconds: float
    modules: frozenset[str]
    files: dict[str, Any]
    error: str
    obstacle: str


def serve_forks(requests: Connection) -> None:
    """Run a server: import and fork on request, until the caller closes the pipe or dies.

    Args:
        requests: This end of the pipe. A request is the name of a method of `_Server`, its arguments, and the number of
            descriptors that follow.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; it is meant for the caller
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})  # blocked while this process started
    caller: Any = multiprocessing.parent_process()
    server = _Server(requests, caller.sentinel)
    _PRISTINE[:] = _PRISTINE or _generator_state()
    try:
        requests.send(frozenset(sys.modules))
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
            finally:
                for fileno in filenos:
                    os.close(fileno)
            requests.send(answer)
    except (EOFError, OSError):  # the caller closed the pipe or died
        os._exit(0)  # does not wait for threads that an import has started


class _Server:
    """The state of a server."""

    def __init__(self, requests: Connection, sentinel: int) -> None:
        self._requests = requests
        self._sentinel = sentinel
        self._children: dict[int, Connection] = {}  # where to report the exit code of each
        self._news, self._wake = os.pipe()
        os.set_blocking(self._news, False)
        os.set_blocking(self._wake, False)

    def await_request(self) -> None:
        """Wait for the next request; meanwhile report children that have ended."""
        # Each time again: an import may have set its own handlers.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGCHLD, lambda signum, frame: None)
        signal.set_wakeup_fd(self._wake, warn_on_full_buffer=False)
        ready: list[Any] = []
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
            ready = wait([self._requests, self._news])
            if self._news in ready:
                os.read(self._news, 4096)

    def fork(
        self, target: Callable[..., None], settings: dict[str, Any], sentinel: int, report: int, *ends: int
    ) -> int:
        """Fork a process that calls ``target`` with descriptors; return its id.

        Args:
            target: A function of a module.
            settings: As prepared by `multiprocessing.spawn`; with ``environment`` for a server.
            sentinel: Becomes readable when the caller dies.
            report: Descriptor for the exit code.
            *ends: Arguments of ``target``.
        """
        context: Any = multiprocessing.get_context("forkserver")
        child = context.Process(target=target, args=ends, name=settings["name"])
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
        """Import a module and find its side effects.

        Args:
            module: Its name.
            silence: Whether its warnings are ignored.
            output: Descriptor for its output.
        """
        log = WorkerLog(os.dup(output))
        redirect_descriptors(log)
        redirect_streams(lambda: None, (1, 2))
        known, before, error = set(sys.modules), _unforkable_resources(), ""
        files: set[str] = set()
        begin, start = time.time_ns(), time.perf_counter()
        try:
            importlib.invalidate_caches()
            with _ignoring_warnings() if silence else contextlib.nullcontext():
                importlib.import_module(module)
        except BaseException as caught:  # noqa: BLE001 (the worker imports it again, and raises it to the user)
            error = f"{type(caught).__name__}: {caught}"
            files = {frame.f_code.co_filename for frame, _ in traceback.walk_tb(caught.__traceback__)}
            files.add(str(getattr(caught, "filename", "")))  # for a SyntaxError
        seconds = time.perf_counter() - start
        modules = sys.modules.keys() - known
        files |= {file for name in modules if (file := getattr(sys.modules[name], "__file__", None))}
        obstacle = ", ".join(sorted({what for what, _ in _unforkable_resources() - before}))
        if error and modules:
            obstacle = f"raises {error}"  # partly imported
        gc.collect()
        _UNSEEDED.extend(one for one in gc.get_objects() if type(one) is np.random.Generator and _is_unseeded(one))
        gc.freeze()  # else garbage collection in workers would copy the shared pages
        return ImportResult(seconds, frozenset(modules), {file: _stamp(file, begin) for file in files}, error, obstacle)


@contextlib.contextmanager
def _ignoring_warnings() -> Iterator[None]:
    """Ignore warnings in the block. Other filters set in the block stay, as they would in a worker."""
    filters: Any = warnings.filters
    was_there = _SILENT in filters
    warnings.simplefilter("ignore")
    try:
        yield
    finally:
        if not was_there and _SILENT in filters:
            filters.remove(_SILENT)
        with warnings.catch_warnings():
            pass  # its end announces the changed filters


def _generator_state() -> list[Any]:
    """Return the part of both global generators' state that seeding changes and drawing a few numbers does not."""
    state: Any = np.random.get_state(legacy=True)
    return [random.getstate()[1][:-1], state[1].tobytes()]


def _reseed_generators(numbers: Any) -> None:
    """Make random generators differ from those of other workers, unless imports have seeded them.

    Args:
        numbers: State of `random` in the server; Python reseeds it in each forked process.
    """
    if numbers[1][:-1] != _PRISTINE[0]:
        random.setstate(numbers)
    if _generator_state()[1] == _PRISTINE[1]:
        np.random.seed()
    for generator in _UNSEEDED:
        fresh: Any = type(generator.bit_generator)
        generator.bit_generator.state = fresh().state


def _is_unseeded(generator: np.random.Generator) -> bool:
    entropy = getattr(getattr(generator.bit_generator, "seed_seq", None), "entropy", None)
    return isinstance(entropy, int) and entropy >= _SEED_SIZE


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


def _stamp(file: str, begin: int | None = None) -> tuple[int, int] | None:
    """Return a stamp that changes with a file's content; ``None`` if there is no reliable one.

    Args:
        file: Its path.
        begin: When it was read, in ns. If it was written since, its state may be newer than the content read.
    """
    try:
        found = os.stat(file)
    except OSError:
        return (0, 0)
    is_later = begin is not None and begin <= found.st_mtime_ns <= time.time_ns()
    return None if is_later else (found.st_mtime_ns, found.st_size)


def _serve_forks(requests: int) -> None:
    serve_forks(Connection(requests))


def _serve_worker(connection: int, log: int) -> None:
    serve(Connection(connection), WorkerLog(log))


# -------------------------------------------------------------------- the caller's end


class ImportSettings(NamedTuple):
    """The settings that affect how modules are imported.

    Attributes:
        path: ``sys.path``.
        folder: The current folder, if modules may be found there.
        environment: Environment variables.
    """

    path: tuple[str, ...]
    folder: str
    environment: dict[str, str]

    @classmethod
    def of_caller(cls) -> ImportSettings:
        """Return the settings of this process."""
        environment = {name: value for name, value in os.environ.items() if not name.startswith(_VOLATILE)}
        is_absolute = all(os.path.isabs(folder) for folder in sys.path if isinstance(folder, str))
        return cls(tuple(sys.path), "" if is_absolute else os.getcwd(), environment)


class ForkServer:
    """A server, as seen by the caller. It ends when nothing refers to this object any more.

    Args:
        process: An object with its ``pid`` and ``is_alive()``.
        requests: The caller's end of the pipe.
        surroundings: Its settings, ``None`` for the root.
        packages: The packages from which it may import.

    Attributes:
        loaded: Modules that it has imported on request, with the seconds that each took.
        files: Files of its imports, each with its state at that time.
    """

    def __init__(
        self,
        process: Any,
        requests: Connection,
        import_settings: ImportSettings | None = None,
        packages: frozenset[str] = frozenset(),
    ) -> None:
        self.import_settings = import_settings
        self.packages = packages
        self._process = process
        self._requests = requests
        self._lock = threading.Lock()
        self._known: frozenset[str] = frozenset()
        self.loaded: dict[str, float] = {}
        self.files: dict[str, Any] = {}

    @classmethod
    def start(cls) -> ForkServer:
        """Start a root.

        Raises:
            OSError: If no process can be started.
        """
        context: Any = multiprocessing.get_context("spawn")
        with starting("spawn"):
            ours, theirs = context.Pipe()
            with theirs:
                root = context.Process(target=serve_forks, args=(theirs,), name="parallelenv-fork-server")
                root.start()
            # Private: else it is in `multiprocessing.active_children()`, and joining all of them never ends.
            children: Any = process
            children._children.discard(root)
            return cls(root, ours)

    def fork_server(self, import_settings: ImportSettings, packages: frozenset[str]) -> ForkServer:
        """Return a server forked from this one. Arguments: see `ForkServer`.

        Raises:
            OSError: If it cannot be started, for lack of resources or because this server has ended.
        """
        settings = {**_settings("parallelenv-fork-server"), "environment": import_settings.environment}
        with DeferSigint():
            ours, theirs = multiprocessing.Pipe()
            with theirs:
                forked = self._fork(_serve_forks, settings, theirs.fileno())
            server = ForkServer(forked, ours, import_settings, packages)
            server.loaded, server.files = dict(self.loaded), dict(self.files)
            return server

    def fork_worker(self, connection: Connection, log: WorkerLog) -> ForkedProcess:
        """Return a worker forked from this server. Errors: see `fork_server`.

        Args:
            connection: The worker's end of its pipe.
            log: The log for its output.
        """
        return self._fork(_serve_worker, _settings("parallelenv-worker"), connection.fileno(), log.fileno)

    def _fork(self, target: Callable[..., None], settings: dict[str, Any], *ends: int) -> ForkedProcess:
        sentinel, lifeline = multiprocessing.Pipe(duplex=False)
        status, report = multiprocessing.Pipe(duplex=False)
        with sentinel, report:
            pid = self._ask("fork", (target, settings), sentinel.fileno(), report.fileno(), *ends)
        return ForkedProcess(pid, status, lifeline, self)

    def load(self, module: str, log: WorkerLog, *, silence: bool) -> ImportResult:
        """Import a module in the server. An interrupt ends the server.

        Args:
            module: Its name.
            log: The log for its output.
            silence: Whether its warnings are ignored.

        Raises:
            ConnectionError: If the server has ended.
        """
        loaded: ImportResult = self._ask("load", (module, silence), log.fileno)
        self._known |= loaded.modules
        self.files.update(loaded.files)
        if not loaded.error:
            self.loaded[module] = loaded.seconds
        return loaded

    def _ask(self, name: str, arguments: tuple[Any, ...], *filenos: int) -> Any:
        self.knows("")
        with self._lock, self._ending_if_cut():
            self._requests.send((name, arguments, len(filenos)))
            for fileno in filenos:
                reduction.send_handle(self._requests, fileno, self.pid)
            answer = self._requests.recv()
        if isinstance(answer, OSError):
            raise answer
        return answer

    def knows(self, module: str) -> bool:
        """Whether it has imported a module."""
        with self._lock:
            if not self._known:
                with self._ending_if_cut():
                    self._known = self._requests.recv()
        return module in self._known

    @contextlib.contextmanager
    def _ending_if_cut(self) -> Iterator[None]:
        """End the server if an error or an interrupt leaves a request partly sent or without a reply."""
        try:
            yield
        except BaseException as error:
            self.end()
            if isinstance(error, EOFError):
                raise ConnectionResetError(f"the fork server, process {self.pid}, has ended") from error
            raise

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

    @property
    def pid(self) -> int:
        """Id of the process."""
        return int(self._process.pid)


class Refusal(NamedTuple):
    """Why each worker must import a module itself.

    Attributes:
        reason: The side effect of its import.
        files: Files that it has read, each with its state at that time.
        surroundings: The settings of the import.
    """

    reason: str
    files: dict[str, Any]
    import_settings: ImportSettings


class ForkServers:
    """The servers of this process.

    Attributes:
        root: The server that the others are forked from; ``None`` until it is started.
        servers: The others, the most recently used last.
        refused: Modules after whose import workers must not be forked.
    """

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """Start with no servers, as a forked child must: the servers belong to its parent."""
        self._lock = threading.Lock()
        self.root: ForkServer | None = None
        self.servers: list[ForkServer] = []
        self.refused: dict[str, Refusal] = {}

    def server_with(
        self, modules: Collection[str], log: WorkerLog, *, silence: bool
    ) -> tuple[ForkServer, dict[str, str]]:
        """Return a server that has imported these modules, and why the others are missing.

        Args:
            modules: Their names.
            log: The log for the output of the imports.
            silence: Whether warnings are ignored during imports.

        Raises:
            OSError: If no process can be started.
        """
        with self._lock:
            if self.root is None or not self.root.is_alive():
                self.root = ForkServer.start()
            root = self.root
            wanted = [module for module in modules if not root.knows(module)]
            if not wanted:
                return root, {}
            import_settings = ImportSettings.of_caller()
            self.servers = [one for one in self.servers if one.is_alive() and not _have_changed(one.files)]
            self.refused = {
                module: refusal
                for module, refusal in self.refused.items()
                if refusal.import_settings == import_settings and not _have_changed(refusal.files)
            }
            while True:
                server = self._server(root, import_settings, frozenset(module.partition(".")[0] for module in wanted))
                try:
                    missing = self._load(server, import_settings, wanted, log, silence)
                except BaseException:  # an interrupt: the import's side effects are unknown
                    server.end()
                    raise
                if server in self.servers:
                    return server, missing

    def _server(self, root: ForkServer, import_settings: ImportSettings, packages: frozenset[str]) -> ForkServer:
        """Return the server for these packages; a new one is forked from the one that has most of them."""
        fitting = [one for one in self.servers if one.import_settings == import_settings and one.packages <= packages]
        server = max(fitting, key=lambda one: len(one.packages), default=root)
        if server.packages != packages:
            server = server.fork_server(import_settings, packages)
        self.servers = [*(one for one in self.servers if one is not server), server][-_MOST_SERVERS:]
        return server

    def _load(
        self, server: ForkServer, import_settings: ImportSettings, wanted: Sequence[str], log: WorkerLog, silence: bool
    ) -> dict[str, str]:
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
            except ConnectionError:  # requested again for the next pool: the import may not be the cause
                loaded = ImportResult(0.0, frozenset(), {"": None}, "", "ends the process")
            if loaded.obstacle:
                self.refused[module] = Refusal(loaded.obstacle, loaded.files, import_settings)
                self.servers.remove(server)
                break
            if loaded.error:
                missing[module] = loaded.error
        return missing


def _have_changed(files: dict[str, Any]) -> bool:
    return any(state is None or state != _stamp(file) for file, state in files.items())


SERVERS = ForkServers()


# -------------------------------------------------------------------- how processes are started


@contextlib.contextmanager
def starting(method: str) -> Iterator[None]:
    """Start a process in the block, one at a time; an interrupt is delayed until its end.

    Args:
        method: The start method.
    """
    with _STARTING, DeferSigint(), _hidden_main(), _sleeping_blas_threads(), _blocking_sigint(method):
        yield


def _settings(name: str) -> dict[str, Any]:
    """Return the settings that `multiprocessing.spawn` prepares in a new process, without the main module."""
    settings = {key: value for key, value in spawn.get_preparation_data(name).items() if not key.startswith("init_")}
    return {**settings, "authkey": bytes(settings["authkey"])}


@contextlib.contextmanager
def _blocking_sigint(method: str) -> Iterator[None]:
    """Block Ctrl-C in processes started in the block, until they have set their own handling.

    It reaches the whole process group, and would end a worker or fork server that does not ignore it yet.

    Args:
        method: The start method.
    """
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    if method != "fork":
        resource_tracker.ensure_running()  # its start would unblock the signal
    found = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, found)


@contextlib.contextmanager
def _sleeping_blas_threads() -> Iterator[None]:
    """Make idle threads of OpenBLAS sleep at once in processes started in the block.

    They exist as soon as `threadpoolctl` limits them, and spin for 100 ms before they sleep. During that time a step of
    16 CartPoles on 2 cores took 4 ms, a tick of the scheduler, instead of 0.14 ms.
    """
    if _BLAS_TIMEOUT in os.environ:  # set by the user
        yield
        return
    os.environ[_BLAS_TIMEOUT] = "4"  # the logarithm of a number of cycles; 4 is the minimum
    try:
        yield
    finally:
        os.environ.pop(_BLAS_TIMEOUT, None)


@contextlib.contextmanager
def _hidden_main() -> Iterator[None]:
    """Hide the origin of the main module, so that workers do not import it again.

    It need not be importable or guarded: cloudpickle includes what workers need of it.
    """
    main = sys.modules["__main__"]
    _HIDDEN.update({name: main.__dict__[name] for name in ("__file__", "__spec__") if name in main.__dict__})
    main.__dict__.pop("__file__", None)
    main.__spec__ = None
    try:
        yield
    finally:
        _show_main()


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
