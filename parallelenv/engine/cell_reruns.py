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

    cell: str  #: The cell's id if the front end gives one, or else the cell's source.
    message: str  #: Id of the front end's request to run the cell.


_made: dict[str, list[tuple[str, weakref.ref[Any]]]] = {}  # by cell: the run's message id, and the object


def current_run() -> CellRun | None:
    """Return the run of the current notebook cell; ``None`` outside of a notebook."""
    kernel = kernel_of_notebook()
    if kernel is None:
        return None
    request = kernel.get_parent() or {}
    message = request.get("header", {}).get("msg_id")
    cell = request.get("metadata", {}).get("cellId") or request.get("content", {}).get("code")
    return CellRun(str(cell), str(message)) if cell and message else None


def close_earlier() -> None:
    """Close objects that earlier runs of the current cell made and left open; if there are any, print a message."""
    run = current_run()
    if run is None:
        return
    old = [env for message, env in _open_envs(run.cell) if message != run.message]
    for env in old:
        env.close()
    for cell in list(_made):  # of all cells: a cell that was deleted or changed does not run again
        _made[cell] = [(message, weakref.ref(env)) for message, env in _open_envs(cell)]
        if not _made[cell]:
            del _made[cell]
    if old:
        made_earlier = count(len(old), "ParallelEnv")
        say(f"Closed {made_earlier} that an earlier run of this cell had made (keep=True prevents that).\n")


def _open_envs(cell: str) -> list[tuple[str, Any]]:
    made = [(message, made()) for message, made in _made.get(cell, ())]
    return [(message, env) for message, env in made if env is not None and not env.closed]


def register(env: Any) -> None:
    """Record an object that the current run of a notebook cell made."""
    run = current_run()
    if run is not None:
        _made.setdefault(run.cell, []).append((run.message, weakref.ref(env)))
