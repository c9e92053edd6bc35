"""A whole backend: each host in a process of its own, which a command line starts.

Where that process runs is a matter of the command line alone: ``[sys.executable, ...]`` here, ``["srun", ...]`` or
a container's there, as long as the pipe arrives. Nothing is shared with it, so rows travel with the messages.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import multiprocessing.connection
import os
import subprocess
import sys
import time
from collections import deque
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection
from typing import Any

from parallelenv.backends._codec import (
    decode,
    decode_command,
    decode_reply,
    encode,
    encode_command,
    encode_not_read,
    encode_reply,
)
from parallelenv.backends._wire import Message, Wire
from parallelenv.backends._worker_process import PackedSpec, die_with_caller, package_version, prepare_worker
from parallelenv.contract.batch import Array, Batch, Layout
from parallelenv.contract.cpu_cores import usable_cores
from parallelenv.contract.env_specs import registered_by_user
from parallelenv.contract.protocol import (
    Channel,
    Command,
    Death,
    HostDied,
    Placement,
    Printed,
    Reply,
    UnreadableError,
    WorkerSpec,
)
from parallelenv.contract.shared_arrays import copied, frozen
from parallelenv.worker.host import Host

_SAFE_BYTES = 65536  # a pipe takes so much without being read


# -------------------------------------------------------------------- in the worker


def serve(fileno: int) -> None:
    """Run a host until the caller closes the pipe."""
    die_with_caller(sys.stdin.fileno())  # a pipe too: the caller holds its other end as long as it lives
    wire = Wire(Connection(fileno))
    packed, shared = decode(wire.receive())
    prepare_worker(packed)  # environment variables, module path, registered ids: as in the caller
    host = Host(packed.unpack(frozen(shared)))
    batch = None
    with contextlib.suppress(EOFError, OSError), contextlib.closing(host):
        while True:
            try:
                command = decode_command(wire.receive(), packed.env_ids)
            except UnreadableError as error:
                wire.send(encode_not_read(error))
                continue
            if isinstance(command, Layout):
                batch = Batch.private(command)
                host.attach(batch)
            else:
                wire.send(encode_reply(execute(host, batch, command)))


def execute(host: Host, batch: Batch | None, command: Command) -> Reply:
    """Execute a command; its rows go into the host's own batch, and those of the answer into the reply."""
    if batch is not None and command.rows is not None:
        batch.put_actions(command.env_ids, command.rows)
        command.rows = None
    reply = host.execute(command)
    if batch is not None and command.writes_rows:
        reply.rows = batch.take_results(command.env_ids)
    return reply


# -------------------------------------------------------------------- in the caller


class PipedChannel:
    """The caller's end of a pipe to one host."""

    in_caller = False

    def __init__(self, env_ids: tuple[int, ...]) -> None:
        ours, theirs = multiprocessing.Pipe()
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, __file__, str(theirs.fileno())],
                stdin=subprocess.PIPE,
                pass_fds=[theirs.fileno()],
                env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
                start_new_session=True,  # Ctrl-C is meant for the caller
            )
        self.wire = Wire(ours)
        self.inbox: deque[Reply] = deque()
        self._env_ids = env_ids
        self._unanswered = 0
        self._batch: Batch | None = None

    def pack(self, command: Command) -> Message:
        if command.reads_actions and self._batch is not None:
            command.rows = self._batch.take_actions(command.env_ids)
        return encode_command(command, everyone=())

    def send(self, packed: Message) -> None:
        while self._unanswered and packed.nbytes > _SAFE_BYTES:  # else both ends might wait to be read
            self.inbox.append(self._read())
        try:
            self.wire.send(packed)
        except OSError as error:
            raise HostDied from error
        self._unanswered += 1

    def receive(self) -> Reply:
        return self.inbox.popleft() if self.inbox else self._read()

    def _read(self) -> Reply:
        try:
            message = self.wire.receive()
        except (EOFError, OSError) as error:
            raise HostDied from error
        self._unanswered -= 1
        return decode_reply(message)

    def attach(self, batch: Batch) -> None:
        self._batch = batch
        with contextlib.suppress(OSError):  # if it died, the next command says so
            self.wire.send(encode(batch.layout.part(self._env_ids)))

    def cause_of_death(self) -> Death:
        self.end(time.monotonic() + 1.0)
        return Death(self.process.pid, self.process.returncode)

    def kill(self) -> None:
        self.end(time.monotonic())

    def end(self, deadline: float) -> None:
        """Ask the host to end, and end it at the deadline. May be called again."""
        self.wire.connection.close()
        try:
            self.process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        if self.process.stdin is not None:
            self.process.stdin.close()


class PipedBackend:
    """One process per usable core, several envs each."""

    uses_live_envs = False
    placement = ""

    def __init__(self) -> None:
        self._started: list[PipedChannel] = []

    def plan(self, num_envs: int, num_cpus: int | None, num_gpus: float) -> Placement:
        return Placement((1,) * min(num_cpus or usable_cores(), num_envs))

    def share(self, arrays: Mapping[str, Array]) -> Mapping[str, Array]:
        return copied(arrays)

    def launch(self, specs: Sequence[WorkerSpec]) -> list[Channel]:
        registered = registered_by_user()
        packed = [PackedSpec.of(spec, registered, package_version()) for spec in specs]  # before any is started
        channels = []
        for spec in packed:
            channels.append(PipedChannel(spec.env_ids))
            self._started.append(channels[-1])
        for channel, spec in zip(channels, packed, strict=True):  # all are starting: none waits for another
            with contextlib.suppress(OSError):
                channel.wire.send(encode((spec, dict(specs[0].shared))))
        return list(channels)

    def allocate(self, layout: Layout) -> Batch:
        return Batch.private(layout)

    def wait(self, channels: Sequence[Any], timeout: float | None) -> Sequence[Any]:
        if ready := [channel for channel in channels if channel.inbox]:
            return ready
        pipes = {channel.wire.connection: channel for channel in channels}
        return [pipes[pipe] for pipe in multiprocessing.connection.wait(pipes, timeout)]

    def close(self, channels: Sequence[Any], timeout: float) -> Sequence[Printed]:
        started, self._started = self._started, []
        for channel in started:
            channel.wire.connection.close()  # all at once, so that all have the whole time
        deadline = time.monotonic() + timeout
        for channel in started:
            channel.end(deadline)
        return ()


if __name__ == "__main__":
    serve(int(sys.argv[1]))
