"""A picture below a notebook cell that is updated in place."""

from __future__ import annotations

import time
from typing import Any

from parallelenv.contract.batch import Array
from parallelenv.contract.progress import kernel_of_notebook
from parallelenv.engine import notebook_cells
from parallelenv.errors import UsageError
from parallelenv.notebook.animation import encode_picture


class Screen:
    """An output area below the running cell. Each cell, and each run of it, gets a new one."""

    def __init__(self) -> None:
        self._run: notebook_cells.CellRun | None = None
        self._handle: Any = None

    def show(self, picture: Array) -> None:
        """Show a picture in place of the previous one.

        Raises:
            UsageError: Outside a notebook.
        """
        refuse_no_notebook("show")
        from IPython.display import Image, display

        image = Image(encode_picture(picture), format="png")  # type: ignore[no-untyped-call]
        run = notebook_cells.current_run()
        if self._handle is None or run is None or run != self._run:
            self._run, self._handle = run, display(image, display_id=True)  # type: ignore[no-untyped-call]
        else:
            self._handle.update(image)


def refuse_no_notebook(call: str) -> None:
    """Check that code runs in a notebook.

    Raises:
        UsageError: If it does not.
    """
    if kernel_of_notebook() is None:
        raise UsageError(
            f"{call}() shows envs below a notebook cell, and this is no notebook. Elsewhere render(tile=True) returns "
            "the picture, and record(policy, steps, path) makes a film."
        )


class FrameRate:
    """Limits the frame rate.

    Args:
        fps: Frames per second.
    """

    def __init__(self, fps: float) -> None:
        self._span = 1 / fps
        self._next = 0.0

    def wait(self) -> None:
        """Wait until the next frame is due; late frames are not caught up on."""
        now = time.monotonic()
        if now < self._next:
            time.sleep(self._next - now)
        self._next = max(now, self._next) + self._span
