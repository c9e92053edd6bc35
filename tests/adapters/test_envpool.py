"""EnvPool's vector envs as items of the user's list: they step and reset any of their envs by number."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.wrappers.vector import RecordEpisodeStatistics
from modes import ORACLE, here_and_in_processes

from adapters.neighbours import require
from parallelenv import ParallelEnv
from parallelenv.errors import AbsentAttributeError, ArgumentError, EnvContractError, InvalidEnvError
from parallelenv.testing.contract import DONE_POLICIES, assert_same, items

pytestmark = [pytest.mark.neighbours, pytest.mark.filterwarnings("ignore:.*precision lowered by casting")]
envpool = require("envpool")
MakeEnv = Callable[..., ParallelEnv]


def poles(num_envs: int = 4, **options: Any) -> Any:
    options = {"seed": 3, "max_episode_steps": 7, **options}
    return envpool.make_gymnasium("CartPole-v1", num_envs=num_envs, **options)


@pytest.mark.parametrize("policy", DONE_POLICIES)
@here_and_in_processes
def test_results_equal_those_of_the_pool_itself(policy: Any, make_env: MakeEnv) -> None:
    env = make_env([poles, partial(gym.make, "CartPole-v1"), poles], asynchronous=policy, num_cpus=2)
    pool, chance = poles(), np.random.default_rng(1)
    states = env.reset()
    first, _ = pool.reset(np.arange(4, dtype=np.int32))
    assert_same([first, first], [states[:4], states[5:]])  # its seed is its own
    for step in range(20 if policy == "continue" else 6):  # with which the pool itself starts the next episodes
        actions = chance.integers(0, 2, 4)
        result = env.step([*actions, step % 2, *actions])
        states, rewards, *flags, infos = pool.step(actions, np.arange(4, dtype=np.int32))
        assert_same([states, *flags], [result.states[:4], result.terminated[:4], result.truncated[:4]])
        assert_same(rewards.tolist(), result.rewards[:4].tolist())
        assert_same(list(infos["elapsed_step"]), [info["elapsed_step"] for info in result.infos[5:]])
    assert not {"env_id", "players"} & result.infos[0].keys()
    pool.close()


@pytest.mark.parametrize("policy", ["idle", "restart", "continue"])
def test_envs_step_and_reset_by_number(policy: Any) -> None:
    with ParallelEnv([poles, poles], asynchronous=policy) as env, ParallelEnv([poles] * 2, ORACLE, policy) as other:
        other.engine.plans_steps = False
        for each in (env, other):
            each.reset()
        chance = np.random.default_rng(1)
        counts = np.zeros(8, int)
        for turn in range(40):
            ids = chance.permutation(8)[: 1 + turn % 8].tolist()
            ids = [env_id for env_id in ids if policy == "restart" or not env.done[env_id]]
            actions = chance.integers(0, 2, len(ids))
            result = env.step(actions, ids)
            assert_same(items(other.step(actions, ids)), items(result))
            counts[ids] += 1
            for env_id, info, done in zip(ids, result.infos, result.dones, strict=True):
                assert info["elapsed_step"] == counts[env_id]
                if done and policy == "restart":
                    assert info["reset_info"]["elapsed_step"] == 0
                if done:
                    counts[env_id] = 0
            over = [env_id for env_id in np.flatnonzero(env.done)[::-1].tolist() if policy != "restart"]
            assert_same(other.reset(over), env.reset(over))
            counts[over] = 0


def test_wrapped_pool_steps_only_as_a_whole() -> None:
    def wrapped() -> Any:
        return RecordEpisodeStatistics(poles())

    with ParallelEnv([wrapped], asynchronous="continue") as env:
        env.reset()
        assert env.step([0, 1, 0, 1]).infos[0].keys() >= {"elapsed_step"}
        with pytest.raises(ArgumentError, match="are a part of one vector env"):
            env.step([0], [2])
    with pytest.raises(InvalidEnvError, match="does not fit asynchronous='restart'"):
        ParallelEnv([wrapped], asynchronous="restart")


@here_and_in_processes
def test_calls_of_many_steps(make_env: MakeEnv) -> None:
    env = make_env([poles, partial(poles, 2)], asynchronous="restart", num_cpus=2)
    states = env.reset()
    assert env.rollout(lambda states: np.zeros(len(states), int), 20).valid.all()
    assert len(env.rollout(lambda states: np.zeros(len(states), int), num_episodes=9).episode_returns) >= 9
    assert (env.run_episodes(lambda states: np.arange(len(states)) % 2, 11).lengths <= 7).all()
    env.reset()
    env.send([0, 1], [4, 2])
    assert sorted(env.recv(2).env_ids.tolist()) == [2, 4]
    assert env.save_state().unsaved == (0, 1, 2, 3, 4, 5)
    assert env.restart(5) == (4, 5)
    assert_same(states[4:], env.reset([4, 5]))


def test_unsupported_calls_of_a_pool_are_refused() -> None:
    with pytest.raises(EnvContractError, match="made with batch_size=2 and num_envs=4.*Leave out batch_size"):
        ParallelEnv([partial(poles, batch_size=2)])
    with ParallelEnv([poles]) as env:
        with pytest.warns(UserWarning, match="keeps the seed that EnvPool was made with"):
            env.reset(seed=1)
        with pytest.raises(AbsentAttributeError, match=r"has no get_attr\(\)"):
            env.get_env_attr("gravity")
        with pytest.raises(AbsentAttributeError, match=r"has no call\(\)"):
            env.customized_method("reset")
