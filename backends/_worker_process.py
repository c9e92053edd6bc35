"""The inside of a worker process: a host at the other end of a pipe."""

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
"""Seconds that a worker stays awake for its next command: about what a caller does between steps."""
_THREAD_VARIABLES = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "BLIS_NUM_THREADS")


@dataclass(frozen=True, slots=True)
class PackedSpec:
    """A `WorkerSpec` on its way to a worker.

    Attributes:
        env_ids: The envs.
        envs: Their sources, pickled.
        live: Which of the sources are envs themselves.
        settings: As in `WorkerSpec`.
        num_cpus: As in `WorkerSpec`.
        environment: The caller's environment variables: a fork server knows only old ones. If
            empty, the worker keeps its own.
        path: Where the caller finds modules: Ray workers know only a part of it.
        registered: Env specs that the caller registered.
        caller: Which copy of this package the caller runs.
        place: As in `WorkerSpec`.
        shared: Forms of arrays whose memory comes after this, if there are any.
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
        """Return a spec ready to travel.

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
        """Return the spec, with arrays that are here now; envs are unpickled when they are built, each time anew."""
        envs = tuple(
            EnvFactory(env_id, _Packed(packed, env_id, is_live, self.caller), is_live=False)
            for env_id, packed, is_live in zip(self.env_ids, self.envs, self.live, strict=True)
        )
        return WorkerSpec(self.env_ids, envs, self.num_cpus, self.settings, self.place, shared)


@dataclass(frozen=True, slots=True)
class _Packed(PackedSource):
    """An env fn that unpickles an env, or what makes it."""

    packed: bytes
    env_id: int
    is_live: bool
    caller: PackageVersion

    def __call__(self) -> Any:
        refuse_other_copy(self.caller)
        return unpack_factories(self.packed, self.env_id, self.is_live).build()

    def prepare(self) -> None:
        """As `EnvFactory.prepare`. A live env is left as it is: to unpickle it is to make it."""
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
        log: Where to print to.
        foreign: Ends of other workers' pipes that a fork has copied: kept open here they
            would hide from those workers that the caller is gone.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C goes to the whole group; it is meant for the caller
    if hasattr(signal, "pthread_sigmask"):
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})  # blocked while this process started
    for other in foreign:
        other.close()
    if log is not None:
        redirect_descriptors(log)
    with contextlib.suppress(EOFError, OSError):  # the caller closed the pipe, or is gone
        _serve(Wire(connection), log)


def _serve(wire: Wire, log: WorkerLog | None) -> None:
    packed: PackedSpec = decode(wire.receive())
    # Not earlier: `multiprocessing` has sent the process object through the very pipe that is watched, and the system
    # signals a write as it signals the end. A caller that was suspended within that write killed the new worker.
    parent = multiprocessing.parent_process()
    try:
        if parent is not None:
            # Tried for fork, forkserver and spawn; the parent's id and PR_SET_PDEATHSIG tell of the fork server.
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
    """Execute what comes over a pipe until it is closed at the other end; then close the envs.

    Args:
        wire: This end of the pipe.
        host: A `Host`, or what behaves like one.
        packed: What it owns.
        log: What it prints to.

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
                if command.name == "build":  # not before: only libraries that are loaded can be limited
                    limits = limits or _limit_threads(packed.settings.threads)
                answer(wire, reply, log)
    finally:
        host.close()


def await_message(wire: Wire) -> None:
    """Stay awake for a while, or until a command comes."""
    wire.await_message(_SPIN)


def take_command(wire: Wire, host: Any, packed: PackedSpec) -> Command | None:
    """Return the next command; ``None`` if it was none for the envs, or cannot be read, which is then answered.

    Raises:
        EOFError, OSError: If the other end is gone.
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
    """Send a reply, and say whether anything was printed meanwhile."""
    message = encode_reply(reply)
    wire.send(mark_printed(message) if log is not None and log.has_grown() else message)


def prepare_worker(packed: PackedSpec) -> None:
    """Make a new worker process alike to the caller's in what envs may depend on."""
    if packed.environment:
        os.environ.clear()
        os.environ.update(packed.environment)
    forget_launcher()
    sys.path.extend(folder for folder in packed.path if folder not in sys.path)
    if packed.settings.silence_warnings:
        warnings.simplefilter("ignore")
    register_again(packed.registered)


def _limit_threads(threads: int) -> Any:
    """Keep numerical libraries from starting a thread per core in every worker."""
    if any(name in os.environ for name in _THREAD_VARIABLES):  # the user has decided
        return None
    from threadpoolctl import threadpool_limits

    return threadpool_limits(threads)


def die_with_caller(sentinel: int) -> None:
    """End this process when the caller's ends, whatever the env is doing.

    Args:
        sentinel: A descriptor that can be read from then on, and of which nobody else has the same end.

    Raises:
        RuntimeError: If no thread can be started.
    """

    def watch() -> None:
        wait([sentinel])
        os._exit(1)

    end_with_caller(sentinel)  # also where the thread cannot: beside C code that keeps the interpreter lock
    threading.Thread(target=watch, name="parallelenv-watchdog", daemon=True).start()


def end_with_caller(sentinel: int) -> None:
    """Let the system end this process when the caller's ends, as Linux can. Arguments: as for `die_with_caller`."""
    if sys.platform == "linux":
        fcntl.fcntl(sentinel, fcntl.F_SETOWN, os.getpid())
        fcntl.fcntl(sentinel, fcntl.F_SETSIG, signal.SIGKILL)
        fcntl.fcntl(sentinel, fcntl.F_SETFL, fcntl.fcntl(sentinel, fcntl.F_GETFL) | os.O_ASYNC)


class PackageVersion(NamedTuple):
    """Where a copy of this package comes from.

    Attributes:
        version: Its version.
        folder: Where it is; empty if that says nothing, as it does not on other machines.
    """

    version: str
    folder: str


def package_version() -> PackageVersion:
    """Return where the copy comes from that runs here."""
    return PackageVersion(parallelenv.__version__, os.path.dirname(os.path.realpath(parallelenv.__file__)))


def refuse_other_copy(caller: PackageVersion) -> None:
    """Refuse to work for a caller that runs another copy than this process.

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
