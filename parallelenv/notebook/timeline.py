"""A recording as a picture: which worker ran when."""

from __future__ import annotations

import html
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from parallelenv.contract.arguments import is_number
from parallelenv.contract.batch import Array
from parallelenv.contract.error_text import duration, name_range, show
from parallelenv.errors import ArgumentError
from parallelenv.notebook.recording import Recording, checked_path, merge
from parallelenv.worker.tracer import WorkerRecord

_WIDTH, _LEFT, _RIGHT, _ROW, _GAP = 900, 130, 40, 22, 6
_MOST_ROWS = 24
_MOST_BLOCKS = 2500
"""Maximum number of blocks drawn: more would be too narrow to see and make the file large. Then shades are drawn."""
_BINS = 300
_STEPS_IN_DETAIL = 8
_CALLER, _CALL, _WORK, _RESET = "#e69f00", "#999999", ("#0072b2", "#56b4e9"), "#d55e00"  # for any colour vision
_WAITING = "#8882"
_LEGEND = (
    ((_CALLER,), "your code"),
    ((_CALL,), "in a call"),
    (_WORK, "envs step (colours alternate)"),
    ((_RESET,), "envs reset"),
    ((_WAITING,), "waiting"),
)


class _Block(NamedTuple):
    """An interval that is drawn: begin and end in seconds since the beginning of the recording, and a tooltip."""

    begin: float
    end: float
    colour: str
    said: str
    opacity: float = 1.0


class Timeline:
    """A picture of a recording. A notebook displays it.

    Attributes:
        svg: The picture as SVG, self-contained, for light and dark backgrounds.
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
        if begin is None and end is None and _num_blocks(recording, *stretches[0]) > _MOST_BLOCKS // 8:
            stretches.append(_some_steps(recording))
        parts: list[str] = []
        height = 0
        for stretch in stretches:
            panel, height = _draw(_rows(recording, *stretch), *stretch, height)
            parts += panel
        x = _LEFT
        for colours, name in _LEGEND:
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
        """Return one line."""
        return f"<Timeline, {len(self.svg):,} bytes of SVG>"

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, str]:
        """Return the picture as HTML that takes the colours of its surroundings."""
        return {"text/plain": repr(self), "text/html": self.svg}


def _num_blocks(recording: Recording, begin: float, end: float) -> int:
    moments = [worker.turns[:, 0] - recording.begin for worker in recording.workers]
    return sum(int(((one >= begin) & (one < end)).sum()) for one in moments) + len(recording.calls)


def _some_steps(recording: Recording) -> tuple[float, float]:
    """Return an interval of some consecutive calls, of median length among such intervals."""
    calls = merge(recording.calls) - recording.begin
    number = min(_STEPS_IN_DETAIL, len(calls))
    if not number:
        return 0.0, recording.end - recording.begin
    spans = calls[number - 1 :, 1] - calls[: len(calls) - number + 1, 0]
    place = int(np.argsort(spans)[len(spans) // 2])
    begin, end = calls[place, 0], calls[place + number - 1, 1]
    margin = 0.02 * (end - begin)
    return max(0.0, begin - margin), end + margin


def _rows(recording: Recording, begin: float, end: float) -> list[tuple[str, list[_Block]]]:
    """Return the rows of an interval: one for the caller, and one for each worker."""

    def within(spans: Array) -> Array:
        spans = merge(spans) - recording.begin
        return spans[(spans[:, 1] > begin) & (spans[:, 0] < end)].clip(begin, end)

    calls, own = within(recording.calls), within(recording.outside(recording.calls))
    if len(calls) + len(own) <= _MOST_BLOCKS:
        caller = [
            _Block(first, last, colour, f"{said}, {duration(last - first)}")
            for spans, colour, said in ((calls, _CALL, "in a call"), (own, _CALLER, "your code"))
            for first, last in spans.tolist()
        ]
    else:
        caller = _shaded(calls, begin, end, _CALL, "in calls:") + _shaded(own, begin, end, _CALLER, "your code:")
    rows = [("your program", caller)]
    is_detailed = _num_blocks(recording, begin, end) <= _MOST_BLOCKS
    for worker in recording.workers[:_MOST_ROWS]:
        busy = within(worker.spans)
        if is_detailed:
            blocks = [
                _Block(first, last, _CALL, f"the worker works, {duration(last - first)}", 0.5)
                for first, last in busy.tolist()
            ]
            blocks += _turns(worker, recording.begin, begin, end)
        else:
            blocks = _shaded(busy, begin, end, _WORK[0], "works for")
        rows.append((f"env{'s' if len(worker.env_ids) > 1 else ''} {name_range(worker.env_ids)}", blocks))
    left = len(recording.workers) - _MOST_ROWS
    return [*rows, (f"... {left:,} more", [])] if left > 0 else rows


def _turns(worker: WorkerRecord, offset: float, begin: float, end: float) -> list[_Block]:
    """Return blocks of each env's turns, and of resets within steps above them."""
    operations = [worker.operations[index] for index in worker.span_of]
    turns = zip(worker.owners.tolist(), operations, (worker.turns - offset).tolist(), strict=True)
    resets = ((int(owner), "reset", (first - offset, last - offset)) for first, last, owner in worker.resets.tolist())
    return [
        _Block(
            max(begin, first),
            min(end, last),
            _RESET if operation == "reset" else _WORK[worker.env_ids.index(env_id) % 2],
            f"env {env_id}: {operation}, {duration(min(end, last) - max(begin, first))}",
        )
        for env_id, operation, (first, last) in (*turns, *resets)
        if last > begin and first < end
    ]


