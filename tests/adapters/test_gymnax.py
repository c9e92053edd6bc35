"""A vector env in JAX, of gymnax, as an item of the user's list."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
from modes import here_and_in_processes

from parallelenv import ParallelEnv
from parallelenv.testing.contract import assert_same
from parallelenv.testing.envs import Counter

pytestmark = pytest.mark.jax
MakeEnv = Callable[..., ParallelEnv]


@pytest.fixture(autouse=True, scope="module")
def _jax() -> None:
    """Import JAX before the first test: it sets an environment variable, which would be reported as a leak."""
    import gymnax  # noqa: F401


def poles(seed: int, num_envs: int = 16) -> Any:
    import gymnax
    from gymnax.wrappers.gym import GymnaxToVectorGymWrapper

    env, params = gymnax.make("CartPole-v1")
    return GymnaxToVectorGymWrapper(env, num_envs, params, seed)


@here_and_in_processes
def test_results_equal_those_of_the_vector_env_itself(make_env: MakeEnv) -> None:
    env = make_env([partial(poles, 0), partial(poles, 1)], asynchronous="continue", num_cpus=2)
    alone, chance = [poles(0), poles(1)], np.random.default_rng(1)
    assert env.num_envs == 32
    first = env.reset(seed=3)
    for begin, one in zip((0, 16), alone, strict=True):
        assert_same(np.asarray(one.reset(seed=3 + begin)[0]), first[begin : begin + 16])
    num_ends = 0
    for _ in range(40):
        actions = chance.integers(0, 2, 32)
        result = env.step(actions)
        num_ends += result.dones.sum()
        for begin, one in zip((0, 16), alone, strict=True):
            rows = slice(begin, begin + 16)
            states, rewards, terminated, truncated, infos = one.step(actions[rows])
            expected = [*map(np.asarray, (states, terminated, truncated))]
            assert_same(expected, [result.states[rows], result.terminated[rows], result.truncated[rows]])
            assert_same(np.asarray(rewards).tolist(), result.rewards[rows].tolist())
            found = [info["final_observation"] for info in result.infos[rows]]
            assert_same(list(np.asarray(infos["final_observation"])), found)
    for array in (first, result.states, result.rewards, result.infos[0]["final_observation"]):
        assert type(array) is np.ndarray
        array[...] = 0  # the user's own
    assert num_ends > 5  # each time it starts the next episode itself


class Brief(Counter):
    """Its states have a dtype that Python's buffer protocol lacks."""

    def step(self, action: Any) -> Any:
        import jax.numpy as jnp

        state, *others = super().step(action)
        return jnp.asarray(state, jnp.bfloat16), *others


@here_and_in_processes
def test_states_of_bfloat16(make_env: MakeEnv) -> None:
    env, plain = make_env([Brief] * 2, asynchronous="restart"), make_env([Counter] * 2, asynchronous="restart")
    for one in (env, plain):
        one.reset(seed=1)
    for _ in range(9):
        assert_same(plain.step([1, 2]).states[:, :2], env.step([1, 2]).states[:, :2])
