"""The caller's ends of pipes to hosts in other processes of this machine."""

from __future__ import annotations

import contextlib
import functools
import os
import select
import signal
import time
from collections.abc import Container, Sequence
from multiprocessing import connection
from typing import Any

from parallelenv.backends._cpu_balancer import CpuBalancer
from parallelenv.backends._eventfd_bell import Bell, BellAccess, BellStep
from parallelenv.backends._in_process import CallerChannel, CallerStep, JointStep
from parallelenv.backends._process import UNKNOWN, process_exists
from parallelenv.backends._shared_memory import SharedMemory
from parallelenv.backends._wire import Wire, spin
from parallelenv.contract.batch import Batch
from parallelenv.contract.codec import DONE, PLAIN_STEPS, Message, StepSubset, encode_reply
from parallelenv.contract.interrupts import DeferSigint
from parallelenv.contract.message_channel import MessageChannel, MessageStep
from parallelenv.contract.protocol import Command, Death, Printed, RepeatedStep, Reply
from parallelenv.errors import WorkerStartError
from parallelenv.worker.worker_log import WorkerLog

_HEARTBEAT = 0.25
"""Seconds between checks whether workers live, for deaths that a pipe does not show: an env's own child process may
keep the pipe open."""
LAST_CHANCE = 0.3
"""Seconds from terminating a worker until it is killed, and for a dying fork server to disappear."""
_SPIN = 200e-6
"""Seconds that the caller spins for a reply before it sleeps, if the latest ones came so quickly.

Otherwise it would only slow down the workers: on 2 cores it cost 2 workers 10 % of steps of 2.4 ms."""
_GLANCE = 0.001
"""Seconds between looks at the bell while only a reply can make room in a pipe."""
_NO_COMMAND = 0
"""Number that no command has: they count from 1."""


class Poller:
    """Waits for any of many pipes, without building the list for every wait.

    Attributes:
        poll: Waits for any descriptor, as ``poll.poll`` does; ``None`` where there is none.
        pids: Processes at their other ends.
        is_quick: Whether recent replies came within `_SPIN`, so that spinning pays.
        awaits_first: Whether nothing was awaited since the latest message was sent.
    """

    def __init__(self) -> None:
        self._channels: dict[int, Any] = {}
        self.pids: list[int] = []
        self._poll: Any = select.poll() if hasattr(select, "poll") else None
        self._epoll: Any = None
        self.poll: Any = self._poll.poll if self._poll is not None else None
        self.is_quick = True
        self.awaits_first = False
        self._glance: Any = functools.partial(self._poll.poll, 0) if self._poll is not None else None

    def add(self, channel: PipeChannel) -> None:
        """Watch a channel from now on."""
        self.watch(channel)
        self.pids.append(channel.process.pid)

    def watch(self, guest: Any) -> None:
        """Also watch an object with a ``fileno`` from now on; `wait` returns it like a channel."""
        self._channels[guest.fileno] = guest
        if self._poll is not None:
            self._poll.register(guest.fileno, select.POLLIN)
        if self._epoll is not None:
            self._epoll.register(guest.fileno, select.EPOLLIN)

    def ignore(self, guest: Any) -> None:
        """Stop watching it. Must be called before its descriptor is closed."""
        if self._channels.pop(guest.fileno, None) is None:
            return
        if self._poll is not None:
            self._poll.unregister(guest.fileno)
        if self._epoll is not None:
            self._epoll.unregister(guest.fileno)

    def remove(self, channel: PipeChannel) -> None:
        """Stop watching a channel. Must be called before its pipe is closed."""
        if channel.fileno in self._channels:
            self.pids.remove(channel.process.pid)
            self.ignore(channel)

    def fileno(self) -> int | None:
        """Return a descriptor that is readable while a pipe is, ``None`` where there is none. See `Backend`."""
        if self._epoll is None and hasattr(select, "epoll"):
            epoll = select.epoll()
            for fileno in self._channels:
                epoll.register(fileno, select.EPOLLIN)
            self._epoll = epoll
        return None if self._epoll is None else int(self._epoll.fileno())

    def close(self) -> None:
        """Close the descriptor of `fileno`."""
        epoll, self._epoll = self._epoll, None
        if epoll is not None:
            epoll.close()

    def wait(self, timeout: float) -> list[PipeChannel]:
        """Return the channels with something to read or a closed pipe; none after ``timeout`` seconds."""
        if self._poll is None:  # Windows, and few other systems
            pipes = {channel.wire.connection: channel for channel in self._channels.values()}
            return [pipes[pipe] for pipe in connection.wait(list(pipes), timeout)]
        found = self._glance()
        if not found and timeout:
            begin = time.perf_counter()
            found = spin(self._glance, min(_SPIN, timeout)) if self.is_quick else None
            found = found or self._poll.poll(timeout * 1000)
            if self.awaits_first:
                self.awaits_first, self.is_quick = False, time.perf_counter() - begin < _SPIN
        return [self._channels[fileno] for fileno, _ in found]


