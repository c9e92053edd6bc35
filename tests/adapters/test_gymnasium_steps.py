"""The adapter for Gymnasium equals `SyncVectorEnv`, step for step and bit for bit."""

from __future__ import annotations

from functools import partial

import gymnasium as gym
import numpy as np
import pytest
from conftest import MakeEnv

from adapters.envs import SPACES, Varied
from adapters.twins import GymnasiumTwins

NUM_ENVS = 5
MODES = ("NextStep", "SameStep", "Disabled")


@pytest.mark.parametrize("autoreset_mode", MODES)
@pytest.mark.parametrize("kind", SPACES)
def test_steps_and_resets_equal_those_of_sync_vector_env(
    kind: str, autoreset_mode: str, make_env: MakeEnv, num_steps: int
) -> None:
    env_fns = [partial(Varied, kind, 4.0 + number) for number in range(NUM_ENVS)]
    theirs = gym.vector.SyncVectorEnv(env_fns, autoreset_mode=autoreset_mode)
    twins = GymnasiumTwins(make_env(env_fns, num_cpus=2).to_gymnasium(autoreset_mode), theirs)
    for name in ("num_envs", "metadata", "render_mode", "spec"):
        twins.compare(getattr(twins.ours, name), getattr(theirs, name))
    for name in ("observation_space", "single_observation_space", "action_space", "single_action_space"):
        assert getattr(twins.ours, name) == getattr(theirs, name)
    twins.reset(seed=3)
    theirs.action_space.seed(5)
    random = np.random.default_rng(7)
    for _ in range(num_steps):
        ended = twins.step(theirs.action_space.sample())
        if autoreset_mode == "Disabled" and ended.any():
            twins.reset(options={"reset_mask": ended, "level": 2})
        elif random.random() < 0.02:
            mask = random.random(NUM_ENVS) < 0.5
            mask[0] = True
            twins.reset([None, 1, 2, None, 4], {"reset_mask": mask})
        elif random.random() < 0.01:
            twins.reset(options={"level": 3})
