"""Closes the objects that earlier runs of a notebook cell left open, before the cell makes a new object.

IPython keeps references to the objects that a cell displayed and to the frames of an exception's traceback. Without
this module, five runs of a cell could therefore leave five sets of workers running, although no variable refers to
them.
"""

from __future__ import annotations

import weakref
from typing import Any, NamedTuple

from parallelenv.contract.error_text import count
from parallelenv.engine.worker_output import say
from parallelenv.progress import kernel_of_notebook


class CellRun(NamedTuple):
    """One run of a notebook cell."""

    cell: str  #: The cell's id; empty if the front end gives none. Different cells may have the same source.
    message: str  #: Id of the front end's request to run the cell.


_made: list[tuple[CellRun, weakref.ref[Any]]] = []  # open objects, with the run of a cell that made each


def current_run() -> CellRun | None:
    """Return the run of the current notebook cell; ``None`` outside of a notebook."""
    kernel = kernel_of_notebook()
    if kernel is None:
        return None
    request = kernel.get_parent() or {}
    message = request.get("header", {}).get("msg_id")
    return CellRun(str(request.get("metadata", {}).get("cellId") or ""), str(message)) if message else None


def close_earlier() -> None:
    """Close objects that earlier runs of the current cell made and left open; if there are any, print a message."""
    run = current_run()
    if run is None or not run.cell:
        return
    made: list[tuple[CellRun, Any]] = [(earlier, one()) for earlier, one in _made]
    old = [env for (cell, message), env in made if cell == run.cell and message != run.message and _is_open(env)]
    for env in old:
        env.close()
    _made[:] = [(earlier, weakref.ref(env)) for earlier, env in made if _is_open(env)]
    if old:
        made_earlier = count(len(old), "ParallelEnv")
        say(f"Closed {made_earlier} that an earlier run of this cell had made (keep=True prevents that).\n")


def register(env: Any) -> None:
    """Record an object that the current run of a notebook cell made."""
    run = current_run()
    if run is not None and run.cell:
        _made.append((run, weakref.ref(env)))


def _is_open(env: Any) -> bool:
    return env is not None and not env.closed
