"""The caller's end of a connection that carries messages to and from a host, whatever the transport is."""

from __future__ import annotations

import contextlib
import itertools
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from parallelenv.contract import codec
from parallelenv.contract.batch import Batch
from parallelenv.contract.codec import DONE, Message, StepSubset
from parallelenv.contract.interrupts import DeferSignals, Ignore
from parallelenv.contract.protocol import Command, Death, HostDied, Printed, Reply

_OVERHEAD = 2048
"""Bytes of a transport's capacity that a message may take in addition to its frames.

A pipe stores a message of 2049 bytes in a page of 4096. A Unix socket takes 768 bytes for a message of 19.
"""


class MessageChannel(ABC):
    """A `Channel` that reaches its host through messages. A subclass adds the transport.

    At the other end of the transport, `parallelenv.worker.worker_loop.serve` or a `MessageHost` runs the host. Action
    and result rows travel in the messages, unless a subclass overrides `attach` for a host that shares the batch.

    Attributes:
        items: Positions, in the user's list, of the items that the host owns.
        env_ids: Ids of the host's envs; equal to ``items`` unless the list contains vector envs.
        inbox: Messages that were read before `receive` was called; if there are any, `receive` returns at once.
        safe_bytes: Number of bytes that can be sent to a host that is busy, or is sending a reply that the caller is
            not reading. The default is the capacity of a pipe.
    """

    in_caller = False
    safe_bytes: float = 65536

    def __init__(self, env_ids: tuple[int, ...]) -> None:
        self.items = self.env_ids = env_ids
        self.inbox: deque[Message] = deque()
        self._batch: Batch | None = None  # set if messages contain the rows of the batch
        self._unread: deque[int] = deque()  # for each command whose reply was not read: the bytes sent for it
        self._subsets: dict[tuple[int, ...], int] = {}  # number of each subset, see `StepSubset`
        self._latest_subsets: deque[tuple[int, ...]] = deque(maxlen=8)  # latest subsets without a number

    # ---------------------------------------------------------------- for subclasses

    @abstractmethod
    def send_message(self, message: Message) -> None:
        """Send a message, pickled or in the form of `Message.to_bytes`; raise an `OSError` if the other end is gone."""

    @abstractmethod
    def receive_message(self) -> Message | None:
        """Return the next message; raise `EOFError` or `OSError` if the other end is gone.

        The result is ``None`` if the message has not arrived completely.
        """

    @abstractmethod
    def cause_of_death(self) -> Death:
        """See `Channel`."""

    @abstractmethod
    def kill(self) -> None:
        """See `Channel`."""

    def take_output(self, *, is_idle: bool) -> list[Printed]:
        """Return what the envs have printed since the last call, if the host writes it where the caller can read it.

        ``is_idle`` is ``True`` if the host has no pending command; in that case, the last line of the output is
        complete.
        """
        return []

    # ---------------------------------------------------------------- see `Channel`

    def pack(self, command: Command) -> Any:  # noqa: D102
        if self._batch is not None and command.reads_actions:
            command.rows = self._batch.take_actions(command.env_ids)
        is_subset = command.operation == "step" and command.env_ids is not self.env_ids
        if is_subset and self._batch is None and command.env_ids not in self._subsets:
            if command.env_ids in self._latest_subsets:  # used twice, as when two halves of the envs take turns
                self.name_subset(command.env_ids)
            self._latest_subsets.append(command.env_ids)
        message = codec.encode_command(command, self.env_ids, self._subsets)
        if self._unread:
            # If both ends sent more than the transport holds, they would wait for each other forever. Of the commands
            # without a reply, the oldest takes no space, because the host reads it before it replies to it.
            sizes = itertools.accumulate([message.nbytes + _OVERHEAD, *reversed(self._unread)])
            command.most_pending = sum(size <= self.safe_bytes for size in sizes)
        return message

    def send(self, packed: Any) -> None:  # noqa: D102
        try:
            self.send_message(packed)
        except (EOFError, OSError) as error:
            raise HostDied from error
        self._unread.append(packed.nbytes + _OVERHEAD)

    def receive(self) -> Reply:  # noqa: D102
        try:
            message = self.inbox.popleft() if self.inbox else self.read_message()
        except (EOFError, OSError) as error:
            raise HostDied from error
        if message is None:
            return Reply(0)  # commands are numbered from 1, so no call takes this for its reply
        reply = codec.decode_reply(message)
        if message.tag >= codec.PRINTED:
            reply.output = [*reply.output, *self.take_output(is_idle=not self._unread)]
        return reply

    def attach(self, batch: Batch) -> None:  # noqa: D102
        self._batch = batch
        self.number_envs(batch)
        self.notify(batch.layout.part(self.env_ids))

    def number_envs(self, batch: Batch) -> None:
        """Record the ids of the host's envs.

        `attach` calls this, because the ids of sub-envs are unknown until there is a batch.
        """
        self.env_ids = batch.layout.ids_of(self.items)

    def read_message(self) -> Message | None:
        """Return the next reply without decoding it. See `receive_message` for ``None`` and errors."""
        message = self.receive_message()
        if message is not None and self._unread:  # empty if the host could not read a message that is not a command
            self._unread.popleft()
        return message

    def plain_step(self, command: Command) -> Message | None:
        """Return the message for a step, without a command number; ``None`` if the message must contain a pickle.

        If the host shares the batch and only some of its envs step, this subset gets a number first.
        """
        if command.env_ids is not self.env_ids and self._batch is None:
            self.name_subset(command.env_ids)
        message: Message = self.pack(command)
        return None if message.frames or message.tag not in codec.PLAIN_STEPS else message

    def name_subset(self, env_ids: tuple[int, ...]) -> None:
        """Assign a number to this subset of envs and send both to the host. Step messages then contain the number.

        Do nothing if the subset already has a number, or if `codec.MOST_SUBSETS` subsets have one.
        """
        if env_ids not in self._subsets and len(self._subsets) < codec.MOST_SUBSETS:
            number = len(self._subsets) + 1
            with DeferSignals():
                self.notify(StepSubset(number, env_ids))
                self._subsets[env_ids] = number

    def notify(self, anything: object) -> None:
        """Send an object that gets no reply, such as a `PackedSpec`.

        If the host is dead, this method does not raise; the next command reports the death.
        """
        message = codec.encode(anything)
        if self._unread:
            self._unread[-1] += message.nbytes + _OVERHEAD
        with Ignore(OSError):
            self.send_message(message)


