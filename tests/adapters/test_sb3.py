"""The adapter for Stable-Baselines3 equals `DummyVecEnv`, and its algorithms learn the same on it."""

from __future__ import annotations

from functools import partial
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from conftest import MakeEnv
from modes import PROCESSES, here_and_in_processes, in_modes
from vector_envs import Walk, synced

from adapters.envs import Fragile, Looped, Varied
from adapters.neighbours import require, seeded
from adapters.twins import Sb3Twins
from parallelenv import ParallelEnv
from parallelenv.errors import (
    ArgumentError,
    EnvBusyError,
    NothingInFlightError,
    UsageError,
)
from parallelenv.results import difference

pytestmark = pytest.mark.neighbours
vec_env = require("stable_baselines3.common.vec_env")

NUM_ENVS = 5


@pytest.mark.parametrize("kind", ["vector", "number", "image", "flat dict"])
def test_steps_and_resets_equal_those_of_dummy_vec_env(kind: str, make_env: MakeEnv, num_steps: int) -> None:
    env_fns = [partial(Varied, kind, 4.0 + number, is_plain=False) for number in range(NUM_ENVS)]
    twins = Sb3Twins(make_env(env_fns, num_cpus=2).to_sb3(), vec_env.DummyVecEnv(env_fns))
    assert twins.ours.observation_space == twins.theirs.observation_space
    assert twins.ours.action_space == twins.theirs.action_space
    for one in (twins.ours, twins.theirs):
        one.seed(3)
        one.set_options({"level": 2})
    twins.play(num_steps)
    twins.play(100)  # without seeds and options: they apply to one reset


@here_and_in_processes
def test_each_env_can_have_its_own_options(make_env: MakeEnv) -> None:
    twins = Sb3Twins(make_env([Varied] * 2).to_sb3(), vec_env.DummyVecEnv([Varied] * 2))
    for one in (twins.ours, twins.theirs):
        one.seed(3)
        one.set_options([{"level": 2}, {}])
    twins.reset()


@here_and_in_processes
def test_modifying_results_does_not_affect_later_steps(make_env: MakeEnv) -> None:
    env: Any = make_env([Looped] * 3).to_sb3()
    env.reset()
    env.step(np.zeros(3, int))
    observations, rewards, dones, infos = env.step(np.zeros(3, int))
    assert rewards.dtype == np.float32
    assert dones.tolist() == [True] * 3
    assert isinstance(infos, list)
    assert [info["terminal_observation"].tolist() for info in infos] == [[2]] * 3
    for changed in (observations, rewards, infos[0]["terminal_observation"]):
        changed[:] = 9
    env.reset_infos[0]["more"] = 1
    assert env.step(np.zeros(3, int))[0].tolist() == [[1]] * 3


@here_and_in_processes
def test_observations_are_copied_even_with_copy_false(make_env: MakeEnv) -> None:
    env: Any = make_env([partial(Looped, 9)] * 3, copy=False).to_sb3()
    first = env.reset()
    second = env.step(np.zeros(3, int))[0]  # algorithms store both
    env.step(np.zeros(3, int))
    assert first.tolist() == [[0]] * 3
    assert second.tolist() == [[1]] * 3
    first[:] = second[:] = 5  # they belong to the caller


@here_and_in_processes
def test_attributes_and_methods_are_reached_by_index(make_env: MakeEnv) -> None:
    env: Any = make_env([partial(Looped, 5 + number) for number in range(3)]).to_sb3()
    env.reset()
    assert env.get_attr("length") == [5, 6, 7]
    assert env.get_attr("length", 1) == [6]
    assert env.get_attr("length", iter([2, 0])) == [7, 5]
    env.set_attr("length", 9, [0, 2])
    assert env.get_attr("length") == [9, 6, 9]
    assert env.env_method("add", 1, indices=[1], other=0.5) == [1.5]
    assert env.has_attr("length")
    assert not env.has_attr("nonsense")
    assert env.get_attr("length", slice(1, 3)) == [6, 9]
    with pytest.raises(AttributeError, match="nonsense"):
        env.get_attr("nonsense")
    with pytest.raises(AttributeError, match="no method 'nonsense'"):
        env.env_method("nonsense")
    with pytest.raises(AttributeError, match="'length' of Looped is of type int, not a method"):
        env.env_method("length")


