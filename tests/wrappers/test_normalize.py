"""Normalized states and rewards."""

from __future__ import annotations

import copy
import pickle
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from conftest import MakeEnv
from fragile import GO_ON, RAISE, Fragile
from gymnasium.spaces import Box, Dict, Discrete

from parallelenv import ParallelEnv
from parallelenv.errors import ArgumentError, EnvContractError
from parallelenv.results import difference
from parallelenv.testing.contract import DONE_POLICIES
from parallelenv.testing.envs import Counter, Sheet, Words
from parallelenv.wrappers import NormalizeRewards, NormalizeStates, RecordEpisodeStatistics, RunningStatistics
from wrappers.envs import Told

ENV_FNS = [partial(Counter, number, 3 + number) for number in range(3)]
ONES = np.ones(3, np.int64)


class Sensor(gym.Env[Any, Any]):
    """Dict states with parts that are not normalized; its actions determine states and rewards."""

    observation_space = Dict({"far": Box(-1e3, 1e3, (2,)), "near": Box(-1, 1, (1,)), "kind": Discrete(4)})
    action_space = Box(-1e3, 1e3, (), np.float64)

    def _show(self, value: float) -> dict[str, Any]:
        return {"far": np.full(2, value, np.float32), "near": np.full(1, value / 100, np.float32), "kind": 2}

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        return self._show(0.0), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        return self._show(float(action)), float(action), False, False, {}


def seen_of(env: Any, steps: int) -> list[Any]:
    """Play, and return all states of envs that acted."""
    states = [*env.reset(seed=1)]
    for _ in range(steps):
        states += [state for state in env.step(ONES).states if state is not None]
    return states


@pytest.mark.parametrize("asynchronous", DONE_POLICIES)
def test_statistics_cover_all_states_of_envs_that_were_stepped(asynchronous: Any, make_env: MakeEnv) -> None:
    seen = np.array(seen_of(make_env(ENV_FNS, asynchronous=asynchronous), 9), np.float64)
    env = NormalizeStates(make_env(ENV_FNS, asynchronous=asynchronous))
    seen_of(env, 9)
    moments = env.statistics.leaves[""]
    assert moments.count == env.statistics.count == len(seen)
    assert np.allclose(moments.mean, seen.mean(axis=0), rtol=1e-12)
    assert np.allclose(moments.variance, seen.var(axis=0), rtol=1e-12)


def test_normalization_equals_that_of_gymnasium() -> None:
    def make() -> Any:
        return gym.make("CartPole-v1", max_episode_steps=100)

    observing = gym.wrappers.vector.NormalizeObservation(gym.vector.SyncVectorEnv([make] * 3))
    theirs: Any = gym.wrappers.vector.NormalizeReward(observing, gamma=0.9)
    env = NormalizeRewards(NormalizeStates(ParallelEnv([make] * 3), clip=np.inf), gamma=0.9, clip=np.inf)
    expected, _ = theirs.reset(seed=3)
    assert np.allclose(env.reset(seed=3), expected, rtol=1e-5)
    for step in range(8):
        env.frozen = step in (3, 4)  # returns are followed while the statistics are frozen
        theirs.update_running_mean = observing.update_running_mean = not env.frozen
        actions = np.array([step % 2, (step + 1) % 2, step % 2])
        states, rewards, terminations, truncations, _ = theirs.step(actions)
        assert not (terminations | truncations).any()
        result = env.step(actions)
        assert np.allclose(result.states, states, rtol=1e-4, atol=1e-5)
        assert np.allclose(result.rewards, rewards, rtol=1e-6)
    theirs.close()
    env.close()


def test_paused_and_unselected_envs_do_not_count(make_env: MakeEnv) -> None:
    env = NormalizeRewards(NormalizeStates(make_env([Sensor] * 3)))
    inner: Any = env.env
    env.reset()
    env.pause(1)
    env.step([4.0, 8.0])
    env.step([2.0], id=2)
    env.send([2.0], id=0)
    env.recv()
    assert inner.statistics.count == 3 + 2 + 1 + 1
    assert env.statistics.count == 2 + 1 + 1
    assert env.returns.tolist() == [4.0 * 0.99 + 2.0, 0.0, 8.0 * 0.99 + 2.0]


