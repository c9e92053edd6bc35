"""Popular envs, in every mode, compared with the oracle."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from modes import ORACLE

from parallelenv import ParallelEnv
from parallelenv.testing.contract import NUM_ENVS, play

IDS = ("LunarLander-v3", "Blackjack-v1", "FrozenLake-v1", "MiniGrid-Empty-5x5-v0", "Pendulum-v1")


@pytest.fixture(scope="module", autouse=True)
def _installed() -> None:
    pytest.importorskip("Box2D")
    pytest.importorskip("minigrid")  # registers its envs, also in workers


@pytest.mark.parametrize(
    "envs",
    [["LunarLander-v3"] * NUM_ENVS, ["Blackjack-v1"] * NUM_ENVS, ["MiniGrid-Empty-5x5-v0"] * NUM_ENVS, list(IDS)],
    ids=["box", "tuple", "dict with text", "mixed"],
)
def test_results_equal_those_of_the_oracle(envs: list[str], make_env: Callable[..., ParallelEnv]) -> None:
    found = play(make_env(envs, asynchronous="restart", num_cpus=2))
    found.check_unchanged()
    with ParallelEnv(envs, ORACLE, "restart") as oracle:
        found.assert_equals(play(oracle))


def test_make_passes_arguments_to_the_env(mode: str) -> None:
    arguments: dict[str, Any] = {"is_slippery": False, "map_name": "8x8"}
    with ParallelEnv.make("FrozenLake-v1", 3, mode, num_cpus=2, **arguments) as env:
        assert env.single_observation_space is not None
        assert env.single_observation_space.n == 64  # type: ignore[attr-defined]
        env.reset(seed=0)
        assert env.step([2, 1, 2]).states.tolist() == [1, 8, 1]
