"""The caller's ends of pipes to hosts in other processes of this machine."""

from __future__ import annotations

import contextlib
import functools
import select
import signal
import time
from collections.abc import Container, Sequence
from multiprocessing import reduction
from multiprocessing.connection import Connection
from typing import Any

from parallelenv.backends._cpu_balancer import CpuBalancer
from parallelenv.backends._eventfd_bell import (
    COMMAND,
    DONE,
    HAS_MESSAGE,
    LOOK,
    OTHER_BITS,
    SEEN,
    TAKEN,
    Bell,
    BellAccess,
    word_of,
)
from parallelenv.backends._in_process import CallerChannel, CallerStep, JointStep
from parallelenv.backends._process import UNKNOWN, process_exists
from parallelenv.backends._shared_memory import BatchAccess, SharedMemory
from parallelenv.backends._wire import Wire, sched_yield, spin
from parallelenv.contract import codec
from parallelenv.contract.batch import Batch
from parallelenv.contract.codec import PLAIN_STEPS, Message, StepSubset, encode_reply
from parallelenv.contract.interrupts import DeferSigint
from parallelenv.contract.message_channel import MessageChannel, MessageStep
from parallelenv.contract.protocol import Command, Death, Printed, RepeatedStep, Reply
from parallelenv.worker.worker_log import WorkerLog

_HEARTBEAT = 0.25
"""Seconds between checks whether workers live, for deaths that a pipe does not show: an env's own child process may
keep the pipe open."""
LAST_CHANCE = 0.3
"""Seconds from terminating a worker until it is killed, and for a dying fork server to disappear."""
_SPIN = 200e-6
"""Seconds that the caller spins for a reply before it sleeps, if the latest ones came so quickly.

Otherwise it would only slow down the workers: on 2 cores it cost 2 workers 10 % of steps of 2.4 ms."""
_BELL_SPIN = 1e-3
"""Seconds that the caller spins for workers that the bell wakes before it sleeps, if the last step took less.

On 2 cores, 64 CartPoles made 1.39 of the steps of a bare loop with it and 1.14 with 200 us; envs of 100 us 1.79 and
1.75. While another program kept a core busy, 16 CartPoles made 0.36 instead of 0.44.
"""
_LATE = 30e-6
"""Seconds after which a worker that was awake has certainly begun."""
_GLANCE = 0.001
"""Seconds between looks at the bell while only a reply can make room in a pipe."""
_NO_COMMAND = 0
"""Number that no command has: they count from 1."""


