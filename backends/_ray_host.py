"""A host in a Ray actor, reached by Ray's calls or by a socket."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from typing import Any

from parallelenv.backends._codec import decode, decode_command, encode_not_read, encode_reply
from parallelenv.backends._parent_death import Address, death_descriptor
from parallelenv.backends._ray_local import connect_to_caller
from parallelenv.backends._wire import Message, Wire
from parallelenv.backends._worker_process import PackedSpec, die_with_caller, obey, prepare_worker
from parallelenv.contract.batch import Array, Batch, Layout
from parallelenv.contract.protocol import Command, Printed, Reply, UnreadableError, WorkerSpec
from parallelenv.contract.shared_arrays import frozen
from parallelenv.worker.host import Host
from parallelenv.worker.worker_log import WorkerLog, redirect_streams


class RayHost:
    """A host in a Ray actor. It has its own batch; commands and replies contain the rows.

    Args:
        message: The `PackedSpec`, encoded, as the items of a `Message`.
        caller: The items of the `Address` by which to detect the caller's death, sooner than Ray does, which takes 1.4
            to 2.6 s.
        shared: Read-only arrays for the envs, in Ray's object store.
    """

    def __init__(self, message: tuple[Any, ...], caller: tuple[Any, ...] | None, shared: Mapping[str, Array]) -> None:
        # Raises if the caller has died or given up meanwhile: Ray may start the actor nevertheless.
        self._lifeline = death_descriptor(None if caller is None else Address(*caller))
        if self._lifeline is not None:
            die_with_caller(self._lifeline)
        self._packed: PackedSpec = decode(Message(*message))
        prepare_worker(self._packed)
        self._host = self._make_host(self._packed.unpack(frozen(shared)))
        self._log = WorkerLog.create()
        if self._log is not None:
            # Only Python's own output: that of C code goes to Ray's log files.
            redirect_streams(self._log, lambda: self._host.current, (self._log.fileno, self._log.fileno))
        self._batch: Batch | None = None

    def _make_host(self, spec: WorkerSpec) -> Any:
        return Host(spec)

    def _make_batch(self, layout: Layout) -> Batch:
        batch = Batch.private(layout)
        self._host.attach(batch)
        return batch

    def _obey(self, wire: Wire, log: WorkerLog) -> None:
        obey(wire, self._host, self._packed, log)

    def introduce(self) -> tuple[int, bool]:
        """Return the id of the actor's process, and whether it can detect the caller's death."""
        return os.getpid(), self._lifeline is not None

    def serve(self, path: str) -> None:
        """Execute commands over a socket on this machine, without Ray, until the caller closes it.

        Raises:
            OSError: If the socket cannot be reached; this host can still be called.
        """
        connection, log = connect_to_caller(path)
        redirect_streams(log, lambda: self._host.current, (log.fileno, log.fileno))
        with contextlib.suppress(EOFError, OSError):  # the caller closed it or died
            self._obey(Wire(connection), log)

    def attach(self, message: Message) -> None:
        """Make the batch of this host's envs."""
        self._batch = self._make_batch(decode(message))

    def execute(self, message: Message, content: Array | None = None) -> Message:
        """Execute a command and return the reply.

        Args:
            message: The command.
            content: The content of its `Broadcast`, from Ray's object store.
        """
        try:
            command: Command = decode_command(message, self._packed.env_ids)
        except UnreadableError as error:
            return encode_not_read(error)
        if command.rows is not None and self._batch is not None:
            self._batch.put_actions(command.env_ids, command.rows)
            command.rows = None
        if content is not None:
            command.common.packed = content
        reply: Reply = self._host.execute(command)
        if command.writes_rows and self._batch is not None:
            reply.rows = self._batch.take_results(command.env_ids)
        if self._log is not None:
            reply.output = [*reply.output, *self._log.take(self._packed.env_ids, is_idle=True)]
        return encode_reply(reply)

    def close(self) -> list[Printed]:
        """Close the envs; return what they print meanwhile."""
        self._host.close()
        return [] if self._log is None else self._log.take(self._packed.env_ids, is_idle=True)
