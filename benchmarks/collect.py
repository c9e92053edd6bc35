"""Compares the samples per second of one collector, of two collectors in processes, and of a bare loop.

All of them are open at the same time and are timed in turns, so that a slow moment of the machine affects all of them.
Compare the ratios, not the rates.

Usage: python -m benchmarks.collect [--rounds 7] [--seconds 1.0] [--modes subproc ray]
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from contextlib import ExitStack
from statistics import median
from typing import Any

import gymnasium
import numpy as np

from parallelenv import Collector, CollectorSet, ParallelEnv
from parallelenv.contract.cpu_cores import usable_cores
from parallelenv.contract.error_text import format_table

NUM_ENVS = 8  # per collector
ENOUGH = 1.7  # multiple of one collector's rate that two collectors must reach


class Policy:
    """Two layers of 64 units with random sampling: about 20 us for 8 envs."""

    def __init__(self) -> None:
        self._rng = np.random.default_rng(0)
        self._weights = self._rng.normal(size=(4, 64)), self._rng.normal(size=(64, 2))

    def __call__(self, states: Any) -> Any:
        first, second = self._weights
        scores = np.tanh(states @ first) @ second
        return (scores + self._rng.gumbel(size=scores.shape)).argmax(1)


def make_envs() -> ParallelEnv:
    return ParallelEnv.make("CartPole-v1", NUM_ENVS, "dummy", "restart")


def bare_loop() -> Callable[[int], int]:
    """Return a function that steps all envs ``num_steps`` times, keeps nothing, and returns the number of samples."""
    envs = [gymnasium.make("CartPole-v1") for _ in range(NUM_ENVS)]
    policy = Policy()
    states = np.stack([env.reset(seed=number)[0] for number, env in enumerate(envs)])

    def run(num_steps: int) -> int:
        for _ in range(num_steps):
            for number, (env, action) in enumerate(zip(envs, policy(states), strict=True)):
                states[number], _, terminated, truncated, _ = env.step(action)
                if terminated or truncated:
                    states[number], _ = env.reset()
        return num_steps * NUM_ENVS

    return run


def _streaming(collectors: CollectorSet) -> Callable[[int], int]:
    def run(num_steps: int) -> int:
        parts = 4
        stream = collectors.stream(num_steps // parts, num_collections=parts * len(collectors))
        return sum(info["num_samples"] for _, info in stream)

    return run


def contenders(stack: ExitStack, modes: list[str]) -> dict[str, Callable[[int], int]]:
    """Return the functions to time, by name. Each takes a number of steps per env and returns the number of samples."""
    single = stack.enter_context(Collector(Policy, make_envs, num_steps=1))
    found: dict[str, Callable[[int], int]] = {
        "bare loop": bare_loop(),
        "one collector, here": lambda steps: single.collect(steps, progress=False)[1]["num_samples"],
    }
    for mode in modes:
        for number, name in ((1, "one collector"), (2, "two collectors")):
            made = stack.enter_context(CollectorSet(number, Policy, make_envs, num_steps=1, para_mode=mode))
            found[f"{name}, {mode}"] = lambda steps, made=made: made.collect(steps, progress=False)[1]["num_samples"]  # type: ignore[misc]
        found[f"two in a stream, {mode}"] = _streaming(made)
    return found


def main() -> int:
    """Measure, and print the rates. Return the exit code: 1 if two collectors are too slow compared with one."""
    options = _options()
    rates: dict[str, list[float]] = {}
    with ExitStack() as stack:
        runs = contenders(stack, options.modes)
        steps = {name: _steps_in(run, options.seconds) for name, run in runs.items()}
        for turn in range(options.rounds):
            for name in list(runs)[:: 1 if turn % 2 else -1]:
                begin = time.perf_counter()
                samples = runs[name](steps[name])
                rates.setdefault(name, []).append(samples / (time.perf_counter() - begin))
    print(f"{usable_cores()} usable cores, {options.rounds} rounds in turns, medians; CartPole, {NUM_ENVS} envs each")
    return _report(rates, options.modes)


def _steps_in(run: Callable[[int], int], seconds: float) -> int:
    run(200)  # warm-up
    begin = time.perf_counter()
    run(800)
    return max(100, int(800 * seconds / (time.perf_counter() - begin)))


def _report(rates: dict[str, list[float]], modes: list[str]) -> int:
    """Print the rates and their ratios, and return the exit code. A ratio is the median of the ratios of all rounds."""
    rows, is_enough = [], True
    for name, found in rates.items():
        mode = name.rpartition(", ")[2]
        ratio = ""
        if mode in modes:
            value = median(a / b for a, b in zip(found, rates[f"one collector, {mode}"], strict=True))
            ratio = f"{value:.2f}"
            is_enough &= not name.startswith("two collectors") or value >= ENOUGH
        rows.append([name, f"{median(found):,.0f}", ratio])
    print(format_table(("collecting", "samples/s", "to one"), rows, left=("collecting",)))
    return 0 if is_enough else 1


def _options() -> Any:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--seconds", type=float, default=1.0)
    parser.add_argument("--modes", nargs="+", default=["subproc"])
    return parser.parse_args()


if __name__ == "__main__":
    raise SystemExit(main())
