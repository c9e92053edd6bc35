"""A recording of a `ParallelEnv`: the caller's calls, and what each worker did."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from parallelenv.contract.batch import Array
from parallelenv.contract.error_text import show
from parallelenv.contract.process_info import ProcessInfo
from parallelenv.errors import ArgumentError
from parallelenv.worker.tracer import HostRecord


@dataclass(frozen=True, slots=True, eq=False)
class WorkerRecord:
    """The record of a worker. All times are in seconds of the caller's `time.perf_counter`.

    Attributes:
        env_ids: Its envs.
        process: Its process.
        operations: See `HostRecord`.
        spans: See `HostRecord`.
        turns: ``(k, 2)`` float64: begin and end of each env's part of a command.
        owners: ``(k,)`` int64: env ids of the turns.
        is_step: ``(k,)`` bool: whether the turn was a step.
        span_of: ``(k,)`` int64: index of the span that each turn is part of.
        stands_for: See `HostRecord`.
        resets: See `HostRecord`.
        is_full: See `HostRecord`.
        since: See `HostRecord`.
    """

    env_ids: tuple[int, ...]
    process: ProcessInfo
    operations: Sequence[str]
    spans: Array
    turns: Array
    owners: Array
    is_step: Array
    span_of: Array
    stands_for: Array
    resets: Array
    is_full: bool
    since: float

    @classmethod
    def of(cls, record: HostRecord, offset: float) -> WorkerRecord:
        """Return a host's record in the caller's time. ``offset`` is the caller's clock minus the host's."""
        span_of = np.repeat(np.arange(len(record.counts)), record.counts)
        ends = np.append(record.moments[1:], 0.0)
        is_last = np.append(span_of[1:] != span_of[:-1], True) if len(span_of) else np.zeros(0, bool)
        ends = ends[: len(span_of)]
        ends[is_last] = record.spans[span_of[is_last], 1]
        is_step = np.array([name == "step" for name in record.operations], bool)
        turns = np.column_stack([record.moments, ends]) + offset
        resets = record.resets.copy()
        resets[:, :2] += offset
        return cls(
            record.env_ids,
            record.process,
            record.operations,
            record.spans + offset,
            turns,
            record.owners,
            is_step[span_of],
            span_of,
            record.stands_for,
            resets,
            record.is_full,
            record.since + offset,
        )

    def busy(self) -> Array:
        """Return the times in which it worked: ``(m, 2)``, in order."""
        return merge(self.spans)


@dataclass(frozen=True, slots=True, eq=False)
class Recording:
    """The complete recording.

    Attributes:
        begin: Time of the caller's `time.perf_counter`.
        end: Likewise.
        windows: ``(w, 2)`` float64: intervals that were recorded completely, in order. Only one, from begin to end,
            unless steps were so fast that some were skipped.
        calls: ``(m, 2)`` float64: when the caller was in a call of the `ParallelEnv`.
        workers: Record of each worker.
        missing: Ids of envs whose worker sent no record.
    """

    begin: float
    end: float
    windows: Array
    calls: Array
    workers: Sequence[WorkerRecord]
    missing: tuple[int, ...]

    @property
    def rebuilt(self) -> tuple[int, ...]:
        """Ids of envs whose worker was rebuilt during the recording; the record of the former one is lost."""
        return tuple(env_id for worker in self.workers if worker.since > self.begin for env_id in worker.env_ids)

    @property
    def weights(self) -> Array:
        """``(w,)`` float64: the time since the previous window's end, relative to the length of the window."""
        ends = self.windows[:, 1].copy()
        ends[-1] = self.end
        weights: Array = np.diff(ends, prepend=self.begin) / (self.windows[:, 1] - self.windows[:, 0])
        return weights

    def window_of(self, moments: Array) -> Array:
        """Return the index of the window that each time is in or after."""
        return np.maximum(np.searchsorted(self.windows[:, 0], moments, side="right") - 1, 0)

    def share(self, spans: Array) -> float:
        """Return the share of the time, 0 to 1, that spans, ``(m, 2)``, take, extrapolated to skipped parts."""
        taken = np.diff(cover(merge(spans), self.windows), axis=1)[:, 0]
        return float(self.weights @ taken) / (self.end - self.begin)

    def outside(self, spans: Array) -> Array:
        """Return the times within the windows that no span covers: ``(m, 2)``."""
        edges = [self.begin], self.windows.ravel(), [self.end]
        taken = merge(np.concatenate([spans, np.concatenate(edges).reshape(-1, 2)]))
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
