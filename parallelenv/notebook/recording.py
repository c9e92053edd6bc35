"""A recording of a `ParallelEnv`: the caller's calls, and what each worker did."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from parallelenv.contract.batch import Array
from parallelenv.contract.error_text import name_range, show
from parallelenv.errors import ArgumentError
from parallelenv.worker.tracer import WorkerRecord


class Track(NamedTuple):
    """What the caller or a worker did: a row of the timeline, and a thread of the trace.

    Attributes:
        title: Name of the row.
        thread: Name of the thread.
        spans: ``(n, 2)`` float64: begin and end of each event, in seconds since the beginning of the recording.
        kinds: ``(n,)`` text: ``"own"`` and ``"call"`` of the caller, ``"worker"`` for the commands of a worker, and the
            operation for what an env did in them.
        names: Name of each event.
    """

    title: str
    thread: str
    spans: Array
    kinds: Array
    names: Sequence[str]


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

    def tracks(self) -> Iterator[Track]:
        """Return everything as events: those of the caller, then those of each worker."""
        calls = merge(self.calls)
        taken = merge(np.concatenate([calls, [[self.begin, self.begin], [self.end, self.end]]]))
        own = np.column_stack([taken[:-1, 1], taken[1:, 0]])
        own = own[own[:, 1] > own[:, 0]]
        names = ["in a call"] * len(calls) + ["own code"] * len(own)
        kinds = np.repeat(["call", "own"], [len(calls), len(own)])
        yield Track("your program", "caller", np.concatenate([calls, own]) - self.begin, kinds, names)
        for worker in self.workers:
            operations = [worker.operations[span] for span in worker.span_of]
            resets = worker.resets[:, 2].astype(int).tolist()
            turns = [*zip(worker.owners.tolist(), operations, strict=True), *((env_id, "reset") for env_id in resets)]
            title = f"env{'s' if len(worker.env_ids) > 1 else ''} {name_range(worker.env_ids)}"
            yield Track(
                title,
                f"worker of envs {name_range(worker.env_ids)} ({worker.process.pid})",
                np.concatenate([worker.spans, worker.turns, worker.resets[:, :2]]) - self.begin,
                np.array(["worker"] * len(worker.spans) + [operation for _, operation in turns], np.str_),
                [*worker.operations, *(f"env {env_id}: {operation}" for env_id, operation in turns)],
            )

    def save_trace(self, path: Path) -> None:
        """Write a trace in the format of Chrome's trace viewer, which Perfetto reads too, one event per line."""
        # Perfetto takes thread 0 for the one with the process's number, and would draw its events over that.
        events: list[dict[str, object]] = [
            {"name": "process_name", "ph": "M", "tid": 1, "args": {"name": "ParallelEnv"}}
        ]
        for thread, track in enumerate(self.tracks(), start=1):
            events.append({"name": "thread_name", "ph": "M", "tid": thread, "args": {"name": track.thread}})
            # Otherwise "envs 10-11" comes before "envs 2-3".
            events.append({"name": "thread_sort_index", "ph": "M", "tid": thread, "args": {"sort_index": thread}})
            microseconds = (track.spans * 1e6).round(3).tolist()
            for name, kind, (begin, end) in zip(track.names, track.kinds.tolist(), microseconds, strict=True):
                times = {"ts": begin, "dur": round(end - begin, 3)}
                events.append({"name": name, "cat": kind, "ph": "X", "tid": thread, **times})
        with path.open("w", encoding="utf-8") as file:
            file.write('{"displayTimeUnit": "ms", "traceEvents": [\n')
            file.write(",\n".join(json.dumps({**event, "pid": 1}) for event in events))
            file.write("\n]}\n")


def merge(spans: Array) -> Array:
    """Return spans, ``(m, 2)``, in order, with overlapping ones merged."""
    if not len(spans):
        return np.zeros((0, 2))
    spans = spans[np.argsort(spans[:, 0], kind="stable")]
    reached = np.maximum.accumulate(spans[:, 1])
    first = np.append(True, spans[1:, 0] > reached[:-1])
    last = np.append(np.flatnonzero(first)[1:], len(spans)) - 1
    return np.column_stack([spans[first, 0], reached[last]])


def checked_path(path: object, suffix: str) -> Path:
    """Return a path after checking its suffix."""
    target = Path(path) if isinstance(path, (str, Path)) else None
    if target is None or target.suffix.lower() != suffix or "\0" in str(target):
        raise ArgumentError(f"path={show(path)} must be the name of a file that ends in {suffix}.")
    return target
