"""The status of each env, its call in flight, if any, and the saved state of a `ParallelEnv`.

An env that can be stepped is in one of four phases. The table describes each phase, and the events that end it:

=============  ==============================================================  =========================================
phase          meaning                                                         left by
=============  ==============================================================  =========================================
NEEDS_RESET    never reset, or its episode was lost with its worker            a reset
RUNNING        its episode is in progress                                      a reset, the end of the episode, a loss
DONE           its episode has ended, and the next has not started by itself   a reset, a loss; with "continue", a step
EXHAUSTED      its latest reset found no further episode                       a reset, a loss
=============  ==============================================================  =========================================

A loss is any event that leaves the env without a known episode, such as the death of its worker. An env that lacks
``reset`` or ``step`` has no episodes, and is always in the phase STEPLESS. Usually, only a few envs need a reset or are
exhausted, so these two phases are kept as sets of env ids; the phase DONE is kept as a bool array.
"""

from __future__ import annotations

import enum
import itertools
from collections import deque
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from parallelenv.contract.batch import Array, Index, has_true
from parallelenv.contract.copying import deep_copy
from parallelenv.contract.error_text import count, list_ids
from parallelenv.contract.failures import Failure, raise_failures
from parallelenv.contract.interrupts import DeferSignals
from parallelenv.contract.protocol import EXHAUSTED, NOTHING
from parallelenv.contract.spaces import Info
from parallelenv.engine.done_policies import DonePolicy
from parallelenv.engine.episode_stats import EpisodeStats
from parallelenv.engine.tickets import Ticket
from parallelenv.errors import AbsentAttributeError, ArgumentError, EnvBusyError, ExhaustedError, ResetNeededError

if TYPE_CHECKING:
    from parallelenv.contract.rollout_data import RolloutChunk


VERSION = 3
_WHOLE = -1
"""Used instead of an env id: all of `Ticket.answered`."""
_MOST_UNWANTED = 64
"""Number of arrivals that are no longer wanted, in addition to twice the number of envs in flight, that are kept."""


@dataclass(frozen=True)
class Checkpoint:
    """The state of each env's episode.

    The arrays are bool, with one entry per env. ``terminated`` and ``truncated`` are the flags of each env's latest
    step.
    """

    done: Array
    terminated: Array
    truncated: Array
    paused: Array
    fresh: tuple[int, ...]  #: Ids of envs that need a reset.
    reset_infos: tuple[Info, ...]  #: The info of each env's latest reset.
    exhausted: tuple[int, ...]  #: Ids of envs without a further episode.


@dataclass(frozen=True)
class SavedState:
    """The result of `ParallelEnv.save_state`: plain data, which you can pickle and store with a model's checkpoint."""

    envs: tuple[bytes | None, ...]  #: The state of each env, pickled; ``None`` where it cannot be saved.
    checkpoint: Checkpoint  #: State of the episodes.
    seeds: dict[int, int | None]  #: Seeds of the next resets, by env id.
    asynchronous: str | None  #: The done policy.
    #: By env id, the latest seed given to the env, from which ``on_failure="restart"`` derives new seeds, and the
    #: number of restarts since then. ``None`` with another ``on_failure``.
    restart_seeds: dict[int, tuple[int, int]] | None
    version: int = VERSION  #: Version of this format.

    @property
    def unsaved(self) -> tuple[int, ...]:
        """Ids of envs whose state could not be saved. After `ParallelEnv.load_state` they need a reset."""
        return tuple(env_id for env_id, env in enumerate(self.envs) if env is None)

    def __repr__(self) -> str:
        size = sum(len(env) for env in self.envs if env is not None)
        lost = f", without that of {list(self.unsaved)}" if self.unsaved else ""
        return f"<SavedState of {len(self.envs)} envs, {size:,} bytes{lost}>"


@dataclass(frozen=True)
class WrappedState:
    """What ``save_state`` returns for a wrapper that has a memory of its own: plain data, like `SavedState`."""

    wrapper: str  #: Name of the wrapper's class.
    memory: Info  #: The wrapper's memory.
    state: SavedState | WrappedState  #: The saved state of the wrapped object.

    @property
    def unsaved(self) -> tuple[int, ...]:
        """Ids of envs whose state could not be saved, as in `SavedState.unsaved`."""
        return self.state.unsaved


