"""The fast path of a step: decisions that depend only on the envs are made once and used for many steps.

A `StepPlan` is made when the same envs are stepped for the second time. It is valid until something changes the
`EnvTable` or the workers: for example, a reset, a step without a plan, a failure, a done env that the next step skips,
or a replaced worker. A plan adds no rules of its own: if anything unusual happens in a step, the plan gives the step a
`Ticket`, and the engine finishes the step like any other.

Three objects prepare a planned step, one at each level: the `StepPlan` knows the form of the result; the backend's
`RepeatedStep` knows how to reach all workers; and the `RunningCommand` of each worker's host knows the envs' rows.

A planned step needs no protection against interrupts: one assignment to `Pool.planned` marks the step as in flight, its
entry in the log of `EpisodeStats` marks it as recorded, and everything in between can be repeated.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from parallelenv.contract.batch import Array, gather_states, has_true
from parallelenv.contract.protocol import RepeatedStep
from parallelenv.contract.spaces import Action, State
from parallelenv.engine.assemble import Form, GatheredInfos, too_large_rewards
from parallelenv.engine.tickets import Outcome, Ticket
from parallelenv.results import StepBatch, StepResult

if TYPE_CHECKING:
    from parallelenv.engine.engine import Engine
    from parallelenv.engine.worker_pool import WorkerHandle

PATIENCE = 0.25
"""Seconds after which the engine takes over a plan's wait, to look for deaths and output that no reply reports."""


