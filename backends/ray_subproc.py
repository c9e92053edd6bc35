"""Ray between machines, worker processes and shared memory within each.

One actor per node owns a pool of worker processes for its envs: one Ray message per node and step, however many cores
the node has.
"""

from __future__ import annotations

import functools
import select
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

from parallelenv.backends._eventfd_bell import SPIN
from parallelenv.backends._ray_actors import RayHost
from parallelenv.backends._ray_cluster import cores_of_nodes
from parallelenv.backends._wire import spin
from parallelenv.backends._worker_process import PipeHost
from parallelenv.backends.ray import RayBackend
from parallelenv.backends.subproc import SubprocBackend, check_preload
from parallelenv.contract.batch import Batch, Layout
from parallelenv.contract.codec import Message
from parallelenv.contract.error_text import show
from parallelenv.contract.protocol import Command, Placement, Printed, Reply, WorkerSpec
from parallelenv.engine.tickets import Ticket
from parallelenv.engine.worker_handles import apportion, branches_of
from parallelenv.engine.worker_pool import Pool
from parallelenv.errors import ArgumentError

_HEARTBEAT = 250
"""Milliseconds between checks whether workers live, for deaths that a pipe does not show."""


class PoolHost:
    """A pool in the role of a host: it executes a command by sending it to hosts of its own."""

    def __init__(self, spec: WorkerSpec, preload: Sequence[str]) -> None:
        self.current: int | None = None  # no env runs in this process
        self._printed: list[Printed] = []
        self.under_way: dict[int, Ticket] = {}
        self.pool = Pool(
            SubprocBackend(preload=preload),
            spec.envs,
            num_cpus=spec.num_cpus,
            listener=self._printed.extend,
            spec=spec,
        )

    def attach(self, batch: Batch) -> None:
        """Attach the workers to a batch that they share with the caller."""
        self.pool.adopt(batch)

    def execute(self, command: Command) -> Reply:
        """Execute a command; an exception in one env does not affect the others."""
        return self._reply(command.number, self.pool.forward(command))

    def _reply(self, number: int, ticket: Ticket) -> Reply:
        printed, self._printed[:] = list(self._printed), []
        return Reply(number, ticket.values, ticket.failures, output=printed)

    def begin(self, command: Command) -> None:
        """Begin to execute a command, while others may be under way; envs are built at once."""
        start = self.pool.forward if command.operation == "build" else self.pool.begin
        self.under_way[command.number] = start(command)

    def take_replies(self) -> list[Reply]:
        """Return the replies to commands that are finished."""
        finished = [number for number, ticket in self.under_way.items() if not ticket.pending]
        return [self._reply(number, self.under_way.pop(number)) for number in finished]

    def close(self) -> None:
        """Close all envs and end all workers. Print their last output again, since no reply will contain it."""
        self.pool.close()
        for env_ids, text in self._printed:
            self.current = env_ids[0] if len(env_ids) == 1 else None
            sys.stdout.write(text)


class PipePoolHost(PipeHost):
    """A pool at the other end of a `PipeChannel`."""

    host: PoolHost

    def obey(self, receive: Callable[[], Message], send: Callable[[Message], None]) -> None:
        """Execute commands like `MessageHost.obey`, but in parallel if they concern different envs."""
        pool, poll = self.host.pool, select.poll()
        filenos: Any = self.wire.fileno, pool.fileno()  # these hosts exist only on Linux, where pools have one
        for fileno in filenos:
            poll.register(fileno, select.POLLIN)
        glance = functools.partial(poll.poll, 0)
        try:
            while True:
                ready = [self.wire.fileno]
                if self.host.under_way:
                    found = spin(glance, SPIN) or poll.poll(_HEARTBEAT)
                    ready = [one for one, _ in found]
                if self.wire.fileno in ready:
                    command = self.decode(receive())
                    if isinstance(command, Message):  # the reply to a command that cannot be read
                        send(command)
                    elif command is not None:
                        self.host.begin(command)
                if ready != [self.wire.fileno]:  # a worker replied, or may have died silently
                    pool.pump(time.monotonic())
                for reply in self.host.take_replies():
                    send(self.encode(reply))
        finally:
            self.host.close()


class RaySubprocHost(RayHost):
    """A Ray actor that owns worker processes. Further arguments: see `RayHost`."""

    pipe_host_class = PipePoolHost

    def __init__(self, preload: Sequence[str], *arguments: Any) -> None:
        self._preload = preload
        super().__init__(*arguments)

    def _make_host(self, spec: WorkerSpec) -> Any:
        return PoolHost(spec, self._preload)

    def attach(self, layout: Layout) -> None:
        """Give the pool a batch; the rows travel in the messages."""
        self.host.pool.attach(layout)
        self._batch = self.host.pool.batch


class RaySubprocBackend(RayBackend):
    """One actor per node of the cluster, each with a worker process per core of its share.

    Args:
        hosts_per_node: Actors per node, at least 1.
        ray_init: See `RayBackend`.
        ray_options: See `RayBackend`.
        direct: See `RayBackend`.
        preload: See `SubprocBackend`.
    """

    host_class = RaySubprocHost
    strategy = "SPREAD"
    has_bell = False

    def __init__(
        self,
        *,
        hosts_per_node: int = 1,
        ray_init: dict[str, Any] | None = None,
        ray_options: dict[str, Any] | None = None,
        direct: bool = True,
        preload: Sequence[str] = (),
    ) -> None:
        super().__init__(ray_init=ray_init, ray_options=ray_options, direct=direct)
        self.host_arguments = (check_preload(preload),)
        if not isinstance(hosts_per_node, int) or hosts_per_node < 1:
            raise ArgumentError(f"hosts_per_node={show(hosts_per_node)} must be an int of at least 1.")
        self._hosts_per_node = hosts_per_node

    def branches_of(self, spec: WorkerSpec) -> tuple[tuple[int, ...], ...]:  # noqa: D102 (see RayBackend)
        return branches_of(spec)

    def place(self, num_envs: int, num_cpus: int) -> Placement:  # noqa: D102 (see RayBackend)
        parts = [
            part for cores in cores_of_nodes() for part in apportion(cores, [1] * min(cores, self._hosts_per_node))
        ]
        largest = sorted(parts, reverse=True)[: min(num_cpus, num_envs)]
        return Placement(tuple(apportion(num_cpus, largest)))
