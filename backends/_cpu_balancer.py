"""Moves workers apart if they wait for the same core while another is idle.

The system often wakes a worker on the core of the caller that called it. Both then alternate on this core without ever
sleeping, and for hundreds of steps no load balancing separates them. A round of 44 us of work in two processes took 93
us instead of 47 us on 2 idle cores, whether over a pipe, an eventfd or shared memory. Pinned workers would be 2 to 3
times slower as soon as another process needs a core, so no worker is pinned: it is moved once, and only while nothing
but the pool itself is runnable.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Sequence
from pathlib import Path

_PAUSE = 2e-3
"""Seconds between two checks. A check of two workers takes 40 us."""
_STATE, _PROCESSOR = 0, 36  # fields of /proc/PID/stat after the name


class CpuBalancer:
    """Regularly checks where workers run, and moves workers that share a core needlessly apart.

    With ``caller_steps``, the caller's own core counts as taken as well.
    """

    def __init__(self, caller_steps: bool) -> None:
        self._caller_steps = caller_steps
        self._next = 0.0
        self._works = hasattr(os, "sched_setaffinity") and Path("/proc/loadavg").exists()

    def balance(self, pids: Sequence[int]) -> None:
        """Move one worker if that helps and disturbs no other process; usually do nothing."""
        now = time.perf_counter()
        if now < self._next or not self._works:
            return
        self._next = now + _PAUSE
        with contextlib.suppress(OSError):  # a worker has died, or access is denied
            self._spread(pids)

    def _spread(self, pids: Sequence[int]) -> None:
        awake = {pid: core for pid in pids if (core := _core_if_awake(pid)) is not None}
        own_core = _core_if_awake(os.getpid())
        num_runnable = int(_read("/proc/loadavg").split()[3].partition(b"/")[0])  # threads of the whole system
        if own_core is None or num_runnable > len(awake) + 1:  # another process needs a core
            return
        taken = {own_core} if self._caller_steps else set()
        for pid, core in awake.items():
            if core not in taken:
                taken.add(core)
                continue
            allowed = os.sched_getaffinity(pid)
            if free := allowed - taken.union(awake.values()):
                try:
                    os.sched_setaffinity(pid, {min(free)})
                finally:  # it is moved, not pinned
                    os.sched_setaffinity(pid, allowed)
            return


def _core_if_awake(pid: int) -> int | None:
    """Return the core that a process runs on or waits for, ``None`` if it sleeps."""
    fields = _read(f"/proc/{pid}/stat").rpartition(b")")[2].split()
    return int(fields[_PROCESSOR]) if fields[_STATE] == b"R" else None


def _read(path: str) -> bytes:
    """Return the content of a short system file, in 12 us.

    `os.open` would take 10 us, but leave the file open if Ctrl-C came before the descriptor was stored.
    """
    with open(path, "rb", buffering=0) as file:
        return file.read(4096)
