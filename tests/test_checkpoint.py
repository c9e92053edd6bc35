"""`save_state` and `load_state`: a run continues identically."""

from __future__ import annotations

import pickle
import threading
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from conftest import MakeEnv, needs_ray
from fragile import GO_ON, Fragile
from gymnasium.utils import EzPickle
from gymnasium.wrappers import TimeLimit
from modes import IN_BACKGROUND, ORACLE, in_modes

from parallelenv import ParallelEnv, errors
from parallelenv.testing.contract import DONE_POLICIES, assert_same
from parallelenv.testing.envs import InfoEnv

NUM_ENVS = 3


class Walk(gym.Env[Any, Any]):
    """A random walk that ends at a bound; it can be pickled."""

    observation_space = gym.spaces.Box(-np.inf, np.inf, (1,), np.float64)
    action_space = gym.spaces.Discrete(2)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        super().reset(seed=seed)
        self.place = self.np_random.normal()
        return np.array([self.place]), {"start": self.place}

    def step(self, action: Any) -> Any:
        self.place += (2 * action - 1) * self.np_random.random()
        return np.array([self.place]), float(self.place), abs(self.place) > 2, False, {}


class Lazy(Walk):
    """Makes another env in each reset."""

    def reset(self, **options: Any) -> Any:
        self.env = Walk()
        return super().reset(**options)


class Forgetful(Walk, EzPickle):
    """Pickle does not keep its state."""

    def __init__(self) -> None:
        EzPickle.__init__(self)


class Speaking(Forgetful):
    """Has get_state() and set_state()."""

    def __init__(self) -> None:
        super().__init__()
        self.handle = threading.Lock()  # does not pickle

    def get_state(self) -> Any:
        return {"place": self.place}

    def set_state(self, state: Any) -> None:
        if state["place"] == 1000:
            raise RuntimeError("too far")
        self.place = state["place"]


class Referring(gym.Wrapper[Any, Any, Any, Any]):
    """Refers to the env and to another wrapper in several ways."""

    def __init__(self, env: Any) -> None:
        super().__init__(TimeLimit(env, max_episode_steps=7))
        self.parts = [env]
        self.read = env.get_state
        self.function: Any = lambda: env.place
        self.limit = self.env

    def step(self, action: Any) -> Any:
        state, _, *rest = self.limit.step(action)
        places = [one.place for one in self.parts] + [self.read()["place"], self.function()]
        return state, sum(places), *rest


class Recalling(gym.Wrapper[Any, Any, Any, Any]):
    """Gives the previous action as reward, and has it as an attribute only after the first step of an episode."""

    def reset(self, **options: Any) -> Any:
        vars(self).pop("previous", None)
        self.handle = threading.Lock()  # does not pickle, so it is kept
        return self.env.reset(**options)

    def step(self, action: Any) -> Any:
        state, _, *rest = self.env.step(action)
        with self.handle:
            reward = getattr(self, "previous", -1)
            self.previous = int(action)
        return state, reward, *rest


class Numbering:
    """Gives the number of the step as reward, and has no ``__dict__``."""

    __slots__ = "env", "last", "number"

    observation_space, action_space = Walk.observation_space, Walk.action_space

    def __init__(self, env: Any) -> None:
        self.env = env

    def reset(self, **options: Any) -> Any:
        self.number = 0
        if hasattr(self, "last"):
            del self.last
        return self.env.reset(**options)

    def step(self, action: Any) -> Any:
        state, _, *rest = self.env.step(action)
        self.number += 1
        reward = 10 * self.number + getattr(self, "last", -1)
        self.last = int(action)
        return state, reward, *rest


def limited(kind: Any) -> list[Any]:
    return [lambda: TimeLimit(kind(), max_episode_steps=7)] * NUM_ENVS


def play(env: ParallelEnv, num_steps: int, seed: int) -> list[Any]:
    """Return the results of random steps."""
    rng = np.random.default_rng(seed)
    results = [env.step(rng.integers(0, 2, len(env))) for _ in range(num_steps)]
    return [[*result, result.truncated] for result in results]