def _shaded(spans: Array, begin: float, end: float, colour: str, said: str) -> list[_Block]:
    """Return blocks of equal length, darker where spans, which do not overlap, take more of them."""
    edges = np.linspace(begin, end, _BINS + 1)
    lengths = np.diff(spans)[:, 0]
    taken_at = np.column_stack([np.cumsum(lengths) - lengths, np.cumsum(lengths)])  # time taken at each begin and end
    taken = np.interp(edges, spans.ravel(), taken_at.ravel()) if len(spans) else np.zeros(_BINS + 1)
    width = (end - begin) / _BINS
    shares = (np.diff(taken) / width).clip(0, 1).tolist()
    return [
        _Block(first, first + width, colour, f"{said} {share:.0%} of {duration(width)}", share)
        for first, share in zip(edges.tolist(), shares, strict=False)
        if share > 0.005
    ]


def _draw(rows: Sequence[tuple[str, list[_Block]]], begin: float, end: float, top: int) -> tuple[list[str], int]:
    """Return a panel below ``top``, and where it ends."""
    scale = (_WIDTH - _LEFT - _RIGHT) / (end - begin)
    parts = []
    y = top + 30
    for name, blocks in rows:
        parts.append(f'<text x="0" y="{y + 15}">{html.escape(name)}</text>')
        parts.append(f'<rect x="{_LEFT}" y="{y}" width="{_WIDTH - _LEFT - _RIGHT}" height="{_ROW}" fill="{_WAITING}"/>')
        for block in blocks:
            x, width = (block.begin - begin) * scale + _LEFT, max(0.3, (block.end - block.begin) * scale)
            opacity = "" if block.opacity == 1 else f' fill-opacity="{block.opacity:.2f}"'
            parts.append(
                f'<rect x="{x:.2f}" y="{y}" width="{width:.2f}" height="{_ROW}" fill="{block.colour}"{opacity}>'
                f"<title>{html.escape(block.said)}</title></rect>"
            )
        y += _ROW + _GAP
    # Five to ten lines at round times, with labels.
    rough = (end - begin) / 6
    size = 10.0 ** np.floor(np.log10(rough))
    step = next(size * factor for factor in (1, 2, 5, 10) if size * factor >= rough)
    for number in range(int(np.ceil(begin / step - 1e-9)), int(end / step + 1e-9) + 1):
        x = (number * step - begin) * scale + _LEFT
        parts.append(f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{top + 26}" y2="{y}" stroke="#8886"/>')
        parts.append(f'<text x="{x:.1f}" y="{top + 21}" text-anchor="middle">{_moment(number * step, step)}</text>')
    return parts, y + 26


def _moment(seconds: float, step: float) -> str:
    """Return a time in the unit of the distance between the lines: ``0.25 s``, ``12,500 µs``."""
    unit, size = next((one for one in (("s", 1.0), ("ms", 1e-3)) if step >= 0.1 * one[1]), ("µs", 1e-6))
    return f"{f'{seconds / size:,.6f}'.rstrip('0').rstrip('.')} {unit}"
