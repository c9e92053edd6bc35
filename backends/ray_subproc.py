"""The mode ``ray-subproc``: Ray connects the machines, and worker processes step the envs on each machine.

An actor on each node starts the node's worker processes and ends them. On the caller's machine, the actor hands its
workers over to the caller, which then reaches them like workers of ``subproc``. On other machines, the actor relays
messages between the caller and its workers. Such an actor usually needs only one Ray call per step, however many cores
its machine has.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import replace
from multiprocessing import reduction
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from parallelenv.backends._pipe import PipeChannel
from parallelenv.backends._process import CallerEnd, ForkedProcess, WorkerProcess
from parallelenv.backends._ray_actors import ActorHandle, RayActor, RayChannel, RelayedMessage, RelayedReply
from parallelenv.backends._ray_cluster import apportion, cores_of_nodes
from parallelenv.backends.ray import RayBackend, StartedWorker
from parallelenv.backends.subproc import SubprocBackend, check_preload
from parallelenv.contract.arguments import check_positive
from parallelenv.contract.batch import Array
from parallelenv.contract.codec import PRINTED, BroadcastContent, Message, decode, encode
from parallelenv.contract.cpu_cores import usable_cores
from parallelenv.contract.interrupts import DeferSignals, signal_behind
from parallelenv.contract.packed_worker_spec import PackedSpec
from parallelenv.contract.protocol import Death, Printed
from parallelenv.errors import WorkerStartError
from parallelenv.worker.worker_log import WorkerLog
from parallelenv.worker.worker_loop import prepare_worker

_HEARTBEAT = 0.25
"""Seconds between checks that workers are alive, because a pipe does not show every death."""
_LEAST_PATIENCE, _MOST_PATIENCE = 0.005, 0.1
"""Minimum and maximum duration in seconds of the wait for more replies after the first reply has arrived.

