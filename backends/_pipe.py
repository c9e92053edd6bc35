"""The caller's ends of pipes to hosts in other processes of this machine."""

from __future__ import annotations

import contextlib
import functools
import os
import select
import signal
import time
from collections import deque
from collections.abc import Container, Sequence
from multiprocessing import connection
from typing import Any

from parallelenv.backends._codec import decode_reply, encode, encode_command, unmark_printed
from parallelenv.backends._cpu_balancer import CpuBalancer
from parallelenv.backends._process import UNKNOWN, exists
from parallelenv.backends._shared_memory import SharedMemory
from parallelenv.backends._wire import Message, Wire, spin
from parallelenv.backends._worker_process import Attach
from parallelenv.contract.batch import Batch
from parallelenv.contract.interrupts import DeferSigint
from parallelenv.contract.protocol import Command, Death, HostDied, Printed, Reply
from parallelenv.worker.worker_log import WorkerLog

_HEARTBEAT = 0.25
"""Seconds between looks at whether workers live, for deaths that a pipe does not show: an env's
own child process may hold the pipe open."""
LAST_CHANCE = 0.3
"""Seconds from asking a worker to end until it is ended, and for the fork server to be gone that dies."""
_SPIN = 200e-6
"""Seconds that the caller stays awake for an answer before it sleeps, if the latest ones came so quickly.

Else it would only be in the workers' way: on 2 cores it cost 2 workers 10 % of steps of 2.4 ms."""
_SAFE_BYTES = 65536
"""A pipe takes so much at least, so that sending it cannot block on a worker that is itself
blocked in sending."""
_NO_COMMAND = 0
"""The number of no command, as they count from 1."""


class Poller:
    """Waits for any of many pipes, without making the list anew for every wait.

    Attributes:
        pids: Processes at their other ends.
        is_quick: Whether answers came within `_SPIN` lately, so that it pays to stay awake for them.
        awaits_first: Whether nothing was looked for since the latest message left.
    """

    def __init__(self) -> None:
        self._channels: dict[int, Any] = {}
        self.pids: list[int] = []
        self._poll: Any = select.poll() if hasattr(select, "poll") else None
        self.is_quick = True
        self.awaits_first = False
        self._glance: Any = functools.partial(self._poll.poll, 0) if self._poll is not None else None

    def add(self, channel: PipeChannel) -> None:
        """Watch a channel from now on."""
        self.watch(channel)
        self.pids.append(channel.process.pid)

    def watch(self, guest: Any) -> None:
        """Watch whatever has a ``wire`` from now on, too: `wait` returns it as it does a channel."""
        self._channels[guest.wire.fileno] = guest
        if self._poll is not None:
            self._poll.register(guest.wire.fileno, select.POLLIN)

    def ignore(self, guest: Any) -> None:
        """Watch it no longer. To be called before its pipe is closed."""
        if self._channels.pop(guest.wire.fileno, None) is not None and self._poll is not None:
            self._poll.unregister(guest.wire.fileno)

    def remove(self, channel: PipeChannel) -> None:
        """Watch a channel no longer. To be called before its pipe is closed."""
        if channel.wire.fileno in self._channels:
            self.pids.remove(channel.process.pid)
            self.ignore(channel)

    def wait(self, timeout: float) -> list[PipeChannel]:
        """Return the channels with something to read or a closed pipe, after ``timeout`` s none."""
        if self._poll is None:  # Windows, and few others
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