def test_last_states_are_normalized_but_not_counted(make_env: MakeEnv) -> None:
    plain = make_env(ENV_FNS, asynchronous="restart")
    env = NormalizeStates(make_env(ENV_FNS, asynchronous="restart"))
    for one in (plain, env):
        one.reset(seed=1)
        one.step(ONES)
        one.step(ONES)
    raw, found = (one.step(ONES).infos[0]["ended_state"] for one in (plain, env))
    assert env.statistics.count == 4 * 3
    assert found.dtype == np.float32
    assert difference(env.process(raw[None])[0], found) is None


def test_only_the_given_keys_are_normalized(make_env: MakeEnv) -> None:
    env = NormalizeStates(make_env([Sensor] * 2), keys=["far"])
    assert list(env.statistics.shapes) == ["['far']"]
    space = Dict({"far": Box(-10, 10, (2,)), "near": Box(-1, 1, (1,)), "kind": Discrete(4)})
    assert [env.single_observation_space, *env.observation_spaces] == [space] * 3
    env.reset()
    states = env.step([100.0, -100.0]).states
    assert states["near"].tolist() == [[1.0], [-1.0]]
    assert states["kind"].tolist() == [2, 2]
    assert states["far"].dtype == np.float32
    assert states["far"][0, 0] == -states["far"][1, 0] == pytest.approx(np.sqrt(2), rel=1e-3)
    assert env.observation_space is not None
    assert states in env.observation_space
    assert list(NormalizeStates(env.unwrapped).statistics.shapes) == ["['far']", "['near']"]
    with_text = NormalizeStates(make_env([partial(Sheet, 1, 2)]))
    with_text.reset()
    (state, *_), *_ = with_text.step(with_text.action_space.sample(), align="batch")
    assert (state["word"], state["image"].dtype, state["inner"]["level"]) == ("ab", np.float32, -39)


def test_normalized_values_are_clipped() -> None:
    with NormalizeRewards(NormalizeStates(ParallelEnv([Sensor]), clip=0.5), clip=0.4) as env:
        env.reset()
        result = env.step([-1000.0])
    assert (result.states["far"].tolist(), result.rewards.tolist()) == ([[-0.5, -0.5]], [-0.4])


def counts_of(env: Any) -> tuple[int, int]:
    return env.state_statistics.count, env.reward_statistics.count


def test_frozen_on_the_outermost_wrapper_freezes_all() -> None:
    states = NormalizeStates(ParallelEnv([Sensor] * 2))
    with RecordEpisodeStatistics(NormalizeRewards(RecordEpisodeStatistics(states))) as env:
        env.reset()
        env.step([3.0, 5.0])
        assert not env.frozen
        env.frozen = True
        assert env.frozen
        assert states.frozen
        first, again = env.step([3.0, 5.0]), env.step([3.0, 5.0])
        assert difference((first.states, first.rewards), (again.states, again.rewards)) is None
        assert counts_of(env) == (4, 2)
        states.frozen = False  # not those outside of it
        assert not env.frozen
        env.step([3.0, 5.0])
        assert counts_of(env) == (6, 2)
        env.frozen = False
        env.step([3.0, 5.0])
        assert counts_of(env) == (8, 4)
    with NormalizeRewards(NormalizeStates(ParallelEnv([Sensor])), frozen=True) as one:  # for one wrapper
        assert not one.frozen
        one.reset()
        one.step([1.0])
        assert counts_of(one) == (2, 0)
        with pytest.raises(AttributeError, match="'frozen'.*neither wrapper"):
            RecordEpisodeStatistics(one.unwrapped).frozen = True


def test_statistics_are_saved_loaded_and_shared(tmp_path: Path) -> None:
    path = tmp_path / "scale"
    with NormalizeStates(ParallelEnv([Sensor] * 2)) as training, ParallelEnv([Sensor] * 2) as env:
        training.reset()
        training.step([3.0, 500.0])
        training.statistics.save(path)
        assert [file.name for file in tmp_path.iterdir()] == ["scale"]
        later = NormalizeStates(env, statistics=RunningStatistics.load(path), frozen=True)
        assert difference(later.reset(), training.process(env.reset())) is None
        evaluation = NormalizeStates(env, statistics=training.statistics, frozen=True)
        training.step([700.0, 900.0])
        assert difference(evaluation.reset(), training.process(env.reset())) is None
    with pytest.raises(IsADirectoryError):
        training.statistics.save(tmp_path)
    assert not tmp_path.with_name(f"{tmp_path.name}.part").exists()
    with pytest.raises(NotADirectoryError):
        training.statistics.save(path / "scale")


