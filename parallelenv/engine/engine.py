"""The caller's side of every call, the same in every mode: submit, wait, collect.

*Submit* checks a call, writes its actions and sends its commands; the ticket is in the `EnvTable` before the first
command is sent. *Wait* can be interrupted anywhere. *Collect* gives what has arrived the user's form, restarts failed
envs if there is a recovery, and removes the ticket. A step is these three, one after the other; other calls make some
of them now and the others later.
"""

from __future__ import annotations

import _thread
import contextlib
import copy
import functools
import math
import signal
import threading
import time
import weakref
from collections import deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, Self

import numpy as np

from parallelenv.contract import arguments
from parallelenv.contract.actions import ActionReader
from parallelenv.contract.arguments import Ids, Options, Seeds, parse_ids
from parallelenv.contract.batch import Array, gather_states
from parallelenv.contract.copying import deep_copy
from parallelenv.contract.env_specs import EnvFactory
from parallelenv.contract.error_text import list_ids, name_envs
from parallelenv.contract.failures import NO_FAILURES, Failure, raise_failures, with_note
from parallelenv.contract.protocol import NOTHING, Backend, Extra, Lookup, MethodCall, WorkerSpec
from parallelenv.contract.spaces import Action, Info, Space, Spaces, State, pick_rows
from parallelenv.engine.assemble import Align, Assembler, first_states
from parallelenv.engine.checkpoint import Checkpoint
from parallelenv.engine.done_policies import DonePolicy
from parallelenv.engine.env_table import EnvTable
from parallelenv.engine.event_loop import sleep_until_woken
from parallelenv.engine.recovery import Recovery
from parallelenv.engine.rewards import refuse_other_rewards
from parallelenv.engine.step_plan import StepPlan
from parallelenv.engine.thread_guard import Guard, single_threaded, single_threaded_in
from parallelenv.engine.tickets import Outcome, Ticket
from parallelenv.engine.worker_pool import Pool
from parallelenv.errors import (
    AbsentAttributeError,
    EnvBusyError,
    EnvContractError,
    NothingInFlightError,
    UsageError,
)
from parallelenv.results import StepBatch, StepResult

_MOST_PLANS, _NUM_LATEST = 64, 8
_MOMENT = 0.05
"""Seconds after which a finalizer has surely returned."""
ResetArguments = tuple[int | None, Info | None]
"""Seed and options for the reset of one env."""
ResetArgumentsOfEach = Sequence[ResetArguments]
"""Seeds and options of several envs."""


