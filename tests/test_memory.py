"""What is kept between calls does not grow with their number."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from conftest import MakeEnv
from gymnasium.spaces import Box, Discrete
from interrupting import Counting
from modes import ORACLE, here_and_in_processes

from parallelenv import ParallelEnv
from parallelenv.contract import batch

MANY = 600


@here_and_in_processes
def test_hints_at_absent_attributes_are_not_kept_for_ever(make_env: MakeEnv, monkeypatch: pytest.MonkeyPatch) -> None:
    env: Any = make_env([Counting] * 2, num_cpus=2)
    for number in range(MANY):
        assert env.get_env_attr(f"name{number}") == [None, None]
    assert len(env.engine._hints) < MANY / 2
    asked: list[str] = []
    ask = env.engine.pool.ask

    def noted(*args: Any, **kwargs: Any) -> Any:
        asked.append(args[3].how)
        return ask(*args, **kwargs)

    monkeypatch.setattr(env.engine.pool, "ask", noted)
    for _ in range(3):
        env.get_env_attr("other_name")
    assert asked == ["value", "hint", "value", "value"]


class Changing(gym.Env[Any, Any]):
    """Has a different space each time it is made."""

    made = 0

    def __init__(self) -> None:
        Changing.made += 1
        self.observation_space = Box(0, Changing.made, (1,))
        self.action_space = Discrete(2)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        return np.zeros(1, np.float32), {}

    def step(self, action: Any) -> Any:
        return np.zeros(1, np.float32), 0.0, False, False, {}


def test_spaces_of_rebuilt_envs_are_not_kept_for_ever() -> None:
    with ParallelEnv([Changing, Changing], ORACLE) as env:
        for _ in range(20):
            env.restart(0)
        assert len(env.engine.pool.lone_host._spaces) <= 4


def test_results_of_dropped_steps_are_not_kept_for_ever() -> None:
    with ParallelEnv([Counting] * 4, ORACLE) as env:
        env.reset()
        env.send([0] * 2, [0, 1])
        for number in range(MANY):
            older, newer = (1, 3) if number % 2 == 0 else (3, 1)
            env.send([0], newer)
            env.get_env_attr("count", 2)  # runs the steps
            env.reset(older)  # its result is neither the first nor the last that waits to be received
        assert len(env.engine.table._arrivals) < MANY / 2
        assert env.recv().env_ids.tolist() == [0, 1]


def test_functions_that_make_infos_are_not_kept_for_ever() -> None:
    for number in range(MANY):
        assert batch._dict_maker((f"key {number}",))([number]) == [{f"key {number}": number}]
    assert batch._dict_maker.cache_info().currsize < MANY
