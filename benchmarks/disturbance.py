"""Measures the CPU time that other programs use while a system is measured."""

from __future__ import annotations

import ctypes
import os
import time
from dataclasses import dataclass

QUIET = 2.0  # % of a core that other programs may use; a round with more is measured again
_GRAIN = 0.01  # seconds; resolution of the machine's idle time

Numbers = dict[str, float]


def is_disturbed(numbers: Numbers) -> bool:
    """Return whether other programs used too much CPU in a round with these numbers."""
    return numbers.get("others_percent", 0.0) > QUIET


@dataclass(frozen=True, slots=True)
class CpuTimes:
    """Clocks of the machine and of its processes, in seconds.

    Attributes:
        wall: Wall time.
        busy: Time in which the cores of the machine were not idle, summed over cores.
        steal: The part of ``busy`` in which a virtual machine's cores ran other virtual machines.
        ours: CPU time of this process and of all processes that it started, directly or not, including ended processes,
            and of the threads of the Linux kernel, which are not other programs: on a virtual machine, the one that
            monitors the memory used 3 % of a core.
        others: CPU time of each other process, by process id.
        others_ended: CPU time of ended processes that other processes started and waited for.
        is_complete: Whether all processes of the machine are visible. In a container they are not.
    """

    wall: float
    busy: float
    steal: float
    ours: float
    others: dict[int, float]
    others_ended: float
    is_complete: bool

    @classmethod
    def now(cls) -> CpuTimes:
        """Read the clocks."""
        import psutil  # here, so that no worker of a peer has to import it

        wall, machine = time.perf_counter(), psutil.cpu_times()
        busy = wall * (os.cpu_count() or 1) - machine.idle - getattr(machine, "iowait", 0.0)
        this = psutil.Process()
        family = {process.pid for process in (this, *this.children(recursive=True))}
        ours, others, others_ended = 0.0, {}, 0.0
        kernel: int | None = None  # process id of "kthreadd", the parent of the kernel's threads; hidden in containers
        for process in psutil.process_iter():  # in the order of their ids, so "kthreadd" comes before its threads
            try:
                times, parent = process.cpu_times(), process.ppid()
                if kernel is None and process.name() == "kthreadd":
                    kernel = process.pid
            except psutil.Error:  # the process has ended; its parent's times include its time
                continue
            own, ended = _precise(process.pid, times.user + times.system), times.children_user + times.children_system
            if process.pid in family or parent == kernel:
                ours += own + ended
            else:
                others[process.pid] = own
                others_ended += ended
        return cls(wall, busy, getattr(machine, "steal", 0.0), ours, others, others_ended, kernel is not None)

    def others_percent(self, end: CpuTimes) -> float:
        """Return the share of a core that other programs used from this reading until ``end``, in %.

        If all processes are visible and no other process has ended, the share is exact: the sum of the other processes'
        times. Otherwise the share is the machine's busy time without ours. The busy time includes the kernel's time for
        switching between processes, about 4 % with one process per env.
        """
        if end.is_complete and self.others.keys() <= end.others.keys() and self.others_ended == end.others_ended:
            others = sum(seconds - self.others.get(pid, 0.0) for pid, seconds in end.others.items())
            others += end.steal - self.steal
        else:
            others = (end.busy - self.busy) - (end.ours - self.ours) - _GRAIN
        return max(0.0, 100 * others / (end.wall - self.wall))


def _precise(pid: int, seconds: float) -> float:
    """Return the exact CPU time of a process or, if it cannot be read, ``seconds``, the value from psutil.

    The resolution of psutil is 10 ms, and these errors add up over many workers.
    """
    try:
        clock = ctypes.c_int()
        if ctypes.CDLL(None).clock_getcpuclockid(pid, ctypes.byref(clock)) == 0:
            return time.clock_gettime(clock.value)
    except (AttributeError, OSError):  # the system has no such clock, or the process has ended
        pass
    return seconds


class Disturbance:
    """Collects the CPU time that other programs used in one round."""

    def __init__(self) -> None:
        self._worst: float | None = None

    def note(self, begin: CpuTimes, ready: CpuTimes, end: CpuTimes) -> None:
        """Add the CPU time that other programs used between these readings.

        The share from ``begin`` to ``end`` or the share from ``ready`` to ``end`` counts, whichever is larger: opening
        can take longer than stepping, and must not hide a disturbance of the steps.

        Args:
            begin: Reading before the envs were made.
            ready: Reading after the envs were reset.
            end: Reading after the envs were stepped.
        """
        self._worst = max(begin.others_percent(end), ready.others_percent(end), self._worst or 0.0)

    def numbers(self) -> Numbers:
        """Return the largest share so far as the number ``others_percent``. Empty if nothing was added."""
        return {} if self._worst is None else {"others_percent": self._worst}
