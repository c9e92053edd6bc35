"""Ray actors, reached through Ray calls or, on the caller's machine, over a socket.

Ray places the actors, gives them their resources and ends them. A call by the user makes at most one call to each
actor, with the messages for all of the actor's hosts. Hosts of actors on this machine get their messages over a
`PipeChannel` instead, like hosts in worker processes.
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
from collections.abc import Iterable, Iterator, Mapping, Sequence
from multiprocessing import reduction
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, NamedTuple

from parallelenv.backends._eventfd_bell import SPIN
from parallelenv.backends._pipe_host import PipeHost
from parallelenv.backends._process import CLOSED_IN_CHILDREN, process_exists
from parallelenv.backends._ray_cluster import SHUT_DOWN, Cluster
from parallelenv.backends._wire import Wire
from parallelenv.contract.batch import Array, frozen
from parallelenv.contract.codec import Message, decode
from parallelenv.contract.copying import Broadcast
from parallelenv.contract.interrupts import DeferSigint
from parallelenv.contract.message_channel import MessageChannel
from parallelenv.contract.packed_worker_spec import PackedSpec
from parallelenv.contract.protocol import Command, Death, Printed, Reply
from parallelenv.errors import WorkerStartError
from parallelenv.worker.host import Host
from parallelenv.worker.worker_log import WorkerLog, redirect_streams
from parallelenv.worker.worker_loop import MessageHost, die_with_caller, prepare_worker

_END_TIMEOUT = 1.0
"""Seconds that Ray has to end an actor."""
_CONNECT_TIMEOUT = 10.0
"""Seconds to wait for a connection that an actor has announced."""
_CREDENTIALS = struct.Struct("3i")  # process, user, group


# -------------------------------------------------------------------- the actor's end


def connect_to_caller(address: tuple[str, str] | None) -> list[Connection]:
    """Return an actor's lifeline and its connection for commands, see `ActorHandle`.

    The list is empty if the caller is on another machine or belongs to another user.

    Args:
        address: The path of the caller's socket and its `machine`.

    Raises:
        OSError: If the caller has died or given up in the meantime: Ray may start the actor nevertheless.
    """
    connections: list[Connection] = []
    if address is None or sys.platform != "linux" or machine() != address[1]:
        return connections
    for _ in range(2):
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as opened:
            try:
                opened.connect(address[0])
            except PermissionError:
                return connections
            connections.append(Connection(opened.detach()))
    return connections


def machine() -> str:
    """Return text that identifies this machine since its start, or this container, in all of its processes."""
    namespaces = [os.readlink(f"/proc/self/ns/{name}") for name in ("pid", "mnt")]
    return " ".join([Path("/proc/sys/kernel/random/boot_id").read_text(), *namespaces])


class RelayedMessage(NamedTuple):
    """A message that a call carries to one of an actor's hosts."""

    host_number: int  #: The host's number: no two hosts of a `ParallelEnv` have the same, not even one after another.
    message: Message
    #: Whether it is a command whose `Broadcast` has its content outside: in Ray's object store, from where each node
    #: fetches it once.
    has_content: bool


class RelayedReply(NamedTuple):
    """A host's reply to a command that a call carried."""

    command_number: int
    answer: Message | Death  #: The reply; or the host's death, if that prevents one.
    output: Sequence[Printed] = ()  #: Output of its envs in the meantime, unless the reply contains it.


class RayActor:
    """The actors of both modes, as `RayBackend` calls them.

    Args:
        caller: See `connect_to_caller`. The lifeline shows the caller's death to the actor sooner than Ray, which
            takes 1.4 to 2.6 s.
    """

    commands: Connection

    def __init__(self, caller: tuple[str, str] | None) -> None:
        connections = connect_to_caller(caller)
        self._has_connected = bool(connections)
        if connections:
            self._lifeline, self.commands = connections
            die_with_caller(self._lifeline.fileno())

    def introduce(self) -> tuple[int, bool]:
        """Return the id of the actor's process, and whether the actor has connected to the caller."""
        return os.getpid(), self._has_connected


