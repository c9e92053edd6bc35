"""RLlib's env runner works with the vector entry point."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import pytest
from modes import PROCESSES

from adapters.neighbours import require
from parallelenv import ParallelEnv, vector_entry_point

pytestmark = pytest.mark.neighbours


@pytest.fixture
def rllib() -> Iterator[Any]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # RLlib's own, many
        yield require("ray.rllib.algorithms.ppo"), require("ray.rllib.env.single_agent_env_runner")
    ParallelEnv.close_all()


def test_env_runner_samples_episodes(rllib: Any) -> None:
    ppo, runners = rllib
    config = (
        ppo.PPOConfig()
        .environment(env=_make, env_config={"env": "CartPole-v1", "para_mode": PROCESSES})
        .env_runners(num_envs_per_env_runner=4, gym_env_vectorize_mode="vector_entry_point")
    )
    runner = runners.SingleAgentEnvRunner(config=config)
    episodes = runner.sample(num_timesteps=400, random_actions=True)
    assert 400 <= sum(map(len, episodes)) < 410
    assert runner.env.unwrapped.parallel_env.num_envs == 4
    assert all(sum(episode.get_rewards()) == len(episode) for episode in episodes)


def _make(config: dict[str, Any]) -> Any:
    return vector_entry_point(**config)
