"""Steps and resets that are sent now and received later, by whoever is first."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from parallelenv.answers import Align
from parallelenv.batch import Layout
from parallelenv.errors import NothingInFlightError, WorkerTimeoutError
from parallelenv.flights import Landed
from parallelenv.ownership import own
from parallelenv.policy import Policy
from parallelenv.results import StepBatch, StepResult
from parallelenv.spaces import pick_rows
from parallelenv.stepping import Begin, Begins, Stepper
from parallelenv.texts import list_ids


class Sender(Stepper):
    """A `Stepper` that need not wait. Its arguments are the same."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._asked: dict[int, Begin] = {}  # how resets that were sent are to be done, should they be lost
        self._retried = 0.0  # when some were, the last time

    # ---------------------------------------------------------------- all at once

    def begin(self, action: Any, env_ids: Sequence[int]) -> None:
        """Begin a step of all of these envs, for `finish`."""
        self._launch(action, env_ids)

    def finish(self, env_ids: Sequence[int], timeout: float | None, align: Align) -> StepResult | StepBatch:
        """Return what envs answered to a step that was begun, or sent, or whose call was interrupted.

        Args:
            env_ids: All of the envs, in the order of the answer.
            timeout: Seconds; ``None`` means the pool's own.
            align: As in `step`.

        Raises:
            NothingInFlightError: If no step of one of them is under way.
            WorkerTimeoutError: If they do not answer in time. This can be called again.
        """
        if self._unsettled is None or self._unsettled[0] is not env_ids:
            self._settle()
            return self._collect(env_ids, timeout, align)
        request = self._unsettled[1]
        self._await(request, timeout)
        return self._deliver(Landed(env_ids, request.env_ids, request.values, request.failures), align)

    def _collect(self, env_ids: Sequence[int], timeout: float | None, align: Align) -> StepResult | StepBatch:
        flights = self._flights
        missing = [env_id for env_id in env_ids if env_id not in flights]
        if missing:
            raise NothingInFlightError(f"No step of envs {list_ids(missing)} is in flight. Begin one first.")
        self._await_landing(len(flights), timeout, time.monotonic())
        return self._deliver(flights.part(env_ids), align)

    # ---------------------------------------------------------------- whoever is first

    def send(self, action: Any, env_ids: Sequence[int]) -> None:
        """Begin a step of envs."""
        _, request = self._launch(action, env_ids, flies=True)
        self._unsettled = None
        self._flights.adopt(env_ids, request)

    def send_reset(self, env_ids: Sequence[int], each: Begins) -> None:
        """Begin new episodes, whose first states `receive` gives. Arguments as in `begin_reset`."""
        self._prepare_reset(env_ids, each)
        self._post_reset(env_ids, each, flies=True)
        self._settle()
        self._asked.update(zip(env_ids, each, strict=True))
        # From here on, not when they are received: else it would depend on the order of arrival who is done where the
        # end of one is the end of all.
        self.episodes.note_asked_to_begin(list(env_ids))

    def receive(
        self, min_envs: int, max_envs: int | None, timeout: float | None, align: Align
    ) -> StepResult | StepBatch:
        """Return what envs answered that have finished their step.

        ``timeout``: as in `ParallelEnv.recv`.
        """
        self._await_landing(self._wanted(min_envs), timeout, time.monotonic())
        return self._deliver(self._flights.landed(max_envs), align)

    def look(self, min_envs: int, timeout: float | None, begin: float) -> bool:
        """Say without waiting whether `take` has something to return; ``begin`` is the moment from which time counts.

        Errors: as of `receive`.
        """
        wanted, flights = self._wanted(min_envs), self._flights
        while flights.num_landed < wanted and self._pool.pump(time.monotonic()):
            pass
        if flights.num_landed >= wanted:
            return not self._retry_resets()
        deadline = self._deadline(timeout, begin)
        if deadline is not None and time.monotonic() >= deadline:
            self._be_late(timeout)
        return False

    def take(self, min_envs: int, max_envs: int | None, align: Align) -> StepResult | StepBatch | None:
        """Return what `receive` would, unless somebody else has received it since `look`. Nothing is stepped here."""
        enough = self._flights.num_landed >= self._wanted(min_envs)
        return self._deliver(self._flights.landed(max_envs), align) if enough else None

    def _wanted(self, min_envs: int) -> int:
        """Return how many envs can be waited for, ``min_envs`` at most.

        Raises:
            NothingInFlightError: If none.
        """
        self._settle()
        if not self._flights:
            raise NothingInFlightError(
                "There is no result to wait for: no step is in flight. Call send() first, or go on with step()."
            )
        return min(min_envs, len(self._flights))

    def _await_landing(self, wanted: int, timeout: float | None, begin: float) -> None:
        """Wait until so many envs have answered. ``timeout`` and errors: as in `_await`; it counts from ``begin``."""
        while self._flights.num_landed < wanted or self._retry_resets():
            if not self._pool.pump(self._deadline(timeout, begin)):
                self._be_late(timeout)

    def _deadline(self, timeout: float | None, begin: float) -> float | None:
        """Return until when to wait. Who was asked again meanwhile has as much time as anybody."""
        limit = self.timeout if timeout is None else timeout
        return None if limit is None else max(begin, self._retried) + limit

    def _be_late(self, timeout: float | None) -> None:
        """Give up what is under way if a recovery deals with that, else say who is late."""
        late = self._pool.late(self._flights.running, self.timeout if timeout is None else timeout, "step")
        if timeout is not None or self._recovery is None:
            raise late
        for request in self._flights.requests:
            self._pool.give_up(request, late)

    def _retry_resets(self) -> bool:
        """With a recovery, ask again for resets whose worker died or hung; say if there were any."""
        lost = self._flights.lost_resets() if self._recovery is not None else {}
        if not lost or self._recovery is None:
            return False
        env_ids = tuple(lost)
        self._flights.forget(env_ids)  # what goes wrong now is told once
        self._mend_unasked(env_ids, lost, self._recovery)
        self._post_reset(env_ids, [self._asked[env_id] for env_id in env_ids], flies=True)
        self._settle()
        self._retried = time.monotonic()
        return True

    # ---------------------------------------------------------------- whose turn it is

    @property
    def layout(self) -> Layout:
        """What the batch holds."""
        return self._pool.layout

    @contextlib.contextmanager
    def borrowed(self, env_ids: Sequence[int]) -> Iterator[Sender]:
        """Yield a stepper of some of the envs under which an ended one is stepped on, whatever the policy is here.

        What these have under way at the end is dropped, and they need a reset.

        Raises:
            EnvBusyError, EnvPausedError, WorkerDiedError: If one cannot be had.
        """
        self._settle()
        self._refuse_busy(env_ids)
        self.episodes.refuse_paused(env_ids)
        if self._recovery is None:
            self._pool.refuse_dead(env_ids)
        other = type(self)(self._pool, Policy(), True, self.timeout, self._recovery)
        other.episodes.share_score(self.episodes.score)
        self.episodes.lose(env_ids)
        try:
            yield other
        finally:
            self.episodes.take_over(other.episodes, env_ids)

    def late_for_good(self, env_ids: Sequence[int]) -> WorkerTimeoutError:
        """Return the error for envs that are late where what they have under way is dropped."""
        return self._pool.late(env_ids, self.timeout, "run_episodes")

    @property
    def goes_on(self) -> bool:
        """Whether an env that ends begins its next episode by itself."""
        return self._policy.autoreset

    @property
    def is_under_way(self) -> bool:
        """Whether anything was sent and not received."""
        self._settle()
        return bool(self._flights)

    @property
    def has_landed(self) -> bool:
        """Whether an answer is here that was not received."""
        self._settle()
        return bool(self._flights.num_landed)

    def waiting(self) -> list[int]:
        """Return the envs that can be stepped: they are not paused, have nothing under way, and have not ended.

        Raises:
            ResetNeededError: If one that is not paused has no episode.
        """
        self._settle()
        idle = [env_id for env_id in self.episodes.unpaused if env_id not in self._flights]
        self.episodes.refuse_fresh(idle)
        return list(self.episodes.choose(idle)[0])

    def states_of(self, env_ids: Sequence[int], result: StepResult | None) -> Any:
        """Return the latest states of envs, batched.

        Args:
            env_ids: The envs.
            result: Where they are, if they all are there. To look for others takes as long as their workers are busy.
        """
        structure = self._pool.batch.layout.states
        place = {} if result is None else {env_id: row for row, env_id in enumerate(result.env_ids.tolist())}
        rows = [place.get(env_id, -1) for env_id in env_ids]
        if result is None or -1 in rows or _may_be_absent(result):
            self.episodes.refuse_unknown(env_ids)
            return self.latest_states(env_ids)
        leaves = structure.split(result.states)
        picked = [
            leaf[rows] if structure.is_fixed(index) else structure.stack(index, [pick_rows(leaf, row) for row in rows])
            for index, leaf in enumerate(leaves)
        ]
        return structure.join(picked)

    def detached(self, result: StepResult) -> StepResult:
        """Return a result whose states outlive the next call."""
        if self.copies:
            return result
        _, rewards, dones, infos = result
        flags = result.terminated, result.truncated, result.env_ids
        return StepResult(own(result.states), rewards, dones, infos, *flags)


def _may_be_absent(result: StepResult) -> bool:
    """Whether the states of a result may lack some."""
    states = result.states
    return isinstance(states, np.ndarray) and states.dtype == object and any(state is None for state in states)
