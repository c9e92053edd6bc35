"""Statistics of the episodes that have ended, collected beside the steps.

Each step pays for a copy of its rewards and flags, 0.2 us; sums are made of many steps at once, or when they are read.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from parallelenv.contract.batch import Array, read_outcomes
from parallelenv.contract.interrupts import DeferSigint

if TYPE_CHECKING:
    from parallelenv.contract.rollout_data import RolloutChunk

LATEST = 100
"""Number of episodes to average over."""
_ROOM = 16384
"""Rows of envs that are kept until they are summed."""
EncodedOutcome = bytes | tuple[Any, bytes]


@dataclass(frozen=True, slots=True)
class EpisodeSummary:
    """The counts so far.

    Attributes:
        num_steps: Steps of single envs.
        num_episodes: Episodes counted from their first step to their last.
        mean_return: Mean return (sum of rewards) of the latest `LATEST` of them; ``None`` if there are none, or a
            reward was not a number.
        mean_length: Their mean number of steps; ``None`` if there are none.
    """

    num_steps: int
    num_episodes: int
    mean_return: float | None
    mean_length: float | None


@dataclass(slots=True)
class _Totals:
    """Sums up to some step.

    Attributes:
        returns: ``(num_envs,)`` float64, of the episodes under way.
        lengths: ``(num_envs,)`` int64, of the episodes under way.
        is_open: ``(num_envs,)`` bool: whether all steps of the env's episode are counted.
        num_steps: See `EpisodeSummary`.
        num_episodes: See `EpisodeSummary`.
        latest: Return and length of the latest episodes.
    """

    returns: Array
    lengths: Array
    is_open: Array
    num_steps: int
    num_episodes: int
    latest: deque[tuple[float, int]]

    def copy(self) -> _Totals:
        return _Totals(
            self.returns.copy(),
            self.lengths.copy(),
            self.is_open.copy(),
            self.num_steps,
            self.num_episodes,
            deque(self.latest, LATEST),
        )


@dataclass(frozen=True, slots=True)
class _Steps:
    """Steps that are not in the sums yet: ``num_steps`` rows, one column for each of some envs.

    Attributes:
        columns: ``(k,)``: env ids.
        rewards: ``(num_steps, k)``, zero where an env was not stepped.
        valid: ``(num_steps, k)`` bool: whether the env was stepped; ``None``: all were.
        ended: ``(num_steps, k)`` bool.
        begun: ``(num_begun, 2)``: step before which an episode began, ``num_steps`` after the last, and its column.
    """

    columns: Any
    rewards: Array
    valid: Array | None
    ended: Array
    begun: Array


class EpisodeStats:
    """Counts the episodes of the envs ``0 .. num_envs-1``.

    Args:
        num_envs: Number of envs.
    """

    def __init__(self, num_envs: int) -> None:
        self._num_envs = num_envs
        self._goes_on = False
        self._sums = _Totals(
            np.zeros(num_envs), np.zeros(num_envs, np.int64), np.zeros(num_envs, bool), 0, 0, deque(maxlen=LATEST)
        )
        self._room = max(32, min(1024, _ROOM // num_envs))
        self._is_whole = True  # whether each item of the log is a step of all envs
        self._log: list[EncodedOutcome] = []
        self._begun: list[tuple[int, Any]] = []

    def follow(self, goes_on: bool) -> None:
        """Set whether, from now on, an ended env begins its next episode by itself."""
        self.settle()
        self._goes_on = goes_on

    def note(self, outcome: bytes, rows: Any = None) -> None:
        """Add a step.

        Args:
            outcome: See `Batch.outcome`.
            rows: Rows of the envs that were stepped; ``None``: all.
        """
        if rows is None:
            self._log.append(outcome)
        else:
            self._is_whole = False
            self._log.append((rows, outcome))
        if len(self._log) == self._room:
            self.settle()

    def begin(self, rows: Any) -> None:
        """Record that the envs in these rows begin episodes."""
        self._begun.append((len(self._log), rows))
        if len(self._begun) > self._room:
            self.settle()

    def lose(self) -> None:
        """Exclude the episodes under way: their first steps are not known."""
        self.settle()
        self._sums.is_open[:] = False

    def note_chunk(self, chunk: RolloutChunk) -> None:
        """Add the steps of a rollout."""
        self.settle()
        ended = np.zeros(chunk.valid.shape, bool)
        ended[chunk.ended.steps, chunk.ended.columns] = True
        valid = chunk.valid | ended
        steps = _Steps(np.array(chunk.env_ids), chunk.rewards, valid, ended, np.zeros((0, 2), np.int64))
        _add(self._sums, steps, self._goes_on)

    def look(self) -> EpisodeSummary:
        """Return the counts. Another thread may be stepping meanwhile."""
        sums = self._sums.copy()
        _add(sums, self._pending(), self._goes_on)
        latest = list(sums.latest)
        if not latest:
            return EpisodeSummary(sums.num_steps, sums.num_episodes, None, None)
        returns, lengths = zip(*latest, strict=True)
        with np.errstate(all="ignore"):
            mean = float(np.mean(returns))
        mean_length = float(np.mean(lengths))
        return EpisodeSummary(sums.num_steps, sums.num_episodes, None if np.isnan(mean) else mean, mean_length)

    def settle(self) -> None:
        """Sum the log."""
        with DeferSigint():  # else an interrupt could make them count twice
            _add(self._sums, self._pending(), self._goes_on)
            self._log.clear()
            self._begun.clear()
            self._is_whole = True

    def _pending(self) -> _Steps:
        """Return the steps of the log, which are not in the sums yet."""
        n = self._num_envs
        begun = [(step, row) for step, rows in self._begun.copy() for row in np.arange(n)[rows].tolist()]
        is_whole, log = self._is_whole, self._log.copy()
        outcomes = [one if isinstance(one, bytes) else one[1] for one in log] if not is_whole else log
        rewards, ended = read_outcomes(cast("list[bytes]", outcomes), n)
        valid = None
        if not is_whole:
            valid = np.ones(ended.shape, bool)
            for step, one in enumerate(log):
                if not isinstance(one, bytes):
                    valid[step] = False
                    valid[step, one[0]] = True
            rewards, ended = np.where(valid, rewards, 0.0), ended & valid
        return _Steps(np.arange(n), rewards, valid, ended, np.array(begun, np.int64).reshape(-1, 2))


@dataclass(slots=True)
class _EpisodeSegments:
    """Steps cut where an episode of an env ends or begins, in order, one env after the other.

    Attributes:
        owners: Env id of each stretch.
        is_later: Whether an earlier stretch has the same env.
        is_begun: Whether its first step begins an episode.
        last: Its last step, as a row of the steps.
        ended: Whether its last step ends an episode.
        returns: Sum of its rewards.
        lengths: Number of its steps.
    """

    owners: Array
    is_later: Array
    is_begun: Array
    last: Array
    ended: Array
    returns: Array
    lengths: Array

    @classmethod
    def of(cls, steps: _Steps, goes_on: bool) -> _EpisodeSegments:
        """Cut steps. ``goes_on``: whether the next episode begins where one ends."""
        num_steps = len(steps.rewards)
        before, column = steps.begun[steps.begun[:, 0] < num_steps].T
        begins = column * num_steps + before  # flat index, env after env
        ended = steps.ended.T.ravel()
        after = np.flatnonzero(ended) + 1
        is_begun, is_cut = np.zeros((2, ended.size + 1), bool)
        is_begun[after] = goes_on & (after % num_steps > 0)  # else it would be the first step of another env
        is_begun[begins] = True
        is_cut[::num_steps] = is_cut[begins] = is_cut[after] = True
        firsts = np.flatnonzero(is_cut[:-1])
        lasts = np.append(firsts[1:], ended.size) - 1
        with np.errstate(all="ignore"):  # rewards may be infinite
            returns = np.add.reduceat(steps.rewards.T.ravel(), firsts)
        lengths = lasts - firsts + 1
        if steps.valid is not None:
            lengths = np.add.reduceat(steps.valid.T.ravel().astype(np.int64), firsts)
        owners, is_later = steps.columns[firsts // num_steps], firsts % num_steps > 0
        return cls(owners, is_later, is_begun[firsts], lasts % num_steps, ended[lasts], returns, lengths)


def _add(sums: _Totals, steps: _Steps, goes_on: bool) -> None:
    """Add steps to sums."""
    num_steps = len(steps.rewards)
    if num_steps:
        sums.num_steps += steps.rewards.size if steps.valid is None else int(steps.valid.sum())
        _add_segments(sums, _EpisodeSegments.of(steps, goes_on), num_steps, goes_on)
    late = steps.columns[steps.begun[steps.begun[:, 0] >= num_steps, 1]]
    sums.returns[late], sums.lengths[late], sums.is_open[late] = 0.0, 0, True


def _add_segments(sums: _Totals, cut: _EpisodeSegments, num_steps: int, goes_on: bool) -> None:
    """Add stretches to sums: the first of an env may continue an open episode, and the last one leave one open."""
    is_open = cut.is_begun.copy()
    goes_before = ~(cut.is_later | cut.is_begun)
    owners = cut.owners[goes_before]
    is_open[goes_before] = sums.is_open[owners]
    with np.errstate(all="ignore"):
        cut.returns[goes_before] += sums.returns[owners]
    cut.lengths[goes_before] += sums.lengths[owners]
    whole = np.flatnonzero(is_open & cut.ended)
    sums.num_episodes += len(whole)
    latest = whole[np.argsort(cut.last[whole], kind="stable")][-LATEST:]
    sums.latest.extend(zip(cut.returns[latest].tolist(), cut.lengths[latest].tolist(), strict=True))
    final = np.flatnonzero(cut.last == num_steps - 1)
    owners, ended = cut.owners[final], cut.ended[final]
    sums.returns[owners] = np.where(ended, 0.0, cut.returns[final])
    sums.lengths[owners] = np.where(ended, 0, cut.lengths[final])
    sums.is_open[owners] = np.where(ended, goes_on, is_open[final])
