"""Implements ``on_failure="restart"``: envs that failed are rebuilt (made anew) and then reset.

Only `Engine` and rollouts use this module. In the results that they return, the episode of a rebuilt env is truncated.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from parallelenv.contract.failures import NO_FAILURES, Failure
from parallelenv.contract.protocol import NOTHING, Extra

if TYPE_CHECKING:
    from parallelenv.engine.worker_pool import Pool

PERIOD = 600.0
"""Seconds within which an env is restarted at most ``max_restarts`` times."""
_FIRST_DELAY = 0.1
_LONGEST_DELAY = 5.0
"""Maximum delay of a restart, in seconds.

The second restart of an env within `PERIOD` is delayed by `_FIRST_DELAY` seconds. From then on, the delay doubles with
each restart, up to this maximum.
"""


class Budget:
    """Limits the number of restarts of each env within `PERIOD`.

    An env that fails again and again is eventually not restarted any more. An env that crashes only rarely never
    reaches the limit, however long the run is.
    """

    def __init__(self, max_restarts: int) -> None:
        self._max_restarts = max_restarts
        self._restarts: dict[int, deque[float]] = {}

    def spend(self, env_ids: Iterable[int]) -> tuple[list[int], float]:
        """Count one restart of each env, unless the env has reached the limit.

        Returns:
            The envs that have reached the limit, and the seconds to wait before the other envs are restarted.
        """
        now = time.monotonic()
        denied, delay = [], 0.0
        for env_id in env_ids:
            moments = self._restarts.setdefault(env_id, deque())
            while moments and moments[0] < now - PERIOD:
                moments.popleft()
            if len(moments) >= self._max_restarts:
                denied.append(env_id)
                continue
            if moments:
                delay = max(delay, min(_LONGEST_DELAY, _FIRST_DELAY * 2.0 ** (len(moments) - 1)))
            moments.append(now)
        return denied, delay


class Recovery:
    """Rebuilds envs that failed and resets them.

    Attributes:
        seeds: The latest seed that the user gave to each env, and the number of restarts since then, by env id.
        unreported: Rebuilt envs that have not been reported to the user yet, by env id. Each value is a pair: the
            failure that ended the episode, and the result of the reset (``None`` before the reset). Most of these envs
            did not fail, but shared a worker with an env that did. Envs that did not fail are not reset at once,
            because the user may not have received the result of their latest step yet, and a reset would overwrite it.
    """

    def __init__(self, pool: Pool, max_restarts: int) -> None:
        self._pool = pool
        self._budget = Budget(max_restarts)
        self.seeds: dict[int, tuple[int, int]] = {}
        self.unreported: dict[int, tuple[Failure, Extra | None]] = {}

    def remember_seeds(self, env_ids: Sequence[int], seeds: Sequence[int | None]) -> None:
        """Store the seeds given by the user, from which the seeds of restarts are derived."""
        self.seeds.update((env_id, (seed, 0)) for env_id, seed in zip(env_ids, seeds, strict=True) if seed is not None)

    def forget(self, env_ids: Iterable[int]) -> None:
        """Drop the records of envs whose restart has been reported, or for which the caller starts a new episode."""
        for env_id in env_ids:
            self.unreported.pop(env_id, None)

    def failures_before(self, env_ids: Sequence[int]) -> Mapping[int, Failure]:
        """Return the failures of those envs in ``env_ids`` whose episode was lost.

        The worker of such an env is dead, or the env was rebuilt and the user has not been told yet.
        """
        if not (self.unreported or self._pool.dead):  # called at every step
            return NO_FAILURES
        unreported = {env_id: self.unreported[env_id][0] for env_id in env_ids if env_id in self.unreported}
        return {**self._pool.death_failures(env_ids), **unreported}

    def restart_failed(
        self, failures: Mapping[int, Failure], *, resets: bool = True
    ) -> tuple[dict[int, tuple[Failure, Extra]], dict[int, Failure]]:
        """Rebuild envs that failed and, unless ``resets`` is false because the caller will do so, reset them.

        Returns:
            Two dicts by env id. The first has, for each env that was restarted, the failure that ended its episode and
            the result of its reset; its state after the reset is in the batch. The second has the last failure of each
            env that was not restarted.
        """
        left: dict[int, Failure] = {}
        ill = {env_id: failure for env_id, failure in failures.items() if not self._has_begun(env_id)}
        while ill:
            denied, delay = self._budget.spend(self._broken(ill))
            for env_id in denied:
                left[env_id] = ill.pop(env_id)
            time.sleep(delay)
            failed = self._rebuild(ill, failures)  # removes them from `ill`
            ill = {**failed, **self._reset(ill, failures)} if resets else failed
        restarted = {env_id: self.unreported[env_id] for env_id in failures if self._has_begun(env_id)}
        return {env_id: (failure, begun or NOTHING) for env_id, (failure, begun) in restarted.items()}, left

    def _has_begun(self, env_id: int) -> bool:
        """Return whether an env has begun an episode that the user does not know of yet."""
        return self.unreported.get(env_id, (None, None))[1] is not None

    def _broken(self, ill: Mapping[int, Failure]) -> list[int]:
        """Return the envs to rebuild: those whose worker is dead or that have not been rebuilt since they failed."""
        dead = self._pool.death_failures(tuple(ill))
        return sorted(env_id for env_id in ill if env_id not in self.unreported or env_id in dead)

    def _rebuild(self, ill: dict[int, Failure], reasons: Mapping[int, Failure]) -> dict[int, Failure]:
        """Envs that cannot be rebuilt are removed from ``ill``, and their failures are returned."""
        broken = self._broken(ill)
        if not broken:
            return {}

        def record_rebuilt(env_ids: Sequence[int]) -> None:
            """Record why each env was rebuilt. An env without a failure of its own gets the failure of another env."""
            known = {**self._pool.death_failures(env_ids), **reasons}
            cause = max(reasons.values(), key=lambda failure: failure.is_of_worker)
            for env_id in env_ids:
                self.unreported[env_id] = known.get(env_id) or Failure(cause.exception, env_id, cause.operation), None

        ticket = self._pool.rebuild(broken, record_rebuilt)
        failures = {env_id: ticket.failures[env_id] for env_id in ill if env_id in ticket.failures}
        for env_id in failures:
            del self.unreported[env_id], ill[env_id]
        return failures

    def _reset(self, ill: Mapping[int, Failure], reasons: Mapping[int, Failure]) -> dict[int, Failure]:
        env_ids = sorted(ill)
        seeds: list[int | None] = []
        for env_id in env_ids:
            seed: int | None = None
            if env_id in self.seeds:
                given, count = self.seeds[env_id]
                self.seeds[env_id] = given, count + 1
                seed = int(np.random.SeedSequence(given, spawn_key=(count + 1,)).generate_state(1)[0])
            seeds.append(seed)
        # A new worker may have died again while the envs of other workers were built.
        each = [(seed, None) for seed in self._pool.groups.fitting_seeds(env_ids, seeds)]
        ticket = self._pool.submit("reset", env_ids, each, failed=self._pool.death_failures(env_ids))
        self._pool.wait_or_give_up(ticket)
        for env_id in env_ids:
            self.unreported.pop(env_id, None)
            if env_id not in ticket.failures:
                self.unreported[env_id] = reasons[env_id], ticket.values.get(env_id, NOTHING)
        return ticket.failures
