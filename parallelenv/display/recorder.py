"""Records where the time goes: `with env.profile() as p`."""

from __future__ import annotations

import contextlib
from time import perf_counter
from types import TracebackType
from typing import TYPE_CHECKING, Any

import numpy as np

from parallelenv.backends.watch import HostRecord
from parallelenv.display.profile import Profile
from parallelenv.display.recording import Recording, WorkerRecord
from parallelenv.display.sampling import Sampling
from parallelenv.errors import EnvBusyError, ParallelEnvError
from parallelenv.seats import clock_id

if TYPE_CHECKING:
    from parallelenv.shown import Shown

COLLECT_TIMEOUT = 5.0
"""Seconds that workers get to tell what they have noted."""
INTERRUPTED_TIMEOUT = 0.2
"""Likewise, after Ctrl-C."""


class Recorder:
    """A context manager within which a `ParallelEnv` is recorded.

    Args:
        env: It.
    """

    def __init__(self, env: Shown) -> None:
        self._env = env
        self._profile = Profile()

    def __enter__(self) -> Profile:
        """Begin to record, and return what can be asked afterwards."""
        self._answers = self._env._watch()
        self._sampling = self._env._sampling
        self._begun = perf_counter()
        self._sampling.begin(self._begun)
        return self._profile

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, frames: TracebackType | None
    ) -> None:
        """Collect what was noted. A worker that is dead, or does not answer in time, has noted nothing."""
        ended = perf_counter()
        is_interrupt = kind is not None and issubclass(kind, KeyboardInterrupt)
        self._sampling.end(ended)
        found = self._env._unwatch(INTERRUPTED_TIMEOUT if is_interrupt else COLLECT_TIMEOUT, not is_interrupt)
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

    def _aligned(self, record: HostRecord, asked: tuple[float, float]) -> WorkerRecord:
        """Return what a host has noted by the caller's clock; of another machine it is some 0.1 ms wrong, or more."""
        offset = 0.0
        if record.clock != clock_id():
            offset = sum(asked) / 2 - record.now
            clock, now, first = self._answers.get(record.env_ids[0], ("", 0.0, asked))
            # One that was built anew may be on another machine than its predecessor, which was asked first.
            if clock == record.clock and first[1] - first[0] < asked[1] - asked[0]:
                offset = sum(first) / 2 - now
        return WorkerRecord.of(record, offset)


def ask_to_watch(env: Any) -> dict[int, tuple[str, float, tuple[float, float]]]:
    """Let hosts begin to note; return clock and time of each, and when it was asked and had answered, by first env."""
    if env._sampling is not None:
        raise EnvBusyError("This ParallelEnv is recorded already. End that block before you profile again.")
    pool = env._pool
    living = [env_id for env_id in pool.env_ids if env_id not in pool.lost]
    asked = perf_counter()
    values = pool.ask("watch", living).values
    answered = perf_counter()
    env._sampling = Sampling(env)
    pool.is_watched = True
    return {env_id: (*value, (asked, answered)) for env_id, value in values.items()}


def ask_what_was_seen(env: Any, timeout: float, goes_on: bool) -> list[tuple[HostRecord, tuple[float, float]]]:
    """Let hosts note no more; return what those have noted that answer in time, and when they were asked.

    Args:
        env: A `ParallelEnv`.
        timeout: Seconds.
        goes_on: Whether what was interrupted in the caller's thread may go on for that.
    """
    pool = env._pool
    pool.is_watched = False
    living = [env_id for env_id in pool.env_ids if env_id not in pool.lost]
    is_held_up = not goes_on and pool.is_held_up
    asked = perf_counter()
    request = pool.post("unwatch", living)
    if not is_held_up:
        with contextlib.suppress(ParallelEnvError):  # too late: what the others have noted is there
            pool.wait(request, timeout)
    answered = perf_counter()
    return [(record, (asked, answered)) for record in request.values.values() if isinstance(record, HostRecord)]