def check_saved(state: Any, num_envs: int, asynchronous: str | None) -> SavedState:
    """Return ``state`` after checking that a `ParallelEnv` with these arguments can load it."""
    if isinstance(state, WrappedState):
        raise ArgumentError(
            f"The state is of {state.wrapper}, but this is a ParallelEnv, which cannot restore a wrapper's memory. "
            "Load it through the same wrappers, in the same order, as when it was saved."
        )
    if not isinstance(state, SavedState):
        raise ArgumentError(f"state is a {type(state).__name__}. Give the result of save_state().")
    if state.version != VERSION:
        raise ArgumentError(
            f"The state has format {state.version}; this version of parallelenv reads format {VERSION}. Load it with "
            "the version that saved it."
        )
    if len(state.envs) != num_envs:
        raise ArgumentError(f"The state is of {count(len(state.envs), 'env')}, but there are {num_envs}. Make as many.")
    if state.asynchronous != asynchronous:
        raise ArgumentError(
            f"The state was saved with asynchronous={state.asynchronous!r}, but this is a ParallelEnv with "
            f"asynchronous={asynchronous!r}. Make it with the same done policy."
        )
    return state


class Phase(enum.Enum):
    """Whether an env has an episode in progress and, if not, why not."""

    NEEDS_RESET = "needs reset"
    RUNNING = "running"
    DONE = "done"
    EXHAUSTED = "exhausted"
    STEPLESS = "for calls only"


