"""Steps, and resets in their place, that were begun and not yet delivered: at most one per env.

A step is *in flight* until its host answered, then *landed* until the user has it. Whatever
interrupts the caller in between, the step is still here, and ``recv()`` gives it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from parallelenv.failures import Failure
from parallelenv.protocol import Extra
from parallelenv.requests import Request


@dataclass(slots=True)
class Landed:
    """What envs answered to a step, or to a reset in the place of one, before it is shaped for the user.

    Attributes:
        env_ids: The envs, in the order of the answer.
        stepped: Those of them that were stepped; the others are absent, because they are done or exhausted.
        extras: What was answered beside the batch, by env id.
        failures: What failed, by env id.
        restarted: Those of ``stepped`` that failed and were restarted; their states are first ones.
        begun: Those of ``stepped`` that were reset instead; their states are first ones, too.
    """

    env_ids: Sequence[int]
    stepped: Sequence[int]
    extras: Mapping[int, Extra]
    failures: Mapping[int, Failure]
    restarted: Collection[int] = ()
    begun: Sequence[int] = ()

    @property
    def exhausted(self) -> list[int]:
        """Those whose reset, in this step, has found no further episode."""
        return [env_id for env_id, extra in self.extras.items() if extra.is_exhausted]

    def without_failures(self) -> Landed:
        """Return this without the envs that failed."""
        env_ids = [env_id for env_id in self.env_ids if env_id not in self.failures]
        stepped = [env_id for env_id in self.stepped if env_id not in self.failures]
        begun = [env_id for env_id in self.begun if env_id not in self.failures]
        return Landed(env_ids, stepped, self.extras, self.failures, self.restarted, begun)

    def with_resting(self, resting: Collection[int]) -> Landed:
        """Return this with some envs absent, who have nothing to say."""
        stepped = [env_id for env_id in self.stepped if env_id not in resting]
        begun = [env_id for env_id in self.begun if env_id not in resting]
        extras = {env_id: extra for env_id, extra in self.extras.items() if env_id not in resting}
        return replace(self, stepped=stepped, begun=begun, extras=extras)

    def without_failure_of(self, env_ids: Sequence[int]) -> Landed:
        """Return the part of these envs, as if they had not failed."""
        return Landed(env_ids, env_ids, self.extras, {}, self.restarted)


class Flights:
    """Which envs have an undelivered step, and what has come back so far."""

    def __init__(self) -> None:
        self._in_flight: dict[int, Request] = {}
        self._landed: dict[int, None] = {}  # a dict for its order: first come, first served
        self._extras: dict[int, Extra] = {}
        self._failures: dict[int, Failure] = {}
        self._absent: set[int] = set()
        self._begun: set[int] = set()  # whose answer here is that to a reset

    def adopt(self, env_ids: Sequence[int], request: Request | None) -> None:
        """Take charge of a step or reset.

        Args:
            env_ids: All envs that were asked.
            request: Where those of them answer that were stepped, if there are any.
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
            if self._in_flight.get(env_id) is not request:  # given up meanwhile
                continue
            del self._in_flight[env_id]
            self._landed[env_id] = None
            if request.operation == "reset":
                self._begun.add(env_id)
            if env_id in values:
                self._extras[env_id] = values[env_id]
            if env_id in failures:
                self._failures[env_id] = failures[env_id]

    def landed(self, max_envs: int | None) -> Landed:
        """Return what has come back, in the order of arrival, at most ``max_envs`` envs."""
        return self.part(list(self._landed)[:max_envs])

    def part(self, env_ids: Sequence[int]) -> Landed:
        """Return what has come back from these envs, in their order."""
        stepped = [env_id for env_id in env_ids if env_id not in self._absent]
        begun = [env_id for env_id in env_ids if env_id in self._begun] if self._begun else ()
        return Landed(env_ids, stepped, _part(self._extras, env_ids), _part(self._failures, env_ids), begun=begun)

    def lost_resets(self) -> dict[int, Failure]:
        """Return why resets have failed, by env id, that failed for want of a worker."""
        failures = _part(self._failures, tuple(self._begun)) if self._failures else {}
        return {env_id: failure for env_id, failure in sorted(failures.items()) if failure.is_of_worker}

    def forget(self, env_ids: Iterable[int]) -> None:
        """Drop the steps of these envs: they were delivered, or nobody wants them any more."""
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
        """Number of envs whose answer is here."""
        return len(self._landed)

    @property
    def requests(self) -> list[Request]:
        """The requests that have not been answered completely."""
        return list(dict.fromkeys(self._in_flight.values()))

    @property
    def running(self) -> tuple[int, ...]:
        """Env ids that have not answered."""
        return tuple(self._in_flight)


_Value = TypeVar("_Value")


def _part(values: Mapping[int, _Value], env_ids: Sequence[int]) -> dict[int, _Value]:
    return {env_id: values[env_id] for env_id in env_ids if env_id in values}