class PipeChannel(MessageChannel):
    """A pipe to a host in a process of its own, which shares the memory of the batch.

    ``process`` is a `WorkerProcess`, or an object with the same methods.
    """

    def __init__(
        self, board: Switchboard, process: Any, pipe: Connection, log: WorkerLog, env_ids: tuple[int, ...]
    ) -> None:
        super().__init__(env_ids)
        self.process = process
        self.wire = Wire(pipe)
        self.fileno = self.wire.fileno
        self.is_gone = False
        self.found_dead = False
        self._log = log
        self._board = board
        board.watch(self)

    def connect_bell(self) -> None:
        """Give the host, which is new, access to the bell, if there is one."""

    def send_message(self, message: Message) -> None:
        self.wire.send(message)
        self._board.awaits_first = True

    def receive_message(self) -> Message:
        if self.found_dead and not self.wire.connection.poll(0):  # a child of the env keeps the pipe open
            raise EOFError
        return self.wire.receive()

    def work(self) -> bool:
        """Return whether there is a reply already. The counterpart of `CallerChannel.work`."""
        return bool(self.inbox)

    def take_output(self, *, is_idle: bool) -> list[Printed]:
        """Return the output since the last call; whole lines only, unless the worker is idle."""
        return self._log.take(self.env_ids, is_idle=is_idle)

    def overhear(self) -> bool:
        """Check whether a busy worker has printed something, which is received like a reply."""
        output = self.take_output(is_idle=False)
        if output:
            self.inbox.append(encode_reply(Reply(_NO_COMMAND, output=output)))
        return bool(output)

    def attach(self, batch: Batch) -> None:
        memory: SharedMemory = batch.owner
        # After an interrupt in between the worker would wait for good for the announced memory.
        with contextlib.suppress(OSError), DeferSigint():  # OSError: if it has died, its next command reports it
            self.notify(BatchAccess(batch.layout))
            memory.send(self.wire.connection, self.process.pid)

    def cause_of_death(self) -> Death:
        self.process.join(timeout=1.0)
        code = self.process.exitcode
        words = self.process.last_words(), self._log.last_lines()
        return Death(self.process.pid, None if code == UNKNOWN else code, *words)

    def is_dead(self) -> bool:
        """Whether the process has ended. If the fork server has ended, its processes seem to have ended too."""
        try:
            if self.process.is_alive():
                return False
        except ValueError:  # another thread has closed it meanwhile
            return True
        self.found_dead = self.process.exitcode != UNKNOWN or not process_exists(self.process.pid)
        return self.found_dead

    def join(self, timeout: float) -> None:
        """Wait for the process to end, at most ``timeout`` seconds. Another thread may have closed it meanwhile."""
        with contextlib.suppress(ValueError):
            self.process.join(timeout)

    def hand_over(self, connection: Connection, pid: int) -> object:
        """Give the host to another process, over a connection to that. Return what keeps it alive.

        The other process makes a new channel of the three descriptors: of the pipe, the log, and the exit code.
        """
        for fileno in (self.fileno, self._log.fileno):
            reduction.send_handle(connection, fileno, pid)
        life = self.process.hand_over(connection, pid)
        self.hang_up()
        self._log.close()
        self.is_gone = True
        return life

    def hang_up(self) -> None:
        """Close the pipe."""
        with DeferSigint():
            if not self.wire.connection.closed:
                self._board.unwatch(self)
                self.wire.connection.close()

    def kill(self) -> None:
        if self.is_gone:
            return
        self.hang_up()
        with contextlib.suppress(ValueError):  # another thread has closed it meanwhile
            if not self.is_dead():
                self.process.terminate(signal.SIGKILL)
            self.process.join()
            self.process.close()
        with DeferSigint():  # set last: an interrupted `kill` is called again
            self._log.close()
            self.is_gone = True


