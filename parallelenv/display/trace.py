"""A recording in the format of Chrome's trace viewer, which Perfetto reads too."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from parallelenv.display.recording import Recording, WorkerRecord, merge

_PROCESS = 1


def write_trace(recording: Recording, path: Path) -> None:
    """Write a trace, an event a line.

    Raises:
        OSError: If it cannot be written.
    """
    with path.open("w", encoding="utf-8") as file:
        file.write('{"displayTimeUnit": "ms", "traceEvents": [\n')
        file.write(",\n".join(json.dumps(event) for event in _events(recording)))
        file.write("\n]}\n")


def _events(recording: Recording) -> Iterator[dict[str, Any]]:
    yield _name("process_name", 0, "ParallelEnv")
    yield _name("thread_name", 0, "caller")
    begin = recording.begin
    calls = merge(recording.calls)
    for start, end in calls.tolist():
        yield _event("in a call", "call", 0, start - begin, end - start)
    for start, end in recording.outside(calls).tolist():
        yield _event("own code", "caller", 0, start - begin, end - start)
    for number, worker in enumerate(recording.workers, start=1):
        yield _name("thread_name", number, f"worker of envs {', '.join(map(str, worker.env_ids))} ({worker.seat.pid})")
        yield from _worker_events(worker, number, begin)


def _worker_events(worker: WorkerRecord, number: int, begin: float) -> Iterator[dict[str, Any]]:
    for name, (start, end) in zip(worker.operations, worker.spans.tolist(), strict=True):
        yield _event(name, "worker", number, start - begin, end - start)
    for env_id, span, (start, end) in zip(
        worker.owners.tolist(), worker.span_of.tolist(), worker.turns.tolist(), strict=True
    ):
        yield _event(f"env {env_id}", worker.operations[span], number, start - begin, end - start)
    for start, end, env_id in worker.resets.tolist():
        yield _event(f"reset env {env_id:.0f}", "reset", number, start - begin, end - start)


def _event(name: str, category: str, thread: int, begin: float, seconds: float) -> dict[str, Any]:
    """Return an event; moments are in microseconds."""
    return {
        "name": name,
        "cat": category,
        "ph": "X",
        "pid": _PROCESS,
        "tid": thread,
        "ts": round(begin * 1e6, 3),
        "dur": round(seconds * 1e6, 3),
    }


def _name(what: str, thread: int, name: str) -> dict[str, Any]:
    return {"name": what, "ph": "M", "pid": _PROCESS, "tid": thread, "args": {"name": name}}
