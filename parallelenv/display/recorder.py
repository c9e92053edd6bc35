"""Records where the time goes: `with env.profile() as p`."""

from __future__ import annotations

import contextlib
from array import array
from time import perf_counter
from types import TracebackType
from typing import TYPE_CHECKING, Any

import numpy as np

from parallelenv.backends.watch import HostRecord
from parallelenv.display.profile import Profile, Recording, WorkerRecord
from parallelenv.errors import EnvBusyError, ParallelEnvError
from parallelenv.seats import clock_id

if TYPE_CHECKING:
    from parallelenv.shown import Shown

COLLECT_TIMEOUT = 5.0
"""Seconds that workers get to tell what they have noted."""
INTERRUPTED_TIMEOUT = 0.2
"""Likewise, after Ctrl-C."""
_MOST_CALLS = 1_000_000


class Calls(dict[str, int]):
    """Stands for who is using a `ParallelEnv`, and notes when a call begins and ends: 0.5 us for each."""

    def __init__(self, user: dict[str, int]) -> None:
        super().__init__(user)
        self.begins = array("d")
        self.ends = array("d")

    def setdefault(self, key: str, default: int) -> int:
        """Note that a call begins, unless it is within another one."""
        if not self and len(self.begins) < _MOST_CALLS:
            self.begins.append(perf_counter())
        return super().setdefault(key, default)

    def clear(self) -> None:
        """Note that it ends; what it was within ends later, once more."""
        super().clear()
        if len(self.ends) < len(self.begins):
            self.ends.append(perf_counter())
        elif self.ends and len(self.begins) < _MOST_CALLS:
            self.ends[-1] = perf_counter()


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
        self._begun = perf_counter()
        return self._profile

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, frames: TracebackType | None
    ) -> None:
        """Collect what was noted. A worker that is dead, or does not answer in time, has noted nothing."""
        ended = perf_counter()
        is_interrupt = kind is not None and issubclass(kind, KeyboardInterrupt)
        calls, found = self._env._unwatch(INTERRUPTED_TIMEOUT if is_interrupt else COLLECT_TIMEOUT, not is_interrupt)
        workers = [self._aligned(record, asked) for record, asked in found]
        begins, ends = calls.begins, calls.ends
        spans = np.array([*zip(begins, [*ends, ended], strict=False)], np.float64).reshape(-1, 2)
        spans = spans[(spans[:, 0] < ended) & (spans[:, 1] > self._begun)].clip(self._begun, ended)
        missing = set(range(self._env.num_envs)).difference(*(worker.env_ids for worker in workers))
        self._profile.keep(
            Recording(
                self._begun,
                ended,
                spans,
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
    if isinstance(env._user, Calls):
        raise EnvBusyError("This ParallelEnv is recorded already. End that block before you profile again.")
    pool = env._pool
    living = [env_id for env_id in pool.env_ids if env_id not in pool.lost]
    asked = perf_counter()
    values = pool.ask("watch", living).values
    answered = perf_counter()
    env._user = Calls(env._user)
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
