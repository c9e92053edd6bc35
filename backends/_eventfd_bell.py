"""One bell that wakes all workers of a pool, and one counter of those that have finished; on Linux.

A step that says nothing but "step" needs no message to each worker: the caller writes a word for each into shared
memory and rings once. A worker that has nothing to say but "done" writes a word, too, and adds one to the counter. All
else goes over the pipes, which stay in the same poll sets: other commands, infos, texts, failures, and deaths. With two
workers that do nothing a round takes 11 us; over pipes, which wake each worker by itself, 124 us.

The bell is two eventfds that take turns: the caller silences the one that it rang last and rings the other. So a worker
waits for the one that is rung next, and no worker has to read it, which would wake the others late or not at all. A
worker that has not noticed the last ring when the next one comes may wait for the wrong eventfd: the caller sees that,
and sends it a message over its pipe.
"""

from __future__ import annotations

import contextlib
import functools
import os
import platform
import select
import sys
import time
from multiprocessing import reduction
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

from parallelenv.backends._shared_memory import SharedMemory
from parallelenv.backends._wire import Wire, spin
from parallelenv.contract.codec import Message
from parallelenv.contract.interrupts import DeferSigint

# Elsewhere a processor may show a worker's word before what the worker wrote earlier.
HAS_BELL = hasattr(os, "eventfd") and platform.machine() in ("x86_64", "AMD64")
LOOK = Message(0x3F)
"""A message for a worker that may have missed the bell."""
SPIN = 200e-6
"""Seconds that a worker spins for the next ring before it sleeps, if the last one came about as soon. On 2 cores, 16
CartPoles made 0.67 of the steps without, and 200 us slowed down busy neighbours."""
_WORDS = 8
"""Words of a worker: a cache line. The first line has the number of rings."""
_COMMAND, _TAKEN, _DONE, _SEEN = range(4)
_NEVER = 2**64 - 1
_TAG_BITS = 8


class BellAccess(NamedTuple):
    """Announces to a worker that `Bell.send` follows.

    Attributes:
        line: Place of its words.
        nbytes: Size of the memory of all words.
    """

    line: int
    nbytes: int


class Entry:
    """The caller's view of one worker's words.

    Args:
        bell: The bell.
        line: Place of the worker's words.

    Attributes:
        line: As given.
        word: The step that was announced and not answered; 0 if there is none.
        wire: The worker's pipe.
        was_told: Whether the worker got a message to look for that step.
    """

    wire: Wire
    was_told = False

    def __init__(self, bell: Bell, line: int) -> None:
        self._bell = bell
        self.line = line
        self.word = 0
        bell.words[line : line + 4] = memoryview(bytes(24) + _NEVER.to_bytes(8, "little")).cast("Q")

    @property
    def has_finished(self) -> bool:
        """Whether the worker has done the step that was announced, and has nothing to say."""
        return self.word != 0 and self._bell.words[self.line + _DONE] == self.word

    def take(self) -> int:
        """Return the number of that step, whose reply is taken."""
        word, self.word = self.word, 0
        return word >> _TAG_BITS


