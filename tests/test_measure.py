"""Trials of envs: their measurements, and that they have no side effects. No time is asserted."""

from __future__ import annotations

import random
import sys
import threading
import time
import warnings
from functools import partial
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium.spaces import Box, Dict, Discrete, Text

from parallelenv import ParallelEnv, recommend
from parallelenv.autotune import measure
from parallelenv.autotune.costs import EnvMeasurements
from parallelenv.contract.env_specs import make_factories

MS = 1e-3


class Witness(gymnasium.Env[Any, Any]):
    """Records the calls of its methods, in a list that may be shared."""

    observation_space = Box(-np.inf, np.inf, (3,), np.float64)
    action_space = Discrete(5)  # the class's own: all instances share it

    def __init__(self, notes: list[str] | None = None) -> None:
        self.notes = [] if notes is None else notes
        self.notes.append("made")
        self.count = 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.notes.append("reset")
        self.count = 0
        return self.state(), {}

    def step(self, action: Any) -> Any:
        self.notes.append("step")
        self.count += 1
        return self.state(), float(action), self.count >= 5, False, {}

    def state(self) -> Any:
        return np.array([self.count, self.np_random.random(), 1.0])

    def close(self) -> None:
        self.notes.append("close")


def assert_one_life(notes: list[str]) -> None:
    assert notes[:2] == ["made", "reset"]
    assert notes.count("step") >= 3
    assert notes.count("close") == 1
    assert notes[-1] == "close"


def test_measured_env_is_made_stepped_and_closed() -> None:
    lives: list[list[str]] = []

    def make() -> Witness:
        lives.append([])
        return Witness(lives[-1])

    found = recommend([make] * 8)
    assert lives.pop() == ["made", "close"]  # to check that the env fn makes a new env each time
    assert_one_life(*lives)
    assert found.step_cost is not None
    assert found.step_cost > 0
    assert found.state_nbytes == 24


def test_only_some_of_many_env_kinds_are_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    lives: list[list[str]] = [[] for _ in range(10)]
    recommend([partial(Witness, notes) for notes in lives])
    assert [bool(notes) for notes in lives] == [index in (0, 3, 6) for index in range(10)]

    monkeypatch.setattr(measure, "_SLOW_BUILD", 0.0)
    monkeypatch.setattr(measure, "_QUICK_BUILD", 0.0)
    lives = [[] for _ in range(10)]
    recommend([partial(Witness, notes) for notes in lives])
    assert_one_life(lives[0])
    assert not any(lives[1:])


def test_measurements_are_weighted_by_number_of_envs_per_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        measure, "_measure_here", lambda *_: [EnvMeasurements(1.0, 1.0, None, 0), EnvMeasurements(5.0, 3.0, 0.25, 40)]
    )
    found = measure.measure(make_factories([*["CartPole-v1"] * 3, Witness]))
    assert found == EnvMeasurements(2.0, 1.5, 0.25, 10)


@pytest.mark.parametrize("is_hidden", [False, True])
def test_measuring_does_not_modify_env_instances(is_hidden: bool) -> None:
    env = Witness()
    envs: list[Any] = [lambda: env] if is_hidden else [env]
    found = recommend(envs)
    assert env.notes == ["made"]
    assert env._np_random is None
    assert found.step_cost is not None  # a copy was tried


def test_uncopyable_instance_is_not_measured() -> None:
    env: Any = Witness()
    env.lock = threading.Lock()
    found = recommend([env])
    assert env.notes == ["made"]
    assert found.mode == "dummy"
    assert found.step_cost is None
    assert "Instances are not stepped for a trial" in found.reason
    assert "they do not pickle (TypeError: cannot pickle '_thread.lock' object)" in found.reason


class Hanging(Witness):
    def step(self, action: Any) -> Any:
        time.sleep(60)


def test_measuring_a_hung_copy_times_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "_PATIENCE", 0.5)
    found = recommend([Hanging()])
    assert found.mode == "dummy"
    assert "No env could be tried: " in found.reason
    assert "0.5 s" in found.reason


