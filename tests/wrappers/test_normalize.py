"""States and rewards on a common scale."""

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
from parallelenv.errors import ArgumentError, EnvContractError, NotFiniteError, SpacesError
from parallelenv.identity import difference
from parallelenv.testing.envs import Counter, Ragged, Sheet, Words
from parallelenv.wrappers import NormalizeRewards, NormalizeStates, RecordEpisodeStatistics, RunningStatistics

nearby = pytest.mark.parametrize("mode", ["dummy", "subproc"], indirect=True)
ENV_FNS = [partial(Counter, number, 3 + number) for number in range(3)]
ONES = np.ones(3, np.int64)


class Sensor(gym.Env[Any, Any]):
    """Dict states, of which not every part has a scale; what it answers is told by its actions."""

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


@nearby
@pytest.mark.parametrize("asynchronous", [None, "idle", "restart", "continue"])
def test_statistics_are_those_of_all_states_of_envs_that_acted(asynchronous: Any, make_env: MakeEnv) -> None:
    seen = np.array(seen_of(make_env(ENV_FNS, asynchronous=asynchronous), 9), np.float64)
    env = NormalizeStates(make_env(ENV_FNS, asynchronous=asynchronous))
    seen_of(env, 9)
    moments = env.statistics.leaves[""]
    assert moments.count == env.statistics.count == len(seen)
    assert np.allclose(moments.mean, seen.mean(axis=0), rtol=1e-12)
    assert np.allclose(moments.variance, seen.var(axis=0), rtol=1e-12)


def test_it_normalises_as_gymnasium_does() -> None:
    def make() -> Any:
        return gym.make("CartPole-v1", max_episode_steps=100)

    theirs = gym.wrappers.vector.NormalizeReward(
        gym.wrappers.vector.NormalizeObservation(gym.vector.SyncVectorEnv([make] * 3)), gamma=0.9
    )
    env = NormalizeRewards(NormalizeStates(ParallelEnv([make] * 3), clip=np.inf), gamma=0.9, clip=np.inf)
    expected, _ = theirs.reset(seed=3)
    assert np.allclose(env.reset(seed=3), expected, rtol=1e-5)
    for step in range(6):
        actions = np.array([step % 2, (step + 1) % 2, step % 2])
        states, rewards, terminations, truncations, _ = theirs.step(actions)
        assert not (terminations | truncations).any()
        result = env.step(actions)
        assert np.allclose(result.states, states, rtol=1e-4, atol=1e-5)
        assert np.allclose(result.rewards, rewards, rtol=1e-6)
    theirs.close()
    env.close()


@nearby
def test_paused_envs_and_those_not_asked_do_not_count(make_env: MakeEnv) -> None:
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


@nearby
def test_last_states_are_on_the_same_scale_and_do_not_count(make_env: MakeEnv) -> None:
    plain, env = make_env(ENV_FNS, asynchronous="restart"), NormalizeStates(make_env(ENV_FNS, asynchronous="restart"))
    for one in (plain, env):
        one.reset(seed=1)
        one.step(ONES)
        one.step(ONES)
    before = env.statistics.count
    raw, found = plain.step(ONES), env.step(ONES)
    assert env.statistics.count == before + 3
    mean, variance = env.statistics.leaves[""].guess()
    expected = (raw.infos[0]["ended_state"] - mean) / np.sqrt(variance + 1e-8)
    assert np.allclose(found.infos[0]["ended_state"], expected, rtol=1e-5)
    assert found.infos[0]["ended_state"].dtype == np.float32


