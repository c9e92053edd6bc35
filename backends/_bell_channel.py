"""The caller's end of a pipe to a host that the bell can wake as well, and a step of such hosts."""

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
"""Seconds that the caller spins for workers woken by the bell before it sleeps, if the last step took less.

On 2 cores, 64 CartPoles made 1.39 times the steps of a bare loop with it and 1.14 times with 200 us; envs of 100 us
1.79 and 1.75 times. While another program kept a core busy, 16 CartPoles made 0.36 instead of 0.44 times.
"""
_LATE = 30e-6
"""Seconds after which a worker that was awake has certainly started the step."""
_CHECK_INTERVAL = 0.001
"""Seconds between checks of the bell while only a reply can make room in a pipe."""


class BellChannel(PipeChannel):
    """A pipe to a host that a bell wakes for plain steps, which need no message.

    Attributes:
        line: Index of the first of the worker's words.
        word: The step that was announced by the bell and has no reply yet; 0 if there is none.
    """

    def __init__(self, group: ChannelGroup, bell: Bell, *arguments: Any) -> None:
        super().__init__(group, *arguments)
        self.line = bell.add_worker(self.env_ids)
        self.word = 0
        self._bell = bell
        self._was_told = False  # whether the worker got a message to look for that step
        self._is_behind = True  # whether the pipe may have something unread that the next command relies on

    def connect_bell(self) -> None:
        with contextlib.suppress(OSError), DeferSigint():  # OSError: if it has died, its first command reports it
            self.notify(BellAccess(self.line, self._bell.nbytes))
            self._bell.send(self.wire.connection, self.process.pid)

    def notify(self, anything: object) -> None:
        if not isinstance(anything, StepSubset):  # which the host reads when a step asks for it
            self._is_behind = True
        super().notify(anything)

    def send(self, packed: Message) -> None:
        if self.is_behind or packed.frames or packed.tag not in PLAIN_STEPS:
            self._is_behind = False  # the reply to this command comes after everything that was sent before
            super().send(packed)
            return
        self._group.queue.append((self, packed))
        self._num_unread = 1
        self._group.awaits_first = True

    @property
    def is_behind(self) -> bool:
        """True if the pipe may have something unread that the next command relies on."""
        return self._is_behind or self._num_unread > 0

    def announce(self, word: int) -> None:
        """Write the word of a step. This may be repeated, because the worker does each step once."""
        self.word = self._bell.words[self.line + COMMAND] = word
        self._was_told = False
        self._num_unread = 1

    @property
    def has_begun(self) -> bool:
        """True if the worker has started the step that was announced."""
        return self._bell.words[self.line + TAKEN] == self.word

    @property
    def has_finished(self) -> bool:
        """True if the worker has finished the step that was announced, and has nothing to report."""
        return self.word != 0 and self._bell.words[self.line + DONE] == self.word

    def tell(self) -> None:
        """If the worker has not started its step, send it a message to look: the worker may have missed the ring."""
        if not self._was_told and not self.has_begun:
            self._was_told = True  # once: messages to a worker that does not run would fill its pipe
            with contextlib.suppress(OSError):  # if it has died, the next wait finds out
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
        self.word = 0  # the worker has something to report
        return message

    def _take(self) -> int:
        """Forget the step that is done, and return its number."""
        word, self.word = self.word, 0
        return word >> OTHER_BITS

    def hang_up(self) -> None:
        self.word = 0
        super().hang_up()


class BellStep:
    """A `RepeatedStep` of workers that the bell wakes.

    Nothing in this class needs protection from interrupts: words can be written again, the bell can be rung again, and
    nothing is read that could not be read again. ``parts``: each worker's channel, and the message of its step without
    its number.
    """

    def __init__(self, group: ChannelGroup, bell: Bell, parts: Sequence[tuple[BellChannel, Message]]) -> None:
        self._group = group
        self._bell = bell
        self._words = bell.words
        self._parts = parts
        # For each worker: the index of its word, and the value to which the number of a step is added.
        self._commands = [
            (channel.line + COMMAND, word_of(message, offset)) for offset, (channel, message) in enumerate(parts)
        ]
        self._awaited: list[tuple[int, int]] = []  # for each worker: the index and the word that marks the step as done
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
                            self._group.spread()  # workers may share a core while another is idle
                elif not self._sleep(begin + timeout):
                    return False
        self._spinning_pays = time.perf_counter() - begin < _BELL_SPIN
        return True

    def _sleep(self, until: float) -> bool:
        """Wait until a worker may have finished; return False if one has a message or died, or the time is over."""
        words = self._words
        if not self._has_told:
            self._has_told = True
            rings = words[0] - 1
            for (channel, _), (_, word) in zip(self._parts, self._awaited, strict=True):
                if words[channel.line + SEEN] != rings and words[channel.line + TAKEN] != word:
                    with contextlib.suppress(OSError):  # if it has died, the poll finds out
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
                channel.tell()  # an interrupted ring may have left it waiting for the other eventfd
