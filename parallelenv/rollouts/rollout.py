"""Rollouts: many steps made inside the workers, chunk by chunk, and joined here."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from parallelenv.contract.arguments import Policy, check_policy
from parallelenv.contract.batch import Array, Batch
from parallelenv.contract.copying import pickled
from parallelenv.contract.error_text import list_ids
from parallelenv.contract.failures import NO_FAILURES, Failure, raise_failures, raise_of_policy, with_note
from parallelenv.contract.protocol import NOTHING, Command, Extra, Lookup, MethodCall, Reply
from parallelenv.contract.rollout_data import (
    EpisodeEnds,
    RecurrentState,
    RolloutChunk,
    RolloutRequest,
    check_rows,
    empty_actions,
    empty_rows,
    join_ends,
)
from parallelenv.engine.thread_guard import single_threaded_in
from parallelenv.engine.tickets import Ticket
from parallelenv.errors import ArgumentError, ParallelEnvError, ResetNeededError, WorkerTimeoutError
from parallelenv.rollouts.rollout_length import RolloutLength, progress_bar
from parallelenv.rollouts.trajectory import Rollout, RolloutBuilder
from parallelenv.worker.policy_runner import PolicyRunner
from parallelenv.worker.rollout_recorder import HostRollout, StepSource
from parallelenv.worker.row_writer import RowWriter

if TYPE_CHECKING:
    from parallelenv.engine.engine import Engine

CHUNK = 0.2
"""Seconds that a chunk should take: how soon Ctrl-C has an effect, and how often the bar moves."""
_GROWTH = 16
"""Factor by which the size of a chunk may grow: one chunk is a poor measure, and the first also warms up."""
_numbers = itertools.count(1)


def pack_policy(player: Policy, memory: RecurrentState | None) -> Array:
    """Return a policy and its memory, pickled by `pickled`.

    Raises:
        UnpicklableError: If it cannot be pickled.
    """
    what = f"The policy, a {type(player).__name__},"
    return pickled((player, memory), what, "Let it hold plain data, and open what cannot travel at its first call.")


class RunningRollout:
    """One rollout, whose policy acts in the workers.

    What a worker loses is the chunk in progress: the other workers' steps of it are kept.

    Args:
        engine: Engine of the envs.
        player: The policy.
        env_ids: Its envs.
        goal: How long it is.
        rnn_state: See `ParallelEnv.rollout`.

    Raises:
        ArgumentError: If the policy is not callable, or an argument does not fit the envs.
        ResetNeededError, EnvBusyError: If an env cannot be stepped now.
    """

    def __init__(
        self, engine: Engine, player: Policy, env_ids: Sequence[int], goal: RolloutLength, rnn_state: Any
    ) -> None:
        check_policy(player)
        self._engine, self._pool, self._table = engine, engine.pool, engine.table
        self._recovery, self._policy = engine.recovery, engine.done_policy
        living = self._table.living(env_ids)
        goal.check(self._policy, living)
        check_rows("rnn_state", rnn_state, len(env_ids))
        self._number = next(_numbers)
        self._env_ids, self._goal = env_ids, goal
        self._num_steps = goal.num_steps
        self._player = player
        self._starts = engine.begin_rollout(env_ids)
        self._left = self._shares(living)  # how many episodes each env may still end; None: any number
        self._unsent = self._prepare(self._memory(rnn_state))  # the policy, to be sent with the next chunk
        self._assembly = RolloutBuilder(self._pool.batch, env_ids)
        # Only hosts have all states of envs that are not stepped: they take part in the first chunk.
        self._asks_all = any(array is None for array in self._pool.batch.states)
        self._is_known = False  # whether hosts have the policy
        self._count = self._size = 0
        self._pace = 0.0  # seconds per step
        self._is_over = self._is_late = False
        self._failures: dict[int, Failure] = {}
        self._broken: tuple[Failure, tuple[int, ...]] | None = None

    def _prepare(self, memory: RecurrentState | None) -> Array | None:
        """Return what is sent to hosts for them to have the policy, with this recurrent state."""
        return pack_policy(self._player, memory)

    def _memory(self, rnn_state: Any) -> RecurrentState | None:
        """Return the recurrent state of the envs."""
        if rnn_state is None:
            return None
        begins = self._starts | self._table.done[list(self._env_ids)]
        new = frozenset(env_id for env_id, is_new in zip(self._env_ids, begins, strict=True) if is_new)
        return RecurrentState(tuple(self._env_ids), rnn_state, new)

    def _shares(self, living: Sequence[int]) -> dict[int, int | None]:
        """Return how many episodes each env is to end, 0 for envs that rest.

        Raises:
            ResetNeededError: If one of them has an episode to play.
        """
        shares = {**dict.fromkeys(self._env_ids, 0), **self._goal.shares(living)}
        if self._policy.skips_done:
            resting = [env_id for env_id, share in shares.items() if self._table.done[env_id] and share != 0]
            if resting and self._goal.num_episodes is not None:
                raise ResetNeededError(
                    f"envs {list_ids(resting)} have ended and rest. Call reset({list_ids(resting)}) before the rollout."
                )
            shares.update(dict.fromkeys(resting, 0))
        return shares

    def run(self, shows_progress: bool) -> Rollout:
        """Make all steps and return them.

        Raises:
            BaseException: What an env or the policy raised; ``error.partial`` has the steps that were made.
        """
        is_complete = False
        try:
            with progress_bar(self._goal, shows_progress) as advance:
                while asked := self._asked():
                    advance(self._go_on(asked))
            is_complete = not self._is_late
        finally:
            if self._is_known:  # hosts drop the policy; commands in flight after a failure are not waited for
                with contextlib.suppress(ParallelEnvError):  # a worker that dies now takes the policy with it
                    dead = self._pool.death_errors(self._env_ids)
                    ticket = self._pool.submit("rollout", self._env_ids, failed=dead)
                    if is_complete:
                        self._pool.wait(ticket, self._engine.timeout)
        return self._result()

    def _asked(self) -> list[int]:
        """Return the envs of the next chunk, none if the rollout is over."""
        if self._is_over or (self._num_steps is not None and self._count >= self._num_steps):
            return []
        if self._asks_all:
            return list(self._env_ids)
        return [env_id for env_id in self._env_ids if self._left[env_id] != 0]

    def _go_on(self, asked: Sequence[int]) -> int:
        """Let envs make some steps; return the progress towards the goal."""
        before: list[Array] = []  # the states, as a chunk of one step
        if self._recovery is not None:
            batch, shape = self._pool.batch, (1, len(asked))
            rows = [env_id - batch.layout.first for env_id in asked]
            before = [empty_rows(shape, None) if array is None else array[rows][None] for array in batch.states]
        failed = self._send_policy(asked) if self._unsent is not None else NO_FAILURES
        if self._recovery is not None:
            failed = {**failed, **self._recovery.failures_before(asked)}
        self._size = self._next_size()
        ticket = self._send(asked, failed)
        self._asks_all = False
        # Measured by the hosts' clocks: with hundreds of envs the messages alone may take longer than a chunk should,
        # and a chunk would never have more than one step.
        paces = [chunk.seconds / chunk.num_steps for chunk in ticket.values.values() if chunk.num_steps]
        self._pace = max(paces, default=self._pace)
        num_ended = self._land(ticket, asked, before)
        self._count += self._size
        return self._size if self._goal.num_steps is not None else num_ended

    def _send_policy(self, asked: Sequence[int]) -> Mapping[int, Failure]:
        """Let hosts unpickle the policy, without a time limit: it may import a library, and is not a step.

        Hosts first finish earlier commands, as long as a call may take. Without a recovery late commands stay in
        flight: no env was lent yet, so no steps are lost.

        Returns:
            The failures of envs whose host could not be reached.
        """
        pool, recovery = self._pool, self._recovery
        failed = dict(recovery.failures_before(asked)) if recovery is not None else {}
        if not self._is_known:
            self._is_known = True
            ticket = pool.submit("rollout", asked, failed=failed)  # cheap: answered after all earlier commands
            try:
                pool.wait(ticket, self._engine.timeout)
            except WorkerTimeoutError as late:
                self._is_late = True
                if recovery is not None:
                    pool.give_up(ticket, late)
                failed = {env_id: Failure(late, env_id, "") for env_id in late.env_ids}
            failed = {**ticket.failures, **failed}
        ticket = pool.submit("rollout", asked, None, self._order(0), failed={**failed, **pool.death_errors(asked)})
        pool.wait(ticket, None)
        self._unsent = None
        return ticket.failures

    def _next_size(self) -> int:
        """Return the number of steps of the next chunk, from the duration of the last one."""
        if not self._pace:
            return 1
        timeout = self._engine.timeout
        seconds = CHUNK if timeout is None else min(CHUNK, timeout / 4)
        size = max(1, min(self._size * _GROWTH, int(seconds / self._pace)))
        return size if self._num_steps is None else min(size, self._num_steps - self._count)

    def _send(self, asked: Sequence[int], failed: Mapping[int, Failure]) -> Ticket:
        """Send an order to the hosts of these envs and wait until it is done, or too late."""
        left = [self._left[env_id] for env_id in asked]
        each = None if all(share is None for share in left) else left
        lent = [env_id for env_id, share in zip(asked, left, strict=True) if share != 0 and env_id not in failed]
        ticket = self._pool.submit(
            "rollout", asked, each, self._order(self._size), announce=lambda _: self._table.lend(lent), failed=failed
        )
        self._is_late |= not self._pool.wait_or_give_up(ticket)
        return ticket

    def _order(self, num_steps: int) -> RolloutRequest:
        policy = self._policy
        return RolloutRequest(self._number, self._unsent, num_steps, policy.autoreset, policy.skips_done)

    def _land(self, ticket: Ticket, asked: Sequence[int], before: list[Array]) -> int:
        """Record the result of a chunk; return how many episodes have ended."""
        table = self._table
        chunks: list[RolloutChunk] = [ticket.values[env_id] for env_id in sorted(ticket.values)]  # not by arrival
        lost = _find_lost(ticket, asked, chunks)
        left = {env_id: failure for chunk in chunks for env_id, (_, failure) in chunk.failed.items()} | lost
        restarted: dict[int, tuple[Failure, Extra]] = {}
        if left and self._recovery is not None:
            restarted, left = self._recovery.restart_failed(left)
            self._unsent = self._prepare(None) if restarted else None
            self._recovery.forget(restarted)
        replaced = {env_id: failure for env_id, failure in lost.items() if env_id in restarted}
        if replaced:
            chunks.append(_invalid_chunk(asked, before, replaced, self._pool.batch))
        num_ended = 0
        for chunk in chunks:
            for env_id in chunk.failed.keys() & restarted.keys():
                self._cut_off(chunk, env_id, *restarted[env_id], is_lost=env_id in lost)
            self._assembly.add(self._count, chunk)
            table.note_chunk(chunk)
            num_ended += self._spend(chunk)
        for env_id, (_, begun) in restarted.items():
            table.reset_infos[env_id] = begun.info or {}
        table.note_exhausted(env_id for env_id, (_, begun) in restarted.items() if begun.is_exhausted)
        table.keep(env_id for env_id in asked if env_id not in left or left[env_id].operation == "step")
        self._note_failures(left, chunks, has_lost=not lost.keys().isdisjoint(left))
        return num_ended

    def _note_failures(self, left: Mapping[int, Failure], chunks: Sequence[RolloutChunk], *, has_lost: bool) -> None:
        """Leave out envs that failed for good from now on.

        The others finish, so that their number of steps does not depend on timing. Where steps were lost it does
        anyway, so the rollout ends at once.
        """
        self._failures.update(left)
        self._left.update(dict.fromkeys([*left, *self._table.exhausted.intersection(self._left)], 0))
        broken = [(chunk.broken, chunk.env_ids) for chunk in chunks if chunk.broken is not None]
        self._broken = min(broken, key=lambda one: one[1], default=None)
        self._is_over |= has_lost or self._broken is not None

    def _cut_off(self, chunk: RolloutChunk, env_id: int, failure: Failure, begun: Extra, *, is_lost: bool) -> None:
        """Mark the step in which a restarted env failed as `step` does."""
        step, column = chunk.failed[env_id][0], chunk.env_ids.index(env_id)
        chunk.flags[step, column] = False, True
        chunk.valid[step, column] = not is_lost
        chunk.said[step, env_id] = Extra({"failure": with_note(failure)}, reset_info=begun.info)
        if begun.loose is not None:
            chunk.loose[env_id] = begun.loose
        end = EpisodeEnds(np.array([step]), np.array([column]), [leaf[step, [column]] for leaf in chunk.states])
        chunk.ended = join_ends([chunk.ended, end], self._pool.batch.states)

    def _spend(self, chunk: RolloutChunk) -> int:
        """Subtract the episodes that ended from the envs' shares; return their number."""
        for column in chunk.ended.columns.tolist():
            env_id = chunk.env_ids[column]
            left = self._left[env_id]
            if self._policy.skips_done:
                self._left[env_id] = 0
            elif left:
                self._left[env_id] = left - 1
        return len(chunk.ended.columns)

    def _result(self) -> Rollout:
        """Return all steps that were made, or raise what failed."""
        running = {env_id for env_id in self._env_ids if not self._table.done[env_id]}.difference(self._failures)
        rnn_state = None
        try:
            rnn_state = self._assembly.rnn_state(running)
        except ArgumentError as error:
            self._broken = self._broken or (Failure(error, self._env_ids[0], "the policy"), tuple(self._env_ids))
        rollout = self._assembly.rollout(self._num_steps, self._starts, rnn_state)
        if self._broken is not None:
            raise_of_policy(*self._broken, rollout)
        raise_failures([self._failures[env_id] for env_id in sorted(self._failures)], partial=rollout)
        return rollout


