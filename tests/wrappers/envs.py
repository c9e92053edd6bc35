"""An env for the tests of wrappers, and a sequence of calls."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium.spaces import Box, Discrete


class Told(gym.Env[Any, Any]):
    """Its states and rewards are given, one per step; it ends with the last of them."""

    observation_space = Box(-np.inf, np.inf, (1,), np.float64)
    action_space = Discrete(2)

    def __init__(self, rewards: Sequence[Any], states: Sequence[float] | None = None, first: float = 0.0) -> None:
        self.first = first
        self.rewards = rewards
        self.states = states or [1.0] * len(rewards)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        self.count = 0
        return np.array([self.first]), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.count += 1
        place = self.count - 1
        return np.array([self.states[place]]), self.rewards[place], self.count == len(self.rewards), False, {}


class Reporting(gym.Env[Any, Any]):
    """Its infos have the keys under which the library adds its own facts; its state is the step count."""

    observation_space = Box(-np.inf, np.inf, (1,), np.float64)
    action_space = Discrete(2)
    length = 3

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        self.count = 0
        return np.zeros(1), {"failure": "none", "reset": 5}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.count += 1
        own: dict[str, Any] = {"reset": 7, "ended_state": -1.0, "reset_info": 1, "episode": 2, "exhausted": True}
        if action:  # infos of a steady form are numbers
            own |= {"failure": TimeoutError("a fault of the robot"), "final_info": {"a": 1}, "final_obs": [1.0]}
        return np.full(1, float(self.count)), 1.0, self.count == self.length, False, own


def play(env: Any, actions: Sequence[Any]) -> list[Any]:
    """Step all of at least three envs, or some; reset one, and sometimes those that are done; return all results."""
    results = [env.reset(seed=5)]
    for step in range(60):
        if step == 3:
            results.append(env.reset(1, seed=8))
        if step % 6 == 5 and env.has_done():
            results.append(env.reset(env.done, seed=9))
        if step % 3 == 0:
            results.append(env.step(actions))
        elif step % 3 == 1:
            results.append(env.step(actions[:2], id=[2, 0], align="batch"))
        else:
            env.step_async(actions)
            results.append(env.step_wait())
    return results
