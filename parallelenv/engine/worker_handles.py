"""How envs are split over workers, and what the caller knows of each worker."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from parallelenv.contract.env_specs import EnvFactory
from parallelenv.contract.error_text import list_ids, name_envs
from parallelenv.contract.protocol import Channel, Death, Placement, WorkerSpec
from parallelenv.engine.tickets import Ticket
from parallelenv.errors import WorkerDiedError


@dataclass(eq=False)
class WorkerHandle:
    """The pool's record of one host.

    Attributes:
        in_flight: Tickets of the commands without a reply, by number; ``None`` if it was given up: a late reply is
            dropped.
        death: Cause of its death, ``None`` while it lives.
        has_built: Whether its envs were ever made.
    """

    spec: WorkerSpec
    channel: Channel
    in_flight: dict[int, Ticket | None] = field(default_factory=dict)
    death: Death | None = None
    has_built: bool = False

    @property
    def branches(self) -> tuple[tuple[int, ...], ...]:
        """Env ids of each worker behind it that replies on its own to its own commands, if there are such workers."""
        return getattr(self.channel, "branches", ())

    def is_stuck_for(self, env_ids: Sequence[int]) -> bool:
        """Whether waiting for it cannot help to rebuild envs: it is dead, was given up, or is busy with one of them.

        A host in the caller's thread is never given up or busy here: it continues as soon as it is waited for.
        """
        if self.death is not None or self.channel.in_caller:
            return self.death is not None
        return any(
            ticket is None or not set(env_ids).isdisjoint(ticket.pending[number])
            for number, ticket in self.in_flight.items()
        )

    def death_error(self, env_ids: tuple[int, ...]) -> WorkerDiedError:
        """Return the error for a call that needed these envs of a dead host."""
        death = self.death or Death()
        owned = list_ids(self.spec.env_ids)
        worker = f"The worker of {name_envs(self.spec.env_ids)} (process {death.pid or 'unknown'})"
        if self.has_built:
            way_out = f"All other envs go on. Rebuild with restart({owned}), or leave out with pause({owned})."
            message = f"{worker} is dead. {death} {way_out}"
        else:
            message = (
                f"{worker} died while its envs were made. {death} Make one of them alone, in this process, to see why."
            )
        if death.last_lines:
            message += f"\nThe last that it printed:\n{death.last_lines}"
        return WorkerDiedError(message, env_ids, death.pid, death.exitcode)


Shard = tuple[WorkerHandle, tuple[int, ...], Any]
"""A host, ids of some of its envs, and their positions among all that are asked, a slice or a list."""


def spread(factories: Sequence[EnvFactory], plan: Placement, spec: WorkerSpec) -> list[WorkerSpec]:
    """Assign envs to hosts as evenly as their cores allow, consecutive ids together; ``spec`` has what they share.

    Without a number of workers in it, these hosts are the only ones.
    """
    shares = apportion(len(factories), plan.cpus)
    workers = [min(num_cpus, share) for num_cpus, share in zip(plan.cpus, shares, strict=True)]
    if not spec.num_workers:
        spec = replace(spec, num_workers=sum(workers), num_envs=len(factories))
    hosts = []
    start = 0
    for index, (num_cpus, share) in enumerate(zip(plan.cpus, shares, strict=True)):
        part = tuple(factories[start : start + share])
        env_ids, first = tuple(factory.env_id for factory in part), spec.first_worker + sum(workers[:index])
        hosts.append(replace(spec, env_ids=env_ids, envs=part, num_cpus=num_cpus, first_worker=first))
        start += share
    return hosts


def branches_of(spec: WorkerSpec) -> tuple[tuple[int, ...], ...]:
    """Return the env ids of each worker of a host that has workers of its own."""
    shares = apportion(len(spec.env_ids), [1] * min(spec.num_cpus, len(spec.env_ids)))
    ends = list(itertools.accumulate(shares))
    return tuple(spec.env_ids[end - share : end] for share, end in zip(shares, ends, strict=True))


def split_further(parts: Iterable[Shard]) -> list[Shard]:
    """Split shards by the workers behind a host that reply on their own."""
    further: list[Shard] = []
    for worker, env_ids, positions in parts:
        if len(worker.branches) < 2:
            further.append((worker, env_ids, positions))
            continue
        where = range(positions.start, positions.stop) if isinstance(positions, slice) else positions
        for branch in worker.branches:
            found = [index for index, env_id in enumerate(env_ids) if branch[0] <= env_id <= branch[-1]]
            if found:
                further.append((worker, tuple(env_ids[index] for index in found), [where[index] for index in found]))
    return further


def apportion(total: int, weights: Sequence[int]) -> list[int]:
    """Split a number in proportion to weights: one each, and each further one where it makes the smallest load."""
    shares = [1] * len(weights)
    loads = [(2 / weight, index) for index, weight in enumerate(weights)]  # load with one more
    heapq.heapify(loads)
    for _ in range(total - len(weights)):
        index = loads[0][1]
        shares[index] += 1
        heapq.heapreplace(loads, ((shares[index] + 1) / weights[index], index))
    return shares
