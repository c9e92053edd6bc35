"""How much CPU time other programs used while a system was measured."""

from __future__ import annotations

import ctypes
import os
import time
from dataclasses import dataclass

QUIET = 2.0  # % of a core that other programs may use; a round with more is measured again
_GRAIN = 0.01  # seconds in which the system counts the machine's idle time

Numbers = dict[str, float]


def is_disturbed(numbers: Numbers) -> bool:
    """Return whether other programs used too much CPU in a round with these numbers."""
    return numbers.get("others_percent", 0.0) > QUIET


@dataclass(frozen=True, slots=True)
class CpuTimes:
    """What the clocks of the machine and of its processes show, in seconds.

    Attributes:
        wall: Wall time.
        busy: For which the cores of the machine were not idle, all together.
        steal: Of this, what went to other guests of the same host.
        ours: CPU time of this process and of all that it started, directly or not, also of those that have ended.
        others: CPU time of each other process, by its id.
        others_ended: CPU time of the processes that others started and waited for.
        is_complete: Whether all processes of the machine are seen. In a container they are not.
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
        ours, others, others_ended, is_complete = 0.0, {}, 0.0, False
        for process in psutil.process_iter():
            try:
                times = process.cpu_times()
                is_complete = is_complete or process.name() == "kthreadd"  # Linux's own, in no container
            except psutil.Error:  # it ended meanwhile: its parent has its time
                continue
            own, ended = _precise(process.pid, times.user + times.system), times.children_user + times.children_system
            if process.pid in family:
                ours += own + ended
            else:
                others[process.pid] = own
                others_ended += ended
        return cls(wall, busy, getattr(machine, "steal", 0.0), ours, others, others_ended, is_complete)

    def others_percent(self, end: CpuTimes) -> float:
        """Return how much of a core other programs used until ``end``, in %.

        That is the machine's busy time without ours. It contains what the kernel spends on switching between processes,
        though: with one process per env some 4 %. If no other process has ended, the sum of theirs is exact.
        """
        if end.is_complete and self.others.keys() <= end.others.keys() and self.others_ended == end.others_ended:
            others = sum(seconds - self.others.get(pid, 0.0) for pid, seconds in end.others.items())
            others += end.steal - self.steal
        else:
            others = (end.busy - self.busy) - (end.ours - self.ours) - _GRAIN
        return max(0.0, 100 * others / (end.wall - self.wall))


def _precise(pid: int, seconds: float) -> float:
    """Return the CPU time of a process, which psutil knows only in units of 10 ms: over many workers they add up."""
    try:
        clock = ctypes.c_int()
        if ctypes.CDLL(None).clock_getcpuclockid(pid, ctypes.byref(clock)) == 0:
            return time.clock_gettime(clock.value)
    except (AttributeError, OSError):  # not on this system; or the process has ended
        pass
    return seconds


class Disturbance:
    """Collects how much CPU other programs used in one round."""

    def __init__(self) -> None:
        self._worst: float | None = None

    def note(self, begin: CpuTimes, ready: CpuTimes, end: CpuTimes) -> None:
        """Take into account what others used between these readings.

        Opening can take longer than stepping, and so must not hide what disturbed the steps: the worse of both counts.

        Args:
            begin: Before the envs were made.
            ready: When they were reset.
            end: After they were stepped.
        """
        self._worst = max(begin.others_percent(end), ready.others_percent(end), self._worst or 0.0)

    def numbers(self) -> Numbers:
        """Return the worst that was noted, as the number ``others_percent``; nothing if nothing was noted."""
        return {} if self._worst is None else {"others_percent": self._worst}
