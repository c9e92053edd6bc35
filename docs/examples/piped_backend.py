"""A complete backend: each host runs in its own process, which a command line starts.

The command line decides where the process runs, for example in a container, or on a cluster with ``["srun", ...]``. The
process must inherit the pipe.
"""

import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection, Pipe, wait
from typing import Any

from parallelenv.contract.batch import Array, Batch, Layout, copied
from parallelenv.contract.codec import Message
from parallelenv.contract.message_channel import MessageChannel
from parallelenv.contract.packed_worker_spec import PackedSpec
from parallelenv.contract.protocol import Backend, Channel, Death, Printed, WorkerSpec
from parallelenv.worker.worker_loop import serve


class PipedChannel(MessageChannel):
    """The caller's end of a pipe to one host."""

    def __init__(self, env_ids: tuple[int, ...]) -> None:
        super().__init__(env_ids)
        self.pipe, theirs = Pipe()
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, __file__, str(theirs.fileno())],
                stdin=subprocess.PIPE,  # stays open as long as the caller is alive
                pass_fds=[theirs.fileno()],
                start_new_session=True,  # Ctrl-C interrupts only the caller
            )

    def send_message(self, message: Message) -> None:
        self.pipe.send_bytes(message.to_bytes())

    def receive_message(self) -> Message:
        return Message.from_bytes(self.pipe.recv_bytes())

    def cause_of_death(self) -> Death:
        self.kill(timeout=1.0)
        return Death(self.process.pid, self.process.returncode)

    def kill(self, timeout: float = 0.0) -> None:
        """Ask the host to exit, and kill the process if it is alive after ``timeout`` seconds. May be called again."""
        self.pipe.close()
        with self.process:
            try:
                self.process.wait(timeout)
            except subprocess.TimeoutExpired:
                self.process.kill()


class PipedBackend(Backend):
    """Starts one process per usable core. Each process steps several envs."""

    def __init__(self) -> None:
        self._started: list[PipedChannel] = []

    def share(self, arrays: Mapping[str, Array]) -> Mapping[str, Array]:
        return copied(arrays)

    def launch(self, specs: Sequence[WorkerSpec]) -> list[Channel]:
        packed = PackedSpec.pack(specs)  # before any process is started
        for spec in specs:
            self._started.append(PipedChannel(spec.env_ids))
        channels = self._started[-len(specs) :]
        for channel, message in zip(channels, packed, strict=True):  # all hosts start at the same time
            channel.notify(message)
        return list(channels)

    def allocate(self, layout: Layout) -> Batch:
        return Batch.private(layout)

    def wait(self, channels: Sequence[Any], timeout: float | None, wanted: int = 1) -> Sequence[Any]:
        pipes = {channel.pipe: channel for channel in channels}
        return [one for one in channels if one.inbox] or [pipes[pipe] for pipe in wait(pipes, timeout)]

    def close(self, channels: Sequence[Any], timeout: float) -> Sequence[Printed]:
        for channel in self._started:
            channel.pipe.close()  # close all pipes first, so that each host has the full time to exit
        deadline = time.monotonic() + timeout
        for channel in self._started:
            channel.kill(max(0.0, deadline - time.monotonic()))
        self._started.clear()
        return ()


if __name__ == "__main__":
    pipe = Connection(int(sys.argv[1]))
    serve(lambda: Message.from_bytes(pipe.recv_bytes()), lambda m: pipe.send_bytes(m.to_bytes()), sys.stdin.fileno())