@here_and_in_processes
def test_env_is_wrapped_detects_wrappers(make_env: MakeEnv) -> None:
    from stable_baselines3.common.monitor import Monitor

    env: Any = make_env([lambda: Monitor(Looped()), Looped]).to_sb3()
    assert env.env_is_wrapped(Monitor) == [True, False]
    assert env.env_is_wrapped(Monitor, 1) == [False]


@here_and_in_processes
def test_invalid_arguments_are_refused(make_env: MakeEnv) -> None:
    env: Any = make_env([Looped] * 2).to_sb3()
    for indices in (1.5, "x", [0, "x"], [2], [-3]):
        with pytest.raises(ArgumentError, match="^indices="):
            env.get_attr("length", indices)
        with pytest.raises(ArgumentError, match="^indices="):
            env.env_method("add", 1, indices=indices)
    with pytest.raises(ArgumentError, match="attr_name=5 is not a valid name"):
        env.has_attr(5)
    with pytest.raises(ArgumentError, match="method_name=5 is not a valid name"):
        env.env_method(5)
    with pytest.raises(ArgumentError, match="wrapper_class=5 is not a class"):
        env.env_is_wrapped(5)


@here_and_in_processes
def test_frames_are_tiled(make_env: MakeEnv) -> None:
    class Drawn(Looped):
        render_mode = "rgb_array"

    env: Any = make_env([Drawn] * 4).to_sb3()
    assert env.render_mode == "rgb_array"
    env.reset()
    env.step(np.zeros(4, int))
    assert env.render().shape == (4, 4, 3)
    assert (env.render() == 1).all()


@here_and_in_processes
def test_step_async_is_completed_by_step_wait(make_env: MakeEnv) -> None:
    env: Any = make_env([Looped] * 3).to_sb3()
    env.reset()
    with pytest.raises(NothingInFlightError, match=r"step_wait\(\) was called, but step_async\(\) was not"):
        env.step_wait()
    env.step_async(np.zeros(3, int))
    assert env.step_wait()[0].tolist() == [[1]] * 3
    env.step_async(np.zeros(3, int))
    for call in (env.step, env.step_async):
        with pytest.raises(EnvBusyError, match=r"Get it with step_wait\(\), or drop it with reset\(\)"):
            call(np.zeros(3, int))
    assert env.reset().tolist() == [[0]] * 3  # drops the step
    assert env.step(np.zeros(3, int))[0].tolist() == [[1]] * 3


@here_and_in_processes
def test_restarted_env_reports_no_terminal_observation(make_env: MakeEnv) -> None:
    env: Any = make_env([partial(Fragile, 9)] * 2, on_failure="restart").to_sb3()
    env.reset()
    _, rewards, dones, infos = env.step(np.array([0, 1]))
    assert dones.tolist() == [False, True]
    assert rewards[1] == 0
    assert isinstance(infos[1]["failure"], KeyError)
    assert infos[1]["TimeLimit.truncated"] is False
    assert "terminal_observation" not in infos[1]


def test_envs_with_different_spaces_or_render_modes_are_refused() -> None:
    other = Looped()
    other.observation_space = gym.spaces.Box(0, 1, (1,), np.float32)
    with ParallelEnv([Looped(), other]) as env, pytest.raises(ArgumentError, match="env 1 is Box"):
        env.to_sb3()
    drawn = Looped()
    drawn.render_mode = "rgb_array"
    with ParallelEnv([Looped(), drawn]) as env, pytest.raises(ArgumentError, match="render modes"):
        env.to_sb3()
    with ParallelEnv([Looped]) as env:
        env.to_gymnasium()
        with pytest.raises(UsageError, match=r"to_sb3\(\) was called, but .* by to_gymnasium\('NextStep'"):
            env.to_sb3()


