"""The recording of a ``with env.profile() as p`` block: a table of where the time went, a timeline and a trace.

Hosts record the work of their envs (see `HostTracer`). This module records when the caller's calls start and end,
collects the hosts' records, and converts their times to the caller's clock.
"""

from __future__ import annotations

import contextlib
import html
import json
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from time import perf_counter
from types import TracebackType
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from parallelenv.contract.arguments import is_number
from parallelenv.contract.batch import Array
from parallelenv.contract.cpu_cores import usable_cores
from parallelenv.contract.error_text import count, duration, format_table, list_ids, name_range, show
from parallelenv.contract.interrupts import DeferSignals, signal_behind
from parallelenv.contract.protocol import ManageRequest
from parallelenv.contract.worker_info import clock_id, this_process
from parallelenv.engine.thread_guard import single_threaded_in
from parallelenv.engine.tickets import Ticket
from parallelenv.errors import ArgumentError, EnvBusyError, ParallelEnvError, UsageError
from parallelenv.notebook.repr import MOST_WORKERS
from parallelenv.worker.tracer import WorkerRecord

if TYPE_CHECKING:
    from parallelenv.env import ParallelEnv


class Track(NamedTuple):
    """Events of the caller or of a worker: one row in the timeline, and one thread in the trace."""

    title: str  # of the row in the timeline
    thread: str  # name of the thread in the trace
    spans: Array  # ``(n, 2)`` float64: start and end of each event, in seconds since the start of the recording
    # ``(n,)`` text: ``"own"`` or ``"call"`` for events of the caller, ``"worker"`` for commands of a worker, and the
    # operation for events of an env within a command.
    kinds: Array
    names: Sequence[str]  # of each event


@dataclass(frozen=True, slots=True, eq=False)
class Recording:
    """The recording of all calls and workers. Times are in seconds of the caller's `time.perf_counter`."""

    begin: float
    end: float
    is_cut: bool  # whether older calls or commands were dropped, so that the recording starts later than the block
    calls: Array  # ``(m, 2)`` float64: start and end of each call of the `ParallelEnv`
    workers: Sequence[WorkerRecord]
    missing: tuple[int, ...]  # ids of envs whose worker sent no record

    @property
    def rebuilt(self) -> tuple[int, ...]:
        """Ids of envs whose worker was rebuilt during the recording. The records of the previous workers are lost."""
        rebuilt = (worker for worker in self.workers if worker.since > self.begin)
        return tuple(env_id for worker in rebuilt for env_id in worker.env_ids)

    def share(self, spans: Array) -> float:
        """Return the fraction of the recording's duration that ``spans``, an ``(m, 2)`` array, covers."""
        return float(np.diff(merge(spans).clip(self.begin, self.end)).sum()) / (self.end - self.begin)

    def tracks(self) -> Iterator[Track]:
        """Yield the track of the caller, then the track of each worker."""
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
        """Write a trace, one event per line, in the format that Chrome's trace viewer and Perfetto read."""
        # Thread ids start at 1, because Perfetto takes thread 0 for the thread whose id is the process id, and would
        # draw the events of the two threads in one row.
        events: list[dict[str, object]] = [
            {"name": "process_name", "ph": "M", "tid": 1, "args": {"name": "ParallelEnv"}}
        ]
        for thread, track in enumerate(self.tracks(), start=1):
            events.append({"name": "thread_name", "ph": "M", "tid": thread, "args": {"name": track.thread}})
            # Without an index, "envs 10-11" would come before "envs 2-3".
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
    """Merge overlapping spans, given as an ``(m, 2)`` array of starts and ends, and return them sorted by start."""
    if not len(spans):
        return np.zeros((0, 2))
    spans = spans[np.argsort(spans[:, 0], kind="stable")]
    reached = np.maximum.accumulate(spans[:, 1])
    first = np.append(True, spans[1:, 0] > reached[:-1])
    last = np.append(np.flatnonzero(first)[1:], len(spans)) - 1
    return np.column_stack([spans[first, 0], reached[last]])


