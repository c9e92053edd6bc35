"""A pipe to a host in another process on this machine: its messages, and the caller's end.

Two messages are much more common than all others: the command to make a plain step, and the reply that the step is
done. Each of the two takes one write and one read of 19 bytes. A step of 16 envs in two workers took 413 us instead of
308 us when `multiprocessing.Connection` pickled and sent these messages.

No other way to wake a single process was clearly faster than a pipe. A step of 16 CartPoles took 113 us when the caller
and the worker polled words in shared memory, without any system call, and 112 us with a pipe. In a test with 44 us of
work in each process, a round of messages took 46 us with an eventfd and 47 us with a pipe if both processes stayed
awake. If they slept between rounds, a round took 110 us with a pipe, an eventfd or a semaphore. A bell (see
`_bell`) is faster, because it wakes many workers at once.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import os
import select
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from multiprocessing import reduction
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any, TypeVar

from parallelenv.backends._shared_memory import BatchAccess, SharedMemory
from parallelenv.contract.batch import Batch
from parallelenv.contract.codec import HEADER, Message, encode_reply, split_body
from parallelenv.contract.interrupts import DeferSignals, is_sigpipe_ignored, without_sigpipe
from parallelenv.contract.message_channel import MessageChannel
from parallelenv.contract.protocol import Death, Printed, Reply
from parallelenv.worker.worker_log import WorkerLog

if TYPE_CHECKING:
    from parallelenv.backends._channel_group import ChannelGroup


T = TypeVar("T")
_HEADER_SIZE = HEADER.size
_FLUSH_TIMEOUT = 0.25
"""Seconds between checks that a host is alive that has to read its messages before it can be handed over."""
_KILL_TIMEOUT = 1.0
"""Seconds to wait for the end of a killed process, which may be in a system call that cannot be interrupted."""
_PATIENCE = 1.0
"""Milliseconds that `CallerWire` waits for a host in the middle of a message.

A running host continues within this time, and the message takes as long as with a blocking pipe.
"""
sched_yield: Callable[[], None] = getattr(os, "sched_yield", lambda: None)


def spin(ready: Callable[[], T], limit: float) -> T:
    """Call ``ready`` until its result is true, for at most ``limit`` seconds, and return the last result.

    On a virtual machine, a sleeping core takes 35 us or more to wake, and its caches are cold afterwards. With two
    workers that compute for 86 us on 2 cores, a round of commands and replies took 178 us when all processes slept
    while they waited, 140 us when the caller called this function before it slept, and 109 us when the workers called
    it too.
    """
    end = time.perf_counter() + limit
    while not (answer := ready()) and time.perf_counter() < end:
        sched_yield()
    return answer


class Wire:
    """A host's end of a duplex pipe. `receive` polls the pipe for ``spin_time`` seconds before it sleeps."""

    def __init__(self, connection: Connection, spin_time: float = 0.0) -> None:
        self.connection = connection
        self.fileno = connection.fileno()
        self._spin_time = spin_time
        poll = select.poll()
        poll.register(self.fileno, select.POLLIN)
        self._glance = functools.partial(poll.poll, 0)

    def send(self, message: Message) -> None:
        tag, number, frames, subset = message
        if not frames:
            self._write(HEADER.pack(tag, subset, number, 0))
            return
        for part in message.parts():
            self._write(part)

    def receive(self) -> Message:
        """Wait for the next message and return it. Its out-of-band buffers are new and writable."""
        if self._spin_time:
            spin(self._glance, self._spin_time)
        tag, subset, number, nbytes = HEADER.unpack(self._read(_HEADER_SIZE))
        if not nbytes:
            return Message(tag, number, (), subset)
        head, sizes = split_body(memoryview(self._read(nbytes)))
        return Message(tag, number, [head, *map(self._read_rest, sizes)])

    def _write(self, data: bytes | memoryview) -> None:
        written = os.write(self.fileno, data)
        if written < len(data):
            rest = memoryview(data)
            while written < rest.nbytes:
                written += os.write(self.fileno, rest[written:])

    def _read(self, nbytes: int) -> bytes | bytearray:
        data = os.read(self.fileno, nbytes)
        return data if len(data) == nbytes else self._read_rest(nbytes, data)

    def _read_rest(self, nbytes: int, begun: bytes = b"") -> bytearray:
        buffer = bytearray(nbytes)
        buffer[: len(begun)] = begun
        position = len(begun)
        with memoryview(buffer) as view:
            while position < nbytes:
                count = os.readv(self.fileno, [view[position:]])
                if not count:
                    raise EOFError("the other end of the pipe is closed")
                position += count
        return buffer


