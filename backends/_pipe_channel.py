"""The caller's end of a pipe to a host in another process on this machine."""

from __future__ import annotations

import contextlib
from multiprocessing import reduction
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any

from parallelenv.backends._process import UNKNOWN, process_exists
from parallelenv.backends._shared_memory import BatchAccess, SharedMemory
from parallelenv.backends._wire import Wire
from parallelenv.contract.batch import Batch
from parallelenv.contract.codec import Message, encode_reply
from parallelenv.contract.interrupts import DeferSigint
from parallelenv.contract.message_channel import MessageChannel
from parallelenv.contract.protocol import Death, Printed, Reply
from parallelenv.worker.worker_log import WorkerLog

if TYPE_CHECKING:
    from parallelenv.backends._channel_group import ChannelGroup

_NO_COMMAND = 0
"""A number that no command has, because commands are numbered from 1."""


class PipeChannel(MessageChannel):
    """A channel over a pipe to a host in another process. Both processes share the memory of the batch.

    Args:
        group: The group that the channel belongs to.
        process: The host's process: a `WorkerProcess`, or an object with the same methods.
        pipe: The caller's end of the pipe.
        log: The file to which the host's process prints.
        env_ids: See `MessageChannel`.

    Attributes:
        is_closed: Whether the channel's resources have been released because the host was killed or handed over.
        found_dead: Whether `is_alive` has found that the process has ended.
    """

    def __init__(
        self, group: ChannelGroup, process: Any, pipe: Connection, log: WorkerLog, env_ids: tuple[int, ...]
    ) -> None:
        super().__init__(env_ids)
        self.process = process
        self.wire = Wire(pipe)
        self.fileno = self.wire.fileno
        self.is_closed = False
        self.found_dead = False
        self._log = log
        self._group = group
        group.watch(self)

    def connect_bell(self) -> None:
        """Do nothing; in a subclass with a bell, this method gives a new host access to the bell."""

    def send_message(self, message: Message) -> None:
        self.wire.send(message)
        self._group.awaits_first = True

    def receive_message(self) -> Message:
        if self.found_dead and not self.wire.connection.poll(0):  # a child process of an env keeps the pipe open
            raise EOFError
        return self.wire.receive()

    def advance(self) -> bool:
        """Return whether there is a reply to receive.

        Unlike `CallerChannel.advance`, this method executes no command.
        """
        return bool(self.inbox)

    def take_output(self, *, is_idle: bool) -> list[Printed]:
        """Return what the host's process has printed since the last call.

        Unless the host is idle, an unfinished last line is left for the next call.
        """
        return self._log.take_output(self.env_ids, is_idle=is_idle)

    def receive_output(self) -> bool:
        """If a busy host has printed anything, add the text to the inbox, in the form of a reply.

        Return whether it has printed anything.
        """
        output = self.take_output(is_idle=False)
        if output:
            self.inbox.append(encode_reply(Reply(_NO_COMMAND, output=output)))
        return bool(output)

    def attach(self, batch: Batch) -> None:
        self.number_envs(batch)
        memory: SharedMemory = batch.owner
        # An interrupt between the two messages would make the host wait forever for the announced memory. An OSError
        # means that the host has died, which its next command reports.
        with contextlib.suppress(OSError), DeferSigint():
            self.notify(BatchAccess(batch.layout))
            memory.send(self.wire.connection, self.process.pid)

    def cause_of_death(self) -> Death:
        self.process.join(timeout=1.0)
        code = self.process.exitcode
        words = self.process.last_words(), self._log.last_lines()
        return Death(self.process.pid, None if code == UNKNOWN else code, *words)

    def is_alive(self) -> bool:
        """Return whether the host's process is running.

        If a fork server has ended, ``process.is_alive()`` is ``False`` for all of its workers, even if they are
        running. This method then asks the operating system.
        """
        try:
            if self.process.is_alive():
                return True
        except ValueError:  # another thread has closed the process object in the meantime
            return False
        self.found_dead = self.process.exitcode != UNKNOWN or not process_exists(self.process.pid)
        return not self.found_dead

    def join(self, timeout: float) -> None:
        """Wait until the process ends or another thread closes this channel, but at most ``timeout`` seconds."""
        with contextlib.suppress(ValueError):
            self.process.join(timeout)

    def hand_over(self, connection: Connection, pid: int) -> object:
        """Give the host to another process, and return an object that keeps the host alive.

        That process makes a new channel from the three descriptors that this method sends: those of the pipe,
        of the log, and of the connection that reports the exit code.

        Args:
            connection: A connection to that process.
            pid: Id of that process.
        """
        for fileno in (self.fileno, self._log.fileno):
            reduction.send_handle(connection, fileno, pid)
        life = self.process.hand_over(connection, pid)
        self.hang_up()
        self._log.close()
        self.is_closed = True
        return life

    def hang_up(self) -> None:
        """Close the caller's end of the pipe, which makes the host exit."""
        with DeferSigint():
            if not self.wire.connection.closed:
                self._group.unwatch(self)
                self.wire.connection.close()

    def kill(self) -> None:
        if self.is_closed:
            return
        self.hang_up()
        with contextlib.suppress(ValueError):  # another thread has closed the process object in the meantime
            if self.is_alive():
                self.process.kill()
            self.process.join()
            self.process.close()
        with DeferSigint():  # `is_closed` is set last, because an interrupted `kill` is called again
            self._log.close()
            self.is_closed = True
