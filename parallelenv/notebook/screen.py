"""A picture below a cell that is replaced by the next one."""

from __future__ import annotations

import time
from typing import Any

from parallelenv.contract.batch import Array
from parallelenv.contract.progress import kernel_of_notebook
from parallelenv.engine import cells
from parallelenv.errors import NotebookNeededError
from parallelenv.notebook.animation import encode_picture


class Screen:
    """A place below the cell that is running. Another cell, or another run of it, gets another one."""

    def __init__(self) -> None:
        self._run: cells.CellRun | None = None
        self._handle: Any = None

    def show(self, picture: Array) -> None:
        """Show a picture in the place of the one before.

        Raises:
            NotebookNeededError: If there is no notebook.
        """
        refuse_no_notebook("show")
        from IPython.display import Image, display

        image = Image(encode_picture(picture), format="png")  # type: ignore[no-untyped-call]
        run = cells.current_run()
        if self._handle is None or run is None or run != self._run:
            self._run, self._handle = run, display(image, display_id=True)  # type: ignore[no-untyped-call]
        else:
            self._handle.update(image)


def refuse_no_notebook(call: str) -> None:
    """Refuse to show something where there is no notebook.

    Raises:
        NotebookNeededError: If there is none.
    """
    if kernel_of_notebook() is None:
        raise NotebookNeededError(
            f"{call}() shows envs below a notebook cell, and this is no notebook. Elsewhere render(tile=True) returns "
            "the picture, and record(policy, steps, path) makes a film."
        )


class Pace:
    """Keeps frames from coming faster than they are to be seen.

    Args:
        fps: Frames a second.
    """

    def __init__(self, fps: float) -> None:
        self._span = 1 / fps
        self._next = 0.0

    def wait(self) -> None:
        """Wait until it is time for the next frame; one that comes late is not made up for."""
        now = time.monotonic()
        if now < self._next:
            time.sleep(self._next - now)
        self._next = max(now, self._next) + self._span
