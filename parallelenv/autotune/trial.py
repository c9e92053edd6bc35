"""A short trial of the modes: opens pools of stand-ins, steps each in turns with a plain loop, and finds the fastest.

A candidate is only opened if it could be clearly faster than the best so far, were its messages free.
"""

from __future__ import annotations

import contextlib
import functools
import os
import random
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from parallelenv.autotune.stand_in import StandIn, build_new
from parallelenv.autotune.timing import TimedEnv, is_clearly_faster, random_actions
from parallelenv.contract.copying import loads
from parallelenv.contract.env_specs import EnvFactory, pack_factories
from parallelenv.contract.error_text import one_line
from parallelenv.contract.worker_info import get_worker_info
from parallelenv.env import ParallelEnv

MOST_WORKERS = 32
"""With more threads, sending commands takes longer than the shortest wait worth it: 1 ms."""
_LEAST_CALL = {"thread": 100e-6, "subproc": 20e-6}
"""Seconds of a step of envs that do nothing, with two workers, at best."""
_SLICE = 0.02
"""Seconds of a pool's turn. It is one step if that takes longer, of fewer envs, but of one per worker at least."""
_LIMIT = 4.0
"""Seconds after which no further pool is opened."""
_LONG_STEP = 0.05
_LONG_MAKING = 1.0
"""Seconds of a step, and of making and resetting the envs of a pool. No pool is opened that takes longer: it is judged
by the first steps of an env."""
_MOST_KINDS = 3
"""Number of different env fns that are tried."""
_MOST_STAND_INS = 256
"""With more, the time of a step is proportional to their number."""
_PATIENCE = 20.0
"""Seconds after which a trial in another process counts as hanging."""


@dataclass(slots=True)
class Candidate:
    """A mode with its number of workers, and ``caller_steps=True`` or no option."""

    mode: str
    workers: int
    options: dict[str, Any]
    speedup: float = 1.0  # relative to the plain loop
    was_tried: bool = True  # whether that was measured; else it is the envs' share alone, without messages


@dataclass(frozen=True, slots=True)
class TrialResult:
    """What a trial has found."""

    best: Candidate  # the fastest candidate, or a simpler one that is about as fast
    tried: list[Candidate]  # those that were measured, in order; the plain loop first
    loop: float  # seconds per step of all envs in the plain loop
    step_cost: float  # seconds per step of one env in it
    waits: bool  # whether most of that is waiting
    failed: dict[str, str]  # why a mode was not possible, by mode


