"""The adapter for Stable-Baselines3 equals `DummyVecEnv`, and its algorithms learn the same on it."""

from __future__ import annotations

from functools import partial
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from conftest import MakeEnv
from modes import here_and_in_processes

from adapters.envs import Drawn, Fragile, Looped, Typed, Varied
from adapters.neighbours import Twins, require, seeded
from parallelenv.errors import ArgumentError, EnvContractError
from parallelenv.results import difference

pytestmark = pytest.mark.neighbours
vec_env = require("stable_baselines3.common.vec_env")

NUM_ENVS = 5


def play(twins: Twins, num_steps: int) -> int:
    """Step both with random actions, as SB3's algorithms give them; return how many episodes have ended."""
    num_ended = 0
    action_space = twins.theirs.action_space
    action_space.seed(5)
    twins.reset()
    for _ in range(num_steps):
        twins.same("unwrapped.reset_infos")
        dones = twins.step(np.stack([action_space.sample() for _ in range(twins.ours.num_envs)]))[2]
        num_ended += int(dones.sum())
    return num_ended


@pytest.mark.parametrize("kind", ["vector", "number", "image", "flat dict"])
def test_steps_and_resets_equal_those_of_dummy_vec_env(kind: str, make_env: MakeEnv, num_steps: int) -> None:
    env_fns = [partial(Varied, kind, 4.0 + number, is_plain=False) for number in range(NUM_ENVS)]
    twins = Twins(make_env(env_fns, num_cpus=2).to_sb3(), vec_env.DummyVecEnv(env_fns))
    twins.same("observation_space", "action_space")
    for options in ({"level": 2}, [{"level": number} if number else {} for number in range(NUM_ENVS)]):
        twins.seed(3)
        twins.set_options(options)
        play(twins, num_steps)
    play(twins, 100)  # without seeds and options: they apply to one reset


@here_and_in_processes
def test_results_belong_to_the_caller_even_with_copy_false(make_env: MakeEnv) -> None:
    env: Any = make_env([Looped] * 3, copy=False).to_sb3()
    zeros = np.zeros(3, int)
    first, second = env.reset(), env.step(zeros)[0]  # algorithms store both
    observations, rewards, _, infos = env.step(zeros)
    assert (first.tolist(), second.tolist()) == ([[0]] * 3, [[1]] * 3)
    for changed in (first, second, observations, rewards, infos[0]["terminal_observation"]):
        changed[:] = 9
    env.reset_infos[0]["more"] = 1
    assert env.step(zeros)[0].tolist() == [[1]] * 3


@here_and_in_processes
def test_attributes_and_methods_equal_those_of_dummy_vec_env(make_env: MakeEnv) -> None:
    from stable_baselines3.common.monitor import Monitor

    env_fns = [partial(Looped, 5), partial(Looped, 6), lambda: Monitor(Looped(7))]
    twins = Twins(make_env(env_fns).to_sb3(), vec_env.DummyVecEnv(env_fns))
    twins.reset()
    for indices in (None, 1, -2, range(2, -1, -2), [0, -1], [1, 1, 0], {1}, np.array([-1, -1])):
        twins.get_attr("length", indices)
        twins.env_method("add", 1, indices=indices, other=0.5)
        for wrapper in (Monitor, Looped):  # an env is not a wrapper
            twins.env_is_wrapped(wrapper, indices)
    assert twins.ours.get_attr("length", iter([2, 0])) == twins.ours.get_attr("length", slice(2, None, -2)) == [7, 5]
    for value, indices in ((9, [0, 2]), ([9], {-1, 0})):
        twins.set_attr("length", value, indices)
        twins.get_attr("length")
    twins.has_attr("length")
    twins.has_attr("nonsense")


