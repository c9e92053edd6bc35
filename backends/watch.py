"""A host that notes when each of its envs does what, for `ParallelEnv.profile`.

A host becomes one for as long as it is watched, so that nothing is asked of it at other times. While it is, moments of
envs are noted in C. On 2 slow cores an env then took 0.5 us more and a command 10 us, all included: 8 % of a step of 16
CartPoles in one loop, of 230 us.
"""

from __future__ import annotations

import operator
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import compress, repeat, starmap
from time import perf_counter
from typing import Any

import numpy as np

from parallelenv.backends.host import Host, Turns, Walk
from parallelenv.batch import Array
from parallelenv.protocol import Command
from parallelenv.seats import Seat, clock_id, here

MOST_SPANS = 200_000
"""Commands that are noted of a host; there are no more after that."""
MOST_MOMENTS = 2_000_000
"""Likewise, moments of its envs: 16 MB."""
Span = tuple[float, float, str, tuple[int, ...], int, int]
"""When a command began and ended, its operation and envs, how many of their moments were noted before, and up to where
moments are noted: all that may be worked out later is."""


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
        self.since = perf_counter()
        self.resets: list[tuple[float, float, int]] = []
        self._spans: list[Span] = []
        self._moments = array("d")
        # Read for each env, in C: a moment is appended, which answers None, and that is made something true.
        self.clock = map(operator.not_, map(self._moments.append, starmap(perf_counter, repeat(()))))

    def watched(self, command: Command, walk: Walk) -> Walk:
        """Return a walk that notes when it is made."""
        moments, begun = self._moments, len(self._moments)

        def watched_walk(rest: Iterator[Any], common: Any, values: dict[int, Any]) -> None:
            first, begin = len(moments), perf_counter()
            try:
                walk(rest, common, values)
            finally:
                self._spans.append((begin, perf_counter(), command.name, command.env_ids, first - begun, len(moments)))
                self.is_full = len(self._spans) >= MOST_SPANS or len(moments) >= MOST_MOMENTS

        return watched_walk

    def record(self, env_ids: tuple[int, ...]) -> HostRecord:
        """Return all that was noted."""
        spans = self._spans
        counts = np.diff(np.array([0, *(span[5] for span in spans)], np.int64))
        owners = (
            env_id
            for (_, _, _, asked, first, _), count in zip(spans, counts.tolist(), strict=True)
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
            np.fromiter(owners, np.int64),
            np.array(self._moments, np.float64),
            np.array(self.resets, np.float64).reshape(-1, 3),
            self.is_full,
        )


class WatchedHost(Host):
    """What a host is while it is watched."""

    watch_kept: Watch

    def begin(self, command: Command) -> tuple[Walk, Iterator[Any], Turns]:
        """Return how to walk over the envs of a command, and note it."""
        walk, rest, turns = super().begin(command)
        if self.watch_kept.is_full or command.name in ("watch", "unwatch"):
            return walk, rest, turns
        watched = self.watch_kept.watched(command, walk)
        return watched, rest if command.name == "rollout" else compress(rest, self.watch_kept.clock), turns

    def _end(self, row: int, said: tuple[Any, Any, Any], goes_on: Any, values: dict[int, Any]) -> None:
        begin = perf_counter()
        try:
            super()._end(row, said, goes_on, values)
        finally:
            if goes_on:
                self._note_reset(begin, row + self.writer.first)

    def _reset_instead(self, env_id: int, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        begin = perf_counter()
        try:
            return super()._reset_instead(env_id, action)
        finally:
            self._note_reset(begin, env_id)

    def _note_reset(self, begin: float, env_id: int) -> None:
        if not self.watch_kept.is_full:
            self.watch_kept.resets.append((begin, perf_counter(), env_id))


def begin_watching(host: Host) -> None:
    """Let a host note what its envs do; what it has noted before is forgotten."""
    host.__class__ = WatchedHost
    vars(host)["watch_kept"] = Watch()


def end_watching(host: Host) -> HostRecord | None:
    """Let a host note no more; return what it has noted, ``None`` if it was not watched."""
    if not isinstance(host, WatchedHost):
        return None
    record = host.watch_kept.record(host.everyone)
    del host.watch_kept
    host.__class__ = Host  # type: ignore[assignment]
    return record
