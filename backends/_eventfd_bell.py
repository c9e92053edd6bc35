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
from collections.abc import Callable, Sequence
from multiprocessing import reduction
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

from parallelenv.backends._shared_memory import SharedMemory
from parallelenv.backends._wire import Wire, sched_yield
from parallelenv.contract.codec import Message
from parallelenv.contract.interrupts import DeferSigint

# Elsewhere a processor may show a worker's word before what the worker wrote earlier.
HAS_BELL = hasattr(os, "eventfd") and platform.machine() in ("x86_64", "AMD64")
LOOK = Message(0x3F)
"""A message for a worker that may have missed the bell."""
SPIN = 200e-6
"""Seconds that a worker spins for the next ring before it sleeps, if the last one came about as soon. On 2 cores, 16
CartPoles made 0.67 of the steps without, and 200 us slowed down busy neighbours."""
CALLER_SPIN = 1e-3
"""Seconds that the caller spins for its workers before it sleeps, if the last step took less.

On 2 cores, 64 CartPoles made 1.39 of the steps of a bare loop with it and 1.14 with 200 us; envs of 100 us 1.79 and
1.75. While another program kept a core busy, 16 CartPoles made 0.36 instead of 0.44.
"""
_LATE = 30e-6
"""Seconds after which a worker that was awake has certainly begun."""
_WORDS = 8
"""Words of a worker: a cache line. The first line has the number of rings."""
_COMMAND, _TAKEN, _DONE, _SEEN = range(4)
_NEVER = 2**64 - 1
_HAS_MESSAGE = 1 << 63
"""In the word of a step that is done: there is a message in the pipe, too."""
_TAG_BITS, _SUBSET_BITS = 8, 10
_TAG_MASK, _SUBSET_MASK = (1 << _TAG_BITS) - 1, (1 << _SUBSET_BITS) - 1
_OTHER_BITS = _TAG_BITS + _SUBSET_BITS
_NUM_LOOKS = 8
"""Looks at a word of shared memory, of 0.4 us each, before one at the pipe, of 1 us."""


class BellAccess(NamedTuple):
    """Announces to a worker that `Bell.send` follows.

    Attributes:
        line: Place of its words.
        nbytes: Size of the memory of all words.
    """

    line: int
    nbytes: int


def _word(number: int, tag: int, subset: int) -> int:
    """Return the word that announces a step."""
    return number << _OTHER_BITS | subset << _TAG_BITS | tag


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
        return word >> _OTHER_BITS

    def announce(self, word: int, wire: Wire) -> None:
        """Write the word of a step. Harmless if repeated: the worker does each step once."""
        self.word = self._bell.words[self.line + _COMMAND] = word
        self.wire, self.was_told = wire, False

    def tell(self) -> None:
        """Send the worker a message to look for its step, which it has not begun: it may have missed the ring."""
        if self._bell.words[self.line + _TAKEN] != self.word and not self.was_told:
            self.was_told = True  # once: messages to a worker that does not run would fill its pipe
            with contextlib.suppress(OSError):  # if it has died, the next wait finds out
                self.wire.send(LOOK)


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
        opened: list[int] = []
        with DeferSigint():
            try:
                opened.extend(os.eventfd(value, os.EFD_NONBLOCK | os.EFD_CLOEXEC) for value in (0, 1, 0))
            except OSError:
                for descriptor in opened:
                    os.close(descriptor)
                raise
            self.fileno, *self._bells = opened

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
        if self.wakes_too_many(len(queue)):
            for _, message, wire in queue:
                with contextlib.suppress(OSError):  # if it has died, the next wait finds out
                    wire.send(message)
            return
        words, rings = self.words, self.words[0]
        for entry, (tag, number, _, subset), wire in queue:
            entry.announce(_word(number, tag, subset), wire)
        self.ring()
        for entry in self._entries.values():
            if entry.word and words[entry.line + _SEEN] != rings:
                entry.tell()

    def wakes_too_many(self, num_wanted: int) -> bool:
        """Whether the bell would wake more workers than are wanted, and than it would take to send messages."""
        return 2 * num_wanted < len(self._entries)

    def ring(self) -> None:
        """Wake all workers that wait for the bell. After an interrupt it is called again."""
        rings = self.words[0] + 1
        self.words[0] = rings
        os.eventfd_write(self._bells[rings & 1], 1)
        try:
            os.eventfd_read(self._bells[1 - (rings & 1)])
        except BlockingIOError:  # silenced by a ring that was interrupted
            return

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


