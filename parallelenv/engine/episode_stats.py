"""Computes the returns and lengths of episodes, for the package's evaluations, collectors, wrappers and rollouts.

A step in which an env failed and was restarted counts as the last step of the env's episode, with reward 0.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from parallelenv.contract.batch import Array, Index, read_outcomes, update_outcome
from parallelenv.contract.copying import deep_copy
from parallelenv.contract.error_text import show
from parallelenv.contract.failures import put
from parallelenv.contract.interrupts import DeferSignals, signal_behind
from parallelenv.contract.spaces import object_array
from parallelenv.errors import EnvContractError

if TYPE_CHECKING:
    from parallelenv.contract.rollout_data import RolloutChunk

LATEST = 100
"""Number of latest episodes over which means are taken."""
_MANY = 128
"""Number of envs from which steps of some of them share an entry of the log, because summing up an entry takes 0.1 us
for each env of the pool: with 1,024 envs, five times as long as the rest of ``recv(1)``."""
_ROOM = 16384
"""Approximate number of rows, one for each env and step, that the log holds before they are summed."""


class EndedEpisodes(NamedTuple):
    """Episodes that have ended.

    Each array has one item per episode, sorted by the step that ended the episode, and then by env.
    """

    returns: Array  #: Sums of rewards: float64, or object if some rewards are not numbers.
    lengths: Array  #: int64, numbers of steps.
    are_whole: Array  #: bool: whether all of an episode's steps were counted.


class OpenEpisodes:
    """Sum of rewards and number of steps of each env's running episode, so far.

    Attributes:
        returns: ``(num_envs,)`` float64, or object if any reward so far was not a number.
        lengths: ``(num_envs,)`` int64.
        are_whole: ``(num_envs,)`` bool: whether all steps of the episode were counted.
    """

    def __init__(self, num_envs: int) -> None:
        self.returns: Array = np.zeros(num_envs)
        self.lengths: Array = np.zeros(num_envs, np.int64)
        self.are_whole: Array = np.zeros(num_envs, bool)

    def copy(self) -> OpenEpisodes:
        """Return a copy."""
        other = OpenEpisodes(0)
        other.returns, other.lengths, other.are_whole = self.returns.copy(), self.lengths.copy(), self.are_whole.copy()
        return other

    def begin(self, rows: Index) -> None:
        """Start a new episode of each of these envs."""
        self.returns[rows], self.lengths[rows], self.are_whole[rows] = 0, 0, True

    def add(self, rows: Index, rewards: Array) -> None:
        """Count one step of each of these envs. Rewards may be of any type that can be added."""
        self._admit(rewards)
        with DeferSignals():  # returns and lengths must be sums over the same steps
            self.returns[rows] += rewards
            self.lengths[rows] += 1

    def add_steps(
        self, rows: Array, rewards: Array, ended: Array, valid: Array | None, begun: Array, *, goes_on: bool
    ) -> EndedEpisodes:
        """Count many steps of ``k`` envs, and return the episodes that ended.

        Args:
            rows: ``(k,)`` int: the rows of the envs.
            rewards: ``(num_steps, k)``.
            ended: ``(num_steps, k)`` bool: whether the episode ended with this step.
            valid: ``(num_steps, k)`` bool: whether the step counts; ``None`` means that all steps count.
            begun: ``(num_begun, 2)`` int: for each episode that starts, the step before which it starts (``num_steps``
                if it starts after the last step), and the column of its env.
            goes_on: Whether an env whose episode ends starts the next episode by itself.
        """
        self._admit(rewards)
        num_steps = len(rewards)
        if valid is not None:
            rewards = np.where(valid, rewards, 0)
        found = EndedEpisodes(self.returns[:0], self.lengths[:0], self.are_whole[:0])
        if num_steps and len(rows):
            parts = _EpisodeParts.of(rows, rewards, ended, valid, begun, goes_on)
            # The first part of an env may continue an earlier episode, and its last part may leave an episode open.
            are_whole = parts.is_begun.copy()
            continues = ~(parts.is_later | parts.is_begun)
            owners = parts.owners[continues]
            are_whole[continues] = self.are_whole[owners]
            returns = parts.returns
            if self.returns.dtype == object:  # the sum of one reward is the user's own object
                returns = object_array(deep_copy(returns.tolist()))
            with np.errstate(all="ignore"):
                returns[continues] += self.returns[owners]
            parts.lengths[continues] += self.lengths[owners]
            final = np.flatnonzero(parts.last == num_steps - 1)
            owners, is_over = parts.owners[final], parts.ended[final]
            self.returns[owners] = np.where(is_over, 0, returns[final])
            self.lengths[owners] = np.where(is_over, 0, parts.lengths[final])
            self.are_whole[owners] = np.where(is_over, goes_on, are_whole[final])
            over = np.flatnonzero(parts.ended)
            over = over[np.argsort(parts.last[over], kind="stable")]
            found = EndedEpisodes(returns[over], parts.lengths[over], are_whole[over])
        self.begin(rows[begun[begun[:, 0] >= num_steps, 1]])
        return found

    def _admit(self, rewards: Array) -> None:
        if rewards.dtype == object and self.returns.dtype != object:
            self.returns = self.returns.astype(object)
            self.returns[self.lengths == 0] = 0  # not 0.0, to which a Decimal cannot be added


def refuse_unaddable(env_id: int, rewards: Iterable[Any], partial: object = None) -> None:
    """Raise an `EnvContractError` if one of an episode's rewards cannot be added to those before it.

    ``partial`` becomes ``error.partial``.
    """
    total: Any = 0
    for reward in rewards:
        try:
            total = total + reward
        except Exception as cause:
            if signal_behind(cause) is not None:
                raise
            error = EnvContractError(
                f"env {env_id} returned the reward {show(reward)}, which cannot be added to those before it "
                f"({type(cause).__name__}: {cause}). The return of an episode is the sum of its rewards: return "
                "numbers or arrays, or take the rewards of single steps from rollout() or step()."
            )
            put(error, "partial", partial)
            raise error from cause


@dataclass(slots=True)
class _EpisodeParts:
    """The steps of envs, cut into parts wherever an env's episode starts or ends.

    Each array has one item per part: first the parts of the first env, in order of time, then the parts of the second
    env, and so on.
    """

    owners: Array  #: Env id of the part.
    is_later: Array  #: Whether an earlier part has the same env.
    is_begun: Array  #: Whether the part's first step starts an episode.
    last: Array  #: Index of the part's last step.
    ended: Array  #: Whether the part's last step ends an episode.
    returns: Array  #: Sum of the part's rewards.
    lengths: Array  #: Number of the part's steps.

    @classmethod
    def of(
        cls, rows: Array, rewards: Array, ended: Array, valid: Array | None, begun: Array, goes_on: bool
    ) -> _EpisodeParts:
        num_steps = len(rewards)
        before, column = begun[begun[:, 0] < num_steps].T
        begins = column * num_steps + before  # index into the steps of all envs, one env after another
        is_end = ended.T.ravel()
        after = np.flatnonzero(is_end) + 1
        is_begun, is_cut = np.zeros((2, is_end.size + 1), bool)
        is_begun[after] = goes_on & (after % num_steps > 0)  # a multiple of `num_steps` is in the next env
        is_begun[begins] = True
        is_cut[::num_steps] = is_cut[begins] = is_cut[after] = True
        firsts = np.flatnonzero(is_cut[:-1])
        lasts = np.append(firsts[1:], is_end.size) - 1
        with np.errstate(all="ignore"):  # rewards may be infinite
            returns = np.add.reduceat(rewards.T.ravel(), firsts)
        lengths = lasts - firsts + 1
        if valid is not None:
            lengths = np.add.reduceat(valid.T.ravel().astype(np.int64), firsts)
        owners, is_later = rows[firsts // num_steps], firsts % num_steps > 0
        return cls(owners, is_later, is_begun[firsts], lasts % num_steps, is_end[lasts], returns, lengths)


@dataclass(frozen=True, slots=True)
class EpisodeSummary:
    """Numbers of steps and episodes so far, and means over the latest episodes."""

    num_steps: int  #: Number of steps, summed over envs.
    num_episodes: int  #: Number of ended episodes, without those whose first steps were not counted.
    #: Mean return (sum of rewards) of the latest `LATEST` episodes; ``None`` if there are no episodes, or a reward was
    #: not a number.
    mean_return: float | None
    mean_length: float | None  #: Mean number of steps of the same episodes; ``None`` if there are no episodes.


@dataclass(slots=True)
class _Totals:
    """The sums of each running episode, and the numbers from which an `EpisodeSummary` is computed."""

    running: OpenEpisodes
    num_steps: int
    num_episodes: int
    latest: deque[tuple[float, int]]

    def copy(self) -> _Totals:
        return _Totals(self.running.copy(), self.num_steps, self.num_episodes, deque(self.latest, LATEST))

    def add(
        self, rows: Array, rewards: Array, ended: Array, valid: Array | None, begun: Array, *, goes_on: bool
    ) -> None:
        self.num_steps += rewards.size if valid is None else int(valid.sum())
        found = self.running.add_steps(rows, rewards, ended, valid, begun, goes_on=goes_on)
        returns, lengths = found.returns[found.are_whole], found.lengths[found.are_whole]
        self.num_episodes += len(returns)
        self.latest.extend(zip(returns[-LATEST:].tolist(), lengths[-LATEST:].tolist(), strict=True))


_NONE_BEGUN: Array = np.zeros((0, 2), np.int64)


class EpisodeStats:
    """Counts the episodes of the envs ``0 .. num_envs-1`` as the envs are stepped.

    During a step, this class only copies the rewards and flags to a log, which takes 0.2 us. It sums the steps in the
    log when there are many of them, or when the sums are read.
    """

    def __init__(self, num_envs: int) -> None:
        self._num_envs = num_envs
        self._goes_on = False
        self._sums = _Totals(OpenEpisodes(num_envs), 0, 0, deque(maxlen=LATEST))
        self._room = max(32, min(1024, _ROOM // num_envs))
        # Rows of stepped envs (`None`: all), `Batch.outcome`, and the number of the step if it is a planned one. In an
        # entry that steps may share, a mask and a bytearray.
        self._log: list[tuple[Any, bytes | bytearray, int]] = []
        self._latest = 0  # number of the step that was last in the log when the log was emptied
        self._begun: list[tuple[int, Any]] = []

    def set_autoreset(self, goes_on: bool) -> None:
        """Set whether an env whose episode ends starts the next episode by itself."""
        self.sum_up()
        self._goes_on = goes_on

    def add_step(self, outcome: bytes, rows: Index | None = None, resets: Sequence[int] = (), number: int = 0) -> None:
        """Add a step, given as the result of `Batch.outcome` and the rows of the stepped envs (``None`` means all).

        ``resets`` are those of the rows whose envs were reset instead; these do not count as steps. See `has_added` for
        ``number``. An interrupt before the step is in the log, which is the last thing done, adds nothing.
        """
        self.make_room()
        if resets:  # for 50 of 1,024 envs 2 us; a list of the other rows takes 30 us
            counted = np.zeros(self._num_envs, bool)
            counted[slice(None) if rows is None else rows] = True
            counted[resets] = False
            rows = counted
        if rows is None or self._num_envs < _MANY:
            self._log.append((rows, outcome, number))
        elif not self._joins_latest(rows, outcome, number):
            mask = np.zeros(self._num_envs, bool)
            mask[rows] = True
            self._log.append((mask, bytearray(outcome), number))

    def _joins_latest(self, rows: Index, outcome: bytes, number: int) -> bool:
        """Add a step to the latest entry of the log if that entry has only steps of other envs; return whether it has.

        Episodes count by env, so only the order of each env's own steps matters.
        """
        has_begun = bool(self._begun) and self._begun[-1][0] == len(self._log)  # an episode, since the latest entry
        mask: Any
        mask, latest, _ = self._log[-1] if self._log else (None, b"", 0)
        if has_begun or type(latest) is not bytearray or mask[rows].any():
            return False
        update_outcome(latest, outcome, rows, self._num_envs)
        mask = mask.copy()
        mask[rows] = True
        self._log[-1] = mask, latest, number  # last: an interrupted step is added again
        return True

    def make_room(self) -> None:
        """Sum up the steps in the log if it is full. Call this before a section in which signals are delayed."""
        if len(self._log) >= self._room:
            self.sum_up()

    def has_added(self, number: int) -> bool:
        """Return whether the step that was added last has this number, which must not be 0."""
        return (self._log[-1][2] if self._log else self._latest) == number

    def begin_episodes(self, rows: Index) -> None:
        """Record that the envs in these rows start episodes."""
        self._begun.append((len(self._log), rows))
        if len(self._begun) > self._room:
            self.sum_up()

    def exclude_running(self) -> None:
        """Exclude the running episodes from the statistics, because their first steps are not known."""
        self.sum_up()
        self._sums.running.are_whole[:] = False

    def add_chunk(self, chunk: RolloutChunk) -> None:
        """Add the steps of a chunk of a rollout."""
        self.sum_up()
        ended = np.zeros(chunk.valid.shape, bool)
        ended[chunk.ended.steps, chunk.ended.columns] = True
        rows = np.array(chunk.env_ids)
        valid = chunk.valid | ended
        self._sums.add(rows, chunk.rewards, ended, valid, _NONE_BEGUN, goes_on=self._goes_on)

    def summary(self) -> EpisodeSummary:
        """Return the counts and means. This method may be called while another thread steps the envs."""
        sums = self._sums.copy()
        sums.add(*self._pending(), goes_on=self._goes_on)
        latest = list(sums.latest)
        if not latest:
            return EpisodeSummary(sums.num_steps, sums.num_episodes, None, None)
        returns, lengths = zip(*latest, strict=True)
        with np.errstate(all="ignore"):
            mean = float(np.mean(returns))
        mean_length = float(np.mean(lengths))
        return EpisodeSummary(sums.num_steps, sums.num_episodes, None if np.isnan(mean) else mean, mean_length)

    def sum_up(self) -> None:
        """Add the steps in the log to the sums, and empty the log."""
        with DeferSignals():  # otherwise an interrupt could make the steps count twice
            self._sums.add(*self._pending(), goes_on=self._goes_on)
            self._latest = self._log[-1][2] if self._log else self._latest
            self._log.clear()
            self._begun.clear()

    def _pending(self) -> tuple[Array, Array, Array, Array | None, Array]:
        """Return the steps in the log, as arguments for `OpenEpisodes.add_steps`."""
        n, log = self._num_envs, self._log.copy()
        every = np.arange(n)
        steps, chosen = zip(*self._begun.copy(), strict=True) if self._begun else ((), ())
        found = [every[rows] for rows in chosen]
        begun = np.stack((np.repeat(steps, list(map(len, found))), np.concatenate(found)), 1) if found else _NONE_BEGUN
        valid = None
        if any(rows is not None for rows, *_ in log):  # first: another thread may add to an entry
            valid = np.zeros((len(log), n), bool)
            for counts, (rows, *_) in zip(valid, log, strict=True):
                counts[slice(None) if rows is None else rows] = True
        rewards, ended = read_outcomes([outcome for _, outcome, _ in log], n)
        if valid is not None:
            ended = ended & valid
        return every, rewards, ended, valid, begun
