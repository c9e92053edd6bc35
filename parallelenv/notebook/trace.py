"""A recording in the format of Chrome's trace viewer, which Perfetto reads too."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from parallelenv.contract.error_text import name_range
from parallelenv.notebook.recording import Recording, merge
from parallelenv.worker.tracer import WorkerRecord

_PROCESS = 1
_CALLER = 1
"""Thread number of the caller; workers have the following ones. Perfetto takes thread 0 for the one with the process's
number, and would draw its events over that."""


def write_trace(recording: Recording, path: Path) -> None:
    """Write a trace, one event per line.

    Raises:
        OSError: If it cannot be written.
    """
    with path.open("w", encoding="utf-8") as file:
        file.write('{"displayTimeUnit": "ms", "traceEvents": [\n')
        file.write(",\n".join(json.dumps(event) for event in _events(recording)))
        file.write("\n]}\n")


def _events(recording: Recording) -> Iterator[dict[str, Any]]:
    yield _said("process_name", _CALLER, name="ParallelEnv")
    yield from _named(_CALLER, "caller")
    begin = recording.begin
    calls = merge(recording.calls)
    for start, end in calls.tolist():
        yield _event("in a call", "call", _CALLER, start - begin, end - start)
    for start, end in recording.outside(calls).tolist():
        yield _event("own code", "caller", _CALLER, start - begin, end - start)
    for number, worker in enumerate(recording.workers, start=_CALLER + 1):
        yield from _named(number, f"worker of envs {name_range(worker.env_ids)} ({worker.process.pid})")
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
    """Return an event; times are in microseconds."""
    return {
        "name": name,
        "cat": category,
        "ph": "X",
        "pid": _PROCESS,
        "tid": thread,
        "ts": round(begin * 1e6, 3),
        "dur": round(seconds * 1e6, 3),
    }


def _named(thread: int, name: str) -> Iterator[dict[str, Any]]:
    yield _said("thread_name", thread, name=name)
    yield _said("thread_sort_index", thread, sort_index=thread)  # otherwise "envs 10-11" comes before "envs 2-3"


def _said(what: str, thread: int, **arguments: Any) -> dict[str, Any]:
    return {"name": what, "ph": "M", "pid": _PROCESS, "tid": thread, "args": arguments}
