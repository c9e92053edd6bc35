"""Resets and steps: what is sent, what is in flight, and which results have arrived."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np

from parallelenv.contract.actions import ActionReader
from parallelenv.contract.batch import Array, Layout, gather_states
from parallelenv.contract.copying import deep_copy
from parallelenv.contract.failures import NO_FAILURES, Failure, raise_failures, with_note
from parallelenv.contract.message_text import list_ids
from parallelenv.contract.protocol import NOTHING, Extra
from parallelenv.contract.spaces import pick_rows
from parallelenv.engine.assemble import Align, Assembler, first_states
from parallelenv.engine.checkpoint import Checkpoint
from parallelenv.engine.done_policies import DonePolicy
from parallelenv.engine.env_table import EnvTable
from parallelenv.engine.recovery import Recovery
from parallelenv.engine.rewards import refuse_other_rewards
from parallelenv.engine.tickets import InFlight, Outcome, Request
from parallelenv.engine.worker_pool import Pool
from parallelenv.errors import EnvBusyError, EnvContractError, NothingInFlightError, WorkerTimeoutError
from parallelenv.results import StepBatch, StepResult

ResetArguments = tuple[int | None, dict[str, Any] | None]
"""Seed and options for the reset of one env."""
ResetArgumentsOfEach = Sequence[ResetArguments]
"""Seeds and options of several envs."""


@dataclass(slots=True)
class ResetTicket:
    """A reset in flight: its envs, their arguments, and the request."""

    env_ids: Sequence[int]
    each: ResetArgumentsOfEach
    request: Request


class Stepper:
    """Steps and resets the envs of a pool under a done policy.

    Args:
        pool: The pool of the envs.
        policy: What happens when an episode ends.
        copy: Whether states are copied for the user.
        timeout: Seconds that a step may take; ``None`` means no limit.
        recovery: Restarts envs that fail; ``None``: they are not restarted.
        reward_dtype: Dtype that rewards must fit as numbers; ``None``: any type is allowed.
        as_given: See `ActionReader`.

    Attributes:
        pool: As given.
        policy: As given.
        recovery: As given.
        episodes: The table of the episodes.
        timeout: Seconds that a call may take without a timeout of its own.
        copies: Whether states are copied for the user.
    """

    def __init__(
        self,
        pool: Pool,
        policy: DonePolicy,
        copy: bool,
        timeout: float | None,
        recovery: Recovery | None,
        reward_dtype: np.dtype[Any] | None = None,
        as_given: bool = False,
    ) -> None:
        self.pool = pool
        self.policy = policy
        stepless = (env_id for env_id, one in zip(pool.env_ids, pool.facts, strict=True) if not one.has_steps)
        self.episodes = EnvTable(pool.env_ids, policy, frozenset(stepless))
        self._assembler = Assembler(policy, self.episodes, copy)
        self.copies = copy
        self.timeout = timeout
        self.recovery = recovery
        self._reward_dtype = reward_dtype
        self._actions = ActionReader(pool.layout, keeps_graphs=pool.keeps_graphs, as_given=as_given)
        self._flights = InFlight()
        # The latest step, from before its first message is sent until its result is returned to the user.
        # If that is interrupted, the next call finds the step here.
        self._unsettled: tuple[Sequence[int], Request] | None = None
        self._asked: dict[int, ResetArguments] = {}  # arguments of resets that were sent, to repeat lost ones
        self._retried = 0.0  # when some were last repeated
        # Envs whose latest call was a completed step: the next one needs no checks. Every other call unsets it.
        self._proven: Sequence[int] | None = None

    def under(self, policy: DonePolicy, *, always_copies: bool, reward_dtype: np.dtype[Any] | None) -> Self:
        """Return a stepper of the same pool with another done policy, for an adapter. All envs then need a reset.

        Args:
            policy: What happens when an episode ends.
            always_copies: Whether states are copied even if the user asked for views.
            reward_dtype: See `Stepper`.

        Raises:
            EnvBusyError: If a step is in flight.
        """
        self._settle()
        self._refuse_busy(self.pool.env_ids)
        if self.recovery is not None:
            self.recovery.forget(self.pool.env_ids)
        copy = self.copies or always_copies
        return type(self)(self.pool, policy, copy, self.timeout, self.recovery, reward_dtype, True)

    @property
    def under_way(self) -> list[int]:
        """Ids of envs with a step whose result was not delivered, ascending."""
        if self._unsettled is None:
            return sorted(self._flights.env_ids) if self._flights else []
        return sorted({*self._unsettled[0], *self._flights.env_ids})

    # ---------------------------------------------------------------- episodes

    def begin_reset(self, env_ids: Sequence[int], each: ResetArgumentsOfEach) -> ResetTicket:
        """Send the resets; `finish_reset` waits for them.

        Args:
            env_ids: The envs, in the order of the result. Their undelivered steps are dropped.
            each: Seed and options of each.
        """
        self._prepare_reset(env_ids, each)
        return ResetTicket(env_ids, each, self._post_reset(env_ids, each))

    def _prepare_reset(self, env_ids: Sequence[int], each: ResetArgumentsOfEach) -> None:
        self._settle()
        self.episodes.refuse_stepless(env_ids)
        if self.recovery is not None:
            self.recovery.note_seeds(env_ids, [seed for seed, _ in each])
            self._restart_unasked(env_ids, self.pool.death_errors(env_ids), self.recovery)

    def finish_reset(self, resetting: ResetTicket, timeout: float | None, align: Align = "item") -> Any:
        """Return the first states: batched, or with align ``"batch"`` a list; ``None`` for an env that is exhausted.

        Args:
            resetting: The ticket of `begin_reset`.
            timeout: Seconds; ``None`` means the pool's own.
            align: See `step`.

        Raises:
            WorkerTimeoutError: If they do not arrive in time. This can be called again.
            BaseException: What an env raised; ``error.partial`` has the states of the others, whose episodes have
                begun.
            ExhaustedError: If an env has no further episode, and the done policy lets no env rest.
        """
        env_ids, request = resetting.env_ids, self._await_reset(resetting, timeout)
        failures, extras = request.failures, request.values
        good = tuple(env_id for env_id in env_ids if env_id not in failures) if failures else env_ids
        exhausted = [env_id for env_id, extra in extras.items() if extra.is_exhausted]
        begun = [env_id for env_id in good if env_id not in exhausted] if exhausted else good
        landed = Outcome(good, begun, extras, failures)
        states = first_states(self.pool.batch, landed, align == "batch", self.copies)
        for env_id in good:
            self.episodes.reset_infos[env_id] = extras.get(env_id, NOTHING).info or {}
        self.episodes.note_begun(begun, self.pool.batch.rows(begun))
        self.episodes.note_exhausted(exhausted)
        request.raise_failures(partial=states)
        if exhausted:
            self.episodes.refuse_exhausted(good, partial=states)
        return states

    def _post_reset(self, env_ids: Sequence[int], each: ResetArgumentsOfEach, *, flies: bool = False) -> Request:
        def announce(request: Request) -> None:
            self._lose(env_ids)  # they stay lost if anything goes wrong
            if flies:
                self._unsettled = (env_ids, request)

        failed = NO_FAILURES if self.recovery is None else self.pool.death_errors(env_ids)
        return self.pool.post("reset", env_ids, each, None, announce, failed, flies=flies)

    def _lose(self, env_ids: Sequence[int]) -> None:
        """Drop undelivered steps of envs, which then need a reset."""
        self._flights.forget(env_ids)
        self.episodes.lose(env_ids)
        if self.recovery is not None:
            self.recovery.forget(env_ids)

    def end_episodes(self, operation: str, env_ids: Sequence[int], each: Sequence[Any], common: Any) -> None:
        """Run an operation that ends the episodes of envs; they need a reset afterwards."""
        self._settle()
        request = self.pool.post(operation, env_ids, each, common, lambda _: self._lose(env_ids))
        self.pool.wait(request, self.timeout)
        request.raise_failures()

    def note_seeds(self, env_ids: Sequence[int], seeds: Sequence[int | None]) -> None:
        """Store seeds that envs were given by other means than a reset."""
        if self.recovery is not None:
            self.recovery.note_seeds(env_ids, seeds)

    def _await_reset(self, resetting: ResetTicket, timeout: float | None) -> Request:
        """Wait for resets; with a recovery repeat them until no worker dies or hangs."""
        while True:
            self._await(resetting.request, timeout)
            failures = resetting.request.failures
            lost = {env_id: failure for env_id, failure in failures.items() if failure.is_of_worker}
            if self.recovery is None or not lost:
                return resetting.request
            self._restart_unasked(resetting.env_ids, lost, self.recovery)
            resetting.request = self._post_reset(resetting.env_ids, resetting.each)

    def _restart_unasked(self, env_ids: Sequence[int], lost: Mapping[int, Failure], recovery: Recovery) -> None:
        """Restart lost envs without reporting it, since the user wants a new episode of them anyway."""
        _, left = recovery.restart_failed(lost)
        recovery.forget(env_ids)
        raise_failures([left[env_id] for env_id in sorted(left)], partial=None)

    def _await(self, request: Request, timeout: float | None) -> None:
        """Wait for hosts to reply.

        Args:
            request: The request to wait for.
            timeout: Seconds; ``None`` means the pool's own, and then a recovery restarts envs that are late.

        Raises:
            WorkerTimeoutError: If they do not reply in time. The wait can be repeated.
        """
        if timeout is None and self.recovery is not None:
            self.pool.wait_or_give_up(request)
        else:
            self.pool.wait(request, self.timeout if timeout is None else timeout)

    def latest_states(self, env_ids: Sequence[int] | None = None) -> Any:
        """Return the latest states of envs, by default of all, batched.

        Raises:
            UnpicklableError: If a part of a state cannot be copied from its worker.
        """
        asked, batch = self.pool.env_ids if env_ids is None else env_ids, self.pool.batch
        has_loose = any(array is None for array in batch.states)
        extras = self.pool.ask("look", asked).values if has_loose else {}
        return gather_states(batch, asked, batch.rows(asked), extras, self.copies)

    def restart(self, env_ids: Sequence[int]) -> tuple[int, ...]:
        """Rebuild envs and return the ids of all that were rebuilt; they need a reset."""
        self._settle()
        request = self.pool.rebuild(env_ids, self._lose)
        rebuilt = tuple(sorted({*request.env_ids, *request.values}))
        request.raise_failures(partial=tuple(env_id for env_id in rebuilt if env_id not in request.failures))
        return rebuilt

    def pause(self, env_ids: Sequence[int]) -> None:
        """Leave envs out until they are resumed."""
        self._proven = None
        self.episodes.pause(env_ids)

    # ---------------------------------------------------------------- saving and loading

    def progress(self) -> Checkpoint:
        """Return the state of the episodes.

        Raises:
            EnvBusyError: If a step is in flight.
        """
        self._settle()
        self._refuse_busy(self.pool.env_ids)
        return self.episodes.progress()

    def restore(self, progress: Checkpoint, lost: Collection[int]) -> tuple[int, ...]:
        """Load the state of the episodes, see `EnvTable.go_on_from`. Undelivered steps are dropped."""
        self._settle()
        everyone = self.pool.env_ids
        self._flights.forget(everyone)
        if self.recovery is not None:
            self.recovery.forget(everyone)
        return self.episodes.restore(progress, lost)

    # ---------------------------------------------------------------- steps

    def step(self, action: Any, env_ids: Sequence[int], align: Align) -> StepResult | StepBatch:
        """Step envs and return the result."""
        stepped, request = self._launch(action, env_ids)
        if request is None:
            return self._deliver(Outcome(env_ids, stepped, {}, {}), align)
        self._await(request, None)
        result = self._deliver(Outcome(env_ids, stepped, request.values, request.failures), align)
        self._proven = env_ids
        return result

    def _launch(
        self, action: Any, env_ids: Sequence[int], *, flies: bool = False
    ) -> tuple[Sequence[int], Request | None]:
        """Send a step to the envs that take part in it; return them and their request.

        Args:
            action: One per env.
            env_ids: The envs.
            flies: See `Pool.post`.

        Raises:
            EnvBusyError: If one has an undelivered step.
            EnvPausedError: If one is paused.
            WorkerDiedError: If the worker of one is dead.
            ResetNeededError: If one has no episode.
            ExhaustedError: If one has no further episode, and the done policy lets no env rest.
            ActionError: If the actions do not fit. In all cases nothing was sent.
        """
        if env_ids is not self._proven:
            self._settle()
            self._check(env_ids)
        self._proven = None
        may_rest = self.policy.skips_done or self.episodes.exhausted
        stepped, chosen = self.episodes.choose(env_ids) if may_rest else (env_ids, None)
        each = self._actions.take(self.pool.batch, action, env_ids, stepped, chosen)
        if not stepped:
            return stepped, None

        self.episodes.note_stepped(stepped)

        def announce(request: Request) -> None:
            self._unsettled = (env_ids, request)

        failed = self.recovery.failures_before(stepped) if self.recovery is not None else NO_FAILURES
        # `False` instead of an empty tuple: the step then fits a shorter message.
        who_begins = self.episodes.ended(stepped) or False if self.policy.resets_next else self.policy.autoreset
        return stepped, self.pool.post("step", stepped, each, who_begins, announce, failed, flies=flies)

    def _settle(self) -> None:
        """Adopt a step whose call was interrupted."""
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
                f"interrupted or late). Get it with {self.pool.ways_to_wait(len(busy))}, or drop it with reset(). "
                "Both wait for envs that have not answered: rebuild one that hangs with restart(id)."
            )

    def _check(self, env_ids: Sequence[int]) -> None:
        self._refuse_busy(env_ids)
        self.episodes.refuse_paused(env_ids)
        if self.recovery is None:
            self.pool.refuse_dead(env_ids)
        self.episodes.refuse_fresh(env_ids)

    def refuse_unready(self, env_ids: Sequence[int]) -> None:
        """Refuse envs that have a step in flight or no episode."""
        self._settle()
        self._refuse_busy(env_ids)
        self.episodes.refuse_fresh(env_ids)

    # ---------------------------------------------------------------- rollouts

    def begin_rollout(self, env_ids: Sequence[int]) -> Array:
        """Refuse, like a step, envs that cannot be stepped now, and also envs whose states are not known.

        Returns:
            ``(k,)`` bool: whether each env is at the beginning of an episode.
        """
        self._settle()
        self._check(env_ids)
        self.episodes.refuse_unknown(env_ids)
        return self.episodes.are_new(env_ids)

    # ---------------------------------------------------------------- results

    def _deliver(self, landed: Outcome, align: Align) -> StepResult | StepBatch:
        """Return an outcome in the user's form, and forget it.

        Raises:
            BaseException: What an env raised; ``error.partial`` is the result of the others.
        """
        if landed.begun:
            landed = self._file_resets(landed)
        whole, unpaid = self._judge(landed)
        failures = whole.failures
        landed = whole.without_failures() if failures else whole
        try:
            result = self._assembler.assemble(self.pool.batch, landed, align)
            if unpaid:  # they have stepped: their episodes are recorded, the result is dropped
                self._assembler.assemble(self.pool.batch, whole.without_failure_of(unpaid), "batch")
        except (ValueError, TypeError) as error:  # for example from a user's own space
            self._settle()
            self._flights.forget([*landed.env_ids, *failures])
            raise EnvContractError(f"What the envs answered cannot be batched: {error}.") from error
        # At the end, so that an interrupt before these lines loses nothing.
        self._unsettled = None
        if landed.restarted and self.recovery is not None:
            self.recovery.forget(landed.restarted)
        if self._flights:
            self._flights.forget([*landed.env_ids, *failures])
        if failures:
            self.episodes.lose(env_id for env_id, failure in failures.items() if failure.operation != "step")
            raise_failures([failures[env_id] for env_id in sorted(failures)], partial=result)
        return result

    def _file_resets(self, landed: Outcome) -> Outcome:
        """Write reward and flags of resets, which have none, and return the outcome with exhausted envs at rest."""
        rows = self.pool.batch.rows(landed.begun)
        self.pool.batch.rewards[rows] = 0.0
        self.pool.batch.flags[rows] = False
        exhausted = [env_id for env_id in landed.exhausted if env_id in landed.begun]
        self.episodes.note_exhausted(exhausted)
        for env_id in exhausted:
            self.episodes.reset_infos[env_id] = self.episodes.absent_info(env_id)
        return landed.with_resting(exhausted) if exhausted else landed

    def _judge(self, landed: Outcome) -> tuple[Outcome, Sequence[int]]:
        """Return an outcome with all its failures, after restarts where possible.

        Also the ids of envs whose only failure is their reward.
        """
        wrong: Sequence[int] = ()
        if self._reward_dtype is not None:
            landed, wrong = refuse_other_rewards(self.pool.batch, landed, self._reward_dtype)
        if landed.failures and self.recovery is not None:
            landed = self._restart_failed(landed, self.recovery)
        return landed, [env_id for env_id in wrong if env_id in landed.failures] if wrong else wrong

    def _restart_failed(self, landed: Outcome, recovery: Recovery) -> Outcome:
        """Restart failed envs: their episodes count as truncated, and their states are the first of the next ones."""
        raised = {env_id: failure for env_id, failure in landed.failures.items() if env_id in landed.begun}
        others = {env_id: failure for env_id, failure in landed.failures.items() if env_id not in raised}
        restarted, left = recovery.restart_failed(others)
        batch, extras = self.pool.batch, dict(landed.extras)
        for env_id, (failure, begun) in restarted.items():
            row = env_id - batch.layout.first
            batch.rewards[row] = 0.0
            batch.flags[row] = False, True
            info = {**(begun.info or {} if begun.is_exhausted else {}), "failure": with_note(failure)}
            extras[env_id] = Extra(info, begun.loose, reset_info=begun.info, is_exhausted=begun.is_exhausted)
            self.episodes.reset_infos[env_id] = begun.info or {}
        self.episodes.keep(restarted)
        return Outcome(landed.env_ids, landed.stepped, extras, {**raised, **left}, restarted.keys(), landed.begun)

    # ---------------------------------------------------------------- waiting for all envs

    def begin(self, action: Any, env_ids: Sequence[int]) -> None:
        """Send a step of all of these envs, for `finish`."""
        self._launch(action, env_ids)

    def finish(self, env_ids: Sequence[int], timeout: float | None, align: Align) -> StepResult | StepBatch:
        """Return the result of a step that was sent, or whose call was interrupted.

        Args:
            env_ids: All of the envs, in the order of the result.
            timeout: Seconds; ``None`` means the pool's own.
            align: See `step`.

        Raises:
            NothingInFlightError: If no step of one of them is in flight.
            WorkerTimeoutError: If they do not reply in time. This can be called again.
        """
        if self._unsettled is None or self._unsettled[0] is not env_ids:
            self._settle()
            return self._collect(env_ids, timeout, align)
        request = self._unsettled[1]
        self._await(request, timeout)
        return self._deliver(Outcome(env_ids, request.env_ids, request.values, request.failures), align)

    def _collect(self, env_ids: Sequence[int], timeout: float | None, align: Align) -> StepResult | StepBatch:
        flights = self._flights
        missing = [env_id for env_id in env_ids if env_id not in flights]
        if missing:
            raise NothingInFlightError(f"No step of envs {list_ids(missing)} is in flight. Begin one first.")
        self._await_landing(len(flights), timeout, time.monotonic())
        return self._deliver(flights.part(env_ids), align)

    # ---------------------------------------------------------------- in order of arrival

    def send(self, action: Any, env_ids: Sequence[int]) -> None:
        """Send a step of envs."""
        _, request = self._launch(action, env_ids, flies=True)
        self._unsettled = None
        self._flights.adopt(env_ids, request)

    def send_reset(self, env_ids: Sequence[int], each: ResetArgumentsOfEach) -> None:
        """Send resets, whose first states `receive` returns. Arguments: see `begin_reset`."""
        self._prepare_reset(env_ids, each)
        self._post_reset(env_ids, each, flies=True)
        self._settle()
        self._asked.update(zip(env_ids, each, strict=True))
        # Now, not when they are received: with StopAll it would otherwise depend on the order of arrival which envs
        # are done.
        self.episodes.note_asked_to_begin(list(env_ids))

    def receive(
        self, min_envs: int, max_envs: int | None, timeout: float | None, align: Align
    ) -> StepResult | StepBatch:
        """Return the results of envs that have finished their step.

        ``timeout``: see `ParallelEnv.recv`.
        """
        self._await_landing(self._wanted(min_envs), timeout, time.monotonic())
        return self._deliver(self._flights.landed(max_envs), align)

    def look(self, min_envs: int, timeout: float | None, begin: float) -> bool:
        """Return without waiting whether `take` has something to return; the timeout counts from ``begin``.

        Errors: see `receive`.
        """
        wanted, flights = self._wanted(min_envs), self._flights
        while flights.num_landed < wanted and self.pool.pump(time.monotonic()):
            pass
        if flights.num_landed >= wanted:
            return not self._retry_resets()
        deadline = self.deadline(timeout, begin)
        if deadline is not None and time.monotonic() >= deadline:
            self._be_late(timeout)
        return False

    def take(self, min_envs: int, max_envs: int | None, align: Align) -> StepResult | StepBatch | None:
        """Return the result of `receive`, or ``None`` if another caller took it since `look`. This steps no env."""
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
        """Wait until that many results have arrived. Timeout and errors: see `_await`; it counts from ``begin``."""
        while self._flights.num_landed < wanted or self._retry_resets():
            if not self.pool.pump(self.deadline(timeout, begin)):
                self._be_late(timeout)

    def deadline(self, timeout: float | None, begin: float) -> float | None:
        """Return until when to wait. Repeated resets have the full time again."""
        limit = self.timeout if timeout is None else timeout
        return None if limit is None else max(begin, self._retried) + limit

    def _be_late(self, timeout: float | None) -> None:
        """Give up what is in flight if there is a recovery, else raise the timeout."""
        late = self.pool.late(self._flights.running, self.timeout if timeout is None else timeout, "step")
        if timeout is not None or self.recovery is None:
            raise late
        for request in self._flights.requests:
            self.pool.give_up(request, late)

    def _retry_resets(self) -> bool:
        """With a recovery, repeat resets whose worker died or hung; return whether there were any."""
        lost = self._flights.lost_resets() if self.recovery is not None else {}
        if not lost or self.recovery is None:
            return False
        env_ids = tuple(lost)
        self._flights.forget(env_ids)  # later failures are then reported once
        self._restart_unasked(env_ids, lost, self.recovery)
        self._post_reset(env_ids, [self._asked[env_id] for env_id in env_ids], flies=True)
        self._settle()
        self._retried = time.monotonic()
        return True

    # ---------------------------------------------------------------- streams and evaluations

    @property
    def layout(self) -> Layout:
        """Layout of the batch."""
        return self.pool.layout

    @contextlib.contextmanager
    def borrowed(self, env_ids: Sequence[int]) -> Iterator[Stepper]:
        """Yield a stepper of some of the envs under which ended envs are stepped on, whatever the policy is here.

        Steps of these envs still in flight at the end are dropped; the envs need a reset.

        Raises:
            EnvBusyError, EnvPausedError, WorkerDiedError: If an env is not available.
        """
        self._settle()
        self._refuse_busy(env_ids)
        self.episodes.refuse_paused(env_ids)
        if self.recovery is None:
            self.pool.refuse_dead(env_ids)
        other = type(self)(self.pool, DonePolicy(), True, self.timeout, self.recovery)
        other.episodes.share_score(self.episodes.score)
        self.episodes.lose(env_ids)
        try:
            yield other
        finally:
            self.episodes.take_over(other.episodes, env_ids)

    def late_for_good(self, env_ids: Sequence[int]) -> WorkerTimeoutError:
        """Return the error for late envs whose steps in flight are dropped."""
        return self.pool.late(env_ids, self.timeout, "run_episodes")

    @property
    def begins_next_episodes(self) -> bool:
        """Whether an ended env begins its next episode by itself."""
        return self.policy.autoreset

    @property
    def is_under_way(self) -> bool:
        """Whether anything was sent and not received."""
        self._settle()
        return bool(self._flights)

    @property
    def has_landed(self) -> bool:
        """Whether a result has arrived that was not received."""
        self._settle()
        return bool(self._flights.num_landed)

    def waiting(self) -> list[int]:
        """Return the envs that can be stepped: not paused, with nothing in flight, and not ended.

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
            result: A result with their states, if it has all. Otherwise this waits for busy workers.
        """
        structure = self.pool.batch.layout.states
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
        """Return a result whose states stay valid after the next call."""
        if self.copies:
            return result
        _, rewards, dones, infos = result
        flags = result.terminated, result.truncated, result.env_ids
        return StepResult(deep_copy(result.states), rewards, dones, infos, *flags)


def _may_be_absent(result: StepResult) -> bool:
    """Whether some states of a result may be missing."""
    states = result.states
    return isinstance(states, np.ndarray) and states.dtype == object and any(state is None for state in states)
