"""Progress bars: below a notebook cell, on a terminal, and nowhere else."""

from __future__ import annotations

import contextlib
import contextvars
import sys
import threading
from collections.abc import Iterator
from typing import Any, Protocol

from parallelenv.cells import kernel_of_notebook

_PATIENCE = 2.0
"""Seconds that something takes before it is announced."""


class Bar(Protocol):
    """The part of a tqdm bar that is used."""

    def update(self, n: float | None = 1) -> bool | None:
        """Move on by ``n``."""
        ...

    def set_description_str(self, desc: str | None = None, refresh: bool | None = True) -> None:
        """Show what is being done."""
        ...


class _NoBar:
    """A bar that shows nothing."""

    def update(self, n: float | None = 1) -> bool | None:
        return None

    def set_description_str(self, desc: str | None = None, refresh: bool | None = True) -> None:
        return None


@contextlib.contextmanager
def open_bar(is_wanted: bool, **look: Any) -> Iterator[Bar]:
    """Show a bar that vanishes at the end, in a notebook or on a terminal; a file or a pipe gets nothing.

    Args:
        is_wanted: Whether to show it at all.
        **look: Arguments of tqdm.
    """
    if is_wanted and kernel_of_notebook() is not None:
        from parallelenv.display.cell_bar import CellBar

        with CellBar(leave=False, **look) as bar:
            yield bar
    elif is_wanted and _is_terminal(sys.stderr):
        from tqdm import tqdm

        with tqdm(leave=False, **look) as bar:
            yield bar
    else:
        yield _NoBar()


@contextlib.contextmanager
def announced(text: str) -> Iterator[None]:
    """Show a line, where bars are shown, if what is done meanwhile takes longer than 2 s; it vanishes at the end.

    Args:
        text: The line.
    """
    with contextlib.ExitStack() as shown:

        def show() -> None:
            shown.enter_context(open_bar(True, desc=text, bar_format="{desc}"))

        # A notebook finds by the context to which cell it belongs.
        timer = threading.Timer(_PATIENCE, contextvars.copy_context().run, (show,))
        timer.daemon = True
        timer.start()
        try:
            yield
        finally:
            timer.cancel()
            timer.join()


def _is_terminal(stream: Any) -> bool:
    """Whether a stream is a terminal; it may be ``None``, closed, or only something with a ``write``."""
    try:
        return bool(stream.isatty())
    except Exception:  # noqa: BLE001 (the user's own stream: anything may come)
        return False
