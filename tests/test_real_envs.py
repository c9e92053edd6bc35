"""Popular envs, in every mode, compared with the oracle."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from modes import ORACLE

from parallelenv import ParallelEnv
from parallelenv.testing.contract import NUM_ENVS, play

IDS = ("LunarLander-v3", "Blackjack-v1", "FrozenLake-v1", "MiniGrid-Empty-5x5-v0", "Pendulum-v1")


@pytest.fixture(scope="module", autouse=True)
def _installed() -> None:
    pytest.importorskip("Box2D")
    pytest.importorskip("minigrid")  # registers its envs, also in workers


@pytest.mark.parametrize("envs", [["MiniGrid-Empty-5x5-v0"] * NUM_ENVS, list(IDS)], ids=["one kind", "mixed"])
def test_results_equal_those_of_the_oracle(envs: list[str], make_env: Callable[..., ParallelEnv]) -> None:
    found = play(make_env(envs, asynchronous="restart", num_cpus=2))
    found.check_unchanged()
    with ParallelEnv(envs, ORACLE, "restart") as oracle:
        found.assert_equals(play(oracle))
