"""Estimates the time of one step of all envs in each mode, and picks the fastest mode.

Contains all measured constants of the modes. They were measured on a virtual machine with 2 cores (Xeon, 2.6 GHz,
Python 3.11), by rounds of `ParallelEnv.step` with 1 to 256 envs that do nothing, compute for 10 to 1000 us, sleep, or
are CartPole or LunarLander. In 99 such measurements the estimates are 0.77 to 1.22 times the measured time, but with
similar errors in all modes, and modes are what is compared: in all 33 cases the choice had at least 0.94 of the best
speed. ``make bench-auto`` shows whether it still has.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

MOST_WORKERS = 32
"""With more threads, sending commands takes longer than the shortest wait worth it: 1 ms."""
CLOSE_ENOUGH = 1.05
"""A mode is chosen over a simpler one only if it is faster by more than this factor."""

# Seconds of one call of `step`, whatever its envs do: 14 us in the loop, plus the messages to and from each worker.
# With 2, 4, 8, 16 workers: threads 112, 175, 310, 570 us; processes 53, 72, 135, 255 us; and with the caller as one of
# the workers 31, 79, 125, 251 us.
_LOOP_ROUND = 14e-6
_THREADS_ROUND, _PER_THREAD = 50e-6, 31e-6
_PROCESSES_ROUND, _PER_PROCESS = 20e-6, 16e-6
_CALLER_ROUND = 15e-6
_HERE_ENV, _AWAY_ENV = 0.33e-6, 0.24e-6  # seconds per env, for its row and its info
_COLD = 1.15
"""Envs that take turns find colder caches than a single one: CartPole takes 5.8 us instead of 4.7."""
_AWAY = 1.08
"""The same for envs stepped by another process: one of 10 us takes 11.6 us there, one of 100 us 109 us."""
_AWAKE, _SLEEPY = 200e-6, 60e-6
"""After the first time the caller sleeps, and wakes late by the second: 16 envs of 30 us in 2 processes, 360 us."""

# Seconds per byte of the states, copied into the batch and from there into the result. 16 states of 84x84x4 and
# 210x160x3 bytes add 36 and 290 us in the loop, 43 and 378 us with two workers.
_HERE_BYTE, _AWAY_BYTE = 0.12e-9, 0.17e-9
# Seconds per env and pickled byte of values without a row in the batch: infos, texts. An info of two numbers (47 bytes)
# adds 2.7 us in this process, which copies it, and 2.9 us from another, which pickles it; one of eight numbers in two
# dicts (181 bytes) 6.5 and 8.0 us; one with an array and a list (42 kB) 49 and 78 us.
_HERE_EXTRA, _HERE_EXTRA_BYTE = 3e-6, 1.1e-9
_AWAY_EXTRA, _AWAY_EXTRA_BYTE = 3.5e-6, 2e-9


@dataclass(frozen=True, slots=True)
class EnvMeasurements:
    """Measurements of an env.

    Attributes:
        step_cost: Seconds per step, including its share of resets.
        compute: The part of them in which it uses a core.
        lock_free: Share of the step, 0 to 1, in which another thread can run Python code; ``None``
            if not measured.
        state_nbytes: Bytes of a state.
        extra_nbytes: Pickled bytes of a step's results, without numbers and arrays of fixed shape.
    """

    step_cost: float
    compute: float
    lock_free: float | None = None
    state_nbytes: int = 0
    extra_nbytes: int = 0

    @property
    def waits(self) -> bool:
        """Whether most of a step is waiting, so that more workers than cores can be used."""
        return self.compute < self.step_cost / 2

    @property
    def releases_gil(self) -> bool | None:
        """Whether threads can step such envs in parallel; ``None`` if not measured."""
        return None if self.lock_free is None else self.lock_free >= 0.5


@dataclass(frozen=True, slots=True)
class Candidate:
    """A mode that could be chosen.

    Attributes:
        mode: Its word.
        workers: Number of hosts.
        seconds: Estimated time of a step of all envs.
        leaves: Whether envs run in other processes.
        caller_steps: Whether the caller steps some of them.
    """

    mode: str
    workers: int
    seconds: float
    leaves: bool = False
    caller_steps: bool = False

    @property
    def options(self) -> dict[str, Any]:
        """Options of the mode's backend."""
        return {"caller_steps": True} if self.caller_steps else {}


