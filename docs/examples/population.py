"""Population based training on Ray: each env is a learner, and the worst learners copy the best.

The method is that of Jaderberg et al. (https://arxiv.org/abs/1711.09846): after each round, each learner of the worst
quarter gets the weights and the learning rate of a learner of the best quarter, and its learning rate is halved or
doubled. The learners use REINFORCE with a linear policy (Williams, 1992) on CartPole.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import gymnasium as gym
import numpy as np

from parallelenv import ParallelEnv

POPULATION, ROUNDS, EPISODES = 8, 8, 15


class Learner:
    """Trains its own policy on its own env."""

    def __init__(self, learning_rate: float, seed: int) -> None:
        self.learning_rate = learning_rate
        self.weights = np.zeros(4)
        self.env = gym.make("CartPole-v1")
        self.rng = np.random.default_rng(seed)
        self.env.reset(seed=seed)

    def train(self, episodes: int) -> float:
        """Play episodes, change the weights after each episode, and return the mean return."""
        returns = []
        for _ in range(episodes):
            gradients, rewards = self._play()
            to_go = np.cumsum(rewards[::-1])[::-1]
            advantages = (to_go - to_go.mean()) / (to_go.std() + 1e-8)
            self.weights = self.weights + self.learning_rate * (gradients * advantages[:, np.newaxis]).mean(axis=0)
            returns.append(sum(rewards))
        return float(np.mean(returns))

    def _play(self) -> tuple[Any, list[float]]:
        """Play an episode; return the gradient of the log-probability of each action, and the rewards."""
        gradients, rewards, done = [], [], False
        state, _ = self.env.reset()
        while not done:
            right = 1 / (1 + np.exp(-state @ self.weights))
            action = int(self.rng.random() < right)
            gradients.append((action - right) * state)
            state, reward, terminated, truncated, _ = self.env.step(action)
            rewards.append(float(reward))
            done = terminated or truncated
        return np.array(gradients), rewards


def main(para_mode: str = "ray", rounds: int = ROUNDS) -> float:
    """Return the mean return of the best learner in the last round."""
    rng = np.random.default_rng(0)
    rates = 10 ** rng.uniform(-2, 1, POPULATION)
    with ParallelEnv([partial(Learner, rate, seed) for seed, rate in enumerate(rates)], para_mode) as env:
        for number in range(rounds):
            returns = env.customized_method("train", {"episodes": EPISODES})
            rates = np.array(env.get_env_attr("learning_rate"))
            print(f"round {number}: best {max(returns):.0f}, median {np.median(returns):.0f}")
            ranked = np.argsort(returns)
            worst, best = ranked[: POPULATION // 4], rng.permutation(ranked[-POPULATION // 4 :])
            env.set_env_attr("weights", values=env.get_env_attr("weights", id=best), id=worst)
            env.set_env_attr("learning_rate", values=rates[best] * rng.choice([0.5, 2.0], len(best)), id=worst)
    return float(max(returns))


if __name__ == "__main__":
    main()
