"""The bell, which wakes all workers of a pool at once, and the channels to hosts that it wakes; only on Linux.

With a bell, the caller announces a plain step (one that carries no extra data) without sending a message to each
worker: it writes one word for each worker into shared memory and then rings the bell once. A worker that has finished
the step writes a word of its own and adds one to the counter. All other communication uses the pipes: other commands,
and replies with infos, text or failures. Both sides poll the pipes together with the bell or the counter, so each side
also notices if the other has died. For two workers whose envs do nothing, it takes 11 us to announce a step and to
notice that both have finished; over pipes, which wake each worker separately, it takes 124 us.

The shared memory consists of words of 8 bytes. The first word is the number of rings so far. Each worker has its own
group of words, which is called its line:

* `COMMAND` is the word of the latest step that the caller has announced to the worker.
* `TAKEN` is a copy of `COMMAND` that the worker makes when it starts the step.
* `DONE` is a copy of `COMMAND` that the worker makes when it has finished the step. The bit `HAS_MESSAGE` is set in the
  copy if the worker has sent a reply over its pipe.
* `SEEN` is the number of rings when the worker last looked at the first word.

A step's word combines the number of the step, the number of the subset of envs to step (see `StepSubset`), and the tag
of the step's message. No two steps have the same word, so both sides can read or write a word again after an interrupt.

The bell consists of two eventfds that are rung alternately. To ring, the caller resets the eventfd that it rang last
time and makes the other one readable. A worker waits for the eventfd that will be rung next. Workers never read an
eventfd: a read would reset it, and other workers would then wake late or not at all. A worker that has not noticed the
last ring when the next ring comes may wait for the wrong eventfd. The caller detects this from the worker's words, and
sends a message over the worker's pipe.
"""

from __future__ import annotations

import contextlib
import functools
import os
import platform
import select
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from parallelenv.backends._pipe import PipeChannel, sched_yield
from parallelenv.backends._shared_memory import SharedMemory
from parallelenv.contract.codec import PLAIN_STEPS, Message, StepSubset
from parallelenv.contract.interrupts import DeferSignals
from parallelenv.contract.protocol import Reply
from parallelenv.errors import WorkerStartError

if TYPE_CHECKING:
    from parallelenv.backends._channel_group import ChannelGroup


# On processors other than x86-64, a worker's word may become visible before the data that the worker wrote earlier.
HAS_BELL = hasattr(os, "eventfd") and platform.machine() == "x86_64"
LOOK = Message(0x3F)
"""A message for a worker that may have missed a ring. It makes the worker look at its words."""
SPIN = 200e-6
"""Seconds that a worker polls for its next command before it sleeps: about as long as a caller takes between two steps.

Without this spinning, 16 CartPoles on 2 cores made 0.67 times as many steps. On the other hand, spinning for 200 us
slowed down other programs that needed the cores.
"""
_WORDS = 8
"""Number of words in a line: a line fills one cache line. The first line contains only the number of rings."""
COMMAND, TAKEN, DONE, SEEN = range(4)
HAS_MESSAGE = 1 << 63
_TAG_BITS, _SUBSET_BITS = 8, 10
_TAG_MASK, _SUBSET_MASK = (1 << _TAG_BITS) - 1, (1 << _SUBSET_BITS) - 1
OTHER_BITS = _TAG_BITS + _SUBSET_BITS
_NUM_LOOKS = 8
"""How often a spinning worker checks its word before it checks the pipe once.

A check of the word takes 0.4 us, and a check of the pipe 1 us.
"""


class BellAccess(NamedTuple):
    """A message that tells a worker that `Bell.descriptors` follow, with which it makes its `BellEnd`."""

    line: int  # index of the first word in the worker's line
    nbytes: int


def word_of(message: Message, number: int) -> int:
    """Return the word that announces the step ``number``. The number in the step's ``message`` is ignored."""
    return number << OTHER_BITS | message.subset << _TAG_BITS | message.tag


