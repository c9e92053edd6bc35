"""All envs in this process, stepped by threads.

Useful if ``step`` releases the GIL: simulators in C, sockets, sleeping.
"""

from __future__ import annotations

import contextlib
import os
import queue
import socket
import threading
import time
import weakref
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

from parallelenv.backends._in_process import copy_arguments, copy_values
from parallelenv.contract.batch import Array, Batch, Layout, copied
from parallelenv.contract.cpu_cores import usable_cores
from parallelenv.contract.protocol import Channel, Command, Death, Placement, Printed, Reply, WorkerSpec
from parallelenv.errors import WorkerStartError
from parallelenv.worker.host import Host

_SLICE = 0.1
"""Seconds per wait: an interrupt just before a wait is handled at its end."""


class Bell:
    """A descriptor that threads make readable; `silence` makes it unreadable again."""

    def __init__(self) -> None:
        self._reader, self._writer = socket.socketpair()  # not a pipe: a thread may ring it after it was closed
        self._reader.setblocking(False)
        self._writer.setblocking(False)
        self.fileno = self._reader.fileno()

    def ring(self) -> None:
        """Make it readable."""
        with contextlib.suppress(OSError):  # it is full, or was closed
            self._writer.send(b"\0")

    def silence(self) -> None:
        """Make it unreadable. To be called before replies are looked for, so that none is missed."""
        with contextlib.suppress(OSError):
            self._reader.recv(4096)

    def close(self) -> None:
        """Close it."""
        self._reader.close()
        self._writer.close()


class ReplyQueue(queue.SimpleQueue["ThreadChannel"]):
    """The channels that have a reply.

    Attributes:
        bell: To be rung at each reply, if an event loop has ever waited for one.
    """

    bell: Bell | None = None


class ThreadChannel:
    """A host in a thread of its own.

    Args:
        spec: The host's envs.
        answered: Queue in which the thread announces each reply.
    """

    in_caller = False

    def __init__(self, spec: WorkerSpec, answered: ReplyQueue) -> None:
        self._host = Host(spec)
        self._answered = answered
        self._commands: queue.SimpleQueue[Command | None] = queue.SimpleQueue()
        self._replies: deque[Reply] = deque()
        self._layout: Layout | None = None
        # A daemon, so that an env that never returns cannot prevent the interpreter from exiting.
        self.thread = threading.Thread(target=self._serve, name=f"parallelenv-{spec.env_ids[0]}", daemon=True)

    def _serve(self) -> None:
        while (command := self._commands.get()) is not None:
            self._replies.append(copy_values(self._host.execute(command)))
            self._answered.put(self)
            if (bell := self._answered.bell) is not None:
                bell.ring()
        self._host.close()

    @property
    def host(self) -> Host:
        """The host, which gives a caller access to the envs themselves."""
        return self._host

    def pack(self, command: Command) -> Command:  # noqa: D102 (see Channel)
        return command if command.each is None else copy_arguments(command)

    def send(self, packed: Command) -> None:  # noqa: D102 (see Channel)
        self._commands.put(packed)

    @property
    def has_reply(self) -> bool:
        """Whether `receive` has a reply to return."""
        return bool(self._replies)

    def receive(self) -> Reply:  # noqa: D102 (see Channel)
        return self._replies.popleft()

    def attach(self, batch: Batch) -> None:  # noqa: D102 (see Channel)
        self._layout = batch.layout
        self._host.attach(batch)

    def cause_of_death(self) -> Death:  # noqa: D102 (see Channel)
        return Death()

    def kill(self) -> None:
        """Let the thread end after its present command; a thread cannot be killed.

        What it still writes goes to a batch that is not read.
        """
        if self._layout is not None:
            self._host.attach(Batch.private(self._layout))
        self._commands.put(None)


class ThreadBackend:
    """One thread per usable core, several envs each."""

    uses_live_envs = True
    placement = ""
    channel_class: type[ThreadChannel] = ThreadChannel

    def __init__(self) -> None:
        self._answered = ReplyQueue()
        self._started: weakref.WeakSet[ThreadChannel] = weakref.WeakSet()

    def plan(self, num_envs: int, num_cpus: int | None, num_gpus: float) -> Placement:  # noqa: D102 (see Backend)
        return Placement((1,) * min(num_cpus or usable_cores(), num_envs))

    def share(self, arrays: Mapping[str, Array]) -> Mapping[str, Array]:  # noqa: D102 (see Sharing)
        return copied(arrays)

    def launch(self, specs: Sequence[WorkerSpec]) -> list[Channel]:  # noqa: D102 (see Backend)
        return [self._start(spec) for spec in specs]

    def _start(self, spec: WorkerSpec) -> ThreadChannel:
        channel = self.channel_class(spec, self._answered)
        self._started.add(channel)  # before the thread runs: an interrupt is possible at any time
        try:
            channel.thread.start()
        except RuntimeError as error:
            raise WorkerStartError(
                f"A worker thread could not be started ({error}). Give a smaller num_cpus, or raise the limit on "
                "processes (ulimit -u) or memory."
            ) from error
        return channel

    def allocate(self, layout: Layout) -> Batch:  # noqa: D102 (see Backend)
        return Batch.private(layout)

    def wait(self, channels: Sequence[Any], timeout: float | None, wanted: int = 1) -> Sequence[Any]:  # noqa: D102 (see Backend)
        deadline = None if timeout is None else time.monotonic() + timeout
        if self._answered.bell is not None:
            self._answered.bell.silence()
        # The queue only wakes the caller; `has_reply` decides, so that no interrupt can lose a reply.
        while not (ready := [channel for channel in channels if channel.has_reply]):
            left = _SLICE if deadline is None else min(_SLICE, deadline - time.monotonic())
            if left <= 0:
                break
            with contextlib.suppress(queue.Empty):
                self._answered.get(timeout=left)
        return ready

    def fileno(self) -> int | None:  # noqa: D102 (see Backend)
        if os.name != "posix":
            return None
        if self._answered.bell is None:
            self._answered.bell = Bell()
            self._answered.bell.ring()  # for replies that came just before
        return self._answered.bell.fileno

    def close(self, channels: Sequence[Any], timeout: float) -> Sequence[Printed]:  # noqa: D102 (see Backend)
        deadline = time.monotonic() + timeout
        started = list(self._started)
        for channel in started:
            channel.kill()
        for channel in started:
            if channel.thread.ident is not None:
                channel.thread.join(max(0.0, deadline - time.monotonic()))
        bell, self._answered.bell = self._answered.bell, None
        if bell is not None:
            bell.close()
        return ()
