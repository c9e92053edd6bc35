"""The vector entry point, which makes the adapter for Gymnasium: in registered ids, and for RLlib."""

from __future__ import annotations

from typing import Any

import pytest
from modes import ORACLE, PROCESSES

from adapters.envs import Looped
from adapters.neighbours import require
from parallelenv import ParallelEnvError, vector_entry_point


def test_vector_entry_point_accepts_callable_with_arguments() -> None:
    env = vector_entry_point(2, env=Looped, para_mode=ORACLE, autoreset_mode="SameStep", max_episode_steps=4, length=9)
    env.reset()
    assert env.get_attr("length") == (9, 9)
    truncations = [env.step([0, 0])[3].tolist() for _ in range(4)]
    assert truncations[2:] == [[False, False], [True, True]]
    env.close()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"env": Looped, "num_envs": 0}, "num_envs=0"),
        ({"env": Looped, "para_mode": PROCESSES, "autoreset_mode": "never"}, "autoreset_mode='never' is not known"),
        ({"env": Looped()}, "is itself an env.*Give a registered id"),
        ({"env": Looped, "parallel_kwargs": 5}, "parallel_kwargs=5 is not a dict"),
        ({"env": Looped, "parallel_kwargs": {"para_mode": ORACLE}}, r"parallel_kwargs contains \['para_mode'\]"),
        ({"env": Looped, "parallel_kwargs": {"envs": [Looped]}}, r"parallel_kwargs contains \['envs'\]"),
    ],
)
def test_vector_entry_point_refuses_bad_arguments(arguments: Any, message: str) -> None:
    with pytest.raises(ParallelEnvError, match=message):
        vector_entry_point(**{"num_envs": 2, **arguments})


@pytest.mark.neighbours
@pytest.mark.filterwarnings("ignore")  # RLlib's own, many
def test_env_runner_of_rllib_samples_episodes() -> None:
    ppo, runners = require("ray.rllib.algorithms.ppo"), require("ray.rllib.env.single_agent_env_runner")
    config = (
        ppo.PPOConfig()
        .environment(
            env=lambda config: vector_entry_point(**config), env_config={"env": "CartPole-v1", "para_mode": PROCESSES}
        )
        .env_runners(num_envs_per_env_runner=4, gym_env_vectorize_mode="vector_entry_point")
    )
    runner = runners.SingleAgentEnvRunner(config=config)
    with runner.env.unwrapped.parallel_env as env:
        episodes = runner.sample(num_timesteps=400, random_actions=True)
    assert env.num_envs == 4
    assert 400 <= sum(map(len, episodes)) < 410
    assert all(sum(episode.get_rewards()) == len(episode) for episode in episodes)
