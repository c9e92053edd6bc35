"""What a host notes of when each of its envs does what, for `ParallelEnv.profile`.

While it is watched, it notes the commands whose number says so: moments of envs in C, and resets within steps. In the
midst of steps, where nothing of it is in any cache, a clock is read in 0.5 us that takes 0.06 us in a loop: a command
that is noted takes some 4 us more, an env 0.6 us, and a reset 1 us. So of quick steps only some are noted: the caller
says which, and within a rollout, where the caller is not asked, the host itself. One that is not noted takes nothing
more, and its resets do not. So a host stays of its class, for in Python 3.11 an object whose class was ever changed is
slower from then on; and resets are noted by the host itself, for what stands in an env's place would slow down others.
"""

from __future__ import annotations

import operator
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import compress, cycle, repeat, starmap
from math import ceil
from time import perf_counter
from typing import TYPE_CHECKING, Any

import numpy as np

from parallelenv.contract.batch import Array
from parallelenv.contract.process_info import ProcessInfo, clock_id, this_process
from parallelenv.contract.protocol import Command

if TYPE_CHECKING:
    from parallelenv.worker.host import Host, Reset, Walk

MOST_SPANS = 200_000
"""Commands that are noted of a host; there are no more after that."""
MOST_MOMENTS = 2_000_000
"""Likewise, moments of its envs: 16 MB."""
COST_OF_COMMAND, COST_OF_ENV, COST_OF_RESET = 10e-6, 0.6e-6, 1e-6
"""Seconds that it takes to note a command, on both sides, each of its envs, and each reset: on a slow core, rather too
much."""
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

    def left_out(self, num_noted: int, seconds: float, num_envs: int, num_resets: float) -> int:
        """Return how many steps of a host are to be left out after some that were noted.

        Args:
            num_noted: So many.
            seconds: That one of them took.
            num_envs: Envs that were stepped in it.
            num_resets: Resets within it.
        """
        cost = COST_OF_COMMAND + COST_OF_ENV * num_envs + COST_OF_RESET * num_resets
        cost /= max(seconds, 1e-9)
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
    seat: ProcessInfo
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


class HostTracer:
    """What is noted of a host."""

    def __init__(self) -> None:
        self.is_full = False
        self.since = perf_counter()
        self._resets: list[Reset] = []
        self._spans: list[Span] = []
        self._moments = array("d")
        self._thinning = Thinning()
        self._in_rollout = False
        self._num_inner = 0  # steps within rollouts that were noted
        self._left_out = 0  # so many are still to be left out
        # Read for each env, in C: a moment is appended, which answers None, and that is made something true.
        self.clock = map(operator.not_, map(self._moments.append, starmap(perf_counter, repeat(()))))

    def noted(self, host: Host, command: Command, walk: Walk, rest: Iterator[Any]) -> tuple[Walk, Iterator[Any]]:
        """Return how to walk over envs and what to walk over so that it is noted; as it was if that is left out."""
        if (not command.number and self._leaves_out()) or self.is_full or command.name in ("watch", "unwatch"):
            return walk, rest
        watched = self._watched(host, command, walk)
        return watched, rest if command.name == "rollout" else compress(rest, self.clock)

    def _leaves_out(self) -> bool:
        """Whether a step within a rollout is not to be noted."""
        if self._left_out:
            self._left_out -= 1
            return True
        return not self._in_rollout

    def _watched(self, host: Host, command: Command, walk: Walk) -> Walk:
        """Return a walk that notes when it is made."""
        moments, resets, begun = self._moments, self._resets, len(self._moments)
        is_rollout = command.name == "rollout"

        def watched_walk(rest: Iterator[Any], common: Any, values: dict[int, Any]) -> None:
            first, first_reset, begin = len(moments), len(resets), perf_counter()
            try:
                self._in_rollout, host.resets = is_rollout or self._in_rollout, None if is_rollout else resets
                walk(rest, common, values)
            finally:
                end = perf_counter()
                self._in_rollout, host.resets = self._in_rollout and not is_rollout, None
                numbers = len(moments) - first, len(resets) - first_reset
                stands_for = 1 if command.number else self._thin(end - begin, *numbers)
                span = begin, end, command.name, command.env_ids, first - begun, len(moments), stands_for
                self._spans.append(span)
                self.is_full = len(self._spans) >= MOST_SPANS or len(moments) >= MOST_MOMENTS

        return watched_walk

    def _thin(self, seconds: float, num_envs: int, num_resets: int) -> int:
        """Return for how many a step within a rollout stands: itself, and those that are left out after it."""
        self._num_inner += 1
        if self._num_inner >= NUM_FIRST:
            self._left_out = self._thinning.left_out(1, seconds, num_envs, num_resets)
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
            this_process(),
            clock_id(),
            self.since,
            perf_counter(),
            [span[2] for span in spans],
            np.array([span[:2] for span in spans], np.float64).reshape(-1, 2),
            counts,
            np.array([span[6] for span in spans], np.int64),
            np.fromiter(owners, np.int64),
            np.array(self._moments, np.float64),
            np.array(self._resets, np.float64).reshape(-1, 3),
            self.is_full,
        )


def begin_tracing(host: Host) -> None:
    """Let a host note what its envs do; what it has noted before is forgotten."""
    host.notes = HostTracer()


def end_tracing(host: Host) -> HostRecord | None:
    """Let a host note no more; return what it has noted, ``None`` if it was not watched."""
    notes, host.notes = host.notes, None
    return None if notes is None else notes.record(host.everyone)
