"""The group of a pool's channels to hosts in other processes on this machine."""

from __future__ import annotations

import contextlib
import functools
import select
import time
from collections.abc import Container, Sequence
from multiprocessing.connection import Connection
from typing import Any

from parallelenv.backends._bell import SEEN, Bell, BellChannel, BellStep, word_of
from parallelenv.backends._in_process import CallerChannel, CallerStep, JointStep
from parallelenv.backends._pipe import PipeChannel, spin
from parallelenv.contract.codec import Message
from parallelenv.contract.interrupts import DeferSignals
from parallelenv.contract.message_channel import MessageStep
from parallelenv.contract.protocol import Command, Printed, RepeatedStep
from parallelenv.worker.worker_log import WorkerLog

_HEARTBEAT = 0.25
"""Seconds between checks that workers are alive. A pipe does not show a worker's death if a child process of an env
keeps the pipe open."""
TERMINATE_TIMEOUT = 0.3
"""Seconds from terminating a worker until it is killed, and the time limit for replacing a dead fork server."""
_SPIN = 200e-6
"""Seconds that the caller polls for a reply before it sleeps, if the latest wait for a reply was shorter than this.

After longer waits, polling would only slow down the workers: on 2 cores, it slowed down 2 workers with steps of 2.4 ms
by 10 %.
"""


