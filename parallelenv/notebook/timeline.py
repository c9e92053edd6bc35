"""The recording that `ParallelEnv.profile` makes of calls and workers, and its display as a timeline or a trace."""

from __future__ import annotations

import html
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from parallelenv.contract.arguments import is_number
from parallelenv.contract.batch import Array
from parallelenv.contract.error_text import duration, name_range, show
from parallelenv.errors import ArgumentError
from parallelenv.worker.tracer import WorkerRecord


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
    """Yield the start, end, colour, tooltip and opacity of each event in an interval."""
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
    """Return the SVG elements of a panel with its upper edge at y = ``top``, and the y of its lower edge."""
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
