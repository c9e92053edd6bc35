"""The caller's side of fork servers."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import sys
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from multiprocessing import process, reduction
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any

from parallelenv.backends._fork_server import CHANGED, FileState, ImportResult, have_changed, serve_forks
from parallelenv.backends._process import ForkedProcess, WorkerProcess, new_process, open_pipe, start_settings, starting
from parallelenv.contract.interrupts import DeferSignals, without_sigpipe
from parallelenv.contract.packed_worker_spec import environment_variables
from parallelenv.worker.worker_log import WorkerLog

_VOLATILE = ("PYTEST_CURRENT_TEST", "RAY_", "PYTHONBREAKPOINT")
"""Prefixes of environment variables that may change without any need to import modules again."""
_MOST_SERVERS = 4
"""Maximum number of servers in addition to the root. The least recently used server is dropped first."""
_PATIENCE = 0.5
"""Seconds between checks, while the caller waits for a server, whether Ctrl-C is being delayed."""

Surroundings = tuple[tuple[str, ...], str, dict[str, str]]
"""The settings that affect imports."""


def _surroundings() -> Surroundings:
    environment = {name: value for name, value in environment_variables().items() if not name.startswith(_VOLATILE)}
    is_absolute = all(os.path.isabs(folder) for folder in sys.path if isinstance(folder, str))
    return tuple(sys.path), "" if is_absolute else os.getcwd(), environment


class ForkServer:
    """The caller's access to a fork server. The server ends when nothing refers to this object any more.

    Attributes:
        surroundings: The settings that the server's imports depend on; ``None`` for the root server.
        loaded: For each module that the server has imported on request, the result of the import.
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
        self._process = WorkerProcess(process)
        self._requests = requests
        self._lock = threading.RLock()  # reentrant only because it knows whether this thread holds it
        self._known: frozenset[str] = frozenset()
        self.loaded: dict[str, ImportResult] = {}
        self.files: dict[str, FileState] = {}

    @classmethod
    def start(cls) -> ForkServer:
        """Start a root server; raise `OSError` if no process can be started."""
        with starting("spawn"):
            ours, theirs = open_pipe()
            with theirs:
                root = new_process("spawn", serve_forks, (theirs,), "parallelenv-fork-server")
                root.start()
            # `_children` is private. The server must not be in it: otherwise, the server would be in
            # `multiprocessing.active_children()`, and a program that joins all of these would wait forever.
            vars(process)["_children"].discard(root)
            return cls(root, ours)

    def fork_server(self, surroundings: Surroundings, packages: frozenset[str]) -> ForkServer:
        environment, path = self.adapted(surroundings[2], surroundings[0])
        arguments = {**start_settings("parallelenv-fork-server"), "sys_path": path}, environment
        with DeferSignals():
            ours, theirs = open_pipe()
            with theirs:
                forked = self._fork("fork_server", arguments, theirs.fileno())
            server = ForkServer(forked, ours, surroundings, packages)
            server.loaded, server.files = dict(self.loaded), dict(self.files)
            return server

    def fork_worker(self, connection: Connection, log: WorkerLog) -> ForkedProcess:
        arguments = (start_settings("parallelenv-worker"),)
        return self._fork("fork_worker", arguments, connection.fileno(), log.fileno)

    def _fork(self, name: str, arguments: tuple[object, ...], *ends: int) -> ForkedProcess:
        lifeline, sentinel = open_pipe(duplex=False)
        status, report = multiprocessing.Pipe(duplex=False)
        with sentinel, report:
            pid = self._ask(name, arguments, sentinel.fileno(), report.fileno(), *ends)
        return ForkedProcess(pid, status, lifeline, self)

    def load(self, module: str, log: WorkerLog, *, silence: bool) -> ImportResult:
        """Import a module in the server. If Ctrl-C interrupts the import, this method ends the server."""
        loaded: ImportResult = self._ask("load", (module, silence), log.fileno)
        self._known |= loaded.modules
        self.files.update(loaded.files)
        if not loaded.error:
            self.loaded[module] = loaded
        return loaded

    def adapted(self, environment: Mapping[str, str], path: Sequence[str]) -> tuple[dict[str, str], list[str]]:
        """Return the caller's environment variables and ``sys.path`` with the changes by the server's imports.

        If the caller has imported a module itself, its settings include these changes, or a later choice of the user.
        """
        variables: dict[str, str | None] = {**environment}
        folders = list(path)
        for module, loaded in self.loaded.items():
            if module not in sys.modules:
                variables |= loaded.variables
                for index, folder in loaded.folders.items():
                    folders.insert(index, folder)
        return {name: value for name, value in variables.items() if value is not None}, folders

    def knows(self, module: str) -> bool:
        self._known = self._known or self._ask("modules", ())
        return module in self._known

    def _ask(self, name: str, arguments: tuple[object, ...], *filenos: int) -> Any:
        """Make the server call its method ``name`` with these arguments and file descriptors, and return the result.

        If the request is interrupted, cannot be sent or gets no answer, this method ends the server.
        """
        try:
            self._await(lambda timeout: self._lock.acquire(timeout=timeout))  # it may import for another thread
            try:
                with without_sigpipe():
                    self._requests.send((name, arguments, len(filenos)))
                    for fileno in filenos:
                        reduction.send_handle(self._requests, fileno, self.pid)
                self._await(self._requests.poll)
                answer = self._requests.recv()
            except BaseException as error:
                self.end()
                if isinstance(error, EOFError):
                    raise ConnectionResetError(f"the fork server, process {self.pid}, has ended") from error
                raise
        finally:
            with contextlib.suppress(RuntimeError):  # an interrupt came before this thread had the lock
                self._lock.release()
        if isinstance(answer, OSError):
            raise answer
        return answer

    def _await(self, is_ready: Callable[[float], bool]) -> None:
        """Call ``is_ready`` with a timeout until its result is true, without a time limit.

        If Ctrl-C is being delayed and the server takes long, this method raises an `InterruptedError`. The delayed
        interrupt is then raised soon.
        """
        while not is_ready(_PATIENCE):
            if DeferSignals.is_interrupted():
                raise InterruptedError(f"the fork server, process {self.pid}, does not answer")

    def end(self) -> None:
        """End the server at once. Its workers continue."""
        with DeferSignals():
            self._requests.close()
            if self._process.is_alive():
                self._process.kill()
                self._process.join(1.0)

    def is_alive(self) -> bool:
        return not self._requests.closed and self._process.is_alive()


