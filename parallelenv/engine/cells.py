"""Notebook cells that run again: what their earlier runs left open is closed.

IPython keeps what a cell showed and what an exception's traceback refers to, so the workers of a
`ParallelEnv` whose cell is run five times would be there five times, although no name leads to them.
"""

from __future__ import annotations

import weakref
from typing import Any, NamedTuple, Protocol

from parallelenv.contract.messages import count
from parallelenv.contract.progress import kernel_of_notebook
from parallelenv.engine.output import say


class Closable(Protocol):
    """What can be closed, and is told from others by identity."""

    @property
    def closed(self) -> bool:
        """Whether it is closed already."""
        ...

    def close(self) -> None:
        """Close it."""
        ...


class CellRun(NamedTuple):
    """One run of a notebook cell.

    Attributes:
        cell: The cell's id as the front end gives it, else its source.
        message: Id of the request to run it.
    """

    cell: str
    message: str


_made: dict[str, list[tuple[str, weakref.ref[Any]]]] = {}  # by cell: in which run, and what


def current_run() -> CellRun | None:
    """Return which run of which cell this is; ``None`` outside of a notebook."""
    kernel = kernel_of_notebook()
    if kernel is None:
        return None
    request = kernel.get_parent() or {}
    message = request.get("header", {}).get("msg_id")
    cell = request.get("metadata", {}).get("cellId") or request.get("content", {}).get("code")
    return CellRun(str(cell), str(message)) if cell and message else None


def close_earlier() -> None:
    """Close what earlier runs of the cell that is running have made and left open, and say so."""
    run = current_run()
    if run is None:
        return
    made = [(message, made()) for message, made in _made.get(run.cell, ())]
    old = [env for message, env in made if message != run.message and env is not None and not env.closed]
    for env in old:
        env.close()
    _made[run.cell] = [(message, weakref.ref(env)) for message, env in made if env is not None and not env.closed]
    if old:
        made_earlier = count(len(old), "ParallelEnv")
        say(f"Closed {made_earlier} that an earlier run of this cell had made (keep=True prevents that).\n")


def note(env: Closable) -> None:
    """Remember that the run of a cell that is going on has made something."""
    run = current_run()
    if run is not None:
        _made.setdefault(run.cell, []).append((run.message, weakref.ref(env)))
