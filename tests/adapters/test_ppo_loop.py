"""PPO written for Gymnasium's interface learns the same on the adapter as on `SyncVectorEnv`."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from conftest import MakeEnv

from adapters.ppo_loop import learn
from parallelenv.contract.value_difference import difference

pytestmark = pytest.mark.neighbours


def make_both(make_env: MakeEnv) -> tuple[Any, Any]:
    """Return eight CartPoles, twice."""
    return make_env(["CartPole-v1"] * 8).to_gymnasium(), gym.make_vec("CartPole-v1", 8, "sync")


@pytest.mark.parametrize("mode", ["dummy", "subproc"], indirect=True)
def test_ppo_learns_the_same_as_on_sync_vector_env(make_env: MakeEnv) -> None:
    ours, theirs = (learn(env, 4) for env in make_both(make_env))
    assert len(ours.returns) > 50
    assert difference(vars(ours), vars(theirs)) is None


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize("mode", ["subproc"], indirect=True)
def test_ppo_learns_cart_pole_with_the_learning_curve_of_the_sync_vector_env(make_env: MakeEnv) -> None:
    ours, theirs = (learn(env, 120) for env in make_both(make_env))
    assert np.mean(ours.returns[-20:]) >= 200
    assert difference(vars(ours), vars(theirs)) is None
