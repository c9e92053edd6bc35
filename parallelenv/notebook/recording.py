"""A recording of a `ParallelEnv`: the caller's calls, and what each worker did."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from parallelenv.contract.batch import Array
from parallelenv.contract.error_text import show
from parallelenv.errors import ArgumentError
from parallelenv.worker.tracer import WorkerRecord


@dataclass(frozen=True, slots=True, eq=False)
class Recording:
    """The complete recording. Times are in seconds of the caller's `time.perf_counter`.

    Attributes:
        begin: When it begins.
        end: When it ends.
        is_cut: Whether older calls or commands were dropped, so that it begins later than the block.
        calls: ``(m, 2)`` float64: when the caller was in a call of the `ParallelEnv`.
        workers: Record of each worker.
        missing: Ids of envs whose worker sent no record.
    """

    begin: float
    end: float
    is_cut: bool
    calls: Array
    workers: Sequence[WorkerRecord]
    missing: tuple[int, ...]

    @property
    def rebuilt(self) -> tuple[int, ...]:
        """Ids of envs whose worker was rebuilt during the recording; the record of the former one is lost."""
        rebuilt = (worker for worker in self.workers if worker.since > self.begin)
        return tuple(env_id for worker in rebuilt for env_id in worker.env_ids)

    def share(self, spans: Array) -> float:
        """Return the share of the time, 0 to 1, that spans, ``(m, 2)``, take."""
        within = merge(spans).clip(self.begin, self.end)
        return total_length(within) / (self.end - self.begin)

    def outside(self, spans: Array) -> Array:
        """Return the times that no span covers: ``(m, 2)``."""
        edges = np.array([[self.begin, self.begin], [self.end, self.end]])
        taken = merge(np.concatenate([spans, edges]))
        free = np.column_stack([taken[:-1, 1], taken[1:, 0]])
        return free[free[:, 1] > free[:, 0]]


def merge(spans: Array) -> Array:
    """Return spans, ``(m, 2)``, in order, with overlapping ones merged."""
    if not len(spans):
        return np.zeros((0, 2))
    spans = spans[np.argsort(spans[:, 0], kind="stable")]
    reached = np.maximum.accumulate(spans[:, 1])
    first = np.append(True, spans[1:, 0] > reached[:-1])
    last = np.append(np.flatnonzero(first)[1:], len(spans)) - 1
    return np.column_stack([spans[first, 0], reached[last]])


def total_length(spans: Array) -> float:
    """Return the length of spans that do not overlap."""
    return float((spans[:, 1] - spans[:, 0]).sum())


def cover(spans: Array, moments: Array) -> Array:
    """Return, for each time, how many seconds before it are covered by spans, which must come from `merge`."""
    if not len(spans):
        return np.zeros(moments.shape)
    # All spans that began before it, minus what reaches beyond it.
    lengths = np.append(0.0, np.cumsum(spans[:, 1] - spans[:, 0]))
    number = np.searchsorted(spans[:, 0], moments, side="right")
    over = np.where(number > 0, np.maximum(0.0, spans[number - 1, 1] - moments), 0.0)
    taken: Array = lengths[number] - over
    return taken


def checked_path(path: Any, suffix: str) -> Path:
    """Return a path after checking its suffix.

    Raises:
        ArgumentError: If it has another suffix.
    """
    target = Path(path) if isinstance(path, (str, Path)) else None
    if target is None or target.suffix.lower() != suffix or "\0" in str(target):
        raise ArgumentError(f"path={show(path)} must be the name of a file that ends in {suffix}.")
    return target
