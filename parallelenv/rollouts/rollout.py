"""Rollouts: many steps made inside the workers, chunk by chunk, and joined here."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from parallelenv.contract.arguments import check_policy
from parallelenv.contract.batch import Array, Batch
from parallelenv.contract.broadcast import pickled
from parallelenv.contract.error_text import list_ids
from parallelenv.contract.failures import NO_FAILURES, Failure, raise_failures, raise_of_policy, with_note
from parallelenv.contract.protocol import Extra, Lookup, MethodCall
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
from parallelenv.engine.env_table import EnvTable
from parallelenv.engine.tickets import Ticket
from parallelenv.errors import ArgumentError, ParallelEnvError, ResetNeededError, WorkerTimeoutError
from parallelenv.rollouts.rollout_length import RolloutLength, progress_bar
from parallelenv.rollouts.trajectory import Rollout, RolloutBuilder

if TYPE_CHECKING:
    from parallelenv.engine.engine import Engine

CHUNK = 0.2
"""Seconds that a chunk should take: how soon Ctrl-C has an effect, and how often the bar moves."""
_GROWTH = 16
"""Factor by which the size of a chunk may grow: one chunk is a poor measure, and the first also warms up."""
_numbers = itertools.count(1)
Restarted = tuple[Failure, Extra]
"""Why an env was restarted, and the result of its reset."""


class RolloutRunner:
    """Makes rollouts.

    Args:
        engine: Engine of the envs.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.pool = engine.pool
        self.policy = engine.done_policy
        self.recovery = engine.recovery
        self.timeout = engine.timeout  # seconds that a chunk may take

    @property
    def table(self) -> EnvTable:
        """Where each env is."""
        return self.engine.table

    def run(
        self, player: Any, env_ids: Sequence[int], goal: RolloutLength, rnn_state: Any, shows_progress: bool
    ) -> Rollout:
        """Make a rollout. ``player`` is the policy that acts; for the others see `ParallelEnv.rollout`."""
        self.check(env_ids, goal, rnn_state)
        packed = pack_policy(player, None)
        starts, shares, memory = self.begin(env_ids, goal, rnn_state)
        course = RunningRollout(self, packed, env_ids, goal.num_steps, shares)
        if memory is not None:
            course.sent = pack_policy(player, memory)
        with progress_bar(goal, shows_progress) as advance, course.ending():
            while asked := course.asked():
                advance(course.go_on(asked))
        return course.result(starts)

    def check(self, env_ids: Sequence[int], goal: RolloutLength, rnn_state: Any) -> None:
        """Refuse a rollout that does not fit the done policy or ``rnn_state``."""
        goal.check(self.policy, self.table.living(env_ids))
        check_rows("rnn_state", rnn_state, len(env_ids))

    def begin(
        self, env_ids: Sequence[int], goal: RolloutLength, rnn_state: Any
    ) -> tuple[Array, dict[int, int | None], RecurrentState | None]:
        """Refuse envs that cannot be stepped now.

        Returns:
            Which of the envs are at the beginning of an episode, how many episodes each may still end (``None``: any
            number), and what the policy remembers of them, ``None`` if nothing.
        """
        starts = self.engine.begin_rollout(env_ids)
        shares = {**dict.fromkeys(env_ids, 0), **goal.shares(self.table.living(env_ids))}
        if self.policy.skips_done:
            self._leave_out_done(goal, shares)
        if rnn_state is None:
            return starts, shares, None
        ended = self.table.done[list(env_ids)]
        begins = frozenset(env_id for env_id, is_new in zip(env_ids, starts | ended, strict=True) if is_new)
        return starts, shares, RecurrentState(tuple(env_ids), rnn_state, begins)

    def _leave_out_done(self, goal: RolloutLength, shares: dict[int, int | None]) -> None:
        """Give no share to envs that rest.

        Raises:
            ResetNeededError: If one of them has an episode to play.
        """
        resting = [env_id for env_id, share in shares.items() if self.table.done[env_id] and share != 0]
        if resting and goal.num_episodes is not None:
            raise ResetNeededError(
                f"envs {list_ids(resting)} have ended and rest. Call reset({list_ids(resting)}) before the rollout."
            )
        shares.update(dict.fromkeys(resting, 0))


