"""A short trial of the modes: opens pools of stand-ins, steps them in turns, and finds the fastest.

Machines are noisy, so two pools at a time are stepped in turns, in several short rounds, and compared by their medians.
A candidate is only opened if it could be clearly faster than the best so far, were its messages free.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import itertools
import os
import random
import time
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import median
from typing import Any

import cloudpickle
import numpy as np

from parallelenv.autotune.stand_in import NotNewError, StandIn
from parallelenv.contract.batch import Array
from parallelenv.contract.copying import loads
from parallelenv.contract.env_specs import EnvFactory, pack_factories
from parallelenv.contract.error_text import one_line
from parallelenv.contract.spaces import Spaces, batched
from parallelenv.contract.worker_info import get_worker_info
from parallelenv.env import ParallelEnv
from parallelenv.errors import EnvContractError

CLOSE_ENOUGH = 1.05
"""A mode is chosen over a simpler one only if it is faster by more than this factor."""
MOST_WORKERS = 32
"""With more threads, sending commands takes longer than the shortest wait worth it: 1 ms."""
_LEAST_CALL = {"dummy": 5e-6, "thread": 100e-6, "subproc": 20e-6}
"""Seconds of a step of envs that do nothing, with two workers, at best."""
_SLICE = 0.02
"""Seconds of a pool's turn. It is one step if that takes longer, of fewer envs, but of one per worker at least."""
_ROUNDS = 5
_DUEL = 0.3
"""Seconds after which two pools take no further turns."""
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
    """A mode with its number of workers, and ``caller_steps=True`` or no option.

    Attributes:
        times: Seconds of a step of all envs, in each of the latest rounds.
        was_tried: Whether these were measured; else they are what the envs take, without any message.
    """

    mode: str
    workers: int
    options: dict[str, Any]
    times: deque[float] = field(default_factory=lambda: deque(maxlen=_ROUNDS))
    was_tried: bool = True

    @property
    def seconds(self) -> float:
        """Median of the times."""
        return median(self.times)