class PipeChannel:
    """A pipe to a host in a process of its own.

    Args:
        process: The process; a `WorkerProcess`, or what behaves like one.
        pipe: The caller's end.
        log: What the host prints to.
        poller: What waits for it.
        env_ids: The envs.
    """

    in_caller = False

    def __init__(
        self, process: Any, pipe: Any, log: WorkerLog | None, poller: Poller, env_ids: tuple[int, ...]
    ) -> None:
        self.process = process
        self.wire = Wire(pipe)
        self.inbox: deque[Reply] = deque()
        self.is_gone = False
        self.found_dead = False
        self.env_ids = env_ids
        self._log = log
        self._poller = poller
        self._unanswered = 0
        poller.add(self)

    def pack(self, command: Command) -> Message:
        return encode_command(command, self.env_ids)

    def send(self, packed: Message) -> None:
        # Two ends that both send more than the pipe holds would wait for each other for ever.
        if self._unanswered and packed.frames and packed.nbytes > _SAFE_BYTES:
            while self._unanswered:
                self.inbox.append(self._read())
        try:
            self.wire.send(packed)
        except OSError as error:
            raise HostDied from error
        self._unanswered += 1
        self._poller.awaits_first = True

    def work(self) -> bool:
        """Say if there is a reply that was read already. The counterpart of `CallerChannel.work`."""
        return bool(self.inbox)

    def receive(self) -> Reply:
        return self.inbox.popleft() if self.inbox else self._read()

    def _read(self) -> Reply:
        if self.found_dead and not self.wire.connection.poll(0):  # a process of the env's own keeps the pipe open
            raise HostDied
        try:
            message = self.wire.receive()
        except (EOFError, OSError) as error:
            raise HostDied from error
        self._unanswered -= 1
        message, has_printed = unmark_printed(message)
        reply = decode_reply(message)
        if has_printed:
            reply.output = [*reply.output, *self.take_output(is_idle=not self._unanswered)]
        return reply

    def take_output(self, *, is_idle: bool) -> list[Printed]:
        """Return what was printed since the last time; whole lines only, unless the worker is idle."""
        return [] if self._log is None else self._log.take(self.env_ids, is_idle=is_idle)

    def overhear(self) -> bool:
        """Look if a worker that has not answered prints something; it is received like a reply."""
        output = self.take_output(is_idle=False)
        if output:
            self.inbox.append(Reply(_NO_COMMAND, output=output))
        return bool(output)

    def attach(self, batch: Batch) -> None:
        memory: SharedMemory = batch.owner
        # An interrupt in between would let the worker wait for ever for what was announced.
        with contextlib.suppress(OSError), DeferSigint():  # OSError: if it died meanwhile, its next command says so
            self.wire.send(encode(Attach(batch.layout)))
            memory.send(self.wire.connection, self.process.pid)

    def cause_of_death(self) -> Death:
        self.process.join(timeout=1.0)
        last_lines = "" if self._log is None else self._log.last_lines()
        return Death(self.process.pid, self.process.exitcode, last_lines=last_lines)

    def is_dead(self) -> bool:
        """Whether the process has ended. When the fork server has, its processes seem to have ended too."""
        try:
            if self.process.is_alive():
                return False
        except ValueError:  # another thread has closed it meanwhile
            return True
        self.found_dead = self.process.exitcode != UNKNOWN or not exists(self.process.pid)
        return self.found_dead

    def join(self, timeout: float) -> None:
        """Wait so long for the process to end. Another thread may have closed it since it was last looked at."""
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
        with DeferSigint():  # not gone before: who was interrupted comes again
            if self._log is not None:
                self._log.close()
            self.is_gone = True

    def end_process(self) -> None:
        """End the process at once."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.process.pid, getattr(signal, "SIGKILL", signal.SIGTERM))


class Switchboard:
    """All pipes to hosts, where the caller waits for any of them.

    Args:
        spreader: Keeps workers from sharing a core.

    Attributes:
        poller: What channels are made with.
        channels: All that live, also those that nobody was told of yet.
    """

    def __init__(self, spreader: CpuBalancer) -> None:
        self._spreader = spreader
        self.poller = Poller()
        self.channels: list[PipeChannel] = []

    def add(self, channel: PipeChannel) -> None:
        """Take note of a channel."""
        self.channels = [*(known for known in self.channels if not known.is_gone), channel]

    def end(self, hosts: Container[tuple[int, ...]]) -> None:
        """End those hosts that live, each known by the ids of its envs."""
        for channel in self.channels:
            if channel.env_ids in hosts:
                channel.kill()

    def wait(self, channels: Sequence[Any], timeout: float | None) -> Sequence[Any]:
        """Wait as `Backend.wait` does, also for hosts in the caller, which work meanwhile."""
        received = [channel for channel in channels if channel.work()]
        if received:
            return [*received, *self.poller.wait(0)]
        deadline = None if timeout is None else time.monotonic() + timeout
        while True:
            if self.poller.is_quick:  # else the system has time to find a core for each
                self._spreader.look(self.poller.pids)
            left = _HEARTBEAT if deadline is None else min(_HEARTBEAT, deadline - time.monotonic())
            ready = self.poller.wait(max(0.0, left))
            ready = ready or [channel for channel in channels if channel.overhear() or channel.is_dead()]
            if ready or left <= 0:
                return ready

    def hang_up(self) -> None:
        """Close all pipes, at whose end hosts close their envs and leave."""
        for channel in self.channels:
            if not channel.is_gone:
                channel.hang_up()

    def close(self, timeout: float) -> Sequence[Printed]:
        """Wait for hosts to leave, and end those that do not; return what they printed."""
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
        return printed
