"""Rollouts whose policy acts in the caller's process, for all envs at once."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from parallelenv.contract.failures import NO_FAILURES, Failure
from parallelenv.contract.protocol import Command, Extra, Reply
from parallelenv.contract.rollout_data import RecurrentState
from parallelenv.engine.thread_guard import single_threaded_in
from parallelenv.engine.tickets import Ticket
from parallelenv.rollouts.rollout import RunningRollout
from parallelenv.rollouts.rollout_length import RolloutLength
from parallelenv.rollouts.trajectory import Rollout
from parallelenv.worker.policy_runner import PolicyRunner
from parallelenv.worker.rollout_recorder import HostRollout, StepSource
from parallelenv.worker.row_writer import RowWriter

if TYPE_CHECKING:
    from parallelenv.engine.engine import Engine


class LocalRollouts:
    """Makes rollouts with policies that stay in this process, and so keep what they learn or draw.

    Args:
        engine: Engine of the envs.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._guard = engine.guard

    @single_threaded_in("rollout")
    def run(
        self,
        policy: Callable[..., Any],
        num_steps: int,
        rnn_state: Any,
        shows_progress: bool,
        is_over: Callable[[int], bool],
    ) -> Rollout:
        """Make a rollout of all envs that are not paused.

        Args:
            policy: See `ParallelEnv.rollout`, but it is called here, with the states of all envs that take part.
            num_steps: See `ParallelEnv.rollout`.
            rnn_state: See `ParallelEnv.rollout`.
            shows_progress: Whether to show a bar, on a terminal or in a notebook.
            is_over: See `HostRollout`. Once it returns True, the rollout has the steps made so far.

        Raises:
            The errors of `ParallelEnv.rollout`.
        """
        goal = RolloutLength.of(num_steps, None)
        engine = self._engine
        return _RunningLocalRollout(engine, policy, engine.ids(None), goal, rnn_state, is_over).run(shows_progress)


class _RunningLocalRollout(RunningRollout):
    """A rollout whose policy is in this process. Chunks are made here instead of requested from hosts."""

    def __init__(
        self,
        engine: Engine,
        policy: Any,
        env_ids: Sequence[int],
        goal: RolloutLength,
        rnn_state: Any,
        is_over: Callable[[int], bool],
    ) -> None:
        self._runner: PolicyRunner
        super().__init__(engine, policy, env_ids, goal, rnn_state)
        self._rollout = HostRollout(0, None, self._runner, is_over)
        # Bypass the pool: a step of 8 CartPoles and a small network took 184 us with it, 166 us without.
        self._stage: StepSource = (engine.recovery is None and engine.pool.lone_host) or _LocalSteps(engine)

    def _prepare(self, memory: RecurrentState | None) -> None:
        self._runner = PolicyRunner(self._player, memory, self._pool.layout)

    def _send(self, asked: Sequence[int], failed: Mapping[int, Failure]) -> Ticket:
        shares = [self._left[env_id] for env_id in asked]
        self._table.lend([env_id for env_id, share in zip(asked, shares, strict=True) if share != 0])
        chunk = self._rollout.play(self._stage, Command(0, "rollout", tuple(asked), shares, self._order(self._size)))
        self._size = chunk.num_steps
        if self._rollout.has_stopped:
            self._is_over, self._num_steps = True, self._count + self._size
        ticket = Ticket("rollout", tuple(asked))
        ticket.values[asked[0]] = chunk
        return ticket


class _LocalSteps:
    """Steps all envs for the policy, in place of a host. Attributes: see `StepSource`."""

    in_caller = True

    def __init__(self, engine: Engine) -> None:
        self.doing = ""
        self._pool, self._recovery = engine.pool, engine.recovery
        self.writer = RowWriter(engine.pool.batch)
        if any(array is None for array in engine.pool.batch.states):
            self._note_loose(engine.pool.ask("state", engine.pool.env_ids, None, "leaves").values)

    def _note_loose(self, values: Mapping[int, Extra]) -> None:
        for env_id, extra in values.items():
            if extra.loose is not None:
                self.writer.loose[env_id - self.writer.first] = extra.loose

    def run_step(self, env_ids: tuple[int, ...], each: Sequence[Any] | None, autoreset: bool) -> Reply:
        """Step envs, wherever they live; an env that is late or lost counts as failed."""
        failed = NO_FAILURES if self._recovery is None else self._recovery.failures_before(env_ids)
        ticket = self._pool.submit("step", env_ids, each, autoreset=autoreset, failed=failed)
        self._pool.wait_or_give_up(ticket)
        self._note_loose(ticket.values)
        columns = self._pool.batch.info_columns
        for position, info in columns.read(self.writer.rows(env_ids), len(env_ids)) if columns is not None else ():
            if env_ids[position] not in ticket.failures:
                ticket.values[env_ids[position]] = Extra(info)
        return Reply(0, ticket.values, ticket.failures)
