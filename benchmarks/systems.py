"""The table of systems. A system steps a list of envs. All systems are driven by the same few calls.

To add a peer, write one function that opens it and one line of `SYSTEMS`.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.util
import inspect
import logging
import multiprocessing
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from multiprocessing.connection import Connection
from typing import Any

import numpy

BARE = "bare"
SIDE_BY_SIDE = "bare-side-by-side"
OURS = "ours"
IN_PROCESS_PEER = "in-process peer"
PROCESS_PEER = "process peer"
VECTOR = "vector env"


@dataclass(slots=True)
class Opened:
    """An opened system with its envs. The calls are the system's own, without a layer in between.

    Attributes:
        reset: Takes the seed of the first env; the other envs get the following numbers.
        step: Takes one action per env, as an array, and resets the envs whose episodes ended. ``None`` if there is a
            ``rate``.
        close: Closes the envs, and leaves nothing running.
        method: Takes the name of a method without arguments, and calls it in every env.
        attribute: Takes the name of an attribute, and reads it in every env.
        rollout: Takes a policy and a number of steps, and makes these steps with the policy.
        env: The system's own object, for abilities that only some systems have.
        ready_s: Seconds until the first states.
        rate: Takes a batch of actions per step, seconds to warm up and seconds to step; returns env steps per second.
            Only for systems that are not stepped by a caller.
    """

    reset: Callable[[int], Any]
    step: Any
    close: Callable[[], Any]
    method: Callable[[str], Any] | None = None
    attribute: Callable[[str], Any] | None = None
    rollout: Callable[[Any, int], Any] | None = None
    env: Any = None
    ready_s: float = 0.0
    rate: Callable[[list[Any], float, float], float] | None = None


EnvFns = Sequence[Callable[[], Any]]
Opener = Callable[[EnvFns, dict[str, Any]], Opened]


@dataclass(frozen=True, slots=True)
class System:
    """A way to step envs: `ParallelEnv` in a mode, another library, or a bare loop. It is one row of every table.

    Attributes:
        name: Name in the cases.
        title: Name in the tables.
        kind: ``BARE``, ``SIDE_BY_SIDE``, ``OURS``, ``IN_PROCESS_PEER``, ``PROCESS_PEER`` or ``VECTOR``. The kind
            decides what the system is compared with.
        colour: Colour in the picture.
        module: The module to import before anything is timed.
        opener: Takes env fns and a case's options for `ParallelEnv`, and returns the opened system.
        uses_ray: Whether the system uses Ray. Such a system has fewer rounds, because Ray takes seconds to start.
        absence: Returns the reason why the system cannot take part on this machine; empty if it can.
    """

    name: str
    title: str
    kind: str
    colour: str
    module: str
    opener: Opener
    uses_ray: bool = False
    absence: Callable[[], str] = str

    def load(self) -> None:
        """Import the packages of the system."""
        importlib.import_module("gymnasium")
        importlib.import_module(self.module)
        if self.uses_ray:
            importlib.import_module("ray")


def bare_loop(env_fns: EnvFns, options: dict[str, Any]) -> Opened:
    """Open a plain loop over the envs.

    The loop stores only the states for the policy, so nothing can be faster in one process.
    """
    envs = [make() for make in env_fns]
    states: Any = None

    def reset(seed: int) -> None:
        nonlocal states
        states = numpy.stack([env.reset(seed=seed + index)[0] for index, env in enumerate(envs)])

    def step(actions: Any) -> None:
        for env, action in zip(envs, actions, strict=True):
            _, _, terminated, truncated, _ = env.step(action)
            if terminated or truncated:
                env.reset()

    def rollout(policy: Any, num_steps: int) -> None:
        for _ in range(num_steps):
            for index, action in enumerate(policy(states)):
                state, _, terminated, truncated, _ = envs[index].step(action)
                states[index] = envs[index].reset()[0] if terminated or truncated else state

    def close() -> None:
        for env in envs:
            env.close()

    return Opened(reset, step, close, rollout=rollout)


def bare_loops(env_fns: EnvFns, options: dict[str, Any]) -> Opened:
    """Open plain loops in as many processes as there are usable cores. The loops run at the same time."""
    loops = SideBySide(bare_loop, env_fns, _cores())
    return Opened(loops.reset, None, loops.close, rate=loops.rate)


class SideBySide:
    """Opens a system in several processes, each with a share of the envs, and times all of them in the same seconds.

    Args:
        opener: See `System`.
        env_fns: The env fns of all envs.
        count: Number of processes; fewer if there are fewer envs.
    """

    def __init__(self, opener: Opener, env_fns: EnvFns, count: int) -> None:
        count = min(count, len(env_fns))
        bounds = [len(env_fns) * index // count for index in range(count + 1)]
        self._shares = [slice(*ends) for ends in pairwise(bounds)]
        self._pipes, self._processes = [], []
        for share in self._shares:
            pipe, theirs = multiprocessing.Pipe()
            process = multiprocessing.Process(target=_run, args=(opener, env_fns[share], theirs), daemon=True)
            process.start()
            theirs.close()
            self._pipes.append(pipe)
            self._processes.append(process)

    def reset(self, seed: int) -> None:
        """Reset all envs. The first env gets ``seed``, and the other envs get the following numbers."""
        self._ask(seed + share.start for share in self._shares)

    def rate(self, actions: Sequence[Any], warm_up: float, seconds: float) -> float:
        """Return the env steps per second of all processes together.

        Args:
            actions: Batches of actions, one per step, for all envs. The batches are used in turns.
            warm_up: Seconds to step before the measurement.
            seconds: Seconds to step.
        """
        self._ask(([row[share] for row in actions], warm_up, seconds) for share in self._shares)
        return float(sum(self._ask("begin" for _ in self._shares)))

    def _ask(self, questions: Any) -> list[Any]:
        """Send each process a message, and return all replies.

        Raises:
            RuntimeError: If a process failed.
        """
        for pipe, question in zip(self._pipes, questions, strict=True):
            with contextlib.suppress(OSError):  # the process has failed, and its reply has the reason
                pipe.send(question)
        answers = [pipe.recv() for pipe in self._pipes]
        for answer in answers:
            if isinstance(answer, str):
                raise RuntimeError(answer)
        return answers

    def close(self) -> None:
        """Close all envs, and wait for the processes to end."""
        for pipe in self._pipes:
            with contextlib.suppress(OSError):  # the process has died
                pipe.send(None)
            pipe.close()
        for process in self._processes:
            process.join()
            process.close()


def _run(opener: Opener, env_fns: EnvFns, pipe: Connection) -> None:
    """Serve `SideBySide` in a process: receive a seed, then, for each measurement, actions and the signal to start."""
    try:
        running = opener(env_fns, {})
        running.reset(pipe.recv())
        pipe.send(None)
        while (asked := pipe.recv()) is not None:
            actions, warm_up, seconds = asked
            _steps_per_second(running.step, actions, warm_up)
            pipe.send(None)
            if pipe.recv() is None:  # another process failed
                break
            pipe.send(len(env_fns) * _steps_per_second(running.step, actions, seconds))
        running.close()
    except Exception as error:  # noqa: BLE001 (raised in the calling process)
        pipe.send(f"{type(error).__name__}: {error}")


def _steps_per_second(step: Callable[[Any], Any], actions: Sequence[Any], seconds: float) -> float:
    """Return the rate of the steps that ended within ``seconds``, or of the first step if none did.

    A step still running at the end is not counted, because other processes may already have finished.
    """
    count = 0
    begin = last = now = time.perf_counter()
    while now - begin < seconds:
        step(actions[count % len(actions)])
        now = time.perf_counter()
        if now - begin < seconds or count == 0:
            count, last = count + 1, now
    return count / (last - begin)


def _cores() -> int:
    from parallelenv.contract.cpu_cores import usable_cores  # here, because most peers run without our package

    return usable_cores()


def ours(mode: str, **extra: Any) -> Opener:
    """Return an opener of `ParallelEnv` in a mode."""

    def open_it(env_fns: EnvFns, options: dict[str, Any]) -> Opened:
        from parallelenv import ParallelEnv

        env = ParallelEnv(list(env_fns), mode, "restart", **extra, **options)
        return Opened(
            lambda seed: env.reset(seed=seed),
            env.step,
            env.close,
            env.customized_method,
            env.get_env_attr,
            env.rollout,
            env,
        )

    return open_it


def envpool(num_envs: int) -> Any:
    """Return EnvPool's CartPoles, which are stepped by C++ threads."""
    import envpool

    return envpool.make_gymnasium("CartPole-v1", num_envs=num_envs, seed=0)