@dataclass(frozen=True, slots=True)
class Resources:
    """Where envs may run.

    Attributes:
        num_envs: Number of envs.
        cores: Number of cores they may use.
        workers: Number of workers, if the user gave it.
        may_leave: Whether the envs can be stepped in another process.
    """

    num_envs: int
    cores: int
    workers: int | None = None
    may_leave: bool = True


def candidates(figures: EnvMeasurements, resources: Resources) -> list[Candidate]:
    """Return the possible modes, each with its best number of workers, simplest first.

    Ray is not among them: users with a cluster choose it, and on one machine its messages are the slowest.
    """
    found = [Candidate("dummy", 1, _in_a_loop(figures, resources))]
    groups = []
    if figures.releases_gil:
        groups.append([Candidate("thread", n, _in_threads(figures, resources, n)) for n in _counts(figures, resources)])
    if resources.may_leave:
        counts = list(_counts(figures, resources, beyond_cores=not figures.releases_gil))
        groups.append([Candidate("subproc", n, _in_processes(figures, resources, n), True) for n in counts])
        groups.append([Candidate("subproc", n, _with_the_caller(figures, resources, n), True, True) for n in counts])
    found += [min(group, key=lambda candidate: candidate.seconds) for group in groups if group]
    return found


def simplest_of_fastest(found: list[Candidate]) -> Candidate:
    """Return the simplest candidate that is about as fast as the fastest."""
    quickest = min(candidate.seconds for candidate in found)
    return next(candidate for candidate in found if candidate.seconds <= quickest * CLOSE_ENOUGH)


def _counts(figures: EnvMeasurements, resources: Resources, beyond_cores: bool = True) -> Iterator[int]:
    """Return the numbers of workers to consider: powers of 2, and the largest useful number.

    A process beyond the number of cores costs some 40 MB, a thread almost nothing: for envs that
    wait, only threads are considered in larger numbers.
    """
    most = min(resources.num_envs, resources.cores)
    if figures.waits and beyond_cores:
        most = min(resources.num_envs, max(resources.cores, MOST_WORKERS))
    if resources.workers is not None:
        most = min(resources.num_envs, resources.workers)
    count = 2 if resources.workers is None else max(2, most)
    while count < most:
        yield count
        count *= 2
    if most >= 2:  # a single worker only adds messages
        yield most


def _in_a_loop(figures: EnvMeasurements, resources: Resources) -> float:
    return _LOOP_ROUND + resources.num_envs * (_COLD * figures.step_cost + _transfer_here(figures))


def _in_threads(figures: EnvMeasurements, resources: Resources, workers: int) -> float:
    locked = resources.num_envs * figures.step_cost * (1 - (figures.lock_free or 0.0))
    work = _COLD * max(_work(figures, resources, workers), locked)
    return _THREADS_ROUND + workers * _PER_THREAD + work + resources.num_envs * _transfer_here(figures)


def _in_processes(figures: EnvMeasurements, resources: Resources, workers: int) -> float:
    work = _COLD * _AWAY * _work(figures, resources, workers)
    late = _SLEEPY if work > _AWAKE else 0.0
    return _PROCESSES_ROUND + workers * _PER_PROCESS + work + late + resources.num_envs * _transfer_away(figures)


def _with_the_caller(figures: EnvMeasurements, resources: Resources, workers: int) -> float:
    work = _COLD * _AWAY * _work(figures, resources, workers)
    answers = resources.num_envs * ((workers - 1) * _transfer_away(figures) + _transfer_here(figures)) / workers
    return _CALLER_ROUND + (workers - 1) * _PER_PROCESS + work + answers


def _work(figures: EnvMeasurements, resources: Resources, workers: int) -> float:
    """Return the seconds for which the longest share keeps its worker, or all shares the cores, busy."""
    share = -(-resources.num_envs // workers)
    return max(share * figures.step_cost, resources.num_envs * figures.compute / min(workers, resources.cores))


def _transfer_here(figures: EnvMeasurements) -> float:
    """Return the seconds per env for its results in the caller's process."""
    extra = _HERE_EXTRA + figures.extra_nbytes * _HERE_EXTRA_BYTE if figures.extra_nbytes else 0.0
    return _HERE_ENV + figures.state_nbytes * _HERE_BYTE + extra


def _transfer_away(figures: EnvMeasurements) -> float:
    """Return the seconds per env for its results from another process."""
    extra = _AWAY_EXTRA + figures.extra_nbytes * _AWAY_EXTRA_BYTE if figures.extra_nbytes else 0.0
    return _AWAY_ENV + figures.state_nbytes * _AWAY_BYTE + extra
