"""Progress bars, shown only below a notebook cell or on a terminal."""

from __future__ import annotations

import contextlib
import contextvars
import html
import io
import sys
import threading
from collections.abc import Iterator
from typing import Any, TypeAlias

import tqdm

_PATIENCE = 2.0
"""Seconds after which an operation is announced."""


class NoBar:
    """A progress bar that shows nothing. It has the tqdm methods that this package uses."""

    def update(self, n: float | None = 1) -> bool | None:
        """Do nothing; a tqdm bar would advance by ``n``."""
        return None

    def set_description_str(self, desc: str | None = None, refresh: bool | None = True) -> None:
        """Do nothing; a tqdm bar would set its text."""


Bar: TypeAlias = "NoBar | tqdm.tqdm[Any]"


@contextlib.contextmanager
def open_bar(is_wanted: bool, **look: Any) -> Iterator[Bar]:
    """Show a progress bar in a notebook or on a terminal, and remove it at the end of the block.

    Nothing is shown if ``is_wanted`` is false, or if the output goes to a file or a pipe. ``look`` holds arguments for
    tqdm.
    """
    is_cell = kernel_of_notebook() is not None
    is_terminal = False
    with contextlib.suppress(Exception):  # a user's own stream may be None, closed, or have only a `write`
        is_terminal = bool(sys.stderr.isatty())
    if is_wanted and (is_cell or is_terminal):
        with (CellBar if is_cell else tqdm.tqdm)(leave=False, **look) as bar:
            yield bar
    else:
        yield NoBar()


@contextlib.contextmanager
def announce_if_slow(text: str) -> Iterator[None]:
    """If the block takes longer than 2 s, show ``text`` in place of a progress bar until the block ends."""
    with contextlib.ExitStack() as shown:

        def show() -> None:
            shown.enter_context(open_bar(True, desc=text, bar_format="{desc}"))

        # The notebook finds the cell for the output in the context, so the timer's thread uses a copy of the context.
        timer = threading.Timer(_PATIENCE, contextvars.copy_context().run, (show,))
        timer.daemon = True
        timer.start()
        try:
            yield
        finally:
            timer.cancel()
            timer.join()


class CellBar(tqdm.tqdm):  # type: ignore[type-arg]
    """A tqdm bar below a notebook cell.

    The bar is a line of text, which each update replaces, so it needs no ipywidgets. tqdm's own bars either need
    ipywidgets, in the kernel and in the front end, or write to stderr, which notebooks show on a red background.
    """

    _place: Any = None

    def __init__(self, **look: Any) -> None:
        super().__init__(file=io.StringIO(), ncols=80, ascii=False, **look)  # a notebook does not report its width

    def display(self, msg: str | None = None, pos: int | None = None) -> None:
        """Show the current line or, if given, ``msg``; an empty ``msg`` removes the line."""
        from IPython.display import display

        line = str(self) if msg is None else msg
        page = f'<pre style="margin:0">{html.escape(line)}</pre>' if line else ""
        shown = {"text/plain": line, "text/html": page}
        if self._place is None:
            self._place = display(shown, raw=True, display_id=True)  # type: ignore[no-untyped-call]
        else:
            self._place.update(shown, raw=True)


def kernel_of_notebook() -> Any:
    """Return the Jupyter kernel of this process; ``None`` outside notebooks, for example in IPython on a terminal."""
    ipython: Any = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    return getattr(shell, "kernel", None)
