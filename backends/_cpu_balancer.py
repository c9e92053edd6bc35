"""A balancer, which moves a worker to an idle core if the worker shares its core needlessly.

The operating system often wakes a worker on the core where the caller runs. The caller and the worker then take turns
on this core. Neither of them ever sleeps, and the system's load balancing does not separate them for hundreds of steps.
When two processes had to work for 44 us each and 2 cores were idle, both were done after 93 us instead of 47 us,
whether they communicated over a pipe, an eventfd or shared memory.

The balancer does not pin workers to cores, because pinned workers would be 2 to 3 times slower as soon as a different
process needs their core. The balancer moves a worker only while no process except the caller and the workers is running
or waiting for a core. Immediately after the move, the worker is allowed to use the other cores again.
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
    """Regularly checks which core each worker uses, and moves a worker that shares its core with another worker.

    Args:
        caller_steps: Whether the caller steps envs itself. If so, a worker that shares its core with the caller is
            moved as well.
    """

    def __init__(self, caller_steps: bool) -> None:
        self._caller_steps = caller_steps
        self._next = 0.0
        self._works = hasattr(os, "sched_setaffinity") and Path("/proc/loadavg").exists()

    def balance(self, pids: Sequence[int]) -> None:
        """Move one of the workers in ``pids`` to an idle core if it shares its core with another worker.

        If the caller steps envs, sharing a core with the caller counts as well. Do nothing if any other process in the
        system needs a core, or if the last check was less than 2 ms ago.
        """
        now = time.perf_counter()
        if now < self._next or not self._works:
            return
        self._next = now + _PAUSE
        with contextlib.suppress(OSError):  # a worker has died, or access is denied
            self._spread(pids)

    def _spread(self, pids: Sequence[int]) -> None:
        awake = {pid: core for pid in pids if (core := _core_if_awake(pid)) is not None}
        own_core = _core_if_awake(os.getpid())
        num_runnable = int(_read("/proc/loadavg").split()[3].partition(b"/")[0])  # in the whole system
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
                finally:  # allow all cores again, so that the worker is moved but not pinned
                    os.sched_setaffinity(pid, allowed)
            return


def _core_if_awake(pid: int) -> int | None:
    """Return the core on which a process runs or waits to run; ``None`` if the process sleeps."""
    fields = _read(f"/proc/{pid}/stat").rpartition(b")")[2].split()
    return int(fields[_PROCESSOR]) if fields[_STATE] == b"R" else None


def _read(path: str) -> bytes:
    """Return the content of a short system file. This takes 12 us.

    With `os.open`, it would take 10 us, but Ctrl-C could leave the file open.
    """
    with open(path, "rb", buffering=0) as file:
        return file.read(4096)
