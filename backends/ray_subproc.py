"""Ray between machines, worker processes and shared memory within each.

One actor per node owns a pool of worker processes for its envs: one Ray message per node and
step, however many cores the node has.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from parallelenv.backends.ray_actor import RayBackend, RayHost
from parallelenv.backends.ray_ahead import RaySubprocHost, travelling_by_value
from parallelenv.backends.ray_cluster import cores_of_nodes
from parallelenv.backends.subproc import SubprocBackend
from parallelenv.batch import Batch, Layout
from parallelenv.errors import ArgumentError
from parallelenv.pool import Pool
from parallelenv.protocol import Channel, Command, HostRecipe, Plan, Printed, Reply
from parallelenv.requests import deal


class PoolHost:
    """A pool that stands where a host would: it executes a command by asking hosts of its own.

    Args:
        recipe: What to own; its cores are those of the pool.
    """

    def __init__(self, recipe: HostRecipe) -> None:
        self.current: int | None = None  # no env runs in this process
        self._printed: list[Printed] = []
        self._pool = Pool(
            SubprocBackend(),
            recipe.envs,
            num_cpus=recipe.num_cpus,
            silence_warnings=recipe.settings.silence_warnings,
            listener=self._printed.extend,
            place=recipe.place,
            shared=recipe.shared,
        )

    def allocate(self, layout: Layout) -> Batch:
        """Make the batch in memory that the workers share, and hand it to them."""
        self._pool.attach(layout)
        return self._pool.batch

    def attach(self, batch: Batch) -> None:
        """Hand the workers a batch that the caller shares with them."""
        self._pool.adopt(batch)

    def execute(self, command: Command) -> Reply:
        """Execute a command; an exception concerns its env alone."""
        request = self._pool.forward(command)
        printed, self._printed[:] = list(self._printed), []
        return Reply(command.number, request.values, request.failures, output=printed)

    def close(self) -> None:
        """Close all envs and end all workers. No reply takes along what they print at that: it is printed once more."""
        self._pool.close()
        for env_ids, text in self._printed:
            self.current = env_ids[0] if len(env_ids) == 1 else None
            sys.stdout.write(text)


class SubprocHost(RayHost):
    """A Ray actor that owns worker processes."""

    def _make_host(self, recipe: HostRecipe) -> Any:
        return PoolHost(recipe)

    def _make_batch(self, layout: Layout) -> Batch:
        batch: Batch = self._host.allocate(layout)
        return batch


class RaySubprocBackend(RayBackend):
    """One actor per node of the cluster, each with a worker process per core of its share.

    Args:
        hosts_per_node: Actors per node, at least 1.
        ray_init: As in `RayBackend`.
        ray_options: As in `RayBackend`.
        direct: As in `RayBackend`.
    """

    host_class = RaySubprocHost
    host_arguments = (SubprocHost.__module__, SubprocHost.__qualname__)
    strategy = "SPREAD"

    def __init__(
        self,
        *,
        hosts_per_node: int = 1,
        ray_init: dict[str, Any] | None = None,
        ray_options: dict[str, Any] | None = None,
        direct: bool = True,
    ) -> None:
        super().__init__(ray_init=ray_init, ray_options=ray_options, direct=direct)
        if not isinstance(hosts_per_node, int) or hosts_per_node < 1:
            raise ArgumentError(f"hosts_per_node={hosts_per_node!r} must be an int of at least 1.")
        self._hosts_per_node = hosts_per_node

    def launch(self, recipes: Sequence[HostRecipe]) -> list[Channel]:  # noqa: D102 (see Backend)
        with travelling_by_value():
            return super().launch(recipes)

    def place(self, num_envs: int, num_cpus: int) -> Plan:  # noqa: D102 (see RayBackend)
        parts = [part for cores in cores_of_nodes() for part in _split(cores, self._hosts_per_node)]
        largest = sorted(parts, reverse=True)[: min(num_cpus, num_envs)]
        return Plan(tuple(deal(num_cpus, largest)))


def _split(cores: int, num_parts: int) -> list[int]:
    """Return the cores of a node in so many parts, none of them empty."""
    return deal(cores, [1] * min(cores, num_parts))
