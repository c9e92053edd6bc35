"""Calls in flight: what was asked of each worker, what has arrived, and what is not delivered yet.

A step is *in flight* until its host replied, then *landed* until the user has the result. If the caller is interrupted
in between, the step is kept here, and ``recv()`` returns it.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from parallelenv.contract.batch import Array
from parallelenv.contract.env_specs import EnvFactory
from parallelenv.contract.failures import Failure, raise_failures
from parallelenv.contract.message_text import list_ids
from parallelenv.contract.protocol import Channel, Death, Extra, Placement, PoolPosition, WorkerSettings, WorkerSpec
from parallelenv.engine.utilisation import BusyTime
from parallelenv.errors import WorkerDiedError


@dataclass(slots=True)
class Outcome:
    """Replies of envs to a step, or to a reset in place of one, before they are given the user's form.

    Attributes:
        env_ids: The envs, in the order of the result.
        stepped: The envs that were stepped; the others are absent, because they are done or exhausted.
        extras: Replies outside of the batch, by env id.
        failures: Failures, by env id.
        restarted: Envs of ``stepped`` that failed and were restarted; their states are first ones.
        begun: Envs of ``stepped`` that were reset instead; their states are first ones, too.
    """

    env_ids: Sequence[int]
    stepped: Sequence[int]
    extras: Mapping[int, Extra]
    failures: Mapping[int, Failure]
    restarted: Collection[int] = ()
    begun: Sequence[int] = ()

    @property
    def exhausted(self) -> list[int]:
        """Ids of envs whose reset, in this step, found no further episode."""
        return [env_id for env_id, extra in self.extras.items() if extra.is_exhausted]

    def without_failures(self) -> Outcome:
        """Return this without the envs that failed."""
        env_ids = [env_id for env_id in self.env_ids if env_id not in self.failures]
        stepped = [env_id for env_id in self.stepped if env_id not in self.failures]
        begun = [env_id for env_id in self.begun if env_id not in self.failures]
        return Outcome(env_ids, stepped, self.extras, self.failures, self.restarted, begun)

    def with_resting(self, resting: Collection[int]) -> Outcome:
        """Return this with some envs absent, without extras."""
        stepped = [env_id for env_id in self.stepped if env_id not in resting]
        begun = [env_id for env_id in self.begun if env_id not in resting]
        extras = {env_id: extra for env_id, extra in self.extras.items() if env_id not in resting}
        return replace(self, stepped=stepped, begun=begun, extras=extras)

    def without_failure_of(self, env_ids: Sequence[int]) -> Outcome:
        """Return the part of these envs, as if they had not failed."""
        return Outcome(env_ids, env_ids, self.extras, {}, self.restarted)


class InFlight:
    """The envs with an undelivered step, and the replies so far."""

    def __init__(self) -> None:
        self._in_flight: dict[int, Request] = {}
        self._landed: dict[int, None] = {}  # a dict, to keep the order of arrival
        self._extras: dict[int, Extra] = {}
        self._failures: dict[int, Failure] = {}
        self._absent: set[int] = set()
        self._begun: set[int] = set()  # envs whose reply is that to a reset

    def adopt(self, env_ids: Sequence[int], request: Request | None) -> None:
        """Add a step or reset.

        Args:
            env_ids: All envs that were asked.
            request: The request to those of them that were stepped, if any.
        """
        stepped: tuple[int, ...] = ()
        if request is not None:
            stepped = request.env_ids
            self._in_flight.update(dict.fromkeys(stepped, request))
            pending = set(request.running)
            self._land(
                request, [env_id for env_id in stepped if env_id not in pending], request.values, request.failures
            )
            request.landing = self._land
        for env_id in set(env_ids).difference(stepped):
            self._landed[env_id] = None
            self._absent.add(env_id)

    def _land(
        self, request: Request, env_ids: Sequence[int], values: Mapping[int, Extra], failures: Mapping[int, Failure]
    ) -> None:
        for env_id in env_ids:
            if self._in_flight.get(env_id) is not request:  # dropped meanwhile
                continue
            del self._in_flight[env_id]
            self._landed[env_id] = None
            if request.operation == "reset":
                self._begun.add(env_id)
            if env_id in values:
                self._extras[env_id] = values[env_id]
            if env_id in failures:
                self._failures[env_id] = failures[env_id]

    def landed(self, max_envs: int | None) -> Outcome:
        """Return what has arrived, in the order of arrival, at most ``max_envs`` envs."""
        return self.part(list(self._landed)[:max_envs])

    def part(self, env_ids: Sequence[int]) -> Outcome:
        """Return what has arrived from these envs, in their order."""
        stepped = [env_id for env_id in env_ids if env_id not in self._absent]
        begun = [env_id for env_id in env_ids if env_id in self._begun] if self._begun else ()
        return Outcome(env_ids, stepped, _part(self._extras, env_ids), _part(self._failures, env_ids), begun=begun)

    def lost_resets(self) -> dict[int, Failure]:
        """Return the failures of resets that lost their worker, by env id."""
        failures = _part(self._failures, tuple(self._begun)) if self._failures else {}
        return {env_id: failure for env_id, failure in sorted(failures.items()) if failure.is_of_worker}

    def forget(self, env_ids: Iterable[int]) -> None:
        """Drop the steps of these envs: they were delivered, or are not wanted any more."""
        for env_id in env_ids:
            self._in_flight.pop(env_id, None)
            self._landed.pop(env_id, None)
            self._extras.pop(env_id, None)
            self._failures.pop(env_id, None)
            self._absent.discard(env_id)
            self._begun.discard(env_id)

    def __bool__(self) -> bool:
        """Whether any env has an undelivered step."""
        return bool(self._in_flight or self._landed)

    def __len__(self) -> int:
        """Return the number of envs with an undelivered step."""
        return len(self._in_flight) + len(self._landed)

    def __contains__(self, env_id: int) -> bool:
        """Whether an env has an undelivered step."""
        return env_id in self._in_flight or env_id in self._landed

    @property
    def env_ids(self) -> tuple[int, ...]:
        """Ids of envs with an undelivered step."""
        return (*self._in_flight, *self._landed)

    @property
    def num_landed(self) -> int:
        """Number of envs whose reply has arrived."""
        return len(self._landed)

    @property
    def requests(self) -> list[Request]:
        """The requests that are not completely answered."""
        return list(dict.fromkeys(self._in_flight.values()))

    @property
    def running(self) -> tuple[int, ...]:
        """Ids of envs that have not replied."""
        return tuple(self._in_flight)


_Value = TypeVar("_Value")


def _part(values: Mapping[int, _Value], env_ids: Sequence[int]) -> dict[int, _Value]:
    return {env_id: values[env_id] for env_id in env_ids if env_id in values}


Landing = Callable[["Request", Sequence[int], Mapping[int, Any], Mapping[int, Failure]], None]


class Request:
    """One call on some envs, split into commands to several hosts.

    Args:
        env_ids: The envs.
        operation: Name of the operation.

    Attributes:
        env_ids: The envs.
        operation: As given.
        pending: Env ids of the commands without a reply, by number.
        values: Results, by env id; envs with an empty result are left out.
        failures: Failures, by env id.
        landing: If set, called with each further reply, which is then not kept here.
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
        """Record the reply to one of its commands."""
        env_ids = self.pending.pop(number)
        if self.landing is not None:
            self.landing(self, env_ids, values, failures)
            return
        if values:
            self.values.update(values)
        if failures:
            self.failures.update(failures)

    def raise_failures(self, partial: Any = None) -> None:
        """Raise the failures, if there are any.

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
        """Ids of envs that have not replied."""
        return tuple(itertools.chain.from_iterable(self.pending.values()))


@dataclass(eq=False)
class WorkerHandle:
    """The pool's record of one host.

    Attributes:
        spec: How it was started.
        channel: How it is reached.
        in_flight: Requests of the commands without a reply, by number; ``None`` if it was given up: a late reply is
            dropped.
        death: Cause of its death, ``None`` while it lives.
        has_built: Whether its envs were ever made.
        shift: When it is busy.
    """

    spec: WorkerSpec
    channel: Channel
    in_flight: dict[int, Request | None] = field(default_factory=dict)
    death: Death | None = None
    has_built: bool = False
    shift: BusyTime = field(default_factory=BusyTime)

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
            request is None or not set(env_ids).isdisjoint(request.pending[number])
            for number, request in self.in_flight.items()
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


def spread(
    factories: Sequence[EnvFactory],
    plan: Placement,
    settings: WorkerSettings,
    place: PoolPosition,
    shared: Mapping[str, Array],
) -> list[WorkerSpec]:
    """Assign envs to hosts as evenly as their cores allow, consecutive ids together.

    Args:
        factories: Factories of the envs.
        plan: How many hosts there are.
        settings: Settings of every host.
        place: Position of all of these hosts together. Without a number of workers they are the only ones.
        shared: See `WorkerSpec`.
    """
    shares = apportion(len(factories), plan.cpus)
    workers = [min(num_cpus, share) for num_cpus, share in zip(plan.cpus, shares, strict=True)]
    whole = place if place.num_workers else replace(place, num_workers=sum(workers), num_envs=len(factories))
    hosts = []
    start = 0
    for index, (num_cpus, share) in enumerate(zip(plan.cpus, shares, strict=True)):
        part = tuple(factories[start : start + share])
        own = replace(whole, first_worker=whole.first_worker + sum(workers[:index]))
        hosts.append(WorkerSpec(tuple(spec.env_id for spec in part), part, num_cpus, settings, own, shared))
        start += share
    return hosts


def branches_of(spec: WorkerSpec) -> tuple[tuple[int, ...], ...]:
    """Return the env ids of each worker of a host that has workers of its own."""
    shares = apportion(len(spec.env_ids), [1] * min(spec.num_cpus, len(spec.env_ids)))
    ends = list(itertools.accumulate(shares))
    return tuple(spec.env_ids[end - share : end] for share, end in zip(shares, ends, strict=True))


def split_further(parts: Iterable[Shard]) -> list[Shard]:
    """Split shards by the workers behind a host that reply on their own.

    Args:
        parts: The shards.
    """
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
    """Split a number in proportion to weights: one each, and each further one where it makes the smallest load.

    Args:
        total: At least the number of weights.
        weights: Positive numbers.
    """
    shares = [1] * len(weights)
    loads = [(2 / weight, index) for index, weight in enumerate(weights)]  # load with one more
    heapq.heapify(loads)
    for _ in range(total - len(weights)):
        index = loads[0][1]
        shares[index] += 1
        heapq.heapreplace(loads, ((shares[index] + 1) / weights[index], index))
    return shares


def name_envs(env_ids: Sequence[int]) -> str:
    """Return ``"env 3"`` or ``"envs 3, 4"``."""
    return f"env {env_ids[0]}" if len(env_ids) == 1 else f"envs {list_ids(env_ids)[1:-1]}"
