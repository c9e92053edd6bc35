"""Resets and steps: what is sent, what is under way, what has come back."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np

from parallelenv.actions import ActionReader
from parallelenv.answers import Align, Teller
from parallelenv.batch import Array
from parallelenv.episodes import Episodes
from parallelenv.errors import EnvBusyError, EnvContractError
from parallelenv.failures import Failure, noted, raise_failures
from parallelenv.flights import Flights, Landed
from parallelenv.policy import Policy
from parallelenv.pool import NO_FAILURES, Pool
from parallelenv.protocol import NOTHING, Extra
from parallelenv.recovery import Recovery
from parallelenv.requests import Request
from parallelenv.results import StepBatch, StepResult, first_states, gather_states
from parallelenv.rewards import refuse_other_rewards
from parallelenv.saving import Progress
from parallelenv.texts import list_ids

Begin = tuple[int | None, dict[str, Any] | None]
"""Seed and options of an env that is to begin an episode."""
Begins = Sequence[Begin]
"""Those of several envs."""


@dataclass(slots=True)
class Resetting:
    """A reset under way: which envs, how, and what they were asked."""

    env_ids: Sequence[int]
    each: Begins
    request: Request


class Stepper:
    """Steps and resets the envs of a pool under a policy.

    Args:
        pool: Where the envs are.
        policy: What happens when an episode ends.
        copy: Whether states are copied for the user.
        timeout: Seconds that a step may take; ``None`` means for ever.
        recovery: What restarts envs that fail; ``None`` if nothing does.
        reward_dtype: What rewards have to be numbers of; ``None``: they may be anything.
        as_given: As in `ActionReader`.

    Attributes:
        episodes: Where the episodes of the envs are.
        timeout: Seconds that a call may take, unless it is given others.
        copies: Whether states are copied for the user.
    """

    def __init__(
        self,
        pool: Pool,
        policy: Policy,
        copy: bool,
        timeout: float | None,
        recovery: Recovery | None,
        reward_dtype: np.dtype[Any] | None = None,
        as_given: bool = False,
    ) -> None:
        self._pool = pool
        self._policy = policy
        stepless = (env_id for env_id, one in zip(pool.env_ids, pool.facts, strict=True) if not one.has_steps)
        self.episodes = Episodes(pool.env_ids, policy, frozenset(stepless))
        self._teller = Teller(policy, self.episodes, copy)
        self.copies = copy
        self.timeout = timeout
        self._recovery = recovery
        self._reward_dtype = reward_dtype
        self._actions = ActionReader(pool.layout, keeps_graphs=pool.keeps_graphs, as_given=as_given)
        self._flights = Flights()
        # The latest step, from before its first message leaves until the user has the result.
        # If something comes in between, the next call finds it here.
        self._unsettled: tuple[Sequence[int], Request] | None = None
        # Envs whose latest call was a step that came to its end: nothing is to be looked into before the
        # next. Every other call unsets it.
        self._proven: Sequence[int] | None = None

    def under(self, policy: Policy, *, always_copies: bool, reward_dtype: np.dtype[Any] | None) -> Self:
        """Return a stepper of the same pool with another policy, for an adapter. All envs then need a reset.

        Args:
            policy: What happens when an episode ends.
            always_copies: Whether states are copied also where the user can do without.
            reward_dtype: As in `Stepper`.

        Raises:
            EnvBusyError: If a step is under way.
        """
        self._settle()
        self._refuse_busy(self._pool.env_ids)
        if self._recovery is not None:
            self._recovery.forget(self._pool.env_ids)
        copy = self.copies or always_copies
        return type(self)(self._pool, policy, copy, self.timeout, self._recovery, reward_dtype, True)

    @property
    def under_way(self) -> list[int]:
        """Ids of envs with a step whose result was not delivered, ascending."""
        if self._unsettled is None:
            return sorted(self._flights.env_ids) if self._flights else []
        return sorted({*self._unsettled[0], *self._flights.env_ids})

    # ---------------------------------------------------------------- episodes

    def begin_reset(self, env_ids: Sequence[int], each: Begins) -> Resetting:
        """Begin to begin new episodes.

        Args:
            env_ids: The envs, in the order of the answer. Undelivered steps of theirs are dropped.
            each: Seed and options of each.
        """
        self._prepare_reset(env_ids, each)
        return Resetting(env_ids, each, self._post_reset(env_ids, each))

    def _prepare_reset(self, env_ids: Sequence[int], each: Begins) -> None:
        self._settle()
        self.episodes.refuse_stepless(env_ids)
        if self._recovery is not None:
            self._recovery.note_seeds(env_ids, [seed for seed, _ in each])
            self._mend_unasked(env_ids, self._pool.obituaries(env_ids), self._recovery)

    def finish_reset(self, resetting: Resetting, timeout: float | None, align: Align = "item") -> Any:
        """Return the first states: batched, or with align ``"batch"`` a list; ``None`` of an env that is exhausted.

        Args:
            resetting: What was begun.
            timeout: Seconds; ``None`` means the pool's own.
            align: As in `step`.

        Raises:
            WorkerTimeoutError: If they do not come in time. This can be called again.
            BaseException: What an env raised; ``error.partial`` has the states of the others, whose
                episodes have begun.
            ExhaustedError: If an env has no further episode, and the policy lets nobody rest.
        """
        env_ids, request = resetting.env_ids, self._await_reset(resetting, timeout)
        failures, extras = request.failures, request.values
        good = tuple(env_id for env_id in env_ids if env_id not in failures) if failures else env_ids
        exhausted = [env_id for env_id, extra in extras.items() if extra.is_exhausted]
        begun = [env_id for env_id in good if env_id not in exhausted] if exhausted else good
        landed = Landed(good, begun, extras, failures)
        states = first_states(self._pool.batch, landed, align == "batch", self.copies)
        for env_id in good:
            self.episodes.reset_infos[env_id] = extras.get(env_id, NOTHING).info or {}
        self.episodes.note_begun(begun, self._pool.batch.rows(begun))
        self.episodes.note_exhausted(exhausted)
        request.raise_failures(partial=states)
        if exhausted:
            self.episodes.refuse_exhausted(good, partial=states)
        return states

    def _post_reset(self, env_ids: Sequence[int], each: Begins, *, flies: bool = False) -> Request:
        def announce(request: Request) -> None:
            self._lose(env_ids)  # and so they stay if anything goes wrong
            if flies:
                self._unsettled = (env_ids, request)

        failed = NO_FAILURES if self._recovery is None else self._pool.obituaries(env_ids)
        return self._pool.post("reset", env_ids, each, None, announce, failed, flies=flies)

    def _lose(self, env_ids: Sequence[int]) -> None:
        """Drop undelivered steps of envs, which need a reset from now on."""
        self._flights.forget(env_ids)
        self.episodes.lose(env_ids)
        if self._recovery is not None:
            self._recovery.forget(env_ids)

    def end_episodes(self, operation: str, env_ids: Sequence[int], each: Sequence[Any], common: Any) -> None:
        """Ask envs for what takes their episodes from them; they need a reset afterwards."""
        self._settle()
        request = self._pool.post(operation, env_ids, each, common, lambda _: self._lose(env_ids))
        self._pool.wait(request, self.timeout)
        request.raise_failures()

    def note_seeds(self, env_ids: Sequence[int], seeds: Sequence[int | None]) -> None:
        """Take note of seeds that envs were given otherwise than by a reset."""
        if self._recovery is not None:
            self._recovery.note_seeds(env_ids, seeds)

    def _await_reset(self, resetting: Resetting, timeout: float | None) -> Request:
        """Wait for resets; with a recovery ask again and again until no worker dies or hangs of it."""
        while True:
            self._await(resetting.request, timeout)
            failures = resetting.request.failures
            lost = {env_id: failure for env_id, failure in failures.items() if failure.is_of_worker}
            if self._recovery is None or not lost:
                return resetting.request
            self._mend_unasked(resetting.env_ids, lost, self._recovery)
            resetting.request = self._post_reset(resetting.env_ids, resetting.each)

    def _mend_unasked(self, env_ids: Sequence[int], lost: Mapping[int, Failure], recovery: Recovery) -> None:
        """Restart envs of which the user wants a new episode anyway, and need not know that they were lost."""
        _, left = recovery.mend(lost)
        recovery.forget(env_ids)
        raise_failures([left[env_id] for env_id in sorted(left)], partial=None)

    def _await(self, request: Request, timeout: float | None) -> None:
        """Wait for hosts to answer.

        Args:
            request: What they were asked.
            timeout: Seconds; ``None`` means the pool's own, and then a recovery restarts envs that are late.

        Raises:
            WorkerTimeoutError: If they do not in time. It can be waited for again.
        """
        if timeout is None and self._recovery is not None:
            self._pool.wait_or_give_up(request)
        else:
            self._pool.wait(request, self.timeout if timeout is None else timeout)

    def latest_states(self, env_ids: Sequence[int] | None = None) -> Any:
        """Return the latest states of envs, by default of all, batched.

        Raises:
            UnpicklableError: If a part of a state cannot be copied from its worker.
        """
        asked, batch = self._pool.env_ids if env_ids is None else env_ids, self._pool.batch
        has_loose = any(array is None for array in batch.states)
        extras = self._pool.ask("look", asked).values if has_loose else {}
        return gather_states(batch, asked, batch.rows(asked), extras, self.copies)

    def restart(self, env_ids: Sequence[int]) -> tuple[int, ...]:
        """Rebuild envs and return the ids of all that were; they need a reset."""
        self._settle()
        request = self._pool.rebuild(env_ids, self._lose)
        rebuilt = tuple(sorted({*request.env_ids, *request.values}))
        request.raise_failures(partial=tuple(env_id for env_id in rebuilt if env_id not in request.failures))
        return rebuilt

    def pause(self, env_ids: Sequence[int]) -> None:
        """Leave envs out until they are taken in again."""
        self._proven = None
        self.episodes.pause(env_ids)

    # ---------------------------------------------------------------- progress

    def progress(self) -> Progress:
        """Return where the episodes are.

        Raises:
            EnvBusyError: If a step is under way.
        """
        self._settle()
        self._refuse_busy(self._pool.env_ids)
        return self.episodes.progress()

    def go_on_from(self, progress: Progress, lost: Collection[int]) -> tuple[int, ...]:
        """Do as `Episodes.go_on_from`. Undelivered steps are dropped."""
        self._settle()
        everyone = self._pool.env_ids
        self._flights.forget(everyone)
        if self._recovery is not None:
            self._recovery.forget(everyone)
        return self.episodes.go_on_from(progress, lost)

    # ---------------------------------------------------------------- steps

    def step(self, action: Any, env_ids: Sequence[int], align: Align) -> StepResult | StepBatch:
        """Step envs and return what they answered."""
        stepped, request = self._launch(action, env_ids)
        if request is None:
            return self._deliver(Landed(env_ids, stepped, {}, {}), align)
        self._await(request, None)
        result = self._deliver(Landed(env_ids, stepped, request.values, request.failures), align)
        self._proven = env_ids
        return result

    def _launch(
        self, action: Any, env_ids: Sequence[int], *, flies: bool = False
    ) -> tuple[Sequence[int], Request | None]:
        """Send a step to the envs that take part in it; return them and their request.

        Args:
            action: One per env.
            env_ids: The envs.
            flies: As in `Pool.post`.

        Raises:
            EnvBusyError: If one has an undelivered step.
            EnvPausedError: If one is paused.
            WorkerDiedError: If one has lost its worker.
            ResetNeededError: If one has no episode to step in.
            ExhaustedError: If one has no further episode, and the policy lets nobody rest.
            ActionError: If the actions do not fit. In all cases nothing was sent.
        """
        if env_ids is not self._proven:
            self._settle()
            self._check(env_ids)
        self._proven = None
        may_rest = self._policy.skips_done or self.episodes.exhausted
        stepped, chosen = self.episodes.choose(env_ids) if may_rest else (env_ids, None)
        each = self._actions.take(self._pool.batch, action, env_ids, stepped, chosen)
        if not stepped:
            return stepped, None

        self.episodes.note_stepped(stepped)

        def announce(request: Request) -> None:
            self._unsettled = (env_ids, request)

        failed = self._recovery.ailing(stepped) if self._recovery is not None else NO_FAILURES
        # Nobody is `False`, not an empty tuple: that step goes in a shorter message.
        who_begins = self.episodes.ended(stepped) or False if self._policy.resets_next else self._policy.autoreset
        return stepped, self._pool.post("step", stepped, each, who_begins, announce, failed, flies=flies)

    def _settle(self) -> None:
        """Take charge of a step whose call did not come to its end."""
        self._proven = None
        if self._unsettled is not None:
            env_ids, request = self._unsettled
            self._flights.adopt(env_ids, request)
            self._unsettled = None

    def _refuse_busy(self, env_ids: Sequence[int]) -> None:
        busy = [env_id for env_id in env_ids if env_id in self._flights] if self._flights else []
        if busy:
            raise EnvBusyError(
                f"envs {list_ids(busy)} have a step or a reset under way whose result was not received (sent, "
                f"interrupted or late). Get it with {self._pool.ways_to_wait(len(busy))}, or drop it with reset(). "
                "Both wait for envs that have not answered: rebuild one that hangs with restart(id)."
            )

    def _check(self, env_ids: Sequence[int]) -> None:
        self._refuse_busy(env_ids)
        self.episodes.refuse_paused(env_ids)
        if self._recovery is None:
            self._pool.refuse_dead(env_ids)
        self.episodes.refuse_fresh(env_ids)

    def refuse_unready(self, env_ids: Sequence[int]) -> None:
        """Refuse envs with a step under way, and those that have no episode."""
        self._settle()
        self._refuse_busy(env_ids)
        self.episodes.refuse_fresh(env_ids)

    # ---------------------------------------------------------------- rollouts

    def begin_rollout(self, env_ids: Sequence[int]) -> Array:
        """Refuse envs that cannot be stepped now, as a step does, or whose states are not known.

        Returns:
            ``(k,)`` bool: which of them are at the beginning of an episode.
        """
        self._settle()
        self._check(env_ids)
        self.episodes.refuse_unknown(env_ids)
        return self.episodes.are_new(env_ids)

    # ---------------------------------------------------------------- answers

    def _deliver(self, landed: Landed, align: Align) -> StepResult | StepBatch:
        """Shape what has landed for the user, and forget it.

        Raises:
            BaseException: What an env raised; ``error.partial`` has the others' results.
        """
        if landed.begun:
            landed = self._file_resets(landed)
        whole, unpaid = self._judge(landed)
        failures = whole.failures
        landed = whole.without_failures() if failures else whole
        try:
            result = self._teller.tell(self._pool.batch, landed, align)
            if unpaid:  # they have stepped: where their episodes are is noted, and nobody is told
                self._teller.tell(self._pool.batch, whole.without_failure_of(unpaid), "batch")
        except (ValueError, TypeError) as error:  # from a user's own space, say
            self._settle()
            self._flights.forget([*landed.env_ids, *failures])
            raise EnvContractError(f"What the envs answered cannot be batched: {error}.") from error
        # Last, so that an interrupt before these lines loses nothing.
        self._unsettled = None
        if landed.restarted and self._recovery is not None:
            self._recovery.forget(landed.restarted)
        if self._flights:
            self._flights.forget([*landed.env_ids, *failures])
        if failures:
            self.episodes.lose(env_id for env_id, failure in failures.items() if failure.operation != "step")
            raise_failures([failures[env_id] for env_id in sorted(failures)], partial=result)
        return result

    def _file_resets(self, landed: Landed) -> Landed:
        """Return what has landed with reward and flags of resets, which write none; who found no episode rests."""
        rows = self._pool.batch.rows(landed.begun)
        self._pool.batch.rewards[rows] = 0.0
        self._pool.batch.flags[rows] = False
        exhausted = [env_id for env_id in landed.exhausted if env_id in landed.begun]
        self.episodes.note_exhausted(exhausted)
        for env_id in exhausted:
            self.episodes.reset_infos[env_id] = self.episodes.absent_info(env_id)
        return landed.with_resting(exhausted) if exhausted else landed

    def _judge(self, landed: Landed) -> tuple[Landed, Sequence[int]]:
        """Return what has landed with all that has failed in it, and what could be mended mended.

        Also the ids of envs that have failed in nothing but their reward.
        """
        wrong: Sequence[int] = ()
        if self._reward_dtype is not None:
            landed, wrong = refuse_other_rewards(self._pool.batch, landed, self._reward_dtype)
        if landed.failures and self._recovery is not None:
            landed = self._mend(landed, self._recovery)
        return landed, [env_id for env_id in wrong if env_id in landed.failures] if wrong else wrong

    def _mend(self, landed: Landed, recovery: Recovery) -> Landed:
        """Restart what failed: it then counts as cut off, and its state is the first of its next episode."""
        raised = {env_id: failure for env_id, failure in landed.failures.items() if env_id in landed.begun}
        others = {env_id: failure for env_id, failure in landed.failures.items() if env_id not in raised}
        mended, left = recovery.mend(others)
        batch, extras = self._pool.batch, dict(landed.extras)
        for env_id, (failure, begun) in mended.items():
            row = env_id - batch.layout.first
            batch.rewards[row] = 0.0
            batch.flags[row] = False, True
            info = {**(begun.info or {} if begun.is_exhausted else {}), "failure": noted(failure)}
            extras[env_id] = Extra(info, begun.loose, reset_info=begun.info, is_exhausted=begun.is_exhausted)
            self.episodes.reset_infos[env_id] = begun.info or {}
        self.episodes.keep(mended)
        return Landed(landed.env_ids, landed.stepped, extras, {**raised, **left}, mended.keys(), landed.begun)
