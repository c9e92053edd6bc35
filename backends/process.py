"""A worker process of which an interrupt leaves nothing half known or half closed."""

from __future__ import annotations

import math
import os
import time
from multiprocessing import connection
from multiprocessing.process import BaseProcess

from parallelenv.interrupts import Shield

_IS_POSIX = os.name == "posix"
_MOMENT = 1.0
"""Seconds that the fork server gets to tell of an end."""
_GLANCE = 0.05
"""Seconds between looks at whether a process has ended, where a child of its own holds on to what would tell."""


class WorkerProcess:
    """A `multiprocessing.Process` that was started, with what a channel needs of it.

    Ctrl-C between what the system says and the note of it made `multiprocessing` wait for a process that was gone, lose
    its descriptors, or raise an `AssertionError` when asked again. To wait for the process can be interrupted.

    Args:
        process: The process.
    """

    def __init__(self, process: BaseProcess) -> None:
        self._process = process
        self.pid = process.pid or 0

    @property
    def exitcode(self) -> int | None:
        """Exit code, or the negative number of a signal; ``None`` while it runs, or if somebody else was told."""
        with Shield():
            return self._process.exitcode

    def is_alive(self) -> bool:
        """Whether it has not ended."""
        with Shield():
            # Somebody else in this process may have been told of its end; then `multiprocessing` never is.
            return self._process.is_alive() and (not _IS_POSIX or exists(self.pid))

    def join(self, timeout: float | None = None) -> None:
        """Wait for its end, so many seconds or for ever."""
        deadline = math.inf if timeout is None else time.monotonic() + timeout
        while self.is_alive() and (left := deadline - time.monotonic()) > 0:
            if connection.wait([self._process.sentinel], min(left, _GLANCE)):
                with Shield():
                    self._process.join(_GLANCE)
                return
        if not self.is_alive():  # the fork server tells of an end a moment after it; only then it can be closed
            connection.wait([self._process.sentinel], _MOMENT)

    def terminate(self) -> None:
        """Ask it to end."""
        with Shield():
            self._process.terminate()

    def close(self) -> None:
        """Let go of it.

        Raises:
            ValueError: If it runs.
        """
        with Shield():
            self._process.close()


def exists(pid: int) -> bool:
    """Whether there is such a process. ``False`` on Windows, where to ask for it is to send it Ctrl-C."""
    if not _IS_POSIX:
        return False
    try:
        os.kill(pid, 0)
    except OSError:
        return False
    return True
