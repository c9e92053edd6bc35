"""A recording of a `ParallelEnv`: the caller's calls, and what each worker did."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from parallelenv.contract.batch import Array
from parallelenv.contract.error_text import name_range, show
from parallelenv.errors import ArgumentError
from parallelenv.worker.tracer import WorkerRecord

_Event = tuple[str, str, float, float]
"""Name and category of what is recorded, its begin and its end."""


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
        return float(np.diff(merge(spans).clip(self.begin, self.end)).sum()) / (self.end - self.begin)

    def outside(self, spans: Array) -> Array:
        """Return the times that no span covers: ``(m, 2)``."""
        edges = np.array([[self.begin, self.begin], [self.end, self.end]])
        taken = merge(np.concatenate([spans, edges]))
        free = np.column_stack([taken[:-1, 1], taken[1:, 0]])
        return free[free[:, 1] > free[:, 0]]

    def save_trace(self, path: Path) -> None:
        """Write a trace in the format of Chrome's trace viewer, which Perfetto reads too, one event per line."""
        with path.open("w", encoding="utf-8") as file:
            file.write('{"displayTimeUnit": "ms", "traceEvents": [\n')
            file.write(",\n".join(json.dumps({**event, "pid": 1}) for event in self._events()))
            file.write("\n]}\n")

    def _events(self) -> Iterator[dict[str, Any]]:
        # Perfetto takes thread 0 for the one with the process's number, and would draw its events over that.
        yield {"name": "process_name", "ph": "M", "tid": 1, "args": {"name": "ParallelEnv"}}
        calls = merge(self.calls)
        own = self.outside(calls)
        threads: list[tuple[str, list[_Event]]] = [
            (
                "caller",
                [
                    *(("in a call", "call", begin, end) for begin, end in calls.tolist()),
                    *(("own code", "caller", begin, end) for begin, end in own.tolist()),
                ],
            )
        ]
        for worker in self.workers:
            operations = worker.operations
            turns = zip(worker.owners.tolist(), worker.span_of.tolist(), worker.turns.tolist(), strict=True)
            events: list[_Event] = [
                *((name, "worker", *span) for name, span in zip(operations, worker.spans.tolist(), strict=True)),
                *((f"env {env_id}", operations[span], *turn) for env_id, span, turn in turns),
                *((f"reset env {env_id:.0f}", "reset", begin, end) for begin, end, env_id in worker.resets.tolist()),
            ]
            threads.append((f"worker of envs {name_range(worker.env_ids)} ({worker.process.pid})", events))
        for thread, (title, events) in enumerate(threads, start=1):
            yield {"name": "thread_name", "ph": "M", "tid": thread, "args": {"name": title}}
            # Otherwise "envs 10-11" comes before "envs 2-3".
            yield {"name": "thread_sort_index", "ph": "M", "tid": thread, "args": {"sort_index": thread}}
            for name, category, begin, end in events:
                times = {"ts": round((begin - self.begin) * 1e6, 3), "dur": round((end - begin) * 1e6, 3)}
                yield {"name": name, "cat": category, "ph": "X", "tid": thread, **times}


def merge(spans: Array) -> Array:
    """Return spans, ``(m, 2)``, in order, with overlapping ones merged."""
    if not len(spans):
        return np.zeros((0, 2))
    spans = spans[np.argsort(spans[:, 0], kind="stable")]
    reached = np.maximum.accumulate(spans[:, 1])
    first = np.append(True, spans[1:, 0] > reached[:-1])
    last = np.append(np.flatnonzero(first)[1:], len(spans)) - 1
    return np.column_stack([spans[first, 0], reached[last]])


def checked_path(path: Any, suffix: str) -> Path:
    """Return a path after checking its suffix."""
    target = Path(path) if isinstance(path, (str, Path)) else None
    if target is None or target.suffix.lower() != suffix or "\0" in str(target):
        raise ArgumentError(f"path={show(path)} must be the name of a file that ends in {suffix}.")
    return target
