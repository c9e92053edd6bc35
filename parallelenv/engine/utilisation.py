"""How long hosts are busy and how long they wait, estimated from a sample of the commands.

Reading a clock for each message would slow down a step of 100 us. So only some of the quick commands are timed, at
irregular distances, since the caller's work between steps may be regular; slower ones are always timed.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterable
from dataclasses import dataclass

from parallelenv.engine.notebook_cells import current_run

PAUSE = 10.0
"""Seconds: a longer pause of the caller does not count as waiting time of hosts."""
_SHORT = 0.05
"""Seconds: nor does one longer than this from one notebook cell to the next."""
_QUICK = 3e-3
"""Seconds between commands below which only some are timed."""
_DISTANCES = (31, 89, 53, 71, 23, 41, 113, 67)
_NUM_FIRST = 64
"""Number of commands that are all timed at the start."""


@dataclass(slots=True)
class BusyTime:
    """When a host is busy.

    Attributes:
        since: Moment, of `time.perf_counter`, at which it got a timed command; else 0.
        took: Seconds that it took, once it has replied.
        busy: Seconds of all earlier timed commands.
    """

    since: float = 0.0
    took: float = 0.0
    busy: float = 0.0


class Utilisation:
    """The timing of a pool.

    Attributes:
        left: Number of commands, each to one or several hosts, to skip before the next is timed.
    """

    def __init__(self) -> None:
        self.left = 0
        self._distances = itertools.cycle(_DISTANCES)
        self._distance = 0
        self._stamped = 0.0  # when a command was timed, or ended the time of the one before
        self._latest = 0.0  # when the latest reply to one arrived
        self._open: list[BusyTime] = []  # of the hosts that work on it
        self._timed = 0.0  # seconds from each timed command to the next command
        self._elapsed = 0.0
        self._num_seen = 0  # commands within `_elapsed`
        self._run = current_run()

    def sent(self, shifts: Iterable[BusyTime]) -> None:
        """Record a command that is not skipped. ``shifts``: of all hosts that are busy from now on."""
        now = time.perf_counter()
        if not self._stamped:
            self._open_at(now, shifts)
            return
        gap = now - self._stamped
        pause = now - max(self._latest, self._stamped)
        if pause > _SHORT and self._is_rest(pause) and not any(shift.since for shift in self._open):
            gap -= pause
        self._elapsed += gap
        self._num_seen += 1 + self._distance
        if self._open:
            self._close_at(now, gap)
        if gap > _QUICK or self._distance or self._num_seen < _NUM_FIRST:
            self._open_at(now, shifts)
        else:
            self._stamped, self._distance = now, next(self._distances)
            self.left = self._distance

    def _is_rest(self, pause: float) -> bool:
        """Whether a pause of the caller is not part of its work."""
        before, self._run = self._run, current_run()
        return pause > PAUSE or before != self._run

    def _open_at(self, now: float, shifts: Iterable[BusyTime]) -> None:
        self._stamped, self._distance, self.left = now, 0, 0
        self._open = list(shifts)
        for shift in self._open:
            shift.since, shift.took = now, 0.0

    def _close_at(self, now: float, gap: float) -> None:
        self._timed += gap
        for shift in self._open:
            shift.busy += shift.took if not shift.since else now - shift.since
            shift.since, shift.took = 0.0, 0.0
        self._open = []

    def received(self, shift: BusyTime) -> None:
        """Record that a host has replied to a timed command."""
        self._latest = time.perf_counter()
        shift.took, shift.since = self._latest - shift.since, 0.0

    def elapsed(self) -> float:
        """Return the seconds since the first command, without rests of the caller; the last part is an estimate."""
        is_working = any(shift.since for shift in self._open)
        end = time.perf_counter() if is_working else self._latest
        running = max(0.0, end - self._stamped) if self._open else 0.0
        untimed = self._distance - self.left if not self._open else 0
        return (self._elapsed + running) * (1 + untimed / max(1, self._num_seen))

    def waiting(self, shift: BusyTime) -> float | None:
        """Return the share of the time in which a host was idle, 0 to 1; ``None`` if unknown."""
        now, timed, busy = time.perf_counter(), self._timed, shift.busy
        if self._open:
            is_working = any(one.since for one in self._open)
            timed += max(0.0, (now if is_working else self._latest) - self._stamped)
            busy += now - shift.since if shift.since else shift.took
        return min(1.0, max(0.0, 1 - busy / timed)) if timed > 0 else None