@nearby
def test_only_the_keys_that_are_named_change(make_env: MakeEnv) -> None:
    env = NormalizeStates(make_env([Sensor] * 2), keys=["far"])
    assert list(env.statistics.shapes) == ["['far']"]
    assert env.single_observation_space == Dict(
        {"far": Box(-10, 10, (2,)), "near": Box(-1, 1, (1,)), "kind": Discrete(4)}
    )
    assert env.observation_spaces == [env.single_observation_space] * 2
    env.reset()
    states = env.step([100.0, -100.0]).states
    assert states["near"].tolist() == [[1.0], [-1.0]]
    assert states["kind"].tolist() == [2, 2]
    assert states["far"].dtype == np.float32
    assert states["far"][0, 0] == -states["far"][1, 0] == pytest.approx(np.sqrt(2), rel=1e-3)
    assert env.observation_space is not None
    assert states in env.observation_space
    both = NormalizeStates(env.unwrapped)
    assert list(both.statistics.shapes) == ["['far']", "['near']"]


def test_outcomes_are_clipped() -> None:
    with NormalizeStates(ParallelEnv([Sensor]), clip=0.5) as env:
        first = env.process({"far": np.full((1, 2), 9.0), "near": np.zeros((1, 1)), "kind": [1]})
        assert first["far"].tolist() == [[0.5, 0.5]]
        env.reset()
        assert abs(env.step([1000.0]).states["far"]).max() == 0.5
    with NormalizeRewards(ParallelEnv([Sensor]), clip=0.5) as rewarded:
        rewarded.reset()
        assert rewarded.step([-1000.0]).rewards.tolist() == [-0.5]


def test_frozen_statistics_do_not_change() -> None:
    env = NormalizeRewards(NormalizeStates(ParallelEnv([Sensor] * 2)))
    with env:
        env.reset()
        env.step([3.0, 5.0])
        inner: Any = env.env
        before = pickle.dumps((inner.statistics, env.statistics))
        inner.frozen = env.frozen = True
        first = env.step([3.0, 5.0])
        again = env.step([3.0, 5.0])
        assert pickle.dumps((inner.statistics, env.statistics)) == before
        assert difference(first.states, again.states) is None
        assert first.rewards.tolist() == again.rewards.tolist()


def test_statistics_are_saved_loaded_and_shared(tmp_path: Path) -> None:
    path = tmp_path / "scale"
    training = NormalizeStates(ParallelEnv([Sensor] * 2))
    with training:
        training.reset()
        training.step([3.0, 500.0])
        training.statistics.save(path)
        assert [file.name for file in tmp_path.iterdir()] == ["scale"]
        expected = training.process(training.unwrapped.reset())
        with NormalizeStates(ParallelEnv([Sensor] * 2), statistics=RunningStatistics.load(path), frozen=True) as later:
            assert difference(later.reset(), expected) is None
        with NormalizeStates(ParallelEnv([Sensor]), statistics=training.statistics, frozen=True) as evaluation:
            training.step([700.0, 900.0])
            expected = training.process(training.unwrapped.reset())["far"][:1]
            assert difference(evaluation.reset()["far"], expected) is None


def test_merged_statistics_are_those_of_everything() -> None:
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


def test_what_does_not_belong_together_is_refused(tmp_path: Path) -> None:
    statistics = RunningStatistics({"": (3,)})
    with pytest.raises(ArgumentError, match=r"The other has the leaves .*\(4,\).*these statistics are of .*\(3,\)"):
        statistics.merge(RunningStatistics({"": (4,)}))
    with pytest.raises(ArgumentError, match="The batch has the leaves .*'x'"):
        statistics.update({"x": np.zeros((2, 3))})
    text = tmp_path / "text"
    text.write_text("nothing")
    foreign = tmp_path / "foreign.npz"
    np.savez(foreign, weights=np.zeros(3))
    for path in (text, foreign):
        with pytest.raises(ArgumentError, match="is no file of statistics"):
            RunningStatistics.load(path)
    with pytest.raises(FileNotFoundError):
        RunningStatistics.load(tmp_path / "absent")


