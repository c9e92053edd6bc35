"""One bell that wakes all workers of a pool, and one counter of workers that have finished; on Linux.

A plain step needs no message to each worker: the caller writes a word for each into shared memory and rings once. A
worker that has nothing to report except the end of the step writes a word as well, and adds one to the counter.
Everything else goes over the pipes, which stay in the same poll sets: other commands, infos, text, failures, and
deaths. With two workers that do nothing, a round takes 11 us; over pipes, which wake each worker separately, it takes
124 us.

The shared memory consists of words of 8 bytes. The first word is the number of rings. Each worker has its own line of
words. `COMMAND` is the word of the step that is announced to the worker. The worker copies it to `TAKEN` when it starts
the step, and to `DONE` when it has finished, with `HAS_MESSAGE` if its pipe has a reply. `SEEN` is the number of rings
when the worker last looked. The word of a step is its number, the number of its envs (see `StepSubset`) and the tag of
its message. No two steps have the same word, so each side can read or write a word again after an interrupt.

The bell consists of two eventfds that take turns: the caller silences the eventfd that it rang last and rings the other
one. So a worker waits for the eventfd that is rung next, and no worker has to read it, which would wake the others late
or not at all. A worker that has not noticed the last ring when the next one comes may wait for the wrong eventfd; the
caller sees this, and sends the worker a message over its pipe.
"""

from __future__ import annotations

import functools
import os
import platform
import select
import sys
import time
from collections.abc import Callable, Sequence
from multiprocessing import reduction
from multiprocessing.connection import Connection
from typing import NamedTuple

from parallelenv.backends._shared_memory import SharedMemory
from parallelenv.backends._wire import sched_yield
from parallelenv.contract.codec import Message
from parallelenv.contract.interrupts import DeferSigint
from parallelenv.errors import WorkerStartError

# Other processors may show a worker's word before the data that the worker wrote earlier.
HAS_BELL = hasattr(os, "eventfd") and platform.machine() in ("x86_64", "AMD64")
LOOK = Message(0x3F)
"""A message for a worker that may have missed the bell."""
SPIN = 200e-6
"""Seconds that a worker spins for its next command before it sleeps: about the time of a caller between steps. On 2
cores, 16 CartPoles made 0.67 of the steps without, and 200 us slowed down busy neighbours."""
_WORDS = 8
"""Words of a worker: a cache line. The first line has the number of rings."""
COMMAND, TAKEN, DONE, SEEN = range(4)
"""Indices in a worker's line: the steps announced, started and done, and the latest ring that it has noticed."""
_NEVER = 2**64 - 1
HAS_MESSAGE = 1 << 63
"""In the word of a step that is done: the pipe contains a message as well."""
_TAG_BITS, _SUBSET_BITS = 8, 10
_TAG_MASK, _SUBSET_MASK = (1 << _TAG_BITS) - 1, (1 << _SUBSET_BITS) - 1
OTHER_BITS = _TAG_BITS + _SUBSET_BITS
"""Bits of a word below the number of the step."""
_NUM_LOOKS = 8
"""Number of checks of a word in shared memory, at 0.4 us each, for every check of the pipe, at 1 us."""


class BellAccess(NamedTuple):
    """Announces to a worker that `Bell.send` follows."""

    line: int  # index of the first of its words
    nbytes: int  # size of the memory of all words


def word_of(message: Message, number: int) -> int:
    """Return the word that announces the step in a message, under this number."""
    return number << OTHER_BITS | message.subset << _TAG_BITS | message.tag


