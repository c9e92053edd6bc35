"""A recording as a picture: which worker ran when."""

from __future__ import annotations

import html
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from parallelenv.contract.arguments import is_number
from parallelenv.contract.batch import Array
from parallelenv.contract.error_text import duration, name_range, show
from parallelenv.errors import ArgumentError
from parallelenv.notebook.recording import Recording, checked_path, cover, merge
from parallelenv.worker.tracer import WorkerRecord

_WIDTH, _LEFT, _RIGHT, _ROW, _GAP = 900, 130, 40, 22, 6
_MOST_ROWS = 24
_MOST_BLOCKS = 2500
"""Maximum number of blocks drawn: more would be too narrow to see and make the file large. Then shades are drawn."""
_BINS = 300
_STEPS_IN_DETAIL = 8
_CALLER, _CALL, _WORK, _RESET = "#e69f00", "#999999", ("#0072b2", "#56b4e9"), "#d55e00"  # for any colour vision
_LEGEND = (
    ((_CALLER,), "your code"),
    ((_CALL,), "in a call"),
    (_WORK, "envs step (colours alternate)"),
    ((_RESET,), "envs reset"),
)


@dataclass(frozen=True, slots=True)
class Block:
    """An interval that is drawn.

    Attributes:
        begin: Seconds since the beginning of the recording.
        end: Likewise.
        colour: Colour of the block.
        said: Tooltip text.
        opacity: 0 to 1.
    """

    begin: float
    end: float
    colour: str
    said: str
    opacity: float = 1.0


TimelineRow = tuple[str, list[Block]]


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
        panels: list[str] = []
        top = 0
        for stretch in stretches:
            panel, height = _draw(_rows(recording, *stretch), *stretch, top)
            panels.append(panel)
            top += height
        return cls(_page("".join(panels), top))

    def save(self, path: str | Path) -> Path:
        """Write the picture to a file whose name ends in ``.svg``, and return the path.

        Raises:
            ArgumentError: If it has another suffix.
            OSError: If it cannot be written.
        """
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


def _rows(recording: Recording, begin: float, end: float) -> list[TimelineRow]:
    """Return the rows of an interval: one for the caller, and one for each worker."""
    is_detailed = _num_blocks(recording, begin, end) <= _MOST_BLOCKS
    offset = recording.begin
    calls = _within(merge(recording.calls) - offset, begin, end)
    own = _within(recording.outside(recording.calls) - offset, begin, end)
    if len(calls) + len(own) <= _MOST_BLOCKS:
        caller = [*_plain(calls, _CALL, "in a call"), *_plain(own, _CALLER, "your code")]
    else:
        caller = [
            *_shaded(calls, (begin, end), _CALL, "in calls:"),
            *_shaded(own, (begin, end), _CALLER, "your code:"),
        ]
    rows: list[TimelineRow] = [("your program", caller)]
    for worker in recording.workers[:_MOST_ROWS]:
        name = f"envs {name_range(worker.env_ids)}" if len(worker.env_ids) > 1 else f"env {worker.env_ids[0]}"
        if is_detailed:
            blocks = list(_turns(worker, offset, begin, end))
        else:
            busy = _within(merge(worker.spans) - offset, begin, end)
            blocks = _shaded(busy, (begin, end), _WORK[0], "works for")
        rows.append((name, blocks))
    left = len(recording.workers) - _MOST_ROWS
    return [*rows, (f"... {left:,} more", [])] if left > 0 else rows


def _within(spans: Array, begin: float, end: float) -> Array:
    inside = spans[(spans[:, 1] > begin) & (spans[:, 0] < end)]
    return inside.clip(begin, end)


def _plain(spans: Array, colour: str, said: str) -> list[Block]:
    return [Block(begin, end, colour, f"{said}, {duration(end - begin)}") for begin, end in spans.tolist()]