@pytest.mark.parametrize("done_policy", DONE_POLICIES)
@pytest.mark.parametrize(
    "envs",
    [limited(Lazy), limited(Speaking), [lambda: Referring(Speaking())] * NUM_ENVS, ["MountainCar-v0"] * NUM_ENVS],
    ids=["", "own", "referring", "known"],
)
def test_run_continues_identically_after_load_state(make_env: MakeEnv, mode: str, envs: Any, done_policy: Any) -> None:
    if needs_ray(mode) and done_policy != "restart":
        pytest.skip("takes seconds each; done policies are the same code in every mode")
    env = make_env(envs, asynchronous=done_policy, num_cpus=2)
    env.reset(seed=5)
    play(env, 5, seed=1)
    state = env.save_state()
    assert state.unsaved == ()
    reset_infos = env.reset_infos
    expected = play(env, 20, seed=2)
    with ParallelEnv(envs, ORACLE, done_policy) as other:
        assert other.load_state(pickle.loads(pickle.dumps(state))) == ()
        assert other.reset_infos == reset_infos
        again = other.save_state()
        assert_same(expected, play(other, 20, seed=2))
    for each in (state, again):
        assert env.load_state(each) == ()
        assert_same(expected, play(env, 20, seed=2))


@pytest.mark.parametrize("kind", [Recalling, Numbering])
def test_wrapper_has_exactly_the_attributes_that_were_saved(make_env: MakeEnv, kind: Any) -> None:
    env = make_env([lambda: kind(Speaking())] * NUM_ENVS, asynchronous="continue", num_cpus=2)
    env.reset(seed=5)
    for _ in range(2):  # without and with the attribute
        state = env.save_state()
        expected = play(env, 3, seed=1)
        assert env.load_state(pickle.loads(pickle.dumps(state))) == ()
        assert_same(expected, play(env, 3, seed=1))
    with ParallelEnv([lambda: kind(Speaking())] * NUM_ENVS, ORACLE, "continue") as other:
        other.reset(seed=1)  # makes what cannot be pickled
        assert other.load_state(state) == ()
        assert_same(expected, play(other, 3, seed=1))


def test_state_stays_unknown_if_the_first_step_after_load_state_raises(make_env: MakeEnv) -> None:
    env = make_env([Walk] * NUM_ENVS, asynchronous="restart", num_cpus=2)
    env.reset(seed=5)
    env.load_state(env.save_state())
    env.set_env_attr("place", None, id=1)
    with pytest.raises(TypeError):
        env.step([0] * NUM_ENVS)
    for call in (lambda: env.rollout(np.ones_like, 3), lambda: list(env.stream(np.ones_like, 3))):
        with pytest.raises(errors.ResetNeededError, match=r"latest states of envs \[1\] are not known"):
            call()
    state = env.reset(1)
    assert env.rollout(lambda states: [0] * len(states), 3, progress=False).states[0, 1] == state


def test_seeds_are_saved_with_the_generators(make_env: MakeEnv) -> None:
    env, other = (make_env([InfoEnv, *limited(Speaking)[:2]], num_cpus=1) for _ in range(2))
    env.reset(seed=5)
    state = env.save_state()
    expected = play(env, 3, seed=2)
    other.reset(seed=50)
    other.load_state(state)
    assert other.get_env_attr("np_random_seed") == [5, 6, 7]
    assert other.customized_method("ask", id=0)[0]["asked"][-1] == 5  # in the `WorkerInfo`
    assert_same(expected, play(other, 3, seed=2))


