"""Ray actors, reached through Ray calls or, on the caller's machine, over a socket.

When the user calls a method, one Ray call per actor carries the messages for all hosts of the actor.
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
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from multiprocessing import reduction
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, NamedTuple

from parallelenv.backends._bell import SPIN
from parallelenv.backends._pipe import Wire
from parallelenv.backends._pipe_host import PipeHost
from parallelenv.backends._process import CallerEnd, process_exists
from parallelenv.backends._ray_cluster import SHUT_DOWN, Cluster
from parallelenv.contract.batch import Array, frozen
from parallelenv.contract.codec import Message, decode
from parallelenv.contract.copying import Broadcast
from parallelenv.contract.interrupts import DeferSignals
from parallelenv.contract.message_channel import MessageChannel
from parallelenv.contract.packed_worker_spec import PackedSpec
from parallelenv.contract.protocol import Command, Death, Printed, Reply
from parallelenv.errors import WorkerStartError
from parallelenv.worker.host import Host
from parallelenv.worker.worker_log import WorkerLog, redirect_streams
from parallelenv.worker.worker_loop import MessageHost, die_with_caller, prepare_worker

_END_TIMEOUT = 1.0
"""Seconds to wait for an actor that should end, or for Ray's report of its death."""
_CONNECT_TIMEOUT = 10.0
"""Seconds to wait for a connection that an actor has announced."""
_LEAST_FETCH = 0.05
"""Seconds that the transfer of a result of a Ray call may take at least, even if the caller does not want to wait."""
_CREDENTIALS = struct.Struct("3i")  # process, user, group


# -------------------------------------------------------------------- the actor's end


def connect_to_caller(address: tuple[str, str] | None) -> list[Connection]:
    """Connect this actor to the caller; return the actor's lifeline and its connection for commands.

    `ActorHandle` describes these two connections. The result is empty if the caller does not listen, runs on a
    different machine, or belongs to a different user.

    Args:
        address: The path of the caller's socket, and the result of `machine` in the caller. ``None`` if the caller does
            not listen.

    Raises:
        OSError: If the caller has died or has stopped listening. Ray may start an actor even then.
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
    """Return text that identifies this machine, or this container if the process runs in one.

    The text changes when the machine or the container restarts.
    """
    namespaces = [os.readlink(f"/proc/self/ns/{name}") for name in ("pid", "mnt")]
    return " ".join([Path("/proc/sys/kernel/random/boot_id").read_text(), *namespaces])


class RelayedMessage(NamedTuple):
    """A message that a Ray call carries to one of an actor's hosts."""

    host_number: int  #: The host's number. A `ParallelEnv` never uses a number twice, even after a host has ended.
    message: Message
    #: Whether the message is a command with a `Broadcast` whose content is not in the message, but in Ray's object
    #: store. Each node fetches the content only once.
    has_content: bool


class RelayedReply(NamedTuple):
    """A host's reply to a command that a Ray call carried."""

    command_number: int
    answer: Message | Death  #: The reply, or the cause of death if the host has died before it could reply.
    output: Sequence[Printed] = ()  #: What the host's envs have printed meanwhile, if the reply does not contain it.


class RayActor:
    """Base class of the actors in the modes ``ray`` and ``ray-subproc``.

    An actor on the caller's machine has a lifeline: a connection to the caller. When the caller dies, the connection
    is closed, and the actor ends at once. Ray would need 1.4 to 2.6 s to end the actor.

    Args:
        caller: See `connect_to_caller`.
        num_workers: Number of workers in the actor.
    """

    commands: Connection

    def __init__(self, caller: tuple[str, str] | None, num_workers: int) -> None:
        connections = connect_to_caller(caller)
        self._has_connected = bool(connections)
        if connections:
            self._lifeline, self.commands = connections
            die_with_caller(self._lifeline.fileno())

    def introduce(self) -> tuple[int, bool]:
        return os.getpid(), self._has_connected


