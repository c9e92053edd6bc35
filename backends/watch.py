"""A host that notes when each of its envs does what, for `ParallelEnv.profile`.

A host becomes one for as long as it is watched, so that nothing is asked of it at other times. While it is, an env
costs it 0.1 us more, for a moment is noted in C, and a command 1 us.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import compress, islice, repeat, starmap, tee
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
_PART = 4096
Span = tuple[float, float, str, int]
"""When a command began and ended, its operation, and how many of its envs' moments are noted."""


@dataclass(frozen=True, slots=True)
class HostRecord:
    """What a host has noted. All moments are of its `time.perf_counter`.

    Attributes:
        env_ids: Its envs.
        seat: Where it is.
        clock: What tells its clock from others.
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
        self.resets: list[tuple[float, float, int]] = []
        self._spans: list[Span] = []
        self._owners: list[Sequence[int]] = []
        self._parts: list[Array] = []
        self._num_moments = self._num_pending = 0
        self._clock, self._moments = tee(starmap(perf_counter, repeat(())))  # who reads the first fills the second

    def watched(self, command: Command, walk: Walk, rest: Iterator[Any], turns: Turns) -> tuple[Walk, Iterator[Any]]:
        """Return a walk that notes when it is made, and what to walk over, which notes when it goes on."""
        iterator, env_ids = turns
        noted = 0

        def watched_walk(rest: Iterator[Any], common: Any, values: dict[int, Any]) -> None:
            nonlocal noted
            begin = perf_counter()
            try:
                walk(rest, common, values)
            finally:
                end = perf_counter()
                so_far = len(env_ids) - operator.length_hint(iterator)
                self._note((begin, end, command.name, so_far - noted), env_ids[noted:so_far])
                noted = so_far

        return watched_walk, compress(rest, self._clock) if env_ids else rest

    def _note(self, span: Span, owners: Sequence[int]) -> None:
        self._spans.append(span)
        self._owners.append(owners)
        self._num_pending += len(owners)
        if self._num_pending > _PART:
            self._put_away()
        self.is_full = len(self._spans) >= MOST_SPANS or self._num_moments >= MOST_MOMENTS

    def _put_away(self) -> None:
        """Keep moments as numbers of eight bytes."""
        number, self._num_pending = self._num_pending, 0
        self._parts.append(np.fromiter(islice(self._moments, number), np.float64, number))
        self._num_moments += number

    def record(self, env_ids: tuple[int, ...]) -> HostRecord:
        """Return all that was noted."""
        self._put_away()
        spans = self._spans
        return HostRecord(
            env_ids,
            here(),
            clock_id(),
            perf_counter(),
            [span[2] for span in spans],
            np.array([span[:2] for span in spans], np.float64).reshape(-1, 2),
            np.array([span[3] for span in spans], np.int64),
            np.fromiter((env_id for owners in self._owners for env_id in owners), np.int64),
            np.concatenate(self._parts),
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
        return *self.watch_kept.watched(command, walk, rest, turns), turns

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
