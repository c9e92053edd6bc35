"""Adapters report the step after which an env has no further episode once, and then raise."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
from conftest import MakePool
from modes import here_and_in_processes
from samplers import Walks

from adapters.neighbours import require
from parallelenv.errors import ExhaustedError

ONE_AND_NINE = [{"total": 1}, {"total": 9}]


@here_and_in_processes
def test_next_step_reports_exhaustion_once_then_raises(make_pool: MakePool) -> None:
    vector_env = make_pool(Walks, ONE_AND_NINE).to_gymnasium()
    vector_env.reset(options={"length": 1})
    assert vector_env.step([1, 1])[2].tolist() == [True, True]
    states, rewards, terminations, truncations, infos = vector_env.step([1, 1])  # the step in which both are reset
    assert states[:, :2].tolist() == [[1, 1], [2, 0]]
    assert (rewards.tolist(), terminations.tolist(), truncations.tolist()) == ([0, 0], [False, False], [True, False])
    assert infos["exhausted"].tolist() == [True, False]
    with pytest.raises(ExhaustedError, match=r'envs \[0\] have no further episode.*"exhausted"'):
        vector_env.step([1, 1])


@here_and_in_processes
def test_same_step_ends_the_last_task_then_raises(make_pool: MakePool) -> None:
    vector_env = make_pool(Walks, [{**one, "kind": "sheet"} for one in ONE_AND_NINE]).to_gymnasium("SameStep")
    vector_env.reset(options={"length": 1})
    states, rewards, terminations, _, infos = vector_env.step([2, 2])
    assert (terminations.tolist(), rewards.tolist()) == ([True, True], [3, 3])
    assert states["place"][:, :2].tolist() == [[1, 1], [2, 0]]
    assert infos["final_obs"][0]["word"] == "ab"
    assert infos["exhausted"].tolist() == [True, False]
    for _ in range(2):
        with pytest.raises(ExhaustedError, match=r"envs \[0\]"):
            vector_env.step([1, 1])


@here_and_in_processes
def test_disabled_reset_of_exhausted_env_raises(make_pool: MakePool) -> None:
    vector_env = make_pool(Walks, ONE_AND_NINE).to_gymnasium("Disabled")
    vector_env.reset(options={"length": 1})
    vector_env.step([1, 1])
    with pytest.raises(ExhaustedError, match=r"envs \[0\]") as caught:
        vector_env.reset(options={"reset_mask": np.array([True, True])})
    assert caught.value.partial[1][:2].tolist() == [2, 0]  # type: ignore[attr-defined]


@here_and_in_processes
def test_tianshou_reset_and_step_of_exhausted_env_raise(make_pool: MakePool) -> None:
    env = make_pool(Walks, ONE_AND_NINE)
    taken = env.to_tianshou()
    taken.reset()
    for call in (partial(taken.reset, [0]), partial(taken.step, [1, 1])):
        with pytest.raises(ExhaustedError, match=r"envs \[0\]"):
            call()
    taken.step([1], [1])
    env.call("_rewind", id=0)
    taken.reset([0])
    taken.step([1, 1])


@pytest.mark.neighbours
def test_sb3_returns_the_last_step_then_raises(make_pool: MakePool) -> None:
    require("stable_baselines3")
    venv = make_pool(Walks, ONE_AND_NINE).to_sb3()
    venv.set_options({"length": 1})
    venv.reset()
    _, rewards, dones, infos = venv.step(np.array([1, 1]))
    assert (rewards.tolist(), dones.tolist()) == ([2, 2], [True, True])
    assert infos[0]["terminal_observation"][:2].tolist() == [1, 1]
    assert ["exhausted" in info for info in infos] == [True, False]
    for call in (partial(venv.step, np.array([1, 1])), venv.reset):
        with pytest.raises(ExhaustedError, match=r"envs \[0\]"):
            call()