def test_arguments_that_do_not_fit_are_refused() -> None:
    with ParallelEnv([Sensor]) as env:
        cases: list[tuple[dict[str, Any], str]] = [
            ({"keys": ["colour"]}, "has 'colour' in it; the observation space has the keys"),
            ({"keys": "far"}, r"is a text. Give a list, \['far'\]"),
            ({"clip": 0}, "clip=0 must be a positive number"),
            ({"epsilon": True}, "epsilon=True must be a positive number"),
            ({"statistics": RunningStatistics({"": ()})}, "statistics=<RunningStatistics.*do not fit"),
            ({"statistics": "scale.npz"}, "statistics='scale.npz' do not fit"),
        ]
        for wrong, message in cases:
            with pytest.raises(ArgumentError, match=message):
                NormalizeStates(env, **wrong)
        with pytest.raises(ArgumentError, match="gamma=1.5 is no discount"):
            NormalizeRewards(env, 1.5)
        with pytest.raises(SpacesError, match=r"There is no Box to normalise in Dict.*keys=\['kind'\]"):
            NormalizeStates(env, ["kind"])
    with ParallelEnv([Counter, Words]) as env, pytest.raises(SpacesError, match="share no observation space"):
        NormalizeStates(env)
    with pytest.raises(ArgumentError, match="is no ParallelEnv"):
        NormalizeStates(Counter())


def test_what_would_spoil_statistics_is_refused_and_not_lost() -> None:
    env = NormalizeRewards(NormalizeStates(ParallelEnv([Sensor] * 2)))
    with env:
        env.reset()
        inner: Any = env.env
        with pytest.raises(NotFiniteError, match=r"state\['far'\] of env 1; state\['near'\] of env 1") as caught:
            env.step([1.0, np.nan])
        error: Any = caught.value
        assert error.partial.rewards[0] == 1.0
        assert "And of what is left: The reward of envs [1]" in error.__notes__[0]
        assert caught.value.env_ids == (1,)
        assert inner.statistics.count == 2
        inner.frozen = True
        with pytest.raises(NotFiniteError, match=r"reward of envs \[0\] is nan or infinite"):
            env.step([np.inf, 0.0])
        assert env.statistics.count == 0
    with NormalizeRewards(ParallelEnv([partial(Ragged, 0)])) as ragged:
        ragged.reset()
        with pytest.raises(EnvContractError, match="NormalizeRewards needs rewards that are numbers; that of env 0"):
            ragged.step([1])


@nearby
def test_returns_begin_anew_with_a_reset_and_not_with_what_failed(make_env: MakeEnv) -> None:
    env = NormalizeRewards(make_env([partial(Fragile, number) for number in range(2)], on_failure="restart"))
    env.reset()
    env.step([GO_ON, GO_ON])
    assert env.returns.tolist() == [1.0, 1.0]
    env.reset(0)
    assert env.returns.tolist() == [0.0, 1.0]
    assert env.step([GO_ON, RAISE]).rewards[1] == 0.0
    assert env.statistics.count == 3
    assert env.returns.tolist() == [1.0, 0.0]


@nearby
def test_a_wrapper_inside_sees_the_rewards_as_they_were(make_env: MakeEnv) -> None:
    env = NormalizeRewards(RecordEpisodeStatistics(make_env(ENV_FNS, asynchronous="idle")))
    plain = make_env(ENV_FNS, asynchronous="idle")
    env.reset(seed=1)
    plain.reset(seed=1)
    total = 0.0
    for _ in range(3):
        total += plain.step(ONES).rewards[0]
        infos = env.step(ONES).infos
    assert infos[0]["episode"]["r"] == pytest.approx(total)
    assert env.returns[0] == 0.0
    assert env.step(ONES).rewards[0] is None


@nearby
def test_a_policy_normalises_beside_the_envs(make_env: MakeEnv) -> None:
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


@nearby
def test_sheets_keep_their_words(make_env: MakeEnv) -> None:
    env = NormalizeStates(make_env([partial(Sheet, number, 2) for number in range(2)], asynchronous="restart"))
    env.reset(seed=1)
    batch = env.step(env.action_space.sample(), align="batch")
    assert batch[0][0]["word"] == "ab"
    assert batch[1][0]["image"].dtype == np.float32
    assert batch[1][0]["inner"]["level"] == -39