# -------------------------------------------------------------------- learning


ALGORITHMS: dict[str, dict[str, Any]] = {
    "PPO": {"n_steps": 64, "n_epochs": 2},
    "DQN": {"learning_starts": 64, "train_freq": 4, "gradient_steps": 2, "buffer_size": 1000},
}


@here_and_in_processes
@pytest.mark.parametrize("name", ALGORITHMS)
def test_algorithms_learn_the_same_as_on_dummy_vec_env(name: str, make_env: MakeEnv) -> None:
    import stable_baselines3

    weights: list[Any] = []
    for env in (make_env(["CartPole-v1"] * 4).to_sb3(), vec_env.DummyVecEnv([lambda: gym.make("CartPole-v1")] * 4)):
        with seeded(3):
            algorithm = getattr(stable_baselines3, name)
            model = algorithm("MlpPolicy", env, seed=3, device="cpu", **ALGORITHMS[name])
            model.learn(512)
        weights.append([weight.detach().numpy() for weight in model.policy.parameters()])
    assert difference(weights[0], weights[1]) is None


def learn_cart_pole(env: Any) -> tuple[list[float], float]:
    """Train PPO as RL Zoo does; return the learning curve, and the mean return of 20 episodes after it."""
    from stable_baselines3 import PPO
    from stable_baselines3.common.callbacks import BaseCallback
    from stable_baselines3.common.evaluation import evaluate_policy

    curve: list[float] = []

    class Note(BaseCallback):  # type: ignore[misc]
        def _on_step(self) -> bool:
            return True

        def _on_rollout_end(self) -> None:
            curve.append(float(np.mean([episode["r"] for episode in self.model.ep_info_buffer])))

    schedules: Any = {"learning_rate": lambda left: left * 1e-3, "clip_range": lambda left: left * 0.2}
    numbers: Any = {"n_steps": 32, "batch_size": 256, "n_epochs": 20, "gamma": 0.98, "gae_lambda": 0.8, "seed": 1}
    with seeded(1):
        model = PPO("MlpPolicy", vec_env.VecMonitor(env), device="cpu", **schedules, **numbers)
        model.learn(100_000, callback=Note())
        mean, _ = evaluate_policy(model, vec_env.DummyVecEnv([lambda: gym.make("CartPole-v1")]), 20, warn=False)
    return curve, mean


@pytest.mark.long
@pytest.mark.timeout(900)
@in_modes(PROCESSES)
def test_ppo_solves_cart_pole_with_the_learning_curve_of_dummy_vec_env(make_env: MakeEnv) -> None:
    found = learn_cart_pole(make_env(["CartPole-v1"] * 8).to_sb3())
    assert found[1] >= 475
    assert difference(found, learn_cart_pole(vec_env.DummyVecEnv([lambda: gym.make("CartPole-v1")] * 8))) is None


def test_vector_envs_equal_their_envs_one_by_one(make_env: MakeEnv) -> None:
    env_fns = [partial(synced, (3, 6), "SameStep"), partial(Walk, 5), partial(synced, (4,))]
    singles = [partial(Walk, length) for length in (3, 6, 5, 4)]
    twins = Sb3Twins(make_env(env_fns, asynchronous="restart").to_sb3(), vec_env.DummyVecEnv(singles))
    for one in (twins.ours, twins.theirs):
        one.seed(3)
    twins.reset()
    assert sum(int(twins.step(np.zeros(4, int)).sum()) for _ in range(15)) > 8
    assert twins.ours.get_attr("length", [1, 3]) == twins.theirs.get_attr("length", [1, 3]) == [6, 4]
    assert twins.ours.env_method("tell", "a") == twins.theirs.env_method("tell", "a")
