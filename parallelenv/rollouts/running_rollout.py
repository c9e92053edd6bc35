"""Makes rollouts in chunks of many steps. The policy acts in the workers or, for a collector, in the caller."""

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
from parallelenv.contract.failures import NO_FAILURES, Failure, add_note, put, raise_failures, with_note
from parallelenv.contract.protocol import NOTHING, Command, Extra, Lookup, MethodCall, Reply
from parallelenv.contract.rollout_data import (
    EpisodeEnds,
    RecurrentState,
    RolloutChunk,
    RolloutRequest,
    check_rows,
    empty_rows,
    join_ends,
)
from parallelenv.engine.thread_guard import single_threaded_in
from parallelenv.engine.tickets import Ticket
from parallelenv.errors import ArgumentError, ParallelEnvError, ResetNeededError, WorkerTimeoutError
from parallelenv.rollouts.rollout import Rollout, RolloutBuilder, RolloutLength, progress_bar
from parallelenv.worker.rollout_recorder import HostRollout, PolicyRunner, StepSource, new_chunk
from parallelenv.worker.row_writer import RowWriter

if TYPE_CHECKING:
    from parallelenv.engine.engine import Engine

CHUNK = 0.2
"""Seconds that a chunk should take. Ctrl-C has an effect, and the progress bar advances, after each chunk."""
_GROWTH = 16
"""Maximum factor by which the size of chunks grows.

The factor is limited because the time of one chunk is a poor estimate of the time of the next, and because the first
chunk includes warm-up.
"""
_numbers = itertools.count(1)


