"""The caller's end of a connection that carries messages to a host, whatever the transport."""

from __future__ import annotations

import contextlib
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from parallelenv.contract import codec
from parallelenv.contract.batch import Batch
from parallelenv.contract.codec import DONE, Message, StepSubset
from parallelenv.contract.interrupts import DeferSigint
from parallelenv.contract.protocol import Command, Death, HostDied, Printed, Reply


class MessageChannel(ABC):
    """A `Channel` that reaches its host through messages. A subclass adds the transport.

    The host is at the other end of the transport, in `parallelenv.worker.worker_loop.serve` or a `MessageHost`. Action
    and result rows travel in the messages, unless a subclass overrides `attach` for a host that shares the batch.

    Attributes:
        items: Which items in the user's list the host has.
        env_ids: Ids of the host's envs: the same numbers, unless there are vector envs.
        inbox: Messages that were read before `receive` was called; if there are any, `receive` returns at once.
        safe_bytes: Size of the largest message that can be sent while the host is sending a reply that nothing reads.
            The default is the capacity of a pipe.
    """

    in_caller = False
    safe_bytes: float = 65536

    def __init__(self, env_ids: tuple[int, ...]) -> None:
        self.items = self.env_ids = env_ids
        self.inbox: deque[Message] = deque()
        self._batch: Batch | None = None  # if its rows travel
        self._num_unread = 0
        self._subsets: dict[tuple[int, ...], int] = {}  # by envs: its number, see `StepSubset`
        self._latest_subsets: deque[tuple[int, ...]] = deque(maxlen=8)  # of those without a number

    # ---------------------------------------------------------------- for subclasses

    @abstractmethod
    def send_message(self, message: Message) -> None:
        """Send a message, pickled or in the form of `Message.to_bytes`; raise an `OSError` if the other end is gone."""

    @abstractmethod
    def receive_message(self) -> Message:
        """Wait for the next message and return it; raise `EOFError` or `OSError` if the other end is gone."""

    @abstractmethod
    def cause_of_death(self) -> Death:
        """See `Channel`."""

    @abstractmethod
    def kill(self) -> None:
        """See `Channel`."""

    def take_output(self, *, is_idle: bool) -> list[Printed]:
        """Return what the envs printed since the last call, if the host writes it to a place that the caller can read.

        ``is_idle`` tells whether the host has no command; its last line is then complete.
        """
        return []

    # ---------------------------------------------------------------- see `Channel`

    def pack(self, command: Command) -> Any:  # noqa: D102
        if self._batch is not None and command.reads_actions:
            command.rows = self._batch.take_actions(command.env_ids)
        is_subset = command.operation == "step" and command.env_ids is not self.env_ids
        if is_subset and self._batch is None and command.env_ids not in self._subsets:
            if command.env_ids in self._latest_subsets:  # halves take turns
                self.name_subset(command.env_ids)
            self._latest_subsets.append(command.env_ids)
        return codec.encode_command(command, self.env_ids, self._subsets)

    def send(self, packed: Any) -> None:  # noqa: D102
        try:
            # If both ends sent more than the transport holds, they would wait for each other forever.
            if self._num_unread and packed.frames and packed.nbytes > self.safe_bytes:
                while self._num_unread:
                    self.inbox.append(self.read_message())
            self.send_message(packed)
        except (EOFError, OSError) as error:
            raise HostDied from error
        self._num_unread += 1

    def receive(self) -> Reply:  # noqa: D102
        try:
            message = self.inbox.popleft() if self.inbox else self.read_message()
        except (EOFError, OSError) as error:
            raise HostDied from error
        reply = codec.decode_reply(message)
        if message.tag >= codec.PRINTED:
            reply.output = [*reply.output, *self.take_output(is_idle=not self._num_unread)]
        return reply

    def attach(self, batch: Batch) -> None:  # noqa: D102
        self._batch = batch
        self.number_envs(batch)
        self.notify(batch.layout.part(self.env_ids))

    def number_envs(self, batch: Batch) -> None:
        """Record the ids of the host's envs. `attach` does this first: those of vector envs are known only then."""
        self.env_ids = batch.layout.ids_of(self.items)

    def read_message(self) -> Message:
        """Return the next reply without decoding it. See `receive_message` for errors."""
        message = self.receive_message()
        self._num_unread -= 1
        return message

    def plain_step(self, command: Command) -> Message | None:
        """Name the subset of a step, and return the step's message without a number; ``None`` if it needs a pickle."""
        if command.env_ids is not self.env_ids and self._batch is None:
            self.name_subset(command.env_ids)
        message: Message = self.pack(command)
        return None if message.frames or message.tag not in codec.PLAIN_STEPS else message

    def name_subset(self, env_ids: tuple[int, ...]) -> None:
        """Assign one number to this group of envs, which represents it in step messages.

        Do nothing if the host already stores too many such numbers.
        """
        if env_ids not in self._subsets and len(self._subsets) < codec.MOST_SUBSETS:
            number = len(self._subsets) + 1
            with DeferSigint():
                self.notify(StepSubset(number, env_ids))
                self._subsets[env_ids] = number

    def notify(self, anything: object) -> None:
        """Send an object that gets no reply, such as the host's `PackedSpec`; the next command reports a dead host."""
        with contextlib.suppress(OSError):
            self.send_message(codec.encode(anything))


class MessageStep:
    """A `RepeatedStep` that sends one small message to each host and receives one small message back.

    Args:
        parts: Pairs of a channel and the result of its `MessageChannel.plain_step`.
        wait: `Backend.wait`.
    """

    def __init__(self, parts: Sequence[tuple[MessageChannel, Message]], wait: Callable[..., Sequence[Any]]) -> None:
        self._parts = parts
        self._wait = wait
        self._shield = DeferSigint()  # a message that was written or read cannot be written or read again
        self._number = 0
        self._pending: dict[MessageChannel, int] = {}  # place of each channel without a reply
        self._done: list[int] = []  # places of the channels whose reply was read and only reports the end of the step

    def send(self, number: int) -> None:  # noqa: D102 (see RepeatedStep)
        with self._shield:
            self._send(number)

    def _send(self, number: int) -> None:
        """Send all messages; a channel whose host has died reports that at the next wait."""
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
        """Read a reply; return whether it only reports the end of the step."""
        if channel.inbox or channel not in self._pending:
            return False
        try:
            message = channel.read_message()
        except (EOFError, OSError):  # the host has died
            return False
        place = self._pending.pop(channel)
        if message.tag == DONE:
            self._done.append(place)
        else:
            channel.inbox.append(message)
        return message.tag == DONE

    def leave_to_channels(self, number: int) -> None:  # noqa: D102 (see RepeatedStep)
        if self._number != number:  # interrupted before it was sent
            self._send(number)
        for place in self._done:
            self._parts[place][0].inbox.append(Message(DONE, number + place))