def test_merged_statistics_equal_those_of_all_data() -> None:
    values = np.random.default_rng(1).normal(1e6, 0.01, (101, 3))  # where sums of squares would cancel out
    parts = [RunningStatistics({"": (3,)}) for _ in range(3)]
    for index, batch in enumerate(np.split(values, [1, 2, 2, 40, 77])):  # one of them empty
        parts[index % 3].update({"": batch})
    total = RunningStatistics({"": (3,)})
    total.merge(*pickle.loads(pickle.dumps(parts)))
    moments = total.leaves[""]
    assert moments.count == 101
    assert np.allclose(moments.mean, values.mean(axis=0), rtol=1e-14)
    assert np.allclose(moments.variance, values.var(axis=0), rtol=1e-6)
    alone = copy.deepcopy(total)
    alone.merge(parts[0])
    assert total.count == 101 < alone.count
    assert repr(total) == "<RunningStatistics of {'': (3,)}, 101 seen>"


def test_statistics_refuse_data_and_files_that_do_not_fit(tmp_path: Path) -> None:
    statistics = RunningStatistics({"": (3,)})
    cases: list[tuple[Any, Any, str]] = [
        (statistics.merge, RunningStatistics({"": (4,)}), r"The other has .*\(4,\).*these statistics have .*\(3,\)"),
        (statistics.merge, 5, "5 cannot be merged. Give RunningStatistics"),
        (statistics.update, {"x": np.zeros((2, 3))}, "The batch has the leaves .*'x'"),
        (statistics.update, {"": [[1, 1, 1], [np.nan] * 3]}, r"rows \[1\] of the batch would make mean"),
        (statistics.update, np.zeros((2, 3)), r"batch=.* must be a dict of arrays"),
        (statistics.update, {"": 5.0}, r"batch\[''\]=5\.0 must be an array of numbers with one row per env"),
        (statistics.update, {"": ["x", "y"]}, r"batch\[''\]=\['x', 'y'\] must be an array of numbers"),
        (statistics.update, {"": [[1, 2, 3], [4]]}, r"batch\[''\]=\[\[1, 2, 3\], \[4\]\] must be an array of numbers"),
        (statistics.update, {"": np.zeros((2, 3), complex)}, r"batch\[''\]=.* must be an array of numbers"),
        (partial(statistics.update, env_ids=[4]), {"": np.zeros((2, 3))}, r"env_ids=\[4\] must have 2 items"),
        (RunningStatistics, {"a": 3}, r"shapes=\{'a': 3\} must be a dict of shapes, such as"),
        (RunningStatistics, {"a": (-1,)}, r"shapes=\{'a': \(-1,\)\} must be a dict"),
        (RunningStatistics, {"a": (1.5,)}, r"shapes=\{'a': \(1\.5,\)\} must be a dict"),
        (RunningStatistics, [()], r"shapes=\[\(\)\] must be a dict"),
        (RunningStatistics({"": ()}).update, {"": 5.0}, r"batch\[''\]=5\.0 must be an array of numbers"),
    ]
    for call, argument, message in cases:
        with pytest.raises((ArgumentError, EnvContractError), match=message):
            call(argument)
    assert statistics.count == statistics.leaves[""].mean.sum() == 0
    with pytest.raises(ArgumentError, match=r"batch\['b'\] has 1 row, but batch\['a'\] has 2"):
        RunningStatistics({"a": (), "b": ()}).update({"a": np.zeros(2), "b": np.zeros(1)})
    (tmp_path / "text").write_text("nothing")
    np.savez(tmp_path / "foreign.npz", weights=np.zeros(3))
    for name in ("text", "foreign.npz"):
        with pytest.raises(ArgumentError, match="is not a file of statistics"):
            RunningStatistics.load(tmp_path / name)
    with pytest.raises(FileNotFoundError):
        RunningStatistics.load(tmp_path / "absent")