class ChannelGroup:
    """A pool's channels to hosts in other processes on this machine, and the `Bell` of these hosts.

    Attributes:
        channels: All open channels, including those that `Backend.launch` has not returned yet.
        awaits_first: Whether a message has been sent since the latest wait.
    """

    def __init__(self) -> None:
        self.channels: list[PipeChannel] = []
        self.bell: Bell | None = None
        self.queue: list[tuple[BellChannel, Message]] = []
        self.awaits_first = False
        self._watched: dict[int, PipeChannel | Bell] = {}  # by descriptor
        self._lacks_room: set[int] = set()  # descriptors of channels with an outbox
        self._shield = DeferSignals()  # nothing may be written twice
        self._spinning_pays = True  # whether the latest wait for a reply was shorter than `_SPIN`
        self._poll: Any = select.poll() if hasattr(select, "poll") else None  # not on Windows, where nothing is watched
        self._epoll: Any = None  # watches the same descriptors for event loops; made at the first call of `fileno`
        if self._poll is not None:
            self.poll: Any = self._poll.poll
            self._glance = functools.partial(self.poll, 0)

    # ---------------------------------------------------------------- what is watched

    def use_bell(self, num_workers: int) -> None:
        if self.bell is None:
            self.bell = Bell(num_workers)
            self.watch(self.bell)

    def connect(self, process: Any, pipe: Connection, log: WorkerLog, env_ids: tuple[int, ...]) -> PipeChannel:
        arguments = process, pipe, log, env_ids
        channel = PipeChannel(self, *arguments) if self.bell is None else BellChannel(self, self.bell, *arguments)
        self.channels = [*(known for known in self.channels if not known.is_closed), channel]
        return channel

    def watch(self, channel: PipeChannel | Bell) -> None:
        self._watched[channel.fileno] = channel
        self._poll.register(channel.fileno, select.POLLIN)
        if self._epoll is not None:
            self._epoll.register(channel.fileno, select.EPOLLIN)

    def watch_room(self, channel: PipeChannel) -> None:
        """Also watch whether there is room for the outbox of a channel, until it is empty."""
        if channel.fileno in self._watched and channel.fileno not in self._lacks_room:
            self._lacks_room.add(channel.fileno)
            self._watch_for(channel.fileno, select.POLLIN | select.POLLOUT)

    def _watch_for(self, fileno: int, events: int) -> None:
        self._poll.modify(fileno, events)
        if self._epoll is not None:
            self._epoll.modify(fileno, events)  # the numbers of these events are the same

    def _flush_outboxes(self, seen: list[tuple[int, int]]) -> list[tuple[int, int]]:
        """Write to the pipes that have room, and return the other events."""
        for fileno, event in seen:
            channel = self._watched.get(fileno)
            if event & select.POLLOUT and isinstance(channel, PipeChannel):
                # OSError: the host has died, which reading shows, or another thread has closed the wire.
                with self._shield, contextlib.suppress(OSError):
                    channel.wire.flush()
                    if not channel.wire.outbox:
                        self._lacks_room.discard(fileno)
                        self._watch_for(fileno, select.POLLIN)
        return [(fileno, event) for fileno, event in seen if event != select.POLLOUT]

    def unwatch(self, channel: PipeChannel | Bell) -> None:
        """Call this before the descriptor is closed."""
        if self._watched.pop(channel.fileno, None) is None:
            return
        self._lacks_room.discard(channel.fileno)
        self._poll.unregister(channel.fileno)
        if self._epoll is not None:
            self._epoll.unregister(channel.fileno)

    def fileno(self) -> int | None:
        if self._epoll is None and hasattr(select, "epoll"):
            self._epoll = select.epoll()
            for fileno in self._watched:
                room = select.EPOLLOUT if fileno in self._lacks_room else 0
                self._epoll.register(fileno, select.EPOLLIN | room)
        return None if self._epoll is None else int(self._epoll.fileno())

    # ---------------------------------------------------------------- commands

    def prepare_step(self, commands: Sequence[tuple[Any, Command]]) -> RepeatedStep | None:
        parts, own = [], None
        if any(isinstance(channel, BellChannel) and channel.is_behind for channel, _ in commands):
            return None
        for channel, command in commands:
            if isinstance(channel, CallerChannel):
                own = CallerStep.of(channel, command)
            elif (message := channel.plain_step(command)) is not None:
                parts.append((channel, message))
        if len(parts) + (own is not None) < len(commands):
            return None
        if not parts:
            return own
        if self.bell is None:
            steps: RepeatedStep = MessageStep(parts, self.wait)
        elif self._wakes_too_many(len(parts)):
            return None
        else:
            steps = BellStep(self, self.bell, parts)
        return steps if own is None else JointStep(steps, own, len(parts))

    def flush(self) -> None:
        # The bell rings once; if that would wake too many workers that have no queued step, messages are sent over the
        # pipes instead.
        if self.bell is None or not self.queue:
            return
        queue, self.queue = self.queue, []
        if self._wakes_too_many(len(queue)):
            for channel, message in queue:
                with contextlib.suppress(OSError):  # if the host has died, the next wait finds out
                    channel.send_message(message)
            return
        rings = self.bell.words[0]
        for channel, message in queue:
            channel.announce(word_of(message, message.number))
        self.bell.ring()
        for one in self.channels:
            if isinstance(one, BellChannel) and one.word and self.bell.words[one.line + SEEN] != rings:
                one.tell()

    def _wakes_too_many(self, num_wanted: int) -> bool:
        """Return whether a step is for fewer than half of all workers; messages then cost less than the bell."""
        return 2 * num_wanted < len(self.channels)

    # ---------------------------------------------------------------- replies

    def wait(self, channels: Sequence[Any], timeout: float | None, wanted: int) -> Sequence[Any]:
        """Wait for replies as `Backend.wait` does. Hosts in the caller's thread execute their commands meanwhile."""
        deadline = None if timeout is None else time.monotonic() + timeout
        ready = [channel for channel in channels if channel.advance()]
        while True:
            left = _HEARTBEAT if deadline is None else min(_HEARTBEAT, deadline - time.monotonic())
            seen = self._glance()
            if not seen and left > 0 and len(ready) < wanted:
                begin = time.perf_counter()
                seen = spin(self._glance, min(_SPIN, left)) if self._spinning_pays else []
                seen = seen or self.poll(left * 1000)
                if self.awaits_first:
                    self.awaits_first, self._spinning_pays = False, time.perf_counter() - begin < _SPIN
            if self._lacks_room:
                seen = self._flush_outboxes(seen)
            # The bell, or channels with something to read. Another thread may have closed one in the meantime.
            found = [self._watched[fileno] for fileno, _ in seen if fileno in self._watched]
            if self.bell is not None and self.bell in found:
                self.bell.silence()
                found.remove(self.bell)
                ready = [channel for channel in channels if channel.advance()]
                if not found and len(ready) < wanted:  # the counter was old, or too few have replied
                    continue
            elif not found:
                ready = [channel for channel in channels if channel.advance()]
            ready = list(dict.fromkeys([*ready, *found])) if found else ready
            ready = ready or [
                one for one in channels if one.receive_output() or one.wire.is_broken or not one.is_alive()
            ]
            if ready or left <= 0:
                return ready

    # ---------------------------------------------------------------- the end

    def end(self, hosts: Container[tuple[int, ...]]) -> None:
        """Kill the given hosts, each identified by the tuple `MessageChannel.items` of its channel."""
        for channel in self.channels:
            if channel.items in hosts:
                channel.kill()

    def hang_up(self) -> None:
        """Close all pipes, which makes the hosts close their envs and exit."""
        for channel in self.channels:
            if not channel.is_closed:
                channel.hang_up()

    def close(self, timeout: float) -> Sequence[Printed]:
        """Give the hosts ``timeout`` seconds to exit, end those still running, and return the remaining output."""
        deadline = time.monotonic() + timeout
        workers = [channel for channel in self.channels if not channel.is_closed]
        for channel in workers:
            channel.join(max(0.0, deadline - time.monotonic()))
        stubborn = [channel for channel in workers if channel.is_alive()]
        for channel in stubborn:
            channel.process.terminate()
        deadline = time.monotonic() + TERMINATE_TIMEOUT
        for channel in stubborn:
            channel.join(max(0.0, deadline - time.monotonic()))
        printed = [piece for channel in workers for piece in channel.take_output(is_idle=True)]
        for channel in workers:
            channel.kill()
        self.queue = []
        if self.bell is not None:
            self.unwatch(self.bell)
            self.bell.close()
        epoll, self._epoll = self._epoll, None
        if epoll is not None:
            epoll.close()
        return printed
