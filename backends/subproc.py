"""The mode ``subproc``: worker processes on this machine step the envs, and optionally the caller steps some of them.

Commands and replies go over one pipe per worker. Arrays of fixed shape and dtype (actions, states, rewards and flags)
are in shared memory. In a step, each worker receives one small message and sends one back, unless a bell (see
`_bell`) replaces both messages.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import multiprocessing
import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from multiprocessing.connection import Connection
from typing import Any

from parallelenv.backends._bell import HAS_BELL
from parallelenv.backends._channel_group import TERMINATE_TIMEOUT, ChannelGroup
from parallelenv.backends._fork_server_client import SERVERS, ForkServer
from parallelenv.backends._in_process import CallerChannel
from parallelenv.backends._pipe import PipeChannel
from parallelenv.backends._pipe_host import serve
from parallelenv.backends._process import CLOSED_IN_CHILDREN, CpuBalancer, WorkerProcess, start_methods, starting
from parallelenv.backends._shared_memory import SharedArrays, SharedMemory
from parallelenv.contract.arguments import check_flags
from parallelenv.contract.batch import Array, Batch, Layout
from parallelenv.contract.copying import deep_copy
from parallelenv.contract.env_specs import EnvFactory, modules_of, pack_factories
from parallelenv.contract.error_text import did_you_mean, show
from parallelenv.contract.packed_worker_spec import PackedSpec
from parallelenv.contract.protocol import Backend, Channel, Command, Printed, RepeatedStep, WorkerSpec
from parallelenv.contract.tracebacks import warn_user
from parallelenv.errors import ArgumentError, WorkerStartError
from parallelenv.worker.worker_log import WorkerLog, open_standard_descriptors


class SubprocBackend(Backend):
    """A backend with one worker process per usable core. Each worker process steps several envs.

    Args:
        start_method: ``"forkserver"``, ``"spawn"`` or ``"fork"``. The default is ``"forkserver"`` if it is available,
            otherwise ``"spawn"``.
        caller_steps: Whether the caller is one of the workers. Instead of waiting, the caller then steps its share of
            the envs in its own process, and no worker has to yield a core to the caller. With this option, 16 CartPoles
            on 2 cores make 294,000 steps/s instead of 257,000. But anything that the envs in the caller's share do to
            their process affects the caller, and no time limit interrupts them.
        preload: Names of modules that envs import later. This option works only with ``"forkserver"`` on Linux.
        eventfd: Whether each step is announced to all workers at once by an eventfd, instead of by a message to each
            worker. The default is ``True`` on Linux with an x86-64 processor.
    """

    def __init__(
        self,
        *,
        start_method: str | None = None,
        caller_steps: bool = False,
        preload: Sequence[str] = (),
        eventfd: bool = HAS_BELL,
    ) -> None:
        if sys.platform == "win32":
            raise ArgumentError(
                "'subproc' needs Linux or macOS: its workers share memory by descriptors. Use 'thread'."
            )
        methods = start_methods()
        if start_method is not None and start_method not in methods:
            raise ArgumentError(
                f"start_method={show(start_method)} is not available here; expected one of {tuple(methods)}."
                f"{did_you_mean(str(start_method), methods)}"
            )
        check_flags(caller_steps=caller_steps, eventfd=eventfd)
        self._method = start_method or methods[0]
        self._preload = check_preload(preload)
        if preload and (self._method != "forkserver" or sys.platform != "linux"):
            raise ArgumentError(
                f"preload={list(preload)!r} needs start_method='forkserver', on Linux: with {self._method!r} here "
                "nothing is imported before workers start. Leave out preload."
            )
        if eventfd and not HAS_BELL:
            raise ArgumentError(
                "eventfd=True needs Linux on an x86-64 processor. Leave it out: steps are then announced through pipes."
            )
        self._eventfd = eventfd
        self._caller_steps = caller_steps
        self._callers_share: tuple[int, ...] = ()  # env ids of the host in this process
        self._group = ChannelGroup(CpuBalancer(caller_steps))

    def share(self, arrays: Mapping[str, Array]) -> Mapping[str, Array]:  # noqa: D102 (see Backend)
        return SharedArrays.place(arrays)

    def launch(self, specs: Sequence[WorkerSpec]) -> list[Channel]:  # noqa: D102 (see Backend)
        shared = specs[0].shared
        headers = shared.headers if isinstance(shared, SharedArrays) else ()
        if self._caller_steps and not self._callers_share:
            self._callers_share = specs[-1].env_ids  # the smallest share, because the caller has other work too
        ours = [spec for spec in specs if spec.env_ids == self._callers_share]
        pack_factories([env for spec in ours for env in spec.envs])  # refuses the same envs as in workers
        packed = PackedSpec.pack([spec for spec in specs if spec.env_ids != self._callers_share], shared=headers)
        if packed and multiprocessing.current_process().daemon:
            raise WorkerStartError(
                "This process is a daemonic process of multiprocessing, which cannot start processes. Use "
                "para_mode='dummy' or 'thread' here, or start this process with daemon=False."
            )
        wanted = {spec.env_ids for spec in packed}
        self._group.end(wanted)  # ends workers of an interrupted launch
        try:
            if packed and self._eventfd:
                self._group.use_bell(len(packed))
            with _standard_descriptors():
                started = self._start_processes(packed)
            for worker, sent in started:
                with contextlib.suppress(OSError):  # if the worker has died, its first command reports the death
                    worker.notify(sent)
                    if isinstance(shared, SharedArrays):
                        shared.memory.send(worker.wire.connection, worker.process.pid)
                    worker.connect_bell()
        except BaseException:
            self._group.end(wanted)
            raise
        channels: list[Channel] = [worker for worker, _ in started]
        for spec in ours:
            # Live envs are copied each time they are built, as in workers. They are not unpickled, because a pickle
            # would overwrite a notebook's classes with the state that these classes had when they were pickled.
            envs = [
                EnvFactory(env.env_id, functools.partial(deep_copy, deep_copy(env.source)), is_live=False)
                if env.is_live
                else env
                for env in spec.envs
            ]
            channels.append(CallerChannel(dataclasses.replace(spec, envs=tuple(envs))))
        return channels

    def _start_processes(self, packed: Sequence[PackedSpec]) -> list[tuple[PipeChannel, PackedSpec]]:
        """Start a process for each spec, and return its channel and the spec to send to it."""
        started: list[tuple[PipeChannel, PackedSpec]] = []
        server: ForkServer | None = None
        deadline = time.monotonic() + TERMINATE_TIMEOUT
        while len(started) < len(packed):
            spec = packed[len(started)]
            log: Any = None
            try:
                log = WorkerLog.create()
                if self._method == "forkserver" and server is None:
                    server = self._server(log, packed)
                if server is not None:
                    environment, path = server.adapted(spec.environment, spec.path)
                    spec = dataclasses.replace(spec, environment=environment, path=tuple(path))
                started.append((self._start(log, spec.env_ids, server), spec))
            except OSError as error:
                if log is not None:
                    log.close()
                if isinstance(error, ConnectionError) and time.monotonic() < deadline:
                    server = None  # the fork server has died: start a new one
                    continue
                way_out = (
                    "The current folder may have been deleted: change to one that exists, with os.chdir()."
                    if isinstance(error, FileNotFoundError)
                    else "Give a smaller num_cpus, or raise the limit on processes (ulimit -u), open files (ulimit -n) "
                    "or memory."
                )
                raise WorkerStartError(
                    f"A worker process could not be started ({type(error).__name__}: {error}); {len(packed)} were "
                    f"wanted. {way_out}"
                ) from error
        return started

    def _server(self, log: WorkerLog, packed: Sequence[PackedSpec]) -> ForkServer:
        # The check that workers can be forked after an import works only on Linux, so envs' modules are imported only
        # there.
        known = modules_of(env.source.packed for spec in packed for env in spec.envs) if sys.platform == "linux" else []
        silence = packed[0].silence_warnings
        server, missing = SERVERS.server_with([*self._preload, *known], log, silence=silence)
        for module in self._preload:
            if module not in missing:  # even if its import was refused once: another import may have done it since
                continue
            if module in SERVERS.refused:
                warn_user(
                    f"preload: importing {module} {missing[module]}, which forked workers cannot share. Each worker "
                    "imports it by itself. Leave it out of preload."
                )
            else:
                raise ArgumentError(
                    f"preload: {module} cannot be imported ({missing[module]}). Leave it out of preload."
                )
        return server

    def _start(self, log: WorkerLog, env_ids: tuple[int, ...], server: ForkServer | None) -> PipeChannel:
        context: Any = multiprocessing.get_context(self._method)
        with starting(self._method):
            ours, theirs = context.Pipe()
            CLOSED_IN_CHILDREN.add(ours)
            try:
                if server is not None:
                    process = WorkerProcess(server.fork_worker(theirs, log))
                else:
                    process = _start_process(context, theirs, log)
            except OSError:
                ours.close()
                raise
            finally:
                theirs.close()
            channel = self._group.connect(process, ours, log, env_ids)
            del theirs  # inside the block that delays Ctrl-C, because an interrupt in `__del__` would be lost
        return channel

    def allocate(self, layout: Layout) -> Batch:  # noqa: D102 (see Backend)
        memory = SharedMemory.create(layout.nbytes)
        return Batch(layout, memory.map, owner=memory)

    def wait(self, channels: Sequence[Any], timeout: float | None, wanted: int = 1) -> Sequence[Any]:  # noqa: D102 (see Backend)
        return self._group.wait(channels, timeout, wanted)

    def prepare_step(self, commands: Sequence[tuple[Any, Command]]) -> RepeatedStep | None:  # noqa: D102 (see Backend)
        return self._group.prepare_step(commands)

    def flush(self) -> None:  # noqa: D102 (see Backend)
        self._group.flush()

    def fileno(self) -> int | None:  # noqa: D102 (see Backend)
        return self._group.fileno()

    def close(self, channels: Sequence[Channel], timeout: float) -> Sequence[Printed]:  # noqa: D102 (see Backend)
        self._group.hang_up()
        for channel in channels:
            if isinstance(channel, CallerChannel):
                channel.kill()
        return self._group.close(timeout)


@contextlib.contextmanager
def _standard_descriptors() -> Iterator[None]:
    """Keep the descriptors 0, 1 and 2 open in the ``with`` block, see `open_standard_descriptors`."""
    opened: list[int] = []
    try:
        with contextlib.suppress(OSError):  # no descriptor is free, so pipes cannot be opened either
            open_standard_descriptors(opened)
        yield
    finally:
        for fileno in opened:
            os.close(fileno)


def _start_process(context: Any, connection: Connection, log: WorkerLog) -> WorkerProcess:
    """Start a worker process without a fork server.

    Processes that the caller forks inherit the pipe by which `multiprocessing` shows the caller's death to a process.
    As long as one of them lived, a busy worker would outlive the caller, so each worker has a pipe that they close.
    """
    sentinel, lifeline = context.Pipe(duplex=False)
    CLOSED_IN_CHILDREN.add(lifeline)
    with sentinel:
        process = context.Process(target=serve, args=(connection, log, sentinel), name="parallelenv-worker")
        try:
            process.start()
        except OSError:
            lifeline.close()
            raise
    return WorkerProcess(process, lifeline=lifeline)


def check_preload(preload: object) -> tuple[str, ...]:
    """Return the option ``preload`` as a tuple."""
    if not isinstance(preload, (list, tuple)) or not all(isinstance(name, str) for name in preload):
        raise ArgumentError(f"preload={preload!r} must be a list of names of modules, such as ['my_package'].")
    return tuple(preload)
