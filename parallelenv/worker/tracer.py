"""A host's record of what each of its envs does and when, for `ParallelEnv.profile`.

The *turn* of an env is the time that a command spends on the env. Recording takes about 4 us per command, 0.6 us per
turn, and 1 us per reset within a step. For a host that is not traced, the cost is one comparison per command.
"""

from __future__ import annotations

import operator
from array import array
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import compress, repeat, starmap
from time import perf_counter
from typing import Any

import numpy as np

from parallelenv.contract.batch import Array
from parallelenv.contract.worker_info import ProcessInfo, clock_id, this_process
from parallelenv.worker.running_command import Run, RunningCommand

MOST_TURNS = 1_000_000
"""Maximum number of turns and commands, added together, that a host keeps.

If there are more, the oldest commands are dropped. A turn takes 8 bytes of memory, and a command takes more.
"""


@dataclass(frozen=True, slots=True, eq=False)
class WorkerRecord:
    """What a worker's envs did and when. All times are in seconds, on the same `time.perf_counter` clock."""

    env_ids: tuple[int, ...]
    process: ProcessInfo
    clock: str  #: Id of the worker's clock.
    since: float  #: Time at which the record starts. Commands that ended before this time are not in the record.
    now: float  #: Time at which the record was made.
    is_cut: bool  #: Whether any commands were dropped.
    operations: Sequence[str]  #: Operation of each of the ``m`` commands. A step of a rollout precedes the rollout.
    spans: Array  #: ``(m, 2)`` float64: start and end of each command.
    turns: Array  #: ``(k, 2)`` float64: start and end of each turn of an env.
    owners: Array  #: ``(k,)`` int64: env id of each turn.
    span_of: Array  #: ``(k,)`` int64: index of the command that each turn is part of.
    resets: Array  #: ``(r, 3)`` float64: start and end of each reset within a step, and the env's id.

    def of_operation(self, name: str) -> Array:
        """Return a ``(m,)`` bool array that is True for the commands whose operation is ``name``."""
        return np.array([one == name for one in self.operations], bool)

    def later(self, seconds: float) -> WorkerRecord:
        """Return a copy of the record with ``seconds`` added to all times."""
        resets = self.resets + np.array([seconds, seconds, 0.0])
        since, spans, turns = self.since + seconds, self.spans + seconds, self.turns + seconds
        return replace(self, since=since, now=self.now + seconds, spans=spans, turns=turns, resets=resets)

    def __deepcopy__(self, memo: object) -> WorkerRecord:
        """Return the record itself, because the worker no longer uses it."""
        return self


class HostTracer:
    """Records the commands of a host."""

    def __init__(self) -> None:
        self.resets: deque[tuple[float, float, int]] = deque(maxlen=MOST_TURNS)
        self._since = perf_counter()
        self._is_cut = False
        # Start and end of a command, its operation, the envs whose turn started, and the time at which each started.
        self._spans: deque[tuple[float, float, str, tuple[int, ...], array[float]]] = deque()
        self._num_turns = 0
        self._moments: list[float] = []  # when each env's turn started in the current command
        # This iterator is advanced for each env, in C. `append` returns None, which `not_` turns into True.
        self._clock = map(operator.not_, map(self._moments.append, starmap(perf_counter, repeat(()))))

    def traced(self, run: Run) -> Run:
        """Return a function that runs a command with ``run`` and records it."""

        def traced_run(running: RunningCommand, walk: Iterator[Any]) -> None:
            operation, env_ids = running.command.operation, running.command.env_ids
            if running.shares is not None:  # the turn of a vector env is shown as the turn of its first env
                env_ids = tuple(share.env_ids[0] for share in running.shares)
            is_rollout = operation == "rollout"  # the turns of its envs belong to its steps
            first, begin = running.num_started, perf_counter()  # above 0 after an interrupt
            self._moments.clear()
            try:
                run(running, walk if is_rollout else compress(walk, self._clock))
            finally:
                moments = array("d", () if is_rollout else self._moments)
                self._spans.append((begin, perf_counter(), operation, env_ids[first : first + len(moments)], moments))
                self._num_turns += 1 + len(moments)
                while self._num_turns > MOST_TURNS:
                    _, self._since, _, _, oldest = self._spans.popleft()
                    self._num_turns -= 1 + len(oldest)
                    self._is_cut = True

        return traced_run

    def record(self, env_ids: tuple[int, ...]) -> WorkerRecord:
        """Return a record of the commands so far. ``env_ids`` are the host's envs."""
        spans = list(self._spans)
        moments = np.array([moment for span in spans for moment in span[4]])
        span_of = np.repeat(np.arange(len(spans)), [len(span[4]) for span in spans])
        ends = np.append(moments[1:], 0.0)[: len(moments)]
        is_last = np.diff(span_of, append=-1) != 0
        times = np.array([span[:2] for span in spans], np.float64).reshape(-1, 2)
        ends[is_last] = times[span_of[is_last], 1]
        return WorkerRecord(
            env_ids,
            this_process(),
            clock_id(),
            self._since,
            perf_counter(),
            self._is_cut,
            [span[2] for span in spans],
            times,
            np.column_stack([moments, ends]).reshape(-1, 2),
            np.array([env_id for span in spans for env_id in span[3]], np.int64),
            span_of,
            np.array(self.resets, np.float64).reshape(-1, 3),
        )