class RunningRollout:
    """One rollout, whose policy acts in the workers. See `ParallelEnv.rollout` for arguments and errors.

    If a worker dies, its steps of the current chunk are lost; the steps of the other workers are kept.
    """

    def __init__(
        self, engine: Engine, policy: Policy, env_ids: Sequence[int], goal: RolloutLength, rnn_state: Any
    ) -> None:
        check_policy(policy)
        self._pool, self._table = engine.pool, engine.table
        self._recovery, self._done_policy = engine.recovery, engine.done_policy
        living = self._table.without_exhausted(env_ids)
        goal.check(self._done_policy, self._pool.groups, living)
        check_rows("rnn_state", rnn_state, len(env_ids))
        self._number = next(_numbers)
        self._env_ids, self._goal = env_ids, goal
        self._num_steps = goal.num_steps
        self._policy = policy
        engine.refuse_unsteppable(env_ids)
        self._table.refuse_unknown_states(env_ids)
        self._starts = self._table.at_beginning(env_ids)
        self._episodes_left = self._shares(living)  # number of episodes each env may still finish; None: any number
        memory = None
        if rnn_state is not None:
            begins = self._starts | self._table.done[list(env_ids)]
            new = frozenset(env_id for env_id, is_new in zip(env_ids, begins, strict=True) if is_new)
            memory = RecurrentState(tuple(env_ids), rnn_state, new)
        self._unsent_policy = self._prepare(memory)  # the policy, to be sent with the next chunk
        self._builder = RolloutBuilder(self._pool.batch, env_ids, memory)
        # If states have leaves that are not in the batch, all envs take part in the first chunk, even those that are
        # not stepped, because only the hosts have these leaves.
        self._asks_all = None in self._pool.layout.state_fields
        self._hosts_have_policy = False
        self._num_made = self._chunk_size = 0
        self._seconds_per_step = 0.0  # of the slowest host; 0: not measured
        self._is_over = self._is_late = False
        self._failures: dict[int, Failure] = {}
        self._policy_failure: tuple[Failure, tuple[int, ...]] | None = None

    def _prepare(self, memory: RecurrentState | None) -> Array | None:
        what = f"The policy, a {type(self._policy).__name__},"
        way_out = "Let it hold plain data, and create other objects at its first call."
        return pickled((self._policy, memory), what, way_out)

    def _note_restarted(self, restarted: Mapping[int, tuple[Failure, Extra]]) -> None:
        """Prepare the next chunk after restarts of envs; see `Recovery.restart_failed` for ``restarted``."""
        self._unsent_policy = self._prepare(None) if restarted else None  # new hosts have no policy

    def _shares(self, living: Sequence[int]) -> dict[int, int | None]:
        """Return how many episodes each env should finish: 0 if it is not stepped, ``None`` for any number."""
        shares = {**dict.fromkeys(self._env_ids, 0), **self._goal.shares(living)}
        if self._done_policy.skips_done:
            resting = [env_id for env_id, share in shares.items() if self._table.done[env_id] and share != 0]
            if resting and self._goal.num_episodes is not None:
                raise ResetNeededError(
                    f"envs {list_ids(resting)} have ended. Call reset({list_ids(resting)}) before the rollout."
                )
            shares.update(dict.fromkeys(resting, 0))
        return shares

    def run(self, shows_progress: bool) -> Rollout:
        """Make all steps of the rollout and return them."""
        is_complete = False
        try:
            with progress_bar(self._goal, shows_progress) as advance:
                while not self._is_over and (self._num_steps is None or self._num_made < self._num_steps):
                    asked = list(self._env_ids)
                    if not self._asks_all:
                        asked = [env_id for env_id in asked if self._episodes_left[env_id] != 0]
                    if not asked:
                        break
                    advance(self._run_chunk(asked))
            is_complete = not self._is_late
        finally:
            if self._hosts_have_policy:  # make hosts drop the policy; after a failure, do not wait for them
                with contextlib.suppress(ParallelEnvError):  # a worker that dies here drops the policy too
                    dead = self._pool.death_failures(self._env_ids)
                    ticket = self._pool.submit("rollout", self._env_ids, failed=dead)
                    if is_complete:
                        self._pool.wait(ticket, self._pool.timeout)
        return self._result()

    def _run_chunk(self, asked: Sequence[int]) -> int:
        """Make one chunk of steps, and return the progress towards the goal, in steps or episodes."""
        before: list[Array] = []  # the states before the chunk, in the form of a chunk of one step
        if self._recovery is not None:
            batch, shape = self._pool.batch, (1, len(asked))
            rows = [env_id - batch.layout.first for env_id in asked]
            before = [empty_rows(shape, None) if array is None else array[rows][None] for array in batch.states]
        failed = self._send_policy(asked) if self._unsent_policy is not None else NO_FAILURES
        if self._recovery is not None:
            failed = {**failed, **self._recovery.failures_before(asked)}
        if self._seconds_per_step:
            seconds = CHUNK if self._pool.timeout is None else min(CHUNK, self._pool.timeout / 4)
            self._chunk_size = max(1, min(self._chunk_size * _GROWTH, int(seconds / self._seconds_per_step)))
            if self._num_steps is not None:
                self._chunk_size = min(self._chunk_size, self._num_steps - self._num_made)
        else:  # the first chunk measures
            self._chunk_size = 1
        ticket = self._send(asked, failed)
        self._asks_all = False
        # The time is measured in the hosts: with hundreds of envs the messages alone may take longer than a chunk
        # should, and then a chunk would never have more than one step.
        paces = [chunk.seconds / chunk.num_steps for chunk in ticket.values.values() if chunk.num_steps]
        self._seconds_per_step = max(paces, default=self._seconds_per_step)
        num_ended = self._record(ticket, asked, before)
        self._num_made += self._chunk_size
        return self._chunk_size if self._goal.num_steps is not None else num_ended

    def _send_policy(self, asked: Sequence[int]) -> Mapping[int, Failure]:
        """Make hosts unpickle the policy. This has no time limit, because unpickling may import a library.

        Before they unpickle it, hosts must finish earlier commands within the timeout of the `ParallelEnv`. If the
        `ParallelEnv` does not restart failed envs, late commands stay in flight.
        """
        pool, recovery = self._pool, self._recovery
        failed = dict(recovery.failures_before(asked)) if recovery is not None else {}
        if not self._hosts_have_policy:
            self._hosts_have_policy = True
            ticket = pool.submit("rollout", asked, failed=failed)  # cheap; replied to after earlier commands
            try:
                pool.wait(ticket, self._pool.timeout)
            except WorkerTimeoutError as late:
                self._is_late = True
                if recovery is not None:
                    pool.give_up(ticket, late)
                failed = {env_id: Failure(late, env_id, "") for env_id in late.env_ids}
            failed = {**ticket.failures, **failed}
        ticket = pool.submit("rollout", asked, None, self._request(0), failed={**failed, **pool.death_failures(asked)})
        pool.wait(ticket, None)
        self._unsent_policy = None
        return ticket.failures

    def _send(self, asked: Sequence[int], failed: Mapping[int, Failure]) -> Ticket:
        left = [self._episodes_left[env_id] for env_id in asked]
        each = None if all(share is None for share in left) else left
        lent = [env_id for env_id, share in zip(asked, left, strict=True) if share != 0 and env_id not in failed]
        request, require_reset = self._request(self._chunk_size), self._table.require_reset
        ticket = self._pool.submit(
            "rollout", asked, each, request, announce=lambda _: require_reset(lent), failed=failed
        )
        self._is_late |= not self._pool.wait_or_give_up(ticket)
        return ticket

    def _request(self, num_steps: int) -> RolloutRequest:
        how = self._done_policy
        return RolloutRequest(self._number, self._unsent_policy, num_steps, how.autoreset, how.skips_done)

    def _record(self, ticket: Ticket, asked: Sequence[int], before: list[Array]) -> int:
        """Record the result of a chunk; return the number of episodes that ended."""
        table = self._table
        chunks: list[RolloutChunk] = [ticket.values[env_id] for env_id in sorted(ticket.values)]  # in a fixed order
        lost: dict[int, Failure] = {}  # envs whose steps did not arrive, and why
        if ticket.failures:  # a chunk that cannot be copied counts as a failure of one of its envs
            known = {env_id for chunk in chunks for env_id in chunk.env_ids}
            other = next(iter(ticket.failures.values()))
            causes = {env_id: ticket.failures.get(env_id, other) for env_id in asked if env_id not in known}
            lost = {env_id: Failure(cause.exception, env_id, cause.operation) for env_id, cause in causes.items()}
        left = {env_id: failure for chunk in chunks for env_id, (_, failure) in chunk.failed.items()} | lost
        restarted: dict[int, tuple[Failure, Extra]] = {}
        if left and self._recovery is not None:
            restarted, left = self._recovery.restart_failed(left)
            self._note_restarted(restarted)
            self._recovery.forget(restarted)
        if replaced := {env_id: failure for env_id, failure in lost.items() if env_id in restarted}:
            chunks.append(_invalid_chunk(asked, before, replaced, self._pool.batch))
        num_ended = 0
        for chunk in chunks:
            for env_id in chunk.failed.keys() & restarted.keys():
                self._cut_off(chunk, env_id, *restarted[env_id], is_lost=env_id in lost)
            self._builder.add(self._num_made, chunk)
            table.record_chunk(chunk)
            num_ended += len(chunk.ended.columns)
            for column in chunk.ended.columns.tolist():
                env_id = chunk.env_ids[column]
                if self._done_policy.skips_done:
                    self._episodes_left[env_id] = 0
                elif share := self._episodes_left[env_id]:
                    self._episodes_left[env_id] = share - 1
        table.stats.begin_episodes(list(restarted))
        for env_id, (_, begun) in restarted.items():
            table.reset_infos[env_id] = begun.info or {}
        table.record_exhausted(env_id for env_id, (_, begun) in restarted.items() if begun.is_exhausted)
        table.record_running(env_id for env_id in asked if env_id not in left or left[env_id].operation == "step")
        # Envs that failed and were not restarted are left out of later chunks. The other envs finish, so that their
        # number of steps does not depend on timing. If steps were lost, this number depends on timing anyway, so the
        # rollout ends at once.
        self._failures.update(left)
        self._episodes_left.update(dict.fromkeys([*left, *table.exhausted.intersection(self._episodes_left)], 0))
        broken = [(chunk.broken, chunk.env_ids) for chunk in chunks if chunk.broken is not None]
        self._policy_failure = min(broken, key=lambda one: one[1], default=None)
        self._is_over |= self._policy_failure is not None or not lost.keys().isdisjoint(left)
        return num_ended

    def _cut_off(self, chunk: RolloutChunk, env_id: int, failure: Failure, begun: Extra, *, is_lost: bool) -> None:
        """Set a restarted env's truncated flag for the step in which the env failed, as `ParallelEnv.step` does.

        The step stays valid unless its values did not arrive (``is_lost``).
        """
        step, column = chunk.failed[env_id][0], chunk.env_ids.index(env_id)
        chunk.flags[step, column] = False, True
        chunk.valid[step, column] = not is_lost
        chunk.said[step, env_id] = Extra({"failure": with_note(failure)}, reset_info=begun.info)
        if begun.loose is not None:
            chunk.loose[env_id] = begun.loose
        end = EpisodeEnds(np.array([step]), np.array([column]), [leaf[step, [column]] for leaf in chunk.states])
        chunk.ended = join_ends([chunk.ended, end], self._pool.batch.states)

    def _result(self) -> Rollout:
        running = {env_id for env_id in self._env_ids if not self._table.done[env_id]}.difference(self._failures)
        rnn_state = None
        try:
            rnn_state = self._builder.rnn_state(running)
        except ArgumentError as error:
            self._policy_failure = self._policy_failure or (
                Failure(error, self._env_ids[0], "the policy"),
                tuple(self._env_ids),
            )
        rollout = self._builder.rollout(self._num_steps, self._starts, rnn_state)
        if self._policy_failure is not None:
            failure, env_ids = self._policy_failure
            where = f"for envs {list_ids(env_ids)[1:-1]}, process {failure.pid}"
            add_note(failure.exception, f"Raised by {failure.operation} {where}.")
            put(failure.exception, "partial", rollout)
            raise failure.exception
        raise_failures([self._failures[env_id] for env_id in sorted(self._failures)], partial=rollout)
        return rollout


