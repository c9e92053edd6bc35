"""Channels to hosts that can be woken by the bell as well as over their pipes.

`BellStep` steps several such hosts at once. `_eventfd_bell` describes the bell and its words.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from parallelenv.backends._eventfd_bell import (
    COMMAND,
    DONE,
    HAS_MESSAGE,
    LOOK,
    OTHER_BITS,
    SEEN,
    TAKEN,
    Bell,
    BellAccess,
    word_of,
)
from parallelenv.backends._pipe_channel import PipeChannel
from parallelenv.backends._wire import sched_yield
from parallelenv.contract import codec
from parallelenv.contract.codec import PLAIN_STEPS, Message, StepSubset
from parallelenv.contract.interrupts import DeferSigint
from parallelenv.contract.protocol import Reply

if TYPE_CHECKING:
    from parallelenv.backends._channel_group import ChannelGroup

_BELL_SPIN = 1e-3
"""Seconds that the caller polls the words of workers before it sleeps, if the last step took less than this.

With 1 ms of polling, 64 CartPoles on 2 cores made 1.39 times as many steps as a bare loop; with 200 us of polling, they
made 1.14 times as many. With envs whose steps take 100 us, the factors were 1.79 and 1.75. While another program
kept one core busy, longer polling lowered the factor for 16 CartPoles from 0.44 to 0.36.
"""
_LATE = 30e-6
"""Seconds after which a worker has certainly started the step if it was awake when the bell rang."""
_CHECK_INTERVAL = 0.001
"""Seconds between checks of a worker's words while the caller waits for that worker's pipe."""


class BellChannel(PipeChannel):
    """A `PipeChannel` to a host that the bell wakes for plain steps.

    Args:
        group: The group that the channel belongs to.
        bell: The bell.
        arguments: The remaining arguments of `PipeChannel`.

    Attributes:
        line: Index of the first of the worker's words in the bell's shared memory.
        word: The word of the step that was announced by the bell and has no reply yet; 0 if there is no such step.
    """

    def __init__(self, group: ChannelGroup, bell: Bell, *arguments: Any) -> None:
        super().__init__(group, *arguments)
        self.line = bell.add_worker(self.env_ids)
        self.word = 0
        self._bell = bell
        self._was_told = False  # whether the caller has sent `LOOK` for the step in ``word``
        self._is_behind = True  # see `is_behind`

    def connect_bell(self) -> None:
        # An OSError means that the host has died, which its first command reports.
        with contextlib.suppress(OSError), DeferSigint():
            self.notify(BellAccess(self.line, self._bell.nbytes))
            self._bell.send(self.wire.connection, self.process.pid)

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
        self._num_unread = 1
        self._group.awaits_first = True

    @property
    def is_behind(self) -> bool:
        """True if the pipe may contain a message that the host must read before it executes the next command.

        If so, the next command must be sent over the pipe too. A step announced by the bell would overtake the message,
        because the host checks for such a step before it reads the pipe.
        """
        return self._is_behind or self._num_unread > 0

    def announce(self, word: int) -> None:
        """Write the word of a step for the worker to see.

        The same word may be written again after an interrupt, because the worker executes each step only once.
        """
        self.word = self._bell.words[self.line + COMMAND] = word
        self._was_told = False
        self._num_unread = 1

    @property
    def has_begun(self) -> bool:
        """True if the worker has started the announced step."""
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
                self.wire.send(LOOK)

    def advance(self) -> bool:
        return bool(self.inbox) or self.has_finished

    def receive(self) -> Reply:
        if self.inbox or not self.has_finished:
            return super().receive()
        self._num_unread -= 1
        return Reply(self._take())

    def receive_message(self) -> Message:
        while self.word and not self.has_finished and not self.found_dead:
            if self.wire.connection.poll(_CHECK_INTERVAL):
                break
        if self.has_finished:  # even if the pipe has a message, which is a reply to a later command
            return Message(codec.DONE, self._take())
        message = super().receive_message()
        self.word = 0  # the message is the reply to the step in ``word``
        return message

    def _take(self) -> int:
        """Set ``word`` to 0, now that its step is done, and return the step's number."""
        word, self.word = self.word, 0
        return word >> OTHER_BITS

    def hang_up(self) -> None:
        self.word = 0
        super().hang_up()


class BellStep:
    """A `RepeatedStep` of workers that the bell wakes.

    It is safe for Ctrl-C to interrupt any method of this class, because words can be written and read again, and the
    bell can be rung again.

    Args:
        group: The group of the workers' channels.
        bell: The bell that wakes the workers.
        parts: The channel of each worker, with the message for that worker's step. The number in the message is
            ignored.
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
        late = begin + _LATE
        for index, word in self._awaited:
            while (done := words[index]) != word:
                if done == word | HAS_MESSAGE:
                    return False
                now = time.perf_counter()
                if now < end:
                    sched_yield()
                    if now > late:
                        late = end
                        if any(words[one - DONE + TAKEN] != awaited for one, awaited in self._awaited):
                            self._group.spread()  # workers may share a core while a different core is idle
                elif not self._sleep(begin + timeout):
                    return False
        self._spinning_pays = time.perf_counter() - begin < _BELL_SPIN
        return True

    def _sleep(self, until: float) -> bool:
        """Sleep until a worker may have finished its step, but not past the time ``until``.

        Return ``False`` if a worker has sent a message or died, or if the time ``until`` has come.
        """
        words = self._words
        if not self._has_told:
            self._has_told = True
            rings = words[0] - 1
            for (channel, _), (_, word) in zip(self._parts, self._awaited, strict=True):
                if words[channel.line + SEEN] != rings and words[channel.line + TAKEN] != word:
                    with contextlib.suppress(OSError):  # if the worker has died, the poll below finds out
                        channel.wire.send(LOOK)
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
