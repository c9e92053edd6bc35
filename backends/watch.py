"""A host that notes when each of its envs does what, for `ParallelEnv.profile`.

A host becomes one for as long as it is watched, so that nothing is asked of it at other times. While it is, it notes
the commands whose number says so, and moments of envs in C. In the midst of steps, where nothing of it is in any cache,
a clock is read in 0.5 us that takes 0.06 us in a loop: a command that is noted takes some 4 us more, and an env 0.6 us.
So of quick steps only some are noted: the caller says which, and within a rollout, where the caller is not asked, the
host itself. One that is not noted takes 0.6 us more.
"""

from __future__ import annotations

import operator
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import compress, cycle, repeat, starmap
from math import ceil
from time import perf_counter
from typing import Any, cast

import numpy as np

from parallelenv.backends.host import Host, Turns, Walk
from parallelenv.batch import Array
from parallelenv.protocol import NOTED, Command
from parallelenv.seats import Seat, clock_id, here

MOST_SPANS = 200_000
"""Commands that are noted of a host; there are no more after that."""
MOST_MOMENTS = 2_000_000
"""Likewise, moments of its envs: 16 MB."""
COST_OF_COMMAND, COST_OF_ENV = 10e-6, 0.6e-6
"""Seconds that it takes to note a command, on both sides, and each of its envs: on a slow core, rather too much."""
ALLOWED, WANTED = 0.02, 0.01
"""Share of the time that may be spent on that. If it takes more to note everything, only so much is noted that it takes
the latter."""
NUM_FIRST = 64
"""So many steps are noted, quick or not, before any is left out."""
_UNEVEN = (1.3, 0.6, 1.1, 0.8, 1.5, 0.7)
Span = tuple[float, float, str, tuple[int, ...], int, int, int]
"""When a command began and ended, its operation and envs, how many of their moments were noted before, up to where
moments are noted, and for how many commands it stands: all that may be worked out later is."""


class Thinning:
    """Says how many steps are to be left out, at irregular distances: what envs or the caller do may be regular."""

    def __init__(self) -> None:
        self._uneven = cycle(_UNEVEN)

    def left_out(self, num_noted: int, seconds: float, num_envs: int) -> int:
        """Return how many steps of a host are to be left out after some that were noted.

        Args:
            num_noted: So many.
            seconds: That one of them took.
            num_envs: Envs that were stepped in it.
        """
        cost = (COST_OF_COMMAND + COST_OF_ENV * num_envs) / max(seconds, 1e-9)
        return 0 if cost <= ALLOWED else ceil(num_noted * (cost / WANTED - 1) * next(self._uneven))


@dataclass(frozen=True, slots=True)
class HostRecord:
    """What a host has noted. All moments are of its `time.perf_counter`.

    Attributes:
        env_ids: Its envs.
        seat: Where it is.
        clock: What tells its clock from others.
        since: When it began to note.
        now: When this was said.
        operations: ``m`` names, of the commands that it has executed.
        spans: ``(m, 2)`` float64: when it began and ended to do so. A step within a rollout stands before the rollout.
        counts: ``(m,)`` int64: how many of the moments belong to each.
        stands_for: ``(m,)`` int64: how many of its kind it stands for: of quick steps within a rollout some are noted.
        owners: ``(k,)`` int64: env ids.
        moments: ``(k,)`` float64: when it was their turn.
        resets: ``(r, 3)`` float64: beginning and end of each reset within a step, and the env's id.
        is_full: Whether there was more than is noted.
    """

    env_ids: tuple[int, ...]
    seat: Seat
    clock: str
    since: float
    now: float
    operations: Sequence[str]
    spans: Array
    counts: Array
    stands_for: Array
    owners: Array
    moments: Array
    resets: Array
    is_full: bool

    def __deepcopy__(self, memo: Any) -> HostRecord:
        """Return itself: nobody else has it."""
        return self