@dataclass
class Trial:
    """A trial of the modes.

    Envs are made in this process and in workers, `_MOST_KINDS` in each at most. For live envs, and env fns that return
    an existing one, copies are made, in other processes only: a copy may hold the same handle of a simulator or
    connection.

    Args:
        factories: Those of all envs.
        cores: Number of cores that the envs may use.
        num_cpus: Number of workers, if the user gave it.
        caller_busy: Whether the caller computes while envs step.
        env_options: The arguments ``spaces``, ``seed`` and ``shared`` of `ParallelEnv`.
        find_obstacle: Returns why the envs cannot run in other processes; an empty text if they can.
        are_copies: Whether all factories make copies, so that nothing of the user's can be stepped.
    """

    factories: Sequence[EnvFactory]
    cores: int
    num_cpus: int | None
    caller_busy: bool
    env_options: dict[str, Any]
    find_obstacle: Callable[[], str]
    are_copies: bool = False

    def run(self) -> TrialResult:
        """Try the modes, in another process if need be.

        Raises:
            Exception: What an env raised, or why it cannot be tried.
        """
        self.factories = _representatives(self.factories)
        return self._try_copies() if any(one.is_live for one in self.factories) else self.run_here()

    def run_here(self) -> TrialResult:
        """Try one candidate after the other, the simplest first."""
        if self.are_copies:  # this object is in a worker, in the place of an env
            self.env_options["shared"] = get_worker_info().shared  # type: ignore[union-attr]
        begin = time.perf_counter()
        self._name = os.urandom(8).hex()
        self._failed: dict[str, str] = {}
        with _without_side_effects(), contextlib.ExitStack() as self._stack:
            if not self._try_dummy():
                return self._try_copies()
            for mode, options in ("thread", {}), ("subproc", {}), ("subproc", {"caller_steps": True}):
                for workers in self._counts(mode, options):
                    candidate = Candidate(mode, workers, options)
                    if time.perf_counter() - begin > _LIMIT or not self._may_win(candidate):
                        break
                    if not self._wins(candidate) and mode == "thread":
                        break
        return TrialResult(self._best, self._tried, self._loop, self._step, self._waits, self._failed)

    def _try_copies(self) -> TrialResult:
        with _without_side_effects():
            copies = {
                one.env_id: EnvFactory(one.env_id, functools.partial(_copy, packed, one.is_live), is_live=False)
                for one, packed in zip(self.factories, pack_factories(self.factories), strict=True)
            }
            factories = [copies[one.env_id] for one in self.factories]
            shared = self.env_options["shared"]
            env_options = self.env_options | {"shared": {}}
            trial = replace(self, factories=factories, env_options=env_options, find_obstacle=str, are_copies=True)
            options: Any = {"timeout": _PATIENCE, "output": "quiet", "keep": True, "shared": shared}
            with ParallelEnv([functools.partial(replace, trial)], "subproc", num_cpus=1, **options) as env:
                return env.customized_method("run_here")[0]  # type: ignore[no-any-return]

    def _try_dummy(self) -> bool:
        """Step envs in a loop, with which the other candidates are compared. False if the envs are the user's own."""
        figures = self._first_steps()
        if figures is None:
            return False
        self._making, self._step, compute = figures
        self._computing = min(1.0, compute / self._step)
        self._waits = self._computing < 0.5
        self._loop = self._step * len(self.factories)
        self._busy = 0.0
        self._best = dummy = Candidate("dummy", 1, {})
        self._tried = [dummy]
        self._dummy: TimedEnv | None = None
        if self._step <= _LONG_STEP:
            self._dummy = self._open(dummy)
            for _ in range(3):
                self._dummy.time()
            self._loop = self._dummy.seconds
            self._step = self._loop / len(self.factories)
        if self.caller_busy:
            self._busy = self._loop / max(1, self.cores - 1)
            self._loop += self._busy
            self._dummy = self._dummy and self._open(dummy)
        return True

    def _first_steps(self) -> tuple[float, float, float] | None:
        """Step one env of each kind. These envs stay open, and are those of all pools in this thread.

        Returns:
            Seconds of making and resetting one, of a step, and of computing in it, all means; ``None`` if an env fn
            returns an env of the user's.
        """
        begin = time.perf_counter()
        found: dict[int, tuple[float, float, float]] = {}
        for env_id, kind in {one.env_id: one for one in self.factories}.items():
            if found and time.perf_counter() - begin > _LONG_MAKING:
                break
            kind.prepare()
            now = time.perf_counter()
            if not self.are_copies and not build_new(self._name, kind):
                return None
            env = self._make(Candidate("dummy", 1, {}), [functools.partial(StandIn, self._name, kind)])
            env.reset(seed=0)
            found[env_id] = time.perf_counter() - now, *_measure_steps(env)
        self.factories = [one if one.env_id in found else self.factories[0] for one in self.factories]
        making, step, compute = np.mean([found[one.env_id] for one in self.factories], axis=0).tolist()
        return making, step, compute

    def _counts(self, mode: str, options: dict[str, Any]) -> list[int]:
        """Return the numbers of workers to try, in order.

        A process beyond the number of cores costs some 40 MB, a thread almost nothing: for envs that wait, more
        processes than cores are considered only if threads do not help.
        """
        if options:
            tried = [(one.speedup, one.workers) for one in self._tried if one.mode == "subproc"]
            return [max(tried)[1]] if tried and not self.caller_busy else []
        exceeds_cores = self._waits and not (mode == "subproc" and self._best.mode == "thread")
        most = min(len(self.factories), self.num_cpus or max(self.cores, MOST_WORKERS if exceeds_cores else 0))
        counts = [most]
        if self.num_cpus is None:
            while counts[-1] >= 4:
                counts.append(counts[-1] // 2)
            if mode == "thread" and not self._waits:
                counts.insert(0, min(2, most))  # shows whether threads help envs that may hold the GIL
            if self.caller_busy:
                counts.insert(0, max(1, most - 1))
        return [workers for workers in dict.fromkeys(counts) if workers > 1 or self.caller_busy]

    def _may_win(self, candidate: Candidate) -> bool:
        """Whether a candidate could be clearly faster than the best so far, and can be tried or judged."""
        if candidate.mode == "subproc" and (obstacle := self.find_obstacle()):
            self._failed.setdefault("subproc", obstacle)
        # Threads surely help envs that wait, or if they have helped before; the gain of caller_steps is never sure.
        surely_helps = candidate.mode == "subproc" or self._waits or self._best.mode == "thread"
        can_be_judged = (surely_helps and not candidate.options) or not self._takes_long(candidate)
        is_worth_it = is_clearly_faster(self._most_speedup(candidate), self._best.speedup)
        return is_worth_it and can_be_judged and candidate.mode not in self._failed

    def _most_speedup(self, candidate: Candidate) -> float:
        """Return the speedup if messages cost almost nothing."""
        num_envs, workers = len(self.factories), candidate.workers
        work = self._step * max(-(-num_envs // workers), num_envs * self._computing / min(workers, self.cores))
        return self._loop / max(self._busy, _LEAST_CALL[candidate.mode] + work)

    def _takes_long(self, candidate: Candidate) -> bool:
        """Whether a trial would take long. Threads are expected to make their envs in turns, because of the GIL."""
        turns = candidate.workers if candidate.mode == "thread" else -(-candidate.workers // self.cores)
        return self._dummy is None or turns * self._making > _LONG_MAKING

    def _wins(self, candidate: Candidate) -> bool:
        """Whether a candidate is clearly faster than the best so far, which it then replaces."""
        candidate.was_tried = not self._takes_long(candidate)
        if candidate.was_tried:
            try:
                pool = self._open(candidate)
                candidate.speedup = pool.speedup(self._dummy)  # type: ignore[arg-type]
                pool.env.close()
            except Exception as error:  # noqa: BLE001 (envs raise anything; in a loop these work)
                self._failed[candidate.mode] = f"a trial of them failed ({one_line(error)})"
                return False
            self._tried.append(candidate)
        else:
            candidate.speedup = self._most_speedup(candidate)
        wins = is_clearly_faster(candidate.speedup, self._best.speedup)
        if wins:
            self._best = candidate
        return wins

    def _open(self, candidate: Candidate) -> TimedEnv:
        """Open a pool with as many stand-ins as there are envs, or fewer."""
        num_envs, workers = len(self.factories), candidate.workers
        share = -(-min(num_envs, max(_MOST_STAND_INS, workers)) // workers)
        size = min(num_envs, min(share, max(1, int(_SLICE / self._step))) * workers)
        scale = -(-num_envs // workers) / -(-size // workers)
        env_fns = {one.env_id: functools.partial(StandIn, self._name, one) for one in self.factories}
        env = self._make(candidate, [env_fns[self.factories[i * num_envs // size].env_id] for i in range(size)])
        env.reset(seed=0)
        return TimedEnv(env, random_actions(env, 16), _SLICE, self._busy / scale, scale)

    def _make(self, candidate: Candidate, env_fns: Sequence[Callable[[], Any]]) -> ParallelEnv:
        options: Any = {**self.env_options, **candidate.options, "num_cpus": candidate.workers}
        options |= {"timeout": _PATIENCE, "output": "quiet", "keep": True}
        return self._stack.enter_context(ParallelEnv(env_fns, candidate.mode, "restart", **options))


def _copy(packed: bytes, is_live: bool) -> Any:
    """Return a new copy of a pickled env, or of the one that a pickled env fn returns."""
    source = loads(packed)
    return source if is_live else source()


def _representatives(factories: Sequence[EnvFactory]) -> list[EnvFactory]:
    """Return for each env the factory to try for it: its own, or one of few, evenly spread, if they are many."""
    different = list({id(one.source): one for one in reversed(factories)}.values())[::-1]
    count = min(len(different), _MOST_KINDS)
    chosen = [different[-(-index * len(different) // count)] for index in range(count)]
    place = {id(one.source): chosen[index * count // len(different)] for index, one in enumerate(different)}
    return [place[id(one.source)] for one in factories]


def _measure_steps(env: ParallelEnv) -> tuple[float, float]:
    """Step an env a few times; return the seconds per step, and the part of them spent computing.

    Time in which the env is ready to run but another process has the core counts for neither, as far as the system
    distinguishes it from waiting.
    """
    actions = random_actions(env, 16)
    for seconds in (0.0, _LONG_STEP):  # the first step may include one-time work
        begin, busy, count, wall = time.perf_counter(), time.process_time(), 0, 0.0
        before = _switches()
        while not count or wall < seconds:
            env.step(actions[count % len(actions)])
            count, wall = count + 1, time.perf_counter() - begin
        compute = min(wall, time.process_time() - busy)
        waits, losses = (after - earlier for after, earlier in zip(_switches(), before, strict=True))
        if wall > 10 * _LONG_STEP:
            break
    return (compute + (wall - compute) * waits / max(1, waits + losses)) / count, compute / count


def _switches() -> tuple[int, int]:
    """Return how often this thread gave up its core to wait, and how often it was preempted."""
    try:
        import resource

        usage = resource.getrusage(resource.RUSAGE_THREAD)
    except (ImportError, AttributeError):  # not Linux: all time not spent computing counts as waiting
        return time.perf_counter_ns(), 0
    return usage.ru_nvcsw, usage.ru_nivcsw


@contextlib.contextmanager
def _without_side_effects() -> Iterator[None]:
    """Preserve the global random generators, and suppress warnings, which the real envs will show."""
    plain, numpys = random.getstate(), np.random.get_state()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        random.setstate(plain)
        np.random.set_state(numpys)
