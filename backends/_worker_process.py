"""The code of a worker process: a host at the other end of a pipe."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import sys
import threading
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import Any, NamedTuple

import parallelenv
from parallelenv.backends._codec import decode, decode_command, encode_not_read, encode_reply, mark_printed
from parallelenv.backends._process import forget_launcher
from parallelenv.backends._shared_memory import ArrayHeader, SharedArrays, SharedMemory
from parallelenv.backends._wire import Wire
from parallelenv.contract.batch import Array, Batch, Layout
from parallelenv.contract.env_specs import EnvFactory, PackedSource, pack_factories, register_again, unpack_factories
from parallelenv.contract.protocol import Command, PoolPosition, Reply, UnreadableError, WorkerSettings, WorkerSpec
from parallelenv.errors import WorkerStartError
from parallelenv.worker.host import Host
from parallelenv.worker.worker_log import WorkerLog, redirect_descriptors, redirect_streams

if sys.platform != "win32":
    import fcntl

_SPIN = 200e-6
"""Seconds that a worker spins for its next command: about the time of a caller between steps."""
_THREAD_VARIABLES = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "BLIS_NUM_THREADS")


@dataclass(frozen=True, slots=True)
class PackedSpec:
    """A `WorkerSpec` in the form that is sent to a worker.

    Attributes:
        env_ids: The envs.
        envs: Their sources, pickled.
        live: Which of the sources are envs themselves.
        settings: See `WorkerSpec`.
        num_cpus: See `WorkerSpec`.
        environment: The caller's environment variables: those of a fork server may be outdated. If empty, the worker
            keeps its own.
        path: The caller's ``sys.path``: Ray workers know only a part of it.
        registered: Env specs that the caller registered.
        caller: Version and folder of this package in the caller.
        place: See `WorkerSpec`.
        shared: Headers of the arrays whose memory is sent next, if there are any.
    """

    env_ids: tuple[int, ...]
    envs: tuple[bytes, ...]
    live: tuple[bool, ...]
    settings: WorkerSettings
    num_cpus: int
    environment: dict[str, str]
    path: tuple[str, ...]
    registered: dict[str, bytes]
    caller: PackageVersion
    place: PoolPosition
    shared: tuple[ArrayHeader, ...]

    @classmethod
    def of(
        cls,
        spec: WorkerSpec,
        registered: dict[str, bytes],
        caller: PackageVersion,
        environment: Mapping[str, str] = os.environ,
    ) -> PackedSpec:
        """Return a spec in the form to send.

        Raises:
            UnpicklableError: If an env cannot be pickled.
        """
        live = tuple(env.is_live for env in spec.envs)
        return cls(
            spec.env_ids,
            tuple(pack_factories(spec.envs)),
            live,
            spec.settings,
            spec.num_cpus,
            dict(environment),
            tuple(sys.path),
            registered,
            caller,
            spec.place,
            spec.shared.forms if isinstance(spec.shared, SharedArrays) else (),
        )

    def unpack(self, shared: Mapping[str, Array]) -> WorkerSpec:
        """Return the spec, with arrays of this process; envs are unpickled when they are built, each time again."""
        envs = tuple(
            EnvFactory(env_id, _Packed(packed, env_id, is_live, self.caller), is_live=False)
            for env_id, packed, is_live in zip(self.env_ids, self.envs, self.live, strict=True)
        )
        return WorkerSpec(self.env_ids, envs, self.num_cpus, self.settings, self.place, shared)


@dataclass(frozen=True, slots=True)
class _Packed(PackedSource):
    """An env fn that unpickles an env, or an env fn."""

    packed: bytes
    env_id: int
    is_live: bool
    caller: PackageVersion

    def __call__(self) -> Any:
        refuse_other_copy(self.caller)
        return unpack_factories(self.packed, self.env_id, self.is_live).build()

    def prepare(self) -> None:
        """Import what the env needs. A live env is not unpickled, because that would make it."""
        if not self.is_live:
            unpack_factories(self.packed, self.env_id, self.is_live).prepare()


@dataclass(frozen=True, slots=True)
class Attach:
    """Announces the batch; the memory's descriptor follows."""

    layout: Layout


