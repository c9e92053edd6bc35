"""Ray actors with a host each, reached by Ray's calls or, on the caller's machine, by a socket.

Ray places the actors, gives them their resources and ends them. Near actors get the messages of every step like worker
processes: over a `PipeChannel`.
"""

from __future__ import annotations

import contextlib
import math
import os
import select
import socket
import struct
import sys
import tempfile
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from multiprocessing import reduction
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from parallelenv.backends._eventfd_bell import SPIN
from parallelenv.backends._process import CLOSED_IN_CHILDREN, process_exists
from parallelenv.backends._ray_cluster import SHUT_DOWN, Cluster
from parallelenv.backends._wire import Wire
from parallelenv.backends._worker_process import PipeHost
from parallelenv.contract.batch import Array, frozen
from parallelenv.contract.codec import Message, decode, encode
from parallelenv.contract.copying import Broadcast
from parallelenv.contract.interrupts import DeferSigint
from parallelenv.contract.message_channel import MessageChannel
from parallelenv.contract.packed_worker_spec import PackedSpec
from parallelenv.contract.protocol import Command, Death, Printed, Reply, WorkerSpec
from parallelenv.worker.host import Host
from parallelenv.worker.worker_log import WorkerLog, redirect_streams
from parallelenv.worker.worker_loop import MessageHost, die_with_caller, prepare_worker

_PARTING = 1.0
"""Seconds for Ray to end an actor."""
_PATIENCE = 10.0
"""Seconds to wait for a connection that an actor has announced."""
_CREDENTIALS = struct.Struct("3i")  # process, user, group


# -------------------------------------------------------------------- the actor's end


def connect_twice(address: tuple[str, str] | None) -> list[Connection]:
    """Connect an actor to the caller; nothing if the caller is on another machine or of another user.

    Args:
        address: The path of the caller's socket and its `machine`.

    Raises:
        OSError: If the caller has died or given up meanwhile: Ray may start the actor nevertheless.
    """
    connections: list[Connection] = []
    if address is None or sys.platform != "linux" or machine() != address[1]:
        return connections
    for _ in range(2):
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as guest:
            try:
                guest.connect(address[0])
            except PermissionError:
                return connections
            connections.append(Connection(guest.detach()))
    return connections


def machine() -> str:
    """Return what identifies this machine since it was started, or the container, for processes that see the same."""
    namespaces = [os.readlink(f"/proc/self/ns/{name}") for name in ("pid", "mnt")]
    return " ".join([Path("/proc/sys/kernel/random/boot_id").read_text(), *namespaces])


class RayHost(MessageHost):
    """A host in a Ray actor.

    Args:
        message: The `PackedSpec`, encoded, as the items of a `Message`.
        caller: See `connect_twice`. By the first connection the actor notices the caller's death, sooner than Ray does,
            which takes 1.4 to 2.6 s.
        shared: Read-only arrays for the envs, in Ray's object store.
    """

    pipe_host_class = PipeHost

    def __init__(self, message: tuple[Any, ...], caller: tuple[str, str] | None, shared: Mapping[str, Array]) -> None:
        self._connections = connect_twice(caller)
        if self._connections:
            die_with_caller(self._connections[0].fileno())
        packed: PackedSpec = decode(Message(*message))
        prepare_worker(packed)
        super().__init__(self._make_host(packed.unpack(frozen(shared))), packed)
        self._log = WorkerLog.create()
        if self._log is not None:
            # Only Python's own output: that of C code goes to Ray's log files.
            redirect_streams(lambda: self.host.current, (self._log.fileno, self._log.fileno))
        self._content: Array | None = None

    def _make_host(self, spec: WorkerSpec) -> Any:
        return Host(spec)

    def introduce(self) -> tuple[int, bool]:
        """Return the id of the actor's process, and whether it has connected to the caller."""
        return os.getpid(), bool(self._connections)

    def serve(self) -> None:
        """Execute commands from the second connection, without Ray, until the caller closes it or dies."""
        with contextlib.suppress(EOFError, OSError):
            log = WorkerLog(reduction.recv_handle(self._connections[1]))
            redirect_streams(lambda: self.host.current, (log.fileno, log.fileno))
            host = self.pipe_host_class(self.host, self.packed, Wire(self._connections[1], SPIN), log)
            host.obey(host.receive, host.send)

    def execute(self, message: Message, content: Array | None = None) -> Message | None:
        """Execute the command in a message, see `MessageHost`; ``content``: of its `Broadcast`, by the object store."""
        self._content = content
        return super().execute(message)

    def decode(self, message: Message) -> Command | Message | None:
        """Return the command in a message, with the content of its `Broadcast`."""
        command = super().decode(message)
        if isinstance(command, Command) and self._content is not None:
            command.common.packed = self._content
        return command

    def encode(self, reply: Reply) -> Message:
        """Return a reply as a message, with what was printed meanwhile."""
        reply.output = [*reply.output, *self._take_output()]
        return super().encode(reply)

    def close(self) -> list[Printed]:
        """Close the envs; return what they print meanwhile."""
        self.host.close()
        return self._take_output()

    def _take_output(self) -> list[Printed]:
        return [] if self._log is None else self._log.take_output(self.packed.env_ids, is_idle=True)