def test_invalid_arguments_are_refused() -> None:
    half: Any = np.float32(0.5)
    statistics = RunningStatistics({"": ()})
    cases: list[tuple[Any, dict[str, Any], str]] = [
        (NormalizeStates, {"keys": ["colour"]}, r"keys=\['colour'\] must be a list of keys .*'near'"),
        (NormalizeStates, {"keys": 5}, "keys=5 must be a list of keys"),
        (NormalizeStates, {"keys": "far"}, "keys='far' must be a list of keys"),
        (NormalizeStates, {"keys": ["kind"]}, r"There is no Box to normalise in Dict.*keys=\['kind'\]"),
        (NormalizeStates, {"frozen": "no"}, "frozen='no' must be True or False"),
        (NormalizeStates, {"clip": np.nan}, "clip=nan must be a positive number"),
        (NormalizeStates, {"clip": 0}, "clip=0 must be a positive number"),
        (NormalizeStates, {"epsilon": True}, "epsilon=True must be a positive number"),
        (NormalizeStates, {"statistics": statistics}, "statistics=<RunningStatistics.*do not fit"),
        (NormalizeStates, {"statistics": "scale.npz"}, "statistics='scale.npz' do not fit"),
        (NormalizeRewards, {"frozen": 0}, "frozen=0 must be True or False"),
        (NormalizeRewards, {"gamma": 1.5}, "gamma=1.5 is not a discount"),
        (NormalizeRewards, {"gamma": True}, "gamma=True is not a discount"),
        (NormalizeRewards, {"gamma": "a"}, "gamma='a' is not a discount"),
        (NormalizeRewards, {"gamma": np.nan}, "gamma=nan is not a discount"),
    ]
    with ParallelEnv([Sensor]) as env:
        for kind, wrong, message in cases:
            with pytest.raises(ArgumentError, match=message):
                kind(env, **wrong)
        assert NormalizeRewards(env, half, clip=half, epsilon=half).gamma == 0.5
    with ParallelEnv([Counter, Words]) as env, pytest.raises(ArgumentError, match="share no.*give ParallelEnv spaces="):
        NormalizeStates(env)


@pytest.mark.parametrize("wrapper", [partial(NormalizeRewards, gamma=1.0), partial(NormalizeStates, clip=np.inf)])
@pytest.mark.parametrize("wrong", [1e200, -1e155, 1.7e308, np.nan, np.inf])
def test_values_that_spoil_the_statistics_are_refused(wrapper: Any, wrong: float, make_env: MakeEnv) -> None:
    numbers = [1.0, wrong, 3.0, 5.0], [1.0, 2.0, 3.0, 4.0]
    env = wrapper(make_env([partial(Told, own, own) for own in numbers]))
    env.reset()
    env.step([0, 0])
    before = pickle.dumps(env.statistics)
    message = r"envs \[0\] would make mean .* leaves \[''\] permanently nan .*frozen=True"
    with pytest.raises(EnvContractError, match=message) as caught:
        env.step([0, 0])
    error: Any = caught.value
    assert error.env_ids == (0,)
    assert difference(error.partial.states, np.array([[wrong], [2.0]])) is None
    assert pickle.dumps(env.statistics) == before
    env.reset()
    result = env.step([0, 0])
    assert np.isfinite([*result.states, *result.rewards[:, None]]).all()


def test_running_returns_restart_on_reset_and_ignore_failed_steps(make_env: MakeEnv) -> None:
    env = NormalizeRewards(make_env([partial(Fragile, number) for number in range(2)], on_failure="restart"))
    env.reset()
    env.step([GO_ON, GO_ON])
    assert env.returns.tolist() == [1.0, 1.0]
    env.reset(0)
    assert env.returns.tolist() == [0.0, 1.0]
    assert env.step([GO_ON, RAISE]).rewards[1] == 0.0
    assert env.statistics.count == 3
    assert env.returns.tolist() == [1.0, 0.0]


def test_inner_wrapper_sees_unnormalized_rewards(make_env: MakeEnv) -> None:
    env = NormalizeRewards(RecordEpisodeStatistics(make_env([partial(Told, [3.0, 4.0])], asynchronous="idle")))
    env.reset()
    env.step([0])
    assert env.step([0]).infos[0]["episode"]["r"] == 7.0
    assert env.returns[0] == 0.0
    assert env.step([0]).rewards[0] is None


def test_normalizer_can_be_used_by_a_policy_in_the_workers(make_env: MakeEnv) -> None:
    env = NormalizeStates(make_env(ENV_FNS, asynchronous="restart"))
    env.reset(seed=1)
    for _ in range(5):
        env.step(ONES)
    normalizer = env.normalizer

    def policy(states: Any) -> Any:
        return np.ones(len(states), np.int64), None, {"seen": normalizer(states)}

    rollout = env.unwrapped.rollout(policy, 4, progress=False)
    assert difference(rollout.extras["seen"][2], env.process(rollout.states[2])) is None
    before = env.statistics.count
    env.statistics.update({"": rollout.states[rollout.valid]})
    assert env.statistics.count == before + 12