def _find_lost(ticket: Ticket, asked: Sequence[int], chunks: Sequence[RolloutChunk]) -> dict[int, Failure]:
    """Return the envs whose steps did not arrive, and why."""
    known = {env_id for chunk in chunks for env_id in chunk.env_ids}
    lost = {}
    for env_id in asked if ticket.failures else ():
        if env_id not in known:  # a chunk that cannot be copied is a failure of one of its envs
            cause = ticket.failures.get(env_id) or next(iter(ticket.failures.values()))
            lost[env_id] = Failure(cause.exception, env_id, cause.operation)
    return lost


def _invalid_chunk(
    asked: Sequence[int], before: list[Array], lost: Mapping[int, Failure], batch: Batch
) -> RolloutChunk:
    """Return an invalid chunk of one step, for restarted envs whose steps are lost."""
    places = [place for place, env_id in enumerate(asked) if env_id in lost]
    shape = 1, len(places)
    return RolloutChunk(
        tuple(asked[place] for place in places),
        [array[:, places] for array in before],
        empty_actions(shape, batch),
        np.zeros(shape),
        np.zeros((*shape, 2), dtype=bool),
        np.zeros(shape, dtype=bool),
        join_ends([], batch.states),
        failed={env_id: (0, failure) for env_id, failure in lost.items()},
    )