# -------------------------------------------------------------------- the caller's end


class ActorHandle:
    """A Ray actor with a host, with the part of `WorkerProcess` that a `PipeChannel` needs.

    Args:
        handle: Ray's handle of the actor.
        cluster: The connection to Ray in which it was started.

    Attributes:
        pid: Process id, once it has started.
        is_near: Whether it runs on this machine and has connected to this process.
        is_direct: Whether it gets its commands over a socket.
        is_ended: Whether Ray was called to end it.
    """

    exitcode = None  # Ray does not report it

    def __init__(self, handle: Any, cluster: Cluster) -> None:
        self.handle = handle
        self.cluster = cluster
        self.pid = 0
        self.is_near = self.is_direct = self.is_ended = False
        self.connections: list[Connection] = []  # when the first is closed, the actor ends; the other is for commands
        self._serving: Any = None

    def serve(self) -> tuple[Connection, WorkerLog]:
        """Let it execute commands from a socket; return the socket and its log."""
        with DeferSigint():
            log: Any = WorkerLog.create()
            with contextlib.suppress(OSError):  # if it has died, its first command reports it
                reduction.send_handle(self.connections[1], log.fileno, self.pid)
            self.is_direct = True
            self._serving = self.handle.serve.remote()
            return self.connections[1], log

    def is_alive(self) -> bool:
        """Whether its process has not ended. Asks the system, which takes 1 us; Ray takes 100."""
        return process_exists(self.pid)

    def join(self, timeout: float = _PARTING) -> None:
        """Wait until it has stopped serving a socket."""
        import ray

        if self.cluster.lasts:
            ray.wait([self._serving], timeout=timeout)

    def terminate(self, number: int = 0) -> None:
        """Make Ray end it, without waiting."""
        import ray

        self.is_ended = True
        if self.cluster.lasts:
            ray.kill(self.handle)

    def close(self) -> None:
        """Close its connections, after it has ended: otherwise Ray would print that an actor died unexpectedly."""
        if self.connections and not self.connections[0].closed:
            poll = select.poll()
            poll.register(self.connections[0], 0)  # reports only that the other end is closed
            poll.poll(_PARTING * 1000)  # may be interrupted and repeated
        with DeferSigint():
            for connection in self.connections:
                connection.close()

    def last_words(self) -> str:
        """Return what Ray knows of its death, empty if nothing."""
        import ray

        if not self.cluster.lasts:
            return SHUT_DOWN
        try:
            ray.get(self._serving, timeout=_PARTING)
        except ray.exceptions.GetTimeoutError:
            return ""
        except ray.exceptions.RayError as error:
            return _quote(error)
        return ""


def _quote(error: BaseException) -> str:
    """Return the first non-empty line of an error of Ray."""
    return "Ray says: " + next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)


@contextlib.contextmanager
def listening(num_actors: int) -> Iterator[socket.socket | None]:
    """Listen for actors on this machine, in a folder that only the user can enter; ``None`` on other systems."""
    if sys.platform != "linux":
        yield None
        return
    with (
        tempfile.TemporaryDirectory(prefix="parallelenv-") as folder,
        socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener,
    ):
        listener.bind(str(Path(folder, "door")))
        listener.listen(2 * num_actors + 16)  # actors connect twice, and are admitted only when all have
        listener.settimeout(_PATIENCE)
        yield listener


