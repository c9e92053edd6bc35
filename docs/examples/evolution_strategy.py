"""Learns CartPole with an evolution strategy. In one `rollout`, each env plays an episode with its own parameters.

The method is that of Salimans et al., Evolution Strategies as a Scalable Alternative to Reinforcement Learning
(https://arxiv.org/abs/1703.03864), with mirrored samples, and with the ranks of the returns instead of the returns.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from parallelenv import ParallelEnv

POPULATION, GENERATIONS, SIGMA, STEP_SIZE = 32, 12, 0.5, 0.4


def policy(states: Any, rnn_state: Any, done: Any) -> tuple[Any, Any, dict[str, Any]]:
    """Act by a linear policy. Each env has its own parameters, which are given as its recurrent state."""
    scores = (states * rnn_state).sum(axis=1)
    return (scores > 0).astype(int), rnn_state, {}


def main(para_mode: str = "subproc", generations: int = GENERATIONS) -> list[float]:
    """Return the mean return of each generation."""
    rng = np.random.default_rng(0)
    center, means = np.zeros(4), []
    with ParallelEnv(["CartPole-v1"] * POPULATION, para_mode, "restart") as env:
        env.reset(seed=0)
        for generation in range(generations):
            half = rng.standard_normal((POPULATION // 2, 4))
            noise = np.concatenate([half, -half])
            parameters = center + SIGMA * noise
            rollout = env.rollout(policy, num_episodes=POPULATION, rnn_state=parameters, progress=False)
            returns = rollout.rewards.sum(axis=0)  # one episode per env
            ranks = returns.argsort().argsort() / (POPULATION - 1) - 0.5
            center += STEP_SIZE / SIGMA * (ranks[:, np.newaxis] * noise).mean(axis=0) * 4
            means.append(float(returns.mean()))
            print(f"generation {generation}: mean return {means[-1]:.0f}, best {returns.max():.0f}")
    return means


if __name__ == "__main__":
    main()