class Bell:
    """The caller's side of a bell.

    Other threads may close the bell at any time. A lock keeps its descriptors open while they are in use; otherwise,
    their numbers could by then belong to files of the user.

    Attributes:
        fileno: The descriptor of the counter; -1 if the bell is closed.
    """

    def __init__(self, num_workers: int) -> None:
        self.fileno = -1
        self._descriptors: list[int] = []  # of the counter, then of the two eventfds of the bell
        self.nbytes = 8 * _WORDS * (num_workers + 1)
        self._memory: SharedMemory | None = SharedMemory.create(self.nbytes)
        self.words = memoryview(self._memory.map).cast("Q")
        self._lines: dict[tuple[int, ...], int] = {}
        self._lock = threading.RLock()
        with DeferSignals():
            try:
                self._descriptors.extend(os.eventfd(value, os.EFD_NONBLOCK | os.EFD_CLOEXEC) for value in (0, 1, 0))
            except OSError as error:
                self.close()
                raise WorkerStartError(
                    f"The workers' eventfds could not be opened ({error}). Raise the limit on open files (ulimit -n)."
                ) from error
            self.fileno = self._descriptors[0]

    def add_worker(self, env_ids: tuple[int, ...]) -> int:
        """A worker with the same ``env_ids`` as an earlier worker replaces that worker, and takes over its line."""
        line = self._lines.setdefault(env_ids, _WORDS * (len(self._lines) + 1))
        self.words[line : line + 4] = memoryview(bytes(24) + b"\xff" * 8).cast("Q")  # `SEEN`: an impossible number
        return line

    @property
    def descriptors(self) -> list[int]:
        """The descriptors of the memory, the counter and the two eventfds; empty if the bell is closed."""
        return [] if self._memory is None else [self._memory.fileno, *self._descriptors]

    def ring(self) -> None:
        """Wake all workers that wait for the bell. If Ctrl-C interrupts a ring, the caller rings again."""
        with self._lock:
            if not self._descriptors:
                return  # there are no workers any more
            rings = self.words[0]
            # First of all: if it stayed readable after an interrupt, workers that wait for it next would not sleep.
            try:  # noqa: SIM105 (`contextlib.suppress` would need three more calls at every step)
                os.eventfd_read(self._descriptors[1 + (rings & 1)])
            except BlockingIOError:  # an interrupted ring has already reset this eventfd
                pass
            self.words[0] = rings + 1
            os.eventfd_write(self._descriptors[2 - (rings & 1)], 1)

    def silence(self) -> None:
        # If Ctrl-C comes directly afterwards, no information is lost, because the words, not the counter, show which
        # workers have finished.
        with self._lock:
            if not self._descriptors:
                return
            try:  # `contextlib.suppress` would need three more calls at every step
                os.eventfd_read(self.fileno)
            except BlockingIOError:
                return

    def close(self) -> None:
        with DeferSignals(), self._lock:
            self._close()

    def _close(self) -> None:
        self.fileno = -1
        while self._descriptors:
            os.close(self._descriptors.pop())
        # A call that another thread is making still reads and writes words, until it notices that its pool is closed.
        self.words = memoryview(bytearray(self.nbytes)).cast("Q")
        self._memory = None

    def __del__(self, is_finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        if not is_finalizing():
            with DeferSignals():
                self._close()  # without the lock, which, in a forked child, a thread of the parent may hold


class BellEnd:
    """A worker's side of a bell. It waits for the bell and for the worker's pipe at the same time."""

    def __init__(self, line: int, memory: SharedMemory, descriptors: Sequence[int], pipe: int) -> None:
        self._words = memoryview(memory.map).cast("Q")
        self._memory, self._line, self._pipe = memory, line, pipe
        self._counter, *bells = descriptors
        self._word = self._words[line + COMMAND]
        self._spinning_pays = True
        self._polls = []  # by the parity of the next ring: waits for its eventfd or the pipe, and polls both
        for bell in bells:
            poll = select.poll()
            poll.register(pipe, select.POLLIN)
            poll.register(bell, select.POLLIN)
            self._polls.append((poll.poll, functools.partial(poll.poll, 0)))

    def wait(self) -> Message | None:
        """Return the message of the announced step, or ``None`` if there is a message to read from the pipe."""
        words, index, last = self._words, self._line + COMMAND, self._word
        begin = time.perf_counter()
        end = begin + SPIN if self._spinning_pays else begin
        while True:
            rings, word = words[0], words[index]
            # Checked before the pipe, because no step is announced while the worker has a command without a reply.
            if word != last:
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
        self._words[self._line + DONE] = self._word | HAS_MESSAGE if has_message else self._word
        try:  # `contextlib.suppress` would need three more calls at every step
            os.eventfd_write(self._counter, 1)
        except BlockingIOError:  # the counter is at its maximum, so it is readable and wakes the caller
            return


_BELL_SPIN = 1e-3
"""Seconds that the caller polls the words of workers before it sleeps, if the last step took less than this.

With 1 ms of polling, 64 CartPoles on 2 cores made 1.39 times as many steps as a bare loop; with 200 us of polling, they
made 1.14 times as many. With envs whose steps take 100 us, the factors were 1.79 and 1.75. While another program
kept one core busy, longer polling lowered the factor for 16 CartPoles from 0.44 to 0.36.
"""


class BellChannel(PipeChannel):
    """A `PipeChannel` to a host that the bell wakes for plain steps."""

    def __init__(self, group: ChannelGroup, bell: Bell, *arguments: Any) -> None:
        super().__init__(group, *arguments)
        self.line = bell.add_worker(self.env_ids)
        self.word = 0  # of the step that was announced by the bell and has no reply yet; 0 if there is no such step
        self._bell = bell
        self._was_told = False  # whether the caller has sent `LOOK` for the step in ``word``
        self._is_behind = True  # see `is_behind`

    def connect_bell(self) -> None:
        # An OSError means that the host has died, which its first command reports.
        with DeferSignals(), contextlib.suppress(OSError):
            self.notify(BellAccess(self.line, self._bell.nbytes))
            self.send_descriptors(*self._bell.descriptors)

    def notify(self, anything: object) -> None:
        if not isinstance(anything, StepSubset):  # the host reads a `StepSubset` when a step needs it
            self._is_behind = True
        super().notify(anything)

    def send(self, packed: Message) -> None:
        if self.is_behind or packed.frames or packed.tag not in PLAIN_STEPS:
            self._is_behind = False  # before its reply to this command, the host reads everything sent earlier
            super().send(packed)
            return
        self._group.queue.append((self, packed))
        self._unread.append(0)
        self._group.awaits_first = True

    @property
    def is_behind(self) -> bool:
        """True if the pipe may contain a message that the host must read before it executes the next command.

        If so, the next command must be sent over the pipe too. A step announced by the bell would overtake the message,
        because the host checks for such a step before it reads the pipe.
        """
        return self._is_behind or bool(self._unread)

    def announce(self, word: int) -> None:
        """The same word may be written again after an interrupt, because the worker executes each step only once."""
        self.word = self._bell.words[self.line + COMMAND] = word
        self._was_told = False
        self._unread = deque([0])

    @property
    def has_begun(self) -> bool:
        return self._bell.words[self.line + TAKEN] == self.word

    @property
    def has_finished(self) -> bool:
        """True if the worker has finished the announced step without sending a reply over the pipe."""
        return self.word != 0 and self._bell.words[self.line + DONE] == self.word

    def tell(self) -> None:
        """Send `LOOK` to the worker if it has not started its step, because it may have missed the ring."""
        if not self._was_told and not self.has_begun:
            self._was_told = True  # once per step: many messages to a suspended worker would fill its pipe
            with contextlib.suppress(OSError):  # if the worker has died, the next wait finds out
                self.send_message(LOOK)

    def advance(self) -> bool:
        return bool(self.inbox) or self.has_finished

    def receive(self) -> Reply:
        if self.inbox or not self.has_finished:
            return super().receive()
        self._unread.popleft()
        word, self.word = self.word, 0
        return Reply(word >> OTHER_BITS)  # a message in the pipe, if there is one, is the reply to a later command

    def receive_message(self) -> Message | None:
        message = super().receive_message()
        if message is not None:
            self.word = 0  # the message is the reply to the step in ``word``, if there is one
        return message

    def hang_up(self) -> None:
        self.word = 0
        super().hang_up()


class BellStep:
    """A `RepeatedStep` of workers that the bell wakes.

    It is safe for Ctrl-C to interrupt any method of this class, because words can be written and read again, and the
    bell can be rung again.
    """

    def __init__(self, group: ChannelGroup, bell: Bell, parts: Sequence[tuple[BellChannel, Message]]) -> None:
        self._group = group
        self._bell = bell
        self._words = bell.words
        self._parts = parts
        # For each worker: the index of its `COMMAND` word, and the value to which the shifted step number is added.
        self._commands = [
            (channel.line + COMMAND, word_of(message, offset)) for offset, (channel, message) in enumerate(parts)
        ]
        self._awaited: list[tuple[int, int]] = []  # for each worker: the index of `DONE`, and its value after the step
        self._spinning_pays = True
        self._has_told = False

    def send(self, number: int) -> None:
        words, shifted, awaited = self._words, number << OTHER_BITS, []
        for index, other_bits in self._commands:
            words[index] = word = shifted + other_bits
            awaited.append((index + DONE, word))
        self._awaited, self._has_told = awaited, False
        self._bell.ring()

    def wait(self, timeout: float) -> bool:
        words = self._words
        begin = time.perf_counter()
        end = begin + _BELL_SPIN if self._spinning_pays else begin
        for index, word in self._awaited:
            while (done := words[index]) != word:
                if done == word | HAS_MESSAGE:
                    return False
                if time.perf_counter() < end:
                    sched_yield()
                elif not self._sleep(begin + timeout):
                    return False
        self._spinning_pays = time.perf_counter() - begin < _BELL_SPIN
        return True

    def _sleep(self, until: float) -> bool:
        """Return ``False`` if a worker has sent a message or died, or if the time ``until`` has come."""
        words = self._words
        if not self._has_told:
            self._has_told = True
            rings = words[0] - 1
            for (channel, _), (_, word) in zip(self._parts, self._awaited, strict=True):
                if words[channel.line + SEEN] != rings and words[channel.line + TAKEN] != word:
                    # If the worker has died, the poll below finds out.
                    with DeferSignals(), contextlib.suppress(OSError):
                        channel.send_message(LOOK)
        found = self._group.poll(max(0.0, until - time.perf_counter()) * 1000)
        if len(found) != 1 or found[0][0] != self._bell.fileno:
            return False
        self._bell.silence()
        return True

    def leave_to_channels(self, number: int) -> None:
        for offset, (channel, message) in enumerate(self._parts):
            channel.announce(word_of(message, number + offset))
        if not all(channel.has_begun for channel, _ in self._parts):
            self._bell.ring()
            for channel, _ in self._parts:
                channel.tell()  # after an interrupted ring, the worker may wait for the wrong eventfd