class BellChannel(PipeChannel):
    """A pipe to a host that is also woken by a bell, if all of its envs step and nothing else is to be said.

    Attributes:
        line: Place of the worker's words.
        word: The step that was announced by the bell and not answered; 0 if there is none.
    """

    def __init__(self, board: Switchboard, bell: Bell, *arguments: Any) -> None:
        super().__init__(board, *arguments)
        self.line = bell.enter(self.env_ids)
        self.word = 0
        self._bell = bell
        self._was_told = False  # whether the worker got a message to look for that step
        self._is_behind = True  # whether the pipe may have something unread that the next command relies on

    def connect_bell(self) -> None:
        with contextlib.suppress(OSError), DeferSigint():  # OSError: if it has died, its first command reports it
            self.notify(BellAccess(self.line, self._bell.nbytes))
            self._bell.send(self.wire.connection, self.process.pid)

    def notify(self, anything: object) -> None:
        if not isinstance(anything, StepSubset):  # which the host reads when a step asks for it
            self._is_behind = True
        super().notify(anything)

    def send(self, packed: Message) -> None:
        if self.is_behind or packed.frames or packed.tag not in PLAIN_STEPS:
            self._is_behind = False  # the reply to this command comes after all that was sent before
            super().send(packed)
            return
        self._board.queue.append((self, packed))
        self._num_unread = 1
        self._board.awaits_first = True

    @property
    def is_behind(self) -> bool:
        """Whether the pipe may have something unread that the next command relies on."""
        return self._is_behind or self._num_unread > 0

    def announce(self, word: int) -> None:
        """Write the word of a step. Harmless if repeated: the worker does each step once."""
        self.word = self._bell.words[self.line + COMMAND] = word
        self._was_told = False
        self._num_unread = 1

    @property
    def has_begun(self) -> bool:
        """Whether the worker has begun the step that was announced."""
        return self._bell.words[self.line + TAKEN] == self.word

    @property
    def has_finished(self) -> bool:
        """Whether the worker has done the step that was announced, and has nothing to say."""
        return self.word != 0 and self._bell.words[self.line + DONE] == self.word

    def tell(self) -> None:
        """Send the worker a message to look for its step, if it has not begun: it may have missed the ring."""
        if not self._was_told and not self.has_begun:
            self._was_told = True  # once: messages to a worker that does not run would fill its pipe
            with contextlib.suppress(OSError):  # if it has died, the next wait finds out
                self.wire.send(LOOK)

    def work(self) -> bool:
        return bool(self.inbox) or self.has_finished

    def receive(self) -> Reply:
        if self.inbox or not self.has_finished:
            return super().receive()
        self._num_unread -= 1
        return Reply(self._take())

    def receive_message(self) -> Message:
        while self.word and not self.has_finished and not self.found_dead:
            if self.wire.connection.poll(_GLANCE):
                break
        if self.has_finished:  # also if the pipe has a message: it is a reply to a later command
            return Message(codec.DONE, self._take())
        message = super().receive_message()
        self.word = 0  # the worker has something to say
        return message

    def _take(self) -> int:
        """Return the number of the step that is done, whose reply is taken."""
        word, self.word = self.word, 0
        return word >> OTHER_BITS

    def hang_up(self) -> None:
        self.word = 0
        super().hang_up()


class BellStep:
    """A `RepeatedStep` of workers that are woken by the bell.

    Nothing here needs protection from interrupts: a word can be written and the bell rung again, and nothing is read
    that could not be read again. ``parts``: each worker's channel, and the message of its step without its number.
    """

    def __init__(self, board: Switchboard, bell: Bell, parts: Sequence[tuple[BellChannel, Message]]) -> None:
        self._board = board
        self._bell = bell
        self._words = bell.words
        self._parts = parts
        # Of each worker: the place of its word, and what the number of a step is added to.
        self._commands = [
            (channel.line + COMMAND, word_of(message, place)) for place, (channel, message) in enumerate(parts)
        ]
        self._awaited: list[tuple[int, int]] = []  # of each worker: the place and the word that says that it is done
        self._is_quick = True
        self._has_told = False

    def send(self, number: int) -> None:
        words, shifted, awaited = self._words, number << OTHER_BITS, []
        for place, other_bits in self._commands:
            words[place] = word = shifted + other_bits
            awaited.append((place + DONE, word))
        self._awaited, self._has_told = awaited, False
        self._bell.ring()

    def wait(self, timeout: float) -> bool:
        words = self._words
        begin = time.perf_counter()
        end = begin + _BELL_SPIN if self._is_quick else begin
        late = begin + _LATE
        for place, word in self._awaited:
            while (done := words[place]) != word:
                if done == word | HAS_MESSAGE:
                    return False
                now = time.perf_counter()
                if now < end:
                    sched_yield()
                    if now > late:
                        late = end
                        if any(words[one - DONE + TAKEN] != awaited for one, awaited in self._awaited):
                            self._board.spread()  # workers may share a core while another is idle
                elif not self._sleep(begin + timeout):
                    return False
        self._is_quick = time.perf_counter() - begin < _BELL_SPIN
        return True

    def _sleep(self, until: float) -> bool:
        """Wait until some worker may have finished. ``False``: one has a message, or died, or it took too long."""
        words = self._words
        if not self._has_told:
            self._has_told = True
            rings = words[0] - 1
            for (channel, _), (_, word) in zip(self._parts, self._awaited, strict=True):
                if words[channel.line + SEEN] != rings and words[channel.line + TAKEN] != word:
                    with contextlib.suppress(OSError):  # if it has died, the poll finds out
                        channel.wire.send(LOOK)
        found = self._board.poll(max(0.0, until - time.perf_counter()) * 1000)
        if len(found) != 1 or found[0][0] != self._bell.fileno:
            return False
        self._bell.silence()
        return True

    def file(self, number: int) -> None:
        for place, (channel, message) in enumerate(self._parts):
            channel.announce(word_of(message, number + place))
        if not all(channel.has_begun for channel, _ in self._parts):
            self._bell.ring()
            for channel, _ in self._parts:
                channel.tell()  # an interrupted ring may have left it waiting for the other eventfd


