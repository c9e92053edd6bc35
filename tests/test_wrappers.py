"""Wrappers around a whole `ParallelEnv`."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from conftest import MakeEnv

from parallelenv import ParallelEnv, ParallelWrapper, StateWrapper
from parallelenv.errors import ArgumentError, ClosedError, WrappedError
from parallelenv.identity import difference
from parallelenv.testing.envs import Counter, Sheet

nearby = pytest.mark.parametrize("mode", ["dummy", "subproc"], indirect=True)
ENV_FNS = [partial(Counter, number, 3 + number) for number in range(3)]
ONES = np.ones(3, np.int64)


class Doubled(StateWrapper):
    def process(self, states: Any) -> Any:
        return states * 2.0


class Cheered(ParallelWrapper):
    def step(self, *args: Any, **kwargs: Any) -> Any:
        result = super().step(*args, **kwargs)
        result.rewards[:] += 10
        return result


@nearby
@pytest.mark.parametrize("asynchronous", [None, "idle", "restart", "continue"])
def test_states_are_processed_wherever_they_are(asynchronous: Any, make_env: MakeEnv) -> None:
    plain: Any = make_env(ENV_FNS, asynchronous=asynchronous)
    doubled = Doubled(make_env(ENV_FNS, asynchronous=asynchronous))
    assert difference(plain.reset(seed=1) * 2.0, doubled.reset(seed=1)) is None
    for step in range(12):
        if step % 3 == 0:
            raw, found = plain.step(ONES), doubled.step(ONES)
            pairs = zip(raw.states, found.states, strict=True)
            assert difference(raw.rewards, found.rewards) is None
        elif step % 3 == 1:
            raw, found = plain.step(ONES, align="batch"), doubled.step(ONES, align="batch")
            pairs = zip([item[0] for item in raw], [item[0] for item in found], strict=True)
            assert difference([item[1:3] for item in raw], [item[1:3] for item in found]) is None
        else:
            for env in (plain, doubled):
                env.send(ONES)
            raw, found = plain.recv(3), doubled.recv(3)
            order = [raw.env_ids.tolist().index(env_id) for env_id in found.env_ids]
            pairs = zip([raw.states[place] for place in order], found.states, strict=True)
        for state, changed in pairs:
            assert difference(None if state is None else state * 2.0, changed) is None
        assert sorted(raw.env_ids) == sorted(found.env_ids)


@nearby
def test_ended_states_are_processed(make_env: MakeEnv) -> None:
    env = Doubled(make_env(ENV_FNS, asynchronous="restart"))
    env.reset(seed=1)
    env.step(ONES)
    env.step(ONES)
    ended = env.step(ONES).infos[0]["ended_state"]
    assert ended[:2].tolist() == [0, 6]


@nearby
def test_dicts_are_processed(make_env: MakeEnv) -> None:
    class Picture(StateWrapper):
        def process(self, states: Any) -> Any:
            return {"image": states["image"] / 255}

    env_fns = [partial(Sheet, number, 2) for number in range(2)]
    space = gym.spaces.Dict({"image": gym.spaces.Box(0, 1, (2, 3))})
    env = Picture(make_env(env_fns, asynchronous="restart"), space)
    batched: Any = env.observation_space
    assert batched["image"].shape == (2, 2, 3)
    assert env.reset(seed=1).keys() == {"image"}
    actions = env.action_space.sample()
    env.step(actions)
    result = env.step(actions, align="batch")
    assert result[0][0]["image"].shape == (2, 3)
    assert result[0][3]["ended_state"]["image"].shape == (2, 3)


@nearby
def test_everything_else_is_forwarded(make_env: MakeEnv) -> None:
    inner = make_env(ENV_FNS)
    env = Cheered(Doubled(inner))
    assert env.unwrapped is inner
    assert len(env) == 3
    assert repr(env).startswith("<Cheered around <Doubled around <parallelenv.ParallelEnv of 3 envs")
    assert copy.copy(env).unwrapped is inner
    env.reset(seed=1)
    assert (env.step(ONES).rewards > 5).all()
    assert env.get_env_attr("number") == [0, 1, 2]
    env.pause([1])
    assert env.step(ONES[:2]).env_ids.tolist() == [0, 2]
    with pytest.raises(AttributeError, match="nonsense"):
        env.nonsense  # noqa: B018
    with env:
        pass
    with pytest.raises(ClosedError):
        env.reset()


@pytest.mark.parametrize("call", ["rollout", "to_gymnasium", "to_sb3", "to_tianshou"])
def test_what_would_go_past_a_wrapper_is_refused(call: str) -> None:
    with ParallelEnv([Counter]) as env, pytest.raises(WrappedError, match=rf"{call}\(\) would go past Cheered"):
        getattr(Cheered(env), call)()


def test_what_is_no_parallel_env_is_refused() -> None:
    with pytest.raises(ArgumentError, match="is no ParallelEnv"):
        ParallelWrapper(Counter())  # type: ignore[arg-type]
    with ParallelEnv([Counter]) as env, pytest.raises(NotImplementedError, match="StateWrapper lacks process"):
        StateWrapper(env).reset()
