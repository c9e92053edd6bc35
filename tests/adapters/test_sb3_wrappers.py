"""Stable-Baselines3's wrappers behave on the adapter as on `DummyVecEnv`."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
from conftest import MakeEnv
from modes import here_and_in_processes

from adapters.envs import Varied
from adapters.neighbours import require
from adapters.twins import Sb3Twins

pytestmark = pytest.mark.neighbours
vec_env = require("stable_baselines3.common.vec_env")

NUM_ENVS = 4


def several(env: Any) -> Any:
    """Wrap an env in several wrappers."""
    return vec_env.VecCheckNan(vec_env.VecFrameStack(vec_env.VecNormalize(vec_env.VecMonitor(env)), 2), True)


WRAPPERS: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "normalize a part": ("flat dict", lambda env: vec_env.VecNormalize(env, norm_obs_keys=["a"])),
    "stack images": ("image", lambda env: vec_env.VecFrameStack(env, 2, channels_order="last")),
    "extract": ("flat dict", lambda env: vec_env.VecExtractDictObs(env, "a")),
    "several": ("vector", several),
}
"""Of each kind those that use most of what a vec env has: their own tests, which `make neighbours-suites` runs on the
adapter, have more."""


@here_and_in_processes
@pytest.mark.parametrize("name", WRAPPERS)
def test_wrappers_behave_as_on_dummy_vec_env(name: str, make_env: MakeEnv) -> None:
    kind, wrap = WRAPPERS[name]
    env_fns = [partial(Varied, kind, 4.0 + number) for number in range(NUM_ENVS)]
    twins = Sb3Twins(wrap(make_env(env_fns, num_cpus=2).to_sb3()), wrap(vec_env.DummyVecEnv(env_fns)))
    for one in (twins.ours, twins.theirs):
        one.seed(3)
    assert twins.play(150) > NUM_ENVS
    twins.compare(twins.ours.observation_space, twins.theirs.observation_space)
