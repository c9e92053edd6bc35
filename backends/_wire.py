"""Messages over a pipe between the caller and a worker process.

Two messages are much more common than all others: the command to make a plain step, and the reply that the step is
done. Each of the two takes one write and one read of 19 bytes. A step of 16 envs in two workers took 413 us instead of
308 us when `multiprocessing.Connection` pickled and sent these messages.

No other way to wake a single process was clearly faster than a pipe. A step of 16 CartPoles took 113 us when the caller
and the worker polled words in shared memory, without any system call, and 112 us with a pipe. In a test with 44 us of
work in each process, a round of messages took 46 us with an eventfd and 47 us with a pipe if both processes stayed
awake. If they slept between rounds, a round took 110 us with a pipe, an eventfd or a semaphore. A bell (see
`_eventfd_bell`) is faster, because it wakes many workers at once.
"""

from __future__ import annotations

import functools
import os
import select
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import TypeVar

from parallelenv.contract.codec import HEADER, Message, split_body

T = TypeVar("T")
_HEADER_SIZE = HEADER.size
sched_yield: Callable[[], None] = getattr(os, "sched_yield", lambda: None)


def spin(ready: Callable[[], T], limit: float) -> T:
    """Call ``ready`` until its result is true, for at most ``limit`` seconds, and return the last result.

    Between two calls, the core is yielded, so that other processes with work to do can use it.

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
    """One end of a duplex pipe. `receive` polls the pipe for ``spin_time`` seconds before it sleeps."""

    def __init__(self, connection: Connection, spin_time: float = 0.0) -> None:
        self.connection = connection
        self.fileno = connection.fileno()
        self._spin_time = spin_time
        poll = select.poll()
        poll.register(self.fileno, select.POLLIN)
        self._glance = functools.partial(poll.poll, 0)

    def send(self, message: Message) -> None:
        """Write a message to the pipe; raise `OSError` if the other end is closed."""
        tag, number, frames, subset = message
        if not frames:
            self._write(HEADER.pack(tag, subset, number, 0))
            return
        for part in message.parts():
            self._write(part)

    def receive(self) -> Message:
        """Wait for the next message and return it. Its out-of-band buffers are new and writable.

        Raises:
            EOFError, OSError: If the other end is closed.
        """
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
