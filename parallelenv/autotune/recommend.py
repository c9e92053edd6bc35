"""Recommends a mode for given envs after a short trial; used by ``para_mode="auto"``.

The trial compares candidates; a candidate is a mode with a number of workers. The pool of a candidate has at most as
many stand-ins (`StandIn`) as there are envs, and only a few real envs per worker, usually one. The pool and a plain
loop are stepped alternately, in several short rounds, so that a slow moment of the machine affects both. Each round
gives the ratio of the two speeds, and the median ratio is the result. (If the envs spend most of a step waiting rather
than computing, the mean step times of the pool and the loop are compared instead.) A candidate's pool is opened only
if, even with messages that cost almost nothing, the candidate would be clearly faster than the best candidate so far.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import multiprocessing
import os
import threading
import time
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import mean, median
from typing import Any

import gymnasium
import numpy as np
from gymnasium.envs.registration import EnvSpec
from gymnasium.spaces import Discrete, Space, Tuple

from parallelenv.contract import arguments
from parallelenv.contract.batch import Array
from parallelenv.contract.copying import deep_copy, loads
from parallelenv.contract.cpu_cores import usable_cores
from parallelenv.contract.env_specs import EnvFactory, is_vector_env, make_factories, pack_factories
from parallelenv.contract.error_text import count, duration, number
from parallelenv.contract.failures import one_line
from parallelenv.contract.spaces import Action, Env, Info, Spaces, State
from parallelenv.contract.tracebacks import warn_user
from parallelenv.contract.worker_info import get_worker_info
from parallelenv.env import ParallelEnv
from parallelenv.errors import EnvContractError, ExhaustedError, InvalidEnvError, UnpicklableError
from parallelenv.worker.env_adapter import Resettable, adapt, get_attribute
from parallelenv.worker.env_state import global_states, set_global_states

CLOSE_ENOUGH = 1.05
"""A mode is preferred to a simpler one only if it is faster by more than this factor."""
ROUNDS = 5
MOST_WORKERS = 32
"""Default maximum number of workers for envs that mostly wait, unless there are more cores.

With more threads, sending commands takes longer than 1 ms, the shortest wait for which threads are worthwhile.
"""
_LEAST_CALL = {"thread": 100e-6, "subproc": 20e-6, "caller_steps": 10e-6}
"""Minimum seconds that a step takes with two workers and envs that do nothing."""
_SLICE = 0.02
"""Seconds of a pool's turn.

If a step of all envs takes longer, the pool has fewer stand-ins, but at least one per worker, and a turn is one step.
"""
_WAITING_SLICE = 0.1
"""Seconds of a pool's turn if envs mostly wait.

A shorter turn could be a single step of a few envs. Waits are often random, so one such step may take only a tenth of
the mean time of a step.
"""
_LIMIT = 4.0
"""Seconds after which no more pools are opened."""
_LONG_STEP = 0.05
_LONG_MAKING = 1.0
"""Maximum seconds of a step (`_LONG_STEP`), and of making and resetting the envs of a pool (`_LONG_MAKING`).

A pool that would take longer is not opened; its speed is estimated from the first steps of an env.
"""
_MOST_KINDS = 3
"""Maximum number of different env fns that are tried."""
_MOST_STAND_INS = 256
"""Maximum number of stand-ins in a pool, unless the pool has more workers.

