"""The caller's end of a connection that carries messages to a host, whatever the transport."""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections import deque
from typing import Any

from parallelenv.contract.batch import Batch
from parallelenv.contract.codec import PRINTED, Message, decode_reply, encode, encode_command
from parallelenv.contract.protocol import Command, Death, HostDied, Printed, Reply


class MessageChannel(ABC):
    """A `Channel` whose host is reached by messages. A subclass adds the transport.

    The host is at the other end of the transport, in `parallelenv.worker.worker_loop.serve` or a `MessageHost`. Action
    and result rows travel in the messages, unless a subclass overrides `attach` for a host that shares the batch.

    Args:
        env_ids: The envs of the host.

    Attributes:
        env_ids: As given.
        inbox: Messages that were read before `receive` was called: if there are any, it returns at once.
        safe_bytes: Size of the largest message that can be sent while the host is sending a reply that nothing reads.
            The default is what a pipe holds.
    """

    in_caller = False
    safe_bytes: float = 65536

    def __init__(self, env_ids: tuple[int, ...]) -> None:
        self.env_ids = env_ids
        self.inbox: deque[Message] = deque()
        self._batch: Batch | None = None  # if its rows travel
        self._num_unread = 0

    # ---------------------------------------------------------------- for subclasses

    @abstractmethod
    def send_message(self, message: Message) -> None:
        """Send a message: three items that can be pickled, or `Message.to_bytes`.

        Raises:
            OSError: If the other end is gone.
        """

    @abstractmethod
    def receive_message(self) -> Message:
        """Wait for the next message and return it.

        Raises:
            EOFError, OSError: If the other end is gone and nothing is left to read.
        """

    @abstractmethod
    def cause_of_death(self) -> Death:
        """See `Channel`."""

    @abstractmethod
    def kill(self) -> None:
        """See `Channel`."""

    def take_output(self, *, is_idle: bool) -> list[Printed]:
        """Return what the envs printed since the last call, if the host writes it to a place that is read here.

        Args:
            is_idle: Whether the host has no command: its last line is then complete.
        """
        return []

    # ---------------------------------------------------------------- see `Channel`

    def pack(self, command: Command) -> Any:  # noqa: D102
        if self._batch is not None and command.reads_actions:
            command.rows = self._batch.take_actions(command.env_ids)
        return encode_command(command, self.env_ids)

    def send(self, packed: Any) -> None:  # noqa: D102
        try:
            # Two ends that both send more than the transport holds would wait for each other for good.
            if self._num_unread and packed.frames and packed.nbytes > self.safe_bytes:
                while self._num_unread:
                    self.inbox.append(self.receive_message())
                    self._num_unread -= 1
            self.send_message(packed)
        except (EOFError, OSError) as error:
            raise HostDied from error
        self._num_unread += 1

    def receive(self) -> Reply:  # noqa: D102
        if self.inbox:
            message = self.inbox.popleft()
        else:
            try:
                message = self.receive_message()
            except (EOFError, OSError) as error:
                raise HostDied from error
            self._num_unread -= 1
        reply = decode_reply(message)
        if message.tag >= PRINTED:
            reply.output = [*reply.output, *self.take_output(is_idle=not self._num_unread)]
        return reply

    def attach(self, batch: Batch) -> None:  # noqa: D102
        self._batch = batch
        self.notify(batch.layout.part(self.env_ids))

    def notify(self, anything: Any) -> None:
        """Send an object that has no reply, such as the host's `PackedSpec`, before its first command.

        If the host has died, its next command reports it.
        """
        with contextlib.suppress(OSError):
            self.send_message(encode(anything))