@here_and_in_processes
def test_invalid_names_and_indices_are_refused(make_env: MakeEnv) -> None:
    env: Any = make_env([Looped] * 2).to_sb3()
    for indices in (1.5, "x", [0, "x"], [2], [-3]):
        for call in (partial(env.get_attr, "length"), partial(env.env_method, "add", 1)):
            with pytest.raises(ArgumentError, match="^indices="):
                call(indices=indices)
    for call, argument, error, message in (
        (env.get_attr, "nonsense", AttributeError, "nonsense"),
        (env.env_method, "nonsense", AttributeError, "no method 'nonsense'"),
        (env.env_method, "length", AttributeError, "'length' of Looped is of type int, not a method"),
        (env.has_attr, 5, ArgumentError, "attr_name=5 is not a valid name"),
        (env.env_method, 5, ArgumentError, "method_name=5 is not a valid name"),
        (env.env_is_wrapped, 5, ArgumentError, "wrapper_class=5 is not a class"),
    ):
        with pytest.raises(error, match=message):
            call(argument)
    with pytest.raises(ArgumentError, match="render modes"):
        make_env([Looped, Drawn]).to_sb3()


@here_and_in_processes
def test_frames_are_tiled_as_those_of_dummy_vec_env(make_env: MakeEnv) -> None:
    twins = Twins(make_env([Drawn] * 4).to_sb3(), vec_env.DummyVecEnv([Drawn] * 4))
    twins.seed(3)
    twins.reset()
    twins.step(np.zeros(4, int))
    twins.render()
    twins.same("render_mode", "metadata")


@here_and_in_processes
def test_restarted_env_reports_no_terminal_observation(make_env: MakeEnv) -> None:
    env: Any = make_env([partial(Fragile, 9)] * 2, on_failure="restart").to_sb3()
    env.reset()
    _, rewards, dones, infos = env.step(np.array([0, 1]))
    assert (dones.tolist(), rewards.tolist()) == ([False, True], [2, 0])
    assert isinstance(infos[1].pop("failure"), KeyError)
    assert infos[1] == {"TimeLimit.truncated": False}


@here_and_in_processes
def test_states_are_broadcast_as_dummy_vec_env_does(make_env: MakeEnv) -> None:
    states = [np.ones((1, 2), np.float32), np.ones((), np.float32), np.ones(1, np.float32), np.float32(3), 4.0, [1, 2]]
    space = gym.spaces.Box(0, 9, (2,), np.float32)
    env_fns = [partial(Typed, space, state) for state in states]
    twins = Twins(make_env(env_fns, num_cpus=2).to_sb3(), vec_env.DummyVecEnv(env_fns))
    twins.reset()
    twins.step(np.zeros(len(states), int))
    twins.step(np.ones(len(states), int))
    with pytest.raises(EnvContractError, match=r"shape \(3,\)"):
        make_env([partial(Typed, space, np.zeros(3))]).to_sb3().reset()


# -------------------------------------------------------------------- wrappers and algorithms


def several(env: Any) -> Any:
    """Wrap an env in wrappers; more are in SB3's own tests, which `make neighbours-suites` runs on the adapter."""
    return vec_env.VecCheckNan(vec_env.VecFrameStack(vec_env.VecNormalize(vec_env.VecMonitor(env)), 2), True)


@here_and_in_processes
def test_wrappers_behave_as_on_dummy_vec_env(make_env: MakeEnv) -> None:
    env_fns = [partial(Varied, mean=4.0 + number) for number in range(NUM_ENVS)]
    twins = Twins(several(make_env(env_fns, num_cpus=2).to_sb3()), several(vec_env.DummyVecEnv(env_fns)))
    twins.seed(3)
    assert play(twins, 150) > NUM_ENVS
    twins.same("observation_space")


@here_and_in_processes
def test_ppo_learns_the_same_as_on_dummy_vec_env(make_env: MakeEnv) -> None:
    from stable_baselines3 import PPO

    weights: list[Any] = []
    for env in (make_env(["CartPole-v1"] * 4).to_sb3(), vec_env.DummyVecEnv([lambda: gym.make("CartPole-v1")] * 4)):
        with seeded(3):
            model = PPO("MlpPolicy", env, seed=3, device="cpu", n_steps=64, n_epochs=2).learn(512)
        weights.append([weight.detach().numpy() for weight in model.policy.parameters()])
    assert difference(weights[0], weights[1]) is None