class RayHost(RayActor):
    """An actor that is a worker itself: the host runs inside the actor. Arguments: see `RayActor`."""

    _host: _ActorHost

    def start(self, host_numbers: Sequence[int], message: tuple[Any, ...], shared: Mapping[str, Array]) -> list[int]:
        """Make the host, and return the id of its process.

        Args:
            host_numbers: A list with the number of the host; see `RelayedMessage`.
            message: The items of a `Message`: an encoded list that contains the `PackedSpec` of the host.
            shared: Read-only arrays for the envs, in Ray's object store.
        """
        (packed,) = decode(Message(*message))
        prepare_worker(packed)
        self._host = _ActorHost(Host(packed.unpack(frozen(shared))), packed)
        return [os.getpid()]

    def serve(self) -> None:
        """Execute commands from the connection for them, without Ray, until the caller closes it or dies."""
        with contextlib.suppress(EOFError, OSError):
            host = self._host.host
            log = WorkerLog(reduction.recv_handle(self.commands))
            redirect_streams(lambda: host.current, (log.fileno, log.fileno))
            pipe_host = PipeHost(host, self._host.packed, Wire(self.commands, SPIN), log)
            pipe_host.obey(pipe_host.receive, pipe_host.send)

    def relay(
        self, call_number: int, messages: Sequence[RelayedMessage], content: Array | None = None
    ) -> list[RelayedReply]:
        """Execute the commands in messages. See `ActorCalls` for the arguments."""
        replies = []
        for _, message, has_content in messages:
            self._host.content = content if has_content else None
            reply = self._host.execute(message)
            if reply is not None:
                replies.append(RelayedReply(reply.number, reply))
        return replies

    def close(self, timeout: float) -> list[Printed]:
        """Close the envs; return what they print in the meantime."""
        self._host.host.close()
        return self._host.take_output()


class _ActorHost(MessageHost):
    """The host of a `RayHost`, which adds to its replies what its envs have printed."""

    def __init__(self, host: Host, packed: PackedSpec) -> None:
        super().__init__(host, packed)
        self._log = WorkerLog.create()
        if self._log is not None:
            # Only Python's own output: that of C code goes to Ray's log files.
            redirect_streams(lambda: host.current, (self._log.fileno, self._log.fileno))

    def encode(self, reply: Reply) -> Message:
        """Return a reply as a message, with the text that was printed in the meantime."""
        reply.output = [*reply.output, *self.take_output()]
        return super().encode(reply)

    def take_output(self) -> list[Printed]:
        """Return the text printed since the last call."""
        return [] if self._log is None else self._log.take_output(self.packed.env_ids, is_idle=True)


# -------------------------------------------------------------------- the caller's end


class ActorHandle:
    """A Ray actor, with the part of `WorkerProcess` that a `PipeChannel` to a `RayHost` needs.

    Args:
        handle: Ray's handle of the actor.
        cluster: The connection to Ray in which it was started.

    Attributes:
        calls: Its calls that carry messages.
        pid: Process id, once it has started.
        is_near: Whether it runs on this machine and has connected to this process.
        is_direct: Whether its hosts get their commands over a socket or pipe.
        is_terminated: Whether Ray was called to end it.
        lifeline: A connection to an actor on this machine. Its end tells each process that the other has died.
        commands: A second connection, for commands to the host in the actor, or for the workers that it hands over.
    """

    exitcode = None  # Ray does not report it

    def __init__(self, handle: Any, cluster: Cluster) -> None:
        self.handle = handle
        self.cluster = cluster
        self.calls = ActorCalls(self)
        self.pid = 0
        self.is_near = self.is_direct = self.is_terminated = False
        self.lifeline: Connection | None = None
        self.commands: Any = None
        self._serving: Any = None

    def serve(self) -> tuple[Connection, WorkerLog]:
        """Make the actor execute commands from a socket; return the socket and the actor's log."""
        with DeferSigint():
            log: Any = WorkerLog.create()
            with contextlib.suppress(OSError):  # if it has died, its first command reports it
                reduction.send_handle(self.commands, log.fileno, self.pid)
            self.is_direct = True
            self._serving = self.handle.serve.remote()
            return self.commands, log

    def get_started(self, call: Any) -> Any:
        """Return the result of a call that starts something in the actor; raise `WorkerStartError` if that failed."""
        import ray

        try:
            return ray.get(call)
        except ray.exceptions.RayError as error:
            if not isinstance(error, ray.exceptions.RayTaskError):
                self.terminate()  # it has died
            raise WorkerStartError(f"A Ray actor did not start. {_quote(error, in_full=True)}") from error

    def is_alive(self) -> bool:
        """Return whether the actor is alive, as far as is known: a remote actor counts as alive until a call fails.

        For an actor on this machine the system is asked, which takes 1 us; Ray takes 100 us. It may have children that
        keep its lifeline open, and its process may still exist when the lifeline is closed.
        """
        return not self.is_terminated and not (
            self.is_near and (not process_exists(self.pid) or self._has_hung_up(0.0))
        )

    def join(self, timeout: float = _END_TIMEOUT) -> None:
        """Wait until the actor has stopped serving a socket."""
        import ray

        if self.cluster.is_connected:
            ray.wait([self._serving], timeout=timeout)

    def terminate(self) -> None:
        """Make Ray end the actor, without waiting."""
        import ray

        self.is_terminated = True
        if self.cluster.is_connected:
            ray.kill(self.handle)

    kill = terminate
    """The same as `terminate`, because Ray is called in the same way for both."""

    def close(self) -> None:
        """Close its connections, after it has ended: otherwise Ray would print that an actor died unexpectedly."""
        self._has_hung_up(_END_TIMEOUT)  # may be interrupted and repeated
        with DeferSigint():
            for connection in (self.lifeline, self.commands):
                if connection is not None:
                    connection.close()

    def _has_hung_up(self, timeout: float) -> bool:
        """Wait for the actor to end, which closes its lifeline; return whether the lifeline is closed."""
        if self.lifeline is None or self.lifeline.closed:
            return True
        poll = select.poll()
        poll.register(self.lifeline, 0)  # reports only that the other end is closed
        return bool(poll.poll(timeout * 1000))

    def last_words(self) -> str:
        """Return the facts that Ray knows about the actor's death, or an empty string."""
        import ray

        if not self.cluster.is_connected:
            return SHUT_DOWN
        try:
            ray.get(self._serving or self.handle.introduce.remote(), timeout=_END_TIMEOUT)
        except ray.exceptions.GetTimeoutError:
            return ""
        except ray.exceptions.RayError as error:
            return _quote(error)
        return ""


