"""Workers that are queued behind each other while a core stands idle, moved apart.

The system wakes a worker gladly on the core of the caller that sent for it. Both then hand the core to
and fro without ever sleeping, which no load balancing ends for hundreds of steps: a round of 44 us of
work in two processes took 93 us instead of 47 us on 2 idle cores, by pipe, eventfd or shared memory alike.
Pinned workers would be 2 to 3 times slower as soon as anybody else wants a core, so nobody is pinned:
a worker is moved once, and only while nothing but the pool itself wants to run.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Sequence
from pathlib import Path

_PAUSE = 2e-3
"""Seconds between two looks. One at two workers takes 40 us."""
_STATE, _PROCESSOR = 0, 36  # fields of /proc/PID/stat after the name


class CpuBalancer:
    """Looks now and then where workers run, and moves those apart that share a core needlessly.

    Args:
        caller_steps: Whether the caller's own core is taken, too.
    """

    def __init__(self, caller_steps: bool) -> None:
        self._caller_steps = caller_steps
        self._next = 0.0
        self._works = hasattr(os, "sched_setaffinity") and Path("/proc/loadavg").exists()

    def look(self, pids: Sequence[int]) -> None:
        """Move one worker if that helps and harms nobody; mostly do nothing.

        Args:
            pids: Processes of the workers.
        """
        now = time.perf_counter()
        if now < self._next or not self._works:
            return
        self._next = now + _PAUSE
        with contextlib.suppress(OSError):  # a worker has died; or the system does not let us look
            self._spread(pids)

    def _spread(self, pids: Sequence[int]) -> None:
        awake = {pid: core for pid in pids if (core := _core_if_awake(pid)) is not None}
        own_core = _core_if_awake(os.getpid())
        if own_core is None or _num_runnable() > len(awake) + 1:  # somebody else wants to run: not our business
            return
        taken = {own_core} if self._caller_steps else set()
        for pid, core in awake.items():
            if core in taken:
                _move(pid, taken.union(awake.values()))
                return
            taken.add(core)


def _core_if_awake(pid: int) -> int | None:
    """Return the core that a process runs on or waits for, ``None`` if it sleeps."""
    fields = _read(f"/proc/{pid}/stat").rpartition(b")")[2].split()
    return int(fields[_PROCESSOR]) if fields[_STATE] == b"R" else None


def _num_runnable() -> int:
    """Return how many threads of the whole system want to run at this moment."""
    return int(_read("/proc/loadavg").split()[3].partition(b"/")[0])


def _read(path: str) -> bytes:
    """Return the short text of a file of the system: 12 us.

    With `os.open` 10 us, but the file would stay open if Ctrl-C came before anybody knew of it.
    """
    with open(path, "rb", buffering=0) as file:
        return file.read(4096)


def _move(pid: int, taken: set[int]) -> None:
    """Let a process go on on a core that is not taken, and leave it free to run on any, as before."""
    allowed = os.sched_getaffinity(pid)
    free = allowed - taken
    if free:
        try:
            os.sched_setaffinity(pid, {min(free)})
        finally:
            os.sched_setaffinity(pid, allowed)
