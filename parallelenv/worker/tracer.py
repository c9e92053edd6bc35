"""A host's record of when each of its envs does what, for `ParallelEnv.profile`.

A traced host records the commands whose number requests it: the times of envs in C, and resets within steps. During
steps, when its code is not in any cache, reading a clock takes 0.5 us, though 0.06 us in a loop: a recorded command
takes about 4 us more, an env 0.6 us, and a reset 1 us. So only some of the quick steps are recorded: the caller selects
them, and within a rollout, where the caller is not involved, the host. A step that is not recorded costs nothing more,
nor do its resets. Therefore the host keeps its class, because in Python 3.11 an object whose class was ever changed
stays slower; and the host itself records resets, because a substitute for an env would slow down the other steps.
"""

from __future__ import annotations

import operator
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import cycle, repeat, starmap
from math import ceil
from time import perf_counter
from typing import TYPE_CHECKING, Any

import numpy as np

from parallelenv.contract.batch import Array
from parallelenv.contract.process_info import ProcessInfo, clock_id, this_process
from parallelenv.contract.protocol import Command

if TYPE_CHECKING:
    from parallelenv.worker.host import Host, Reset, Run

MOST_SPANS = 200_000
"""Maximum number of commands recorded per host."""
MOST_MOMENTS = 2_000_000
"""Maximum number of times of envs recorded per host: 16 MB."""
COST_OF_COMMAND, COST_OF_ENV, COST_OF_RESET = 10e-6, 0.6e-6, 1e-6
"""Seconds needed to record a command, on both sides, each of its envs, and each reset: on a slow core, rounded up."""
ALLOWED, WANTED = 0.02, 0.01
"""Maximum share of the time for recording; if recording everything takes more, so little is recorded that it takes the
second value."""
NUM_FIRST = 64
"""Number of steps recorded, quick or not, before any is skipped."""
_UNEVEN = (1.3, 0.6, 1.1, 0.8, 1.5, 0.7)
Span = tuple[float, float, str, tuple[int, ...], int, int, int]
"""Begin and end of a command, its operation and envs, number of their times recorded before it, end of its times in the
record, and number of commands that it represents. Everything that can be computed later is."""


class StepSkipping:
    """Computes how many steps to skip, at irregular intervals, because envs and caller may be periodic."""

    def __init__(self) -> None:
        self._uneven = cycle(_UNEVEN)

    def left_out(self, num_noted: int, seconds: float, num_envs: int, num_resets: float) -> int:
        """Return how many steps of a host to skip after some recorded ones.

        Args:
            num_noted: Number of recorded steps.
            seconds: Duration of one of them.
            num_envs: Number of envs stepped in it.
            num_resets: Number of resets within it.
        """
        cost = COST_OF_COMMAND + COST_OF_ENV * num_envs + COST_OF_RESET * num_resets
        cost /= max(seconds, 1e-9)
        return 0 if cost <= ALLOWED else ceil(num_noted * (cost / WANTED - 1) * next(self._uneven))


@dataclass(frozen=True, slots=True)
class HostRecord:
    """The record of a host. All times are of its `time.perf_counter`.

    Attributes:
        env_ids: Its envs.
        process: Its process.
        clock: Id of its clock.
        since: When recording began.
        now: When this record was made.
        operations: ``m`` names, of the commands that it executed.
        spans: ``(m, 2)`` float64: begin and end of each command. A step within a rollout precedes the rollout.
        counts: ``(m,)`` int64: number of ``moments`` of each command.
        stands_for: ``(m,)`` int64: number of commands that each represents; only some quick steps of a rollout are
            recorded.
        owners: ``(k,)`` int64: env ids.
        moments: ``(k,)`` float64: when each env's turn began.
        resets: ``(r, 3)`` float64: begin and end of each reset within a step, and the env's id.
        is_full: Whether the record reached its limit.
    """

    env_ids: tuple[int, ...]
    process: ProcessInfo
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
        """Return itself: it is not used elsewhere."""
        return self


class HostTracer:
    """Records the commands of a host."""

    def __init__(self) -> None:
        self.is_full = False
        self.since = perf_counter()
        self._resets: list[Reset] = []
        self._spans: list[Span] = []
        self._moments = array("d")
        self._step_skipping = StepSkipping()
        self._in_rollout = False
        self._num_inner = 0  # recorded steps within rollouts
        self._left_out = 0  # number of steps still to skip
        # Evaluated for each env, in C: `append` returns None, which is made true.
        self.clock = map(operator.not_, map(self._moments.append, starmap(perf_counter, repeat(()))))

    def wants_inner_step(self) -> bool:
        """Whether to record the next step within a rollout."""
        if self._left_out:
            self._left_out -= 1
            return False
        return self._in_rollout

    def traced(self, host: Host, command: Command, run: Run) -> tuple[Run, Iterator[bool] | None]:
        """Return the run of a command such that it is recorded, and the clock of its envs; without, if it is full."""
        if self.is_full or (command.operation == "state" and command.common in ("trace", "record")):
            return run, None
        moments, resets, begun = self._moments, self._resets, len(self._moments)
        is_rollout = command.operation == "rollout"

        def traced_run(values: dict[int, Any]) -> None:
            first, first_reset, begin = len(moments), len(resets), perf_counter()
            try:
                self._in_rollout, host.resets = is_rollout or self._in_rollout, None if is_rollout else resets
                run(values)
            finally:
                end = perf_counter()
                self._in_rollout, host.resets = self._in_rollout and not is_rollout, None
                numbers = len(moments) - first, len(resets) - first_reset
                stands_for = 1 if command.number else self._thin(end - begin, *numbers)
                span = begin, end, command.operation, command.env_ids, first - begun, len(moments), stands_for
                self._spans.append(span)
                self.is_full = len(self._spans) >= MOST_SPANS or len(moments) >= MOST_MOMENTS

        return traced_run, None if is_rollout else self.clock

    def _thin(self, seconds: float, num_envs: int, num_resets: int) -> int:
        """Return how many steps a step within a rollout represents: itself and those skipped after it."""
        self._num_inner += 1
        if self._num_inner >= NUM_FIRST:
            self._left_out = self._step_skipping.left_out(1, seconds, num_envs, num_resets)
        return 1 + self._left_out

    def record(self, env_ids: tuple[int, ...]) -> HostRecord:
        """Return the record."""
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


def begin_tracing(host: Host) -> tuple[str, float]:
    """Make a host record what its envs do; return its clock's id and time. An earlier record is dropped."""
    host.tracer = HostTracer()
    return clock_id(), perf_counter()


def end_tracing(host: Host) -> HostRecord | None:
    """Stop a host's recording; return its record, ``None`` if it was not traced."""
    tracer, host.tracer = host.tracer, None
    return None if tracer is None else tracer.record(host.everyone)
