"""Records where the time goes, ``with env.profile() as p``, as a table, a timeline and a trace.

Hosts record what their envs do, see `HostTracer`; here it is recorded when calls begin and end, and both are put
together on the caller's clock.
"""

from __future__ import annotations

import contextlib
import time
from collections import deque
from pathlib import Path
from time import perf_counter
from types import TracebackType
from typing import TYPE_CHECKING

import numpy as np

from parallelenv.contract.batch import Array
from parallelenv.contract.worker_info import clock_id
from parallelenv.engine.thread_guard import single_threaded_in
from parallelenv.errors import EnvBusyError, ParallelEnvError, UsageError
from parallelenv.notebook.profile_summary import Summary, summarise
from parallelenv.notebook.recording import Recording, Timeline, checked_path
from parallelenv.worker.tracer import WorkerRecord

if TYPE_CHECKING:
    from parallelenv.env import ParallelEnv

COLLECT_TIMEOUT = 5.0
"""Seconds for workers to send their records."""
INTERRUPTED_TIMEOUT = 0.2
"""The same after Ctrl-C."""
MOST_CALLS = 1_000_000
"""Calls that are kept; older ones are dropped."""
_MOMENT = 1e-3
"""Seconds between checks whether another thread's call has ended."""


class Profile:
    """The recording of a ``with env.profile() as p`` block. Available once the block has ended.

    Until then `summary`, `plot` and `save` raise a `UsageError`.
    """

    finished: Recording | None = None

    @property
    def recording(self) -> Recording:
        """The recording; a `UsageError` before the block has ended."""
        if self.finished is None:
            raise UsageError("Nothing is recorded yet: ask when the block `with env.profile() as p` has ended.")
        return self.finished

    def summary(self) -> Summary:
        """Return where the time went, with advice. It displays as a table."""
        return summarise(self.recording)

    def plot(self, begin: float | None = None, end: float | None = None, path: str | Path | None = None) -> Timeline:
        """Return a timeline that a notebook displays: which worker ran when, and below it a few steps in detail.

        Args:
            begin: Start in seconds from the beginning of the recording; ``None`` means the beginning.
            end: End, likewise; ``None`` means the end of the recording.
            path: File to write it to as well: a name that ends in ``.svg``.

        Raises:
            ArgumentError: If nothing was recorded between ``begin`` and ``end``, or ``path`` has another suffix.
            OSError: If it cannot be written.
        """
        timeline = Timeline.of(self.recording, begin, end)
        if path is not None:
            timeline.save(path)
        return timeline

    def save(self, path: str | Path) -> Path:
        """Write a trace for Perfetto (ui.perfetto.dev) or ``chrome://tracing``, and return the path.

        Args:
            path: A name that ends in ``.json``; an existing file is replaced.

        Raises:
            ArgumentError: If ``path`` has another suffix.
            OSError: If it cannot be written.
        """
        target = checked_path(path, ".json")
        self.recording.save_trace(target)
        return target

    def __repr__(self) -> str:
        """Return the table, if the block has ended."""
        return "<Profile, still recording>" if self.finished is None else repr(self.summary())