def _invalid_chunk(
    asked: Sequence[int], before: list[Array], lost: Mapping[int, Failure], batch: Batch
) -> RolloutChunk:
    """Return a chunk of one step that is not valid, for restarted envs whose steps are lost.

    ``before`` has the states of all envs in ``asked`` before the lost steps, in the form of a chunk of one step.
    """
    places = [place for place, env_id in enumerate(asked) if env_id in lost]
    chunk = new_chunk(tuple(asked[place] for place in places), 1, batch)
    chunk.states = [array[:, places] for array in before]
    chunk.failed = {env_id: (0, failure) for env_id, failure in lost.items()}
    return chunk


_OWN_ROLLOUT = "run_batch_episode"
"""The method with which MetaBox's test units run an episode."""


def run_batch_episodes(engine: Engine, env_ids: Sequence[int], *for_policies: Any) -> list[Any]:
    """Call ``run_batch_episode()`` of each env, which uses the env's own policy, and return the results.

    ``for_policies`` are the arguments of `ParallelEnv.rollout` that apply only to a rollout with a policy.
    """
    found = engine.pool.ask("get", env_ids, None, Lookup(_OWN_ROLLOUT, "exists")).values
    lacking = [env_id for env_id in env_ids if not found.get(env_id)]
    if lacking or any(given is not None for given in for_policies):
        why = f", and envs {list_ids(lacking)} have none" if lacking else ", which takes no arguments"
        raise ArgumentError(
            f"rollout() was called without a policy. Give one: rollout(policy, num_steps=...). Without a policy, it "
            f"calls {_OWN_ROLLOUT}() of each env{why}."
        )
    values = engine.pool.ask("call", env_ids, None, MethodCall(_OWN_ROLLOUT)).values
    return [values.get(env_id) for env_id in env_ids]