def checked_path(path: object, suffix: str) -> Path:
    """Return ``path`` as a `Path`. Raise an `ArgumentError` unless it is a file name that ends in ``suffix``."""
    target = Path(path) if isinstance(path, (str, Path)) else None
    if target is None or target.suffix.lower() != suffix or "\0" in str(target):
        raise ArgumentError(f"path={show(path)} must be the name of a file that ends in {suffix}.")
    return target


_WIDTH, _LEFT, _RIGHT, _ROW, _GAP = 900, 130, 40, 22, 6
_MOST_ROWS = 25
_MOST_BLOCKS = 5000
"""Maximum number of blocks in a panel.

More blocks would be too narrow to see and would make the file large, so shades are drawn instead.
"""
_BINS = 300
_STEPS_IN_DETAIL = 8
# These colours are distinct with any colour vision.
_CALLER, _CALL, _STEPS, _RESET = "#e69f00", "#999999", ("#0072b2", "#56b4e9"), "#d55e00"
_WAITING = "#8882"
_COLOURS = {"own": _CALLER, "call": _CALL, "worker": _CALL, "reset": _RESET}
_SHADES = {"own": (_CALLER, "your code:"), "call": (_CALL, "in calls:"), "worker": (_STEPS[0], "works for")}
"""Colour and text of each kind of event that is not part of another event."""
_LEGEND = {
    "your code": (_CALLER,),
    "in a call": (_CALL,),
    "envs step (colours alternate)": _STEPS,
    "envs reset": (_RESET,),
    "waiting": (_WAITING,),
}