class StepPlan:
    """A step that is repeated many times, with the same envs and the same form of the result.

    A plan has no reference to the engine. After an interrupt, the pool refers to the plan. If the plan then referred to
    the engine, the engine of a dropped `ParallelEnv` would not be freed, and the pool, which is closed when the engine
    is freed, would stay open.

    The result covers the envs ``env_ids``. Those in ``stepped`` are stepped; ``chosen`` contains their positions in
    ``env_ids`` (``None`` means all). ``repeated`` is the step that the backend has prepared; its commands go to the
    workers in ``shards``.
    """

    def __init__(
        self,
        engine: Engine,
        env_ids: Sequence[int],
        stepped: Sequence[int],
        chosen: Sequence[int] | None,
        align: Form,
        repeated: RepeatedStep,
        shards: Sequence[tuple[WorkerHandle, tuple[int, ...]]],
    ) -> None:
        self.env_ids = env_ids
        self.stepped = stepped
        self.align = align
        self._chosen = chosen
        self._pool, self._table, self._done_policy = engine.pool, engine.table, engine.done_policy
        self._assembler, self._copies = engine.assembler, engine.copies
        self._repeated, self._shards = repeated, shards
        self._outcome = Outcome(env_ids, stepped, {}, {})
        self._number = 0  # of the first command of the latest step
        self._batch = batch = engine.pool.batch
        self._rows = rows = batch.rows(stepped)
        is_vector = len(batch.actions) == 1 and batch.layout.actions.is_single
        self._actions: Array | None = batch.actions[0] if is_vector and chosen is None else None
        self._action_shape = (len(stepped), *batch.actions[0].shape[1:]) if is_vector else ()
        # Views of the rows. Each step copies the views, because indexing the arrays anew takes 0.15 us more.
        is_slice = type(rows) is slice
        self._views = (batch.rewards[rows], batch.flags[rows], batch.env_ids[rows]) if is_slice else None
        single = batch.single_state
        self._states = single[rows] if is_slice and single is not None and engine.copies else None
        self._is_item = align != "batch" and chosen is None
        self._infos = self._assembler.gathered_infos if align is GatheredInfos else self._assembler.infos
        self._is_whole = stepped is self._table.env_ids
        self._version = self.generation = -1

    # ---------------------------------------------------------------- validity

    def is_valid(self) -> bool:
        """Return whether only planned steps have been made since the last call of `renew`, and none is in flight."""
        pool = self._pool
        return (
            self._version == self._table.version
            and self.generation == pool.generation
            and pool.planned is None
            and pool.is_settled
        )

    def renew(self) -> None:
        """Make the plan valid for the current state of the `EnvTable` and the pool."""
        self._version, self.generation = self._table.version, self._pool.generation

    # ---------------------------------------------------------------- a step

    def step(self, action: Action, engine: Engine) -> StepResult | StepBatch:
        """Step the envs and return the result, as `Engine.step` does."""
        if (
            self._actions is not None
            and type(action) is np.ndarray
            and action.dtype == self._actions.dtype
            and action.shape == self._action_shape
        ):
            self._actions[self._rows] = action
        elif engine.actions.write(self._batch, action, self.env_ids, self.stepped, self._chosen) is not None:
            return engine.finish_step(engine.submit_step(action, self.env_ids, is_awaited=True), self.align)
        pool, timeout = self._pool, self._pool.timeout
        start = None if timeout is None else time.monotonic()
        number = self._number = pool.number
        pool.number = number + len(self._shards)
        pool.planned = self
        self._repeated.send(number)
        is_done = self._repeated.wait(PATIENCE if timeout is None else min(PATIENCE, timeout))
        dtype = engine.reward_dtype
        if not is_done or (dtype is not None and too_large_rewards(self._batch, self.stepped, dtype)):
            return engine.finish_step(self.enter(), self.align, start)
        if self._is_item and not (self._done_policy.resets_next and has_true(self._table.done)):
            return self._result()
        return self._assembled()

    def enter(self) -> Ticket:
        """Register a ticket for the step in flight, as is done for a step without a plan, and return the ticket."""
        pool, ticket = self._pool, Ticket("step", self.stepped)
        ticket.is_awaited = True
        with pool.shield:
            pool.planned = None
            for number, (worker, env_ids) in enumerate(self._shards, self._number):
                ticket.pending[number] = env_ids
                worker.pending[number] = ticket
            self._repeated.leave_to_channels(self._number)
            self._table.enter(self.env_ids, ticket, separately=False)
        return ticket

    def _assembled(self) -> StepResult | StepBatch:
        result = self._assembler.assemble(self._batch, self._outcome, self.align)
        prepared = self._assembler.prepare_record(self._batch, self._outcome)
        with self._pool.shield:
            self._assembler.record(prepared)
            self._pool.planned = None
            if self._done_policy.skips_done and has_true(self._table.done):
                self._table.version += 1  # the next step skips the done envs
        return result

    def _result(self) -> StepResult | StepBatch:
        """Return the result of the step, which must not have skipped any of ``env_ids``."""
        batch, table, done_policy, rows = self._batch, self._table, self._done_policy, self._rows
        if self._views is not None:
            rewards, flags, env_ids = self._views
            rewards, flags = rewards.copy(), flags.copy()
        else:
            rewards, flags, env_ids = batch.rewards[rows], batch.flags[rows], batch.env_ids[rows]
        count = len(rewards)
        has_end = has_true(flags)
        if has_end and (done_policy.skips_done or done_policy.resets_next):  # the next step depends on the flags
            return self._assembled()
        states: State = self._states
        states = gather_states(batch, self.stepped, rows, {}, self._copies) if states is None else states.copy()
        is_described = has_end and done_policy.autoreset  # the infos describe the ends of episodes
        infos: Any = (self._assembler.infos if is_described else self._infos)(batch, rows, count)
        if has_end or has_true(table.done):
            dones = flags[:, 0] | flags[:, 1]
            done_policy.mark_done(table.done, rows, dones)
            if is_described:
                self._assembler.describe_ends(batch, self._outcome, dones, infos)
        else:
            dones = np.zeros(count, bool)
        result = StepResult.of(states, rewards, dones, infos, flags, env_ids)
        # Last: an interrupt before the step is in the log loses nothing, and the step is not recorded again after it.
        table.stats.add_step(batch.outcome(), None if self._is_whole else rows, (), self._number)
        self._pool.planned = None
        return result

    @property
    def is_recorded(self) -> bool:
        """Whether the latest step has been recorded; if so, it is no longer in flight."""
        return self._table.stats.has_added(self._number)