class MessageStep:
    """A `RepeatedStep` that sends one small message to each host and receives one small message back.

    Args:
        parts: Pairs of a channel and the result of its `MessageChannel.plain_step`.
        wait: `Backend.wait`.
    """

    def __init__(self, parts: Sequence[tuple[MessageChannel, Message]], wait: Callable[..., Sequence[Any]]) -> None:
        self._parts = parts
        self._wait = wait
        self._shield = DeferSignals()  # no message may be written or read twice
        self._number = 0
        self._pending: dict[MessageChannel, int] = {}  # place in `parts` of each channel without a reply
        self._done: list[int] = []  # places of the channels whose reply was read and is only `DONE`

    def send(self, number: int) -> None:  # noqa: D102 (see RepeatedStep)
        with self._shield:
            self._send(number)

    def _send(self, number: int) -> None:
        """Send all messages; if a host has died, its channel reports this at the next wait."""
        self._number, self._done = number, []
        self._pending = {channel: place for place, (channel, _) in enumerate(self._parts)}
        for channel, (tag, _, _, subset) in self._parts:
            with contextlib.suppress(HostDied):
                channel.send(Message(tag, number, (), subset))
            number += 1

    def wait(self, timeout: float) -> bool:  # noqa: D102 (see RepeatedStep)
        pending, deadline = self._pending, time.monotonic() + timeout
        while pending:
            ready = self._wait(list(pending), max(0.0, deadline - time.monotonic()), len(pending))
            with self._shield:
                if not ready or not all(map(self._read, ready)):
                    return False
        return True

    def _read(self, channel: MessageChannel) -> bool:
        """Read a channel's reply, if there is one; return whether the reply is only `DONE`."""
        if channel.inbox or channel not in self._pending:
            return False
        try:
            message = channel.read_message()
        except (EOFError, OSError):  # the host has died
            return False
        if message is None:
            return False
        place = self._pending.pop(channel)
        if message.tag == DONE:
            self._done.append(place)
        else:
            channel.inbox.append(message)
        return message.tag == DONE

    def leave_to_channels(self, number: int) -> None:  # noqa: D102 (see RepeatedStep)
        if self._number != number:  # interrupted before the step was sent
            self._send(number)
        for place in self._done:
            self._parts[place][0].inbox.append(Message(DONE, number + place))