@single_threaded_in("rollout")
def local_rollout(
    engine: Engine,
    policy: Policy,
    num_steps: int,
    rnn_state: Any,
    shows_progress: bool,
    is_over: Callable[[int], bool],
) -> Rollout:
    """Make a rollout of all envs that are not paused, with a policy that is called here instead of in the workers.

    See `ParallelEnv.rollout` for arguments and errors. When ``is_over`` (see `HostRollout`) returns ``True``, the
    rollout ends with the steps made so far.
    """
    goal = RolloutLength.of(num_steps, None)
    return _RunningLocalRollout(engine, policy, engine.ids(None), goal, rnn_state, is_over).run(shows_progress)


class _RunningLocalRollout(RunningRollout):
    """A rollout whose policy is in this process. It makes the chunks itself instead of requesting them from hosts."""

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
        # Use a lone host directly: a step of 8 CartPoles and a small network took 184 us with the pool and 166 us
        # without it.
        self._source: StepSource = (engine.recovery is None and engine.pool.lone_host) or _LocalSteps(engine, env_ids)

    def _prepare(self, memory: RecurrentState | None) -> None:
        self._runner = PolicyRunner(self._policy, memory, self._pool.layout)

    def _note_restarted(self, restarted: Mapping[int, tuple[Failure, Extra]]) -> None:
        self._source.writer.keep_loose({env_id: begun for env_id, (_, begun) in restarted.items()})

    def _send(self, asked: Sequence[int], failed: Mapping[int, Failure]) -> Ticket:
        ticket, size = Ticket("rollout", tuple(asked)), self._chunk_size
        ticket.failures.update(failed)
        self._runner.forget(tuple(failed))
        self._chunk_size = min(1, len(failed))  # an env that has failed before the chunk loses one step
        env_ids = tuple(env_id for env_id in asked if env_id not in failed)
        if env_ids:
            shares = [self._episodes_left[env_id] for env_id in env_ids]
            self._table.require_reset([env_id for env_id, share in zip(env_ids, shares, strict=True) if share != 0])
            chunk = self._rollout.play(self._source, Command(0, "rollout", env_ids, shares, self._request(size)))
            ticket.values[env_ids[0]] = chunk
            self._chunk_size = max(self._chunk_size, chunk.num_steps)
        if self._rollout.has_stopped:
            self._is_over, self._num_steps = True, self._num_made + self._chunk_size
        return ticket