class RayHost(RayActor):
    """An actor that is itself a worker: the host runs in the actor's process."""

    _host: _ActorHost

    def start(self, host_numbers: Sequence[int], message: tuple[Any, ...], shared: Mapping[str, Array]) -> list[int]:
        # ``host_numbers`` and the result are lists because `RelayActor.start`, which is called in the same way, starts
        # several hosts.
        (packed,) = decode(Message(*message))
        prepare_worker(packed)
        self._host = _ActorHost(Host(packed.unpack(frozen(shared))), packed)
        return [os.getpid()]

    def serve(self) -> None:
        """Execute commands that arrive over the connection `commands` instead of in Ray calls."""
        # The connection is closed when the host ends, whatever the reason. Ray's process of the actor does not end at
        # that time, so nothing else would tell the caller.
        with self.commands, contextlib.suppress(EOFError, OSError):
            host = self._host.host
            log = WorkerLog(reduction.recv_handle(self.commands))
            redirect_streams(lambda: host.current, (log.fileno, log.fileno))
            pipe_host = PipeHost(host, self._host.packed, Wire(self.commands, SPIN), log)
            pipe_host.obey(pipe_host.receive, pipe_host.send)

    def relay(
        self, call_number: int, messages: Sequence[RelayedMessage], content: Array | None = None
    ) -> list[RelayedReply]:
        replies = []
        for _, message, has_content in messages:
            self._host.content = content if has_content else None
            reply = self._host.execute(message)
            if reply is not None:
                replies.append(RelayedReply(reply.number, reply))
        return replies

    def close(self, timeout: float) -> list[Printed]:
        self._host.host.close()
        return self._host.take_output()


class _ActorHost(MessageHost):
    """The host in a `RayHost`. Its replies include the text that its envs have printed."""

    def __init__(self, host: Host, packed: PackedSpec) -> None:
        super().__init__(host, packed)
        self._log = WorkerLog.create()
        if self._log is not None:
            # Only the output of Python code is redirected. The output of C code goes to Ray's log files.
            redirect_streams(lambda: host.current, (self._log.fileno, self._log.fileno))

    def encode(self, reply: Reply) -> Message:
        reply.output = [*reply.output, *self.take_output()]
        return super().encode(reply)

    def take_output(self) -> list[Printed]:
        return [] if self._log is None else self._log.take_output(self.packed.env_ids, is_idle=True)


# -------------------------------------------------------------------- the caller's end


class ActorHandle:
    """The caller's access to a Ray actor.

    A `PipeChannel` to a `RayHost` uses this object in place of a `WorkerProcess`. Therefore, this class has the methods
    of `WorkerProcess` that the channel needs.

    Attributes:
        is_near: Whether the actor runs on this machine and has connected to this process.
        is_direct: Whether the actor's hosts get their commands over a socket or pipe instead of through Ray calls.
        lifeline: A connection to an actor on this machine. When the caller or the actor dies, the connection is closed,
            and the other process notices. ``None`` unless ``is_near`` is ``True``.
        commands: A second connection to an actor on this machine. If the actor is a `RayHost`, the connection carries
            commands to the host. If the actor is a `RelayActor`, the connection carries the file descriptors of the
            workers that the actor hands over to the caller.
    """

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
        """Make the actor, which is a `RayHost`, execute commands that arrive over a socket."""
        with DeferSignals():
            log: Any = WorkerLog.create()
            with contextlib.suppress(OSError):  # if the actor has died, its first command reports the death
                reduction.send_handle(self.commands, log.fileno, self.pid)
            self.is_direct = True
            self._serving = self.handle.serve.remote()
            # The connection has one owner, which closes it: the wire of the channel.
            commands, self.commands = self.commands, None
            return commands, log

    def get_started(self, call: Any) -> Any:
        import ray

        try:
            return ray.get(call)
        except ray.exceptions.RayError as error:
            if has_died(error):
                self.terminate()
            raise WorkerStartError(f"A Ray actor did not start. {_quote(error, in_full=True)}") from error

    def is_alive(self) -> bool:
        # A remote actor counts as alive until a call to it fails. For an actor on this machine, this method checks the
        # process and the lifeline, which takes 1 us; asking Ray would take 100 us. Both are checked because a child of
        # a dead actor may keep the lifeline open, and because the process of an actor may still exist for a while after
        # its lifeline was closed.
        return not self.is_terminated and not (
            self.is_near and (not process_exists(self.pid) or self._has_hung_up(0.0))
        )

    def join(self, timeout: float = _END_TIMEOUT) -> None:
        import ray

        if self.cluster.is_connected:
            ray.wait([self._serving], timeout=timeout)

    def await_exitcode(self) -> None:
        """Return ``None``, because Ray does not report exit codes."""

    def terminate(self) -> None:
        import ray

        self.is_terminated = True
        if self.cluster.is_connected:
            ray.kill(self.handle)

    kill = terminate
    """Do the same as `terminate`, because Ray has only one way to end an actor at once."""

    def close(self) -> None:
        # If the connections were closed first, the actor would end by itself, and Ray would print that an actor died
        # unexpectedly.
        self._has_hung_up(_END_TIMEOUT)  # Ctrl-C may interrupt this wait; then `close` is called again
        with DeferSignals():
            for connection in (self.lifeline, self.commands):
                if connection is not None:
                    connection.close()

    def _has_hung_up(self, timeout: float) -> bool:
        """Wait until the actor ends and thereby closes its lifeline, but at most ``timeout`` seconds.

        Return ``True`` if the lifeline is closed or if the actor has none.
        """
        if self.lifeline is None or self.lifeline.closed:
            return True
        poll = select.poll()
        poll.register(self.lifeline, 0)  # with events 0, poll reports only that the other end is closed
        return bool(poll.poll(timeout * 1000))

    def last_words(self) -> str:
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