class PipeChannel(MessageChannel):
    """A pipe to a host in a process of its own, which shares the memory of the batch.

    Args:
        process: The process; a `WorkerProcess` or an object with the same methods.
        pipe: The caller's end.
        log: The host's output.
        poller: The poller that waits for it.
        env_ids: The envs.
    """

    def __init__(
        self, process: Any, pipe: Any, log: WorkerLog | None, poller: Poller, env_ids: tuple[int, ...]
    ) -> None:
        super().__init__(env_ids)
        self.process = process
        self.wire = Wire(pipe)
        self.fileno = self.wire.fileno
        self.is_gone = False
        self.found_dead = False
        self._log = log
        self._poller = poller
        poller.add(self)

    def send_message(self, message: Message) -> None:
        self.wire.send(message)
        self._poller.awaits_first = True

    def receive_message(self) -> Message:
        if self.found_dead and not self.wire.connection.poll(0):  # a child of the env keeps the pipe open
            raise EOFError
        return self.wire.receive()

    def work(self) -> bool:
        """Return whether there is a reply already. The counterpart of `CallerChannel.work`."""
        return bool(self.inbox)

    def take_output(self, *, is_idle: bool) -> list[Printed]:
        """Return the output since the last call; whole lines only, unless the worker is idle."""
        return [] if self._log is None else self._log.take(self.env_ids, is_idle=is_idle)

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
            self.notify(batch.layout)
            memory.send(self.wire.connection, self.process.pid)

    def cause_of_death(self) -> Death:
        self.process.join(timeout=1.0)
        last_lines = "" if self._log is None else self._log.last_lines()
        return Death(self.process.pid, self.process.exitcode, last_lines=last_lines)

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

    def hang_up(self) -> None:
        """Close the pipe."""
        with DeferSigint():
            if not self.wire.closed:
                self._poller.remove(self)
                self.wire.close()

    def kill(self) -> None:
        if self.is_gone:
            return
        self.hang_up()
        with contextlib.suppress(ValueError):  # another thread has closed it meanwhile
            if not self.is_dead():
                self.end_process()
            self.process.join()
            self.process.close()
        with DeferSigint():  # set last: an interrupted `kill` is called again
            if self._log is not None:
                self._log.close()
            self.is_gone = True

    def end_process(self) -> None:
        """End the process at once."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.process.pid, getattr(signal, "SIGKILL", signal.SIGTERM))


class BellChannel(PipeChannel):
    """A pipe to a host that is also woken by a bell, if all of its envs step and nothing else is to be said.

    Args:
        bell: The bell.
        *arguments: See `PipeChannel`.
    """

    def __init__(self, bell: Bell, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.entry = bell.enter(self.env_ids)
        self._bell = bell
        self._is_behind = True  # whether the pipe may have something unread that the next command relies on

    def connect_bell(self) -> None:
        """Give the worker, which is new, access to the bell."""
        with DeferSigint():
            self.notify(BellAccess(self.entry.line, self._bell.nbytes))
            self._bell.send(self.wire.connection, self.process.pid)

    def notify(self, anything: Any) -> None:
        if not isinstance(anything, StepSubset):  # which the host reads when a step asks for it
            self._is_behind = True
        super().notify(anything)

    def send(self, packed: Message) -> None:
        if self._num_unread or self._is_behind or packed.frames or packed.tag not in PLAIN_STEPS:
            self._is_behind = False  # the reply to this command comes after all that was sent before
            super().send(packed)
            return
        self._bell.queue.append((self.entry, packed, self.wire))
        self._num_unread = 1
        self._poller.awaits_first = True

    @property
    def is_behind(self) -> bool:
        """Whether the pipe may have something unread that the next command relies on."""
        return self._is_behind or self._num_unread > 0

    def await_step(self, word: int) -> None:
        """Receive the reply to a step that is announced, or announce it, by this word."""
        self.entry.announce(word, self.wire)
        self._num_unread = 1

    def work(self) -> bool:
        return bool(self.inbox) or self.entry.has_finished

    def receive(self) -> Reply:
        if self.inbox or not self.entry.has_finished:
            return super().receive()
        self._num_unread -= 1
        return Reply(self.entry.take())

    def receive_message(self) -> Message:
        entry = self.entry
        while entry.word and not entry.has_finished and not self.found_dead:
            if self.wire.connection.poll(_GLANCE):
                break
        if entry.has_finished:  # also if the pipe has a message: it is a reply to a later command
            return Message(DONE, entry.take())
        message = super().receive_message()
        entry.word = 0  # the worker has something to say
        return message

    def hang_up(self) -> None:
        """Close the pipe."""
        self.entry.word = 0
        super().hang_up()


class Switchboard:
    """All pipes to hosts; the caller waits here for any of them.

    Args:
        spreader: Keeps workers from sharing a core.

    Attributes:
        poller: The poller for new channels.
        channels: All living ones, including those that `Backend.launch` has not returned yet.
        bell: The `Bell` that announces plain steps; ``None``: the pipes do.
    """

    def __init__(self, spreader: CpuBalancer) -> None:
        self._spreader = spreader
        self.poller = Poller()
        self.channels: list[PipeChannel] = []
        self.bell: Any = None

    def make_bell(self, num_workers: int) -> None:
        """Let a bell announce plain steps from now on.

        Raises:
            WorkerStartError: If there are not enough descriptors.
        """
        try:
            self.bell = Bell(num_workers)
        except WorkerStartError:
            raise
        except OSError as error:
            raise WorkerStartError(
                f"What wakes workers could not be opened ({error}). Raise the limit on open files (ulimit -n)."
            ) from error
        self.poller.watch(self.bell)

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
        if self.bell is not None and self.bell.wakes_too_many(len(parts)):
            return None
        steps: RepeatedStep = MessageStep(parts, self.wait)
        if self.bell is not None:
            spread = functools.partial(self._spreader.look, self.poller.pids)
            steps = BellStep(self.bell, parts, self.poller.poll, spread)
        return steps if own is None else JointStep(steps, own, len(parts))

    def add(self, channel: PipeChannel) -> None:
        """Register a channel."""
        self.channels = [*(known for known in self.channels if not known.is_gone), channel]

    def end(self, hosts: Container[tuple[int, ...]]) -> None:
        """End the living hosts with these env ids."""
        for channel in self.channels:
            if channel.env_ids in hosts:
                channel.kill()

    def wait(self, channels: Sequence[Any], timeout: float | None, wanted: int) -> Sequence[Any]:
        """Wait as `Backend.wait` does, also for hosts in the caller, which work during the wait."""
        deadline = None if timeout is None else time.monotonic() + timeout
        ready = [channel for channel in channels if channel.work()]
        while True:
            if self.poller.is_quick and not ready:  # else the system has time to find a core for each
                self._spreader.look(self.poller.pids)
            left = _HEARTBEAT if deadline is None else min(_HEARTBEAT, deadline - time.monotonic())
            found: list[Any] = self.poller.wait(0.0 if len(ready) >= wanted else max(0.0, left))
            if self.bell in found:
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
        if self.bell is not None:
            self.poller.ignore(self.bell)
            self.bell.close()
        self.poller.close()
        return printed