class ForkServers:
    """All fork servers of this process.

    Attributes:
        servers: All servers except the root; the most recently used server is the last.
        refused: For each module whose import has side effects that do not allow forking, the result of the import. Each
            worker imports these modules itself.
    """

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """Forget all servers. Each forked child does this, because the servers belong to its parent."""
        self._lock = threading.Lock()
        self.root: ForkServer | None = None
        self.servers: list[ForkServer] = []
        self.refused: dict[str, ImportResult] = {}
        self._surroundings: Surroundings | None = None  # those in which modules were refused

    def server_with(
        self, modules: Collection[str], log: WorkerLog, *, silence: bool
    ) -> tuple[ForkServer, dict[str, str]]:
        """Return a server that has imported as many of these modules as possible.

        A module is left out if its import fails, or has side effects that do not allow forking.

        Returns:
            The server, and a dict that maps each module that the server has not imported to the reason.
        """
        with self._lock:
            if self.root is None or not self.root.is_alive():
                self.root = ForkServer.start()
            wanted = [module for module in modules if not self.root.knows(module)]
            if not wanted:
                return self.root, {}
            surroundings = _surroundings()
            if surroundings != self._surroundings:
                self._surroundings, self.refused = surroundings, {}
            self.refused = {module: found for module, found in self.refused.items() if not have_changed(found.files)}
            self.servers = [one for one in self.servers if one.is_alive() and not have_changed(one.files)]
            packages = frozenset(module.split(".")[0] for module in wanted)
            while True:
                server = self._server(self.root, surroundings, packages)
                try:
                    missing = self._load(server, wanted, log, silence)
                except BaseException:  # for example an interrupt: the side effects of the import are unknown
                    server.end()
                    raise
                if missing is not None:
                    return server, missing
                self.servers.remove(server)  # try a new server, without the module that was just refused

    def _server(self, root: ForkServer, surroundings: Surroundings, packages: frozenset[str]) -> ForkServer:
        """Return the server for exactly these packages.

        If there is none yet, fork it from the existing server that may import the most of these packages and no others.
        """
        fitting = [one for one in self.servers if one.surroundings == surroundings and one.packages <= packages]
        server = max(fitting, key=lambda one: len(one.packages), default=root)
        if server.packages != packages:
            server = server.fork_server(surroundings, packages)
        self.servers = [*(one for one in self.servers if one is not server), server][-_MOST_SERVERS:]
        return server

    def _load(self, server: ForkServer, wanted: Sequence[str], log: WorkerLog, silence: bool) -> dict[str, str] | None:
        """Make a server import modules; return a dict that maps each module that is still missing to the reason.

        Return ``None`` if an import had side effects that do not allow forking workers from this server.
        """
        missing: dict[str, str] = {}
        for module in wanted:
            if server.knows(module):
                continue
            if module in self.refused:
                missing[module] = self.refused[module].reason
                continue
            try:
                loaded = server.load(module, log, silence=silence)
            except ConnectionError:  # maybe not because of the import, so the next pool tries it again
                loaded = ImportResult(0.0, frozenset(), {"": CHANGED}, "", "ends the process", {}, {})
            if loaded.reason:
                self.refused[module] = loaded
                return None
            if loaded.error:
                missing[module] = loaded.error
        return missing


SERVERS = ForkServers()

if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=SERVERS.forget)