def has_died(error: BaseException | None) -> bool:
    """Return whether an error of a call or a connection to an actor may mean that the actor has died.

    The result is ``False`` if the actor's code has raised an exception, or if there is no error.
    """
    import ray

    kinds = ray.exceptions.RayError, EOFError, OSError
    return isinstance(error, kinds) and not isinstance(error, ray.exceptions.RayTaskError)


def _quote(error: BaseException, *, in_full: bool = False) -> str:
    """Return the text of a Ray error: its first non-empty line, or the whole text with ``in_full``."""
    text = str(error)
    if not in_full:
        text = next((line.strip() for line in text.splitlines() if line.strip()), type(error).__name__)
    return f"Ray reports: {text}"


@contextlib.contextmanager
def listening(num_actors: int) -> Iterator[socket.socket | None]:
    # The context manager yields a listening socket in a folder that only the user can enter. On systems other than
    # Linux, it yields ``None``, and nothing listens.
    if sys.platform != "linux":
        yield None
        return
    # The path of a socket has at most 107 bytes, 28 of which follow this folder.
    parent = "/tmp" if len(os.fsencode(tempfile.gettempdir())) > 79 else None
    with (
        tempfile.TemporaryDirectory(prefix="parallelenv-", dir=parent) as folder,
        socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener,
    ):
        listener.bind(str(Path(folder, "socket")))
        listener.listen(2 * num_actors + 16)  # each actor connects twice, and `admit` is called after all have
        yield listener


def admit(listener: socket.socket, actors: Sequence[ActorHandle]) -> None:
    """Accept two connections from each of these actors: its lifeline and its connection for commands.

    Connections from other processes are closed.
    """
    expected = {actor.pid: actor for actor in actors}
    while expected:
        if not wait([listener], _CONNECT_TIMEOUT):
            raise WorkerStartError(f"A Ray actor has not connected to the caller within {_CONNECT_TIMEOUT:.0f} s.")
        with DeferSignals():
            accepted, _ = listener.accept()
            pid = _CREDENTIALS.unpack(accepted.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))[0]
            if pid in expected:
                connection = CallerEnd(accepted.detach())
                if expected[pid].lifeline is None:
                    expected[pid].lifeline = connection
                else:
                    expected.pop(pid).commands = connection
            accepted.close()


class ActorCalls:
    """The Ray calls to an actor that carry messages to its hosts and return their replies.

    When the user calls a method, all resulting messages to the actor's hosts are sent in one Ray call. The Ray calls
    are numbered, because Ray may start calls to a `RelayActor` in any order. A Ray call to a `RelayActor` may return
    before all hosts have replied. The caller then calls `RelayActor.rest`, which returns the missing replies.

    Attributes:
        under_way: The Ray calls that have not returned yet. Each key is Ray's reference to the result of a call. Each
            value is a pair: the number of the call, and a dict that maps the number of each unanswered command to its
            channel.
    """

    def __init__(self, actor: ActorHandle) -> None:
        self.actor = actor
        self.under_way: dict[Any, tuple[int, dict[int, RayChannel]]] = {}
        self._outgoing: list[RelayedMessage] = []
        self._awaited: dict[int, RayChannel] = {}  # by the number of a command in these messages
        self._content: object = None  # Ray's reference to the content of the broadcast in these messages
        self._next_call = 0

    def add(self, channel: RayChannel, message: Message, content: object) -> None:
        # If the message has a `Broadcast` whose content is in Ray's object store, ``content`` is Ray's reference to
        # that content. Otherwise, ``content`` is ``None``.
        self._outgoing.append(RelayedMessage(channel.host_number, message, content is not None))
        if message.number:
            self._awaited[message.number] = channel
        self._content = self._content if content is None else content

    def flush(self) -> None:
        if not self._outgoing or not self.actor.cluster.is_connected:
            return
        outgoing, awaited, content = self._outgoing, self._awaited, self._content
        self._outgoing, self._awaited, self._content = [], {}, None
        call = self.actor.handle.relay.remote(self._next_call, outgoing, content)
        if awaited:
            self.under_way[call] = self._next_call, awaited
        self._next_call += 1

    def fetch(self, call: Any, timeout: float) -> list[RelayedReply] | None:
        """Return the result of a call that has returned; ``None`` if the transfer takes longer than the time limit.

        Ctrl-C may interrupt the transfer. The result can then be fetched again.
        """
        import ray

        try:
            replies: list[RelayedReply] = ray.get(call, timeout=timeout)
        except ray.exceptions.GetTimeoutError:
            return None
        except ray.exceptions.RayError as error:  # the actor, its node, or the process that owns the reply has died
            self.actor.terminate()
            detail, (_, awaited) = _quote(error), self.under_way[call]
            return [RelayedReply(number, Death(channel.pid, None, detail)) for number, channel in awaited.items()]
        return replies

    def finish(self, call: Any, replies: Sequence[RelayedReply]) -> None:
        """Give the replies that a call has returned to their channels."""
        call_number, awaited = self.under_way.pop(call)
        for reply in replies:
            awaited.pop(reply.command_number).add_reply(reply)
        if awaited:
            self.under_way[self.actor.handle.rest.remote(call_number)] = call_number, awaited