def _turns(worker: WorkerRecord, offset: float, begin: float, end: float) -> Iterator[Block]:
    """Return blocks of each env's turns, above those of the worker's busy times."""
    for first, last in _within(merge(worker.spans) - offset, begin, end).tolist():
        yield Block(first, last, _CALL, f"the worker works, {duration(last - first)}", 0.5)
    turns = worker.turns - offset
    for index in np.flatnonzero((turns[:, 1] > begin) & (turns[:, 0] < end)).tolist():
        env_id, operation = int(worker.owners[index]), worker.operations[worker.span_of[index]]
        first, last = turns[index].clip(begin, end).tolist()
        colour = _RESET if operation == "reset" else _WORK[worker.env_ids.index(env_id) % 2]
        yield Block(first, last, colour, f"env {env_id}: {operation}, {duration(last - first)}")
    for first, last, owner in worker.resets.tolist():
        if last - offset > begin and first - offset < end:
            said = f"env {owner:.0f}: reset, {duration(last - first)}"
            yield Block(max(begin, first - offset), min(end, last - offset), _RESET, said)


def _shaded(spans: Array, stretch: tuple[float, float], colour: str, said: str) -> list[Block]:
    """Return blocks of equal length, darker where spans take more of them."""
    begin, end = stretch
    width = (end - begin) / _BINS
    shares = (np.diff(cover(spans, np.linspace(begin, end, _BINS + 1))) / width).clip(0, 1)
    blocks = []
    for index in np.flatnonzero(shares > 0.005).tolist():
        share = float(shares[index])
        first = begin + index * width
        blocks.append(Block(first, first + width, colour, f"{said} {share:.0%} of {duration(width)}", share))
    return blocks


def _draw(rows: Sequence[TimelineRow], begin: float, end: float, top: int) -> tuple[str, int]:
    """Return a panel, and its height."""
    scale = (_WIDTH - _LEFT - _RIGHT) / (end - begin)
    parts = []
    y = top + 30
    for name, blocks in rows:
        parts.append(f'<text x="0" y="{y + 15}">{html.escape(name)}</text>')
        parts.append(f'<rect x="{_LEFT}" y="{y}" width="{_WIDTH - _LEFT - _RIGHT}" height="{_ROW}" fill="#8882"/>')
        parts += [_rect(block, (block.begin - begin) * scale + _LEFT, y, scale) for block in blocks]
        y += _ROW + _GAP
    parts += _axis(begin, end, top + 30, y, scale)
    return "".join(parts), y - top + 26


def _rect(block: Block, x: float, y: int, scale: float) -> str:
    width = max(0.3, (block.end - block.begin) * scale)
    opacity = "" if block.opacity == 1 else f' fill-opacity="{block.opacity:.2f}"'
    return (
        f'<rect x="{x:.2f}" y="{y}" width="{width:.2f}" height="{_ROW}" fill="{block.colour}"{opacity}>'
        f"<title>{html.escape(block.said)}</title></rect>"
    )


def _axis(begin: float, end: float, top: int, bottom: int, scale: float) -> list[str]:
    """Return five to ten lines at round times, with labels."""
    rough = (end - begin) / 6
    size = 10.0 ** np.floor(np.log10(rough))
    step = next(size * factor for factor in (1, 2, 5, 10) if size * factor >= rough)
    parts = []
    for number in range(int(np.ceil(begin / step - 1e-9)), int(end / step + 1e-9) + 1):
        x = (number * step - begin) * scale + _LEFT
        parts.append(f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{top - 4}" y2="{bottom}" stroke="#8886"/>')
        parts.append(f'<text x="{x:.1f}" y="{top - 9}" text-anchor="middle">{_moment(number * step, step)}</text>')
    return parts


def _moment(seconds: float, step: float) -> str:
    """Return a time in the unit of the distance between the lines."""
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if step >= size * 0.1:
            return f"{_separated(seconds / size)} {unit}"
    return f"{_separated(seconds * 1e6)} µs"


def _separated(moment: float) -> str:
    """Return a round number without trailing zeros, with separators: ``0.25``, ``12,500``."""
    return f"{moment:,.6f}".rstrip("0").rstrip(".")


def _page(panels: str, height: int) -> str:
    """Return panels above a legend."""
    legend = []
    x = _LEFT
    for colours, name in (*_LEGEND, (("#8882",), "waiting")):
        for colour in colours:
            legend.append(f'<rect x="{x}" y="{height + 2}" width="12" height="12" fill="{colour}"/>')
            x += 14
        legend.append(f'<text x="{x + 3}" y="{height + 12}">{name}</text>')
        x += 20 + 6 * len(name)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height + 22}" width="{_WIDTH}" '
        'style="max-width:100%" font-family="sans-serif" font-size="12" fill="currentColor">'
        f"{panels}{''.join(legend)}</svg>"
    )
