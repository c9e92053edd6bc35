"""The code of a worker process that is connected to the caller by a pipe."""

from __future__ import annotations

import contextlib
import multiprocessing
import signal
import sys
from multiprocessing.connection import Connection
from typing import Any

from parallelenv.backends._bell import LOOK, SPIN, BellAccess, BellEnd
from parallelenv.backends._pipe import Wire, receive_descriptors
from parallelenv.backends._shared_memory import BatchAccess, SharedArrays, SharedMemory
from parallelenv.contract.batch import Batch
from parallelenv.contract.codec import DONE, PLAIN_STEPS, PRINTED, Message, decode, encode_reply
from parallelenv.contract.packed_worker_spec import PackedSpec
from parallelenv.contract.protocol import Command, Reply
from parallelenv.worker.host import Host
from parallelenv.worker.running_command import RunningCommand
from parallelenv.worker.worker_log import WorkerLog, redirect_descriptors, redirect_streams
from parallelenv.worker.worker_loop import MessageHost, die_with_caller, prepare_worker


class PipeHost(MessageHost):
    """A host that gets its commands over a pipe or by the bell (see `_bell`)."""

    def __init__(self, host: Host, packed: PackedSpec, wire: Wire, log: WorkerLog) -> None:
        super().__init__(host, packed)
        self.wire = wire
        self._log = log
        self._bell: BellEnd | None = None
        self._is_woken = False  # whether the current command came by the bell
        self._prepared: dict[tuple[object, ...], RunningCommand] = {}  # by tag and subset

    def obey(self, receive: Any, send: Any) -> None:
        # This method itself executes plain steps, to save function calls: there are only three calls from here to the
        # ``step`` of an env.
        try:
            while True:
                message = receive()
                if message.tag not in PLAIN_STEPS:
                    reply = self.execute(message)
                    if reply is not None:
                        send(reply)
                    continue
                prepared = self._prepared.get(message[::3]) or self._prepare(message)
                if prepared is None:
                    send(self.execute(message))
                    continue
                prepared.command.number = message.number
                result = self.host.repeat(prepared)
                has_printed = self._log.has_grown()
                if result.values or result.failures or result.output or has_printed:
                    send(_marked(encode_reply(result), has_printed))
                elif self._is_woken:
                    self._bell.finish(has_message=False)  # type: ignore[union-attr]
                else:
                    self.wire.send(Message(DONE, message.number))
        finally:
            self.host.close()

    def _prepare(self, message: Message) -> RunningCommand | None:
        """Return the prepared form of a plain step and keep it for later steps with the same tag and subset."""
        while message.subset >= len(self.subsets):  # the pipe contains a `StepSubset` that was not read yet
            self.decode(self.wire.receive())
        command: Any = self.decode(message)
        prepared: RunningCommand | None = self.host.prepare(command)
        if prepared is not None:
            self._prepared[message[::3]] = prepared
        return prepared

    def receive(self) -> Message:
        bell, self._is_woken = self._bell, False
        while bell is not None:
            message = bell.wait()
            if message is not None:
                self._is_woken = True
                return message
            message = self.wire.receive()
            if message.tag != LOOK.tag:
                return message
        return self.wire.receive()

    def send(self, message: Message) -> None:
        # If the command came by the bell, `BellEnd.finish` reports the end of the step, so a reply that is merely
        # `DONE` is not sent over the pipe.
        has_message = not self._is_woken or message.tag != DONE
        if has_message:
            self.wire.send(message)
        if self._is_woken and self._bell is not None:
            self._bell.finish(has_message=has_message)

    def decode(self, message: Message) -> Command | Message | None:
        command: object = super().decode(message)
        if isinstance(command, BellAccess):
            fileno, *others = receive_descriptors(self.wire.connection, 4)
            self._bell = BellEnd(command.line, SharedMemory(fileno, command.nbytes), others, self.wire.fileno)
        elif isinstance(command, BatchAccess):
            (fileno,) = receive_descriptors(self.wire.connection, 1)
            memory = SharedMemory(fileno, command.layout.nbytes)
            self._prepared.clear()
            self.use(Batch(command.layout, memory.map, owner=memory))
        else:
            return command  # type: ignore[return-value]
        return None

    def encode(self, reply: Reply) -> Message:
        return _marked(encode_reply(reply), self._log.has_grown())


def _marked(message: Message, has_printed: bool) -> Message:
    return Message(message.tag | PRINTED, message.number, message.frames) if has_printed else message


def serve(connection: Connection, log: WorkerLog, sentinel: Connection | None = None) -> None:
    """Run the host of this worker process until the caller closes the pipe (``connection``) or dies.

    ``sentinel`` becomes readable when the caller dies. If it is ``None``, the sentinel of `multiprocessing` is used.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; it is meant for the caller
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})  # was blocked while this process was being started
    redirect_descriptors(log)
    parent: Any = multiprocessing.parent_process()
    wire = Wire(connection, SPIN)
    # The caller closed the pipe or died. Other errors, such as a lack of descriptors, go to the log with a traceback.
    with contextlib.suppress(EOFError, ConnectionError):
        packed: PackedSpec = decode(wire.receive())
        # Not earlier: `multiprocessing` sends the process object through the pipe that is watched here, and the system
        # treats a write to the pipe like the death of the caller. If the caller was suspended during that write, the
        # write could kill the new worker.
        try:
            # The sentinel shows the caller's death with any start method. The parent's process id and PR_SET_PDEATHSIG
            # would refer to the fork server if there is one.
            die_with_caller(parent.sentinel if sentinel is None else sentinel.fileno())
        except RuntimeError as error:
            sys.exit(
                f"A worker could not start a thread ({error}). Raise the limit on processes (ulimit -u) or memory."
            )
        shared = SharedArrays.open(receive_descriptors(connection, 1)[0], packed.shared) if packed.shared else {}
        host = Host(packed.unpack(shared))
        redirect_streams(lambda: host.current, (1, 2))
        prepare_worker(packed)
        pipe_host = PipeHost(host, packed, wire, log)
        pipe_host.obey(pipe_host.receive, pipe_host.send)