class Broken(Witness):
    def step(self, action: Any) -> Any:
        raise ValueError("it\nbroke")


def test_env_that_fails_measuring_gets_dummy_mode_and_is_closed() -> None:
    notes: list[str] = []
    found = recommend([partial(Broken, notes)] * 3)
    assert found.mode == "dummy"
    assert found.releases_gil is None
    assert "No env could be tried: ValueError: it broke. Without figures" in found.reason
    assert notes.count("close") == notes.count("made") == 2


def test_auto_mode_raises_the_error_of_an_env_fn() -> None:
    def make() -> Any:
        raise ZeroDivisionError("no such level")

    assert "No env could be tried: ZeroDivisionError: no such level" in str(recommend([make]))
    with pytest.raises(ZeroDivisionError, match="no such level"):
        ParallelEnv([make], "auto")


def test_env_fn_that_fails_the_second_time_leaks_no_env() -> None:
    notes: list[str] = []

    def make() -> Witness:
        if notes:
            raise OSError("address in use")
        return Witness(notes)

    assert "No env could be tried: OSError: address in use" in recommend([make]).reason
    assert notes == ["made", "close"]


class Spaceless:
    """An old env without spaces, and without `close`."""

    def reset(self) -> int:
        return 0

    def step(self, action: Any) -> tuple[int, float, bool, dict[str, Any]]:
        return 1, 0.0, True, {"action": action}


def test_env_without_action_space_gets_dummy_mode() -> None:
    found = recommend([Spaceless] * 2)
    assert found.mode == "dummy"
    assert "it declares no action space to draw random actions from" in found.reason
    with ParallelEnv([Spaceless] * 2, "auto") as env:
        env.reset()
        assert env.step([1, 2]).states.tolist() == [1, 1]


class Old(Spaceless):
    action_space = Discrete(3)


class Talkative(Witness):
    observation_space: Any = Dict({"text": Text(10), "picture": Box(0, 255, (4, 4), np.uint8)})

    def state(self) -> Any:
        return {"text": "hello", "picture": np.zeros((4, 4), np.uint8)}


@pytest.mark.parametrize(
    ("envs", "at_least"), [([Old] * 2, 1), (["CartPole-v1", "Acrobot-v1", Old], 1), ([Talkative], 16)]
)
def test_envs_of_other_kinds_are_measured(envs: list[Any], at_least: int) -> None:
    found = recommend(envs)
    assert found.step_cost is not None
    assert found.state_nbytes is not None
    assert found.state_nbytes >= at_least


class Disturbing(Witness):
    """Draws from the generators of the whole process, and warns."""

    def step(self, action: Any) -> Any:
        np.random.random()
        random.random()
        warnings.warn("step by step", stacklevel=1)
        return super().step(action)


def test_measuring_does_not_change_generators_spaces_or_switch_interval() -> None:
    def state() -> list[Any]:
        space: Any = Disturbing.action_space
        return [random.getstate(), np.random.get_state()[1].tolist(), space.np_random.bit_generator.state]  # type: ignore[index]

    Disturbing.action_space.seed(3)
    before, interval = state(), sys.getswitchinterval()
    assert recommend([Disturbing]).step_cost is not None
    assert state() == before
    assert sys.getswitchinterval() == interval


class Busy(Witness):
    def step(self, action: Any) -> Any:
        end = time.thread_time() + MS
        while time.thread_time() < end:
            pass
        return super().step(action)


class Sleepy(Witness):
    def step(self, action: Any) -> Any:
        time.sleep(5 * MS)
        return super().step(action)


def test_measure_distinguishes_computing_envs_from_waiting_envs() -> None:
    busy, sleepy = measure.measure(make_factories([Busy])), measure.measure(make_factories([Sleepy]))
    assert not busy.waits
    assert busy.releases_gil is False
    assert sleepy.waits
    assert sleepy.lock_free is not None
    assert measure.measure(make_factories([Witness])).releases_gil is None  # too short to be measured
