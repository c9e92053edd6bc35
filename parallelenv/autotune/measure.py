"""Measures the costs of an env by stepping one with random actions for a moment.

The trial env is an additional one, made from the user's env fn and closed afterwards. A live instance is never
stepped; its copy is, in a separate process, as a copy may hold the same handle of a simulator or connection.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import random
import sys
import threading
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import cloudpickle
import numpy as np
from gymnasium.envs.registration import EnvSpec

from parallelenv.autotune.costs import EnvMeasurements
from parallelenv.contract.batch import Array
from parallelenv.contract.env_specs import EnvFactory
from parallelenv.contract.shared_arrays import frozen
from parallelenv.contract.spaces import Spaces, Structure
from parallelenv.contract.worker_info import TrialInfo, call_for
from parallelenv.errors import EnvContractError
from parallelenv.worker.env_adapter import Resettable, adapt

try:
    import resource
except ImportError:  # Windows
    resource = None  # type: ignore[assignment]

SECONDS = 0.2
"""Seconds for stepping, over all trial envs; a longer step is done three times."""
_PATIENCE = 20.0
"""Seconds for a copy to be built and tried in its own process, before it counts as hanging."""
_MOST = 3
"""Maximum number of env fns to try, as each takes time to build."""
_SLOW_BUILD = 1.0
"""Seconds of a build after which no further env is built for a trial."""
_QUICK_BUILD = 0.01
"""Builds faster than this (in seconds) may have returned an existing env."""
_WORTH_THREADS = 1e-4
"""Seconds of a step below which threads do not help: waking one takes 30 us."""
_SWITCH = 2e-4
"""Thread switch interval in seconds while it is measured whether the env releases the GIL. With the default 5 ms an env
that releases it once per step would mostly wait to get it back. Shorter intervals cost more CPU time for the switches,
which looks like work: a sixth of it with this, a fifth with 0.1 ms."""


def measure(
    factories: Sequence[EnvFactory],
    spaces: Spaces | None = None,
    seed: int | None = None,
    shared: Mapping[str, Array] | None = None,
) -> EnvMeasurements:
    """Return the average measurements of the envs.

    Args:
        factories: Those of all envs. Some are tried, evenly spread, if there are many kinds.
        spaces: Observation and action space; ``None`` means those that the envs declare.
        seed: Seed of `ParallelEnv`; envs may ask for it when they are made.
        shared: Shared arrays of `ParallelEnv`, likewise.

    Raises:
        Exception: What an env raised, or why it cannot be tried.
    """
    chosen = _sample_factories(factories)
    weights = [sum(factory.source is one.source for factory in factories) for one in chosen]
    seconds = SECONDS / len(chosen)
    if any(one.is_live for one in chosen):
        found = _measure_copies(chosen, seconds, spaces, seed, shared)
    else:
        found = _measure_here(chosen, seconds, spaces, seed, shared, len(factories))
    return _average(found, weights[: len(found)])


def _sample_factories(factories: Sequence[EnvFactory]) -> list[EnvFactory]:
    """Return a few factories with different sources."""
    different = list({id(factory.source): factory for factory in factories}.values())
    count = min(len(different), _MOST)
    return [different[index * len(different) // count] for index in range(count)]


def _average(found: Sequence[EnvMeasurements], weights: Sequence[int]) -> EnvMeasurements:
    def mean(values: Sequence[float]) -> float:
        return sum(value * weight for value, weight in zip(values, weights, strict=True)) / sum(weights)

    shares = [one.lock_free for one in found]
    return EnvMeasurements(
        mean([one.step_cost for one in found]),
        mean([one.compute for one in found]),
        # If one kind of env is too fast for this measurement, the others decide.
        min((share for share in shares if share is not None), default=None),
        round(mean([one.state_nbytes for one in found])),
        round(mean([one.extra_nbytes for one in found])),
    )


def _measure_here(
    factories: Sequence[EnvFactory],
    seconds: float,
    spaces: Spaces | None,
    seed: int | None,
    shared: Mapping[str, Array] | None,
    num_envs: int,
) -> list[EnvMeasurements]:
    found: list[EnvMeasurements] = []
    read_only = frozen(shared or {})
    begin = time.perf_counter()
    for factory in factories:
        with _without_side_effects():
            host = TrialInfo(factory.env_id, num_envs, seed, read_only)
            figures = call_for(host, functools.partial(_measure_new, factory, seconds, spaces))
        if figures is None:
            return _measure_copies(factories, seconds, spaces, seed, shared)
        found.append(figures)
        if time.perf_counter() - begin > _SLOW_BUILD:
            break
    return found


def _measure_new(factory: EnvFactory, seconds: float, spaces: Spaces | None) -> EnvMeasurements | None:
    """Try a new env, or return ``None`` if its env fn makes none."""
    env = _build_new(factory)
    return None if env is None else _measure_and_close(env, seconds, spaces)


def _build_new(factory: EnvFactory) -> Any:
    """Build an env, or return ``None`` if its env fn always returns the same one: ``lambda: env``."""
    begin = time.perf_counter()
    env = factory.build()
    if isinstance(factory.source, (EnvSpec, type)) or time.perf_counter() - begin > _QUICK_BUILD:
        return env
    try:
        other = factory.build()
    except BaseException:
        _close(env)  # the env is new: an env fn that returns an old one does not fail
        raise
    if other is env:
        return None
    _close(other)
    return env


def _measure_copies(
    factories: Sequence[EnvFactory],
    seconds: float,
    spaces: Spaces | None,
    seed: int | None,
    shared: Mapping[str, Array] | None,
) -> list[EnvMeasurements]:
    """Try copies of live envs in another process, where they cannot affect the originals."""
    from parallelenv.env import ParallelEnv  # not in the workers, which import this module for `Probe`

    probes = [functools.partial(Probe, factory) for factory in factories]
    with ParallelEnv(probes, "subproc", num_cpus=1, timeout=_PATIENCE, seed=seed, shared=shared) as env:
        return env.customized_method("measure", {"seconds": seconds, "spaces": spaces})


class Probe:
    """Takes the place of an env in a worker and measures the env there; never stepped itself."""

    def __init__(self, factory: EnvFactory) -> None:
        self._factory = factory

    def reset(self) -> int:
        """Return a state, as an env does."""
        return 0

    def step(self, action: Any) -> tuple[int, float, bool, dict[str, Any]]:
        """Return a step result, as an env does."""
        return 0, 0.0, False, {}

    def measure(self, seconds: float, spaces: Spaces | None) -> EnvMeasurements:
        """Measure the env."""
        return _measure_and_close(self._factory.build(), seconds, spaces)


def _measure_and_close(env: Any, seconds: float, spaces: Spaces | None) -> EnvMeasurements:
    try:
        return _TrialEnv(adapt(env), spaces).measure(seconds)
    finally:
        _close(env)


def _close(env: Any) -> None:
    with contextlib.suppress(Exception):  # as in a host: errors in closing are ignored
        if callable(getattr(env, "close", None)):
            env.close()


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


class _TrialEnv:
    """Steps one env.

    Args:
        env: The env.
        spaces: See `measure`.

    Raises:
        EnvContractError: If the env declares no action space, and none is given.
    """

    def __init__(self, env: Resettable, spaces: Spaces | None) -> None:
        declared: tuple[Any, Any] = spaces or _declared(env.env)
        self._observation_space, space = declared
        if space is None:
            raise EnvContractError("it declares no action space to draw random actions from")
        space = copy.deepcopy(space)  # a copy, so that the env's own space, maybe shared in its class, keeps its seed
        space.seed(0)
        self._env = env
        self._actions = [space.sample() for _ in range(64)]
        self._turns = 0
        self._state: Any = None
        self._info: Any = None

    def measure(self, seconds: float) -> EnvMeasurements:
        """Return the measurements of the env."""
        self._state, self._info = self._env.reset(0, None)
        self._turn()  # not counted, as it may include one-time work
        cost, compute = self._costs(seconds * 2 / 3)
        lock_free = self._lock_free(seconds / 3, cost, compute) if cost >= _WORTH_THREADS else None
        return EnvMeasurements(cost, compute, lock_free, *self._sizes())

    def _turn(self) -> None:
        """Step once, and reset if that ended the episode."""
        result = self._env.step(self._actions[self._turns % 64])
        self._state, _, terminated, truncated, self._info = self._env.five(result)
        if terminated or truncated:
            self._env.reset(None, None)
        self._turns += 1

    def _step_for(self, seconds: float) -> tuple[int, float]:
        """Step for some time, at least once; return the number of steps and the seconds they took."""
        first, begin = self._turns, time.perf_counter()
        now = begin
        while now - begin < seconds or self._turns == first:
            self._turn()
            now = time.perf_counter()
        return self._turns - first, now - begin

    def _costs(self, seconds: float) -> tuple[float, float]:
        """Return the seconds per step, and the part of them spent computing.

        Time in which the env is ready to run but another process has the core counts for neither, as
        far as the system distinguishes it from waiting.
        """
        busy, (waits, losses) = time.process_time(), _switches()
        turns, wall = self._step_for(seconds)
        compute = min(wall, time.process_time() - busy)
        waits, losses = _switches()[0] - waits, _switches()[1] - losses
        idle = (wall - compute) * waits / max(1, waits + losses)
        return (compute + idle) / turns, compute / turns

    def _lock_free(self, seconds: float, cost: float, compute: float) -> float:
        """Return the share of a step in which another thread can run Python code.

        A second thread runs Python code all the time. The work that both do beyond the elapsed time was done in
        parallel. Work is counted by the cost of a step by itself: an env that releases the GIL often but briefly, like
        small matrix products, spends as much again on getting it back (highway-v0: 0.30 s of CPU time, not 0.16).

        Args:
            seconds: Duration of the measurement.
            cost: Seconds of a step by itself.
            compute: The part of them spent computing.
        """
        with _busy_thread() as neighbour:
            own = time.thread_time()
            turns, wall = self._step_for(seconds)
            own = time.thread_time() - own
        done = min(own, turns * compute) + turns * (cost - compute)
        return min(1.0, max(0.0, done + neighbour.seconds - wall) / done) if done else 0.0

    def _sizes(self) -> tuple[int, int]:
        """Return the bytes of a state, and the pickled bytes of values without a fixed shape."""
        structure = Structure(self._observation_space)
        leaves = structure.split(self._state)
        extras = [leaf for index, leaf in enumerate(leaves) if not structure.is_fixed(index)]
        fixed = sum(
            np.dtype(space.dtype).itemsize * int(np.prod(space.shape or ()))
            for index, space in enumerate(structure.leaves)
            if space is not None and structure.is_fixed(index)
        )
        if not extras and not self._info:
            return fixed, 0
        pickled = len(cloudpickle.dumps((extras, self._info)))
        return fixed + (pickled if extras else 0), pickled


def _declared(env: Any) -> tuple[Any, Any]:
    """Return the spaces that an env declares, ``None`` for missing ones."""
    return getattr(env, "observation_space", None), getattr(env, "action_space", None)


def _switches() -> tuple[int, int]:
    """Return how often this thread gave up its core to wait, and how often it was preempted.

    If the system does not report it, all time not spent computing counts as waiting.
    """
    if resource is None or not hasattr(resource, "RUSAGE_THREAD"):  # not Linux
        return time.perf_counter_ns(), 0
    usage = resource.getrusage(resource.RUSAGE_THREAD)
    return usage.ru_nvcsw, usage.ru_nivcsw


class _BusyThread(threading.Thread):
    """Runs Python code until stopped.

    Attributes:
        seconds: CPU time that it got, known after its end.
    """

    def __init__(self) -> None:
        super().__init__(name="parallelenv-trial", daemon=True)
        self.is_over = False
        self.seconds = 0.0

    def run(self) -> None:
        """Count."""
        begin = time.thread_time()
        while not self.is_over:
            pass
        self.seconds = time.thread_time() - begin


@contextlib.contextmanager
def _busy_thread() -> Iterator[_BusyThread]:
    """Run a thread beside this one, with a short switch interval so that neither waits long for the GIL."""
    usual = sys.getswitchinterval()
    neighbour = _BusyThread()
    sys.setswitchinterval(_SWITCH)
    neighbour.start()
    try:
        yield neighbour
    finally:
        neighbour.is_over = True
        neighbour.join()
        sys.setswitchinterval(usual)
