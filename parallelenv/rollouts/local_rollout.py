"""Rollouts whose policy acts in the caller's process, for all envs at once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from parallelenv.contract.arguments import check_policy
from parallelenv.contract.batch import Batch
from parallelenv.contract.failures import NO_FAILURES
from parallelenv.contract.protocol import Command, Extra, Reply
from parallelenv.contract.rollout_data import RolloutChunk
from parallelenv.engine.thread_guard import single_threaded_in
from parallelenv.engine.tickets import Ticket
from parallelenv.rollouts.rollout import RolloutRunner, RunningRollout
from parallelenv.rollouts.rollout_length import RolloutLength, progress_bar
from parallelenv.rollouts.trajectory import Rollout
from parallelenv.worker.policy_runner import PolicyRunner
from parallelenv.worker.rollout_recorder import HostRollout, RowSource, StepSource

if TYPE_CHECKING:
    from parallelenv.engine.engine import Engine


class LocalRollouts:
    """Makes rollouts with policies that stay in this process.

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
        """Make a rollout of all envs that are not paused until ``is_over`` returns True. Arguments: see `roll_here`."""
        goal = RolloutLength.of(num_steps, None)
        roller = RolloutRunner(self._engine)
        return local_rollout(roller, policy, self._engine.ids(None), goal, rnn_state, shows_progress, is_over)


def local_rollout(
    roller: RolloutRunner,
    policy: Callable[..., Any],
    env_ids: Sequence[int],
    goal: RolloutLength,
    rnn_state: Any,
    shows_progress: bool,
    is_over: Callable[[int], bool] | None,
) -> Rollout:
    """Make a rollout with a policy that stays in this process, and so keeps what it learns or draws.

    Args:
        roller: Runs the rollout.
        policy: See `ParallelEnv.rollout`, but it is called here, with the states of all envs that take part.
        env_ids: The envs.
        goal: Length of the rollout.
        rnn_state: See `ParallelEnv.rollout`.
        shows_progress: See ``progress`` there.
        is_over: See `HostRollout`. Once it returns True, the rollout has the steps made so far.

    Raises:
        The errors of `ParallelEnv.rollout`.
    """
    check_policy(policy)
    roller.check(env_ids, goal, rnn_state)
    starts, shares, memory = roller.begin(env_ids, goal, rnn_state)
    player = PolicyRunner(policy, memory, roller.pool.layout)
    course = _RunningLocalRollout(roller, player, env_ids, goal.num_steps, shares, is_over)
    with progress_bar(goal, shows_progress) as advance:
        while asked := course.asked():
            advance(course.go_on(asked))
    return course.result(starts)


class _RunningLocalRollout(RunningRollout):
    """A rollout in progress whose policy is in this process. Chunks are made here instead of requested from hosts."""

    def __init__(
        self,
        roller: RolloutRunner,
        player: PolicyRunner,
        env_ids: Sequence[int],
        num_steps: int | None,
        left: dict[int, int | None],
        is_over: Callable[[int], bool] | None,
    ) -> None:
        super().__init__(roller, None, env_ids, num_steps, left)
        self._rollout = HostRollout(0, None, player, is_over)
        # Bypass the pool: a step of 8 CartPoles and a small network took 184 us with it, 166 us without.
        self._stage: StepSource = (roller.recovery is None and roller.pool.lone_host) or _LocalSteps(roller)

    def asked(self) -> list[int]:
        return [] if self._has_stopped else super().asked()

    def _send(self, asked: Sequence[int]) -> Ticket:
        shares = [self._left[env_id] for env_id in asked]
        lent = [env_id for env_id, share in zip(asked, shares, strict=True) if share != 0]
        self._is_known = True
        self._roller.table.lend(lent)
        chunk = self._rollout.play(self._stage, Command(0, "rollout", tuple(asked), shares, self._order(self._size)))
        self._note_size(chunk)
        ticket = Ticket("rollout", tuple(asked))
        ticket.values[asked[0]] = chunk
        return ticket

    def _note_size(self, chunk: RolloutChunk) -> None:
        """Store the number of steps that were made."""
        self._size = chunk.num_steps
        self._has_stopped = self._rollout.has_stopped
        if self._has_stopped and self._num_steps is not None:
            self._num_steps = self._count + self._size


class _LocalRows:
    """The rows of all envs in the caller's batch. Attributes: see `RowSource`."""

    def __init__(self, batch: Batch, loose: dict[int, list[Any]]) -> None:
        self.first = batch.layout.first
        self.batch = batch
        self.loose = loose

    def rows(self, env_ids: Sequence[int]) -> Any:
        return self.batch.rows(env_ids)


class _LocalSteps:
    """Steps all envs for the policy, in place of a host. Attributes: see `StepSource`."""

    in_caller = True

    def __init__(self, roller: RolloutRunner) -> None:
        self.doing = ""
        self._pool, self._recovery = roller.pool, roller.recovery
        batch = roller.pool.batch
        has_loose = any(array is None for array in batch.states)
        extras = roller.pool.ask("state", roller.pool.env_ids, None, "leaves").values if has_loose else {}
        first = batch.layout.first
        self.writer: RowSource = _LocalRows(batch, {env_id - first: extra.loose for env_id, extra in extras.items()})

    def run_step(self, env_ids: tuple[int, ...], each: Sequence[Any] | None, autoreset: bool) -> Reply:
        """Step envs, wherever they live; an env that is late or lost counts as failed."""
        failed = NO_FAILURES if self._recovery is None else self._recovery.failures_before(env_ids)
        ticket = self._pool.submit("step", env_ids, each, autoreset=autoreset, failed=failed)
        self._pool.wait_or_give_up(ticket)
        for env_id, extra in ticket.values.items():
            if extra.loose is not None:
                self.writer.loose[env_id - self.writer.first] = extra.loose
        columns = self._pool.batch.info_columns
        for position, info in columns.read(self.writer.rows(env_ids), len(env_ids)) if columns is not None else ():
            if env_ids[position] not in ticket.failures:
                ticket.values[env_ids[position]] = Extra(info)
        return Reply(0, ticket.values, ticket.failures)
