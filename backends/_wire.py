"""Messages over a pipe between the caller and a worker process.

The two most common messages are one write and one read of 17 bytes. Pickled and sent by `multiprocessing.Connection`,
they made a step of 16 envs in two workers 100 us longer (413 us against 308 us). Words in shared memory that both ends
poll, without any system call, made it no shorter (16 CartPoles: 113 us, by pipe 112 us), nor did eventfd or semaphores
(44 us of work in two processes: 46, 47 and, asleep, 110 us).
"""

from __future__ import annotations

import functools
import os
import select
import sys
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

from parallelenv.contract.codec import HEADER, Message, split_body

_HEADER_SIZE = HEADER.size
_IS_POSIX = sys.platform != "win32"


sched_yield: Any = getattr(os, "sched_yield", None)


def spin(ready: Callable[[], Any], limit: float) -> Any:
    """Call a function until its result is true, yielding the core in between.

    A sleeping core takes 35 us and more to wake, on a virtual machine, and then runs cold: two workers of 86 us on 2
    cores made a round in 178 us when all slept, in 140 us when the caller spun, in 109 us when the workers did too.
    Processes that have work to do get the core.

    Args:
        ready: Returns at once.
        limit: Seconds after which to stop calling.

    Returns:
        The first true result, or the last false one.
    """
    if sched_yield is None:
        return ready()
    end = time.perf_counter() + limit
    while not (answer := ready()) and time.perf_counter() < end:
        sched_yield()
    return answer


class Wire:
    """One end of a duplex pipe. A message is read completely or not begun.

    Args:
        connection: This end.
        spin_time: Seconds that `receive` spins for a message before it sleeps.
    """

    def __init__(self, connection: Connection, spin_time: float = 0.0) -> None:
        self.connection = connection
        self.fileno = connection.fileno()
        self._poll = select.poll() if hasattr(select, "poll") else None
        self._spin_time = 0.0 if self._poll is None else spin_time
        if self._poll is not None:
            self._poll.register(self.fileno, select.POLLIN)
            self._glance = functools.partial(self._poll.poll, 0)

    def send(self, message: Message) -> None:
        """Write a message.

        Raises:
            OSError: If the other end is closed.
        """
        tag, number, frames, subset = message
        if not frames:
            self._write(HEADER.pack(tag, subset, number, 0))
            return
        for part in message.parts():
            self._write(part)

    def receive(self) -> Message:
        """Read a message; its buffers are new and writable.

        Raises:
            EOFError, OSError: If the other end is closed.
        """
        if self._spin_time:
            spin(self._glance, self._spin_time)
        tag, subset, number, nbytes = HEADER.unpack(self._read(_HEADER_SIZE))
        if not nbytes:
            return Message(tag, number, (), subset)
        head, sizes = split_body(memoryview(self._read(nbytes)))
        return Message(tag, number, [head, *map(self._read_into_new, sizes)])

    def close(self) -> None:
        """Close this end."""
        self.connection.close()

    @property
    def closed(self) -> bool:
        """Whether this end is closed."""
        return self.connection.closed

    def _write(self, data: Any) -> None:
        """Write bytes, or a buffer of bytes, completely."""
        if not _IS_POSIX:
            self.connection.send_bytes(data)
            return
        written = os.write(self.fileno, data)
        if written < len(data):
            rest = memoryview(data)
            while written < rest.nbytes:
                written += os.write(self.fileno, rest[written:])

    def _read(self, nbytes: int) -> bytes | bytearray:
        if not _IS_POSIX:
            return self.connection.recv_bytes()
        data = os.read(self.fileno, nbytes)
        if len(data) == nbytes:
            return data
        return self._read_rest(data, nbytes)

    def _read_into_new(self, nbytes: int) -> bytearray:
        if not _IS_POSIX:
            return bytearray(self.connection.recv_bytes())
        return self._read_rest(b"", nbytes)

    def _read_rest(self, begun: bytes, nbytes: int) -> bytearray:
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