class Switchboard:
    """All pipes to hosts; the caller waits here for any of them.

    Attributes:
        channels: All living ones, including those that `Backend.launch` has not returned yet.
        bell: The `Bell` that announces plain steps; ``None``: the pipes do.
        queue: Steps to announce by the bell with the next `flush`.
        poll: Waits for any pipe and the bell, as ``poll.poll`` does.
        awaits_first: Whether nothing was awaited since the latest message was sent.
    """

    def __init__(self, balancer: CpuBalancer) -> None:
        self.channels: list[PipeChannel] = []
        self.bell: Bell | None = None
        self.queue: list[tuple[BellChannel, Message]] = []
        self.awaits_first = False
        self._balancer = balancer
        self._watched: dict[int, PipeChannel | Bell] = {}  # channels and the bell, by descriptor
        self._pids: list[int] = []  # of the processes at their other ends
        self._is_quick = True  # whether recent replies came within `_SPIN`, so that spinning pays
        self._poll: Any = select.poll() if hasattr(select, "poll") else None  # not on Windows, where nothing is watched
        self._epoll: Any = None  # the same for event loops, once one has asked for it
        if self._poll is not None:
            self.poll: Any = self._poll.poll
            self._glance = functools.partial(self.poll, 0)

    # ---------------------------------------------------------------- what is watched

    def use_bell(self, num_workers: int) -> None:
        """Let a bell announce plain steps from now on; `WorkerStartError` if there are not enough descriptors."""
        if self.bell is None:
            self.bell = Bell(num_workers)
            self.watch(self.bell)

    def connect(self, process: Any, pipe: Connection, log: WorkerLog, env_ids: tuple[int, ...]) -> PipeChannel:
        """Return a new channel, to a host that the bell wakes if there is one. Arguments: see `PipeChannel`."""
        arguments = process, pipe, log, env_ids
        channel = PipeChannel(self, *arguments) if self.bell is None else BellChannel(self, self.bell, *arguments)
        self.channels = [*(known for known in self.channels if not known.is_gone), channel]
        return channel

    def watch(self, channel: PipeChannel | Bell) -> None:
        """Wait for it, too, from now on."""
        self._watched[channel.fileno] = channel
        if isinstance(channel, PipeChannel):
            self._pids.append(channel.process.pid)
        self._poll.register(channel.fileno, select.POLLIN)
        if self._epoll is not None:
            self._epoll.register(channel.fileno, select.EPOLLIN)

    def unwatch(self, channel: PipeChannel | Bell) -> None:
        """Wait for it no longer. Must be called before its descriptor is closed."""
        if self._watched.pop(channel.fileno, None) is None:
            return
        if isinstance(channel, PipeChannel):
            self._pids.remove(channel.process.pid)
        self._poll.unregister(channel.fileno)
        if self._epoll is not None:
            self._epoll.unregister(channel.fileno)

    def fileno(self) -> int | None:
        """Return a descriptor that is readable while a pipe is, ``None`` where there is none. See `Backend`."""
        if self._epoll is None and hasattr(select, "epoll"):
            self._epoll = select.epoll()
            for fileno in self._watched:
                self._epoll.register(fileno, select.EPOLLIN)
        return None if self._epoll is None else int(self._epoll.fileno())

    # ---------------------------------------------------------------- commands

    def prepare_step(self, commands: Sequence[tuple[Any, Command]]) -> RepeatedStep | None:
        """See `Backend`: a step of workers that the bell wakes, and of the caller's own envs."""
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
        """Announce all queued steps: by one ring, or over the pipes if it would wake more workers than needed."""
        if self.bell is None or not self.queue:
            return
        queue, self.queue = self.queue, []
        if self._wakes_too_many(len(queue)):
            for channel, message in queue:
                with contextlib.suppress(OSError):  # if it has died, the next wait finds out
                    channel.wire.send(message)
            return
        rings = self.bell.words[0]
        for channel, message in queue:
            channel.announce(word_of(message, message.number))
        self.bell.ring()
        for one in self.channels:
            if isinstance(one, BellChannel) and one.word and self.bell.words[one.line + SEEN] != rings:
                one.tell()

    def _wakes_too_many(self, num_wanted: int) -> bool:
        """Whether the bell would wake more workers than are wanted, and than it would take to send messages."""
        return 2 * num_wanted < len(self.channels)

    # ---------------------------------------------------------------- replies

    def spread(self) -> None:
        """Move workers apart that share a core needlessly."""
        self._balancer.look(self._pids)

    def wait(self, channels: Sequence[Any], timeout: float | None, wanted: int) -> Sequence[Any]:
        """Wait as `Backend.wait` does, also for hosts in the caller, which work during the wait."""
        deadline = None if timeout is None else time.monotonic() + timeout
        ready = [channel for channel in channels if channel.work()]
        while True:
            if self._is_quick and not ready:  # else the system has time to find a core for each
                self.spread()
            left = _HEARTBEAT if deadline is None else min(_HEARTBEAT, deadline - time.monotonic())
            found = self._look(0.0 if len(ready) >= wanted else max(0.0, left))
            if self.bell is not None and self.bell in found:
                self.bell.silence()
                found.remove(self.bell)
                ready = [channel for channel in channels if channel.work()]
                if not found and len(ready) < wanted:  # left over from an earlier wait, or not all
                    continue
            elif not found:
                ready = [channel for channel in channels if channel.work()]
            ready = list(dict.fromkeys([*ready, *found])) if found else ready
            ready = ready or [channel for channel in channels if channel.overhear() or channel.is_dead()]
            if ready or left <= 0:
                return ready

    def _look(self, timeout: float) -> list[Any]:
        """Return what has something to read or a closed pipe; nothing after ``timeout`` seconds."""
        found = self._glance()
        if not found and timeout:
            begin = time.perf_counter()
            found = spin(self._glance, min(_SPIN, timeout)) if self._is_quick else []
            found = found or self.poll(timeout * 1000)
            if self.awaits_first:
                self.awaits_first, self._is_quick = False, time.perf_counter() - begin < _SPIN
        return [self._watched[fileno] for fileno, _ in found]

    # ---------------------------------------------------------------- the end

    def end(self, hosts: Container[tuple[int, ...]]) -> None:
        """End the living hosts with these env ids."""
        for channel in self.channels:
            if channel.env_ids in hosts:
                channel.kill()

    def hang_up(self) -> None:
        """Close all pipes, which makes hosts close their envs and exit."""
        for channel in self.channels:
            if not channel.is_gone:
                channel.hang_up()

    def close(self, timeout: float) -> Sequence[Printed]:
        """Wait for hosts to exit, end those that do not, and return their output."""
        deadline = time.monotonic() + timeout
        workers = [channel for channel in self.channels if not channel.is_gone]
        for channel in workers:
            channel.join(max(0.0, deadline - time.monotonic()))
        stubborn = [channel for channel in workers if not channel.is_dead()]
        for channel in stubborn:
            channel.process.terminate()
        deadline = time.monotonic() + LAST_CHANCE
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