class Engine:
    """The engine of a `ParallelEnv`, also for adapters, wrappers, collectors and displays: `ParallelEnv.engine`.

    An adapter holds the `ParallelEnv`, sets its own rules for the end of episodes by `hand_over`, and keeps no state of
    episodes itself. So attributes, rendering, `ParallelEnv.restart` and `ParallelEnv.save_state` still work beside it,
    and closing one closes the other.

    The arguments are those of `ParallelEnv`, checked; further ones are of `Pool`.

    Attributes:
        pool: The workers.
        table: Where each env is.
        assembler: Builds results of steps.
        actions: Reads the user's actions.
        reward_dtype: Dtype that rewards must fit as numbers; ``None``: any type is allowed.
        recovery: Restarts envs that fail; ``None``: they are not restarted.
        guard: Refuses calls of other threads.
        seeds: Seed of each env's next reset, by env id.
        contract: The call that handed the envs over to an adapter; ``None`` if none did.
        asynchronous: The done policy, as the user wrote it; after `hand_over` the contract.

    Raises:
        BaseException: What an env's constructor raised; nothing is left running.
    """

    plans_steps = True
    """Whether steps that are repeated are planned. The results are the same; tests compare them."""

    def __init__(
        self,
        backend: Backend,
        env_factories: Sequence[EnvFactory],
        done_policy: DonePolicy,
        asynchronous: str | None,
        *,
        spaces: Spaces | None,
        copy: bool,
        timeout: float | None,
        max_restarts: int | None,
        spec: WorkerSpec,
        **pool_arguments: Any,
    ) -> None:
        self.guard = self._guard = Guard()
        self.asynchronous = asynchronous
        self.contract: str | None = None
        self._hints: dict[str, str] = {}  # by name of an absent attribute
        try:
            self.pool = Pool(backend, env_factories, timeout=timeout, spec=spec, **pool_arguments)
            self._finalizer = weakref.finalize(self, _close_dropped, self.pool)
            self.pool.build(done_policy.autoreset, spaces)
        except BaseException:
            backend.close((), 0.0)  # whatever was started, even if an interrupt came before `self.pool` was set
            raise
        self.env_ids = self.pool.env_ids
        self.num_envs = len(self.env_ids)
        self.timeout = timeout
        self.recovery = None if max_restarts is None else Recovery(self.pool, max_restarts)
        self.learns_infos = True
        self._retried = 0.0  # when lost resets were last repeated
        self.follow(done_policy, copy)
        seeds = arguments.spread_seeds(spec.seed, self.env_ids, self.num_envs, whole=False)
        self.seeds: dict[int, int | None] = dict(enumerate(seeds))

    def follow(
        self,
        done_policy: DonePolicy,
        copies: bool,
        reward_dtype: np.dtype[Any] | None = None,
        *,
        as_given: bool = False,
    ) -> None:
        """Apply rules for the end of episodes, in a new table: all envs need a reset.

        With a ``reward_dtype`` rewards must be numbers that fit it. ``as_given``: see `ActionReader`.
        """
        stepless = (env_id for env_id, one in zip(self.env_ids, self.pool.facts, strict=True) if not one.has_steps)
        self.done_policy = done_policy
        self.copies = copies
        self.table = EnvTable(self.env_ids, done_policy, frozenset(stepless), self.pool.settle)
        self.assembler = Assembler(done_policy, self.table, copies)
        self.reward_dtype = reward_dtype
        self.actions = ActionReader(self.pool.layout, keeps_graphs=self.pool.keeps_graphs, as_given=as_given)
        # By align, of all envs that are not paused; or by align and env ids.
        self.plans: dict[Any, StepPlan] = {}
        self._refused: dict[Any, int] = {}  # steps that cannot be planned, with the pool's generation
        self._latest: deque[Any] = deque(maxlen=_NUM_LATEST)  # shapes of the latest steps that had no plan
        # What the latest step returned beside the batch, and of how many envs, until it is learned from.
        self._said: tuple[Mapping[int, Extra], int] | None = None

    def close(self, timeout: float) -> None:
        """Close all envs and end all workers, which have ``timeout`` seconds to close their envs."""
        self.guard.is_closed = True
        self.plans.clear()  # they hold the batch
        self.pool.close(timeout)
        self._finalizer.detach()

    # ---------------------------------------------------------------- arguments of calls

    def ids(self, id: Ids, everyone: bool = False) -> tuple[int, ...]:
        """Return the env ids of an ``id`` argument; ``None``: all envs that are not paused; with ``everyone`` all."""
        if id is not None:
            return parse_ids(id, self.num_envs)
        return self.env_ids if everyone else self.table.unpaused

    def beginnings(self, env_ids: Sequence[int], seed: Seeds, options: Options) -> ResetArgumentsOfEach:
        """Return seed and options for the next reset of each env. Arguments: see `ParallelEnv.reset`."""
        seeds = arguments.spread_seeds(seed, env_ids, self.num_envs, whole=False)
        if seed is None:
            seeds = [self.seeds.get(env_id) for env_id in env_ids]
        return list(zip(seeds, arguments.spread_options(options, env_ids), strict=True))

    def forget_seeds(self, env_ids: Sequence[int]) -> None:
        """Drop the seeds that were set for the next reset, since they are used."""
        for env_id in env_ids:
            self.seeds.pop(env_id, None)

    # ---------------------------------------------------------------- submit

    def submit_step(self, action: Action, env_ids: Sequence[int], *, separately: bool = False) -> Ticket:
        """Send a step of envs, one action each, whose result has the order of ``env_ids``.

        Raises:
            EnvBusyError: If one is paused, or has a step or reset whose result was not returned.
            WorkerDiedError: If the worker of one is dead.
            ResetNeededError: If one has no episode.
            ExhaustedError: If one has no further episode, and the done policy lets no env rest.
            ActionError: If the actions do not fit. In all cases nothing was sent.
        """
        table, policy = self.table, self.done_policy
        self._refuse_not_ready(env_ids)
        may_rest = policy.skips_done or table.exhausted
        stepped, chosen = table.choose(env_ids) if may_rest else (env_ids, None)
        each = self.actions.take(self.pool.batch, action, env_ids, stepped, chosen)

        def announce(ticket: Ticket) -> None:
            table.occupy(env_ids, ticket, separately=separately)

        failed = NO_FAILURES if self.recovery is None else self.recovery.failures_before(stepped)
        return self.pool.submit(
            "step",
            stepped,
            each,
            autoreset=policy.autoreset,
            begins=table.ended(stepped) if policy.resets_next else (),
            announce=announce,
            failed=failed,
        )

    def submit_reset(self, env_ids: Sequence[int], each: ResetArgumentsOfEach) -> Ticket:
        """Send resets, for which `collect_reset` waits. Steps of these envs that were not returned are dropped."""
        self._prepare_reset(env_ids, each)
        return self._send_reset(env_ids, each)

    def _prepare_reset(self, env_ids: Sequence[int], each: ResetArgumentsOfEach) -> None:
        self.table.refuse_stepless(env_ids)
        if self.recovery is not None:
            self.recovery.note_seeds(env_ids, [seed for seed, _ in each])
            self._restart_silently(env_ids, self.pool.death_errors(env_ids), self.recovery)

    def _send_reset(self, env_ids: Sequence[int], each: ResetArgumentsOfEach, *, separately: bool = False) -> Ticket:
        """Send resets. With ``separately`` their results are returned by `receive`."""

        def announce(ticket: Ticket) -> None:
            self._lose(env_ids)  # they stay lost if anything goes wrong
            if separately:
                self.table.occupy(env_ids, ticket, separately=True)

        failed = NO_FAILURES if self.recovery is None else self.pool.death_errors(env_ids)
        return self.pool.submit("reset", env_ids, each, announce=announce, failed=failed)

    def _lose(self, env_ids: Sequence[int]) -> None:
        """Drop steps of envs that were not returned; the envs then need a reset."""
        self.table.release(env_ids)
        self.table.lose(env_ids)
        if self.recovery is not None:
            self.recovery.forget(env_ids)

    def _refuse_not_ready(self, env_ids: Sequence[int]) -> None:
        self._refuse_busy(env_ids)
        self.table.refuse_paused(env_ids)
        if self.recovery is None:
            self.pool.refuse_dead(env_ids)
        self.table.refuse_fresh(env_ids)

    def _refuse_busy(self, env_ids: Sequence[int]) -> None:
        tickets = self.table.tickets
        busy = [env_id for env_id in env_ids if env_id in tickets] if tickets else []
        if busy:
            raise EnvBusyError(
                f"envs {list_ids(busy)} have a step or a reset under way whose result was not received (sent, "
                f"interrupted or late). Get it with {self.pool.ways_to_wait(len(busy))}, or drop it with reset(). "
                "Both wait for envs that have not answered: rebuild one that hangs with restart(id)."
            )

    def refuse_unready(self, env_ids: Sequence[int]) -> None:
        """Refuse envs that have a step in flight or no episode."""
        self._refuse_busy(env_ids)
        self.table.refuse_fresh(env_ids)

    # ---------------------------------------------------------------- wait

    def wait(self, ticket: Ticket, timeout: float | None, begin: float | None = None) -> None:
        """Wait for all replies to a call; the timeout counts from ``begin``, a moment of `time.monotonic`, or from now.

        Without a timeout the engine's own holds, and then a recovery restarts envs that are late.

        Raises:
            WorkerTimeoutError: If they do not arrive in time. The wait can be repeated.
        """
        if timeout is None and self.recovery is not None:
            self.pool.wait_or_give_up(ticket, begin)
        else:
            self.pool.wait(ticket, self.timeout if timeout is None else timeout, begin)

    def _wait_for_arrivals(self, wanted: int, timeout: float | None, begin: float) -> list[int]:
        """Wait until that many results have arrived, and return `EnvTable.arrived`. Timeout and errors: see `wait`."""
        while True:
            arrived = self.table.arrived
            if len(arrived) >= wanted and not self._repeat_lost_resets():
                return arrived
            if not self.pool.pump(self._deadline(timeout, begin)):
                self._be_late(timeout)

    def _deadline(self, timeout: float | None, begin: float) -> float | None:
        """Return until when to wait. Repeated resets have the full time again."""
        limit = self.timeout if timeout is None else timeout
        return None if limit is None else max(begin, self._retried) + limit

    def _be_late(self, timeout: float | None) -> None:
        """Give up what is in flight if there is a recovery, else raise the timeout."""
        running = self.table.waited_for
        late = self.pool.late(running, self.timeout if timeout is None else timeout, "step")
        if timeout is not None or self.recovery is None:
            raise late
        for ticket in dict.fromkeys(self.table.tickets[env_id] for env_id in running):
            self.pool.give_up(ticket, late)

    def _repeat_lost_resets(self) -> bool:
        """With a recovery, repeat resets whose worker died or hung; return whether there were any."""
        if self.recovery is None:
            return False
        tickets = self.table.tickets
        resets = {env_id: tickets[env_id] for env_id in self.table.arrived if tickets[env_id].operation == "reset"}
        failures = {env_id: ticket.failures.get(env_id) for env_id, ticket in sorted(resets.items())}
        lost = {env_id: failure for env_id, failure in failures.items() if failure is not None and failure.is_of_worker}
        if not lost:
            return False
        each = [resets[env_id].each[resets[env_id].env_ids.index(env_id)] for env_id in lost]  # type: ignore[index]
        env_ids = tuple(lost)
        self.table.release(env_ids)  # later failures are then reported once
        self._restart_silently(env_ids, lost, self.recovery)
        self._send_reset(env_ids, each, separately=True)
        self._retried = time.monotonic()
        return True

    # ---------------------------------------------------------------- collect

    def collect_step(self, outcome: Outcome, align: Align) -> StepResult | StepBatch:
        """Return an outcome in the user's form, and remove its tickets from the table.

        Raises:
            BaseException: What an env raised; ``error.partial`` is the result of the others.
        """
        if outcome.begun:
            outcome = self._file_resets(outcome)
        wrong: Sequence[int] = ()  # envs that have stepped, with a reward that is refused
        if self.reward_dtype is not None:
            outcome, wrong = refuse_other_rewards(self.pool.batch, outcome, self.reward_dtype)
        if outcome.failures and self.recovery is not None:
            outcome = self._restart_failed(outcome, self.recovery)
        failures = outcome.failures
        good = outcome.without_failures() if failures else outcome
        try:
            result = self.assembler.assemble(self.pool.batch, good, align)
            unpaid = [env_id for env_id in wrong if env_id in failures]
            if unpaid:  # their episodes are recorded, the result is dropped
                self.assembler.assemble(self.pool.batch, outcome.without_failure_of(unpaid), "batch")
        except (ValueError, TypeError) as error:  # for example from a user's own space
            self.table.release(outcome.env_ids)
            raise EnvContractError(f"What the envs answered cannot be batched: {error}.") from error
        # At the end, so that an interrupt before these lines loses nothing.
        self.table.release(outcome.env_ids)
        if outcome.restarted and self.recovery is not None:
            self.recovery.forget(outcome.restarted)
        if failures:
            self.table.lose(env_id for env_id, failure in failures.items() if failure.operation != "step")
            raise_failures([failures[env_id] for env_id in sorted(failures)], partial=result)
        return result

    def _file_resets(self, outcome: Outcome) -> Outcome:
        """Write reward and flags of resets, which have none, and return the outcome with exhausted envs at rest."""
        rows = self.pool.batch.rows(outcome.begun)
        self.pool.batch.rewards[rows] = 0.0
        self.pool.batch.flags[rows] = False
        self.pool.batch.drop_infos(rows)
        exhausted = [env_id for env_id in outcome.exhausted if env_id in outcome.begun]
        self.table.note_exhausted(exhausted)
        for env_id in exhausted:
            self.table.reset_infos[env_id] = self.table.absent_info(env_id)
        return outcome.with_resting(exhausted) if exhausted else outcome

    def _restart_failed(self, outcome: Outcome, recovery: Recovery) -> Outcome:
        """Restart failed envs: their episodes count as truncated, and their states are the first of the next ones."""
        raised = {env_id: failure for env_id, failure in outcome.failures.items() if env_id in outcome.begun}
        others = {env_id: failure for env_id, failure in outcome.failures.items() if env_id not in raised}
        restarted, left = recovery.restart_failed(others)
        batch, extras = self.pool.batch, dict(outcome.extras)
        for env_id, (failure, begun) in restarted.items():
            row = env_id - batch.layout.first
            batch.rewards[row] = 0.0
            batch.flags[row] = False, True
            batch.drop_infos([row])
            info = {**(begun.info or {} if begun.is_exhausted else {}), "failure": with_note(failure)}
            extras[env_id] = Extra(info, begun.loose, reset_info=begun.info, is_exhausted=begun.is_exhausted)
            self.table.reset_infos[env_id] = begun.info or {}
        self.table.keep(restarted)
        return Outcome(outcome.env_ids, outcome.stepped, extras, {**raised, **left}, restarted.keys(), outcome.begun)

    def collect_reset(self, ticket: Ticket, timeout: float | None, align: Align = "item") -> State:
        """Wait for resets; return the first states: batched, or with align ``"batch"`` a list.

        The state is ``None`` for an env that is exhausted. The seeds that were set for these resets are dropped.

        Raises:
            WorkerTimeoutError: If they do not arrive in time. This can be called again.
            BaseException: What an env raised; ``error.partial`` has the states of the others, whose episodes have
                begun.
            ExhaustedError: If an env has no further episode, and the done policy lets no env rest.
        """
        env_ids, ticket = ticket.env_ids, self._wait_for_reset(ticket, timeout)
        failures, extras = ticket.failures, ticket.values
        good = tuple(env_id for env_id in env_ids if env_id not in failures) if failures else env_ids
        exhausted = [env_id for env_id, extra in extras.items() if extra.is_exhausted]
        begun = [env_id for env_id in good if env_id not in exhausted] if exhausted else good
        states = first_states(self.pool.batch, Outcome(good, begun, extras, failures), align == "batch", self.copies)
        for env_id in good:
            self.table.reset_infos[env_id] = extras.get(env_id, NOTHING).info or {}
        self.table.note_begun(begun, self.pool.batch.rows(begun))
        self.table.note_exhausted(exhausted)
        ticket.raise_failures(partial=states)
        if exhausted:
            self.table.refuse_exhausted(good, partial=states)
        self.forget_seeds(env_ids)
        return states

    def _wait_for_reset(self, ticket: Ticket, timeout: float | None) -> Ticket:
        """Wait for resets; with a recovery repeat them until no worker dies or hangs. Return the last ticket."""
        while True:
            self.wait(ticket, timeout)
            lost = {env_id: failure for env_id, failure in ticket.failures.items() if failure.is_of_worker}
            if self.recovery is None or not lost:
                return ticket
            self._restart_silently(ticket.env_ids, lost, self.recovery)
            ticket = self._send_reset(ticket.env_ids, ticket.each or ())

    def _restart_silently(self, env_ids: Sequence[int], lost: Mapping[int, Failure], recovery: Recovery) -> None:
        """Restart lost envs without reporting it, since the user wants a new episode of them anyway."""
        _, left = recovery.restart_failed(lost)
        recovery.forget(env_ids)
        raise_failures([left[env_id] for env_id in sorted(left)], partial=None)

    # ---------------------------------------------------------------- steps and resets

    def step(self, action: Action, env_ids: Sequence[int], align: Align) -> StepResult | StepBatch:
        """Step envs and return the result."""
        plan = self.plans.get(align if env_ids is self.table.unpaused else (align, env_ids))
        if plan is None or not plan.is_valid():
            # Learn from the infos of the latest step that came as values, unless columns have infos of other results.
            # Not after that step: between its end and the return of its result an interrupt would lose the result.
            if self._said is not None and self.learns_infos and not self.table.tickets:
                (values, num_envs), self._said = self._said, None
                self.pool.learn_infos(values, num_envs)
            plan = self._plan(env_ids, align) if self.plans_steps else None
        return self.step_by_ticket(action, env_ids, align) if plan is None else plan.step(action)

    def step_by_ticket(self, action: Action, env_ids: Sequence[int], align: Align) -> StepResult | StepBatch:
        """Step envs and return the result, without a plan."""
        return self.finish_step(self.submit_step(action, env_ids), align)

    def finish_step(self, ticket: Ticket, align: Align, begin: float | None = None) -> StepResult | StepBatch:
        """Wait for a step and return its result. Timeout: see `wait`."""
        self.wait(ticket, None, begin)
        if ticket.values:
            self._said = ticket.values, len(ticket.asked)
        return self.collect_step(Outcome(ticket.env_ids, ticket.asked, ticket.values, ticket.failures), align)

    def _plan(self, env_ids: Sequence[int], align: Align) -> StepPlan | None:
        """Return a valid plan of a step; ``None`` if it cannot be planned, or is the first of its shape.

        Errors are those of `submit_step`, but for actions.
        """
        self._refuse_not_ready(env_ids)
        table, pool = self.table, self.pool
        key = align if env_ids is table.unpaused else (align, env_ids)
        plan = self.plans.get(key)
        if plan is None and self._refused.get(key) == pool.generation:
            return None
        if plan is None and key not in self._latest:  # two halves may take turns
            self._latest.append(key)
            return None
        is_unusual = (
            table.exhausted
            or table.has_first_states(env_ids)
            or (self.recovery is not None and self.recovery.has_unreported)
            or (self.done_policy.resets_next and table.ended(env_ids) != pool.batch.ended(env_ids))
        )
        if is_unusual or table.tickets or not pool.is_idle:
            return None
        stepped, chosen = table.choose(env_ids) if self.done_policy.skips_done else (env_ids, None)
        if not stepped:
            return None
        shape = pool.generation, env_ids, stepped  # `env_ids` too: those not paused change, and `key` is only the align
        if plan is None or (plan.generation, plan.env_ids, plan.stepped) != shape:
            how = {"autoreset": self.done_policy.autoreset, "begins_ended": self.done_policy.resets_next}
            prepared = pool.prepare_step(stepped, **how)
            if prepared is None:
                self.plans.pop(key, None)
                self._refused = {**dict(list(self._refused.items())[-_MOST_PLANS:]), key: pool.generation}
                return None
            if len(self.plans) >= _MOST_PLANS:
                self.plans.clear()
                self._refused.clear()
            plan = self.plans[key] = StepPlan(self, env_ids, stepped, chosen, align, *prepared)
        plan.renew()
        return plan

    @single_threaded_in("step")
    def step_unplanned(self, action: Action, id: Ids, align: Any) -> StepResult | StepBatch:
        """Step envs: `ParallelEnv.step`, if nothing is planned for it."""
        arguments.check_align(align)
        return self.step(action, self.table.unpaused if id is None else self.ids(id), align)

    def plan_of(self, id: Ids, align: Any) -> StepPlan | None:
        """Return the plan of a step, if there is one. Arguments: see `ParallelEnv.step`."""
        if type(id) is not list and type(id) is not tuple:
            return None
        if not self.plans or set(map(type, id)) != {int} or type(align) is not str:
            return None
        return self.plans.get((align, tuple(id)))

    def step_wait(self, env_ids: Sequence[int], timeout: float | None, align: Align) -> StepResult | StepBatch:
        """Return the result of a step that was sent, or whose call was interrupted. Timeout: see `wait`.

        Raises:
            NothingInFlightError: If no step of one of the envs is in flight.
            WorkerTimeoutError: If they do not reply in time. This can be called again.
        """
        tickets = self.table.tickets
        missing = [env_id for env_id in env_ids if env_id not in tickets]
        if missing:
            raise NothingInFlightError(f"No step of envs {list_ids(missing)} is in flight. Begin one first.")
        self._wait_for_arrivals(len(tickets), timeout, time.monotonic())
        return self.collect_step(Outcome.of(env_ids, tickets), align)

    def send(self, action: Action, env_ids: Sequence[int]) -> None:
        """Send a step of envs."""
        self.submit_step(action, env_ids, separately=True)

    def send_reset(self, env_ids: Sequence[int], each: ResetArgumentsOfEach) -> None:
        """Send resets, whose first states `receive` returns. Arguments: see `submit_reset`."""
        self._prepare_reset(env_ids, each)
        self._send_reset(env_ids, each, separately=True)
        # Now, not when they are received: with StopAll it would otherwise depend on the order of arrival which envs
        # are done.
        self.table.note_asked_to_begin(list(env_ids))

    def receive(
        self, min_envs: int, max_envs: int | None, timeout: float | None, align: Align
    ) -> StepResult | StepBatch:
        """Return the results of envs that have finished their step or reset, in the order of arrival.

        ``timeout``: see `ParallelEnv.recv`.
        """
        arrived = self._wait_for_arrivals(self._wanted(min_envs), timeout, time.monotonic())
        return self._collect_arrived(arrived[:max_envs], align)

    def _collect_arrived(self, env_ids: list[int], align: Align) -> StepResult | StepBatch:
        return self.collect_step(Outcome.of(env_ids, self.table.tickets), align)

    def _wanted(self, min_envs: int) -> int:
        """Return how many envs can be waited for, at most ``min_envs``; raise `NothingInFlightError` if none."""
        if not self.table.tickets:
            raise NothingInFlightError(
                "There is no result to wait for: no step is in flight. Call send() first, or go on with step()."
            )
        return min(min_envs, len(self.table.tickets))

    @single_threaded_in("reset")
    def latest_states(self, env_ids: Sequence[int] | None = None) -> State:
        """Return the latest states of envs, by default of all, batched."""
        asked, batch = self.env_ids if env_ids is None else env_ids, self.pool.batch
        has_loose = any(array is None for array in batch.states)
        extras = self.pool.ask("state", asked, None, "leaves").values if has_loose else {}
        return gather_states(batch, asked, batch.rows(asked), extras, self.copies)

    def states_of(self, env_ids: Sequence[int], result: StepResult | None) -> State:
        """Return the latest states of envs, batched: from a result that has all of them, else by asking the workers."""
        structure = self.pool.batch.layout.states
        place = {} if result is None else {env_id: row for row, env_id in enumerate(result.env_ids.tolist())}
        rows = [place.get(env_id, -1) for env_id in env_ids]
        found: Any = None if result is None else result.states
        is_listed = isinstance(found, np.ndarray) and found.dtype == object
        is_partial = is_listed and any(state is None for state in found)
        if result is None or -1 in rows or is_partial:
            self.table.refuse_unknown(env_ids)
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

    @property
    def begins_next_episodes(self) -> bool:
        """Whether an ended env begins its next episode by itself."""
        return self.done_policy.autoreset

    def waiting(self) -> list[int]:
        """Return the envs that can be stepped: not paused, with nothing in flight, and not ended."""
        idle = [env_id for env_id in self.table.unpaused if env_id not in self.table.tickets]
        self.table.refuse_fresh(idle)
        return list(self.table.choose(idle)[0])

    # ---------------------------------------------------------------- rollouts and evaluations

    def begin_rollout(self, env_ids: Sequence[int]) -> Array:
        """Refuse, like a step, envs that cannot be stepped now, and also envs whose states are not known.

        Returns:
            ``(k,)`` bool: whether each env is at the beginning of an episode.
        """
        self._refuse_not_ready(env_ids)
        self.table.refuse_unknown(env_ids)
        return self.table.are_new(env_ids)

    @contextlib.contextmanager
    def borrowed(self, env_ids: Sequence[int]) -> Iterator[Self]:
        """Yield an engine of the same workers under which ended envs are stepped on, whatever the policy is here.

        Steps of these envs still in flight at the end are dropped; the envs need a reset.
        """
        self._refuse_busy(env_ids)
        self.table.refuse_paused(env_ids)
        if self.recovery is None:
            self.pool.refuse_dead(env_ids)
        other = copy.copy(self)
        other.follow(DonePolicy(), True)
        other.learns_infos = False  # this table may have results whose infos are in the columns
        other.table.share_score(self.table.score)
        self.table.lose(env_ids)
        try:
            yield other
        finally:
            self.table.take_over(other.table, env_ids)

    # ---------------------------------------------------------------- other operations

    def call_each(self, env_ids: Sequence[int], calls: Sequence[MethodCall]) -> list[Any]:
        """Call a method of each env, which may be another one for each, and return the results in this order."""
        return self.pool.ask("call", env_ids, calls).listed()

    def end_episodes(self, env_ids: Sequence[int], calls: Sequence[MethodCall]) -> None:
        """Call a method of each env that ends its episode; the envs need a reset afterwards."""
        ticket = self.pool.submit("call", env_ids, calls, announce=lambda _: self._lose(env_ids))
        self.pool.wait(ticket, self.timeout)
        ticket.raise_failures()

    def note_seeds(self, env_ids: Sequence[int], seeds: Sequence[int | None]) -> None:
        """Store seeds that envs were given by other means than a reset."""
        if self.recovery is not None:
            self.recovery.note_seeds(env_ids, seeds)

    def attribute_hint(self, key: str, env_id: int) -> str:
        """Return a hint at an existing attribute with a similar name. The env is asked once per name: it takes 1 ms."""
        if key not in self._hints:
            self._hints[key] = self.pool.try_asking("get", (env_id,), None, Lookup(key, "hint")).values.get(env_id, "")
        return self._hints[key]

    def restart(self, env_ids: Sequence[int]) -> tuple[int, ...]:
        """Rebuild envs and return the ids of all that were rebuilt; they need a reset."""
        ticket = self.pool.rebuild(env_ids, self._lose)
        rebuilt = tuple(sorted({*ticket.env_ids, *ticket.values}))
        ticket.raise_failures(partial=tuple(env_id for env_id in rebuilt if env_id not in ticket.failures))
        return rebuilt

    def checkpoint(self) -> Checkpoint:
        """Return the state of the episodes; raise `EnvBusyError` if a step is in flight."""
        self._refuse_busy(self.env_ids)
        return self.table.checkpoint()

    def restore(self, checkpoint: Checkpoint, lost: Collection[int]) -> tuple[int, ...]:
        """Load the state of the episodes, see `EnvTable.restore`. Steps that were not returned are dropped."""
        self.table.release(self.env_ids)
        if self.recovery is not None:
            self.recovery.forget(self.env_ids)
        return self.table.restore(checkpoint, lost)

    # ---------------------------------------------------------------- for adapters

    @single_threaded_in("to_gymnasium(), to_sb3() or to_tianshou")
    def hand_over(
        self,
        contract: str,
        policy: DonePolicy,
        observation_space: Space | None = None,
        *,
        reward_dtype: np.dtype[Any] | None = None,
        always_copies: bool = False,
        broadcasts: bool = False,
        waits_by: str = "step_wait()",
    ) -> None:
        """Follow the contract of an adapter from now on. Envs may then be stepped before their first reset.

        Args:
            contract: The call that asked for it.
            policy: What happens when an episode ends.
            observation_space: Space to batch states in; ``None``: as before.
            reward_dtype: Dtype that rewards must fit as numbers; ``None``: any type is allowed.
            always_copies: Whether states are copied whatever ``copy`` was.
            broadcasts: See `Layout`.
            waits_by: Call that continues the wait for an interrupted or late step, for messages.

        Raises:
            UsageError: If another adapter has the envs.
            EnvBusyError: If a step is in flight.
            WorkerTimeoutError: If an env is still in a call that timed out.
        """
        if self.contract == contract:
            return
        if self.contract is not None:
            raise UsageError(
                f"{contract} was called, but this ParallelEnv was handed over by {self.contract} and follows its "
                "rules. Make another ParallelEnv from the same list of env fns."
            )
        self._refuse_busy(self.env_ids)
        if self.recovery is not None:
            self.recovery.forget(self.env_ids)
        old, score = self.pool.layout, self.table.score
        changes = {
            "observation_space": old.observation_space if observation_space is None else observation_space,
            "keeps_ended": policy.autoreset,
            "keeps_types": policy.autoreset,
            "broadcasts": broadcasts,
        }
        if any(getattr(old, name) is not value for name, value in changes.items()):
            self.pool.rearrange(old.changed(**changes))
        self.follow(policy, self.copies or always_copies, reward_dtype, as_given=True)
        self.table.share_score(score)
        self.table.begin_unknown()
        self.pool.waits_by = waits_by
        self.contract = self.asynchronous = contract

    @single_threaded_in("step")
    def step_all(self, action: Action) -> StepResult:
        """Step all envs, including paused ones, for which this raises."""
        return self.step(action, self.env_ids, "item")  # type: ignore[return-value]

    @single_threaded_in("step_async")
    def step_all_async(self, action: Action) -> None:
        """Send a step of all envs."""
        self.submit_step(action, self.env_ids)

    @single_threaded_in("step_wait")
    def step_all_wait(self, timeout: float | None) -> StepResult:
        """Return the result of a step of all envs that was sent, or whose call was interrupted."""
        limit = arguments.check_timeout(timeout)
        return self.step_wait(self.env_ids, limit, "item")  # type: ignore[return-value]

    @single_threaded
    def reset_async(self, env_ids: Sequence[int], seed: Seeds, options: Options) -> Ticket:
        """Send resets; `reset_wait` waits for them. Seeds and options: see `ParallelEnv.reset`."""
        return self.submit_reset(env_ids, self.beginnings(env_ids, seed, options))

    @single_threaded
    def reset_wait(self, ticket: Ticket, timeout: float | None) -> State:
        """Return the first states of episodes, batched."""
        return self.collect_reset(ticket, arguments.check_timeout(timeout), "item")

    @single_threaded_in("reset")
    def reset_each(self, env_ids: Sequence[int], seed: Seeds, options: Options) -> list[State]:
        """Begin episodes and return the first states, one per env."""
        ticket = self.submit_reset(env_ids, self.beginnings(env_ids, seed, options))
        return self.collect_reset(ticket, None, "batch")  # type: ignore[no-any-return]

    @property
    def under_way(self) -> list[int]:
        """Ids of envs with a step whose result was not delivered; none after `close`."""
        return [] if self.guard.is_closed else sorted(self.table.tickets)

    @single_threaded_in("reset")
    def refuse_fresh(self, env_ids: Sequence[int]) -> None:
        """Refuse envs that have no episode."""
        self.table.refuse_fresh(env_ids)

    @single_threaded_in("reset")
    def refuse_unknown(self, env_ids: Sequence[int]) -> None:
        """Refuse envs that have no episode, or whose latest states are not known."""
        self.table.refuse_fresh(env_ids)
        self.table.refuse_unknown(env_ids)

    def envs(self, name: str, way: str) -> tuple[Any, ...]:
        """Return the envs themselves, in env id order; ``name`` and ``way`` (what to call instead) are for messages.

        Raises:
            AbsentAttributeError: If they do not live in this process, or were closed.
        """
        if self.guard.is_closed:
            raise AbsentAttributeError(f"{name} is absent: the ParallelEnv was closed, and its envs with it.")
        envs = self.pool.envs_here()
        if envs is None:
            raise AbsentAttributeError(f"{name} is absent: these envs live in other processes. Use {way}.")
        return envs

    @single_threaded_in("call")
    def call_async(self, call: MethodCall, id: Ids = None) -> Ticket:
        """Send a method call, the same for each env; without ``id`` to all envs."""
        env_ids = self.ids(id, everyone=True)
        return self.pool.submit("call", env_ids, [call] * len(env_ids))

    @single_threaded_in("call")
    def look_up(self, lookup: Lookup, argument: Any, id: Ids = None) -> list[Any]:
        """Return the result of a look-up for each env; without ``id`` for all."""
        env_ids = self.ids(id, everyone=True)
        return self.pool.ask("get", env_ids, [argument] * len(env_ids), lookup).listed()

    @single_threaded
    def call_wait(self, ticket: Ticket, timeout: float | None) -> list[Any]:
        """Return the results of `call_async`, in the order asked."""
        limit = arguments.check_timeout(timeout)
        self.pool.wait(ticket, self.timeout if limit is None else limit)
        return ticket.listed()

    @single_threaded_in("get_attr")
    def existing_attr(self, key: str, id: Ids) -> list[Any]:
        """Return an attribute of envs; raise `AbsentAttributeError` if one does not have it."""
        env_ids = parse_ids(id, self.num_envs)
        arguments.check_name("key", key)
        values = self.pool.ask("get", env_ids, None, Lookup(key)).values
        without = [env_id for env_id in env_ids if env_id not in values]
        if without:
            have = "has" if len(without) == 1 else "have"
            hint = self.attribute_hint(key, without[0])
            raise AbsentAttributeError(
                f"{name_envs(without)} {have} no attribute {key!r}, nor has a wrapper around it.{hint}"
            )
        return [values[env_id][0] for env_id in env_ids]

    # ---------------------------------------------------------------- for event loops

    @single_threaded_in("arecv")
    def look(self, min_envs: int, timeout: float | None, begin: float) -> bool:
        """Return without waiting whether `take` has something to return. Timeout: see `wait`; errors: see `receive`."""
        wanted, table = self._wanted(min_envs), self.table
        while len(table.arrived) < wanted and self.pool.pump(time.monotonic()):
            pass
        if len(table.arrived) >= wanted:
            return not self._repeat_lost_resets()
        deadline = self._deadline(timeout, begin)
        if deadline is not None and time.monotonic() >= deadline:
            self._be_late(timeout)
        return False

    async def sleep_until_reply(self, timeout: float | None, begin: float, heartbeat: float, nap: float) -> None:
        """Let the event loop run until `look` may find a reply, or its timeout.

        Args:
            timeout: See `look`.
            begin: See `look`.
            heartbeat: Seconds after which to look anyway, for deaths and output that no reply reports.
            nap: The same where nothing wakes an event loop at a reply.
        """
        deadline = self._deadline(timeout, begin)
        left = math.inf if deadline is None else max(0.0, deadline - time.monotonic())
        await sleep_until_woken(self.pool.fileno(), self.pool.wakers, min(heartbeat, left), min(nap, left))

    @single_threaded_in("arecv")
    def take(self, min_envs: int, max_envs: int | None, align: Align) -> StepResult | StepBatch | None:
        """Return the result of `receive`, or ``None`` if another caller took it since `look`. This steps no env."""
        arrived = self.table.arrived
        enough = len(arrived) >= self._wanted(min_envs)
        return self._collect_arrived(arrived[:max_envs], align) if enough else None


def _close_dropped(pool: Pool) -> None:
    """Close the pool of an unreferenced object.

    A KeyboardInterrupt meanwhile is raised in the caller a moment later: Python drops what a finalizer raises.
    """
    try:
        pool.close()
    except KeyboardInterrupt:
        interrupt: Any = _thread.interrupt_main
        if hasattr(signal, "pthread_kill"):  # interrupts a wait, too
            interrupt = functools.partial(signal.pthread_kill, threading.main_thread().ident or 0, signal.SIGINT)
        threading.Timer(_MOMENT, interrupt).start()
