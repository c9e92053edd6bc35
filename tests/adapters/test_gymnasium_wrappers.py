"""Gymnasium's vector wrappers behave on the adapter as on `SyncVectorEnv`."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from conftest import MakeEnv
from gymnasium import wrappers
from gymnasium.wrappers import vector
from modes import here_and_in_processes

from adapters.envs import Drawn, Varied
from adapters.neighbours import require
from adapters.twins import GymnasiumTwins

NUM_ENVS = 4
BOUNDS = np.array([-1, 1], np.float32)
LISTS_STATISTICS = not gym.__version__.startswith(("1.1.", "1.2.0", "1.2.1"))
"""Whether Gymnasium's `DictInfoToList` accepts the infos that its `RecordEpisodeStatistics` adds."""


def pendulum() -> Any:
    """Make an env with bounded observations and actions, whose episodes are of the same length."""
    return gym.make("Pendulum-v1", max_episode_steps=40)


def cart_pole() -> Any:
    """Make an env without infos."""
    return gym.make("CartPole-v1")


def several(env: Any) -> Any:
    """Wrap an env in several wrappers."""
    env = vector.RecordEpisodeStatistics(vector.NormalizeReward(vector.NormalizeObservation(env)))
    env = vector.ClipReward(vector.RescaleAction(env, *BOUNDS), -5, 5)
    return vector.DictInfoToList(env) if LISTS_STATISTICS else env


WRAPPERS: dict[str, tuple[Any, Callable[[Any], Any]]] = {
    "RecordEpisodeStatistics": (Varied, vector.RecordEpisodeStatistics),
    "DictInfoToList": (Varied, vector.DictInfoToList),
    "NormalizeObservation": (Varied, vector.NormalizeObservation),
    "NormalizeReward": (Varied, vector.NormalizeReward),
    "TransformObservation": (Varied, lambda env: vector.TransformObservation(env, np.negative)),
    "TransformAction": (pendulum, lambda env: vector.TransformAction(env, lambda actions: actions / 2)),
    "TransformReward": (Varied, lambda env: vector.TransformReward(env, np.exp)),
    "VectorizeTransformObservation": (
        Varied,
        lambda env: vector.VectorizeTransformObservation(
            env, wrappers.TransformObservation, func=np.negative, observation_space=env.single_observation_space
        ),
    ),
    "VectorizeTransformAction": (
        pendulum,
        lambda env: vector.VectorizeTransformAction(
            env, wrappers.TransformAction, func=np.negative, action_space=env.single_action_space
        ),
    ),
    "VectorizeTransformReward": (
        Varied,
        lambda env: vector.VectorizeTransformReward(env, wrappers.TransformReward, func=np.negative),
    ),
    "FilterObservation": (partial(Varied, "flat dict"), lambda env: vector.FilterObservation(env, ["a"])),
    "FlattenObservation": (partial(Varied, "dict"), vector.FlattenObservation),
    "GrayscaleObservation": (partial(Varied, "image"), vector.GrayscaleObservation),
    "ReshapeObservation": (partial(Varied, "image"), lambda env: vector.ReshapeObservation(env, (6, 8))),
    "RescaleObservation": (pendulum, lambda env: vector.RescaleObservation(env, *BOUNDS)),
    "DtypeObservation": (Varied, lambda env: vector.DtypeObservation(env, np.float64)),
    "ClipAction": (pendulum, vector.ClipAction),
    "RescaleAction": (pendulum, lambda env: vector.RescaleAction(env, *BOUNDS)),
    "ClipReward": (Varied, lambda env: vector.ClipReward(env, -0.5, 0.5)),
    "several": (pendulum, several),
}


def both(make_env: MakeEnv, env_fn: Any, autoreset_mode: str) -> tuple[Any, Any]:
    """Return an adapter and the vector env that it must equal."""
    ours = make_env([env_fn] * NUM_ENVS, num_cpus=2).to_gymnasium(autoreset_mode)
    return ours, gym.vector.SyncVectorEnv([env_fn] * NUM_ENVS, autoreset_mode=autoreset_mode)


