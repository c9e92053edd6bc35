"""A progress bar below a notebook cell."""

from __future__ import annotations

import html
import io
from typing import Any

from tqdm import tqdm

_COLUMNS = 80
"""Characters of a bar: a notebook does not say how wide it is."""


class CellBar(tqdm):  # type: ignore[type-arg]
    """A bar of tqdm below a notebook cell.

    It is a line of text that the front end replaces, and so needs no ipywidgets. tqdm's own bars either need them, in
    the kernel and in the front end, or write to stderr, which notebooks show on a red ground.
    """

    _place: Any = None

    def __init__(self, **look: Any) -> None:
        super().__init__(file=io.StringIO(), ncols=_COLUMNS, ascii=False, **look)

    def display(self, msg: str | None = None, pos: int | None = None) -> None:
        """Show the line as it is now, or another one; an empty one at the end."""
        from IPython.display import display

        line = str(self) if msg is None else msg
        page = f'<pre style="margin:0">{html.escape(line)}</pre>' if line else ""
        shown = {"text/plain": line, "text/html": page}
        if self._place is None:
            self._place = display(shown, raw=True, display_id=True)  # type: ignore[no-untyped-call]
        else:
            self._place.update(shown, raw=True)