class _LocalSteps:
    """A `StepSource` that steps the envs of all hosts, for a policy that is called in this process."""

    in_caller = True

    def __init__(self, engine: Engine, env_ids: Sequence[int]) -> None:
        self._pool, self._recovery = engine.pool, engine.recovery
        self.writer = RowWriter(engine.pool.batch)
        if self.writer.has_loose:
            living = [env_id for env_id in env_ids if env_id not in self._pool.dead]
            raises = self._recovery is None  # otherwise, envs whose workers have died are restarted later
            self.writer.keep_loose(self._pool.ask("manage", living, None, "loose_leaves", raises=raises).values)

    def run_step(self, env_ids: tuple[int, ...], each: Sequence[Any] | None, autoreset: bool) -> Reply:
        """Step envs through the pool, in any mode. An env that is late, or whose worker died, counts as failed."""
        failed = NO_FAILURES if self._recovery is None else self._recovery.failures_before(env_ids)
        ticket = self._pool.submit("step", env_ids, each, autoreset=autoreset, failed=failed)
        self._pool.wait_or_give_up(ticket)
        self.writer.keep_loose(ticket.values)
        batch = self._pool.batch
        for name, columns in (("info", batch.info_columns), ("reset_info", batch.reset_columns)):
            positions, infos = ((), []) if columns is None else columns.read(batch.rows(env_ids), len(env_ids))
            for position, info in zip(positions, infos, strict=True):
                env_id = env_ids[position]
                if env_id not in ticket.failures:
                    ticket.values[env_id] = ticket.values.get(env_id, NOTHING)._replace(**{name: info})
        return Reply(0, ticket.values, ticket.failures)
