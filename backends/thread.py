"""The mode ``thread``: all envs are in this process, and threads step them.

This mode is useful if ``step`` releases the GIL, for example in a simulator written in C, in a network call or while it
sleeps.
"""

from __future__ import annotations

import contextlib
import os
import queue
import socket
import threading
import time
import traceback
import weakref
from collections.abc import Sequence

from parallelenv.backends._in_process import InProcessBackend, InProcessChannel
from parallelenv.contract.batch import Batch
from parallelenv.contract.interrupts import DeferSignals, Ignore
from parallelenv.contract.protocol import Channel, Command, Death, HostDied, Printed, Reply, WorkerSpec
from parallelenv.contract.worker_info import HOST_THREADS
from parallelenv.errors import WorkerStartError
from parallelenv.worker.host import Host

_LONGEST_WAIT = 0.1
"""Maximum duration in seconds of one wait: Ctrl-C just before a wait is handled only when that wait ends."""


class ThreadChannel(InProcessChannel):
    """A channel to a host in a separate thread. If the thread ends by an exception, the host counts as dead.

    Args:
        bells: A list that is empty until `ThreadBackend.fileno` is called for an event loop, and then contains one
            non-blocking socket. The thread writes to the socket after each reply, to wake the event loop. The list
            contains a socket object, not a descriptor, because the thread may still write after the socket is closed,
            when the number of the descriptor may already belong to another file.
    """

    def __init__(self, spec: WorkerSpec, answered: queue.SimpleQueue[None], bells: Sequence[socket.socket]) -> None:
        super().__init__(Host(spec))
        self._answered = answered
        self._bells = bells
        self._commands: queue.SimpleQueue[Command | None] = queue.SimpleQueue()
        self._death: Death | None = None
        # Set by the thread. The caller does not call `threading.Thread.is_alive`: in some versions of Python, an
        # exception that a signal handler raises during that call marks a thread that is alive as ended.
        self._has_ended = False
        # The thread is a daemon, so that an env that never returns cannot prevent the interpreter from exiting.
        self.thread = threading.Thread(target=self._serve, name=f"parallelenv-{spec.env_ids[0]}", daemon=True)

    def _serve(self) -> None:
        HOST_THREADS.add(threading.get_ident())
        try:
            while (command := self._commands.get()) is not None:
                self._replies.append(self.execute(command))
                self._ring()
        except BaseException as error:  # noqa: BLE001 (reported as the death of the host)
            # The exception itself is not kept, because its traceback would keep the host's envs alive.
            what, lines = "".join(traceback.format_exception_only(error)).strip(), traceback.format_exception(error)
            self._death = Death(os.getpid(), None, f"Its thread was ended by {what}.", "".join(lines).strip())
        finally:
            self._has_ended = True  # even if there was too little memory to report the death
            self._ring()
            self.host.close()
            self.host.detach()
            HOST_THREADS.discard(threading.get_ident())

    def _ring(self) -> None:
        """Wake the caller."""
        if self._answered.empty():  # otherwise, the caller has yet to look for replies, and will find this one too
            self._answered.put(None)
        for bell in self._bells:
            with contextlib.suppress(OSError):  # the socket is full or closed
                bell.send(b"\0")

    def send(self, packed: Command) -> None:  # noqa: D102 (see Channel)
        self._commands.put(packed)

    def advance(self) -> bool:  # noqa: D102 (see Channel)
        return super().advance() or self._has_ended

    def receive(self) -> Reply:  # noqa: D102 (see Channel)
        if not self._replies:
            raise HostDied
        return super().receive()

    def cause_of_death(self) -> Death:  # noqa: D102 (see Channel)
        return self._death or Death(os.getpid(), None, "Its thread has ended.")

    def stop(self) -> None:
        """Make the thread end after its current command."""
        self._commands.put(None)

    def kill(self) -> None:
        """Call `stop`, because Python cannot kill a thread.

        The host gets a new batch that nothing reads, so that the results of the current command have no effect.
        """
        writer = getattr(self.host, "writer", None)  # absent before the first batch, and after the thread has ended
        if writer is not None and not self._has_ended:
            self.host.attach(Batch.private(writer.batch.layout))
        self.stop()


class ThreadBackend(InProcessBackend):
    """A backend in which each thread steps some of the envs. By default, there is one thread per usable core."""

    channel_class: type[ThreadChannel] = ThreadChannel

    def __init__(self) -> None:
        self._answered: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._bells: list[socket.socket] = []
        self._ringing: socket.socket | None = None  # the other end of the socket in ``_bells``; readable after a reply
        self._started: weakref.WeakSet[ThreadChannel] = weakref.WeakSet()

    def launch(self, specs: Sequence[WorkerSpec]) -> list[Channel]:  # noqa: D102 (see Backend)
        channels: list[Channel] = []
        for spec in specs:
            channel = self.channel_class(spec, self._answered, self._bells)
            self._started.add(channel)  # before the thread runs: an interrupt is possible at any time
            try:
                channel.thread.start()
            except RuntimeError as error:
                raise WorkerStartError(
                    f"A worker thread could not be started ({error}). Give a smaller num_cpus, or raise the limit on "
                    "processes (ulimit -u) or memory."
                ) from error
            channels.append(channel)
        return channels

    def wait(self, channels: Sequence[Channel], timeout: float | None, wanted: int = 1) -> Sequence[Channel]:  # noqa: D102 (see Backend)
        deadline = None if timeout is None else time.monotonic() + timeout
        if self._ringing is not None:  # before the check for replies, so that none is missed
            with Ignore(OSError):
                self._ringing.recv(4096)
        # The queue only wakes the caller, and `advance` shows which channels have a reply: Ctrl-C cannot lose a reply.
        while not (ready := [one for one in channels if isinstance(one, ThreadChannel) and one.advance()]):
            left = _LONGEST_WAIT if deadline is None else min(_LONGEST_WAIT, deadline - time.monotonic())
            if left <= 0:
                break
            with contextlib.suppress(queue.Empty):
                self._answered.get(timeout=left)
        return ready

    def fileno(self) -> int | None:  # noqa: D102 (see Backend)
        if os.name != "posix":
            return None
        if self._ringing is None:
            with DeferSignals():
                self._ringing, bell = socket.socketpair()
                self._ringing.setblocking(False)
                bell.setblocking(False)
                bell.send(b"\0")  # for replies that arrived before the socket existed
                self._bells.append(bell)
        return self._ringing.fileno()

    def close(self, channels: Sequence[Channel], timeout: float) -> Sequence[Printed]:  # noqa: D102 (see Backend)
        deadline = time.monotonic() + timeout
        started = list(self._started)
        for channel in started:
            channel.stop()
        for channel in started:
            # The last reference to the pool may have been dropped in one of its threads, which then calls this method.
            if channel.thread.ident is not None and channel.thread is not threading.current_thread():
                channel.thread.join(max(0.0, deadline - time.monotonic()))
                if channel.thread.is_alive():
                    channel.kill()
        if self._ringing is not None:
            self._ringing.close()
            self._ringing = None
        while self._bells:
            self._bells.pop().close()
        return ()
