"""Normalisation of states and rewards with running statistics."""

from __future__ import annotations

import contextlib
import zipfile
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from gymnasium import spaces

from parallelenv.contract.arguments import check_flags, is_number
from parallelenv.contract.batch import Array
from parallelenv.contract.error_text import count, show
from parallelenv.contract.spaces import Structure
from parallelenv.errors import ArgumentError, EnvContractError
from parallelenv.results import StepResult
from parallelenv.wrappers.base import (
    ParallelWrapper,
    States,
    StateWrapper,
    Wrappable,
    changed,
    numeric_rewards,
    shared_structure,
)

_PRIOR = 1e-4
"""Weight, in states, of the initial mean 0 and variance 1. It is the same as in Gymnasium and Stable-Baselines3."""


@dataclass
class Moments:
    """Count, mean and variance of arrays that share a shape.

    ``squares`` is the sum of squared distances from the mean.
    """

    count: int
    mean: Array
    squares: Array

    @classmethod
    def of(cls, rows: Array) -> Moments:
        """Return the moments of the rows of an array of shape ``(k, *shape)``."""
        if not len(rows):
            return cls(0, np.zeros(rows.shape[1:]), np.zeros(rows.shape[1:]))
        mean = rows.mean(axis=0, dtype=np.float64)
        return cls(len(rows), mean, np.square(rows - mean).sum(axis=0))

    @property
    def variance(self) -> Array:
        """The population variance, a float64 array of the same shape as the mean; 0 if ``count`` is 0."""
        return self.squares / max(self.count, 1)

    def plus(self, other: Moments) -> Moments:
        """Return the moments of the two data sets combined, by the method of Chan, Golub and LeVeque."""
        total = self.count + other.count
        distance, share = other.mean - self.mean, other.count / max(total, 1)
        squares = self.squares + other.squares + distance**2 * (self.count * share)
        return Moments(total, self.mean + distance * share, squares)

    @property
    def is_finite(self) -> bool:
        """True if the moments are finite. The squared mean must be finite as well, because `guess` uses it."""
        return bool(np.isfinite(self.squares + self.mean**2).all())

    def guess(self) -> tuple[Array, Array]:
        """Return the mean and variance, combined with a prior of small weight (mean 0 and variance 1)."""
        total = self.count + _PRIOR
        squares = self.squares + _PRIOR + self.mean**2 * (self.count * _PRIOR / total)
        return self.mean * (self.count / total), squares / total