class Watch:
    """What is noted of a host."""

    def __init__(self) -> None:
        self.is_full = False
        self.is_noting = False  # at this moment
        self.since = perf_counter()
        self.resets: list[tuple[float, float, int]] = []
        self._spans: list[Span] = []
        self._moments = array("d")
        self._thinning = Thinning()
        self._in_rollout = False
        self._num_inner = 0  # steps within rollouts that were noted
        self._left_out = 0  # so many are still to be left out
        # Read for each env, in C: a moment is appended, which answers None, and that is made something true.
        self.clock = map(operator.not_, map(self._moments.append, starmap(perf_counter, repeat(()))))

    def leaves_out(self) -> bool:
        """Whether a step within a rollout is not to be noted."""
        if self._left_out:
            self._left_out -= 1
            return True
        return not self._in_rollout

    def watched(self, command: Command, walk: Walk) -> Walk:
        """Return a walk that notes when it is made."""
        moments, begun = self._moments, len(self._moments)
        is_rollout = command.name == "rollout"

        def watched_walk(rest: Iterator[Any], common: Any, values: dict[int, Any]) -> None:
            first, begin = len(moments), perf_counter()
            self._in_rollout, self.is_noting = is_rollout or self._in_rollout, not is_rollout
            try:
                walk(rest, common, values)
            finally:
                end = perf_counter()
                self._in_rollout, self.is_noting = self._in_rollout and not is_rollout, False
                stands_for = 1 if command.number else self._thin(end - begin, len(moments) - first)
                span = begin, end, command.name, command.env_ids, first - begun, len(moments), stands_for
                self._spans.append(span)
                self.is_full = len(self._spans) >= MOST_SPANS or len(moments) >= MOST_MOMENTS

        return watched_walk

    def _thin(self, seconds: float, num_envs: int) -> int:
        """Return for how many a step within a rollout stands: itself, and those that are left out after it."""
        self._num_inner += 1
        if self._num_inner >= NUM_FIRST:
            self._left_out = self._thinning.left_out(1, seconds, num_envs)
        return 1 + self._left_out

    def record(self, env_ids: tuple[int, ...]) -> HostRecord:
        """Return all that was noted."""
        spans = self._spans
        counts = np.diff(np.array([0, *(span[5] for span in spans)], np.int64))
        owners = (
            env_id
            for (_, _, _, asked, first, _, _), count in zip(spans, counts.tolist(), strict=True)
            for env_id in asked[first : first + count]
        )
        return HostRecord(
            env_ids,
            here(),
            clock_id(),
            self.since,
            perf_counter(),
            [span[2] for span in spans],
            np.array([span[:2] for span in spans], np.float64).reshape(-1, 2),
            counts,
            np.array([span[6] for span in spans], np.int64),
            np.fromiter(owners, np.int64),
            np.array(self._moments, np.float64),
            np.array(self.resets, np.float64).reshape(-1, 3),
            self.is_full,
        )


class WatchedHost(Host):
    """What a host is while it is watched."""

    watch_kept: Watch

    def begin(self, command: Command) -> tuple[Walk, Iterator[Any], Turns]:
        """Return how to walk over the envs of a command, and note it if it is to be noted."""
        number = command.number
        if 0 < number < NOTED or (not number and self.watch_kept.leaves_out()):  # 0: a step within a rollout
            return Host.begin(self, command)
        walk, rest, turns = Host.begin(self, command)
        if self.watch_kept.is_full or command.name in ("watch", "unwatch"):
            return walk, rest, turns
        watched = self.watch_kept.watched(command, walk)
        return watched, rest if command.name == "rollout" else compress(rest, self.watch_kept.clock), turns

    def _end(self, row: int, said: tuple[Any, Any, Any], goes_on: Any, values: dict[int, Any]) -> None:
        if not goes_on or not self.watch_kept.is_noting:
            Host._end(self, row, said, goes_on, values)
            return
        begin = perf_counter()
        try:
            Host._end(self, row, said, goes_on, values)
        finally:
            self._note_reset(begin, row + self.writer.first)

    def _reset_instead(self, env_id: int, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        begin = perf_counter()
        try:
            return super()._reset_instead(env_id, action)
        finally:
            if self.watch_kept.is_noting:
                self._note_reset(begin, env_id)

    def _note_reset(self, begin: float, env_id: int) -> None:
        if not self.watch_kept.is_full:
            self.watch_kept.resets.append((begin, perf_counter(), env_id))


def begin_watching(host: Host) -> None:
    """Let a host note what its envs do; what it has noted before is forgotten."""
    host.__class__ = WatchedHost
    # Not by way of `vars`: an object whose dict was looked at has slower attributes ever after.
    cast(WatchedHost, host).watch_kept = Watch()


def end_watching(host: Host) -> HostRecord | None:
    """Let a host note no more; return what it has noted, ``None`` if it was not watched."""
    if not isinstance(host, WatchedHost):
        return None
    record = host.watch_kept.record(host.everyone)
    del host.watch_kept
    host.__class__ = Host  # type: ignore[assignment]
    return record
