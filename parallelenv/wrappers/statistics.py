"""Running mean and variance of what envs answer, exact however it was split into batches."""

from __future__ import annotations

import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from parallelenv.batch import Array
from parallelenv.errors import ArgumentError

_PRIOR = 1e-4
"""Weight, in states, of the mean 0 and variance 1 that are assumed at first: as in Gymnasium and Stable-Baselines3."""


class Moments:
    """Number, mean and variance of arrays of one shape.

    Args:
        shape: Of one of them.

    Attributes:
        count: How many there were.
        mean: ``shape`` float64; 0 if there were none.
        squares: ``shape`` float64, the sum of squared distances from the mean.
    """

    def __init__(self, shape: tuple[int, ...]) -> None:
        self.count = 0
        self.mean: Array = np.zeros(shape)
        self.squares: Array = np.zeros(shape)

    @classmethod
    def of(cls, rows: Array) -> Moments:
        """Return those of the rows of an array, ``(k, *shape)``."""
        moments = cls(rows.shape[1:])
        if len(rows):
            moments.count = len(rows)
            moments.mean = rows.mean(axis=0, dtype=np.float64)
            moments.squares = np.square(rows - moments.mean).sum(axis=0)
        return moments

    @property
    def variance(self) -> Array:
        """``shape`` float64, of all that there were, not of a sample; 0 if there were none."""
        return self.squares / max(self.count, 1)

    def add(self, other: Moments) -> None:
        """Take in what others were computed from, as if it had been seen here (Chan, Golub and LeVeque)."""
        total = self.count + other.count
        if not other.count:
            return
        distance = other.mean - self.mean
        self.squares = self.squares + other.squares + distance**2 * (self.count * other.count / total)
        self.mean = self.mean + distance * (other.count / total)
        self.count = total

    def guess(self) -> tuple[Array, Array]:
        """Return mean and variance with what is assumed at first, so that a few arrays do not say too much."""
        total = self.count + _PRIOR
        squares = self.squares + _PRIOR + self.mean**2 * (self.count * _PRIOR / total)
        return self.mean * (self.count / total), squares / total


class RunningStatistics:
    """Mean and variance of every number of a state, or of a return, over all that was seen.

    They can be pickled, copied, saved, and merged with those of other workers or pools.

    Args:
        shapes: Of each leaf, by where it lies in the state: ``""`` if it is the whole, or ``"['camera']"``.

    Attributes:
        leaves: The `Moments` of each leaf, likewise.
    """

    def __init__(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        self.leaves = {name: Moments(tuple(shape)) for name, shape in shapes.items()}

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shape of each leaf."""
        return {name: moments.mean.shape for name, moments in self.leaves.items()}

    @property
    def count(self) -> int:
        """How many states were seen."""
        return max((moments.count for moments in self.leaves.values()), default=0)

    def update(self, batch: Mapping[str, Array]) -> None:
        """Take in a batch.

        Args:
            batch: ``(k, *shape)`` for each leaf.

        Raises:
            ArgumentError: If leaves or shapes are others; nothing was taken in.
        """
        self._take({name: Moments.of(np.asarray(rows)) for name, rows in batch.items()}, "The batch")

    def merge(self, *others: RunningStatistics) -> None:
        """Take in what others have seen, as if it had been seen here. What two of them share counts twice.

        Raises:
            ArgumentError: If leaves or shapes are others; of this one nothing was taken in.
        """
        for other in others:
            self._take(other.leaves, "The other")

    def _take(self, leaves: Mapping[str, Moments], which: str) -> None:
        shapes = {name: moments.mean.shape for name, moments in leaves.items()}
        if shapes != self.shapes:
            raise ArgumentError(
                f"{which} has the leaves {shapes}, but these statistics are of {self.shapes}. Only statistics of the "
                "same space belong together."
            )
        for name, moments in leaves.items():
            self.leaves[name].add(moments)

    def save(self, path: str | Path) -> None:
        """Write them to a file of numpy's ``.npz`` format. One that is there is replaced when all is written."""
        target = Path(path)
        arrays: dict[str, Any] = {"names": np.array(list(self.leaves), dtype=str)}
        for index, moments in enumerate(self.leaves.values()):
            arrays[f"count{index}"] = np.int64(moments.count)
            arrays[f"mean{index}"], arrays[f"squares{index}"] = moments.mean, moments.squares
        part = target.with_name(target.name + ".part")
        with part.open("wb") as file:  # numpy would add a suffix to a name
            np.savez(file, **arrays)
        part.replace(target)

    @classmethod
    def load(cls, path: str | Path) -> RunningStatistics:
        """Return statistics from a file that `save` wrote. Nothing in it is executed.

        Raises:
            ArgumentError: If it is another kind of file.
            OSError: If it cannot be read.
        """
        try:
            with np.load(path, allow_pickle=False) as found:
                names = found["names"].tolist()
                loaded = cls({name: found[f"mean{index}"].shape for index, name in enumerate(names)})
                for index, moments in enumerate(loaded.leaves.values()):
                    moments.count = int(found[f"count{index}"])
                    moments.mean, moments.squares = found[f"mean{index}"], found[f"squares{index}"]
        except (ValueError, LookupError, TypeError, AttributeError, EOFError, zipfile.BadZipFile) as error:
            raise ArgumentError(
                f"path={str(path)!r} is no file of statistics ({type(error).__name__}: {error}). Give one that "
                "RunningStatistics.save() wrote."
            ) from error
        return loaded

    def __repr__(self) -> str:
        """Return one line."""
        return f"<RunningStatistics of {self.shapes}, {self.count:,} seen>"
