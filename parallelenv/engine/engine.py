"""The caller's side of every call, the same in every mode: submit, wait, collect.

*Submit* checks a call, writes its actions and sends its commands; the ticket is in the `EnvTable` before the first
command is sent. *Wait* can be interrupted anywhere. *Collect* converts the results to the form that the user asked
for, restarts failed envs if ``on_failure="restart"``, and removes the ticket. Some calls use only one or two of these
three parts.

A step takes one of the following paths; an arrow leads to the function that runs next, or to the result:

    ParallelEnv.step            checks that it is open, and used in the right thread and process; uses the plan if valid
     |        |
     |        v
     |    Engine.step           repeats the checks, because adapters call it directly; finds, renews or makes the plan
     |    |          |
     v    v          v
    StepPlan.step   submit_step  <--  send, step_async
     |    |          |           submit_step: checks the envs and the actions, and adds a ticket to the table
     |    |          |           StepPlan.step continues with submit_step if actions have no fixed shape, and with
     |    |          |           finish_step if a worker has failed or is not done within `PATIENCE`
     |    v          v
     |    finish_step            waits for the ticket
     |          |
     v          v
    result  collect_step  <--  recv, arecv, step_wait
"""

from __future__ import annotations

import _thread
import asyncio
import contextlib
import copy
import functools
import math
import os
import signal
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Self

import numpy as np

from parallelenv.contract import arguments
from parallelenv.contract.arguments import ActionReader, Ids, Options, Seeds, parse_ids
from parallelenv.contract.batch import gather_states
from parallelenv.contract.copying import deep_copy_but_graph
from parallelenv.contract.env_specs import EnvFactory
from parallelenv.contract.error_text import list_ids
from parallelenv.contract.failures import NO_FAILURES, Failure, raise_failures, with_note
from parallelenv.contract.interrupts import DeferSignals, signal_behind
from parallelenv.contract.protocol import NOTHING, Backend, Extra, Lookup, MethodCall, WorkerSpec
from parallelenv.contract.spaces import Action, Info, Spaces, State, pick_rows
from parallelenv.engine.assemble import Assembler, Form, first_states, refuse_other_rewards
from parallelenv.engine.done_policies import DonePolicy, ResetByCall
from parallelenv.engine.env_table import EnvTable, Phase
from parallelenv.engine.recovery import Recovery
from parallelenv.engine.step_plan import StepPlan
from parallelenv.engine.thread_guard import Guard, single_threaded_in
from parallelenv.engine.tickets import Outcome, Ticket
from parallelenv.engine.worker_pool import Pool
from parallelenv.errors import EnvBusyError, NothingInFlightError
from parallelenv.results import StepBatch, StepResult

HEARTBEAT = 0.25
"""Seconds after which a sleep ends in any case.

Then the caller notices workers' output, and deaths of workers that no reply reports.
"""
SHORTEST_NAP = 5e-4
"""Seconds of the shortest sleep if no descriptor announces replies."""
_NAP = 1 / 8
"""Length of a nap as a fraction of the time waited so far. The fraction bounds how late a result is found."""


async def sleep_until_woken(fileno: int | None, wakers: set[Callable[[], None]], waited: float, left: float) -> None:
    """Sleep until a descriptor is readable, this task's waker is called, or `HEARTBEAT` or ``left`` has elapsed."""
    nap = min(HEARTBEAT, max(SHORTEST_NAP, waited * _NAP), left)
    loop = asyncio.get_running_loop()
    woken = loop.create_future()

    def wake() -> None:
        with contextlib.suppress(RuntimeError):  # the loop was closed
            loop.call_soon_threadsafe(_finish, woken)

    descriptor = -1
    try:
        wakers.add(wake)
        if fileno is not None:
            # NotImplementedError: the usual loop on Windows; OSError: too many open files.
            with DeferSignals(), contextlib.suppress(NotImplementedError, OSError):
                # Watch a copy, because a loop has one reader per descriptor, and because the backend may close its own
                # descriptor during the sleep.
                descriptor = os.dup(fileno)
                loop.add_reader(descriptor, _finish, woken)
                nap = min(HEARTBEAT, left)
        await asyncio.wait([woken], timeout=nap)
    finally:
        with DeferSignals():
            wakers.discard(wake)
            if descriptor >= 0:
                if not loop.is_closed():
                    with contextlib.suppress(NotImplementedError):
                        loop.remove_reader(descriptor)
                os.close(descriptor)