def numpy_cartpole(num_envs: int) -> Any:
    """Return Gymnasium's CartPoles that NumPy steps together."""
    import gymnasium

    return gymnasium.make_vec("CartPole-v1", num_envs, vectorization_mode="vector_entry_point")


def alone(make: Callable[[int], Any]) -> Opener:
    """Return an opener of one vector env, without `ParallelEnv`."""

    def open_it(env_fns: EnvFns, options: dict[str, Any]) -> Opened:
        env = make(len(env_fns))
        return Opened(lambda seed: env.reset(), env.step, env.close, env=env)

    return open_it


def members(make: Callable[[int], Any], mode: str, count: int) -> Opener:
    """Return an opener of a `ParallelEnv` of ``count`` vector envs, which is used like the vector env alone.

    The calls and the autoreset are those of `ParallelEnv.to_gymnasium`.
    """

    def open_it(env_fns: EnvFns, options: dict[str, Any]) -> Opened:
        from parallelenv import ParallelEnv

        pool = ParallelEnv([functools.partial(make, len(env_fns) // count)] * count, mode, "continue", num_cpus=count)
        env = pool.to_gymnasium()
        return Opened(lambda seed: env.reset(), env.step, env.close, env=env)

    return open_it


def _envpool_is_absent() -> str:
    return "" if importlib.util.find_spec("envpool") else "envpool is not installed: pip install 'parallelenv[bench]'"


def gym(name: str, **extra: Any) -> Opener:
    """Return an opener of a vector env of Gymnasium.

    Like all other systems here, it resets an env within the step that ends the episode. Gymnasium's default is to reset
    the env in the next step.
    """

    def open_it(env_fns: EnvFns, options: dict[str, Any]) -> Opened:
        from gymnasium import vector

        env = getattr(vector, name)(env_fns, autoreset_mode=vector.AutoresetMode.SAME_STEP, **extra)
        return Opened(lambda seed: env.reset(seed=seed), env.step, env.close, env.call, env.get_attr, env=env)

    return open_it


def gym_capped(env_fns: EnvFns, options: dict[str, Any]) -> Opened:
    """Open Gymnasium's `AsyncVectorEnv`, in which at most as many envs step at a time as there are usable cores."""
    return gym("AsyncVectorEnv", max_concurrency=_cores())(env_fns, options)


def _gym_is_uncapped() -> str:
    from gymnasium.vector import AsyncVectorEnv

    has_cap = "max_concurrency" in inspect.signature(AsyncVectorEnv).parameters
    return "" if has_cap else "AsyncVectorEnv of this Gymnasium has no max_concurrency"


def sb3(name: str, **extra: Any) -> Opener:
    """Return an opener of a vectorized env of Stable-Baselines3, which resets envs whose episodes have ended."""

    def open_it(env_fns: EnvFns, options: dict[str, Any]) -> Opened:
        from stable_baselines3.common import vec_env

        env = getattr(vec_env, name)(env_fns, **extra)

        def reset(seed: int) -> Any:
            env.seed(seed)
            return env.reset()

        return Opened(reset, env.step, env.close, env.env_method, env.get_attr, env=env)

    return open_it


def ts(name: str) -> Opener:
    """Return an opener of a vector env of Tianshou.

    Tianshou leaves resets to the caller, so ``step`` also resets the envs whose episodes have ended.
    """

    def open_it(env_fns: EnvFns, options: dict[str, Any]) -> Opened:
        import tianshou.env

        env = getattr(tianshou.env, name)(env_fns)

        def reset(seed: int) -> Any:
            env.seed(seed)  # `reset(seed=...)` would give every env the same seed
            return env.reset()

        def step(actions: Any) -> Any:
            answer = env.step(actions)
            ended = answer[2] | answer[3]
            if ended.any():
                env.reset(ended.nonzero()[0])
            return answer

        return Opened(reset, step, env.close, None, env.get_env_attr, env=env)

    return open_it


def torchrl(env_fns: EnvFns, options: dict[str, Any]) -> Opened:
    """Open TorchRL's pool with one worker per usable core, which exchanges data in shared memory.

    The pool takes no seed for all envs, so each env gets its own seed when it is made. Infos are not requested: the
    pool can return infos of HalfCheetah, but not infos that contain Python numbers.
    """
    import torch
    from torchrl.envs import AsyncEnvPool

    pool = AsyncEnvPool(
        [functools.partial(_torchrl_env, make, seed) for seed, make in enumerate(env_fns)],
        backend="multiprocessing",
        exchange="shm",
        envs_per_worker=-(-len(env_fns) // _cores()),
    )
    states: Any = None

    def reset(seed: int) -> None:
        nonlocal states
        states = pool.reset()

    def step(actions: Any) -> Any:
        nonlocal states
        states["action"] = torch.from_numpy(actions)
        answer, states = pool.step_and_maybe_reset(states)
        return answer

    return Opened(reset, step, pool.close, env=pool)


def _torchrl_env(make: Callable[[], Any], seed: int) -> Any:
    from torchrl.envs import GymWrapper

    env = GymWrapper(make(), categorical_action_encoding=True)  # actions are numbers
    env.set_seed(seed)
    return env


def _torchrl_is_absent() -> str:
    is_absent = importlib.util.find_spec("torchrl") is None
    return "torchrl is not installed: pip install 'parallelenv[bench-torchrl]'" if is_absent else ""


def start_ray() -> None:
    """Start Ray on this machine, even if another cluster is running."""
    import ray

    ray.init("local", include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR)


def ts_ray(env_fns: EnvFns, options: dict[str, Any]) -> Opened:
    """Open Tianshou's Ray vector env. Like our Ray modes, start Ray first if it is not running."""
    import ray

    if not ray.is_initialized():
        start_ray()
    return ts("RayVectorEnv")(env_fns, options)


_OURS = "parallelenv"
_GYM = "gymnasium.vector"
_SB3 = "stable_baselines3.common.vec_env"
_TS = "tianshou.env"
# SB3's own default is a fork server, with which each worker imports torch. 16 workers would be ready after 13 s on 2
# cores instead of 0.1 s, in every round. Once started, workers of both start methods step in the same way.
_FORK = {"start_method": "fork"}
_PIPE = {"shared_memory": False}
_CALLER = {"caller_steps": True}
_CALLS = {"direct": False}

SYSTEMS: tuple[System, ...] = (
    System("bare", "bare loop", BARE, "#000000", "gymnasium", bare_loop),
    System(SIDE_BY_SIDE, "bare loops side by side", SIDE_BY_SIDE, "#555555", "gymnasium", bare_loops),
    System("dummy", "ParallelEnv dummy", OURS, "#8c564b", _OURS, ours("dummy")),
    System("thread", "ParallelEnv thread", OURS, "#e377c2", _OURS, ours("thread")),
    System("subproc", "ParallelEnv subproc", OURS, "#d62728", _OURS, ours("subproc")),
    System("caller-steps", "ParallelEnv subproc caller_steps", OURS, "#ff7f0e", _OURS, ours("subproc", **_CALLER)),
    System("ray", "ParallelEnv ray", OURS, "#bcbd22", _OURS, ours("ray"), uses_ray=True),
    System("ray-subproc", "ParallelEnv ray-subproc", OURS, "#7f7f7f", _OURS, ours("ray-subproc"), uses_ray=True),
    System("ray-calls", "ParallelEnv ray direct=False", OURS, "#dbdb00", _OURS, ours("ray", **_CALLS), uses_ray=True),
    System("gym-sync", "Gymnasium SyncVectorEnv", IN_PROCESS_PEER, "#9edae5", _GYM, gym("SyncVectorEnv")),
    System("gym-async", "Gymnasium AsyncVectorEnv", PROCESS_PEER, "#1f77b4", _GYM, gym("AsyncVectorEnv")),
    System(
        "gym-async-capped",
        "Gymnasium Async, max_concurrency",
        PROCESS_PEER,
        "#0b3d91",
        _GYM,
        gym_capped,
        absence=_gym_is_uncapped,
    ),
    System("gym-pipe", "Gymnasium Async, no shm", PROCESS_PEER, "#aec7e8", _GYM, gym("AsyncVectorEnv", **_PIPE)),
    System("sb3-dummy", "SB3 DummyVecEnv", IN_PROCESS_PEER, "#98df8a", _SB3, sb3("DummyVecEnv")),
    System("sb3-subproc", "SB3 SubprocVecEnv", PROCESS_PEER, "#2ca02c", _SB3, sb3("SubprocVecEnv", **_FORK)),
    System("ts-dummy", "Tianshou DummyVectorEnv", IN_PROCESS_PEER, "#c5b0d5", _TS, ts("DummyVectorEnv")),
    System("ts-subproc", "Tianshou SubprocVectorEnv", PROCESS_PEER, "#9467bd", _TS, ts("SubprocVectorEnv")),
    System("ts-shmem", "Tianshou ShmemVectorEnv", PROCESS_PEER, "#17becf", _TS, ts("ShmemVectorEnv")),
    System(
        "torchrl", "TorchRL AsyncEnvPool", PROCESS_PEER, "#b15928", "torchrl.envs", torchrl, absence=_torchrl_is_absent
    ),
    System("envpool", "EnvPool alone", VECTOR, "#637939", "envpool", alone(envpool), absence=_envpool_is_absent),
    System(
        "envpool-dummy",
        "ParallelEnv dummy of one EnvPool",
        OURS,
        "#8c6d31",
        _OURS,
        members(envpool, "dummy", 1),
        absence=_envpool_is_absent,
    ),
    System("numpy", "NumPy CartPole alone", VECTOR, "#7b4173", "gymnasium", alone(numpy_cartpole)),
    System(
        "numpy-subproc",
        "ParallelEnv subproc of two NumPy CartPoles",
        OURS,
        "#843c39",
        _OURS,
        members(numpy_cartpole, "subproc", 2),
    ),
    System("ts-ray", "Tianshou RayVectorEnv", PROCESS_PEER, "#dbdb8d", _TS, ts_ray, uses_ray=True),
)

BY_NAME = {system.name: system for system in SYSTEMS}
