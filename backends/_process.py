"""Worker processes, of which an interrupt leaves nothing half known or half closed."""

from __future__ import annotations

import contextlib
import math
import os
import signal
import time
import weakref
from collections.abc import MutableMapping
from multiprocessing import connection
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any

from parallelenv.contract.interrupts import DeferSigint

_IS_POSIX = os.name == "posix"
_MOMENT = 1.0
"""Seconds that the fork server gets to tell of an end."""
_GLANCE = 0.05
"""Seconds between looks at whether a process has ended, where a child of its own holds on to what would tell."""
UNKNOWN = 255
"""Exit code of a process whose fork server can not tell it any more."""
_FORKED: weakref.WeakSet[ForkedProcess] = weakref.WeakSet()


class WorkerProcess:
    """A `multiprocessing.Process` that was started, or what behaves like one, with what a channel needs of it.

    Ctrl-C between what the system says and the note of it made `multiprocessing` wait for a process that was gone, lose
    its descriptors, or raise an `AssertionError` when asked again. To wait for the process can be interrupted.

    Args:
        process: The process.
    """

    def __init__(self, process: BaseProcess | ForkedProcess) -> None:
        self._process = process
        self.pid = process.pid or 0

    @property
    def exitcode(self) -> int | None:
        """Exit code, or the negative number of a signal; ``None`` while it runs, or if somebody else was told."""
        with DeferSigint():
            return self._process.exitcode

    def is_alive(self) -> bool:
        """Whether it has not ended."""
        with DeferSigint():
            # Somebody else in this process may have been told of its end; then `multiprocessing` never is.
            return self._process.is_alive() and (not _IS_POSIX or exists(self.pid))

    def join(self, timeout: float | None = None) -> None:
        """Wait for its end, so many seconds or for ever."""
        deadline = math.inf if timeout is None else time.monotonic() + timeout
        while self.is_alive() and (left := deadline - time.monotonic()) > 0:
            if connection.wait([self._process.sentinel], min(left, _GLANCE)):
                with DeferSigint():
                    self._process.join(_GLANCE)
                return
        if not self.is_alive():  # the fork server tells of an end a moment after it; only then it can be closed
            connection.wait([self._process.sentinel], _MOMENT)

    def terminate(self) -> None:
        """Ask it to end."""
        with DeferSigint():
            self._process.terminate()

    def close(self) -> None:
        """Let go of it.

        Raises:
            ValueError: If it runs.
        """
        with DeferSigint():
            self._process.close()


class ForkedProcess:
    """A process that a fork server has forked, with as much of a `multiprocessing.Process` as a `WorkerProcess` needs.

    Args:
        pid: Its id.
        status: Where its exit code comes.
        lifeline: When this is closed, it ends.
        server: Ends when nothing refers to it any more, and with it the process that reports the exit code.

    Attributes:
        sentinel: Can be read when it has ended.
        lifeline: As given.
    """

    def __init__(self, pid: int, status: Connection, lifeline: Connection, server: Any) -> None:
        self.pid = pid
        self.sentinel = status
        self.lifeline = lifeline
        self._server = server
        self._exitcode: int | None = None
        _FORKED.add(self)

    @property
    def exitcode(self) -> int | None:
        """Exit code, or the negative number of a signal; ``None`` while it runs; `UNKNOWN` if the server is gone."""
        if self.lifeline.closed:
            raise ValueError("process object is closed")
        if self._exitcode is None and self.sentinel.poll(0):
            try:
                self._exitcode = self.sentinel.recv()
            except (EOFError, OSError):
                self._exitcode = UNKNOWN
        return self._exitcode

    def is_alive(self) -> bool:
        """Whether nothing was reported of its end."""
        return self.exitcode is None

    def join(self, timeout: float | None = None) -> None:
        """Wait for its end, so many seconds or for ever."""
        if self.exitcode is None:
            connection.wait([self.sentinel], timeout)

    def terminate(self) -> None:
        """Ask it to end."""
        if self.is_alive():
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGTERM)

    def close(self) -> None:
        """Let go of it.

        Raises:
            ValueError: If it runs.
        """
        if self.is_alive():
            raise ValueError(f"process {self.pid} is still running")
        self.sentinel.close()
        self.lifeline.close()
        self._server = None


def _cut_in_child() -> None:
    """Let a forked child not keep alive what belongs to its parent."""
    for forked in list(_FORKED):
        forked.lifeline.close()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_cut_in_child)


def exists(pid: int) -> bool:
    """Whether there is such a process. ``False`` on Windows, where to ask for it is to send it Ctrl-C."""
    if not _IS_POSIX:
        return False
    try:
        os.kill(pid, 0)
    except OSError:
        return False
    return True


_PREFIXES = (
    "OMPI_",  # Open MPI
    "PMI_",  # MPICH, Intel MPI, Cray, Slurm
    "PMIX_",  # Open MPI from 4 on, Slurm
    "PRTE_",  # Open MPI's own runtime, from 5 on
    "HYDI_",  # Hydra, the launcher of MPICH and Intel MPI
    "MPI_LOCAL",  # likewise: MPI_LOCALRANKID, MPI_LOCALNRANKS
    "MV2_COMM_WORLD_",  # MVAPICH
    "PALS_",  # Cray
)


def forget_launcher(environment: MutableMapping[str, str] = os.environ) -> None:
    """Remove what says that this process is the one that an MPI launcher has started.

    A worker is not, but has the variables of the caller, which may be. An env that imports `mpi4py` would then take
    the caller's place in its job, and hang or end it. It is done in the worker, before there are envs: the caller's
    variables are not touched, not for a moment, for other threads may be reading them.
    """
    for name in [name for name in environment if name.startswith(_PREFIXES)]:
        del environment[name]