def _quote(error: BaseException, *, in_full: bool = False) -> str:
    """Return the text of a Ray error: its first non-empty line, or all of it."""
    text = str(error)
    if not in_full:
        text = next((line.strip() for line in text.splitlines() if line.strip()), type(error).__name__)
    return f"Ray reports: {text}"


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
        listener.bind(str(Path(folder, "socket")))
        listener.listen(2 * num_actors + 16)  # actors connect twice, and are admitted only when all have
        yield listener


def admit(listener: socket.socket, actors: Sequence[ActorHandle]) -> None:
    """Accept connections from actors only; raise `WorkerStartError` if one does not connect. Can be interrupted."""
    expected = {actor.pid: actor for actor in actors}
    while expected:
        if not wait([listener], _CONNECT_TIMEOUT):
            raise WorkerStartError(f"A Ray actor has not connected to the caller within {_CONNECT_TIMEOUT:.0f} s.")
        with DeferSigint():
            accepted, _ = listener.accept()
            pid = _CREDENTIALS.unpack(accepted.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))[0]
            if pid in expected:
                connection = Connection(accepted.detach())
                CLOSED_IN_CHILDREN.add(connection)
                if expected[pid].lifeline is None:
                    expected[pid].lifeline = connection
                else:
                    expected.pop(pid).commands = connection
            accepted.close()


class ActorCalls:
    """The calls of an actor that carry messages to its hosts and back.

    A call has the messages for all of its hosts that one call of the user sends. The calls are numbered, since Ray may
    start those of a `RelayActor` in any order. Such an actor may return before all of its hosts have replied; it is
    then called for the rest.

    Attributes:
        under_way: By Ray's reference to the result of a call: the number of the call, and the channels of its commands
            without a reply, by the number of the command.
    """

    def __init__(self, actor: ActorHandle) -> None:
        self.actor = actor
        self.under_way: dict[Any, tuple[int, dict[int, RayChannel]]] = {}
        self._outgoing: list[tuple[RayChannel, Message, bool]] = []
        self._content: object = None  # of the broadcast in these messages
        self._next_call = 0

    def add(self, channel: RayChannel, message: Message, content: object) -> None:
        """Add a message to the next call; ``content``: Ray's reference to that of its `Broadcast`, or ``None``."""
        self._outgoing.append((channel, message, content is not None))
        self._content = self._content if content is None else content

    def flush(self) -> None:
        """Send the messages that were added, if there are any, in one call."""
        outgoing, content = self._outgoing, self._content
        if not outgoing or not self.actor.cluster.is_connected:
            return
        self._outgoing, self._content = [], None
        messages = [
            RelayedMessage(channel.host_number, message, has_content) for channel, message, has_content in outgoing
        ]
        call = self.actor.handle.relay.remote(self._next_call, messages, content)
        awaited = {message.number: channel for channel, message, _ in outgoing if message.number}
        if awaited:
            self.under_way[call] = self._next_call, awaited
        self._next_call += 1

    def finish(self, call: Any) -> None:
        """Give the replies in the result of a call to the channels; call for the rest, if some are missing."""
        import ray

        call_number, awaited = self.under_way.pop(call)
        try:
            replies: list[RelayedReply] = ray.get(call)
        except ray.exceptions.RayError as error:  # the actor, its node, or the owner of the reply died
            self.actor.terminate()
            detail = _quote(error)
            replies = [RelayedReply(number, Death(channel.pid, None, detail)) for number, channel in awaited.items()]
        for reply in replies:
            awaited.pop(reply.command_number).arrived.append(reply)
        if awaited:
            self.under_way[self.actor.handle.rest.remote(call_number)] = call_number, awaited