class Bell:
    """The caller's side.

    Args:
        num_workers: Number of workers that can be woken.

    Attributes:
        queue: Steps to announce with the next `flush`: the worker's entry, the message, and its pipe.
        words: The number of rings, and a line of words for each worker.
        fileno: Descriptor of the counter, to be watched by a poller.
        nbytes: Size of the memory of all words.
    """

    def __init__(self, num_workers: int) -> None:
        self._bells: list[int] = []
        self.nbytes = 8 * _WORDS * (num_workers + 1)
        memory = SharedMemory.create(self.nbytes)
        self._memory: SharedMemory | None = memory
        self.words = memoryview(memory.map).cast("Q")
        self._entries: dict[tuple[int, ...], Entry] = {}  # by env ids of the worker
        self.queue: list[tuple[Entry, Message, Wire]] = []
        with DeferSigint():
            self.fileno = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
            self._bells = [os.eventfd(value, os.EFD_NONBLOCK | os.EFD_CLOEXEC) for value in (1, 0)]

    def enter(self, env_ids: tuple[int, ...]) -> Entry:
        """Return the entry of a new worker; one that takes the place of another gets its words."""
        known = self._entries.get(env_ids)
        line = _WORDS * (len(self._entries) + 1) if known is None else known.line
        entry = Entry(self, line)
        self._entries[env_ids] = entry
        return entry

    def send(self, connection: Connection, pid: int) -> None:
        """Give a new worker access, over its pipe; `BellEnd.receive` is the counterpart.

        Raises:
            OSError: If it has died.
        """
        if self._memory is not None:
            self._memory.send(connection, pid)
        for descriptor in (*self._bells, self.fileno):
            reduction.send_handle(connection, descriptor, pid)

    def flush(self) -> None:
        """Announce all queued steps: by one ring, or over the pipes if it would wake more workers than needed."""
        if not self.queue:
            return
        queue, self.queue = self.queue, []
        if 2 * len(queue) < len(self._entries):
            for _, message, wire in queue:
                with contextlib.suppress(OSError):  # if it has died, the next wait finds out
                    wire.send(message)
            return
        words, rings = self.words, self.words[0]
        for entry, (tag, number, _), wire in queue:
            entry.word = words[entry.line + _COMMAND] = number << _TAG_BITS | tag
            entry.wire, entry.was_told = wire, False
        words[0] = rings + 1
        os.eventfd_read(self._bells[rings & 1])
        os.eventfd_write(self._bells[(rings + 1) & 1], 1)
        for entry in self._entries.values():
            is_awake = words[entry.line + _SEEN] == rings or words[entry.line + _TAKEN] == entry.word
            if entry.word and not is_awake and not entry.was_told:
                entry.was_told = True  # once: messages to a worker that does not run would fill its pipe
                with contextlib.suppress(OSError):
                    entry.wire.send(LOOK)

    def silence(self) -> None:
        """Reset the counter. The words decide which workers have finished, so an interrupt afterwards loses nothing."""
        try:  # `contextlib.suppress` takes three calls more, at every step
            os.eventfd_read(self.fileno)
        except BlockingIOError:
            return

    def close(self) -> None:
        """Release memory and descriptors; workers keep theirs until they end. Can be called again."""
        with DeferSigint():
            self.queue, self._entries = [], {}
            descriptors, self._bells = [*self._bells, self.fileno] if self._bells else [], []
            for descriptor in descriptors:
                os.close(descriptor)
            self.words = memoryview(b"").cast("Q")
            self._memory = None

    def __del__(self, is_finalizing: Any = sys.is_finalizing) -> None:
        if not is_finalizing():
            self.close()


class BellEnd:
    """A worker's side.

    Args:
        line: Place of its words.
        memory: The words.
        bells: The two eventfds.
        counter: The counter.
        pipe: Descriptor of its pipe, which it watches too.
    """

    def __init__(self, line: int, memory: SharedMemory, bells: list[int], counter: int, pipe: int) -> None:
        self._memory = memory
        self._words = memoryview(memory.map).cast("Q")
        self._line = line
        self._counter = counter
        self._pipe = pipe
        self._word = self._words[self._line + _COMMAND]
        self._is_quick = True
        self._polls = []  # by the parity of the next ring: waits for it or the pipe, and looks at both
        for bell in bells:
            poll = select.poll()
            poll.register(pipe, select.POLLIN)
            poll.register(bell, select.POLLIN)
            self._polls.append((poll.poll, functools.partial(poll.poll, 0)))

    @classmethod
    def receive(cls, connection: Connection, line: int, nbytes: int) -> BellEnd:
        """Return the worker's side of a bell that the caller sends with `Bell.send`."""
        memory = SharedMemory.receive(connection, nbytes)
        bells = [reduction.recv_handle(connection), reduction.recv_handle(connection)]
        return cls(line, memory, bells, reduction.recv_handle(connection), connection.fileno())

    def wait(self) -> Message | None:
        """Wait for a step that is announced by the bell; ``None``: there is something to read from the pipe."""
        words, line = self._words, self._line
        begin = time.perf_counter()
        while True:
            rings, word = words[0], words[line + _COMMAND]
            if word != self._word:  # before the pipe: nothing is announced while the pipe has an unanswered command
                self._word = words[line + _TAKEN] = word
                self._is_quick = time.perf_counter() - begin < 2 * SPIN
                return Message(word & (1 << _TAG_BITS) - 1, word >> _TAG_BITS)
            words[line + _SEEN] = rings
            poll, glance = self._polls[(rings + 1) & 1]
            found = spin(glance, SPIN) if self._is_quick else None
            found = found or poll()
            if words[line + _COMMAND] == self._word and any(descriptor == self._pipe for descriptor, _ in found):
                self._is_quick = time.perf_counter() - begin < 2 * SPIN
                return None

    def finish(self) -> None:
        """Report that the step is done, with nothing to say."""
        self._words[self._line + _DONE] = self._word
        with contextlib.suppress(BlockingIOError):  # it is full, so the caller is awake
            os.eventfd_write(self._counter, 1)
