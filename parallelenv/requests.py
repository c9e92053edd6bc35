"""A call on its way: what is asked of which host, and what has come back."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from parallelenv.batch import Array
from parallelenv.errors import WorkerDiedError
from parallelenv.failures import Failure, raise_failures
from parallelenv.hours import Shift
from parallelenv.protocol import Channel, Death, HostRecipe, Place, Plan, Settings
from parallelenv.recipes import EnvRecipe
from parallelenv.texts import list_ids

Landing = Callable[["Request", Sequence[int], Mapping[int, Any], Mapping[int, Failure]], None]


class Request:
    """One call on some envs, spread over commands to several hosts.

    Args:
        env_ids: The envs.
        operation: What they are asked for.

    Attributes:
        env_ids: The envs.
        operation: As given.
        pending: Env ids of the commands that were not answered, by number.
        values: What was answered, by env id; envs with nothing to say are left out.
        failures: What went wrong, by env id.
        landing: If set, told of each further answer, which is then not kept here.
    """

    __slots__ = ("env_ids", "failures", "landing", "operation", "pending", "values")

    def __init__(self, env_ids: tuple[int, ...], operation: str) -> None:
        self.env_ids = env_ids
        self.operation = operation
        self.pending: dict[int, tuple[int, ...]] = {}
        self.values: dict[int, Any] = {}
        self.failures: dict[int, Failure] = {}
        self.landing: Landing | None = None

    def answer(self, number: int, values: Mapping[int, Any], failures: Mapping[int, Failure]) -> None:
        """Note the answer to one of its commands."""
        env_ids = self.pending.pop(number)
        if self.landing is not None:
            self.landing(self, env_ids, values, failures)
            return
        if values:
            self.values.update(values)
        if failures:
            self.failures.update(failures)

    def raise_failures(self, partial: Any = None) -> None:
        """Raise what went wrong, if anything did.

        Args:
            partial: The result of the others, for ``error.partial``; by default their values by id.
        """
        if not self.failures:
            return
        if partial is None:
            partial = {env_id: self.values.get(env_id) for env_id in self.env_ids if env_id not in self.failures}
        raise_failures([self.failures[env_id] for env_id in sorted(self.failures)], partial)

    @property
    def running(self) -> tuple[int, ...]:
        """Env ids that have not answered."""
        return tuple(itertools.chain.from_iterable(self.pending.values()))


@dataclass(eq=False)
class Link:
    """What the pool knows of one host.

    Attributes:
        recipe: How it was started.
        channel: How it is reached.
        in_flight: Numbers of the commands that it has not answered, with their requests; ``None`` where
            it was given up, and whatever it answers comes too late.
        death: Why it is dead, ``None`` while it lives.
        has_built: Whether its envs were ever made.
        shift: When it works.
    """

    recipe: HostRecipe
    channel: Channel
    in_flight: dict[int, Request | None] = field(default_factory=dict)
    death: Death | None = None
    has_built: bool = False
    shift: Shift = field(default_factory=Shift)

    @property
    def branches(self) -> tuple[tuple[int, ...], ...]:
        """Env ids of each worker behind it that answers by itself to a command of its own, if there are such."""
        return getattr(self.channel, "branches", ())

    def is_stuck_for(self, env_ids: Sequence[int]) -> bool:
        """Whether there is no point in waiting until it can rebuild envs: it is dead, was given up, or busy with one.

        A host in the caller's thread is neither: it goes on as soon as it is waited for.
        """
        if self.death is not None or self.channel.in_caller:
            return self.death is not None
        return any(
            request is None or not set(env_ids).isdisjoint(request.pending[number])
            for number, request in self.in_flight.items()
        )

    def obituary(self, env_ids: tuple[int, ...]) -> WorkerDiedError:
        """Return the error for a call that needed these envs of a dead host."""
        death = self.death or Death()
        owned = list_ids(self.recipe.env_ids)
        worker = f"The worker of {name_envs(self.recipe.env_ids)} (process {death.pid or 'unknown'})"
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


Part = tuple[Link, tuple[int, ...], Any]
"""A host, ids of envs of its own, and their positions among all that are asked, a slice or a list."""


def spread(
    recipes: Sequence[EnvRecipe], plan: Plan, settings: Settings, place: Place, shared: Mapping[str, Array]
) -> list[HostRecipe]:
    """Deal envs out to hosts as evenly as their cores allow, consecutive ids together.

    Args:
        recipes: Of the envs.
        plan: How many hosts there are.
        settings: What every host is told.
        place: Of all of these hosts together. Without a number of workers it is that of all there are.
        shared: As in `HostRecipe`.
    """
    shares = deal(len(recipes), plan.cpus)
    workers = [min(num_cpus, share) for num_cpus, share in zip(plan.cpus, shares, strict=True)]
    whole = place if place.num_workers else replace(place, num_workers=sum(workers), num_envs=len(recipes))
    hosts = []
    start = 0
    for index, (num_cpus, share) in enumerate(zip(plan.cpus, shares, strict=True)):
        part = tuple(recipes[start : start + share])
        own = replace(whole, first_worker=whole.first_worker + sum(workers[:index]))
        hosts.append(HostRecipe(tuple(recipe.env_id for recipe in part), part, num_cpus, settings, own, shared))
        start += share
    return hosts


def branches_of(recipe: HostRecipe) -> tuple[tuple[int, ...], ...]:
    """Return the env ids of each worker of a host that has workers of its own."""
    shares = deal(len(recipe.env_ids), [1] * min(recipe.num_cpus, len(recipe.env_ids)))
    ends = list(itertools.accumulate(shares))
    return tuple(recipe.env_ids[end - share : end] for share, end in zip(shares, ends, strict=True))


def split_further(parts: Iterable[Part]) -> list[Part]:
    """Deal what hosts are asked for out to workers of theirs that answer by themselves: as parts, too.

    Args:
        parts: A host, ids of envs of its own, and the positions of these among all that are asked.
    """
    further: list[Part] = []
    for link, env_ids, positions in parts:
        if len(link.branches) < 2:
            further.append((link, env_ids, positions))
            continue
        where = range(positions.start, positions.stop) if isinstance(positions, slice) else positions
        for branch in link.branches:
            found = [index for index, env_id in enumerate(env_ids) if branch[0] <= env_id <= branch[-1]]
            if found:
                further.append((link, tuple(env_ids[index] for index in found), [where[index] for index in found]))
    return further


def deal(total: int, weights: Sequence[int]) -> list[int]:
    """Share a number out in proportion to weights: one each, and what is left always to whom it loads least.

    Args:
        total: At least as many as there are weights.
        weights: Positive ones.
    """
    shares = [1] * len(weights)
    loads = [(2 / weight, index) for index, weight in enumerate(weights)]  # if they got one more
    heapq.heapify(loads)
    for _ in range(total - len(weights)):
        index = loads[0][1]
        shares[index] += 1
        heapq.heapreplace(loads, ((shares[index] + 1) / weights[index], index))
    return shares


def pick(each: Sequence[Any], positions: Any) -> Sequence[Any]:
    """Return the items at these positions, a slice or a list of indices."""
    return each[positions] if isinstance(positions, slice) else [each[position] for position in positions]


def name_envs(env_ids: Sequence[int]) -> str:
    """Return ``"env 3"`` or ``"envs 3, 4"``."""
    return f"env {env_ids[0]}" if len(env_ids) == 1 else f"envs {list_ids(env_ids)[1:-1]}"
