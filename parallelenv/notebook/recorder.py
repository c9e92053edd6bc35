"""Records where the time goes: ``with env.profile() as p``.

Hosts record what their envs do, see `HostTracer`; here it is recorded when calls begin and end, and both are put
together on the caller's clock.
"""

from __future__ import annotations

import contextlib
import time
import weakref
from array import array
from time import perf_counter
from types import TracebackType
from typing import TYPE_CHECKING

import numpy as np

from parallelenv.contract.batch import Array
from parallelenv.contract.worker_info import clock_id
from parallelenv.engine.engine import Engine
from parallelenv.engine.thread_guard import single_threaded_in
from parallelenv.errors import EnvBusyError, ParallelEnvError, UsageError
from parallelenv.notebook.profile import Profile
from parallelenv.notebook.recording import Recording
from parallelenv.worker.tracer import WorkerRecord

if TYPE_CHECKING:
    from parallelenv.env import ParallelEnv

COLLECT_TIMEOUT = 5.0
"""Seconds for workers to send their records."""
INTERRUPTED_TIMEOUT = 0.2
"""The same after Ctrl-C."""
_MOMENT = 1e-3
"""Seconds between checks whether another thread's call has ended."""
_recorded: weakref.WeakSet[Engine] = weakref.WeakSet()
"""Engines that are being recorded."""


class Recorder:
    """A context manager that records a `ParallelEnv`.

    Args:
        env: The `ParallelEnv`.
    """

    def __init__(self, env: ParallelEnv) -> None:
        self._env = env
        self._engine = env.engine
        self._guard = env.engine.guard
        self._profile = Profile()
        self._calls = CallRecorder()

    def __enter__(self) -> Profile:
        """Begin to record, and return the profile, which is filled at the end."""
        self._answers = self._watch()
        self._engine.guard.tracer = self._calls
        self._begun = perf_counter()
        return self._profile

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, frames: TracebackType | None
    ) -> None:
        """Collect the records. A worker that is dead or does not answer in time has none."""
        ended = perf_counter()
        self._engine.guard.tracer = None
        is_interrupt = kind is not None and issubclass(kind, KeyboardInterrupt)
        found = self._unwatch(INTERRUPTED_TIMEOUT if is_interrupt else COLLECT_TIMEOUT, not is_interrupt)
        workers = [self._aligned(record, asked) for record, asked in found]
        missing = set(range(self._env.num_envs)).difference(*(worker.env_ids for worker in workers))
        begun = max([self._begun, self._calls.since, *(worker.since for worker in workers if worker.is_cut)])
        self._profile.keep(
            Recording(
                begun,
                max(ended, begun + _MOMENT),  # clocks of two machines may disagree
                begun > self._begun,
                self._calls.spans(begun, ended),
                sorted(workers, key=lambda worker: worker.env_ids),
                tuple(sorted(missing)),
            )
        )

    @single_threaded_in("profile")
    def _watch(self) -> dict[int, tuple[str, float, tuple[float, float]]]:
        """Start recording in hosts; return by first env their clock and time, and when the request began and ended."""
        engine, pool = self._engine, self._engine.pool
        if engine in _recorded:
            raise EnvBusyError("This ParallelEnv is recorded already. End that block before you profile again.")
        living = [env_id for env_id in pool.env_ids if env_id not in pool.lost]
        asked = perf_counter()
        values = pool.ask("state", living, None, "trace").values
        answered = perf_counter()
        _recorded.add(engine)
        pool.is_watched = True
        return {env_id: (*value, (asked, answered)) for env_id, value in values.items()}

    @single_threaded_in("profile")
    def _ask_what_was_seen(self, timeout: float, goes_on: bool) -> list[tuple[WorkerRecord, tuple[float, float]]]:
        """Stop recording in hosts; return the records received in time, with begin and end of the request.

        Args:
            timeout: In seconds.
            goes_on: Whether an interrupted in-process command may resume in this wait.
        """
        pool = self._engine.pool
        pool.is_watched = False
        living = [env_id for env_id in pool.env_ids if env_id not in pool.lost]
        is_held_up = not goes_on and pool.is_held_up
        asked = perf_counter()
        ticket = pool.submit("state", living, None, "record")
        if not is_held_up:
            with contextlib.suppress(ParallelEnvError):  # too late: the records of the others are there
                pool.wait(ticket, timeout)
        answered = perf_counter()
        return [(record, (asked, answered)) for record in ticket.values.values() if isinstance(record, WorkerRecord)]

    def _unwatch(self, timeout: float, goes_on: bool) -> list[tuple[WorkerRecord, tuple[float, float]]]:
        """Stop recording in workers, once the call of another thread has ended; return the records received."""
        _recorded.discard(self._engine)
        self._engine.pool.is_watched = False
        deadline = time.monotonic() + timeout
        while True:
            left = max(0.0, deadline - time.monotonic())
            try:
                return self._ask_what_was_seen(left, goes_on)
            except UsageError:
                if not left:
                    return []
                time.sleep(_MOMENT)
            except ParallelEnvError:  # for example closed in the meantime
                return []

    def _aligned(self, record: WorkerRecord, asked: tuple[float, float]) -> WorkerRecord:
        """Return a worker's record in the caller's time; from another machine it is off by 0.1 ms or more."""
        if record.clock == clock_id():
            return record
        offset = sum(asked) / 2 - record.now
        clock, now, first = self._answers.get(record.env_ids[0], ("", 0.0, asked))
        # A rebuilt host may be on another machine than its predecessor, which got the first request.
        if clock == record.clock and first[1] - first[0] < asked[1] - asked[0]:
            offset = sum(first) / 2 - now
        return record.later(offset)


MOST_CALLS = 1_000_000
"""Calls that are kept; older ones are dropped."""


class CallRecorder:
    """Records when calls begin and end, as `Guard.tracer`.

    Attributes:
        since: When the record begins: older calls, if there were any, were dropped.
    """

    def __init__(self) -> None:
        self._marks = array("d")  # begins, and ends as negative numbers
        self.since = 0.0

    def begin(self) -> None:
        """Record the begin of a call."""
        if len(self._marks) > 2 * MOST_CALLS:
            self.since = abs(self._marks[MOST_CALLS])
            del self._marks[: MOST_CALLS + 1]
        self._marks.append(perf_counter())

    def end(self) -> None:
        """Record the end of the call."""
        self._marks.append(-perf_counter())

    def spans(self, begin: float, end: float) -> Array:
        """Return the calls between two moments, in order: ``(m, 2)`` float64."""
        marks = np.append(np.array(self._marks), -end)  # an interrupted call may have no end
        kinds = np.sign(marks)
        begins = np.flatnonzero((kinds > 0) & (np.append(0, kinds)[:-1] <= 0))
        ends = np.flatnonzero(kinds < 0)
        ends = ends[np.searchsorted(ends, begins)]
        spans = np.column_stack([marks[begins], -marks[ends]])
        return spans[(spans[:, 0] < end) & (spans[:, 1] > begin)].clip(begin, end)
