"""A thousand grid-world tasks of eight samplers: the same tasks in the same order in every mode."""

from __future__ import annotations

import functools
import string
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from conftest import MakePool
from gymnasium.spaces import Box, Dict, Discrete, Text

from parallelenv import ParallelEnv
from parallelenv.results import difference
from parallelenv.tasks.sampler_env import Task, TaskSampler

NUM_ENVS, NUM_TASKS, MAX_STEPS = 8, 125, 8
LEVELS = ("Empty-Random-5x5", "DoorKey-5x5", "GoToDoor-5x5", "Fetch-5x5-N2", "Unlock")


@pytest.fixture(autouse=True)
def _minigrid() -> None:
    pytest.importorskip("minigrid")  # registers its levels, also in workers


class Level(Task):
    """One level, laid out by a seed. The sampler's world is shared with other tasks, so it stays open."""

    def __init__(self, world: Any, seed: int, kind: str) -> None:
        self.world = world
        self.kind = kind
        self.state, _ = world.reset(seed=seed)
        self.is_over = False

    def step(self, action: Any) -> Any:
        self.state, reward, terminated, truncated, info = self.world.step(int(action))
        self.is_over = terminated or truncated
        return self.get_observations(), float(reward), terminated, truncated, info

    def is_done(self) -> bool:
        return self.is_over

    def get_observations(self) -> Any:
        return {name: self.state[name] for name in ("direction", "image", "mission")}

    def mission(self) -> str:
        return f"{self.kind}: {self.world.unwrapped.mission}"


class Levels(TaskSampler):
    """Draws kind and layout of each level; a world of each kind is made once."""

    observation_space = Dict(
        {
            "direction": Discrete(4),
            "image": Box(0, 255, (7, 7, 3), np.uint8),
            "mission": Text(200, charset=string.ascii_lowercase + " ,"),
        }
    )
    action_space = Discrete(7)

    def __init__(self, length: int) -> None:
        self.length = length
        self.random = np.random.default_rng(0)
        self.worlds: dict[str, Any] = {}
        self.order: list[tuple[str, int]] = []

    def next_task(self, **kwargs: Any) -> Level | None:
        if len(self.order) == self.length:
            return None
        kind, seed = LEVELS[self.random.integers(len(LEVELS))], int(self.random.integers(1000))
        self.order.append((kind, seed))
        if kind not in self.worlds:
            self.worlds[kind] = gym.make(f"MiniGrid-{kind}-v0", max_steps=MAX_STEPS)
        return Level(self.worlds[kind], seed, kind)

    def reset(self) -> None:
        self.order = []

    def set_seed(self, seed: int) -> None:
        self.random = np.random.default_rng(seed)

    def close(self) -> None:
        for world in self.worlds.values():
            world.close()


def play(env: Any) -> tuple[int, float, list[Any]]:
    """Step until no sampler has a task; return how many were played, their reward, and in which order they came."""
    random = np.random.default_rng(1)
    env.reset(seed=3)
    missions = [env.call("mission")]
    played, total = 0, 0.0
    while not env.all_exhausted():
        result = env.step(random.integers(0, 3, NUM_ENVS))
        acting = np.array([reward is not None for reward in result.rewards])
        played += int(result.dones[acting].sum())
        total += sum(result.rewards[acting])
    return played, total, [env.attr("sampler.order"), missions, env.get_observations().tolist()]


@functools.cache
def played_in_a_loop() -> Any:
    with ParallelEnv.from_samplers(Levels, [{"length": NUM_TASKS}] * NUM_ENVS) as oracle:
        return play(oracle)


def test_tasks_have_the_same_order_in_every_mode(make_pool: MakePool) -> None:
    expected = played_in_a_loop()
    found = play(make_pool(Levels, [{"length": NUM_TASKS}] * NUM_ENVS))
    played, total, (orders, _, seen) = found
    assert played == NUM_ENVS * NUM_TASKS == 1000
    assert total > 0
    assert seen == [None] * NUM_ENVS
    assert len({str(order) for order in orders}) == NUM_ENVS  # each sampler has its own
    assert difference(expected, found) is None, difference(expected, found)


def test_rollout_plays_the_same_tasks_as_next_task_rounds(make_pool: MakePool) -> None:
    arguments = [{"length": 12}] * NUM_ENVS
    rounds, beside = make_pool(Levels, arguments, auto=False), make_pool(Levels, arguments)
    rounds.set_seeds(3)
    beside.reset(seed=3)
    tasks = 0
    while True:
        rounds.next_task()
        if rounds.all_done():
            break
        while not rounds.all_done():
            before = rounds.done
            tasks += int((rounds.step(np.full(NUM_ENVS, 2)).dones & ~before).sum())
    rollout = beside.rollout(forward, num_episodes=NUM_ENVS * 100)  # more than available
    assert tasks == rollout.dones.sum() == NUM_ENVS * 12
    assert beside.all_exhausted()
    assert difference(rounds.attr("sampler.order"), beside.attr("sampler.order")) is None


def forward(states: Any) -> Any:
    return np.full(len(states["direction"]), 2)