def _finish(woken: asyncio.Future[None]) -> None:
    if not woken.done():
        woken.set_result(None)


_MOST_PLANS, _MOST_SEEN, _MOST_HINTS = 64, 16, 256
"""Maximum numbers of step plans, of steps without a plan, and of hints at absent attributes, that are kept."""
ResetArguments = Sequence[tuple[int | None, Info | None]]
"""Seed and options for each env's reset."""


class Engine:
    """The engine of a `ParallelEnv`. Adapters, wrappers, collectors and displays use it as `ParallelEnv.engine`.

    Attributes:
        reward_dtype: Float dtype; rewards must be numbers that fit it. ``None`` if rewards may be of any type.
        recovery: Restarts envs that fail; ``None`` if failed envs are not restarted.
        seeds: Seed of each env's next reset, by env id.
        adapter: The call that made an adapter for this engine, such as ``"to_sb3()"``; ``None`` if there is no adapter.
        plans: Plans of steps that were repeated. The key is ``align`` for a step of all envs that are not paused, and
            ``(align, env_ids)`` for any other step.
    """

    plans_steps = True
    """True if repeated steps are planned.

    Results do not depend on this setting; tests compare the results of both values.
    """

    def __init__(
        self,
        backend: Backend,
        env_factories: Sequence[EnvFactory],
        done_policy: DonePolicy,
        *,
        spaces: Spaces | None,
        copy: bool,
        timeout: float | None,
        max_restarts: int | None,
        spec: WorkerSpec,
        **pool_arguments: Any,
    ) -> None:
        self.guard = self._guard = Guard()
        self.adapter: str | None = None
        self._hints: dict[tuple[str, int], str] = {}  # by the absent attribute's name and the env id
        try:
            self.pool = Pool(backend, env_factories, spec=spec, **pool_arguments)
            self._finalizer = weakref.finalize(self, _close_dropped, self.pool, self.guard)
            self.guard.is_called_by_env = self.pool.is_called_by_env
            self.pool.build(done_policy, spaces)
            self.pool.timeout = timeout
        except BaseException:
            backend.close((), 0.0)  # ends all workers, even if an interrupt came before `self.pool` was set
            raise
        self.env_ids = self.pool.env_ids
        self.num_envs = len(self.env_ids)
        self.recovery = None if max_restarts is None else Recovery(self.pool, max_restarts)
        self.learns_infos = True
        self._retried_at = 0.0  # when lost resets were last repeated
        self.use_done_policy(done_policy, copy)
        seeds = arguments.spread_seeds(spec.seed, self.env_ids, whole=False)
        self.seeds: dict[int, int | None] = dict(enumerate(seeds))

    def use_done_policy(
        self,
        done_policy: DonePolicy,
        copies: bool,
        reward_dtype: np.dtype[Any] | None = None,
        *,
        as_given: bool = False,
    ) -> None:
        """Switch to a done policy and a new `EnvTable`, in which all envs need a reset.

        See `ActionReader` for ``as_given``. If this engine is in use already, the caller delays interrupts.
        """
        stepless = (env_id for env_id, one in zip(self.env_ids, self.pool.facts, strict=True) if not one.has_steps)
        self.done_policy = done_policy
        self.copies = copies
        self.table = EnvTable(self.env_ids, done_policy, frozenset(stepless))
        self.assembler = Assembler(done_policy, self.table, copies)
        self.reward_dtype = reward_dtype
        self.actions = ActionReader(self.pool.layout, keeps_graphs=self.pool.backend.uses_live_envs, as_given=as_given)
        self.plans: dict[Any, StepPlan] = {}
        # The latest steps that have no plan, by the key of a plan. The value is the `Pool.generation` for which the
        # backend could not prepare the step, or -1 if it was not asked.
        self._unplanned: dict[Any, int] = {}
        # The values of the latest step that are not in the batch, and the number of envs stepped. The next step first
        # learns the form of infos from these values.
        self._latest_extras: tuple[Mapping[int, Extra], int] | None = None

    def close(self, timeout: float) -> None:
        """Close all envs and end all workers. Workers have ``timeout`` seconds to close their envs."""
        try:
            if self.guard.tracer is not None and not self.guard.is_closed:
                self.guard.tracer.finish()
        finally:
            self.guard.is_closed = True
            self.plans.clear()  # plans refer to the batch
            self.pool.close(timeout)
            self._finalizer.detach()

    # ---------------------------------------------------------------- arguments of calls

    def ids(self, id: Ids, with_paused: bool = False) -> tuple[int, ...]:
        """Return the env ids that an ``id`` argument names."""
        if id is not None:
            return parse_ids(id, self.num_envs)
        return self.env_ids if with_paused else self.table.unpaused

    def reset_arguments(self, env_ids: Sequence[int], seed: Seeds, options: Options) -> ResetArguments:
        """Return the seed and the options for each env's next reset."""
        seeds = arguments.spread_seeds(seed, env_ids, whole=False)
        if seed is None:
            seeds = [self.seeds.get(env_id) for env_id in env_ids]
        return list(zip(seeds, arguments.spread_options(options, env_ids), strict=True))

    def forget_seeds(self, env_ids: Sequence[int]) -> None:
        """Drop the seeds that were set for the next reset of these envs. Call this once a reset has used them."""
        for env_id in env_ids:
            self.seeds.pop(env_id, None)

    # ---------------------------------------------------------------- submit

    def submit_step(
        self,
        action: Action,
        env_ids: Sequence[int],
        *,
        separately: bool = False,
        is_awaited: bool = False,
        announce: Callable[[Ticket], None] = lambda _: None,
    ) -> Ticket:
        """Send a step of envs, with one action for each env.

        See `EnvTable.enter` for ``separately``, `Ticket` for ``is_awaited``, and `Pool.submit` for ``announce``. If an
        error is raised, nothing has been sent.
        """
        table, done_policy = self.table, self.done_policy
        self.refuse_unsteppable(env_ids)
        stepped, chosen = table.choose(env_ids)
        each = self.actions.write(self.pool.batch, action, env_ids, stepped, chosen)

        def enter(ticket: Ticket) -> None:
            ticket.is_awaited = is_awaited
            table.enter(env_ids, ticket, separately=separately)
            announce(ticket)

        return self.pool.submit(
            "step",
            stepped,
            each,
            autoreset=done_policy.autoreset,
            begins=table.ended(stepped) if done_policy.resets_next else (),
            announce=enter,
            failed=NO_FAILURES if self.recovery is None else self.recovery.failures_before(stepped),
        )

    def submit_reset(self, env_ids: Sequence[int], each: ResetArguments, *, separately: bool = False) -> Ticket:
        """Send resets of envs. Calls that are still in flight on these envs are dropped.

        The first states are returned by `collect_reset`, which waits for the resets, or, with ``separately``, by
        `receive`.
        """
        self.table.refuse_stepless(env_ids)
        self.pool.groups.refuse_seeds(env_ids, [seed for seed, _ in each])
        if self.recovery is not None:
            self.recovery.remember_seeds(env_ids, [seed for seed, _ in each])
            self._rebuild_silently(env_ids, self.pool.death_failures(env_ids), self.recovery)
        return self._send_reset(env_ids, each, separately=separately)

    def _send_reset(self, env_ids: Sequence[int], each: ResetArguments, *, separately: bool = False) -> Ticket:
        def announce(ticket: Ticket) -> None:
            self.drop_episodes(env_ids)  # until the resets are collected, the envs count as needing one
            if separately:
                self.table.enter(env_ids, ticket, separately=True)
                # Clear the flags now and not when results are received. Otherwise, with `StopAll`, which envs are done
                # would depend on the order of arrival.
                self.table.clear_flags(env_ids)

        failed = NO_FAILURES if self.recovery is None else self.pool.death_failures(env_ids)
        return self.pool.submit("reset", env_ids, each, announce=announce, failed=failed)

    def drop_episodes(self, env_ids: Sequence[int]) -> None:
        """Drop the calls in flight on these envs; the envs then need a reset."""
        self.pool.drop(env_ids)
        self.table.release(env_ids)
        self.table.require_reset(env_ids)
        if self.recovery is not None:
            self.recovery.forget(env_ids)

    def refuse_unsteppable(self, env_ids: Sequence[int]) -> None:
        """Raise unless a step of these envs could be sent now."""
        self._refuse_unavailable(env_ids)
        self.table.refuse_without_episode(env_ids)

    def _refuse_unavailable(self, env_ids: Sequence[int]) -> None:
        """If there is a recovery, dead workers are allowed, because the recovery replaces them."""
        self.refuse_busy(env_ids)
        self.table.refuse_paused(env_ids)
        self.pool.groups.refuse_running(env_ids, lambda env_id: self.table.phase(env_id) is Phase.RUNNING)
        if self.recovery is None:
            self.pool.refuse_dead(env_ids)

    def refuse_busy(self, env_ids: Sequence[int]) -> None:
        """Raise `EnvBusyError` if an env has a step or reset whose result has not been returned yet."""
        self.pool.enter_planned()
        tickets = self.table.tickets
        busy = [env_id for env_id in env_ids if env_id in tickets] if tickets else []
        if busy:
            raise EnvBusyError(
                f"envs {list_ids(busy)} have a step or a reset in flight whose result was not received (sent, "
                f"interrupted or late). Get it with {self.pool.ways_to_wait(len(busy))}, or drop it with reset(). "
                "Both wait for envs that have not replied: rebuild one that hangs with restart(id)."
            )

    # ---------------------------------------------------------------- wait

    def wait(self, ticket: Ticket, timeout: float | None, start: float | None = None) -> None:
        """Wait for all replies to a call.

        The timeout counts from ``start``, a time returned by `time.monotonic`, or from now if ``start`` is ``None``. If
        ``timeout`` is ``None``, the pool's timeout applies and, if there is a recovery, late envs count as failed.

        Raises:
            WorkerTimeoutError: If the replies do not arrive in time. The method can then be called again.
        """
        if timeout is None and self.recovery is not None:
            self.pool.wait_or_give_up(ticket, start)
        else:
            self.pool.wait(ticket, self.pool.timeout if timeout is None else timeout, start)

    def _wait_for_arrivals(self, wanted: int, timeout: float | None, env_ids: Sequence[int] | None = None) -> None:
        """Wait until the results of ``wanted`` envs, or of all of ``env_ids`` if they are given, have arrived."""
        start, table = time.monotonic(), self.table
        while True:
            if len(table.arrived(wanted)) >= wanted if env_ids is None else not table.pending_ids(env_ids):
                if not self._repeat_lost_resets():
                    return
            elif not self.pool.pump(self._deadline(timeout, start)):
                self._be_late(timeout, env_ids)

    def _deadline(self, timeout: float | None, start: float) -> float | None:
        """Return the time at which to stop waiting; ``None`` if neither ``timeout`` nor the pool sets a limit.

        The timeout counts from ``start`` or, if resets have been repeated since then, from when they were repeated.
        """
        limit = self.pool.timeout if timeout is None else timeout
        return None if limit is None else max(start, self._retried_at) + limit

    def _be_late(self, timeout: float | None, env_ids: Sequence[int] | None = None) -> None:
        pending = self.table.pending_ids(env_ids)
        late = self.pool.late(pending, self.pool.timeout if timeout is None else timeout, "step")
        if timeout is not None or self.recovery is None:
            raise late
        for ticket in dict.fromkeys(self.table.tickets[env_id] for env_id in pending):
            self.pool.give_up(ticket, late)

    def _repeat_lost_resets(self) -> bool:
        """Repeat resets whose worker died or hung if failed envs are restarted; return whether there were any."""
        table = self.table
        if self.recovery is None or not table.has_failed_resets:
            return False
        tickets = table.tickets
        resets = {env_id: tickets[env_id] for env_id in table.arrived() if tickets[env_id].operation == "reset"}
        failures = {one: resets[one].failures[one] for one in sorted(resets) if one in resets[one].failures}
        lost = {env_id: failure for env_id, failure in failures.items() if failure.is_of_worker}
        if not lost:
            table.has_failed_resets = False
            return False
        self._repeat_resets(resets, lost, self.recovery, separately=True)
        self._retried_at = time.monotonic()
        return True

    def _repeat_resets(
        self,
        tickets: Mapping[int, Ticket],
        lost: Mapping[int, Failure],
        recovery: Recovery,
        *,
        separately: bool = False,
    ) -> Ticket:
        env_ids = tuple(lost)
        each = [tickets[env_id].each[tickets[env_id].env_ids.index(env_id)] for env_id in env_ids]
        self.table.release(env_ids)  # so that failures in the lines below are reported only once
        self._rebuild_silently(env_ids, lost, recovery)
        return self._send_reset(env_ids, each, separately=separately)

    # ---------------------------------------------------------------- collect

    def collect_step(self, outcome: Outcome, align: Form) -> StepResult | StepBatch:
        """Return an outcome in the form ``align``, and remove its tickets from the table.

        The order of the work ensures that an interrupt loses nothing. First, the rewards and flags of reset envs are
        cleared, rewards are checked, failed envs are restarted (the recovery remembers which), and the result is
        assembled. Only then is the step recorded, and its tickets are removed at the same time. If an interrupt comes
        before that, the next call collects the step again.
        """
        if outcome.resets:
            # The result of a reset has reward 0 and no flags set. Exhausted envs are absent from the result.
            batch, table = self.pool.batch, self.table
            rows = batch.rows(outcome.resets)
            batch.rewards[rows] = 0.0
            batch.flags[rows] = False
            batch.drop_infos(rows)
            exhausted = [env_id for env_id in outcome.exhausted if env_id in outcome.resets]
            table.record_exhausted(exhausted)
            for env_id in exhausted:
                table.reset_infos[env_id] = table.absent_info(env_id)
            outcome = outcome.with_resting(exhausted) if exhausted else outcome
        wrong: Sequence[int] = ()  # envs that were stepped and whose reward is refused
        if self.reward_dtype is not None:
            outcome, wrong = refuse_other_rewards(self.pool.batch, outcome, self.reward_dtype)
        if outcome.failures and self.recovery is not None:
            outcome = self._restart_failed(outcome, self.recovery)
        failures = outcome.failures
        good = outcome.without_failures() if failures else outcome
        made = [good]
        if unpaid := [env_id for env_id in wrong if env_id in failures]:
            made.append(Outcome(unpaid, unpaid, outcome.extras, {}, outcome.restarted))
        try:
            result, *_ = [self.assembler.assemble(self.pool.batch, one, align) for one in made]
        except Exception as error:  # raised, for example, by a user's own space
            if signal_behind(error) is None:
                self._record(made, outcome)
            raise
        self._record(made, outcome)
        if failures:
            raise_failures([failures[env_id] for env_id in sorted(failures)], partial=result)
        return result

    def _record(self, made: Sequence[Outcome], outcome: Outcome) -> None:
        """Record the parts of an outcome in which steps were made, and remove the outcome's tickets from the table."""
        prepared = [self.assembler.prepare_record(self.pool.batch, one) for one in made]
        with self.pool.shield:
            for one in prepared:
                self.assembler.record(one)
            self.table.release(outcome.env_ids)
            if outcome.restarted and self.recovery is not None:
                self.recovery.forget(outcome.restarted)
            if outcome.failures:
                failed = outcome.failures.items()
                self.table.require_reset(env_id for env_id, failure in failed if failure.operation != "step")

    def _restart_failed(self, outcome: Outcome, recovery: Recovery) -> Outcome:
        """Restart the envs that failed in a step, and return a new outcome, in which their episodes are truncated.

        If an env's episode had already ended and this step was to reset the env, no episode is truncated.
        """
        raised = {env_id: failure for env_id, failure in outcome.failures.items() if env_id in outcome.resets}
        others = {env_id: failure for env_id, failure in outcome.failures.items() if env_id not in raised}
        restarted, left = recovery.restart_failed(others)
        batch, extras = self.pool.batch, dict(outcome.extras)
        for env_id, (failure, begun) in restarted.items():
            row = env_id - batch.layout.first
            was_ended = self.done_policy.resets_next and self.table.done[env_id]  # the step was to be a reset
            batch.rewards[row] = 0.0
            batch.flags[row] = False, begun.is_exhausted or not was_ended
            batch.drop_infos([row])
            info = {**(begun.info or {} if begun.is_exhausted or was_ended else {}), "failure": with_note(failure)}
            extras[env_id] = Extra(info, begun.loose, reset_info=begun.info, is_exhausted=begun.is_exhausted)
            self.table.reset_infos[env_id] = begun.info or {}
        self.table.record_running(restarted)
        return Outcome(outcome.env_ids, outcome.stepped, extras, {**raised, **left}, restarted.keys(), outcome.resets)

    def collect_reset(self, ticket: Ticket, timeout: float | None, align: Form = "item") -> State:
        """Wait for resets and return the first states.

        If there is a recovery, the resets of envs whose worker dies or hangs are repeated. An exhausted env has the
        state ``None``. The seeds that were set for these resets are dropped, except those of envs that failed.
        """
        # Copies, because the caller may call this method again with the same ticket, after a timeout or an interrupt.
        env_ids, failures, extras = ticket.env_ids, dict(ticket.failures), dict(ticket.values)
        latest = ticket
        while True:
            self.wait(latest, timeout)
            failures.update(latest.failures)
            extras.update(latest.values)
            lost = {env_id: failure for env_id, failure in latest.failures.items() if failure.is_of_worker}
            if self.recovery is None or not lost:
                break
            latest = self._repeat_resets(dict.fromkeys(lost, latest), lost, self.recovery)
            for env_id in lost:
                del failures[env_id]
        good = tuple(env_id for env_id in env_ids if env_id not in failures) if failures else env_ids
        exhausted = [env_id for env_id, extra in extras.items() if extra.is_exhausted]
        begun = [env_id for env_id in good if env_id not in exhausted] if exhausted else good
        states = first_states(self.pool.batch, Outcome(good, begun, extras, failures), align == "batch", self.copies)
        for env_id in good:
            self.table.reset_infos[env_id] = extras.get(env_id, NOTHING).info or {}
        self.table.clear_flags(begun)
        self.table.record_first_states(begun)
        self.table.record_exhausted(exhausted)
        self.forget_seeds(good)
        raise_failures([failures[env_id] for env_id in sorted(failures)], partial=states)
        if exhausted:
            self.table.refuse_exhausted(good, partial=states)
        return states

    def _rebuild_silently(self, env_ids: Sequence[int], lost: Mapping[int, Failure], recovery: Recovery) -> None:
        """Rebuild the envs in ``lost``, before the calling method resets all of ``env_ids``.

        Because of the reset, restarts of these envs are not reported to the user. If an env cannot be rebuilt, its
        failure is raised.
        """
        _, left = recovery.restart_failed(lost, resets=False)
        recovery.forget(env_ids)
        raise_failures([left[env_id] for env_id in sorted(left)], partial=None)

    # ---------------------------------------------------------------- steps and resets

    @single_threaded_in("step")
    def step(self, action: Action, env_ids: Sequence[int] | None, align: Form) -> StepResult | StepBatch:
        """Step envs (``None``: all that are not paused) and return the result."""
        env_ids = self.table.unpaused if env_ids is None else env_ids
        plan = self.plans.get(align if env_ids is self.table.unpaused else (align, env_ids))
        if plan is None or not plan.is_valid():
            self.pool.enter_planned()
            # Learn the form of infos from those infos of the latest step that were pickled. This must not happen while
            # results wait to be received, because their infos may be in the columns. It must not happen at the end of
            # the latest step either, because an interrupt there would lose the result of that step.
            if self._latest_extras is not None and self.learns_infos and not self.table.tickets:
                (extras, num_envs), self._latest_extras = self._latest_extras, None
                self.pool.learn_infos(extras, num_envs)
            plan = self._plan(env_ids, align) if self.plans_steps else None
        if plan is None:
            return self.finish_step(self.submit_step(action, env_ids, is_awaited=True), align)
        return plan.step(action, self)

    def finish_step(self, ticket: Ticket, align: Form, start: float | None = None) -> StepResult | StepBatch:
        """Wait for a step that has a ticket, and return its result."""
        self.wait(ticket, None, start)
        if ticket.values:
            self._latest_extras = ticket.values, len(ticket.sent_to)
        return self.collect_step(Outcome(ticket.env_ids, ticket.sent_to, ticket.values, ticket.failures), align)

    def _plan(self, env_ids: Sequence[int], align: Form) -> StepPlan | None:
        """Return a valid plan for a step; ``None`` if the step cannot be planned, or is the first with these arguments.

        This method raises the errors of `refuse_unsteppable`.
        """
        self.refuse_unsteppable(env_ids)
        table, pool = self.table, self.pool
        key = align if env_ids is table.unpaused else (align, env_ids)
        plan = self.plans.get(key)
        if plan is None and key not in self._unplanned:
            latest = list(self._unplanned.items())[1 - _MOST_SEEN :]
            self._unplanned = dict([*latest, (key, -1)])
            return None
        if plan is None and self._unplanned[key] == pool.generation:
            return None
        is_unusual = (
            table.exhausted
            or table.has_first_states(env_ids)
            or (self.recovery is not None and self.recovery.unreported)
            or (self.done_policy.resets_next and table.ended(env_ids) != pool.batch.ended(env_ids))
        )
        if is_unusual or table.tickets or not pool.is_idle:
            return None
        pool.is_settled = True
        stepped, chosen = table.choose(env_ids)
        if not stepped:
            return None
        shape = pool.generation, env_ids, stepped  # pauses change `env_ids`, and `key` may be only `align`
        if plan is None or (plan.generation, plan.env_ids, plan.stepped) != shape:
            how = {"autoreset": self.done_policy.autoreset, "begins_ended": self.done_policy.resets_next}
            prepared = pool.prepare_step(stepped, **how)
            if prepared is None:
                self.plans.pop(key, None)
                self._unplanned[key] = pool.generation
                return None
            if len(self.plans) >= _MOST_PLANS:
                self.plans.clear()
            plan = self.plans[key] = StepPlan(self, env_ids, stepped, chosen, align, *prepared)
        plan.renew()
        return plan

    def plan_of(self, id: Ids, align: Any) -> StepPlan | None:
        """Return the plan of a step, or ``None`` if there is none."""
        if type(id) is not list and type(id) is not tuple:
            return None
        if not self.plans or set(map(type, id)) != {int} or type(align) is not str:
            return None
        return self.plans.get((align, tuple(id)))

    def step_wait(
        self, env_ids: Sequence[int], timeout: float | None, align: Form, ticket: Ticket | None = None
    ) -> StepResult | StepBatch:
        """Wait for a step in flight (that with ``ticket``, if one is given), and return its result."""
        self.pool.enter_planned()
        tickets = self.table.tickets
        missing = [one for one in env_ids if one not in tickets or ticket not in (None, tickets[one])]
        if missing:
            raise NothingInFlightError(f"No step of envs {list_ids(missing)} is in flight. Send one first.")
        self._wait_for_arrivals(len(env_ids), timeout, env_ids)
        return self._collect_arrived(env_ids, align)

    def receive(
        self, min_envs: int, max_envs: int | None, timeout: float | None, align: Form
    ) -> StepResult | StepBatch:
        """Return the results of envs that have finished their step or reset, in the order of arrival."""
        self._wait_for_arrivals(self._num_wanted(min_envs), timeout)
        return self._collect_arrived(self.table.arrived(max_envs), align)

    def _collect_arrived(self, env_ids: Sequence[int], align: Form) -> StepResult | StepBatch:
        return self.collect_step(Outcome.of(env_ids, self.table.tickets), align)

    def _num_wanted(self, min_envs: int) -> int:
        self.pool.enter_planned()
        if not self.table.tickets:
            raise NothingInFlightError(
                "There is no result to wait for: no step is in flight. Call send() first, or continue with step()."
            )
        return min(min_envs, len(self.table.tickets))

    @single_threaded_in("reset")
    def latest_states(self, env_ids: Sequence[int] | None = None, *, copies: bool = False) -> State:
        """Return the latest states of envs (``None``: all), batched."""
        chosen, batch = self.env_ids if env_ids is None else env_ids, self.pool.batch
        has_loose = None in batch.layout.state_fields
        extras = self.pool.ask("manage", chosen, None, "loose_leaves").values if has_loose else {}
        return gather_states(batch, chosen, batch.rows(chosen), extras, copies or self.copies)

    def states_of(self, env_ids: Sequence[int], result: StepResult | None) -> State:
        """Return batched copies of the latest states of envs.

        If ``result`` has all of these states, no worker is asked for them.
        """
        place = {} if result is None else {env_id: row for row, env_id in enumerate(result.env_ids.tolist())}
        rows = [place.get(env_id, -1) for env_id in env_ids]
        found: Any = None if result is None else result.states
        lacks_some = isinstance(found, np.ndarray) and found.dtype == object and any(state is None for state in found)
        if result is None or -1 in rows or lacks_some:
            self.table.refuse_unknown_states(env_ids)
        elif None in self.pool.layout.state_fields:  # the worker may be busy, so it is not asked
            structure = self.pool.layout.states
            return structure.join(
                [
                    leaf[rows]
                    if structure.is_fixed(index)
                    else structure.stack(index, [deep_copy_but_graph(pick_rows(leaf, row)) for row in rows])
                    for index, leaf in enumerate(structure.split(found))
                ]
            )
        return self.latest_states(env_ids, copies=True)

    @contextlib.contextmanager
    def with_continue_done_policy(self, env_ids: Sequence[int]) -> Iterator[Self]:
        """Yield an engine that uses the same workers and also steps envs whose episode has ended.

        The yielded engine does not use the done policy of this engine. When the context ends, steps of ``env_ids`` that
        are still in flight are dropped, and all of these envs need a reset.
        """
        self._refuse_unavailable(env_ids)
        done_policy = ResetByCall()
        self.pool.groups.refuse_policy(done_policy, env_ids)
        other = copy.copy(self)
        other.use_done_policy(done_policy, True)
        other.learns_infos = False  # this engine's table may have results whose infos are in the columns
        other.table.share_stats(self.table.stats)
        self.table.require_reset(env_ids)
        try:
            yield other
        finally:
            self.pool.drop(env_ids)
            self.table.copy_from(other.table, env_ids)

    # ---------------------------------------------------------------- other operations

    def attributes(self, key: str, env_ids: Sequence[int], default: Any = None) -> dict[int, Any]:
        """Return, by env id, the attribute ``key`` of each env that has it.

        If the look-up in an env fails, ``error.partial`` maps the ids of the other envs to their values, or to
        ``default``.
        """
        ticket = self.pool.ask("get", env_ids, None, Lookup(key), raises=False)
        values = {env_id: value for env_id, (value,) in ticket.values.items()}
        ticket.raise_failures({one: values.get(one, default) for one in env_ids if one not in ticket.failures})
        return values

    def call_each(self, env_ids: Sequence[int], calls: Sequence[MethodCall]) -> list[Any]:
        """Call a method of each env and return the results in the order of ``env_ids``."""
        return self.pool.ask("call", env_ids, calls).listed()

    def attribute_hint(self, key: str, env_id: int) -> str:
        """Return a hint at an attribute of the env with a name similar to ``key``; an empty string if there is none.

        Asking an env takes 1 ms, so hints are kept for calls that are repeated.
        """
        if (key, env_id) not in self._hints:
            if len(self._hints) == _MOST_HINTS:
                self._hints.clear()
            self._hints[key, env_id] = self.pool.ask(
                "get", (env_id,), None, Lookup(key, "hint"), raises=False
            ).values.get(env_id, "")
        return self._hints[key, env_id]

    @property
    def in_flight(self) -> list[int]:
        """Ids of envs with a step or reset whose result has not been returned yet; none after `close`."""
        planned = self.pool.planned
        found = {*self.table.tickets, *(() if planned is None or planned.is_recorded else planned.env_ids)}
        return [] if self.guard.is_closed else sorted(found)

    @property
    def has_in_flight(self) -> bool:
        """Whether `in_flight` has any ids."""
        return not self.guard.is_closed and bool(self.table.tickets or self.pool.planned)

    # ---------------------------------------------------------------- for event loops

    @single_threaded_in("arecv")
    def poll(self, min_envs: int, timeout: float | None, start: float) -> bool:
        """Return, without waiting, whether enough results have arrived for `receive_now`."""
        wanted, table = self._num_wanted(min_envs), self.table
        while len(table.arrived(wanted)) < wanted and self.pool.pump(time.monotonic()):
            pass
        if len(table.arrived(wanted)) >= wanted:
            return not self._repeat_lost_resets()
        deadline = self._deadline(timeout, start)
        if deadline is not None and time.monotonic() >= deadline:
            self._be_late(timeout)
        return False

    async def sleep_until_reply(self, timeout: float | None, start: float) -> None:
        """Let the event loop run until `poll` may find a reply or a timeout."""
        deadline, now = self._deadline(timeout, start), time.monotonic()
        left = math.inf if deadline is None else max(0.0, deadline - now)
        await sleep_until_woken(self.pool.backend.fileno(), self.pool.wakers, now - start, left)

    @single_threaded_in("arecv")
    def receive_now(self, min_envs: int, max_envs: int | None, align: Form) -> StepResult | StepBatch | None:
        """Return the result of `receive` without waiting.

        The result is ``None`` if too few results are left, because another task has taken some since `poll` was called.
        """
        wanted = self._num_wanted(min_envs)
        enough = len(self.table.arrived(wanted)) >= wanted
        return self._collect_arrived(self.table.arrived(max_envs), align) if enough else None


def _close_dropped(pool: Pool, guard: Guard) -> None:
    """Close the pool of an engine that is no longer referenced, or of any engine when the interpreter exits.

    At exit, daemon threads and functions registered with `atexit` may still use the engine; the guard refuses that.

    Python discards exceptions raised by finalizers. If a signal handler raises one during this call, such as the
    `KeyboardInterrupt` of Ctrl-C, its signal is sent again a moment later.
    """
    guard.is_closed = True
    try:
        pool.close()
    except BaseException as error:
        number = signal_behind(error)
        if number is None:
            raise
        interrupt: Any = functools.partial(_thread.interrupt_main, signal.Signals(number))
        if hasattr(signal, "pthread_kill"):  # also interrupts a wait
            interrupt = functools.partial(signal.pthread_kill, threading.main_thread().ident or 0, number)
        threading.Timer(0.05, interrupt).start()  # seconds after which a finalizer has certainly returned