class RayChannel(MessageChannel):
    """Calls to an actor, wherever it runs, for one of its hosts.

    Ray's compiled graphs were tried: a round of two actors takes 0.8 to 1.2 ms instead of 1.7 to 2.1 ms. But they
    always call all actors, `ray.wait` does not accept their results, a step of 10 s is an error, and envs do not run in
    the main thread.

    Args:
        actor: The actor.
        host_number: See `RelayedMessage`.
        pid: Id of the host's process.
        env_ids: See `MessageChannel`.

    Attributes:
        arrived: Replies that were not received yet.
    """

    safe_bytes = math.inf  # Ray stores calls and results that nothing reads

    def __init__(self, actor: ActorHandle, host_number: int, pid: int, env_ids: tuple[int, ...]) -> None:
        super().__init__(env_ids)
        self.actor, self.host_number, self.pid = actor, host_number, pid
        self.arrived: deque[RelayedReply] = deque()
        self._output: list[Printed] = []
        self._death = Death()
        self._content: object = None  # of the broadcast in the message that is being sent

    def pack(self, command: Command) -> tuple[Message, object]:
        content: object = None
        if isinstance(command.common, Broadcast):
            broadcast = command.common
            if self.actor.cluster.is_connected:
                import ray

                if broadcast.stored is None:  # each node fetches it from the object store only once
                    broadcast.stored = ray.put(broadcast.packed)
                content = broadcast.stored
            command.common = broadcast.without_content()
        return super().pack(command), content

    def send(self, packed: tuple[Message, object]) -> None:
        message, self._content = packed
        super().send(message)

    def send_message(self, message: Message) -> None:
        content, self._content = self._content, None
        self.actor.calls.add(self, message, content)

    def receive_message(self) -> Message:
        if not self.actor.cluster.is_connected:
            self._death = Death(self.pid, None, SHUT_DOWN)
            raise EOFError(SHUT_DOWN)
        _, answer, output = self.arrived.popleft()
        self._output += output
        if isinstance(answer, Death):
            self._death = answer
            raise EOFError
        return answer

    def take_output(self, *, is_idle: bool) -> list[Printed]:
        output, self._output = self._output, []
        return output

    def cause_of_death(self) -> Death:
        return self._death

    def kill(self) -> None:
        self.actor.terminate()
        self.actor.close()


def wait_for_calls(channels: Sequence[RayChannel], timeout: float) -> None:
    """Wait up to ``timeout`` seconds for a call to one of these channels' actors; pass its replies to the channels."""
    import ray

    calls = {call: one for one in {channel.actor.calls for channel in channels} for call in one.under_way}
    ready, _ = ray.wait(list(calls), num_returns=1, timeout=timeout)
    if ready and len(calls) > 1:  # collects the others that are ready, without waiting
        ready, _ = ray.wait(list(calls), num_returns=len(calls), timeout=0)
    for call in ready:
        with DeferSigint():  # its results cannot be fetched a second time
            calls[call].finish(call)


def close_and_wait(actors: Iterable[ActorHandle], timeout: float) -> list[Printed]:
    """Close the envs of actors, wait at most ``timeout`` seconds, and return what the envs printed in the meantime."""
    import ray

    closing = [actor.handle.close.remote(timeout) for actor in actors]
    closed, _ = ray.wait(closing, num_returns=len(closing), timeout=timeout)
    printed: list[Printed] = []
    for call in closed:
        with contextlib.suppress(ray.exceptions.RayError):  # it has died in the meantime, and its output is lost
            printed += ray.get(call)
    return printed