_OWN_ROLLOUT = "run_batch_episode"
"""The method by which test units of MetaBox play an episode."""


def run_batch_episodes(engine: Engine, env_ids: Sequence[int], *for_policies: Any) -> list[Any]:
    """Call ``run_batch_episode()`` of each env, which brings its own policy, and return the results.

    Args:
        engine: Engine of the envs.
        env_ids: The envs.
        *for_policies: Arguments that only a rollout with a policy takes.

    Raises:
        ArgumentError: If one of them is given, or an env has no such method.
    """
    found = engine.pool.ask("get", env_ids, None, Lookup(_OWN_ROLLOUT, "exists")).values
    lacking = [env_id for env_id in env_ids if not found.get(env_id)]
    if lacking or any(given is not None for given in for_policies):
        why = f", and envs {list_ids(lacking)} have none" if lacking else ", which takes no arguments"
        raise ArgumentError(
            f"rollout() was called without a policy. Give one: rollout(policy, num_steps=...). Without, it calls "
            f"{_OWN_ROLLOUT}() of each env{why}."
        )
    values = engine.pool.ask("call", env_ids, None, MethodCall(_OWN_ROLLOUT)).values
    return [values.get(env_id) for env_id in env_ids]


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
        policy: Policy,
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
        policy: Policy,
        env_ids: Sequence[int],
        goal: RolloutLength,
        rnn_state: Any,
        is_over: Callable[[int], bool],
    ) -> None:
        self._runner: PolicyRunner
        super().__init__(engine, policy, env_ids, goal, rnn_state)
        self._rollout = HostRollout(0, self._runner, is_over)
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
        self._pool, self._recovery = engine.pool, engine.recovery
        self.writer = RowWriter(engine.pool.batch)
        if any(array is None for array in engine.pool.batch.states):
            self._note_loose(engine.pool.ask("state", engine.pool.env_ids, None, "loose_leaves").values)

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
        batch = self._pool.batch
        for name, columns in (("info", batch.info_columns), ("reset_info", batch.reset_columns)):
            for position, info in columns.read(batch.rows(env_ids), len(env_ids)) if columns is not None else ():
                env_id = env_ids[position]
                if env_id not in ticket.failures:
                    ticket.values[env_id] = ticket.values.get(env_id, NOTHING)._replace(**{name: info})
        return Reply(0, ticket.values, ticket.failures)