If there are more envs, the time of a step is extrapolated to them, in proportion to the envs per worker.
"""
_PATIENCE = 20.0
"""Seconds after which a trial in another process counts as hanging."""


@dataclass(frozen=True, slots=True)
class Recommendation:
    """A recommended mode and the reason for it. ``str()`` gives one line.

    Attributes:
        mode: The value for ``para_mode``.
        num_cpus: Number of workers.
        options: Options of the mode's backend.
        reason: The reason, in one line.
        step_cost: Seconds per step of one env in ``"dummy"``; ``None`` if no env could be tried.
        releases_gil: Whether threads stepped the envs clearly faster than a loop; ``None`` if threads were not tried.
        problem: The reason why no mode, or not a mode that might be faster, could be tried; empty if there is none.
    """

    mode: str
    num_cpus: int
    options: dict[str, Any] = field(default_factory=dict)
    reason: str = ""
    step_cost: float | None = None
    releases_gil: bool | None = None
    problem: str = ""

    @property
    def arguments(self) -> dict[str, Any]:
        """Keyword arguments for `ParallelEnv`: ``ParallelEnv(envs, **recommend(envs).arguments)``."""
        return {"para_mode": self.mode, "num_cpus": self.num_cpus, **self.options}

    @property
    def label(self) -> str:
        """Mode and options, in short form."""
        return ", ".join([self.mode, *self.options])

    def __str__(self) -> str:
        written = ", ".join(f"{name}={value!r}" for name, value in self.arguments.items())
        return f"{written}: {self.reason}"

    def warn_of_problem(self) -> None:
        """Issue a warning if all modes, or a mode that might be faster, could not be tried."""
        if self.problem:
            some = "No" if self.step_cost is None else "Not every"
            warn_user(
                f"{some} mode could be tried, so {self.mode!r} may not be the fastest one. {self.problem} Give "
                "para_mode to choose a mode yourself."
            )


def recommend(
    envs: Sequence[object], *, num_cpus: int | None = None, spaces: Spaces | None = None, caller_busy: bool = False
) -> Recommendation:
    """Try the modes on envs for a moment and return the fastest one, or a simpler one that is about as fast.

    Each mode that could be faster than the best one so far steps envs with random actions for a few tenths of a second.
    If random actions make an env fail, only actions are used that the env's mask allows: ``action_masks()`` or
    ``info["action_mask"]``. If that is not possible either, no mode can be tried, which a warning says.
    Each worker has one real env, which all env ids of the worker share. If the list has different env fns, each worker
    has one real env for each env fn that it runs, but at most three. The real envs are closed afterwards. Live
    instances are copied, and the copies are tried in separate processes; the instances are not touched. If a step takes
    longer than 0.05 s, or making and resetting an env takes longer than 1 s, only ``"dummy"`` is tried, with one env,
    and the speed of other modes is estimated.

    Args:
        envs: See `ParallelEnv`.
        num_cpus: Number of workers if more than one is useful. By default, several numbers are tried, and the fastest
            is chosen. They exceed the number of usable cores only if the envs mostly wait.
        spaces: See `ParallelEnv`.
        caller_busy: Whether your process computes while envs step: for example, a policy on the CPU may act for one
            half of the envs while the other half steps (`ParallelEnv.send`, `ParallelEnv.recv`). The trial then
            simulates this computation, and also tries a number of workers that leaves one core to your process.

    Returns:
        Mode, number of workers and options, with the reason. The mode is ``"dummy"`` if no env can be tried. It is
        never a Ray mode. If a mode could not be tried, a warning says why.

    Raises:
        ArgumentError: If ``num_cpus``, ``spaces`` or ``caller_busy`` has an invalid value.
        InvalidEnvError: If an item of ``envs`` is not an env, or if the same env object appears twice.
    """
    num_cpus = arguments.check_counts(num_cpus, 0)
    found = choose(make_factories(envs), num_cpus, arguments.check_spaces(spaces), caller_busy=caller_busy)
    found.warn_of_problem()
    return found


def choose(
    env_factories: Sequence[EnvFactory],
    num_cpus: int | None,
    spaces: Spaces | None = None,
    seed: int | None = None,
    shared: Mapping[str, Array] | None = None,
    caller_busy: bool = False,
    seed_globals: bool = False,
) -> Recommendation:
    """Return the result of `recommend` for a `ParallelEnv` with these arguments."""
    arguments.check_flags(caller_busy=caller_busy)

    @functools.cache
    def find_obstacle() -> str:
        """Return the reason why the envs cannot be stepped in other processes, or an empty string if they can."""
        if multiprocessing.current_process().daemon:
            return "this is a daemonic process of multiprocessing, which cannot start processes"
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # the actual transfer gives the warnings
                pack_factories(env_factories)
        except UnpicklableError as error:
            return f"they cannot be pickled ({one_line(error.__cause__ or error)})"
        return ""

    has_instances = any(factory.is_live for factory in env_factories)
    obstacle = find_obstacle() if has_instances else ""
    why = f"Instances are not stepped in a trial, and they cannot be copied: {obstacle}"
    if not obstacle:
        cores = min(usable_cores(), num_cpus or usable_cores())
        env_options = {"spaces": spaces, "seed": seed, "shared": shared or {}, "seed_globals": seed_globals}
        try:
            found = Trial(env_factories, cores, num_cpus, caller_busy, env_options, find_obstacle).run()
        except Exception as error:  # noqa: BLE001 (envs raise anything; the actual envs will raise it again)
            why = f"No env could be tried: {one_line(error).rstrip('.')}"
            if any(" in step" in note for note in getattr(error, "__notes__", ())):
                why += ". Trials take random actions; action_masks() or info['action_mask'] can restrict them"
        else:
            copies = "Workers get copies of the instances." if found.mode == "subproc" else "Copies of them were tried."
            return replace(found, reason=f"{found.reason} {copies}") if has_instances else found
    # This mode is correct for every env. With n cores, it is at most n times slower than the fastest mode.
    reason = f"{why}. Without figures, the plain loop is the safe choice."
    return Recommendation("dummy", 1, reason=reason, problem=f"{why}.")


@dataclass(slots=True)
class Candidate:
    """A mode with a number of workers and, possibly, the option ``caller_steps=True``."""

    mode: str
    workers: int
    options: dict[str, bool]
    speedup: float = 1.0  # relative to the plain loop
    was_tried: bool = True  # whether the speedup was measured; otherwise it is an estimate that ignores messages


@dataclass
class Trial:
    """A trial of the modes.

    This process and each worker make one env for each env fn that they run. At most `_MOST_KINDS` env fns are tried.
    Live envs, and existing envs that an env fn returns, are tried as copies. The copies run only in other processes: in
    this process, a copy might share the original's handle to a simulator or a connection.
    """

    factories: Sequence[EnvFactory]  # of all envs
    cores: int  # cores that the envs may use
    num_cpus: int | None  # the user's number of workers
    caller_busy: bool  # whether the caller computes while envs step
    env_options: dict[str, Any]  # the arguments `spaces`, `seed`, `shared` and `seed_globals` of `ParallelEnv`
    find_obstacle: Callable[[], str]  # returns the reason why envs cannot run in other processes
    are_copies: bool = False  # whether all factories make copies, so that no env of the user can be stepped
    takes_masks: bool = False  # whether only those actions are used that the envs' masks allow

    def run(self) -> Recommendation:
        """Try the modes, in another process if necessary.

        Exceptions in the plain loop are not caught. After a pool has raised an exception, its mode is not tried again.
        """
        # Each env is tried with its own factory or, if there are many, with one of a few that are spread evenly.
        different = list({id(one.source): one for one in reversed(self.factories)}.values())[::-1]
        kinds = min(len(different), _MOST_KINDS)
        chosen = [different[-(-index * len(different) // kinds)] for index in range(kinds)]
        place = {id(one.source): chosen[index * kinds // len(different)] for index, one in enumerate(different)}
        self.factories = [place[id(one.source)] for one in self.factories]
        return self._try_copies() if any(one.is_live for one in self.factories) else self.run_here()

    def run_here(self) -> Recommendation:
        """Try one candidate after another, the simplest one first."""
        if self.are_copies:  # this object is in a worker, in the place of an env
            self.env_options["shared"] = get_worker_info().shared  # type: ignore[union-attr]
        begin = time.perf_counter()
        self._name = os.urandom(8).hex()
        self._failed: dict[str, str] = {}  # the reason why a mode cannot be used, by mode
        if self.env_options["seed_globals"]:
            self._failed["thread"] = _SHARED_GENERATORS
        with _without_side_effects(), contextlib.ExitStack() as self._stack:
            try:
                may_be_tried = self._try_dummy()
            except Exception:
                shared = [one for (trial, *_), one in _SHARED.items() if trial == self._name]
                if not any(one.mask() is not None for one in shared):
                    raise
                self._stack.close()
                self.takes_masks = True
                may_be_tried = self._try_dummy()
            if not may_be_tried:
                return self._try_copies()
            for mode, options in ("thread", {}), ("subproc", {}), ("subproc", {"caller_steps": True}):
                for workers in self._counts(mode, options):
                    candidate = Candidate(mode, workers, options)
                    if time.perf_counter() - begin > _LIMIT or not self._may_win(candidate):
                        break
                    if not self._wins(candidate) and mode == "thread":
                        break
        best, threads = self._best, [one.speedup for one in self._tried if one.mode == "thread"]
        releases_gil = max(threads) > 4 / 3 if threads else None
        problem = " ".join(
            _cannot_be_used(mode, why) for mode, why in self._failed.items() if why != _SHARED_GENERATORS
        )
        return Recommendation(
            best.mode, best.workers, best.options, self._describe(), self._step, releases_gil, problem
        )

    def _try_copies(self) -> Recommendation:
        with _without_side_effects():
            packed = pack_factories(self.factories)
            copies = {
                one.env_id: EnvFactory(one.env_id, functools.partial(_copy, pickled, one.is_live), is_live=False)
                for one, pickled in zip(self.factories, packed, strict=True)
            }
            factories = [copies[one.env_id] for one in self.factories]
            shared = self.env_options["shared"]
            env_options = self.env_options | {"shared": {}}
            trial = replace(self, factories=factories, env_options=env_options, find_obstacle=str, are_copies=True)
            options: Any = {"timeout": _PATIENCE, "output": "quiet", "keep": True, "shared": shared}
            with ParallelEnv([functools.partial(replace, trial)], "subproc", num_cpus=1, **options) as env:
                return env.customized_method("run_here")[0]  # type: ignore[no-any-return]

    def _try_dummy(self) -> bool:
        """Time envs in a plain loop, for comparison. Return ``False`` if the user may be using one of the envs."""
        figures = self._first_steps()
        if figures is None:
            return False
        self._making, self._step, compute = figures
        self._computing = min(1.0, compute / self._step)
        self._waits = self._computing < 0.5
        self._loop = self._step * len(self.factories)  # seconds per step of all envs in the loop
        self._busy = 0.0
        self._best = dummy = Candidate("dummy", 1, {})
        self._tried = [dummy]
        self._dummy: TimedEnv | None = None
        if self._step <= _LONG_STEP:
            self._dummy = self._open(dummy)
            for _ in range(3):
                self._dummy.time()
            self._loop = self._dummy.mean() if self._waits else self._dummy.seconds
            self._step = self._loop / len(self.factories)
        if self.caller_busy:
            self._busy = self._loop / max(1, self.cores - 1)
            self._loop += self._busy
            self._dummy = self._dummy and self._open(dummy)
        return True

    def _first_steps(self) -> tuple[float, float, float] | None:
        """Step one env from each env fn, or from fewer env fns if this takes long.

        These envs stay open, and all of the trial's pools that run envs in this thread use them.

        Returns:
            Mean seconds to make and reset an env, mean seconds per step, and mean CPU seconds per step; ``None`` if an
            env fn returns an env that the user may be using.
        """
        begin = time.perf_counter()
        found: dict[int, tuple[float, float, float]] = {}
        for env_id, kind in {one.env_id: one for one in self.factories}.items():
            if found and time.perf_counter() - begin > _LONG_MAKING:
                break
            kind.prepare()
            now = time.perf_counter()
            env_fn = functools.partial(StandIn, self._name, kind, self.takes_masks, must_be_new=not self.are_copies)
            try:
                env = self._make(Candidate("dummy", 1, {}), [env_fn])
            except InvalidEnvError as error:
                if str(error) != _NOT_NEW:
                    raise
                return None
            env.reset(seed=0)
            found[env_id] = time.perf_counter() - now, *_measure_steps(env)
        self.factories = [one if one.env_id in found else self.factories[0] for one in self.factories]
        making, step, compute = np.mean([found[one.env_id] for one in self.factories], axis=0).tolist()
        return making, step, compute

    def _counts(self, mode: str, options: Mapping[str, bool]) -> list[int]:
        """Return the numbers of workers to try, in the order of the trials.

        Each process beyond the number of cores costs about 40 MB; a thread costs almost nothing. For envs that wait,
        more processes than cores are therefore tried only if threads do not help.
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
        """Return whether a candidate could be clearly faster than the best so far, and can be measured or estimated."""
        # Threads are sure to help if envs wait, or if they have helped before; the gain of caller_steps is never sure.
        surely_helps = candidate.mode == "subproc" or self._waits or self._best.mode == "thread"
        can_be_judged = (surely_helps and not candidate.options) or not self._takes_long(candidate)
        is_worth_it = self._most_speedup(candidate) > CLOSE_ENOUGH * self._best.speedup
        if is_worth_it and can_be_judged and candidate.mode == "subproc" and (obstacle := self.find_obstacle()):
            self._failed.setdefault("subproc", obstacle)
        return is_worth_it and can_be_judged and candidate.mode not in self._failed

    def _most_speedup(self, candidate: Candidate) -> float:
        """Return the speedup that a candidate would have if messages cost almost nothing."""
        num_envs, workers = len(self.factories), candidate.workers
        work = self._step * max(-(-num_envs // workers), num_envs * self._computing / min(workers, self.cores))
        least = _LEAST_CALL["caller_steps" if candidate.options else candidate.mode]
        return self._loop / max(self._busy, least + work)

    def _takes_long(self, candidate: Candidate) -> bool:
        """Return whether trying the candidate would take too long.

        The estimate assumes that threads make envs one at a time, because of the GIL.
        """
        turns = candidate.workers if candidate.mode == "thread" else -(-candidate.workers // self.cores)
        return self._dummy is None or turns * self._making > _LONG_MAKING

    def _wins(self, candidate: Candidate) -> bool:
        candidate.was_tried = not self._takes_long(candidate)
        if candidate.was_tried:
            try:
                pool = self._open(candidate)
                # If envs wait, their random times differ more from turn to turn than the machine's speed does.
                candidate.speedup = self._loop / pool.mean() if self._waits else pool.speedup(self._dummy)  # type: ignore[arg-type]
                pool.env.close()
            except Exception as error:  # noqa: BLE001 (envs raise anything; these envs work in a loop)
                self._failed[candidate.mode] = f"a trial of them failed ({one_line(error)})"
                return False
            self._tried.append(candidate)
        else:
            candidate.speedup = self._most_speedup(candidate)
        wins = candidate.speedup > CLOSE_ENOUGH * self._best.speedup
        if wins:
            self._best = candidate
        return wins

    def _open(self, candidate: Candidate) -> TimedEnv:
        num_envs, workers = len(self.factories), candidate.workers
        share = -(-min(num_envs, max(_MOST_STAND_INS, workers)) // workers)
        size = min(num_envs, min(share, max(1, int(_SLICE / self._step))) * workers)
        scale = -(-num_envs // workers) / -(-size // workers)
        env_fns = {one.env_id: functools.partial(StandIn, self._name, one, self.takes_masks) for one in self.factories}
        env = self._make(candidate, [env_fns[self.factories[i * num_envs // size].env_id] for i in range(size)])
        env.reset(seed=0)
        turn = _WAITING_SLICE if self._waits else _SLICE
        return TimedEnv(env, random_actions(env, 16), turn, self._busy / scale, scale)

    def _make(self, candidate: Candidate, env_fns: Sequence[Callable[[], object]]) -> ParallelEnv:
        options: Any = {**self.env_options, **candidate.options, "num_cpus": candidate.workers}
        options |= {"timeout": _PATIENCE, "output": "quiet", "keep": True}
        return self._stack.enter_context(ParallelEnv(env_fns, candidate.mode, "restart", **options))

    def _describe(self) -> str:
        best, num_envs = self._best, len(self.factories)

        def describe(one: Candidate, unit: str = "") -> str:
            rate = number(float(f"{num_envs * one.speedup / self._loop:.3g}"))
            parts = " and ".join([*one.options, count(one.workers, "worker")])
            return f"{rate}{unit} in {one.mode}{'' if one.mode == 'dummy' else f' with {parts}'}"

        others = sorted((one for one in self._tried if one is not best), key=lambda one: -one.speedup)
        measured = [one for one in (best, *others) if one.was_tried]
        rates = [describe(one, "" if index else " steps/s") for index, one in enumerate(measured)]
        waits, busy = ", mostly waiting" if self._waits else "", ", with the caller busy" if self.caller_busy else ""
        parts = [
            f"A step takes {duration(self._step)}{waits}.",
            f"{count(num_envs, 'env')} made {', '.join(rates)}{busy}.",
        ]
        if not best.was_tried:
            rate, _, mode = describe(best).partition(" in ")
            parts.append(f"{rate} are estimated for {mode}, which was not tried because these envs are slow.")
        elif len(rates) == 1:
            parts.append("No other possible mode can be clearly faster.")
        parts += [_cannot_be_used(mode, why) for mode, why in self._failed.items()]
        if best.options:
            parts.append("The caller steps some of the envs itself; those envs are not isolated from the caller.")
        return " ".join(parts)


_SHARED_GENERATORS = "they share the generators of which seed_globals=True gives each env its own state"


def _cannot_be_used(mode: str, why: str) -> str:
    return f"{'Threads' if mode == 'thread' else 'Other processes'} cannot be used: {why}."


def _copy(packed: bytes, is_live: bool) -> Env:
    source = loads(packed)
    return source if is_live else source()


def _measure_steps(env: ParallelEnv) -> tuple[float, float]:
    """Step an env a few times; return the seconds per step, and how many of these seconds were spent computing.

    Time that the env spends ready to run while another process has the core is left out, as far as the system can
    distinguish it from waiting.
    """
    actions = random_actions(env, 16)
    for seconds in (0.0, _LONG_STEP):  # the first step may include one-time work
        begin, busy, steps, wall = time.perf_counter(), time.process_time(), 0, 0.0
        before = _switches()
        while not steps or wall < seconds:
            env.step(actions[steps % len(actions)])
            steps, wall = steps + 1, time.perf_counter() - begin
        compute = min(wall, time.process_time() - busy)
        waits, losses = (after - earlier for after, earlier in zip(_switches(), before, strict=True))
        if wall > 10 * _LONG_STEP:
            break
    return (compute + (wall - compute) * waits / max(1, waits + losses)) / steps, compute / steps


def _switches() -> tuple[int, int]:
    """Return how many times this thread gave up its core to wait, and how many times it was preempted."""
    try:
        import resource

        usage = resource.getrusage(resource.RUSAGE_THREAD)
    except (ImportError, AttributeError):  # not Linux: all time not spent computing counts as waiting
        return time.perf_counter_ns(), 0
    return usage.ru_nvcsw, usage.ru_nivcsw


@contextlib.contextmanager
def _without_side_effects() -> Iterator[None]:
    """Preserve the states of the global random generators (also torch's), and suppress warnings.

    The warnings are shown later, when the user's own envs are made.
    """
    states = global_states()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        set_global_states(*states)


# ---------------------------------------------------------------- measuring, also for `compare`


class TimedEnv:
    """An open `ParallelEnv` whose steps are timed in short turns.

    Args:
        env: The `ParallelEnv`; it must have been reset.
        actions: One item per step, with the actions of all envs; the items are reused in order if there are more steps
            than items.
        turn: Length of a turn in seconds; a turn has at least one step.
        busy: Seconds for which the caller computes during a step.
        scale: Factor by which each time is multiplied, to estimate the time of a step of all envs if ``env`` has only
            some of them.
    """

    def __init__(
        self, env: ParallelEnv, actions: Sequence[object], turn: float, busy: float = 0.0, scale: float = 1.0
    ) -> None:
        self.env = env
        self.times: deque[float] = deque(maxlen=ROUNDS)
        self._actions = itertools.cycle(actions)
        self._busy = busy
        self._scale = scale
        self._count = 0
        self._step()  # may include one-time work
        # The number of steps per turn is fixed here: steps may take different times, and if turns ended after a certain
        # time, long steps would count too often. In this turn, the system also finds a core for each worker.
        end = time.perf_counter() + turn
        while not self._count or time.perf_counter() < end:
            self._step()
            self._count += 1

    @property
    def seconds(self) -> float:
        """Seconds per step: the median of the latest turns."""
        return median(self.times)

    def time(self) -> None:
        """Step the env for one turn, and record the seconds per step."""
        if self._count > 1:
            self._step()  # wakes workers that slept since the last turn, which takes 60 us
        begin = time.perf_counter()
        for _ in range(self._count):
            self._step()
        self.times.append((time.perf_counter() - begin) / self._count * self._scale)

    def mean(self) -> float:
        """Time `ROUNDS` turns, and return the mean seconds per step. Used for envs whose steps take random times."""
        for _ in range(ROUNDS):
            self.time()
        return mean(self.times)

    def speedup(self, loop: TimedEnv) -> float:
        """Time this env and ``loop`` alternately; return the median speed of this env relative to that of ``loop``."""
        ratios: list[float] = []
        for turn in range(ROUNDS):
            for each in (self, loop) if turn % 2 else (loop, self):
                each.time()
            ratios.append(loop.times[-1] / self.times[-1])
        return median(ratios)

    def _step(self) -> None:
        if not self._busy:
            self.env.step(next(self._actions))
            return
        self.env.step_async(next(self._actions))
        end = time.thread_time() + self._busy
        while time.thread_time() < end:
            pass
        self.env.step_wait()


def random_actions(env: ParallelEnv, number: int, seed: int = 0) -> list[object]:
    """Return ``number`` batches of random actions; raise `EnvContractError` if an env declares no action space."""
    space = env.action_space
    spaces = [space for space in env.action_spaces if space is not None]
    if len(spaces) < len(env):
        raise EnvContractError("it declares no action space to draw random actions from")
    whole: Space[object] = Tuple(spaces) if space is None else space
    whole.seed(seed)
    samples = [whole.sample() for _ in range(number)]
    return [list(sample) for sample in samples] if space is None else samples  # type: ignore[call-overload]


_QUICK_BUILD = 0.01
"""If building an env took fewer seconds than this, the env fn may have returned an existing env."""
_NOT_NEW = "An env fn returns the same env at each call, and that env may be in use."


@dataclass(slots=True)
class _SharedEnv:
    env: Resettable
    first: tuple[State, Info] | None = None  # state and info, once the env has been reset
    num_users: int = 0  # open stand-ins
    info: Info = field(default_factory=dict)  # of the latest reset or, with masks, of the latest step
    choices: Any = None  # a copy of the action space: the env's own generator must not be advanced

    def mask(self) -> Any:
        """Return which actions the env allows now; ``None`` if it does not say."""
        (method,) = get_attribute(self.env.env, "action_masks") or (None,)
        return method() if callable(method) else self.info.get("action_mask")

    def step(self, _: Action) -> Any:
        """Step the env with a random action that its mask allows."""
        if self.choices is None:
            self.choices = deep_copy(self.env.env.action_space)
            self.choices.seed(0)
        mask = self.mask()
        allowed = np.asarray(mask, np.int8) if isinstance(self.choices, Discrete) and mask is not None else mask
        result = self.env.step(self.choices.sample(allowed))
        self.info = result[-1]
        return result


_SHARED: dict[tuple[str, int, int], _SharedEnv] = {}
"""Shared envs by trial, env id of the factory, and thread, because a thread that is a worker has its own envs."""


class StandIn(gymnasium.Env[State, Action]):
    """Takes the place of an env. All stand-ins with the same trial, factory and thread take turns to step one real env.

    With stand-ins, the pool of a trial makes as many calls and exchanges as many messages as the real pool, but does
    not need the memory for all envs or the time to build them. The first stand-in builds the real env. With
    ``takes_masks``, a step does not take the given action, but a random one that the env's mask allows. With
    ``must_be_new``, it raises `InvalidEnvError` if the env fn returns an env that already existed, because the user may
    be using that env.
    """

    def __init__(self, trial: str, factory: EnvFactory, takes_masks: bool = False, must_be_new: bool = False) -> None:
        self._key = trial, factory.env_id, threading.get_ident()
        shared = _SHARED.get(self._key)
        if shared is None:
            begin = time.perf_counter()
            env = factory.build()
            if is_vector_env(env):
                _close(env)
                raise InvalidEnvError(
                    "Vector envs step many envs at once, which a trial of single envs does not measure. Give "
                    "para_mode='dummy' for one of them, 'subproc' for several"
                )
            is_quick = time.perf_counter() - begin < _QUICK_BUILD
            if must_be_new and is_quick and not isinstance(factory.source, (EnvSpec, type)):
                try:
                    other = factory.build()
                except BaseException:
                    _close(env)  # `env` is new: an env fn that returns an existing env does not fail
                    raise
                if other is env:
                    raise InvalidEnvError(_NOT_NEW)
                _close(other)
            shared = _SharedEnv(adapt(env))
        self._shared = shared
        self._has_begun = False
        # The method itself: one more call would take 2 % of a CartPole step.
        self.step: Any = self._shared.step if takes_masks else self._shared.env.step
        _SHARED[self._key] = self._shared
        self._shared.num_users += 1

    @property
    def observation_space(self) -> Any:  # type: ignore[override]  # nothing sets it
        """The env's observation space.

        It is not read if the user gave ``spaces``, because envs then need not declare one.
        """
        return self._shared.env.env.observation_space

    @property
    def action_space(self) -> Any:  # type: ignore[override]
        """The env's action space. It is not read if the user gave ``spaces``."""
        return self._shared.env.env.action_space

    def reset(self, *, seed: int | None = None, options: Info | None = None) -> tuple[State, Info]:
        """Reset the env.

        When a pool starts, only the first stand-in resets the env, because resets may be slow, and the other stand-ins
        return the result of that reset.

        Raises:
            EnvContractError: If the env has no further episode.
        """
        try:
            shared = self._shared
            if self._has_begun or shared.first is None:
                result = shared.env.reset(seed, options)
                shared.first, shared.info = shared.first or result, result[1]
            else:
                result = shared.first
            self._has_begun = True
            return result
        except ExhaustedError as error:
            raise EnvContractError(f"it has too few episodes for a trial ({error})") from error

    def close(self) -> None:
        """Close the real env if no other stand-in uses it."""
        self._shared.num_users -= 1
        if not self._shared.num_users:
            _SHARED.pop(self._key, None)
            _close(self._shared.env.env)


def _close(env: object) -> None:
    with contextlib.suppress(Exception):  # as in a host: errors in closing are ignored
        if callable(close := getattr(env, "close", None)):
            close()