def play(twins: GymnasiumTwins, num_steps: int) -> None:
    """Step both until episodes have ended."""
    twins.reset(seed=1)
    twins.theirs.action_space.seed(5)
    assert sum(int(twins.step(twins.theirs.action_space.sample()).sum()) for _ in range(num_steps)) > NUM_ENVS
    twins.compare(twins.ours.observation_space, twins.theirs.observation_space)
    twins.compare(twins.ours.action_space, twins.theirs.action_space)


def attempt(wrap: Callable[[Any], Any], env: Any) -> tuple[Any, Any]:
    """Return the wrapped env, or the error of the wrapper: some do not support every autoreset mode."""
    try:
        return wrap(env), None
    except (ValueError, AssertionError) as error:
        return None, (type(error), str(error))


@here_and_in_processes
@pytest.mark.parametrize("autoreset_mode", ["NextStep", "SameStep"])
@pytest.mark.parametrize("name", WRAPPERS)
def test_wrappers_behave_as_on_sync_vector_env(name: str, autoreset_mode: str, make_env: MakeEnv) -> None:
    env_fn, wrap = WRAPPERS[name]
    ours, theirs = both(make_env, env_fn, autoreset_mode)
    (our_wrapper, our_refusal), (their_wrapper, their_refusal) = attempt(wrap, ours), attempt(wrap, theirs)
    assert our_refusal == their_refusal
    if their_refusal is None:
        play(GymnasiumTwins(our_wrapper, their_wrapper), 120)
    else:
        assert autoreset_mode == "SameStep"


@here_and_in_processes
def test_episode_statistics_equal_those_on_sync_vector_env(make_env: MakeEnv) -> None:
    twins = GymnasiumTwins(*map(vector.RecordEpisodeStatistics, both(make_env, Varied, "SameStep")))
    play(twins, 100)
    for name in ("episode_count", "return_queue", "length_queue", "episode_returns", "episode_lengths"):
        twins.compare(getattr(twins.ours, name), getattr(twins.theirs, name))


@here_and_in_processes
@pytest.mark.neighbours
def test_numpy_to_torch_wrapper_returns_tensors(make_env: MakeEnv) -> None:
    torch = require("torch")
    require("array_api_compat")
    twins = GymnasiumTwins(*map(vector.NumpyToTorch, both(make_env, cart_pole, "NextStep")))
    twins.reset(seed=1)
    actions = torch.ones(NUM_ENVS, dtype=torch.int64)
    assert sum(int(twins.step(actions).sum()) for _ in range(50)) > NUM_ENVS
    assert all(isinstance(answer, torch.Tensor) for answer in twins.ours.step(actions)[:4])


@here_and_in_processes
@pytest.mark.long
@pytest.mark.neighbours
@pytest.mark.skipif(not hasattr(vector, "RecordVideo"), reason="Gymnasium 1.2.1 is the first that has RecordVideo")
@pytest.mark.parametrize("autoreset_mode", ["NextStep", "Disabled"])
def test_recorded_videos_equal_those_of_sync_vector_env(autoreset_mode: str, make_env: MakeEnv, tmp_path: Path) -> None:
    require("moviepy")
    videos = []
    for number, env in enumerate(both(make_env, Drawn, autoreset_mode)):
        folder = tmp_path / str(number)
        recorder = vector.RecordVideo(env, str(folder), episode_trigger=lambda episode: episode == 1, fps=10)
        recorder.reset(seed=1)
        for _ in range(20):
            *_, terminations, _, _ = recorder.step(np.zeros(NUM_ENVS, int))
            if autoreset_mode == "Disabled" and terminations.any():
                recorder.reset(options={"reset_mask": terminations})
        recorder.close()
        videos.append({path.name: path.read_bytes() for path in folder.iterdir()})
    assert list(videos[0]) == ["rl-video-episode-1.mp4"]
    assert videos[0] == videos[1]
