"""Which copy of this package is running: in a worker it must be the caller's."""

from __future__ import annotations

import os
from typing import NamedTuple

import parallelenv
from parallelenv.errors import WorkerStartError


class Origin(NamedTuple):
    """Where a copy of this package comes from.

    Attributes:
        version: Its version.
        folder: Where it is; empty if that says nothing, as it does not on other machines.
    """

    version: str
    folder: str


def own_origin() -> Origin:
    """Return where the copy comes from that runs here."""
    return Origin(parallelenv.__version__, os.path.dirname(os.path.realpath(parallelenv.__file__)))


def refuse_other_copy(caller: Origin) -> None:
    """Refuse to work for a caller that runs another copy than this process.

    Raises:
        WorkerStartError: If it does.
    """
    ours = own_origin()
    if not caller.folder:
        if caller.version != ours.version:
            raise WorkerStartError(
                f"A worker has version {ours.version} of parallelenv, in {ours.folder}, but the caller has "
                f"{caller.version}. Install the same version on all machines."
            )
    elif caller != ours:
        raise WorkerStartError(
            f"A worker runs another copy of parallelenv than the caller: version {ours.version} in {ours.folder}, not "
            f"{caller.version} in {caller.folder}. sys.path has changed since the caller imported parallelenv. Set "
            f"PYTHONPATH={os.path.dirname(caller.folder)} before Python starts."
        )