class CallerWire:
    """The caller's end of a duplex pipe to a host. No method waits for the host for longer than a moment.

    A host may be suspended or busy, or it is dead while a child process of an env keeps the pipe open. Therefore, what
    does not fit into the pipe goes to the `outbox`, and a message of which only a part has arrived is read in several
    calls of `receive`. `ChannelGroup.wait` watches the pipe and calls `flush` and `receive`.

    Other threads may close the wire at any time. A lock keeps the descriptor open while it is in use; otherwise, its
    number could by then belong to a file of the user.

    Args:
        connection: The end of the pipe, which this object owns from now on.

    Attributes:
        fileno: The descriptor; -1 if the wire is closed.
        outbox: What is not written yet: bytes, and lists of duplicated descriptors for the host.
        is_broken: Whether an error in this process, such as a lack of memory, has cut off a message. Nothing that comes
            after that message could be understood, so the host counts as dead.
    """

    def __init__(self, connection: Connection) -> None:
        self.fileno = connection.fileno()
        self.outbox: deque[memoryview | list[int]] = deque()
        self.is_broken = False
        self._connection = connection
        self._lock = threading.RLock()
        self._messages: Iterator[Message | None] = self._read_messages()
        self._to_read, self._to_write = select.poll(), select.poll()
        self._to_read.register(self.fileno, select.POLLIN)
        self._to_write.register(self.fileno, select.POLLOUT)
        os.set_blocking(self.fileno, False)  # the other end, which the host uses, still blocks

    def send(self, message: Message) -> None:
        """Send a message or put the rest of it into the outbox; raise `OSError` if the other end is closed."""
        tag, number, frames, subset = message
        with self._lock:
            if self.is_broken:
                raise BrokenPipeError("a message was cut off")
            if not frames:
                self._write(HEADER.pack(tag, subset, number, 0))
                return
            try:
                for part in message.parts():
                    self._write(part)
            except OSError:
                raise
            except BaseException:
                self.is_broken = True
                raise

    def send_descriptors(self, *filenos: int) -> None:
        """Send descriptors, which the host receives with `receive_descriptors`. See `send`."""
        with self._lock:
            if self.outbox or not self._pass_on(filenos):
                self.outbox.append([os.dup(fileno) for fileno in filenos])

    def receive(self) -> Message | None:
        """Return the next message, or ``None`` if it has not arrived completely.

        The out-of-band buffers of the message are new and writable. Raise `EOFError` or `OSError` if the other end is
        closed.
        """
        with self._lock:
            try:
                for message in self._messages if not self.is_broken else ():
                    return message
            except (EOFError, OSError):
                raise
            except BaseException:
                self.is_broken = True
                raise
        raise EOFError("a message was cut off")

    def flush(self, timeout: float = 0.0) -> None:
        """Write what fits of the outbox after a wait of at most ``timeout`` seconds. See `send` for errors."""
        if timeout:
            self._to_write.poll(timeout * 1000)
        with self._lock:
            while self.outbox:
                first = self.outbox[0]
                if isinstance(first, list):
                    if not self._pass_on(first):
                        return
                    self.outbox.popleft()
                    for fileno in first:
                        os.close(fileno)
                    continue
                try:
                    self.outbox[0] = first = first[self._os_write(first) :]
                except BlockingIOError:
                    return
                if not first:
                    self.outbox.popleft()

    def close(self) -> None:
        """Close the descriptor and drop the outbox."""
        with self._lock:
            self.fileno = -1
            self._connection.close()
            while self.outbox:
                dropped = self.outbox.popleft()
                for fileno in dropped if isinstance(dropped, list) else ():
                    os.close(fileno)

    def _write(self, data: bytes | memoryview) -> None:
        written = 0
        if not self.outbox:
            try:
                written = self._os_write(data)
                while written < len(data) and self._to_write.poll(_PATIENCE):
                    written += self._os_write(memoryview(data)[written:])
            except BlockingIOError:  # the pipe is full
                pass
        if written < len(data):
            self.outbox.append(memoryview(bytes(memoryview(data)[written:])))  # the user may change an array meanwhile

    def _os_write(self, data: bytes | memoryview) -> int:
        if is_sigpipe_ignored():
            return os.write(self.fileno, data)
        with without_sigpipe():
            return os.write(self.fileno, data)

    def _pass_on(self, filenos: Sequence[int]) -> bool:
        """Send descriptors and return whether the pipe had room for them."""
        with without_sigpipe(), _as_socket(self.fileno, blocking=False) as pipe:
            try:
                socket.send_fds(pipe, [b"D"], filenos)
            except BlockingIOError:
                return False
        return True

    def _read_messages(self) -> Iterator[Message | None]:
        """Yield each message; yield ``None`` each time when the rest of it has not arrived yet."""
        while True:
            tag, subset, number, nbytes = HEADER.unpack((yield from self._read(_HEADER_SIZE)))
            if not nbytes:
                yield Message(tag, number, (), subset)
                continue
            head, sizes = split_body(memoryview((yield from self._read(nbytes))))
            frames: list[Any] = [head]
            for size in sizes:
                buffer = yield from self._read_rest(size)
                frames.append(buffer)
            yield Message(tag, number, frames, subset)

    def _read(self, nbytes: int) -> Generator[None, None, bytes | bytearray]:
        while True:
            try:
                data = os.read(self.fileno, nbytes)
            except BlockingIOError:
                yield None
                continue
            return data if len(data) == nbytes else (yield from self._read_rest(nbytes, data))

    def _read_rest(self, nbytes: int, begun: bytes = b"") -> Generator[None, None, bytearray]:
        buffer = bytearray(nbytes)
        position = len(begun)
        buffer[:position] = begun
        with memoryview(buffer) as view:
            while position < nbytes:
                try:
                    count = os.readv(self.fileno, [view[position:]])
                except BlockingIOError:
                    if not self._to_read.poll(_PATIENCE):
                        yield None
                    continue
                if not count:
                    raise EOFError("the other end of the pipe is closed")
                position += count
        return buffer


