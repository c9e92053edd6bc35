"""Black-box optimisers as envs: in each round, a method of the best optimisers is called.

The method is successive halving (Jamieson and Talwalkar, https://arxiv.org/abs/1502.07943): all optimisers run for a
while, then the better half runs for twice as long, and so on. These envs have no `reset` and `step`, because only their
method ``run`` is called.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np

from parallelenv import ParallelEnv

DIMENSIONS = 10


def rastrigin(points: Any) -> Any:
    """Return the value of each point; the minimum, 0, is at the origin."""
    return 10 * points.shape[-1] + (points**2 - 10 * np.cos(2 * np.pi * points)).sum(axis=-1)


class DifferentialEvolution:
    """Minimises Rastrigin's function by DE/rand/1/bin (Storn and Price, 1997)."""

    def __init__(self, weight: float, crossover: float, seed: int) -> None:
        self.weight, self.crossover = weight, crossover
        self.rng = np.random.default_rng(seed)
        self.points = self.rng.uniform(-5, 5, (40, DIMENSIONS))
        self.values = rastrigin(self.points)

    def run(self, generations: int) -> float:
        """Run for some generations and return the best value."""
        size = len(self.points)
        for _ in range(generations):
            a, b, c = (self.points[self.rng.permutation(size)] for _ in range(3))
            mutants = a + self.weight * (b - c)
            crossed = self.rng.random(self.points.shape) < self.crossover
            crossed[np.arange(size), self.rng.integers(0, DIMENSIONS, size)] = True
            trials = np.where(crossed, mutants, self.points)
            values = rastrigin(trials)
            better = values < self.values
            self.points[better], self.values[better] = trials[better], values[better]
        return float(self.values.min())


def main(para_mode: str = "subproc") -> float:
    """Return the best value that was found."""
    settings = [(weight, crossover) for weight in (0.3, 0.5, 0.7, 0.9) for crossover in (0.1, 0.5, 0.7, 0.9)]
    envs = [partial(DifferentialEvolution, *setting, seed) for seed, setting in enumerate(settings)]
    with ParallelEnv(envs, para_mode) as env:
        running, generations = list(range(len(env))), 50
        while True:
            best = env.customized_method("run", {"generations": generations}, id=running)
            ranked = np.argsort(best)
            print(f"{len(running):2} running, {generations} more generations each: best value {min(best):.3g}")
            if len(running) == 1:
                break
            running = [running[place] for place in ranked[: len(running) // 2]]
            generations *= 2
        (winner,) = running
        weight, crossover = env.get_env_attr("weight", id=winner)[0], env.get_env_attr("crossover", id=winner)[0]
    print(f"the best has weight {weight} and crossover {crossover}")
    return float(best[0])


if __name__ == "__main__":
    main()