class Recorder:
    """A context manager that records a `ParallelEnv`."""

    def __init__(self, env: ParallelEnv) -> None:
        self._engine = env.engine
        self._guard = env.engine.guard
        self._profile = Profile()
        self._calls = CallRecorder()

    @single_threaded_in("profile")
    def __enter__(self) -> Profile:
        """Begin to record, and return the profile, which is filled at the end."""
        pool = self._engine.pool
        if pool.is_traced:
            raise EnvBusyError("This ParallelEnv is recorded already. End that block before you profile again.")
        living = sorted(set(pool.env_ids).difference(pool.dead_env_ids))
        asked = perf_counter()
        values = pool.ask("state", living, None, "start_trace").values
        middle = (asked + perf_counter()) / 2
        self._clocks: dict[int, tuple[str, float]] = {
            env_id: (clock, middle - now) for env_id, (clock, now) in values.items()
        }
        pool.is_traced = True
        self._guard.tracer = self._calls
        self._begun = perf_counter()
        return self._profile

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, frames: TracebackType | None
    ) -> None:
        """Collect the records. A worker that is dead or does not answer in time has none."""
        ended = perf_counter()
        self._guard.tracer = None
        self._engine.pool.is_traced = False
        is_interrupt = kind is not None and issubclass(kind, KeyboardInterrupt)
        deadline = time.monotonic() + (INTERRUPTED_TIMEOUT if is_interrupt else COLLECT_TIMEOUT)
        workers: list[WorkerRecord] = []
        while True:
            left = max(0.0, deadline - time.monotonic())
            try:
                workers = self._collect(left, not is_interrupt)
            except ParallelEnvError as wrong:  # another thread is in a call; or, for example, closed in the meantime
                if isinstance(wrong, UsageError) and left:
                    time.sleep(_MOMENT)
                    continue
            break
        missing = set(self._engine.env_ids).difference(*(worker.env_ids for worker in workers))
        begun = max([self._begun, self._calls.since, *(worker.since for worker in workers if worker.is_cut)])
        ended = max(ended, begun + _MOMENT)  # clocks of two machines may disagree
        self._profile.finished = Recording(
            begun,
            ended,
            begun > self._begun,
            self._calls.spans(begun, ended),
            sorted(workers, key=lambda worker: worker.env_ids),
            tuple(sorted(missing)),
        )

    @single_threaded_in("profile")
    def _collect(self, timeout: float, resumes: bool) -> list[WorkerRecord]:
        """Stop recording in hosts; return the records received in time, if need be without resuming a command."""
        pool = self._engine.pool
        is_held_up = not resumes and pool.is_held_up
        living = sorted(set(pool.env_ids).difference(pool.dead_env_ids))
        asked = perf_counter()
        ticket = pool.submit("state", living, None, "stop_trace")
        if not is_held_up:
            with contextlib.suppress(ParallelEnvError):  # too late: the records of the others are there
                pool.wait(ticket, timeout)
        middle = (asked + perf_counter()) / 2
        records = [record for record in ticket.values.values() if isinstance(record, WorkerRecord)]
        return [self._aligned(record, middle) for record in records]

    def _aligned(self, record: WorkerRecord, received: float) -> WorkerRecord:
        """Return a worker's record in the caller's time; from another machine it is off by 0.1 ms or more."""
        if record.clock == clock_id():
            return record
        # The first answer took the shorter time. A host rebuilt on another machine did not give it.
        clock, offset = self._clocks.get(record.env_ids[0], ("", 0.0))
        return record.later(offset if clock == record.clock else received - record.now)


class CallRecorder:
    """Records when calls begin and end, as `Guard.tracer`."""

    def __init__(self) -> None:
        self._spans: deque[tuple[float, float]] = deque(maxlen=MOST_CALLS)
        self._begun: float | None = None  # of the call in progress; an interrupted one may have no end

    def begin(self) -> None:
        """Record the begin of a call."""
        self._begun = perf_counter()

    def end(self) -> None:
        """Record the end of the call."""
        if self._begun is not None:  # recording may have begun within it
            self._spans.append((self._begun, perf_counter()))
            self._begun = None

    @property
    def since(self) -> float:
        """When the record begins: older calls, if there were any, were dropped."""
        return self._spans[0][0] if len(self._spans) == self._spans.maxlen else 0.0

    def spans(self, begin: float, end: float) -> Array:
        """Return the calls between two moments, in order: ``(m, 2)`` float64."""
        unfinished = [] if self._begun is None else [(self._begun, end)]
        spans = np.array([*self._spans, *unfinished]).reshape(-1, 2)
        return spans[(spans[:, 0] < end) & (spans[:, 1] > begin)].clip(begin, end)
