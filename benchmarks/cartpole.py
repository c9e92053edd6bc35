"""CartPole-v1 in `subproc` beside Gymnasium's AsyncVectorEnv and a bare loop, in one run.

Rounds are interleaved, because the machine may be shared: read the ratios, not the figures.
Usage: python benchmarks/cartpole.py [--num-envs 16] [--rounds 7] [--steps 1000]
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import gymnasium as gym
import numpy as np

from parallelenv import ParallelEnv

Step = Callable[[Any], object]


@contextmanager
def bare_loop(num_envs: int) -> Iterator[Step]:
    envs = [gym.make("CartPole-v1") for _ in range(num_envs)]
    for index, env in enumerate(envs):
        env.reset(seed=index)

    def step(actions: Any) -> None:
        for env, action in zip(envs, actions, strict=True):
            _, _, terminated, truncated, _ = env.step(action)
            if terminated or truncated:
                env.reset()

    yield step


@contextmanager
def async_vector_env(num_envs: int) -> Iterator[Step]:
    env = gym.vector.AsyncVectorEnv([lambda: gym.make("CartPole-v1")] * num_envs)
    env.reset(seed=0)
    yield env.step
    env.close()


@contextmanager
def parallel_env(num_envs: int, mode: str) -> Iterator[Step]:
    with ParallelEnv.make("CartPole-v1", num_envs, mode, "restart") as env:
        env.reset(seed=0)
        yield env.step


def steps_per_second(step: Step, actions: Any) -> float:
    for row in actions[:50]:
        step(row)
    start = time.perf_counter()
    for row in actions:
        step(row)
    return float(actions.size / (time.perf_counter() - start))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--num-envs", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=1000)
    options = parser.parse_args()
    actions = np.random.default_rng(0).integers(0, 2, (options.steps, options.num_envs))
    cases: dict[str, Callable[[], Any]] = {
        "bare loop": lambda: bare_loop(options.num_envs),
        "gymnasium AsyncVectorEnv": lambda: async_vector_env(options.num_envs),
        **{
            f"ParallelEnv {mode}": lambda mode=mode: parallel_env(options.num_envs, mode)
            for mode in ("dummy", "subproc")
        },
    }
    measured: dict[str, list[float]] = {name: [] for name in cases}
    for _ in range(options.rounds):
        for name, make in cases.items():
            with make() as step:
                measured[name].append(steps_per_second(step, actions))
    peer = statistics.median(measured["gymnasium AsyncVectorEnv"])
    print(f"{options.num_envs} envs of CartPole-v1, medians of {options.rounds} interleaved rounds\n")
    print(f"{'':26} {'steps/s':>9} {'slowest':>9} {'fastest':>9} {'to AsyncVectorEnv':>18}")
    for name, values in measured.items():
        median = statistics.median(values)
        print(f"{name:26} {median:9,.0f} {min(values):9,.0f} {max(values):9,.0f} {median / peer:17.1f}x")


if __name__ == "__main__":
    main()