class Bell:
    """The caller's side.

    Attributes:
        words: The number of rings, and a line of words for each worker.
        fileno: Descriptor of the counter.
        nbytes: Size of the memory of all words.
    """

    def __init__(self, num_workers: int) -> None:
        self._descriptors: list[int] = []  # of the counter and the two eventfds
        self.nbytes = 8 * _WORDS * (num_workers + 1)
        self._memory: SharedMemory | None = SharedMemory.create(self.nbytes)
        self.words = memoryview(self._memory.map).cast("Q")
        self._lines: dict[tuple[int, ...], int] = {}
        with DeferSigint():
            try:
                self._descriptors.extend(os.eventfd(value, os.EFD_NONBLOCK | os.EFD_CLOEXEC) for value in (0, 1, 0))
            except OSError as error:
                self.close()
                raise WorkerStartError(
                    f"The workers' eventfds could not be opened ({error}). Raise the limit on open files (ulimit -n)."
                ) from error
            self.fileno = self._descriptors[0]

    def add_worker(self, env_ids: tuple[int, ...]) -> int:
        """Return the index of the first word of a new worker; one that replaces another gets its words."""
        line = self._lines.setdefault(env_ids, _WORDS * (len(self._lines) + 1))
        self.words[line : line + 4] = memoryview(bytes(24) + _NEVER.to_bytes(8, "little")).cast("Q")
        return line

    def send(self, connection: Connection, pid: int) -> None:
        """Give a new worker access over its pipe; `BellEnd.receive` is the counterpart."""
        if self._memory is not None:
            self._memory.send(connection, pid)
        for descriptor in self._descriptors:
            reduction.send_handle(connection, descriptor, pid)

    def ring(self) -> None:
        """Wake all workers that wait for the bell. Called again after an interrupt."""
        rings = self.words[0] + 1
        self.words[0] = rings
        os.eventfd_write(self._descriptors[1 + (rings & 1)], 1)
        try:
            os.eventfd_read(self._descriptors[2 - (rings & 1)])
        except BlockingIOError:  # silenced by a ring that was interrupted
            return

    def silence(self) -> None:
        """Reset the counter. The words decide which workers have finished, so an interrupt afterwards loses nothing."""
        try:  # `contextlib.suppress` takes three calls more, at every step
            os.eventfd_read(self.fileno)
        except BlockingIOError:
            return

    def close(self) -> None:
        """Release memory and descriptors; workers keep theirs until they end. May be called repeatedly."""
        with DeferSigint():
            while self._descriptors:
                os.close(self._descriptors.pop())
            self.words = memoryview(b"").cast("Q")
            self._memory = None

    def __del__(self, is_finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        if not is_finalizing():
            self.close()


class BellEnd:
    """A worker's side of the bell; it watches the pipe as well. ``descriptors``: the counter and the two eventfds."""

    def __init__(self, line: int, memory: SharedMemory, descriptors: Sequence[int], pipe: int) -> None:
        self._words = memoryview(memory.map).cast("Q")
        self._memory, self._line, self._pipe = memory, line, pipe
        self._counter, *bells = descriptors
        self._word = self._words[line + COMMAND]
        self._spinning_pays = True
        self._polls = []  # by the parity of the next ring: waits for it or the pipe, and looks at both
        for bell in bells:
            poll = select.poll()
            poll.register(pipe, select.POLLIN)
            poll.register(bell, select.POLLIN)
            self._polls.append((poll.poll, functools.partial(poll.poll, 0)))

    @classmethod
    def receive(cls, connection: Connection, access: BellAccess) -> BellEnd:
        """Return the worker's side of a bell that the caller sends with `Bell.send`."""
        memory = SharedMemory.receive(connection, access.nbytes)
        descriptors = [reduction.recv_handle(connection) for _ in range(3)]
        return cls(access.line, memory, descriptors, connection.fileno())

    def wait(self) -> Message | None:
        """Wait for a step that the bell announces; return ``None`` if there is a message in the pipe instead."""
        words, index, last = self._words, self._line + COMMAND, self._word
        begin = time.perf_counter()
        end = begin + SPIN if self._spinning_pays else begin
        while True:
            rings, word = words[0], words[index]
            if word != last:  # before the pipe: no step is announced while it has a command without a reply
                self._word = words[self._line + TAKEN] = word
                self._spinning_pays = time.perf_counter() - begin < 2 * SPIN
                return Message(word & _TAG_MASK, word >> OTHER_BITS, (), word >> _TAG_BITS & _SUBSET_MASK)
            words[self._line + SEEN] = rings
            poll, glance = self._polls[(rings + 1) & 1]
            found: list[tuple[int, int]] = []
            while not found and time.perf_counter() < end:
                for _ in range(_NUM_LOOKS):
                    if words[index] != last:
                        break
                    sched_yield()
                else:
                    found = glance()
                    continue
                break
            if words[index] != last:
                continue
            found = found or poll()
            if words[index] == last and any(descriptor == self._pipe for descriptor, _ in found):
                self._spinning_pays = time.perf_counter() - begin < 2 * SPIN
                return None

    def finish(self, *, has_message: bool) -> None:
        """Report that the step is done and, if ``has_message``, that the pipe contains a message about the step."""
        self._words[self._line + DONE] = self._word | HAS_MESSAGE if has_message else self._word
        try:  # `contextlib.suppress` takes three calls more, at every step
            os.eventfd_write(self._counter, 1)
        except BlockingIOError:  # it is full, so the caller is awake
            return