def test_seeds_and_paused_flags_are_saved(make_env: MakeEnv) -> None:
    env = make_env([Walk] * NUM_ENVS, num_cpus=1)
    env.seed(40)
    env.pause(1)
    env.reset(id=[0])
    state = env.save_state()
    other = make_env([Walk] * NUM_ENVS, num_cpus=1)
    assert other.load_state(state) == (1, 2)
    assert other.paused.tolist() == [False, True, False]
    other.resume()
    states = other.reset(id=[2])
    assert states.tolist() == ParallelEnv([Walk]).reset(seed=42).tolist()


def test_env_that_cannot_be_saved_or_loaded_does_not_affect_the_others(make_env: MakeEnv) -> None:
    env = make_env([Walk, Forgetful, Speaking])
    env.reset(seed=5)
    state = env.save_state()
    assert state.unsaved == (1,)
    assert repr(state).endswith("bytes, without that of [1]>")
    assert env.load_state(state) == (1,)
    with pytest.raises(errors.ResetNeededError, match=r"\[1\]"):
        env.step([0, 0, 0])
    env.step([0, 0], id=[0, 2])
    env.set_env_attr("place", 1000, id=[2])
    state = env.save_state()
    with pytest.raises(RuntimeError, match="too far") as caught:
        env.load_state(state)
    assert caught.value.partial == (1, 2)  # type: ignore[attr-defined]
    env.step([0], id=[0])


class Slow(Fragile):
    def get_state(self) -> int:
        return self.steps

    def set_state(self, state: int) -> None:
        self.wait()
        self.steps = state


@in_modes(*IN_BACKGROUND)
def test_all_envs_need_a_reset_after_load_state_was_cut_short(make_env: MakeEnv, tmp_path: Path) -> None:
    env = make_env([partial(Slow, number, str(tmp_path)) for number in range(2)], num_cpus=2, timeout=0.5)
    env.reset()
    state = env.save_state()
    with pytest.raises(errors.WorkerTimeoutError):
        env.load_state(state)
    (tmp_path / "go").touch()
    with pytest.raises(errors.ResetNeededError):
        env.step([GO_ON] * 2)
    env.reset()
    env.step([GO_ON] * 2)


def test_save_state_is_refused_while_a_step_is_in_flight(make_env: MakeEnv) -> None:
    env = make_env([Walk] * NUM_ENVS)
    env.reset(seed=5)
    state = env.save_state()
    env.send([0] * NUM_ENVS)
    with pytest.raises(errors.EnvBusyError):
        env.save_state()
    env.load_state(state)
    with pytest.raises(errors.NothingInFlightError):
        env.recv()
    env.step([0] * NUM_ENVS)


def test_state_of_different_envs_is_refused(make_env: MakeEnv) -> None:
    env = make_env(limited(Speaking), num_cpus=1)
    env.reset(seed=5)
    state = env.save_state()
    with pytest.raises(errors.EnvContractError, match=r"inside \['TimeLimit'\], but this one is inside \[\]"):
        make_env([Speaking] * NUM_ENVS, num_cpus=1).load_state(state)
    with pytest.raises(errors.EnvContractError, match=r"inside \['TimeLimit'\], but this one is inside \[\]"):
        make_env([Walk] * NUM_ENVS, num_cpus=1).load_state(make_env(limited(Walk), num_cpus=1).save_state())
    whole = make_env([Walk] * NUM_ENVS, num_cpus=1).save_state()
    with pytest.raises(errors.EnvContractError, match="of a Walk, but this env is a CartPole") as caught:
        make_env(["CartPole-v1"] * NUM_ENVS, num_cpus=1).load_state(whole)
    assert "in load_state" in caught.value.__notes__[0]
    with pytest.raises(errors.ArgumentError, match="of 3 envs, but there are 2"):
        make_env([Speaking] * 2, num_cpus=1).load_state(state)
    with pytest.raises(errors.ArgumentError, match="asynchronous=None"):
        make_env([Speaking] * NUM_ENVS, asynchronous="idle", num_cpus=1).load_state(state)
    with pytest.raises(errors.ArgumentError, match="dict"):
        env.load_state({})  # type: ignore[arg-type]