class Timeline:
    """A recording, drawn as a timeline that a notebook can display.

    Attributes:
        svg: The picture as self-contained SVG for light and dark backgrounds.
    """

    def __init__(self, svg: str) -> None:
        self.svg = svg

    @classmethod
    def of(cls, recording: Recording, begin: float | None, end: float | None) -> Timeline:
        """Draw a recording. See `Profile.plot` for arguments and errors."""
        seconds = recording.end - recording.begin
        first, last = 0.0 if begin is None else begin, seconds if end is None else end
        if not (is_number(first) and is_number(last)) or not 0 <= first < last or first >= seconds:
            raise ArgumentError(
                f"begin={show(begin)} and end={show(end)}: the recording goes from 0 to {seconds:.6g} s."
            )
        stretches = [(first, min(last, seconds))]
        if begin is None and end is None and len(recording.calls) > 4 * _STEPS_IN_DETAIL:
            # A second panel below shows some consecutive calls in detail. Of all intervals with this number of calls,
            # choose one of median length.
            calls = merge(recording.calls) - recording.begin
            number = min(_STEPS_IN_DETAIL, len(calls))
            spans = calls[number - 1 :, 1] - calls[: len(calls) - number + 1, 0]
            place = int(np.argsort(spans)[len(spans) // 2])
            since, until = calls[place, 0], calls[place + number - 1, 1]
            margin = 0.02 * (until - since)
            stretches.append((max(0.0, since - margin), until + margin))
        parts: list[str] = []
        height = 0
        tracks = list(recording.tracks())
        drawn, left = tracks[:_MOST_ROWS], len(tracks) - _MOST_ROWS
        for stretch in stretches:
            panel, height = _draw(drawn, *stretch, height)
            parts += panel
            if left > 0:
                parts.append(f'<text x="0" y="{height - 11}">... {left:,} more</text>')
        x = _LEFT
        for name, colours in _LEGEND.items():
            for colour in colours:
                parts.append(f'<rect x="{x}" y="{height + 2}" width="12" height="12" fill="{colour}"/>')
                x += 14
            parts.append(f'<text x="{x + 3}" y="{height + 12}">{name}</text>')
            x += 20 + 6 * len(name)
        return cls(
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height + 22}" width="{_WIDTH}" '
            'style="max-width:100%" font-family="sans-serif" font-size="12" fill="currentColor">'
            f"{''.join(parts)}</svg>"
        )

    def save(self, path: str | Path) -> Path:
        """Write the picture to a file whose name ends in ``.svg``, and return the path."""
        target = checked_path(path, ".svg")
        target.write_text(self.svg, encoding="utf-8")
        return target

    def __repr__(self) -> str:
        return f"<Timeline, {len(self.svg):,} bytes of SVG>"

    def _repr_mimebundle_(self, include: object = None, exclude: object = None) -> dict[str, str]:
        """Return the picture as HTML that uses the colours of its surroundings."""
        return {"text/plain": repr(self), "text/html": self.svg}


def _events(track: Track, begin: float, end: float) -> Iterator[tuple[float, float, str, str, float]]:
    inside = np.flatnonzero((track.spans[:, 1] > begin) & (track.spans[:, 0] < end))
    for index, (first, last) in zip(inside.tolist(), track.spans[inside].clip(begin, end).tolist(), strict=True):
        kind = str(track.kinds[index])
        colour = _COLOURS.get(kind, _STEPS[index % 2])
        yield first, last, colour, f"{track.names[index]}, {duration(last - first)}", 0.5 if kind == "worker" else 1.0


def _shades(track: Track, begin: float, end: float) -> Iterator[tuple[float, float, str, str, float]]:
    """Cut an interval into blocks of equal length; yield their start, end, colour, tooltip and opacity.

    Each kind of event has its own blocks. A block's opacity is the fraction of its time that events of its kind take
    up.
    """
    edges, width = np.linspace(begin, end, _BINS + 1), (end - begin) / _BINS
    for kind, (colour, label) in _SHADES.items():
        spans = merge(np.concatenate([track.spans[track.kinds == kind], [[end, end]]]))
        ends = np.cumsum(np.diff(spans)[:, 0])  # the time taken up to the end of each span
        taken = np.interp(edges, spans.ravel(), np.column_stack([np.append(0, ends[:-1]), ends]).ravel())
        for first, share in zip(edges.tolist(), (np.diff(taken) / width).clip(0, 1).tolist(), strict=False):
            if share > 0.005:
                yield first, first + width, colour, f"{label} {share:.0%} of {duration(width)}", share


def _draw(tracks: Sequence[Track], begin: float, end: float, top: int) -> tuple[list[str], int]:
    scale = (_WIDTH - _LEFT - _RIGHT) / (end - begin)
    parts = []
    y = top + 30
    for track in tracks:
        parts.append(f'<text x="0" y="{y + 15}">{html.escape(track.title)}</text>')
        parts.append(f'<rect x="{_LEFT}" y="{y}" width="{_WIDTH - _LEFT - _RIGHT}" height="{_ROW}" fill="{_WAITING}"/>')
        is_inside = (track.spans[:, 1] > begin) & (track.spans[:, 0] < end)
        blocks = _events if is_inside.sum() <= _MOST_BLOCKS // len(tracks) else _shades
        for first, last, colour, tooltip, opacity in blocks(track, begin, end):
            parts.append(
                f'<rect x="{(first - begin) * scale + _LEFT:.2f}" width="{max(0.3, (last - first) * scale):.2f}" '
                f'y="{y}" height="{_ROW}" fill="{colour}" fill-opacity="{opacity:.2f}">'
                f"<title>{html.escape(tooltip)}</title></rect>"
            )
        y += _ROW + _GAP
    # Two to seven vertical lines at round times. Their labels, such as "0.25 s" or "12,500 µs", have a unit that suits
    # the distance between lines.
    rough = (end - begin) / 6
    size = 10.0 ** np.floor(np.log10(rough))
    step = next(size * factor for factor in (1, 2, 5, 10) if size * factor >= rough)
    unit, unit_size = ("s", 1.0) if step >= 0.1 else ("ms", 1e-3) if step >= 1e-4 else ("µs", 1e-6)
    for number in range(int(np.ceil(begin / step - 1e-9)), int(end / step + 1e-9) + 1):
        x, moment = (number * step - begin) * scale + _LEFT, f"{number * step / unit_size:,.10g} {unit}"
        parts.append(f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{top + 26}" y2="{y}" stroke="#8886"/>')
        parts.append(f'<text x="{x:.1f}" y="{top + 21}" text-anchor="middle">{moment}</text>')
    return parts, y + 26


COLLECT_TIMEOUT = 5.0
"""Time limit in seconds for workers to send their records."""
INTERRUPTED_TIMEOUT = 0.2
"""Time limit in seconds for workers to send their records after Ctrl-C."""
MOST_CALLS = 1_000_000
"""Maximum number of calls that are kept; older calls are dropped."""
_CHECK_INTERVAL = 1e-3
"""Seconds between checks of whether another thread's call has ended."""
_MUCH = 0.2
"""Minimum share of the time that transport or waiting for stragglers must take before the advice is about them."""


class Profile:
    """The recording of a ``with env.profile() as p`` block.

    Before the end of the block, `summary`, `plot` and `save` raise a `UsageError`.
    """

    finished: Recording | None = None

    @property
    def recording(self) -> Recording:
        """The recording. Access before the end of the ``with`` block raises a `UsageError`."""
        if self.finished is None:
            raise UsageError("Nothing is recorded yet: call this after the block `with env.profile() as p`.")
        return self.finished

    def summary(self) -> Summary:
        """Return a summary of where the time went, with advice. The summary is displayed as a table."""
        return summarise(self.recording)

    def plot(self, begin: float | None = None, end: float | None = None, path: str | Path | None = None) -> Timeline:
        """Return a timeline of when each worker ran. A notebook displays the timeline.

        If neither ``begin`` nor ``end`` is given, a long recording gets a second panel, which shows a few consecutive
        calls in detail.

        Args:
            begin: Start of the timeline, in seconds from the start of the recording; ``None`` means the start of the
                recording.
            end: End of the timeline, in seconds from the start of the recording; ``None`` means the end of the
                recording.
            path: File to which the timeline is also written. The name must end in ``.svg``.

        Raises:
            ArgumentError: If ``begin`` is not before ``end`` or is outside the recording, or if ``path`` has a
                different suffix.
            OSError: If the file cannot be written.
        """
        timeline = Timeline.of(self.recording, begin, end)
        if path is not None:
            timeline.save(path)
        return timeline

    def save(self, path: str | Path) -> Path:
        """Write a trace for Perfetto (ui.perfetto.dev) or ``chrome://tracing``, and return the path.

        Args:
            path: File name that ends in ``.json``. An existing file is replaced.

        Raises:
            ArgumentError: If ``path`` has a different suffix.
            OSError: If the file cannot be written.
        """
        target = checked_path(path, ".json")
        self.recording.save_trace(target)
        return target

    def __repr__(self) -> str:
        return "<Profile, still recording>" if self.finished is None else repr(self.summary())


class Recorder:
    """A context manager that records a `ParallelEnv`.

    In the ``with`` block, it is the ``tracer`` of the `ParallelEnv`'s `Guard`.
    """

    def __init__(self, env: ParallelEnv) -> None:
        self._engine = env.engine
        self._guard = env.engine.guard
        self._profile = Profile()
        self._calls: deque[tuple[float, float]] = deque(maxlen=MOST_CALLS)
        self._call_begun: float | None = None  # start of the call in progress; an interrupted call may have no end

    def begin(self) -> None:
        """Record the start of a call."""
        self._call_begun = perf_counter()

    def end(self) -> None:
        """Record the end of the call."""
        if self._call_begun is not None:  # recording may have started within the call
            self._calls.append((self._call_begun, perf_counter()))
            self._call_begun = None

    @single_threaded_in("profile")
    def __enter__(self) -> Profile:
        pool = self._engine.pool
        if pool.is_traced:
            raise EnvBusyError("This ParallelEnv is already being recorded. End that block before you profile again.")
        asked = perf_counter()
        try:
            ticket = self._send("start_trace")
            pool.wait(ticket, pool.timeout)
            ticket.raise_failures()
            middle = (asked + perf_counter()) / 2
            self._clocks: dict[int, tuple[str, float]] = {
                env_id: (clock, middle - now) for env_id, (clock, now) in ticket.values.items()
            }
            self._begun = perf_counter()
            pool.is_traced, self._guard.tracer = True, self
        except BaseException:  # recording makes steps slower
            with DeferSignals(), contextlib.suppress(ParallelEnvError):
                pool.is_traced, self._guard.tracer = False, None
                self._send("stop_trace")
            raise
        return self._profile

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, frames: TracebackType | None
    ) -> None:
        """Stop recording, and collect the workers' records, unless `finish` has done so."""
        if error is not None and signal_behind(error) is not None:
            self._finish(INTERRUPTED_TIMEOUT, False)
        else:
            self._finish(COLLECT_TIMEOUT, True)

    def finish(self) -> None:
        """Stop recording before the `ParallelEnv` is closed. Records of busy workers are lost."""
        if not self._guard.users:  # otherwise, the object is being closed within another call
            self._finish(INTERRUPTED_TIMEOUT, False)

    def _finish(self, timeout: float, resumes: bool) -> None:
        """Stop recording, and collect the workers' records. For the arguments see `_collect`.

        There are no records of workers that are dead or do not reply in time.
        """
        if self._profile.finished is not None:
            return
        ended = perf_counter()
        self._guard.tracer = None
        self._engine.pool.is_traced = False
        deadline = time.monotonic() + timeout
        workers: list[WorkerRecord] = []
        while True:
            left = max(0.0, deadline - time.monotonic())
            try:
                workers = self._collect(left, resumes)
            except ParallelEnvError as wrong:  # for example, the object was closed, or another thread is in a call
                if isinstance(wrong, UsageError) and left:
                    time.sleep(_CHECK_INTERVAL)
                    continue
            break
        missing = set(self._engine.env_ids).difference(*(worker.env_ids for worker in workers))
        oldest_call = self._calls[0][0] if len(self._calls) == self._calls.maxlen else 0.0  # older calls were dropped
        begun = max([self._begun, oldest_call, *(worker.since for worker in workers if worker.is_cut)])
        ended = max(ended, begun + _CHECK_INTERVAL)  # clocks of two machines may disagree
        unfinished = [] if self._call_begun is None else [(self._call_begun, ended)]
        calls = np.array([*self._calls, *unfinished]).reshape(-1, 2)
        self._profile.finished = Recording(
            begun,
            ended,
            begun > self._begun,
            calls[(calls[:, 0] < ended) & (calls[:, 1] > begun)].clip(begun, ended),
            sorted(workers, key=lambda worker: worker.env_ids),
            tuple(sorted(missing)),
        )

    @single_threaded_in("profile")
    def _collect(self, timeout: float, resumes: bool) -> list[WorkerRecord]:
        """Stop recording in hosts, and return the records received within ``timeout`` seconds.

        Unless ``resumes`` is true, do not wait if waiting would resume an interrupted command in the caller's thread.
        """
        pool = self._engine.pool
        is_held_up = not resumes and pool.is_held_up
        asked = perf_counter()
        with DeferSignals():  # otherwise, a second interrupt could make the hosts record for ever
            ticket = self._send("stop_trace")
        if not is_held_up:
            with contextlib.suppress(ParallelEnvError):  # some workers sent nothing; the other records have arrived
                pool.wait(ticket, timeout)
        middle = (asked + perf_counter()) / 2
        records = [record for record in ticket.values.values() if isinstance(record, WorkerRecord)]
        return [self._aligned(record, middle) for record in records]

    def _send(self, request: ManageRequest) -> Ticket:
        pool = self._engine.pool
        return pool.submit("manage", sorted(set(pool.env_ids).difference(pool.dead_env_ids)), None, request)

    def _aligned(self, record: WorkerRecord, received: float) -> WorkerRecord:
        """Return a worker's record with all times converted to the caller's clock.

        Times from another machine are off by 0.1 ms or more.
        """
        if record.clock == clock_id():
            return record
        # The offset measured at the start of the recording is preferred, because that reply took less time. The offset
        # is unknown if the host has since been rebuilt on another machine.
        clock, offset = self._clocks.get(record.env_ids[0], ("", 0.0))
        return record.later(offset if clock == record.clock else received - record.now)


# ---------------------------------------------------------------- the summary


@dataclass(frozen=True, slots=True)
class EnvTime:
    """Durations of an env's steps.

    Attributes:
        env_id: Id of the env.
        steps: Number of steps recorded.
        mean: Mean seconds per step, including a reset within the step.
        longest: Duration of the longest step in seconds.
    """

    env_id: int
    steps: int
    mean: float
    longest: float


@dataclass(frozen=True, slots=True)
class Summary:
    """A summary of where the time went. Shares are fractions of ``seconds``.

    ``caller_share``, ``transport_share`` and ``env_share`` add up to 1.

    Attributes:
        seconds: Duration of the recording.
        caller_share: Share of the time in which the caller's own code ran, outside the `ParallelEnv`, and no worker
            ran.
        transport_share: Share of the time in which the caller was in a call of the `ParallelEnv`, and no worker ran.
        env_share: Share of the time in which at least one worker ran.
        straggler_loss: Part of ``env_share`` in which a worker waited for other workers, averaged over workers.
        policy_share: Part of ``env_share`` in which a worker ran the policy of a rollout, averaged over workers.
        busy: For each worker, in the order of ``workers``, the share of the time in which it ran.
        workers: Env ids of each worker.
        envs: An `EnvTime` for each env that was stepped; all envs of a vector env count as its first one.
        missing: Ids of envs whose worker sent no record, because it died or was still busy.
        rebuilt: Ids of envs whose worker was rebuilt; the record of the former worker is lost.
        is_cut: Whether the start of the recording is missing because its oldest events were dropped. If so, the other
            figures cover only the rest.
        advice: Advice in one line.
    """

    seconds: float
    caller_share: float
    transport_share: float
    env_share: float
    straggler_loss: float
    policy_share: float
    busy: tuple[float, ...]
    workers: tuple[tuple[int, ...], ...]
    envs: tuple[EnvTime, ...]
    missing: tuple[int, ...]
    rebuilt: tuple[int, ...]
    is_cut: bool
    advice: str = ""

    @property
    def slowest(self) -> EnvTime | None:
        """The `EnvTime` of the env whose steps take longest on average; ``None`` if no env was stepped."""
        return max(self.envs, key=lambda env: env.mean, default=None)

    def __repr__(self) -> str:
        rows = [
            ("your code", self.caller_share, "your program ran outside the ParallelEnv, and no worker ran"),
            ("transport", self.transport_share, "a call ran or waited, and no worker ran"),
            ("workers", self.env_share, "at least one worker ran"),
        ]
        if len(self.workers) > 1:
            rows.append(("  stragglers", self.straggler_loss, "part of it: the average worker waited for slower ones"))
        if self.policy_share >= 0.001:
            rows.append(("  policy", self.policy_share, "part of it: the average worker ran the policy, in rollouts"))
        shown = [(name, f"{share:.1%}", meaning) for name, share, meaning in rows]
        lines = [f"{duration(self.seconds)} recorded, {count(len(self.workers), 'worker')}"]
        lines.append(format_table(("where", "share", "what"), shown, left=("where", "what")))
        workers = [(name_range(ids), f"{busy:.1%}") for ids, busy in zip(self.workers, self.busy, strict=True)]
        if workers:
            table = format_table(("worker of envs", "busy"), workers[:MOST_WORKERS], left=("worker of envs",))
            lines += ["", table]
        if len(workers) > MOST_WORKERS:
            lines.append(f"... and {count(len(workers) - MOST_WORKERS, 'more worker')}")
        if slowest := self.slowest:
            usual = float(np.median([env.mean for env in self.envs]))
            lines += [
                "",
                f"slowest env: {slowest.env_id}, {duration(slowest.mean)} per step on average, "
                f"{duration(slowest.longest)} at most (median env: {duration(usual)} per step)",
            ]
        if self.missing:
            lines.append(f"not recorded: envs {list_ids(self.missing)}, whose workers died or were still busy")
        if self.rebuilt:
            lines.append(f"recorded only since their workers were rebuilt: envs {list_ids(self.rebuilt)}")
        if self.is_cut:
            lines.append("incomplete: only the latest million calls and steps are kept, and older ones are missing")
        return "\n".join([*lines, f"advice: {self.advice}"])


def summarise(recording: Recording) -> Summary:
    """Return the summary of a recording."""
    share, workers = recording.share, recording.workers
    busy = [share(worker.spans) for worker in workers]
    some = np.concatenate([np.zeros((0, 2)), *(worker.spans for worker in workers)])
    env_share, occupied = share(some), share(np.concatenate([some, recording.calls]))
    envs, policies = [], []
    for worker in workers:
        is_step, is_rollout = worker.of_operation("step"), worker.of_operation("rollout")
        # The steps of a rollout are recorded separately; the rest of the rollout is the policy's time.
        policies.append(share(worker.spans) - share(worker.spans[~is_rollout]) if is_rollout.any() else 0.0)
        is_step_turn = is_step[worker.span_of]
        durations, owners = np.diff(worker.turns[is_step_turn], axis=1)[:, 0], worker.owners[is_step_turn]
        for env_id in worker.env_ids:
            own = durations[owners == env_id]
            if len(own):
                envs.append(EnvTime(env_id, len(own), float(own.mean()), float(own.max())))
    found = Summary(
        seconds=recording.end - recording.begin,
        caller_share=1 - occupied,
        transport_share=occupied - env_share,
        env_share=env_share,
        straggler_loss=max(0.0, env_share - float(np.mean(busy))) if busy else 0.0,
        policy_share=float(np.mean(policies)) if policies else 0.0,
        busy=tuple(busy),
        workers=tuple(worker.env_ids for worker in workers),
        envs=tuple(sorted(envs, key=lambda env: env.env_id)),
        missing=recording.missing,
        rebuilt=recording.rebuilt,
        is_cut=recording.is_cut,
    )
    return replace(found, advice=_advise(recording, found))


def _advise(recording: Recording, found: Summary) -> str:
    steps, takes = [env.steps for env in found.envs], f"envs take {found.env_share:.0%} of the time"
    if unknown := sorted({*found.missing, *found.rebuilt}):
        return (
            f"the work of the workers of envs {list_ids(unknown)} is not completely known, and the rest counts as "
            "transport; profile again while they are alive."
        )
    slowest = found.slowest
    if slowest is None:
        return "no env was stepped; profile some steps."
    if found.caller_share >= max(found.transport_share, found.env_share):
        # A lone worker in this process may be the caller's thread, in which nothing runs in the meantime.
        is_alone = [worker.process for worker in recording.workers] == [this_process()]
        where = " in para_mode='subproc'" if is_alone else ""
        return (
            f"your own code takes {found.caller_share:.0%} of the time, so faster envs would not help; use "
            f"send() and recv(){where} to let envs work in the meantime."
        )
    if found.transport_share > max(_MUCH, found.straggler_loss):
        return _advise_on_transport(recording, found)
    if found.straggler_loss > _MUCH and max(steps) > 1.5 * min(steps):
        return (
            f"{takes}, and do not wait for each other; workers are idle for {found.straggler_loss:.0%} of it, while "
            "your policy acts or because nothing was left to do."
        )
    if found.straggler_loss > _MUCH:
        return (
            f"workers wait for the slowest of them {found.straggler_loss:.0%} of the time (env {slowest.env_id} takes "
            f"{duration(slowest.mean)} a step); use send() and recv(min_envs=...) to continue with ready envs."
        )
    if len(found.workers) == 1 < min(usable_cores(), len(found.envs)):
        return (
            f"{takes} in one worker, and there are {usable_cores()} cores; try para_mode='subproc' (or let 'auto' "
            "choose)."
        )
    return f"{takes}; only faster envs or more cores would help."


def _advise_on_transport(recording: Recording, found: Summary) -> str:
    workers, share = recording.workers, f"take {found.transport_share:.0%} of the time"
    fewer = ["fewer workers (num_cpus)"] if len(workers) > 1 else []
    in_rollouts = sum(recording.share(worker.spans[worker.of_operation("rollout")]) for worker in workers)
    if in_rollouts > sum(found.busy) / 2:
        what = f"messages and joining rollouts {share}"
        ways = ["more steps in each rollout()", *fewer, "envs with smaller states"]
    else:
        what = f"messages and building results {share}, because steps are short"
        ways = ["rollout(), which makes many steps with one call", "more envs in each step", *fewer]
        is_away = [worker.process.pid != this_process().pid for worker in workers]
        if fewer and all(is_away):
            ways.append("caller_steps=True of para_mode='subproc'")
        if (fewer or is_away[0]) and found.transport_share > found.env_share:
            ways.append("para_mode='dummy', which needs no messages")
    return f"{what}; to reduce this: {'; '.join(ways)}."