class EnvTable:
    """The phases of the envs ``0 .. num_envs-1`` under a done policy, and the calls in flight.

    Unless its step is planned, a ticket is in the table from before its first command is sent until its result has been
    returned to the user. An interrupt therefore loses no result: the next call finds the ticket in the table.

    The envs in ``stepless`` have no episodes, because they lack ``reset`` or ``step``.

    Attributes:
        done: ``(num_envs,)`` bool: whether the env counts as done, either because its episode ended in its latest step
            or because the done policy says so.
        exhausted: Ids of envs whose latest reset found no further episode. Such envs also count as done.
        tickets: Tickets of steps and resets whose results the user does not have yet, by env id. A planned step is not
            in this dict before `Pool.enter_planned` is called.
        has_failed_resets: Whether `recv` may find results of resets that failed.
        version: A number. Whenever it changes, all step plans become invalid.
    """

    def __init__(
        self, env_ids: tuple[int, ...], done_policy: DonePolicy, stepless: frozenset[int] = frozenset()
    ) -> None:
        num_envs = len(env_ids)
        self._stepless = stepless
        self.env_ids = env_ids
        self._done_policy = done_policy
        self._needs_reset = set(env_ids)  # envs that have never been reset, or whose state is not known
        self._unstepped: set[int] = set()  # envs that have not been stepped since their reset
        self.exhausted: set[int] = set()
        self.done = np.zeros(num_envs, dtype=bool)
        self.terminated = np.zeros(num_envs, dtype=bool)
        self.truncated = np.zeros(num_envs, dtype=bool)
        self.paused = np.zeros(num_envs, dtype=bool)
        # Whether the env's row in the batch lacks the env's state: no result has come since `load_state`, or since an
        # adapter was made.
        self._is_unknown = np.zeros(num_envs, dtype=bool)
        self.unpaused = env_ids
        self.reset_infos: list[Info] = [{} for _ in range(num_envs)]
        self.tickets: dict[int, Ticket] = {}
        # The results that `recv` may return, in their order: a ticket, and the id of one of its envs whose result has
        # arrived, or `_WHOLE`. Entries that are no longer wanted are skipped, and removed when they are first or last,
        # or when they are many.
        self._arrivals: deque[tuple[Ticket, int]] = deque()
        self._has_whole = False  # whether any of them may have `_WHOLE`
        self.has_failed_resets = False
        self.version = 0
        self.share_stats(EpisodeStats(num_envs))

    def share_stats(self, stats: EpisodeStats) -> None:
        """Replace this table's statistics with those of a different table of the same envs."""
        self.stats = stats
        stats.set_autoreset(self._done_policy.autoreset)

    @property
    def flags(self) -> tuple[Array, Array, Array]:
        """Flags of the latest steps: done, terminated, truncated, each ``(num_envs,)`` bool."""
        return self.done, self.terminated, self.truncated

    # ---------------------------------------------------------------- calls in flight

    def enter(self, env_ids: Sequence[int], ticket: Ticket, *, separately: bool) -> None:
        """Add the ticket of a step or reset that is about to be sent; it replaces earlier tickets of these envs.

        If ``separately`` is ``True``, `recv` can return each env's result as soon as it has arrived. Otherwise, the
        results are returned together, in the order of ``env_ids``.
        """
        if not self.tickets.keys().isdisjoint(env_ids):
            self.release(env_ids)
        self.version += 1
        ticket.env_ids = env_ids
        if ticket.operation == "step":
            self._unstepped.difference_update(ticket.sent_to)
        if len(ticket.sent_to) < len(env_ids):
            ticket.left_out = frozenset(env_ids).difference(ticket.sent_to)
        self.tickets.update(dict.fromkeys(env_ids, ticket))
        if not separately:
            self._has_whole = True
            self._arrivals.append((ticket, _WHOLE))
            return
        ticket.table = self
        if ticket.failures or ticket.left_out:
            self.record_arrival(ticket, ticket.answered)

    def record_arrival(self, ticket: Ticket, env_ids: Sequence[int]) -> None:
        """Record that the results of these envs, which `recv` returns separately, have arrived."""
        self._arrivals.extend(zip(itertools.repeat(ticket), env_ids))
        self.has_failed_resets |= ticket.operation == "reset" and bool(ticket.failures)

    def release(self, env_ids: Sequence[int]) -> None:
        """Remove the tickets of envs whose results have been returned or are no longer wanted."""
        tickets = self.tickets
        gone: dict[Ticket | None, None] = {}
        if env_ids is self.env_ids:
            self.tickets = tickets = {}
        else:
            gone = dict.fromkeys(map(tickets.get, env_ids))
            # Without bytecodes between the envs, so that an interrupt removes all of them or none.
            deque(map(tickets.pop, env_ids, itertools.repeat(None)), maxlen=0)
        if not tickets:
            self._arrivals.clear()
            self._has_whole = False
            return
        for unwanted in gone:
            if unwanted is not None and unwanted.pending and unwanted.failures:
                for one in env_ids:  # an exception keeps its callers' variables, so drop it
                    unwanted.failures.pop(one, None)
        arrivals = self._arrivals
        for end, remove in ((0, arrivals.popleft), (-1, arrivals.pop)):
            while arrivals:
                ticket, env_id = arrivals[end]
                if tickets.get(env_id) is ticket or (env_id == _WHOLE and self._is_wanted(ticket, env_id)):
                    break
                remove()
        if len(arrivals) > 2 * len(tickets) + _MOST_UNWANTED:
            self._arrivals = deque(entry for entry in arrivals if self._is_wanted(*entry))

    def _is_wanted(self, ticket: Ticket, env_id: int) -> bool:
        return any(self.tickets.get(one) is ticket for one in (ticket.env_ids if env_id == _WHOLE else (env_id,)))

    def arrived(self, most: int | None = None) -> list[int]:
        """Return the ids of the first ``most`` envs (``None``: all) whose result can be returned, in this order."""
        tickets, arrivals = self.tickets, self._arrivals
        if self._has_whole:
            arrivals = deque(
                (ticket, one)
                for ticket, env_id in arrivals
                for one in (ticket.answered if env_id == _WHOLE else (env_id,))
            )
        if most is None or most >= len(arrivals):  # 40 ns per env less than below
            return [one for ticket, one in arrivals if tickets.get(one) is ticket][:most]
        return list(itertools.islice((one for ticket, one in arrivals if tickets.get(one) is ticket), most))

    def pending_ids(self, env_ids: Iterable[int] | None = None) -> list[int]:
        """Return those of ``env_ids`` (``None``: all envs in flight) whose reply has not arrived yet."""
        tickets = self.tickets
        chosen = {one: tickets[one] for one in env_ids} if env_ids is not None else tickets
        pending = {ticket: set(ticket.pending_ids) for ticket in dict.fromkeys(chosen.values())}
        return [env_id for env_id, ticket in chosen.items() if env_id in pending[ticket]]

    # ---------------------------------------------------------------- which envs may be stepped

    def phase(self, env_id: int) -> Phase:
        """Return the phase of an env."""
        if env_id in self._stepless:
            return Phase.STEPLESS
        if env_id in self._needs_reset:
            return Phase.NEEDS_RESET
        if env_id in self.exhausted:
            return Phase.EXHAUSTED
        return Phase.DONE if self.done[env_id] and not self._done_policy.autoreset else Phase.RUNNING

    def refuse_without_episode(self, env_ids: Iterable[int]) -> None:
        """Raise `ResetNeededError` if any of these envs is in the phase ``NEEDS_RESET``."""
        found = [env_id for env_id in env_ids if env_id in self._needs_reset] if self._needs_reset else []
        if found:
            self.refuse_stepless(found)
            subject = f"env {found[0]} has" if len(found) == 1 else f"envs {list_ids(found)} have"
            raise ResetNeededError(
                f"{subject} no running episode. Call reset() or reset({list_ids(found)}) before stepping."
            )

    def refuse_stepless(self, env_ids: Iterable[int]) -> None:
        """Raise `AbsentAttributeError` if any of these envs lacks ``reset`` or ``step``."""
        found = [env_id for env_id in env_ids if env_id in self._stepless] if self._stepless else []
        if found:
            raise AbsentAttributeError(
                f"envs {list_ids(found)} lack reset() or step(), so they support only calls and attributes: "
                "customized_method(), call(), get_env_attr(). Give the envs to step as id=."
            )

    def refuse_paused(self, env_ids: Sequence[int]) -> None:
        """Raise `EnvBusyError` if any of these envs is paused."""
        if env_ids is self.unpaused or not has_true(self.paused):
            return
        paused = [env_id for env_id in env_ids if self.paused[env_id]]
        if paused:
            raise EnvBusyError(
                f"envs {list_ids(paused)} are paused. Call resume({list_ids(paused)}) first, or leave them out."
            )

    def refuse_unknown_states(self, env_ids: Sequence[int]) -> None:
        """Raise `ResetNeededError` if, for any of these envs, the caller does not know the latest state."""
        unknown = [env_id for env_id in env_ids if self._is_unknown[env_id]]
        if unknown:
            raise ResetNeededError(
                f"The latest states of envs {list_ids(unknown)} are not known after load_state() or after an adapter "
                "was made. Step or reset these envs first."
            )

    def has_first_states(self, env_ids: Iterable[int]) -> bool:
        """Return whether any of these envs has not been stepped since its reset or `load_state`."""
        return not self._unstepped.isdisjoint(env_ids) or has_true(self._is_unknown[list(env_ids)])

    def at_beginning(self, env_ids: Sequence[int]) -> Array:
        """Return a bool array: for each of ``env_ids``, whether the env is at the start of an episode."""
        new: Array = np.array([env_id in self._unstepped for env_id in env_ids], dtype=bool)
        return new | self.done[list(env_ids)] if self._done_policy.autoreset else new

    def ended(self, env_ids: Sequence[int]) -> tuple[int, ...]:
        """Return those of ``env_ids`` that are done."""
        if not has_true(self.done):
            return ()
        if env_ids is self.env_ids:
            return tuple(self.done.nonzero()[0].tolist())
        return tuple(itertools.compress(env_ids, self.done[list(env_ids)].tolist()))

    def choose(self, env_ids: Sequence[int]) -> tuple[Sequence[int], list[int] | None]:
        """Return the envs that a step of ``env_ids`` includes, and their positions in ``env_ids`` (``None``: all).

        A step leaves out exhausted envs and, if the done policy skips done envs, those that are done.
        """
        if self.exhausted:
            self.refuse_exhausted(env_ids)
        if self._done_policy.skips_done and has_true(self.done):
            chosen = [position for position, env_id in enumerate(env_ids) if not self.done[env_id]]
        elif self.exhausted:
            chosen = [position for position, env_id in enumerate(env_ids) if env_id not in self.exhausted]
        else:
            return env_ids, None
        return [env_ids[position] for position in chosen], chosen

    def without_exhausted(self, env_ids: Sequence[int]) -> Sequence[int]:
        """Return those of ``env_ids`` that are not exhausted."""
        return [env_id for env_id in env_ids if env_id not in self.exhausted] if self.exhausted else env_ids

    def refuse_exhausted(self, env_ids: Sequence[int], partial: Any = None) -> None:
        """Raise `ExhaustedError` if an env is exhausted and the done policy does not let exhausted envs rest."""
        if self._done_policy.lets_rest:
            return
        exhausted = [env_id for env_id in env_ids if env_id in self.exhausted]
        if exhausted:
            error = ExhaustedError(
                f"envs {list_ids(exhausted)} have no further episode, and this adapter or call does not support envs "
                'that rest. End the loop when an info has "exhausted", give samplers that do not end, or use the '
                "ParallelEnv itself."
            )
            raise_failures([Failure(error, env_id, "reset") for env_id in exhausted], partial)

    def needing_reset(self) -> list[int]:
        """Return the ids of the envs in the phases ``NEEDS_RESET`` and ``EXHAUSTED``."""
        return [*self._needs_reset.difference(self._stepless), *self.exhausted]

    def absent_info(self, env_id: int) -> Info:
        """Return the info that a step's result contains for an env that was not stepped."""
        return dict(EXHAUSTED) if env_id in self.exhausted else {}

    def set_paused(self, env_ids: Sequence[int], is_paused: bool) -> None:
        """Pause these envs, or resume them if ``is_paused`` is ``False``."""
        with DeferSignals():
            self.version += 1
            self.paused[list(env_ids)] = is_paused
            self.unpaused = tuple(np.flatnonzero(~self.paused).tolist()) if self.paused.any() else self.env_ids

    # ---------------------------------------------------------------- recording resets and steps

    def require_reset(self, env_ids: Iterable[int]) -> None:
        """Mark envs as needing a reset, and as not exhausted."""
        self.version += 1
        marked = tuple(env_ids)
        self._needs_reset.update(marked)
        self.exhausted.difference_update(marked)

    def record_running(self, env_ids: Iterable[int]) -> None:
        """Record that these envs are no longer in the phase ``NEEDS_RESET``."""
        self._needs_reset.difference_update(env_ids)

    def record_unknown_states(self) -> None:
        """Record that each env is in the middle of an episode, in a state that the caller does not know."""
        self.record_running(self.env_ids)
        self._is_unknown[:] = True

    def clear_flags(self, env_ids: Sequence[int]) -> None:
        """Set the flags of these envs, which are being reset, to ``False``."""
        for record in self.flags:
            record[list(env_ids)] = False

    def record_first_states(self, env_ids: Sequence[int]) -> None:
        """Mark the states of these envs as the first of their episodes."""
        self._unstepped.update(env_ids)
        self._is_unknown[list(env_ids)] = False
        self.record_running(env_ids)
        self.stats.begin_episodes(list(env_ids))

    def record_exhausted(self, env_ids: Iterable[int]) -> None:
        """Mark envs as exhausted. For a reset within a step, call this method before `record_step`."""
        for env_id in env_ids:
            self.version += 1
            self.exhausted.add(env_id)
            self._needs_reset.discard(env_id)
            self.done[env_id], self.terminated[env_id], self.truncated[env_id] = True, False, True

    def copy_from(self, other: EnvTable, env_ids: Sequence[int]) -> None:
        """Copy the flags and reset infos of envs from a different table, and mark the envs as needing a reset."""
        rows = list(env_ids)
        for ours, theirs in zip(self.flags, other.flags, strict=True):
            ours[rows] = theirs[rows]
        for env_id in env_ids:
            self.reset_infos[env_id] = other.reset_infos[env_id]
        self._unstepped.difference_update(env_ids)
        self.require_reset(env_ids)
        self.share_stats(self.stats)

    def flags_of_step(
        self, env_ids: Sequence[int], stepped: Index, terminated: Array, truncated: Array
    ) -> tuple[Array, Array, Array]:
        """Return the flags that the result of a step has, given those of the envs in the rows ``stepped``.

        Returns:
            Three arrays with an entry for each of ``env_ids``: terminated, truncated, and whether either is set.
        """
        if self._done_policy.skips_done or self.exhausted:  # otherwise, no env is absent
            shown = list(env_ids)
            all_terminated, all_truncated = self.terminated.copy(), self.truncated.copy()
            all_terminated[stepped], all_truncated[stepped] = terminated, truncated
            terminated, truncated = all_terminated[shown], all_truncated[shown]
        return terminated, truncated, terminated | truncated

    def record_step(self, stepped: Index, terminated: Array, truncated: Array) -> None:
        """Record the states and the flags that a step returned for the envs in the rows ``stepped``."""
        self._is_unknown[stepped] = False
        self._done_policy.mark_done(self.done, stepped, terminated | truncated)
        if self._done_policy.skips_done or self.exhausted:  # otherwise, the flags need not be kept
            self.terminated[stepped], self.truncated[stepped] = terminated, truncated
            # Envs that are done and did not terminate were truncated, by the env or by the done policy.
            self.truncated |= self.done & ~self.terminated

    def record_chunk(self, chunk: RolloutChunk) -> None:
        """Record the last step that each env made in a chunk of a rollout."""
        self.stats.add_chunk(chunk)
        self.record_exhausted(chunk.exhausted)
        known = chunk.valid | chunk.flags.any(axis=2)
        columns = np.flatnonzero(known.any(axis=0))
        # This comes last: a rollout that stops before its first step leaves its envs at the start of their episodes.
        self._unstepped.difference_update(chunk.failed, (chunk.env_ids[column] for column in columns.tolist()))
        if not len(columns):
            return
        last = len(known) - 1 - known[::-1, columns].argmax(axis=0)
        terminated, truncated = chunk.flags[last, columns].T
        rows = np.array(chunk.env_ids)[columns]
        self.terminated[rows], self.truncated[rows] = terminated, truncated
        self._done_policy.mark_done(self.done, rows, terminated | truncated)
        if self._done_policy.autoreset:
            for step, column in zip(chunk.ended.steps.tolist(), chunk.ended.columns.tolist(), strict=True):
                env_id = chunk.env_ids[column]
                self.reset_infos[env_id] = deep_copy(chunk.said.get((step, env_id), NOTHING).reset_info) or {}

    # ---------------------------------------------------------------- saving and loading

    def checkpoint(self, lost: Iterable[int]) -> Checkpoint:
        """Return the phases, flags and reset infos of all envs as plain data. Envs in ``lost`` need a reset."""
        flags = self.done.copy(), self.terminated.copy(), self.truncated.copy(), self.paused.copy()
        fresh, exhausted = tuple(sorted(self._needs_reset.union(lost))), tuple(sorted(self.exhausted))
        return Checkpoint(*flags, fresh, tuple(map(deep_copy, self.reset_infos)), exhausted)

    def restore(self, checkpoint: Checkpoint, unsaved: Collection[int]) -> tuple[int, ...]:
        """Load a `Checkpoint`, and return the ids of all envs that need a reset, including the ``unsaved`` ones.

        The caller delays interrupts, which would leave a part of the old records.
        """
        self.version += 1
        for record, saved in zip(
            self.flags, (checkpoint.done, checkpoint.terminated, checkpoint.truncated), strict=True
        ):
            record[:] = saved
        self._needs_reset = {*checkpoint.fresh, *unsaved}
        self.stats.exclude_running()
        self.exhausted = set(checkpoint.exhausted).difference(unsaved)
        self._unstepped.clear()
        self._is_unknown[:] = True
        self.reset_infos = list(map(deep_copy, checkpoint.reset_infos))
        self.set_paused(self.env_ids, False)
        self.set_paused(np.flatnonzero(checkpoint.paused).tolist(), True)
        return tuple(sorted(self._needs_reset.difference(self._stepless).union(unsaved)))