Within these limits, the wait is as long as the wait for the first reply.
"""
_HAND_OVER_TIMEOUT = 10.0
"""Seconds that the caller waits for each worker that an actor hands over."""


# -------------------------------------------------------------------- the actor's end


class RelayedWorker:
    """A worker process whose messages an actor relays. Only the actor's event loop uses this object.

    The worker gets a command only after it has replied to the previous command, so that the two ends of the pipe cannot
    wait for each other.
    """

    def __init__(self, channel: PipeChannel) -> None:
        self.channel = channel
        self._queue: deque[tuple[Sequence[Message], asyncio.Future[RelayedReply] | None]] = deque()
        self._awaited: tuple[int, asyncio.Future[RelayedReply]] | None = None  # of the current command
        self._death: Death | None = None
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(channel.fileno, self._read)
        self._watch_room()

    def send(self, messages: Sequence[Message], reply: asyncio.Future[RelayedReply] | None) -> None:
        """Queue messages for the worker, and send as many queued messages as possible.

        If ``reply`` is not ``None``, the last of the messages is a command, and the worker's reply to it becomes the
        result of ``reply``.
        """
        self._queue.append((messages, reply))
        self._go_on()

    def _go_on(self) -> None:
        while self._queue and self._awaited is None:
            messages, reply = self._queue.popleft()
            if reply is not None:
                self._awaited = messages[-1].number, reply
            try:
                for message in messages if self._death is None else ():
                    self.channel.send_message(message)
                self._watch_room()
            except OSError:
                self.die(self.channel.cause_of_death())
            if self._death is not None:
                self._answer(self._death)

    def _watch_room(self) -> None:
        if self.channel.wire.outbox:
            self._loop.add_writer(self.channel.fileno, self._write)

    def _write(self) -> None:
        with contextlib.suppress(OSError):  # the worker has died, which reading shows
            self.channel.wire.flush()
            if self.channel.wire.outbox:
                return
        self._loop.remove_writer(self.channel.fileno)

    def _read(self) -> None:
        try:
            message = self.channel.receive_message()
        except (EOFError, OSError):
            self.die(self.channel.cause_of_death())
            return
        if message is None:
            return
        is_idle = not self._queue
        self._answer(message, self.channel.take_output(is_idle=is_idle) if message.tag >= PRINTED else ())
        self._go_on()

    def _answer(self, answer: Message | Death, output: Sequence[Printed] = ()) -> None:
        if self._awaited is not None:
            (number, reply), self._awaited = self._awaited, None
            reply.set_result(RelayedReply(number, answer, output))

    def check(self) -> None:
        """If the worker has died in a way that the pipe does not show, handle its death."""
        if self._death is None and not self.channel.is_alive():
            self._read()

    def unwatch(self) -> None:
        """Stop reading messages from the worker."""
        if self.channel.fileno >= 0:
            self._loop.remove_reader(self.channel.fileno)
            self._loop.remove_writer(self.channel.fileno)

    def die(self, death: Death) -> None:
        """Kill the worker, and make ``death`` the reply to its current, queued and later commands."""
        if self._death is None:
            self._death = death
            self.unwatch()
            self.channel.kill()
            self._answer(death)
            self._go_on()


class RelayActor(RayActor):
    """An actor that starts worker processes on its node, and hands them over to the caller or relays their messages.

    The workers end when the actor ends. The methods of the actor run in an event loop, so that a worker that hangs does
    not delay the other workers.
    """

    def __init__(self, caller: tuple[str, str] | None, num_workers: int, preload: Sequence[str]) -> None:
        super().__init__(caller, num_workers)
        self._threads = max(1, usable_cores() // num_workers)
        with contextlib.suppress(OSError):  # this system has no /proc
            # Ray sets this variable in a running actor, to the actor's number of cores. Each worker would take it for a
            # choice of the user, and start that many threads.
            if b"OMP_NUM_THREADS=" not in Path("/proc/self/environ").read_bytes():
                os.environ.pop("OMP_NUM_THREADS", None)
        self._backend = SubprocBackend(preload=preload, eventfd=False)
        self._workers: dict[int, RelayedWorker] = {}  # workers that were not handed over, by host number
        self._lives: dict[tuple[int, ...], object] = {}  # objects that keep handed-over workers alive, by env ids
        self._shared: Mapping[str, Array] = {}
        self._next_call = 0  # number of the call whose messages are sent next
        self._early: dict[int, Any] = {}  # messages of calls that Ray started too early, by number of the call
        self._waiting: dict[int, set[asyncio.Future[RelayedReply]]] = {}  # missing replies, by number of the call

    async def start(
        self, host_numbers: Sequence[int], message: tuple[Any, ...], shared: Mapping[str, Array]
    ) -> list[int]:
        """Start workers, and return the ids of their processes.

        If a running worker has the same envs as a new one, it is ended first: the new worker replaces it.
        """
        specs: list[PackedSpec] = decode(Message(*message))
        replaced = {spec.env_ids for spec in specs}
        for number, worker in list(self._workers.items()):
            if worker.channel.items in replaced:
                await self.end(number)
        channels = await asyncio.to_thread(self._start, specs, shared)
        self._workers |= {number: RelayedWorker(one) for number, one in zip(host_numbers, channels, strict=True)}
        return [channel.process.pid for channel in channels]

    def _start(self, specs: Sequence[PackedSpec], shared: Mapping[str, Array]) -> list[Any]:
        prepare_worker(specs[0])
        if shared and not self._shared:
            self._shared = self._backend.share(shared)
        unpacked = [replace(spec.unpack(self._shared), threads=self._threads) for spec in specs]
        return self._backend.launch(unpacked)

    async def hand_over(self, host_numbers: Sequence[int], caller: int) -> None:
        """Hand workers over to the caller, which receives them in `RaySubprocBackend.connect`."""

        def give(host_number: int, channel: PipeChannel) -> None:
            self.commands.send(host_number)
            self._lives[channel.items] = channel.hand_over(self.commands, caller)

        for number in host_numbers:
            worker = self._workers.pop(number)
            worker.unwatch()
            await asyncio.to_thread(give, number, worker.channel)

    async def relay(
        self, call_number: int, messages: Sequence[RelayedMessage], content: Array | None = None
    ) -> list[RelayedReply]:
        """Send messages to workers and return the replies. Replies that take much longer than the first are left out.

        The caller gets the missing replies with `rest`.
        """
        loop = asyncio.get_running_loop()
        replies = [loop.create_future() if message.number else None for _, message, _ in messages]
        self._early[call_number] = messages, replies, content
        while self._next_call in self._early:
            self._send(*self._early.pop(self._next_call))
            self._next_call += 1
        return await self._gather(call_number, {reply for reply in replies if reply is not None})

    def _send(
        self,
        messages: Sequence[RelayedMessage],
        replies: Sequence[asyncio.Future[RelayedReply] | None],
        content: Array | None,
    ) -> None:
        before = [] if content is None else [encode(BroadcastContent(content))]
        for (host_number, message, has_content), reply in zip(messages, replies, strict=True):
            worker = self._workers.get(host_number)
            if worker is not None:
                worker.send([*before, message] if has_content else [message], reply)
            elif reply is not None:  # the worker was ended in the meantime
                reply.set_result(RelayedReply(message.number, Death()))

    async def rest(self, call_number: int) -> list[RelayedReply]:
        """Return the replies that the `relay` call with this number left out."""
        return await self._gather(call_number, self._waiting.pop(call_number))

    async def _gather(self, call_number: int, waiting: set[asyncio.Future[RelayedReply]]) -> list[RelayedReply]:
        begin = time.monotonic()
        done: set[asyncio.Future[RelayedReply]] = set()
        while waiting and not done:
            done, waiting = await asyncio.wait(waiting, timeout=_HEARTBEAT, return_when=asyncio.FIRST_COMPLETED)
            if not done:
                for worker in self._workers.values():
                    worker.check()
        if waiting:
            patience = min(max(time.monotonic() - begin, _LEAST_PATIENCE), _MOST_PATIENCE)
            more, waiting = await asyncio.wait(waiting, timeout=patience)
            done |= more
        if waiting:
            self._waiting[call_number] = waiting
        return [reply.result() for reply in done]

    async def end(self, host_number: int) -> None:
        """End the worker with this host number at once, unless it was handed over."""
        worker = self._workers.pop(host_number, None)
        if worker is not None:
            worker.die(Death(worker.channel.process.pid))

    async def close(self, timeout: float) -> list[Printed]:
        """Close the envs, end the workers, and return the output that the caller has not received yet."""
        for worker in self._workers.values():
            worker.unwatch()
        return list(await asyncio.to_thread(self._backend.close, (), timeout))


# -------------------------------------------------------------------- the caller's end


class RelayChannel(RayChannel):
    """A channel that reaches one of the worker processes of a `RelayActor` through Ray calls."""

    def kill(self) -> None:  # noqa: D102 (see Channel)
        if self.actor.cluster.is_connected and not self.actor.is_terminated:
            self.actor.handle.end.remote(self.host_number)


class RaySubprocBackend(RayBackend):
    """A backend with one or more actors per node of the cluster.

    By default, there is at most one worker process per core.

    Args:
        hosts_per_node: Number of actors per node, at least 1. Several actors on a node share its cores.
    """

    actor_class = RelayActor
    channel_class = RelayChannel
    strategy = "SPREAD"

    def __init__(
        self,
        *,
        hosts_per_node: int = 1,
        ray_init: dict[str, Any] | None = None,
        ray_options: dict[str, Any] | None = None,
        direct: bool = True,
        preload: Sequence[str] = (),
    ) -> None:
        super().__init__(ray_init=ray_init, ray_options=ray_options, direct=direct)
        self.actor_arguments = (check_preload(preload),)
        self._hosts_per_node = check_positive("hosts_per_node", hosts_per_node)

    def distribute(self, num_workers: int) -> list[int]:
        """Return the number of workers of each actor. An actor with a larger share of the cores gets more workers."""
        parts = [
            part for cores in cores_of_nodes() for part in apportion(cores, [1] * min(cores, self._hosts_per_node))
        ]
        return apportion(num_workers, sorted(parts, reverse=True)[:num_workers])

    def connect(self, actor: ActorHandle, workers: Sequence[StartedWorker]) -> list[PipeChannel]:
        """Make an actor on this machine hand over these workers, and return channels to them."""
        actor.is_direct = True
        actor.handle.hand_over.remote([worker.host_number for worker in workers], os.getpid())
        channels: list[PipeChannel] = []
        try:
            while len(channels) < len(workers) and actor.commands.poll(_HAND_OVER_TIMEOUT):
                worker = workers[len(channels)]
                with DeferSignals():
                    number = actor.commands.recv()
                    pipe, log, status = (reduction.recv_handle(actor.commands) for _ in range(3))
                    if number == worker.host_number:
                        forked = ForkedProcess(worker.pid, Connection(status, writable=False))
                        process = WorkerProcess(forked, actor.last_words)  # the worker dies with its actor
                        channel = self._group.connect(process, CallerEnd(pipe), WorkerLog(log), worker.env_ids)
                        channels.append(channel)
                    else:  # the descriptors are of a worker whose hand-over was interrupted earlier
                        for fileno in (pipe, log, status):
                            os.close(fileno)
        except (EOFError, OSError) as error:
            if signal_behind(error) is not None:
                raise
            raise WorkerStartError("A Ray actor has ended before it had given its workers to the caller.") from error
        if len(channels) < len(workers):
            text = f"A Ray actor has not given its workers to the caller within {_HAND_OVER_TIMEOUT:.0f} s."
            raise WorkerStartError(text)
        return channels