def admit(listener: socket.socket, actors: Sequence[ActorHandle]) -> None:
    """Accept the connections of actors, and no others."""
    expected = {actor.pid: actor for actor in actors}
    while expected:
        with DeferSigint():
            guest, _ = listener.accept()
            pid = _CREDENTIALS.unpack(guest.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))[0]
            if pid in expected:
                connections = expected[pid].connections
                connections.append(Connection(guest.detach()))
                CLOSED_IN_CHILDREN.add(connections[-1])
                if len(connections) == 2:
                    del expected[pid]
            guest.close()


class RayChannel(MessageChannel):
    """Calls to one actor, wherever it runs, with replies in the order of the calls.

    Ray's compiled graphs were tried: a round of two actors takes 0.8 to 1.2 ms instead of 1.7 to 2.1 ms. But they
    always call all actors, `ray.wait` does not accept their results, a step of 10 s is an error, and envs do not run in
    the main thread.
    """

    safe_bytes = math.inf  # Ray stores calls and results that nothing reads

    def __init__(self, actor: ActorHandle, env_ids: tuple[int, ...]) -> None:
        super().__init__(env_ids)
        self.actor = actor
        self.answers: deque[Any] = deque()
        self._death = Death()
        self._content: object = None  # of the broadcast in the message that is being sent

    def pack(self, command: Command) -> tuple[Message, object]:
        content = None
        if isinstance(command.common, Broadcast):
            content = _store(command.common) if self.actor.cluster.lasts else None
            command.common = command.common.without_content()
        return super().pack(command), content

    def send(self, packed: tuple[Message, object]) -> None:
        message, self._content = packed
        super().send(message)

    def send_message(self, message: Message) -> None:
        self._refuse_if_gone()
        self.answers.append(self.actor.handle.execute.remote(message, self._content))

    def receive_message(self) -> Message:
        import ray

        self._refuse_if_gone()
        try:
            return ray.get(self.answers[0])  # type: ignore[no-any-return]
        except ray.exceptions.RayError as error:  # the actor, its node, or the owner of the reply died
            self._death = Death(self.actor.pid, None, _quote(error))
            raise EOFError from error
        finally:
            self.answers.popleft()

    def _refuse_if_gone(self) -> None:
        if not self.actor.cluster.lasts:
            self._death = Death(self.actor.pid, None, SHUT_DOWN)
            raise EOFError(SHUT_DOWN)

    def notify(self, anything: object) -> None:
        self.actor.handle.execute.remote(encode(anything))

    def cause_of_death(self) -> Death:
        return self._death

    def kill(self) -> None:
        self.answers.clear()
        self.actor.terminate()
        self.actor.close()


def _store(broadcast: Broadcast) -> object:
    """Put a broadcast into Ray's object store, unless it is there; each node then fetches it only once."""
    import ray

    if broadcast.stored is None:
        broadcast.stored = ray.put(broadcast.packed)
    return broadcast.stored


def wait_for_calls(channels: Sequence[RayChannel], timeout: float) -> list[RayChannel]:
    """Return the channels with a reply; wait at most ``timeout`` seconds for the first."""
    import ray

    calls = {channel.answers[0]: channel for channel in channels}
    ready, _ = ray.wait(list(calls), num_returns=1, timeout=timeout)
    if ready and len(calls) > 1:  # collects the others that are ready, without waiting
        ready, _ = ray.wait(list(calls), num_returns=len(calls), timeout=0)
    return [calls[answer] for answer in ready]


def close_and_wait(channels: Sequence[RayChannel], timeout: float) -> list[Printed]:
    """Close the envs of actors, wait at most ``timeout`` seconds, and return what they printed meanwhile."""
    import ray

    closing = [channel.actor.handle.close.remote() for channel in channels]
    closed, _ = ray.wait(closing, num_returns=len(closing), timeout=timeout)
    printed: list[Printed] = []
    for call in closed:
        with contextlib.suppress(ray.exceptions.RayError):  # it has died meanwhile, and its output is lost
            printed += ray.get(call)
    return printed
