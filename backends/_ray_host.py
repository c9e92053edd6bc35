"""A host in a Ray actor, reached by Ray's calls or by a socket."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from typing import Any

from parallelenv.backends._parent_death import Address, death_descriptor
from parallelenv.backends._ray_local import connect_to_caller
from parallelenv.backends._wire import Wire
from parallelenv.backends._worker_process import SPIN, PipeHost
from parallelenv.contract.batch import Array, frozen
from parallelenv.contract.codec import Message, decode
from parallelenv.contract.packed_worker_spec import PackedSpec
from parallelenv.contract.protocol import Command, Printed, Reply, WorkerSpec
from parallelenv.worker.host import Host
from parallelenv.worker.worker_log import WorkerLog, redirect_streams
from parallelenv.worker.worker_loop import MessageHost, die_with_caller, prepare_worker


class RayHost(MessageHost):
    """A host in a Ray actor.

    Args:
        message: The `PackedSpec`, encoded, as the items of a `Message`.
        caller: The items of the `Address` by which to detect the caller's death, sooner than Ray does, which takes 1.4
            to 2.6 s.
        shared: Read-only arrays for the envs, in Ray's object store.
    """

    pipe_host_class = PipeHost

    def __init__(self, message: tuple[Any, ...], caller: tuple[Any, ...] | None, shared: Mapping[str, Array]) -> None:
        # Raises if the caller has died or given up meanwhile: Ray may start the actor nevertheless.
        self._lifeline = death_descriptor(None if caller is None else Address(*caller))
        if self._lifeline is not None:
            die_with_caller(self._lifeline)
        packed: PackedSpec = decode(Message(*message))
        prepare_worker(packed)
        super().__init__(self._make_host(packed.unpack(frozen(shared))), packed)
        self._log = WorkerLog.create()
        if self._log is not None:
            # Only Python's own output: that of C code goes to Ray's log files.
            redirect_streams(lambda: self.host.current, (self._log.fileno, self._log.fileno))
        self._content: Array | None = None

    def _make_host(self, spec: WorkerSpec) -> Any:
        return Host(spec)

    def introduce(self) -> tuple[int, bool]:
        """Return the id of the actor's process, and whether it can detect the caller's death."""
        return os.getpid(), self._lifeline is not None

    def serve(self, path: str) -> None:
        """Execute commands over a socket on this machine, without Ray, until the caller closes it.

        Raises:
            OSError: If the socket cannot be reached; this host can still be called.
        """
        connection, log = connect_to_caller(path)
        redirect_streams(lambda: self.host.current, (log.fileno, log.fileno))
        with contextlib.suppress(EOFError, OSError):  # the caller closed it or died
            wire = Wire(connection, SPIN)
            host = self.pipe_host_class(self.host, self.packed, wire, log)
            host.obey(host.receive, host.send)

    def execute(self, message: Message, content: Array | None = None) -> Message | None:
        """Execute the command in a message; return the reply, or ``None`` if it was no command.

        Args:
            message: The message.
            content: The content of the command's `Broadcast`, from Ray's object store.
        """
        self._content = content
        return super().execute(message)

    def decode(self, message: Message) -> Command | Message | None:
        """Return the command in a message, with the content of its `Broadcast`."""
        command = super().decode(message)
        if isinstance(command, Command) and self._content is not None:
            command.common.packed = self._content
        return command

    def encode(self, reply: Reply) -> Message:
        """Return a reply as a message, with what was printed meanwhile."""
        reply.output = [*reply.output, *self._take_output()]
        return super().encode(reply)

    def close(self) -> list[Printed]:
        """Close the envs; return what they print meanwhile."""
        self.host.close()
        return self._take_output()

    def _take_output(self) -> list[Printed]:
        return [] if self._log is None else self._log.take(self.packed.env_ids, is_idle=True)