def pack_policy(player: Any, memory: RecurrentState | None) -> Array:
    """Return a policy and its memory, pickled by `pickled`.

    Raises:
        ArgumentError: If it is not callable.
        UnpicklableError: If it cannot be pickled.
    """
    check_policy(player)
    what = f"The policy, a {type(player).__name__},"
    return pickled((player, memory), what, "Let it hold plain data, and open what cannot travel at its first call.")


class RunningRollout:
    """One rollout in progress.

    Args:
        roller: Runs it.
        packed: The policy that acts, pickled; ``None`` if it stays in this process.
        env_ids: Its envs.
        num_steps: Steps to make, ``None`` if episodes are counted.
        left: How many episodes each env may still end; ``None``: any number.

    Attributes:
        sent: Policy to send with the next order, if there are hosts without it.
    """

    def __init__(
        self,
        roller: RolloutRunner,
        packed: Array | None,
        env_ids: Sequence[int],
        num_steps: int | None,
        left: dict[int, int | None],
    ) -> None:
        self._roller = roller
        self._number = next(_numbers)
        self._packed = packed
        self.sent: Array | None = packed
        self._env_ids = env_ids
        self._num_steps = num_steps
        self._left = left
        self._assembly = RolloutBuilder(roller.pool.batch, env_ids)
        self._has_loose = any(array is None for array in roller.pool.batch.states)
        self._count = 0
        self._is_known = False  # whether hosts have the policy
        self._size = 0
        self._pace = 0.0
        self._seconds = CHUNK if roller.timeout is None else min(CHUNK, roller.timeout / 4)
        self._is_over = False
        self._is_late = False
        self._has_stopped = False
        self._failures: dict[int, Failure] = {}
        self._broken: tuple[Failure, tuple[int, ...]] | None = None

    def asked(self) -> list[int]:
        """Return the envs of the next chunk, none if the rollout is over."""
        if self._is_over or (self._num_steps is not None and self._count >= self._num_steps):
            return []
        if self._has_loose and not self._is_known:  # only hosts have all states of envs that are not stepped
            return list(self._env_ids)
        return [env_id for env_id in self._env_ids if self._left[env_id] != 0]

    def go_on(self, asked: Sequence[int]) -> int:
        """Let envs make some steps, or hosts prepare for them; return the progress towards the goal."""
        before = self._states_of(asked) if self._roller.recovery is not None else []
        if self.sent is not None:
            self._send_policy(asked, before)
            return 0
        self._size = self._next_size()
        ticket = self._send(asked)
        # Measured by the hosts' clocks: with hundreds of envs the messages alone may take longer than a chunk should,
        # and a chunk would never have more than one step.
        paces = [chunk.seconds / chunk.num_steps for chunk in ticket.values.values() if chunk.num_steps]
        self._pace = max(paces, default=self._pace)
        num_ended, _ = self._land(ticket, asked, before)
        self._count += self._size
        return self._size if self._num_steps is not None else num_ended

    def _send_policy(self, asked: Sequence[int], before: list[Array]) -> None:
        """Let hosts unpickle the policy, without a time limit: it may import a library, and is not a step."""
        pool, recovery = self._roller.pool, self._roller.recovery
        was_known, self._is_known = self._is_known, True
        failures_before: Collection[int] = recovery.failures_before(asked) if recovery is not None else ()
        well = [env_id for env_id in asked if env_id not in failures_before]
        failed = NO_FAILURES if was_known else self._reach(well)
        if recovery is not None:
            failed = {**failed, **pool.death_errors(well)}
        ticket = pool.submit("rollout", well, None, self._order(0), failed=failed)
        pool.wait(ticket, None)
        if recovery is not None:  # envs of a dead worker fail in the next step, as without this call
            failures_before = {*failures_before, *pool.death_errors(well)}
        places = [place for place, env_id in enumerate(asked) if env_id not in failures_before]
        _, has_lost = self._land(ticket, [asked[place] for place in places], [leaf[:, places] for leaf in before])
        self._count += has_lost

    def _reach(self, env_ids: Sequence[int]) -> Mapping[int, Failure]:
        """Wait until hosts have finished earlier commands, as long as a call may take; return the failures.

        Without a recovery late commands stay in flight: no env was lent yet, so no steps are lost.
        """
        roller = self._roller
        ticket = roller.pool.submit("rollout", env_ids)  # cheap: answered after all earlier commands
        if roller.recovery is not None:
            self._is_late = not roller.pool.wait_or_give_up(ticket)
            return ticket.failures
        try:
            roller.pool.wait(ticket, roller.timeout)
        except WorkerTimeoutError as late:
            self._is_late = True
            return {**ticket.failures, **{env_id: Failure(late, env_id, "") for env_id in late.env_ids}}
        return ticket.failures

    def _next_size(self) -> int:
        """Return the number of steps of the next chunk, from the duration of the last one."""
        if not self._pace:
            return 1
        size = max(1, min(self._size * _GROWTH, int(self._seconds / self._pace)))
        return size if self._num_steps is None else min(size, self._num_steps - self._count)

    def _send(self, asked: Sequence[int]) -> Ticket:
        """Send an order to the hosts of these envs and wait until it is done, or too late."""
        roller, table = self._roller, self._roller.table
        left = [self._left[env_id] for env_id in asked]
        each = None if all(share is None for share in left) else left
        lent = [env_id for env_id, share in zip(asked, left, strict=True) if share != 0]
        failed = roller.recovery.failures_before(asked) if roller.recovery is not None else NO_FAILURES
        order = self._order(self._size)
        ticket = roller.pool.submit("rollout", asked, each, order, announce=lambda _: table.lend(lent), failed=failed)
        self._is_late = not roller.pool.wait_or_give_up(ticket)
        return ticket

    def _order(self, num_steps: int) -> RolloutRequest:
        policy = self._roller.policy
        return RolloutRequest(self._number, self.sent, num_steps, policy.autoreset, policy.skips_done)

    def _states_of(self, env_ids: Sequence[int]) -> list[Array]:
        """Return copies of states as rows of a chunk of one step."""
        batch = self._roller.pool.batch
        rows = [env_id - batch.layout.first for env_id in env_ids]
        return [empty_rows((1, len(rows)), None) if array is None else array[rows][None] for array in batch.states]

    def _land(self, ticket: Ticket, asked: Sequence[int], before: list[Array]) -> tuple[int, bool]:
        """Record the result of a chunk; return how many episodes have ended, and whether steps were lost."""
        roller, table = self._roller, self._roller.table
        chunks: list[RolloutChunk] = [ticket.values[env_id] for env_id in sorted(ticket.values)]  # not by arrival
        failed = {env_id: failure for chunk in chunks for env_id, (_, failure) in chunk.failed.items()}
        lost = _find_lost(ticket, asked, chunks)
        restarted, left = self._restart_failed({**failed, **lost})
        if lost.keys() & restarted.keys():
            stand_ins = {env_id: failure for env_id, failure in lost.items() if env_id in restarted}
            chunks.append(_invalid_chunk(asked, before, stand_ins, roller.pool.batch))
        for chunk in chunks:
            self._cut_off(chunk, restarted, lost)
            self._assembly.add(self._count, chunk)
            table.note_chunk(chunk)
        for env_id, (_, begun) in restarted.items():
            table.reset_infos[env_id] = begun.info or {}
        table.note_exhausted(env_id for env_id, (_, begun) in restarted.items() if begun.is_exhausted)
        self._note_failures(left, chunks, any(env_id in lost for env_id in left))
        num_ended = self._spend(chunks)
        self.sent = self._packed if restarted else None
        table.keep(env_id for env_id in asked if env_id not in left or left[env_id].operation == "step")
        if roller.recovery is not None:
            roller.recovery.forget(restarted)
        return num_ended, bool(lost)

    def _restart_failed(self, failures: Mapping[int, Failure]) -> tuple[dict[int, Restarted], Mapping[int, Failure]]:
        """Restart failed envs, if there is a recovery; return those restarted and the failures that remain."""
        if not failures or self._roller.recovery is None:
            return {}, failures
        return self._roller.recovery.restart_failed(failures)

    def _cut_off(self, chunk: RolloutChunk, restarted: Mapping[int, Restarted], lost: Collection[int]) -> None:
        """Mark the steps in which restarted envs failed as `step` does."""
        ends = [chunk.ended]
        for env_id, (step, _) in chunk.failed.items():
            if env_id not in restarted:
                continue
            failure, begun = restarted[env_id]
            column = chunk.env_ids.index(env_id)
            chunk.flags[step, column] = False, True
            chunk.valid[step, column] = env_id not in lost
            chunk.said[step, env_id] = Extra({"failure": with_note(failure)}, reset_info=begun.info)
            if begun.loose is not None:
                chunk.loose[env_id] = begun.loose
            last = [leaf[step, [column]] for leaf in chunk.states]
            ends.append(EpisodeEnds(np.array([step]), np.array([column]), last))
        if len(ends) > 1:
            chunk.ended = join_ends(ends, self._roller.pool.batch.states)

    def _note_failures(self, left: Mapping[int, Failure], chunks: Sequence[RolloutChunk], has_lost: bool) -> None:
        """Leave out envs that failed for good from now on.

        The others finish, so that their number of steps does not depend on timing. Where steps were lost it does
        anyway, so the rollout ends at once.
        """
        self._failures.update(left)
        self._left.update(dict.fromkeys(left, 0))
        broken = [(chunk.broken, chunk.env_ids) for chunk in chunks if chunk.broken is not None]
        self._broken = min(broken, key=lambda one: one[1], default=None)
        self._is_over = has_lost or self._broken is not None

    def _spend(self, chunks: Sequence[RolloutChunk]) -> int:
        """Subtract the episodes that ended from the envs' shares; return their number."""
        total = 0
        for chunk in chunks:
            for column in chunk.ended.columns.tolist():
                env_id = chunk.env_ids[column]
                left = self._left[env_id]
                total += 1
                if self._roller.policy.skips_done:
                    self._left[env_id] = 0
                elif left:
                    self._left[env_id] = left - 1
        self._left.update(dict.fromkeys(self._roller.table.exhausted.intersection(self._left), 0))
        return total

    @contextlib.contextmanager
    def ending(self) -> Iterator[None]:
        """Let the hosts drop the policy at the end, however it comes. Commands then in flight are not waited for."""
        has_ended = False
        try:
            yield
            has_ended = not self._is_late
        finally:
            if self._is_known:
                pool = self._roller.pool
                dead = pool.death_errors(self._env_ids)
                living = [env_id for env_id in self._env_ids if env_id not in dead]
                with contextlib.suppress(ParallelEnvError):  # a worker that dies now takes the policy with it
                    ticket = pool.submit("rollout", living)
                    if has_ended:
                        pool.wait(ticket, self._roller.timeout)

    def result(self, starts: Array) -> Rollout:
        """Return all steps that were made.

        Raises:
            BaseException: What an env or the policy raised; ``error.partial`` has the steps that were made.
        """
        done = self._roller.table.done
        running = {env_id for env_id in self._env_ids if not done[env_id]}.difference(self._failures)
        rnn_state = None
        try:
            rnn_state = self._assembly.rnn_state(running)
        except ArgumentError as error:
            self._broken = self._broken or (Failure(error, self._env_ids[0], "the policy"), tuple(self._env_ids))
        rollout = self._assembly.rollout(self._num_steps, starts, rnn_state)
        if self._broken is not None:
            raise_of_policy(*self._broken, rollout)
        raise_failures([self._failures[env_id] for env_id in sorted(self._failures)], partial=rollout)
        return rollout


def _find_lost(ticket: Ticket, asked: Sequence[int], chunks: Sequence[RolloutChunk]) -> dict[int, Failure]:
    """Return the envs whose steps did not arrive, and why."""
    if not ticket.failures:
        return {}
    known = {env_id for chunk in chunks for env_id in chunk.env_ids}
    # A chunk that cannot be copied to the caller loses the steps of all its envs.
    copying = next((failure for failure in ticket.failures.values() if not failure.is_of_worker), None)
    lost = {}
    for env_id in asked:
        if env_id not in known:
            cause = ticket.failures.get(env_id) or copying or next(iter(ticket.failures.values()))
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