class RunningStatistics:
    """Running mean and variance of each element of the states, or of the returns, over all data so far.

    Statistics can be pickled, copied, saved, and merged with those of other `ParallelEnv` objects.

    Args:
        shapes: Shape of each leaf, by its path in the state, for example ``"['camera']"``; the path ``""`` stands for
            the whole state.

    Attributes:
        leaves: The `Moments` of each leaf, by the same paths.

    Raises:
        ArgumentError: If ``shapes`` is not a dict of shapes.
    """

    def __init__(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        if not isinstance(shapes, Mapping) or not all(map(_is_shape, shapes.values())):
            raise ArgumentError(f"shapes={show(shapes)} must be a dict of shapes, such as {{'': (3,)}}.")
        self.leaves = {name: Moments.of(np.zeros((0, *shape))) for name, shape in shapes.items()}

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shape of each leaf, by its path in the state."""
        return {name: moments.mean.shape for name, moments in self.leaves.items()}

    @property
    def count(self) -> int:
        """Number of states, or of returns, counted so far."""
        return max((moments.count for moments in self.leaves.values()), default=0)

    def update(self, batch: Mapping[str, Array], env_ids: Sequence[int] | Array | None = None) -> None:
        """Add a batch.

        Args:
            batch: For each leaf, by its path, an array of shape ``(k, *shape)``.
            env_ids: The env of each row, for error messages.

        Raises:
            ArgumentError: If leaves or shapes differ from those of these statistics, a leaf is not an array of numbers,
                or the numbers of rows differ.
            EnvContractError: If the batch would make the mean or variance permanently nan or infinite. After either
                error, the statistics are unchanged.
        """
        if not isinstance(batch, Mapping):
            raise ArgumentError(f"batch={show(batch)} must be a dict of arrays, one for each of {list(self.leaves)}.")
        arrays = {name: _rows_of(name, rows) for name, rows in batch.items()}
        counts = {f"batch[{name!r}]": len(rows) for name, rows in arrays.items()}
        first, num_rows = next(iter(counts.items()), ("", 0))
        if other := next((name for name, one in counts.items() if one != num_rows), ""):
            raise ArgumentError(f"{other} has {count(counts[other], 'row')}, but {first} has {num_rows}.")
        if env_ids is not None and len(env_ids) != num_rows:
            raise ArgumentError(f"env_ids={show(env_ids)} must have {count(num_rows, 'item')}, one for each row.")
        with np.errstate(all="ignore"):  # overflows are detected below
            total = self._plus(self.leaves, {name: Moments.of(rows) for name, rows in arrays.items()}, "The batch")
            wrong = [name for name, moments in total.items() if not moments.is_finite]
            spoilers: set[int] = set()  # rows that make a leaf infinite; all rows if no single row does
            for name in wrong:
                own, every = self.leaves[name], range(len(arrays[name]))
                alone = [row for row in every if not own.plus(Moments.of(arrays[name][row : row + 1])).is_finite]
                spoilers.update(alone or every)
        if wrong:
            rows = sorted(spoilers)
            at_fault = () if env_ids is None else tuple(sorted(int(env_ids[row]) for row in rows))
            where = f"envs {list(at_fault)}" if at_fault else f"rows {rows} of the batch"
            raise EnvContractError(
                f"{where} would make mean or variance of leaves {wrong} permanently nan or infinite. Nothing of the "
                "batch was counted. Inspect these envs with get_env_attr(), or set frozen=True.",
                at_fault,
            )
        self.leaves.update(total)

    def merge(self, *others: RunningStatistics) -> None:
        """Add the data of other statistics. Data contained in two of the statistics is counted twice.

        Raises:
            ArgumentError: If an argument is not a `RunningStatistics`, or its leaves or shapes differ from those of
                this object.
        """
        total: Mapping[str, Moments] = self.leaves
        for other in others:
            if not isinstance(other, RunningStatistics):
                raise ArgumentError(f"{show(other)} cannot be merged. Give RunningStatistics.")
            total = self._plus(total, other.leaves, "The other")
        self.leaves.update(total)

    def _plus(self, leaves: Mapping[str, Moments], others: Mapping[str, Moments], which: str) -> dict[str, Moments]:
        shapes = {name: moments.mean.shape for name, moments in others.items()}
        if shapes != self.shapes:
            raise ArgumentError(
                f"{which} has the leaves {shapes}, but these statistics have {self.shapes}. Only statistics of the "
                "same space can be combined."
            )
        return {name: moments.plus(others[name]) for name, moments in leaves.items()}

    def save(self, path: str | Path) -> None:
        """Write the statistics to a file in numpy's ``.npz`` format.

        An existing file is replaced only once the new one is complete.

        Raises:
            OSError: If the file cannot be written; no partial file remains.
        """
        arrays: dict[str, Any] = {"names": np.array(list(self.leaves), dtype=str)}
        for index, moments in enumerate(self.leaves.values()):
            arrays.update({f"{name}{index}": value for name, value in vars(moments).items()})
        part = Path(path).with_name(Path(path).name + ".part")
        try:
            with part.open("wb") as file:  # if given a name, numpy would add a suffix
                np.savez(file, **arrays)
            part.replace(path)
        except BaseException:
            with contextlib.suppress(OSError):  # the partial file may not exist
                part.unlink()
            raise

    @classmethod
    def load(cls, path: str | Path) -> RunningStatistics:
        """Return the statistics from a file that `save` wrote. No code from the file is executed.

        Raises:
            ArgumentError: If the file was not written by `save`.
            OSError: If the file cannot be read.
        """
        loaded = cls({})
        try:
            with np.load(path, allow_pickle=False) as found:
                for index, name in enumerate(found["names"].tolist()):
                    count, mean, squares = (found[f"{part}{index}"] for part in ("count", "mean", "squares"))
                    loaded.leaves[name] = Moments(int(count), mean, squares)
        except (ValueError, LookupError, TypeError, AttributeError, EOFError, zipfile.BadZipFile) as error:
            raise ArgumentError(
                f"path={str(path)!r} is not a file of statistics ({type(error).__name__}: {error}). Give one that "
                "RunningStatistics.save() wrote."
            ) from error
        return loaded

    def __repr__(self) -> str:
        return f"<RunningStatistics of {self.shapes}, {self.count:,} seen>"


@dataclass(frozen=True)
class Normalizer:
    """A function that normalises states. A pickled copy has its own copy of the statistics.

    Attributes:
        structure: Structure of the states.
        places: Indices of the leaves to normalise, by the names of these leaves in the statistics.
        statistics: Statistics of these leaves.
        epsilon: Added to the variance.
        clip: Upper bound on the absolute values returned.
    """

    structure: Structure
    places: Mapping[str, int]
    statistics: RunningStatistics
    epsilon: float
    clip: float

    def __call__(self, states: States) -> States:
        """Return normalised states, batched in the same way as ``states``."""
        leaves = self.structure.split(states)
        for name, index in self.places.items():
            mean, variance = self.statistics.leaves[name].guess()
            scaled = (leaves[index] - mean) / np.sqrt(variance + self.epsilon)
            leaves[index] = np.clip(scaled, -self.clip, self.clip).astype(np.float32)
        return self.structure.join(leaves)


class NormalizeStates(StateWrapper):
    """Normalises each element of the states to mean 0 and variance 1, with statistics of all states so far.

    The statistics count the states that `reset`, `step` and `recv` return, except those of idle envs. They do not count
    ``info["ended_state"]``, although it is normalised as well. Only the `Box` parts of a state change: they become
    float32, between ``-clip`` and ``clip``. `EnvContractError` is raised if a state would make the mean or variance nan
    or infinite.

    Args:
        env: A `ParallelEnv`, or another wrapper. Its envs must share an observation space.
        keys: Keys of a `Dict` space. Only the parts of a state under these keys are normalised; ``None`` means all.
        statistics: Statistics to start from, or to share with another wrapper, for example to evaluate with the
            statistics from training; ``None`` starts new ones.
        frozen: Whether this wrapper leaves the statistics unchanged.
        epsilon: Added to the variance.
        clip: Upper bound on the absolute values returned; `math.inf` for no bound.

    Attributes:
        normalizer: The `Normalizer`, for use in a policy given to `ParallelEnv.rollout`.
        frozen: Whether the statistics are frozen. See `ParallelWrapper`.

    Raises:
        ArgumentError: If the envs do not share an observation space, the space has no `Box` to normalise, or an
            argument has an invalid value.
    """

    _saved = ("statistics",)

    def __init__(
        self,
        env: Wrappable,
        keys: Sequence[str] | None = None,
        *,
        statistics: RunningStatistics | None = None,
        frozen: bool = False,
        epsilon: float = 1e-8,
        clip: float = 10.0,
    ) -> None:
        structure = shared_structure(env, "have no common scale")
        known = list(structure.space.spaces) if isinstance(structure.space, spaces.Dict) else []
        if keys is not None and (
            isinstance(keys, str) or not isinstance(keys, Iterable) or any(key not in known for key in keys)
        ):
            raise ArgumentError(f"keys={show(keys)} must be a list of keys of the observation space, {known}, or None.")
        chosen = ("",) if keys is None else tuple(f"[{key!r}]" for key in keys)
        leaves = [
            (index, structure.describe(index), tuple(leaf.shape))
            for index, leaf in enumerate(structure.leaves)
            if type(leaf) is spaces.Box and structure.describe(index).startswith(chosen)
        ]
        if not leaves:
            raise ArgumentError(f"There is no Box to normalise in {structure.space}, keys={show(keys)}.")
        shapes = {name: shape for _, name, shape in leaves}
        places = {name: index for index, name, _ in leaves}
        self.normalizer = Normalizer(structure, places, *_checked(shapes, statistics, frozen, epsilon, clip))
        self.is_frozen = bool(frozen)
        super().__init__(env, _with_boxes(structure.space, places, self.normalizer.clip))

    @property
    def statistics(self) -> RunningStatistics:
        """The `RunningStatistics` of the states."""
        return self.normalizer.statistics

    @property
    def state_statistics(self) -> RunningStatistics:
        """The same object as ``statistics``. This name also works on a `NormalizeRewards` that wraps this wrapper."""
        return self.statistics

    def process(self, states: States) -> States:
        """Return normalised states, batched in the same way as ``states``.

        The running mean and variance are not updated.
        """
        return self.normalizer(states)

    def on_reset(self, states: States, env_ids: tuple[int, ...]) -> States:
        """Add the first states to the statistics unless ``frozen`` is set; return the states normalised."""
        self._count(states, env_ids)
        return super().on_reset(states, env_ids)

    def on_step(self, result: StepResult) -> StepResult:
        """Add the states to the statistics unless ``frozen`` is set; return a result with normalised states."""
        self._count(result.states, result.env_ids)
        return super().on_step(result)

    def _count(self, states: States, env_ids: Sequence[int] | Array) -> None:
        if not self.is_frozen:
            leaves = self.normalizer.structure.split(states)
            batch = {name: leaves[index] for name, index in self.normalizer.places.items()}
            self.statistics.update(batch, env_ids)


class NormalizeRewards(ParallelWrapper):
    """Divides rewards by the standard deviation of the discounted returns so far.

    The statistics leave out idle envs. After a reset or the end of an episode, an env's return starts again from 0.
    Wrappers inside this one, such as `RecordEpisodeStatistics`, see the original rewards. A step raises
    `EnvContractError` if a reward is not a number, or would make the variance nan or infinite.

    Args:
        env: A `ParallelEnv`, or another wrapper.
        gamma: Discount factor of the returns, from 0 to 1.
        statistics: Statistics of returns to start from, or to share with another wrapper; ``None`` starts new ones.
        frozen: Whether this wrapper leaves the statistics unchanged.
        epsilon: Added to the variance.
        clip: Upper bound on the absolute values returned; `math.inf` for no bound.

    Attributes:
        statistics: `RunningStatistics` of the returns.
        frozen: Whether the statistics are frozen. See `ParallelWrapper`.

    Raises:
        ArgumentError: If an argument has an invalid value.
    """

    _saved = ("statistics", "returns")

    def __init__(
        self,
        env: Wrappable,
        gamma: float = 0.99,
        *,
        statistics: RunningStatistics | None = None,
        frozen: bool = False,
        epsilon: float = 1e-8,
        clip: float = 10.0,
    ) -> None:
        super().__init__(env)
        if not is_number(gamma) or not 0 <= gamma <= 1:
            raise ArgumentError(f"gamma={show(gamma)} is not a discount. Give a number from 0 to 1.")
        self.statistics, self.epsilon, self.clip = _checked({"": ()}, statistics, frozen, epsilon, clip)
        self.gamma, self.is_frozen = float(gamma), bool(frozen)
        self.returns: Array = np.zeros(len(env))

    @property
    def reward_statistics(self) -> RunningStatistics:
        """The same object as ``statistics``. This name also works on a `NormalizeStates` that wraps this wrapper."""
        return self.statistics

    def on_reset(self, states: States, env_ids: tuple[int, ...]) -> States:
        """Set the discounted returns of these envs to 0; return the states unchanged."""
        self.returns[list(env_ids)] = 0.0
        return states

    def on_step(self, result: StepResult) -> StepResult:
        """Add the returns to the statistics unless ``frozen`` is set; return a result with scaled rewards."""
        rewards, given = numeric_rewards(result), ~result.restarted
        env_ids = result.env_ids[given]
        with np.errstate(all="ignore"):  # update() detects overflows
            returns = self.returns[env_ids] * self.gamma + rewards[given]
        if not self.is_frozen:
            self.statistics.update({"": returns}, env_ids)
        self.returns[env_ids] = returns  # also while frozen: the statistics may be unfrozen within an episode
        self.returns[result.env_ids[result.dones]] = 0.0
        _, variance = self.statistics.leaves[""].guess()
        scaled = np.clip(rewards / np.sqrt(variance + self.epsilon), -self.clip, self.clip)
        return changed(result, rewards=scaled)

    def remembered(self) -> dict[str, object]:
        """Return the statistics, the current returns and the discount."""
        return {**super().remembered(), "settings": {"gamma": self.gamma}}


def _is_shape(shape: object) -> bool:
    sizes = shape if isinstance(shape, (tuple, list)) else [None]
    return all(isinstance(size, int | np.integer) and size >= 0 for size in sizes)


def _rows_of(name: str, rows: object) -> Array:
    """Return a leaf of a batch as an array, which must have one row of numbers per env."""
    try:
        array: Array = np.asarray(rows)
        array = array.astype(np.float64) if array.dtype == object else array
    except (ValueError, TypeError, OverflowError):  # rows of different shapes, or objects that are not numbers
        array = np.array(None)
    if not array.ndim or array.dtype.kind not in "biuf":
        raise ArgumentError(f"batch[{name!r}]={show(rows)} must be an array of numbers with one row per env.")
    return array


def _with_boxes(space: Any, places: Collection[str], clip: float, path: str = "") -> Any:
    """Return ``space``, with boxes from ``-clip`` to ``clip`` in place of the leaves whose paths are in ``places``."""
    if type(space) is spaces.Dict:
        parts = space.spaces.items()
        return spaces.Dict({key: _with_boxes(part, places, clip, f"{path}[{key!r}]") for key, part in parts})
    if type(space) is spaces.Tuple:
        numbered = enumerate(space.spaces)
        return spaces.Tuple([_with_boxes(part, places, clip, f"{path}[{index}]") for index, part in numbered])
    return spaces.Box(-clip, clip, space.shape, np.float32) if path in places else space


def _checked(
    shapes: Mapping[str, tuple[int, ...]], statistics: object, frozen: bool, epsilon: float, clip: float
) -> tuple[RunningStatistics, float, float]:
    check_flags(frozen=frozen)
    for name, value in (("epsilon", epsilon), ("clip", clip)):
        if not is_number(value) or not value > 0:
            raise ArgumentError(f"{name}={show(value)} must be a positive number.")
    statistics = RunningStatistics(shapes) if statistics is None else statistics
    if not isinstance(statistics, RunningStatistics) or statistics.shapes != dict(shapes):
        raise ArgumentError(f"statistics={show(statistics)} do not fit; the shapes here are {shapes}.")
    return statistics, float(epsilon), float(clip)
