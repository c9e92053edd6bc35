"""Stable-Baselines3's wrappers behave on the adapter as on `DummyVecEnv`."""

from __future__ import annotations

import csv
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import MakeEnv
from modes import here_and_in_processes

from adapters.envs import Drawn, Looped, Varied
from adapters.neighbours import require
from adapters.twins import Sb3Twins

pytestmark = pytest.mark.neighbours
vec_env = require("stable_baselines3.common.vec_env")

NUM_ENVS = 4


def several(env: Any) -> Any:
    """Wrap an env in several wrappers."""
    return vec_env.VecCheckNan(vec_env.VecFrameStack(vec_env.VecNormalize(vec_env.VecMonitor(env)), 2), True)


WRAPPERS: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "normalize": ("vector", vec_env.VecNormalize),
    "normalize a part": ("flat dict", lambda env: vec_env.VecNormalize(env, norm_obs_keys=["a"])),
    "stack": ("vector", lambda env: vec_env.VecFrameStack(env, 3)),
    "stack images": ("image", lambda env: vec_env.VecFrameStack(env, 2, channels_order="last")),
    "check": ("vector", lambda env: vec_env.VecCheckNan(env, raise_exception=True)),
    "monitor": ("vector", vec_env.VecMonitor),
    "transpose": ("image", vec_env.VecTransposeImage),
    "extract": ("flat dict", lambda env: vec_env.VecExtractDictObs(env, "a")),
    "several": ("vector", several),
}


def make_twins(make_env: MakeEnv, kind: str, wrap: Callable[[Any], Any]) -> Sb3Twins:
    """Return an adapter and `DummyVecEnv` in the same wrapper, both with the same seeds."""
    env_fns = [partial(Varied, kind, 4.0 + number) for number in range(NUM_ENVS)]
    twins = Sb3Twins(wrap(make_env(env_fns, num_cpus=2).to_sb3()), wrap(vec_env.DummyVecEnv(env_fns)))
    for one in (twins.ours, twins.theirs):
        one.seed(3)
    return twins


@here_and_in_processes
@pytest.mark.parametrize("name", WRAPPERS)
def test_wrappers_behave_as_on_dummy_vec_env(name: str, make_env: MakeEnv) -> None:
    twins = make_twins(make_env, *WRAPPERS[name])
    assert twins.play(150) > NUM_ENVS
    twins.compare(twins.ours.observation_space, twins.theirs.observation_space)


@here_and_in_processes
def test_vec_normalize_statistics_are_saved_and_loaded(make_env: MakeEnv, tmp_path: Path) -> None:
    twins = make_twins(make_env, "vector", vec_env.VecNormalize)
    twins.play(100)
    paths = [tmp_path / "ours", tmp_path / "theirs"]
    for one, path in zip((twins.ours, twins.theirs), paths, strict=True):
        one.save(path)
    # each loads the statistics of the other
    swapped = Sb3Twins(
        vec_env.VecNormalize.load(paths[1], twins.ours.venv), vec_env.VecNormalize.load(paths[0], twins.theirs.venv)
    )
    for name in ("mean", "var", "count"):
        swapped.compare(getattr(swapped.ours.obs_rms, name), getattr(twins.theirs.obs_rms, name))
        swapped.compare(getattr(swapped.ours.ret_rms, name), getattr(twins.theirs.ret_rms, name))
    assert swapped.play(100) > NUM_ENVS
    swapped.compare(swapped.ours.get_original_obs(), swapped.theirs.get_original_obs())
    swapped.compare(swapped.ours.get_original_reward(), swapped.theirs.get_original_reward())


@here_and_in_processes
def test_vec_monitor_writes_the_same_as_on_dummy_vec_env(make_env: MakeEnv, tmp_path: Path) -> None:
    paths = [tmp_path / "ours.monitor.csv", tmp_path / "theirs.monitor.csv"]
    free = iter(paths)
    twins = make_twins(make_env, "vector", lambda env: vec_env.VecMonitor(env, str(next(free))))
    ended = twins.play(100)
    for one in (twins.ours, twins.theirs):
        one.close()
    ours, theirs = (_episodes(path) for path in paths)
    assert len(ours) == ended
    assert ours == theirs


def _episodes(path: Path) -> list[tuple[str, str]]:
    with path.open() as file:
        next(file)  # its start time
        return [(row["r"], row["l"]) for row in csv.DictReader(file)]


class Broken(Looped):
    """Returns nan as state of the second step."""

    def step(self, action: Any) -> Any:
        self.state += 1
        return np.where(self.state == 2, np.nan, self.state).astype(np.float32), 0.0, False, False, {}


@here_and_in_processes
def test_vec_check_nan_detects_nan_observations(make_env: MakeEnv) -> None:
    texts = []
    for env in (make_env([Broken] * 2).to_sb3(), vec_env.DummyVecEnv([Broken] * 2)):
        checked = vec_env.VecCheckNan(env, raise_exception=True)
        checked.reset()
        checked.step(np.zeros(2, int))
        with pytest.raises(ValueError, match="found nan in observations") as caught:
            checked.step(np.zeros(2, int))
        texts.append(str(caught.value))
    assert texts[0] == texts[1]


@here_and_in_processes
@pytest.mark.long
def test_recorded_videos_equal_those_of_dummy_vec_env(make_env: MakeEnv, tmp_path: Path) -> None:
    require("moviepy")
    videos = []
    for number, env in enumerate((make_env([Drawn] * 4).to_sb3(), vec_env.DummyVecEnv([Drawn] * 4))):
        folder = tmp_path / str(number)
        recorder = vec_env.VecVideoRecorder(env, str(folder), lambda step: step == 3, video_length=12)
        recorder.seed(3)
        recorder.reset()
        for _ in range(20):
            recorder.step(np.zeros(4, int))
        recorder.close()
        videos.append({path.name: path.read_bytes() for path in folder.iterdir()})
    assert list(videos[0]) == ["rl-video-step-3-to-step-15.mp4"]
    assert videos[0] == videos[1]