class RayChannel(MessageChannel):
    """A channel to one host of an actor. It uses Ray calls, so the actor may run on any machine.

    Ray's compiled graphs, which call actors faster, are not suitable here. With them, a round of calls to two actors
    takes 0.8 to 1.2 ms instead of 1.7 to 2.1 ms. But a graph always calls all of its actors, `ray.wait` does not accept
    its results, a step that takes more than 10 s raises an error, and envs would not run in the actor's main thread.
    """

    safe_bytes = math.inf  # Ray stores calls and results until they are read, so large messages block neither side

    def __init__(self, actor: ActorHandle, host_number: int, pid: int, env_ids: tuple[int, ...]) -> None:
        super().__init__(env_ids)
        self.actor, self.host_number, self.pid = actor, host_number, pid
        self.arrived: deque[RelayedReply] = deque()  # in the order of the commands, like the replies of any host
        self._sent: deque[int] = deque()  # numbers of the commands whose reply is not in ``arrived``
        self._early: dict[int, RelayedReply] = {}  # replies that Ray has returned before those to earlier commands
        self._output: list[Printed] = []
        self._death = Death()
        self._content: object = None  # Ray's reference to the content of the broadcast that is being sent

    def pack(self, command: Command) -> tuple[Message, object]:
        content: object = None
        if isinstance(command.common, Broadcast):
            broadcast = command.common
            if self.actor.cluster.is_connected:
                import ray

                if broadcast.stored is None:  # stored once, so that each node also fetches it only once
                    broadcast.stored = ray.put(broadcast.packed)
                content = broadcast.stored
            command.common = broadcast.without_content()
        return super().pack(command), content

    def send(self, packed: tuple[Message, object]) -> None:
        message, self._content = packed
        super().send(message)

    def send_message(self, message: Message) -> None:
        content, self._content = self._content, None
        if message.number:
            self._sent.append(message.number)
        self.actor.calls.add(self, message, content)

    def add_reply(self, reply: RelayedReply) -> None:
        # A large result of a Ray call may arrive later than the small one of the next call. Replies contain rows of the
        # batch, where newer rows must not be overwritten.
        self._early[reply.command_number] = reply
        while self._sent and self._sent[0] in self._early:
            self.arrived.append(self._early.pop(self._sent.popleft()))

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
    """Wait until a Ray call to an actor of these channels returns, but at most ``timeout`` seconds."""
    import ray

    deadline = time.monotonic() + timeout
    calls = {call: one for one in {channel.actor.calls for channel in channels} for call in one.under_way}
    ready, _ = ray.wait(list(calls), num_returns=1, timeout=timeout)
    if ready and len(calls) > 1:  # find all other calls that have returned, without waiting
        ready, _ = ray.wait(list(calls), num_returns=len(calls), timeout=0)
    for call in ready:
        replies = calls[call].fetch(call, max(_LEAST_FETCH, deadline - time.monotonic()))
        if replies is not None:
            with DeferSignals():  # no reply may be lost or given to its channel twice
                calls[call].finish(call, replies)


def close_and_wait(actors: Iterable[ActorHandle], timeout: float) -> list[Printed]:
    """Wait at most ``timeout`` seconds. The output of actors that take longer or have died is lost."""
    import ray

    closing = [actor.handle.close.remote(timeout) for actor in actors]
    closed, _ = ray.wait(closing, num_returns=len(closing), timeout=timeout)
    printed: list[Printed] = []
    for call in closed:
        with contextlib.suppress(ray.exceptions.RayError):  # the actor or its node has died, and its output is lost
            printed += ray.get(call, timeout=_END_TIMEOUT)
    return printed