def serve(connection: Connection, log: WorkerLog | None, foreign: Sequence[Connection] = ()) -> None:
    """Run a host until the caller closes the pipe or dies.

    Args:
        connection: The worker's end of the pipe.
        log: The log for its output.
        foreign: Ends of other workers' pipes that a fork has copied: if they stayed open here, those workers would not
            notice the caller's death.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; it is meant for the caller
    if hasattr(signal, "pthread_sigmask"):
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})  # blocked while this process started
    for other in foreign:
        other.close()
    if log is not None:
        redirect_descriptors(log)
    with contextlib.suppress(EOFError, OSError):  # the caller closed the pipe or died
        _serve(Wire(connection), log)


def _serve(wire: Wire, log: WorkerLog | None) -> None:
    packed: PackedSpec = decode(wire.receive())
    # Not earlier: `multiprocessing` has sent the process object through the pipe that is watched, and the system
    # signals a write like the end. A caller that was suspended within that write killed the new worker.
    parent = multiprocessing.parent_process()
    try:
        if parent is not None:
            # Tested for fork, forkserver and spawn; the parent's id and PR_SET_PDEATHSIG would refer to the fork
            # server.
            die_with_caller(parent.sentinel)
    except RuntimeError as error:
        sys.exit(f"A worker could not start a thread ({error}). Raise the limit on processes (ulimit -u) or memory.")
    shared = SharedArrays.receive(wire.connection, packed.shared) if packed.shared else {}
    host = Host(packed.unpack(shared))
    if log is not None:
        redirect_streams(log, lambda: host.current, (1, 2))
    prepare_worker(packed)
    obey(wire, host, packed, log)


def obey(wire: Wire, host: Any, packed: PackedSpec, log: WorkerLog | None) -> None:
    """Execute commands from a pipe until the other end is closed; then close the envs.

    Args:
        wire: This end of the pipe.
        host: A `Host` or an object with the same methods.
        packed: The host's spec.
        log: The log that it prints to.

    Raises:
        EOFError, OSError: At the end, always.
    """
    limits = None
    try:
        while True:
            await_message(wire)
            command = take_command(wire, host, packed)
            if command is not None:
                reply = host.execute(command)
                if command.operation == "build":  # not before: only loaded libraries can be limited
                    limits = limits or _limit_threads(packed.settings.threads)
                answer(wire, reply, log)
    finally:
        host.close()


def await_message(wire: Wire) -> None:
    """Spin for a while, or until a command comes."""
    wire.await_message(_SPIN)


def take_command(wire: Wire, host: Any, packed: PackedSpec) -> Command | None:
    """Return the next command; ``None`` if it was not for the envs, or cannot be read, which is then reported.

    Raises:
        EOFError, OSError: If the other end is closed.
    """
    try:
        command = decode_command(wire.receive(), packed.env_ids)
    except UnreadableError as error:
        wire.send(encode_not_read(error))
        return None
    if isinstance(command, Attach):
        memory = SharedMemory.receive(wire.connection, command.layout.nbytes)
        host.attach(Batch(command.layout, memory.map, owner=memory))
        return None
    return command  # type: ignore[no-any-return]


def answer(wire: Wire, reply: Reply, log: WorkerLog | None) -> None:
    """Send a reply, with a mark if anything was printed meanwhile."""
    message = encode_reply(reply)
    wire.send(mark_printed(message) if log is not None and log.has_grown() else message)


def prepare_worker(packed: PackedSpec) -> None:
    """Give a new worker process the caller's settings that envs may depend on."""
    if packed.environment:
        os.environ.clear()
        os.environ.update(packed.environment)
    forget_launcher()
    sys.path.extend(folder for folder in packed.path if folder not in sys.path)
    if packed.settings.silence_warnings:
        warnings.simplefilter("ignore")
    register_again(packed.registered)


def _limit_threads(threads: int) -> Any:
    """Prevent numerical libraries from starting a thread per core in every worker."""
    if any(name in os.environ for name in _THREAD_VARIABLES):  # set by the user
        return None
    from threadpoolctl import threadpool_limits

    return threadpool_limits(threads)


def die_with_caller(sentinel: int) -> None:
    """End this process when the caller dies, whatever the env is doing.

    Args:
        sentinel: A descriptor that becomes readable then, whose end no other process shares.

    Raises:
        RuntimeError: If no thread can be started.
    """

    def watch() -> None:
        wait([sentinel])
        os._exit(1)

    end_with_caller(sentinel)  # for C code that keeps the GIL, where the thread cannot act
    threading.Thread(target=watch, name="parallelenv-watchdog", daemon=True).start()


def end_with_caller(sentinel: int) -> None:
    """Make the system end this process when the caller dies, on Linux. Arguments: see `die_with_caller`."""
    if sys.platform == "linux":
        fcntl.fcntl(sentinel, fcntl.F_SETOWN, os.getpid())
        fcntl.fcntl(sentinel, fcntl.F_SETSIG, signal.SIGKILL)
        fcntl.fcntl(sentinel, fcntl.F_SETFL, fcntl.fcntl(sentinel, fcntl.F_GETFL) | os.O_ASYNC)


class PackageVersion(NamedTuple):
    """Version and folder of a copy of this package.

    Attributes:
        version: Its version.
        folder: Its folder; empty if that cannot be compared, as on other machines.
    """

    version: str
    folder: str


def package_version() -> PackageVersion:
    """Return version and folder of the copy that runs here."""
    return PackageVersion(parallelenv.__version__, os.path.dirname(os.path.realpath(parallelenv.__file__)))


def refuse_other_copy(caller: PackageVersion) -> None:
    """Raise if the caller runs another copy than this process.

    Raises:
        WorkerStartError: If it does.
    """
    ours = package_version()
    if not caller.folder:
        if caller.version != ours.version:
            raise WorkerStartError(
                f"A worker has version {ours.version} of parallelenv, in {ours.folder}, but the caller has "
                f"{caller.version}. Install the same version on all machines."
            )
    elif caller != ours:
        raise WorkerStartError(
            f"A worker runs another copy of parallelenv than the caller: version {ours.version} in {ours.folder}, not "
            f"{caller.version} in {caller.folder}. sys.path has changed since the caller imported parallelenv. Set "
            f"PYTHONPATH={os.path.dirname(caller.folder)} before Python starts."
        )
