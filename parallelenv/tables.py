"""Plain text tables for the command line."""

from __future__ import annotations

from collections.abc import Sequence


def format_table(header: Sequence[str], rows: Sequence[Sequence[str]], left: Sequence[str] = ()) -> str:
    """Return rows under a header, in columns; columns that are empty in every row are left out.

    Args:
        header: One title per column.
        rows: One text per column each.
        left: Titles of the columns that are aligned to the left; numbers read better to the right.
    """
    used = [index for index in range(len(header)) if any(row[index] for row in rows)]
    lines = [[line[index] for index in used] for line in (header, *rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(used))]
    to_left = [header[index] in left for index in used]
    return "\n".join(_format_line(line, widths, to_left) for line in lines)


def _format_line(cells: Sequence[str], widths: Sequence[int], to_left: Sequence[bool]) -> str:
    padded = [
        cell.ljust(width) if is_left else cell.rjust(width)
        for cell, width, is_left in zip(cells, widths, to_left, strict=True)
    ]
    return "  ".join(padded).rstrip()
