"""Results of the other envs when one fails, in the format of the adapter."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
from conftest import MakeEnv
from modes import here_and_in_processes

from adapters.envs import Fragile
from adapters.neighbours import require
from parallelenv.results import difference

ONE_ONE = np.array([0, 1, 0])
ENDS_FIRST = [partial(Fragile, 1), partial(Fragile, 9), partial(Fragile, 9)]


def begun_and_awaited(env: Any) -> None:
    env.step_async(ONE_ONE)
    env.step_wait()


both_ways = pytest.mark.parametrize("step", [lambda env: env.step(ONE_ONE), begun_and_awaited], ids=["step", "wait"])


def failed(step: Callable[[Any], Any], env: Any) -> Any:
    """Return the partial result of a step in which env 1 failed."""
    env.reset()
    with pytest.raises(KeyError, match="one is too much") as caught:
        step(env)
    left = caught.value.partial  # type: ignore[attr-defined]
    assert left.env_ids.tolist() == [0, 2]
    again = pickle.loads(pickle.dumps(left))
    assert again.env_ids.tolist() == [0, 2]
    assert difference(tuple(again), tuple(left)) is None
    env.step(ONE_ONE * 0)  # all envs are usable
    return left


@here_and_in_processes
@both_ways
def test_gymnasium_partial_result_has_episode_ends(step: Any, make: Any) -> None:
    *arrays, infos = failed(step, make(ENDS_FIRST, "SameStep"))
    assert [array.tolist() for array in arrays] == [[[0], [1]], [2, 2], [True, False], [False, False]]
    assert infos.keys() == {"final_obs", "_final_obs", "final_info", "_final_info"}
    assert infos["final_obs"][0].tolist() == [1]
    assert infos["_final_obs"].tolist() == [True, False]


@pytest.mark.neighbours
@here_and_in_processes
@both_ways
def test_sb3_partial_result_has_episode_ends(step: Any, make_env: MakeEnv) -> None:
    require("stable_baselines3.common.vec_env")
    *arrays, infos = failed(step, make_env(ENDS_FIRST).to_sb3())
    assert [array.tolist() for array in arrays] == [[[0], [1]], [2, 2], [True, False]]
    assert arrays[1].dtype == np.float32
    assert infos[0].keys() == {"TimeLimit.truncated", "terminal_observation"}
    assert infos[1] == {"TimeLimit.truncated": False}
    assert infos[0]["terminal_observation"].tolist() == [1]


@here_and_in_processes
def test_tianshou_partial_result_has_five_arrays(make_env: MakeEnv) -> None:
    *arrays, infos = failed(lambda env: env.step(ONE_ONE), make_env(ENDS_FIRST).to_tianshou())
    assert [array.tolist() for array in arrays] == [[[1], [1]], [2, 2], [True, False], [False, False]]
    assert infos.tolist() == [{"env_id": 0}, {"env_id": 2}]


@here_and_in_processes
def test_tianshou_partial_result_is_empty_when_every_env_fails(make_env: MakeEnv) -> None:
    env: Any = make_env([Fragile]).to_tianshou()
    env.reset()
    with pytest.raises(KeyError) as caught:
        env.step([1])
    assert [len(part) for part in caught.value.partial] == [0] * 5  # type: ignore[attr-defined]