@contextlib.contextmanager
def _as_socket(fileno: int, *, blocking: bool) -> Iterator[socket.socket]:
    """Yield a socket object for the descriptor of a pipe, which stays open and belongs to its owner as before."""
    if fileno < 0:
        raise OSError(errno.EBADF, os.strerror(errno.EBADF))
    pipe = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM, 0, fileno)
    try:
        pipe.setblocking(blocking)  # the program may have set a default timeout for sockets
        yield pipe
    finally:
        pipe.detach()


def receive_descriptors(connection: Connection, count: int) -> list[int]:
    """Return the descriptors that a `CallerWire` has sent in one call of `CallerWire.send_descriptors`."""
    with _as_socket(connection.fileno(), blocking=True) as pipe:
        data, filenos, _, _ = socket.recv_fds(pipe, 1, count)
    if not data:
        raise EOFError("the other end of the pipe is closed")
    if len(filenos) < count:  # the system drops those for which there is no room
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
    return filenos


class PipeChannel(MessageChannel):
    """A channel over a pipe to a host in another process. Both processes share the memory of the batch."""

    def __init__(
        self, group: ChannelGroup, process: Any, pipe: Connection, log: WorkerLog, env_ids: tuple[int, ...]
    ) -> None:
        super().__init__(env_ids)
        self.process = process
        self.wire = CallerWire(pipe)
        self.is_closed = False
        self.found_dead = False
        self._log = log
        self._group = group
        group.watch(self)

    def connect_bell(self) -> None:
        """Do nothing; in a subclass with a bell, this method gives a new host access to the bell."""

    @property
    def fileno(self) -> int:
        """The descriptor of the caller's end of the pipe; -1 if it is closed."""
        return self.wire.fileno

    def send_message(self, message: Message) -> None:
        self.wire.send(message)
        self._group.awaits_first = True
        if self.wire.outbox:
            self._group.watch_room(self)

    def send_descriptors(self, *filenos: int) -> None:
        self.wire.send_descriptors(*filenos)
        if self.wire.outbox:
            self._group.watch_room(self)

    def receive_message(self) -> Message | None:
        message = self.wire.receive()
        if message is None and self.found_dead:  # a child process of an env keeps the pipe open
            raise EOFError
        return message

    def advance(self) -> bool:
        return bool(self.inbox)

    def take_output(self, *, is_idle: bool) -> list[Printed]:
        return self._log.take_output(self.env_ids, is_idle=is_idle)

    def receive_output(self) -> bool:
        """If a busy host has printed anything, add the text to the inbox, in the form of a reply."""
        output = self.take_output(is_idle=False)
        if output:
            self.inbox.append(encode_reply(Reply(0, output=output)))  # commands are numbered from 1
        return bool(output)

    def attach(self, batch: Batch) -> None:
        self.number_envs(batch)
        memory: SharedMemory = batch.owner
        # An interrupt between the two messages would make the host wait forever for the announced memory. An OSError
        # means that the host has died, which its next command reports.
        with DeferSignals(), contextlib.suppress(OSError):
            self.notify(BatchAccess(batch.layout))
            self.send_descriptors(memory.fileno)

    def cause_of_death(self) -> Death:
        if self.wire.is_broken:
            detail = "A message was cut off by an error in this process, such as a lack of memory, so it was ended."
            return Death(self.process.pid, detail=detail, last_lines=self._log.last_lines())
        self.process.join(timeout=1.0)
        code = self.process.await_exitcode()
        return Death(self.process.pid, code, self.process.last_words(), self._log.last_lines())

    def is_alive(self) -> bool:
        try:
            self.found_dead = not self.process.is_alive()
        except ValueError:  # another thread has closed the process object in the meantime
            return False
        return not self.found_dead

    def join(self, timeout: float) -> None:
        """Wait until the process ends or another thread closes this channel, but at most ``timeout`` seconds."""
        with contextlib.suppress(ValueError):
            self.process.join(timeout)

    def hand_over(self, connection: Connection, pid: int) -> object:
        """Give the host to another process, and return an object that keeps the host alive.

        That process makes a new channel from the three descriptors that this method sends: those of the pipe,
        of the log, and of the connection that reports the exit code.
        """
        with contextlib.suppress(OSError):  # the host has died, which the other process notices too
            while self.wire.outbox and self.is_alive():
                self.wire.flush(_FLUSH_TIMEOUT)
        for fileno in (self.fileno, self._log.fileno):
            reduction.send_handle(connection, fileno, pid)
        life = self.process.hand_over(connection, pid)
        self.hang_up()
        self._log.close()
        self.is_closed = True
        return life

    def hang_up(self) -> None:
        """Close the caller's end of the pipe, which makes the host exit."""
        with DeferSignals():
            if self.fileno >= 0:
                self._group.unwatch(self)
                self.wire.close()

    def kill(self) -> None:
        if self.is_closed:
            return
        self.hang_up()
        with contextlib.suppress(ValueError):  # another thread has closed the process object in the meantime
            if self.is_alive():
                self.process.kill()
            self.process.join(_KILL_TIMEOUT)
            self.process.close()
        with DeferSignals():  # `is_closed` is set last, because an interrupted `kill` is called again
            self._log.close()
            self.is_closed = True
