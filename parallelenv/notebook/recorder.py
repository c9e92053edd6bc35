"""Records where the time goes: ``with env.profile() as p``.

All steps are recorded as long as that takes at most 2 % of their time. Fast steps are recorded in windows of a few
steps, at irregular intervals, so that recording takes 1 %. Windows open and close at certain command numbers. These
come from a C iterator that calls this module only now and then, so the caller pays nothing in between, and hosts see by
the number whether to record a command.
"""

from __future__ import annotations

import contextlib
import time
import weakref
from array import array
from collections.abc import Generator, Iterator
from itertools import chain, repeat
from time import perf_counter
from types import TracebackType
from typing import TYPE_CHECKING

import numpy as np

from parallelenv.contract.batch import Array
from parallelenv.contract.process_info import clock_id
from parallelenv.engine.engine import Engine
from parallelenv.engine.thread_guard import single_threaded_in
from parallelenv.errors import ConcurrentUseError, EnvBusyError, ParallelEnvError
from parallelenv.notebook.profile import Profile
from parallelenv.notebook.recording import Recording, WorkerRecord
from parallelenv.worker.tracer import NUM_FIRST, HostRecord, StepSkipping

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

    def __enter__(self) -> Profile:
        """Begin to record, and return the profile, which is filled at the end."""
        self._answers = self._watch()
        self._begun = perf_counter()
        self._sampling.begin(self._begun)
        return self._profile

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, frames: TracebackType | None
    ) -> None:
        """Collect the records. A worker that is dead or does not answer in time has none."""
        ended = perf_counter()
        is_interrupt = kind is not None and issubclass(kind, KeyboardInterrupt)
        self._sampling.end(ended)
        found = self._unwatch(INTERRUPTED_TIMEOUT if is_interrupt else COLLECT_TIMEOUT, not is_interrupt)
        workers = [self._aligned(record, asked) for record, asked in found]
        calls = self._sampling.calls
        missing = set(range(self._env.num_envs)).difference(*(worker.env_ids for worker in workers))
        self._profile.keep(
            Recording(
                self._begun,
                ended,
                np.array(calls.windows or [(self._begun, ended)]),
                calls.spans(self._begun, ended),
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
        self._sampling = Sampling(engine)
        _recorded.add(engine)
        pool.is_watched = True
        return {env_id: (*value, (asked, answered)) for env_id, value in values.items()}

    @single_threaded_in("profile")
    def _ask_what_was_seen(self, timeout: float, goes_on: bool) -> list[tuple[HostRecord, tuple[float, float]]]:
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
        return [(record, (asked, answered)) for record in ticket.values.values() if isinstance(record, HostRecord)]

    def _unwatch(self, timeout: float, goes_on: bool) -> list[tuple[HostRecord, tuple[float, float]]]:
        """Stop recording in workers, once the call of another thread has ended; return the records received."""
        _recorded.discard(self._engine)
        self._engine.pool.is_watched = False
        deadline = time.monotonic() + timeout
        while True:
            left = max(0.0, deadline - time.monotonic())
            try:
                return self._ask_what_was_seen(left, goes_on)
            except ConcurrentUseError:
                if not left:
                    return []
                time.sleep(_MOMENT)
            except ParallelEnvError:  # for example closed in the meantime
                return []

    def _aligned(self, record: HostRecord, asked: tuple[float, float]) -> WorkerRecord:
        """Return a host's record in the caller's time; from another machine it is off by 0.1 ms or more."""
        offset = 0.0
        if record.clock != clock_id():
            offset = sum(asked) / 2 - record.now
            clock, now, first = self._answers.get(record.env_ids[0], ("", 0.0, asked))
            # A rebuilt host may be on another machine than its predecessor, which got the first request.
            if clock == record.clock and first[1] - first[0] < asked[1] - asked[0]:
                offset = sum(first) / 2 - now
        return WorkerRecord.of(record, offset)


_IN_WINDOW = 8
"""Steps of a window; the timeline shows as many."""
_MOST_TRIES = 8
"""Maximum number of unused recorded steps until hosts have finished all unrecorded ones."""
_MOST_MARKS = 2_000_000


class CallRecorder:
    """Records when calls begin and end, as `Guard.tracer`.

    Attributes:
        windows: Begin and end of the closed windows.
    """

    __slots__ = ("_known", "_marks", "_opened", "windows")

    def __init__(self) -> None:
        self._marks = array("d")  # begins; negative ends; zero at the end of a window
        self._known = 0  # number of marks in closed windows
        self._opened: float | None = None
        self.windows: list[tuple[float, float]] = []

    def begin(self) -> None:
        """Record the begin of a call."""
        self._marks.append(perf_counter())

    def end(self) -> None:
        """Record the end of the call."""
        self._marks.append(-perf_counter())

    def __len__(self) -> int:
        """Return the number of marks."""
        return len(self._marks)

    def open(self, now: float, *, is_in_call: bool) -> None:
        """Open a window. Drops calls that ended before, and cuts one in progress at its start."""
        del self._marks[self._known :]
        self._opened = now
        if is_in_call:
            self._marks.append(now)

    def close(self, now: float) -> None:
        """Close the window, if one is open. Cuts a call in progress at its end."""
        if self._opened is None:
            return
        if self._marks and self._marks[-1] > 0:
            self._marks.append(-now)
        self._marks.append(0.0)
        self._known = len(self._marks)
        if now > self._opened:
            self.windows.append((self._opened, now))
        self._opened = None

    def spans(self, begin: float, end: float) -> Array:
        """Return the calls between two moments that are in windows, in order: ``(m, 2)`` float64."""
        marks = np.array(self._marks[: self._known])
        # A nested call begins later and ends earlier than the outer one: of consecutive begins the first counts, of
        # consecutive ends the last.
        kinds = np.sign(marks)
        begins = np.flatnonzero((kinds > 0) & (np.append(0, kinds)[:-1] <= 0))
        ends = np.flatnonzero((kinds < 0) & (np.append(kinds, 0)[1:] >= 0))
        ends = ends[np.searchsorted(ends, begins)]
        spans = np.column_stack([marks[begins], -marks[ends]])
        return spans[(spans[:, 0] < end) & (spans[:, 1] > begin)].clip(begin, end)


class Sampling:
    """Decides which steps and calls of a `ParallelEnv` are recorded.

    Args:
        engine: Its engine.
    """

    def __init__(self, engine: Engine) -> None:
        self._guard = weakref.ref(engine.guard)  # weak: the pool, which holds the numbers, would keep it alive
        self._pool = pool = engine.pool
        self._num_links, self._num_envs = pool.num_handles, -(-len(pool.env_ids) // pool.num_handles)
        self._step_skipping = StepSkipping()
        self.calls = CallRecorder()

    def begin(self, now: float) -> None:
        """Record everything at first, then as much as does not take too long. No call may be in progress."""
        self.calls.open(now, is_in_call=False)
        self._trace_calls(self.calls)
        self._pool.trace_by(chain(chain.from_iterable(self._choose()), repeat(False)))

    def end(self, now: float) -> None:
        """Stop recording."""
        self.calls.close(now)
        self._pool.trace_by(None)
        self._trace_calls(None)

    def _trace_calls(self, tracer: CallRecorder | None) -> None:
        guard = self._guard()
        if guard is not None:
            guard.tracer = tracer

    def _choose(self) -> Iterator[Iterator[bool]]:
        """Yield for each call whether it is recorded: alternately some steps are, and some are skipped."""
        num_steps = NUM_FIRST
        try:
            while len(self.calls) < _MOST_MARKS:
                left_out = yield from self._note(num_steps)
                num_steps = _IN_WINDOW
                if left_out:
                    self.calls.close(perf_counter())
                    self._trace_calls(None)
                    yield repeat(False, left_out)
                    self._trace_calls(self.calls)
                    yield from self._clear_the_way()
                    self.calls.open(perf_counter(), is_in_call=True)
        finally:
            self.calls.close(perf_counter())
            self._trace_calls(None)

    def _note(self, num_steps: int) -> Generator[Iterator[bool], None, int]:
        """Record steps; return how many steps to skip after them."""
        since, before = perf_counter(), len(self.calls)
        yield repeat(True, num_steps)
        num_noted = max(num_steps, (len(self.calls) - before) // 2)
        seconds = (perf_counter() - since) / num_noted
        return self._step_skipping.left_out(num_noted, seconds, self._num_envs, self._num_resets())

    def _num_resets(self) -> float:
        """Return the number of resets per host in the latest step, or that automatic restarts would have made.

        A single step is not representative, but the average over many windows is.
        """
        of_each: float = self._pool.batch.flags.tobytes().count(1) / self._num_links
        return of_each

    def _clear_the_way(self) -> Iterator[Iterator[bool]]:
        """Record steps without using them, until hosts have answered all unrecorded ones."""
        for _ in range(_MOST_TRIES):
            yield repeat(True, 1)
            if not self._pool.has_untraced:
                return
