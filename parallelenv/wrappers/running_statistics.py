"""Running mean and variance, exact however the data was split into batches."""

from __future__ import annotations

import contextlib
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from parallelenv.contract.batch import Array
from parallelenv.contract.error_text import show
from parallelenv.errors import ArgumentError, EnvContractError

_PRIOR = 1e-4
"""Weight, in states, of the initial mean 0 and variance 1: as in Gymnasium and Stable-Baselines3."""


@dataclass
class Moments:
    """Count, mean and variance of arrays of one shape. ``squares`` is the sum of squared distances from the mean."""

    count: int
    mean: Array
    squares: Array

    @classmethod
    def of(cls, rows: Array) -> Moments:
        """Return the moments of the rows of an array, ``(k, *shape)``."""
        if not len(rows):
            return cls(0, np.zeros(rows.shape[1:]), np.zeros(rows.shape[1:]))
        mean = rows.mean(axis=0, dtype=np.float64)
        return cls(len(rows), mean, np.square(rows - mean).sum(axis=0))

    @property
    def variance(self) -> Array:
        """``shape`` float64, the population variance; 0 without arrays."""
        return self.squares / max(self.count, 1)

    def plus(self, other: Moments) -> Moments:
        """Return the moments of both data sets together (Chan, Golub and LeVeque)."""
        total = self.count + other.count
        distance, share = other.mean - self.mean, other.count / max(total, 1)
        squares = self.squares + other.squares + distance**2 * (self.count * share)
        return Moments(total, self.mean + distance * share, squares)

    @property
    def is_finite(self) -> bool:
        """Whether they remain usable: `guess` also needs the square of the mean."""
        return bool(np.isfinite(self.squares + self.mean**2).all())

    def guess(self) -> tuple[Array, Array]:
        """Return mean and variance including the prior, so that a few arrays do not weigh too much."""
        total = self.count + _PRIOR
        squares = self.squares + _PRIOR + self.mean**2 * (self.count * _PRIOR / total)
        return self.mean * (self.count / total), squares / total


class RunningStatistics:
    """Mean and variance of every number of a state, or of a return, over all data so far.

    Can be pickled, copied, saved, and merged with those of other workers or pools.

    Args:
        shapes: Shape of each leaf, by its path in the state: ``"['camera']"``, or ``""`` for the whole.

    Attributes:
        leaves: The `Moments` of each leaf, by the same paths.
    """

    def __init__(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        self.leaves = {name: Moments.of(np.zeros((0, *shape))) for name, shape in shapes.items()}

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shape of each leaf."""
        return {name: moments.mean.shape for name, moments in self.leaves.items()}

    @property
    def count(self) -> int:
        """Number of states counted."""
        return max((moments.count for moments in self.leaves.values()), default=0)

    def update(self, batch: Mapping[str, Array], env_ids: Sequence[int] | Array | None = None) -> None:
        """Add a batch.

        Args:
            batch: ``(k, *shape)`` for each leaf.
            env_ids: The env of each row, for error messages.

        Raises:
            ArgumentError: If leaves or shapes differ.
            EnvContractError: If mean or variance would become nan or infinite permanently. In both cases nothing was
                added.
        """
        if not isinstance(batch, Mapping):
            raise ArgumentError(f"batch={show(batch)} must be a dict of arrays, one for each of {list(self.leaves)}.")
        arrays = {name: np.asarray(rows) for name, rows in batch.items()}
        with np.errstate(all="ignore"):  # overflows are detected below
            total = self._plus(self.leaves, {name: Moments.of(rows) for name, rows in arrays.items()}, "The batch")
            wrong = [name for name, moments in total.items() if not moments.is_finite]
            spoilers: set[int] = set()  # rows that make a leaf infinite; all rows if only several together do
            for name in wrong:
                own, every = self.leaves[name], range(len(arrays[name]))
                alone = [row for row in every if not own.plus(Moments.of(arrays[name][row : row + 1])).is_finite]
                spoilers.update(alone or every)
        if wrong:
            rows = sorted(spoilers)
            at_fault = () if env_ids is None else tuple(sorted(int(env_ids[row]) for row in rows))
            where = f"envs {list(at_fault)}" if at_fault else f"rows {rows} of the batch"
            raise EnvContractError(
                f"{where} would make mean or variance of leaves {wrong} nan or infinite for ever. Nothing of the batch "
                "was counted. Look into these envs with get_env_attr(), or set frozen=True.",
                at_fault,
            )
        self.leaves.update(total)

    def merge(self, *others: RunningStatistics) -> None:
        """Add the data of other statistics. Data that two of them share counts twice.

        Raises:
            ArgumentError: If one is not `RunningStatistics`, or its leaves or shapes differ.
        """
        total: Mapping[str, Moments] = self.leaves
        for other in others:
            if not isinstance(other, RunningStatistics):
                raise ArgumentError(f"{show(other)} cannot be merged. Give RunningStatistics.")
            total = self._plus(total, other.leaves, "The other")
        self.leaves.update(total)

    def _plus(self, leaves: Mapping[str, Moments], others: Mapping[str, Moments], which: str) -> dict[str, Moments]:
        """Return the sums of leaves; nothing is changed."""
        shapes = {name: moments.mean.shape for name, moments in others.items()}
        if shapes != self.shapes:
            raise ArgumentError(
                f"{which} has the leaves {shapes}, but these statistics are of {self.shapes}. Only statistics of the "
                "same space belong together."
            )
        return {name: moments.plus(others[name]) for name, moments in leaves.items()}

    def save(self, path: str | Path) -> None:
        """Write them to a file in numpy's ``.npz`` format. An existing file is replaced once all is written.

        Raises:
            OSError: If it cannot be written; no partial file remains.
        """
        arrays: dict[str, Any] = {"names": np.array(list(self.leaves), dtype=str)}
        for index, moments in enumerate(self.leaves.values()):
            arrays.update({f"{name}{index}": value for name, value in vars(moments).items()})
        part = Path(path).with_name(Path(path).name + ".part")
        try:
            with part.open("wb") as file:  # given a name, numpy would add a suffix
                np.savez(file, **arrays)
            part.replace(path)
        except BaseException:
            with contextlib.suppress(OSError):  # it may not exist
                part.unlink()
            raise

    @classmethod
    def load(cls, path: str | Path) -> RunningStatistics:
        """Return statistics from a file written by `save`. Nothing in the file is executed.

        Raises:
            ArgumentError: If the file is of another kind.
            OSError: If it cannot be read.
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
        """Return one line."""
        return f"<RunningStatistics of {self.shapes}, {self.count:,} seen>"