class BellStep:
    """A `RepeatedStep` of workers that are woken by the bell.

    Nothing here needs protection from interrupts: a word can be written and the bell rung again, and nothing is read
    that could not be read again.

    Args:
        bell: The bell.
        parts: The `BellChannel` of each worker, and the message of its step without its number.
        poll: Waits for the counter and all pipes, as ``poll.poll`` does.
        spread: Called if a worker has not begun long after the ring: workers may share a core while another is idle.
    """

    def __init__(
        self,
        bell: Bell,
        parts: Sequence[tuple[Any, Message]],
        poll: Any,
        spread: Callable[[], None],
    ) -> None:
        self._bell = bell
        self._words = bell.words
        self._parts = parts
        self._poll = poll
        self._spread = spread
        # Of each worker: the place of its word, and what the number of a step is added to.
        self._commands = [
            (channel.entry.line + _COMMAND, _word(place, message.tag, message.subset))
            for place, (channel, message) in enumerate(parts)
        ]
        self._awaited: list[tuple[int, int]] = []  # of each worker: the place and the word that says that it is done
        self._is_quick = True
        self._has_told = False

    def send(self, number: int) -> None:
        words, shifted, awaited = self._words, number << _OTHER_BITS, []
        for place, other_bits in self._commands:
            words[place] = word = shifted + other_bits
            awaited.append((place + _DONE, word))
        self._awaited, self._has_told = awaited, False
        self._bell.ring()

    def wait(self, timeout: float) -> bool:
        words = self._words
        begin = time.perf_counter()
        end = begin + CALLER_SPIN if self._is_quick else begin
        late = begin + _LATE
        for place, word in self._awaited:
            while (done := words[place]) != word:
                if done == word | _HAS_MESSAGE:
                    return False
                now = time.perf_counter()
                if now < end:
                    sched_yield()
                    if now > late:
                        late = end
                        if any(words[one - _DONE + _TAKEN] != awaited for one, awaited in self._awaited):
                            self._spread()
                elif not self._sleep(begin + timeout):
                    return False
        self._is_quick = time.perf_counter() - begin < CALLER_SPIN
        return True

    def _sleep(self, until: float) -> bool:
        """Wait until some worker may have finished. ``False``: one has a message, or died, or it took too long."""
        words = self._words
        if not self._has_told:
            self._has_told = True
            rings = words[0] - 1
            for (channel, _), (_, word) in zip(self._parts, self._awaited, strict=True):
                line = channel.entry.line
                if words[line + _SEEN] != rings and words[line + _TAKEN] != word:
                    with contextlib.suppress(OSError):  # if it has died, the poll finds out
                        channel.wire.send(LOOK)
        found = self._poll(max(0.0, until - time.perf_counter()) * 1000)
        if len(found) != 1 or found[0][0] != self._bell.fileno:
            return False
        self._bell.silence()
        return True

    def file(self, number: int) -> None:
        for place, (channel, message) in enumerate(self._parts):
            channel.await_step(_word(number + place, message.tag, message.subset))
        entries = [channel.entry for channel, _ in self._parts]
        if not all(self._words[entry.line + _TAKEN] == entry.word for entry in entries):
            self._bell.ring()
            for entry in entries:
                entry.tell()  # an interrupted ring may have left it waiting for the other eventfd


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
        words, place, last = self._words, self._line + _COMMAND, self._word
        begin = time.perf_counter()
        end = begin + SPIN if self._is_quick else begin
        while True:
            rings, word = words[0], words[place]
            if word != last:  # before the pipe: no step is announced while it has an unanswered command
                self._word = words[self._line + _TAKEN] = word
                self._is_quick = time.perf_counter() - begin < 2 * SPIN
                return Message(word & _TAG_MASK, word >> _OTHER_BITS, (), word >> _TAG_BITS & _SUBSET_MASK)
            words[self._line + _SEEN] = rings
            poll, glance = self._polls[(rings + 1) & 1]
            found: Any = ()
            while not found and time.perf_counter() < end:
                for _ in range(_NUM_LOOKS):
                    if words[place] != last:
                        break
                    sched_yield()
                else:
                    found = glance()
                    continue
                break
            if words[place] != last:
                continue
            found = found or poll()
            if words[place] == last and any(descriptor == self._pipe for descriptor, _ in found):
                self._is_quick = time.perf_counter() - begin < 2 * SPIN
                return None

    def finish(self, *, has_message: bool) -> None:
        """Report that the step is done; ``has_message``: and that something about it was sent over the pipe."""
        self._words[self._line + _DONE] = self._word | _HAS_MESSAGE if has_message else self._word
        try:  # `contextlib.suppress` takes three calls more, at every step
            os.eventfd_write(self._counter, 1)
        except BlockingIOError:  # it is full, so the caller is awake
            return