@dataclass(frozen=True, slots=True)
class TrialResult:
    """What a trial has found.

    Attributes:
        best: The fastest candidate, or a simpler one that is about as fast.
        tried: The candidates that were measured, in order.
        step_cost: Seconds per step of one env in the loop.
        waits: Whether most of that is waiting.
        state_nbytes: Bytes of a state.
        failed: Why a mode was not possible, by mode.
    """

    best: Candidate
    tried: list[Candidate]
    step_cost: float
    waits: bool
    state_nbytes: int
    failed: dict[str, str]


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
        spaces: See `ParallelEnv`, like ``seed`` and ``shared``.
        find_obstacle: Returns why the envs cannot run in other processes; an empty text if they can.
        are_copies: Whether all factories make copies, so that nothing of the user's can be stepped.
    """

    factories: Sequence[EnvFactory]
    cores: int
    num_cpus: int | None
    caller_busy: bool
    spaces: Spaces | None
    seed: int | None
    shared: Mapping[str, Array]
    find_obstacle: Callable[[], str]
    are_copies: bool = False

    def run(self) -> TrialResult:
        """Try the modes, in another process if need be.

        Raises:
            Exception: What an env raised, or why it cannot be tried.
        """
        self.factories = _representatives(self.factories)
        if not any(factory.is_live for factory in self.factories):
            with contextlib.suppress(NotNewError):
                return self.run_here()
        with _without_side_effects():
            copies = {
                one.env_id: EnvFactory(one.env_id, functools.partial(_copy, packed, one.is_live), is_live=False)
                for one, packed in zip(self.factories, pack_factories(self.factories), strict=True)
            }
            factories = [copies[one.env_id] for one in self.factories]
            trial = replace(self, factories=factories, shared={}, find_obstacle=str, are_copies=True)
            options: Any = {"timeout": _PATIENCE, "output": "quiet", "keep": True, "shared": self.shared}
            with ParallelEnv([functools.partial(replace, trial)], "subproc", num_cpus=1, **options) as env:
                return env.customized_method("run_here")[0]  # type: ignore[no-any-return]

    def run_here(self) -> TrialResult:
        """Try one candidate after the other, the simplest first."""
        if self.are_copies:  # this object is in a worker, in the place of an env
            self.shared = get_worker_info().shared  # type: ignore[union-attr]
        begin = time.perf_counter()
        with _without_side_effects(), contextlib.ExitStack() as self._stack:
            self._name = os.urandom(8).hex()
            self._failed: dict[str, str] = {}
            self._try_dummy()
            for mode, options in ("thread", {}), ("subproc", {}), ("subproc", {"caller_steps": True}):
                for workers in self._counts(mode, options):
                    candidate = Candidate(mode, workers, options)
                    is_worth_it = self._least(candidate) * CLOSE_ENOUGH < self._best.seconds
                    if not is_worth_it or time.perf_counter() - begin > _LIMIT or not self._is_possible(candidate):
                        break
                    if not self._wins(candidate) and mode == "thread":
                        break
        return TrialResult(self._best, self._tried, self._step, self._waits, self._nbytes, self._failed)

    def _try_dummy(self) -> None:
        """Step envs in a loop, with which the other candidates are compared."""
        self._making, step, compute, nbytes = self._first_steps()
        self._computing, self._nbytes = min(1.0, compute / step), round(nbytes)
        self._waits = self._computing < 0.5
        self._busy, self._stepping = 0.0, 1.0
        self._best = dummy = Candidate("dummy", 1, {})
        dummy.times.append(step * len(self.factories))
        self._tried = [dummy]
        self._pool: _Pool | None = None  # of the best candidate
        if step <= _LONG_STEP:
            self._pool = self._open(dummy)
            for _ in range(3):
                self._pool.time()
        if self.caller_busy:
            self._busy = dummy.seconds / max(1, self.cores - 1)
            self._stepping = dummy.seconds / (dummy.seconds + self._busy)
            dummy.times = deque([dummy.seconds + self._busy], _ROUNDS)
            self._pool = self._pool and self._open(dummy)

    @property
    def _step(self) -> float:
        """Seconds of a step of one env, by the latest rounds of the loop."""
        return self._tried[0].seconds * self._stepping / len(self.factories)

    def _first_steps(self) -> list[float]:
        """Step one env of each kind. These envs stay open, and are those of all pools in this thread.

        Returns:
            Seconds of making and resetting one, of a step, and of computing in it, and bytes of a state; all means.
        """
        begin = time.perf_counter()
        found: dict[int, tuple[float, ...]] = {}
        for env_id, kind in {one.env_id: one for one in self.factories}.items():
            if found and time.perf_counter() - begin > _LONG_MAKING:
                break
            kind.prepare()
            now = time.perf_counter()
            env_fn = functools.partial(StandIn, self._name, kind, must_be_new=not self.are_copies)
            env = self._make(Candidate("dummy", 1, {}), [env_fn])
            nbytes = _count_bytes(env.reset(seed=0))
            found[env_id] = time.perf_counter() - now, *_measure_steps(env), nbytes
        self.factories = [one if one.env_id in found else self.factories[0] for one in self.factories]
        return np.mean([found[one.env_id] for one in self.factories], axis=0).tolist()  # type: ignore[no-any-return]

    def _counts(self, mode: str, options: dict[str, Any]) -> list[int]:
        """Return the numbers of workers to try, in order.

        A process beyond the number of cores costs some 40 MB, a thread almost nothing: for envs that wait, more
        processes than cores are considered only if threads do not help.
        """
        if options:
            tried = [(one.seconds, one.workers) for one in self._tried if one.mode == "subproc"]
            return [min(tried)[1]] if tried and not self.caller_busy else []
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

    def _least(self, candidate: Candidate) -> float:
        """Return the seconds of a step of all envs if messages cost almost nothing."""
        num_envs, workers = len(self.factories), candidate.workers
        work = self._step * max(-(-num_envs // workers), num_envs * self._computing / min(workers, self.cores))
        return max(self._busy, _LEAST_CALL[candidate.mode] + work)

    def _is_possible(self, candidate: Candidate) -> bool:
        """Whether a candidate can be tried, or judged without a trial."""
        if candidate.mode == "subproc" and (obstacle := self.find_obstacle()):
            self._failed.setdefault("subproc", obstacle)
        # Threads surely help envs that wait, or if they have helped before; the gain of caller_steps is never sure.
        surely_helps = candidate.mode == "subproc" or self._waits or self._best.mode == "thread"
        can_be_judged = (surely_helps and not candidate.options) or not self._takes_long(candidate)
        return can_be_judged and candidate.mode not in self._failed

    def _takes_long(self, candidate: Candidate) -> bool:
        """Whether a trial would take long. Threads are expected to make their envs in turns, because of the GIL."""
        turns = candidate.workers if candidate.mode == "thread" else -(-candidate.workers // self.cores)
        return self._step > _LONG_STEP or turns * self._making > _LONG_MAKING

    def _wins(self, candidate: Candidate) -> bool:
        """Whether a candidate is clearly faster than the best so far, which it then replaces."""
        if self._takes_long(candidate):
            candidate.times.append(self._least(candidate))
            candidate.was_tried = False
            self._best, self._pool = candidate, None
            return True
        pool: _Pool | None
        before = self._best.seconds
        try:
            pool = self._open(candidate)
            pools = [pool] if self._pool is None else [pool, self._pool]
            end = time.perf_counter() + _DUEL
            for turn in range(_ROUNDS):
                for each in pools if turn % 2 else reversed(pools):
                    each.time()
                if time.perf_counter() > end:
                    break
        except Exception as error:  # noqa: BLE001 (envs raise anything; in a loop these work)
            self._failed[candidate.mode] = f"a trial of them failed ({one_line(error)})"
            return False
        for one in self._tried:  # in a slower moment of the machine they would have been slower, too
            if one is not self._best:
                one.times = deque((seconds * self._best.seconds / before for seconds in one.times), _ROUNDS)
        self._tried.append(candidate)
        wins = candidate.seconds * CLOSE_ENOUGH < self._best.seconds
        if wins:
            self._best, self._pool, pool = candidate, pool, self._pool
        if pool is not None:
            pool.env.close()
        return wins

    def _open(self, candidate: Candidate) -> _Pool:
        """Open a pool with as many stand-ins as there are envs, or fewer."""
        num_envs, workers = len(self.factories), candidate.workers
        share = -(-min(num_envs, max(_MOST_STAND_INS, workers)) // workers)
        size = min(num_envs, min(share, max(1, int(_SLICE / self._step))) * workers)
        share = -(-size // workers)
        scale = -(-num_envs // workers) / share
        env_fns = {one.env_id: functools.partial(StandIn, self._name, one) for one in self.factories}
        env = self._make(candidate, [env_fns[self.factories[i * num_envs // size].env_id] for i in range(size)])
        env.reset(seed=0)
        busy = self._busy / scale
        return _Pool(candidate, env, max(busy, _LEAST_CALL[candidate.mode] + share * self._step), scale, busy)

    def _make(self, candidate: Candidate, env_fns: Sequence[Callable[[], Any]]) -> ParallelEnv:
        options: Any = {"spaces": self.spaces, "seed": self.seed, "shared": self.shared, **candidate.options}
        options |= {"num_cpus": candidate.workers, "timeout": _PATIENCE, "output": "quiet", "keep": True}
        return self._stack.enter_context(ParallelEnv(env_fns, candidate.mode, "restart", **options))


class _Pool:
    """An open pool of stand-ins.

    Args:
        candidate: Gets the times.
        env: The pool; its envs were reset.
        expected: Seconds of a step of the pool, roughly.
        scale: Seconds of a step of all envs, per second of a step of the pool.
        busy: Seconds for which the caller computes during a step of the pool.
    """

    def __init__(self, candidate: Candidate, env: ParallelEnv, expected: float, scale: float, busy: float) -> None:
        self.candidate = candidate
        self.env = env
        self._count = max(1, round(_SLICE / expected))
        self._scale = scale
        self._busy = busy
        self._actions = itertools.cycle(_random_actions(env))
        self._step()  # may include one-time work
        if self._count > 1:
            self.time()  # until the system has found a core for each worker

    def time(self) -> None:
        """Step for a moment, and note how long a step of all envs takes.

        The number of steps is known before: steps may take different times, and a turn that ended with a long one would
        count it too often.
        """
        if self._count > 1:
            self._step()  # wakes workers that have slept since the last turn, which takes 60 us
        begin = time.perf_counter()
        for _ in range(self._count):
            self._step()
        self.candidate.times.append((time.perf_counter() - begin) / self._count * self._scale)

    def _step(self) -> None:
        if not self._busy:
            self.env.step(next(self._actions))
            return
        self.env.step_async(next(self._actions))
        end = time.thread_time() + self._busy
        while time.thread_time() < end:
            pass
        self.env.step_wait()


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
    actions = itertools.cycle(_random_actions(env))
    for seconds in (0.0, _LONG_STEP):  # the first step may include one-time work
        begin, busy, (waits, losses) = time.perf_counter(), time.process_time(), _switches()
        count, wall = 0, 0.0
        while not count or wall < seconds:
            env.step(next(actions))
            count, wall = count + 1, time.perf_counter() - begin
        compute = min(wall, time.process_time() - busy)
        waits, losses = _switches()[0] - waits, _switches()[1] - losses
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


def _random_actions(env: ParallelEnv) -> list[Any]:
    """Return some random actions for all envs of a pool."""
    # of copies, so that an env's own space, maybe shared in its class, keeps its seed
    space: Any = batched(copy.deepcopy(env.single_action_space), len(env))
    each: list[Any] = [space] if space is not None else env.action_spaces
    if any(one is None for one in each):
        raise EnvContractError("it declares no action space to draw random actions from")
    for index, one in enumerate(each):
        one.seed(index)
    return [space.sample() if space is not None else [one.sample() for one in each] for _ in range(16)]


def _count_bytes(states: Any) -> int:
    """Return the bytes of states; pickled bytes of parts without a fixed shape."""
    if isinstance(states, (dict, tuple)):
        return sum(map(_count_bytes, states.values() if isinstance(states, dict) else states))
    if isinstance(states, np.ndarray) and not states.dtype.hasobject:
        return states.nbytes
    return len(cloudpickle.dumps(states))


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
