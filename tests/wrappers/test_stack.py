"""Stacked states, compared with those of Gymnasium's wrapper around each env."""

from __future__ import annotations

from functools import partial
from typing import Any

import gymnasium as gym
import pytest
from conftest import MakeEnv
from fragile import GO_ON, RAISE, Fragile
from gymnasium.wrappers import FrameStackObservation

from parallelenv import ParallelEnv
from parallelenv.errors import ArgumentError
from parallelenv.results import difference
from parallelenv.testing.contract import DONE_POLICIES, items
from parallelenv.testing.envs import Counter, Pair, Sheet, Words
from parallelenv.wrappers import StackStates
from wrappers.envs import play

SIZE = 3


def pole(number: int, length: int) -> Any:
    return gym.make("CartPole-v1", max_episode_steps=length)


def stacked_by_gymnasium(make: Any, padding_type: str) -> Any:
    return FrameStackObservation(make(), SIZE, padding_type=padding_type)


@pytest.mark.parametrize("kind", [pole, Pair])
@pytest.mark.parametrize("padding_type", ["reset", "zero"])
@pytest.mark.parametrize("asynchronous", DONE_POLICIES)
def test_stacks_equal_those_of_a_wrapper_around_each_env(
    asynchronous: Any, padding_type: Any, kind: Any, make_env: MakeEnv
) -> None:
    env_fns = [partial(kind, number, 2 + number) for number in range(4)]
    around = [partial(stacked_by_gymnasium, env_fn, padding_type) for env_fn in env_fns]
    ours = StackStates(make_env(env_fns, asynchronous=asynchronous), SIZE, padding_type)
    theirs = make_env(around, asynchronous=asynchronous)
    assert ours.single_observation_space == theirs.single_observation_space
    assert ours.observation_space == theirs.observation_space
    actions = [env_fns[0]().action_space.sample() * 0 for _ in env_fns]
    expected, found = ([items(result) for result in play(env, actions)] for env in (theirs, ours))
    assert difference(expected, found) is None


def test_stacks_are_copies(make_env: MakeEnv) -> None:
    env = StackStates(make_env([Counter] * 2, copy=False), 2)
    first = env.reset(seed=1)
    kept = first.copy()
    second = env.step([0, 0]).states
    assert difference(first, kept) is None
    second[:] = 7
    assert env.step([0, 0]).states[0, :, 1].tolist() == [1, 2]


@pytest.mark.parametrize("asynchronous", ["idle", "restart", "continue"])
def test_rebuilt_env_starts_a_new_frame_stack(asynchronous: Any, make_env: MakeEnv) -> None:
    env_fns = [partial(Fragile, number) for number in range(2)]
    env = StackStates(make_env(env_fns, asynchronous=asynchronous, on_failure="restart"), 2)
    env.reset()
    env.step([GO_ON, GO_ON])
    result = env.step([GO_ON, RAISE])
    assert result.dones.tolist() == [False, True]
    assert result.states.tolist() == [[[0, 1], [0, 2]], [[1, 0], [1, 0]]]
    assert result.infos[1].get("ended_state") is None


@pytest.mark.parametrize(("padding_type", "padding"), [("reset", 1), ("zero", 0)])
def test_env_wrapped_during_an_episode_pads_with_its_next_state(padding_type: Any, padding: int) -> None:
    with ParallelEnv([partial(Counter, 0, 1), partial(Counter, 1, 9)], asynchronous="restart") as env:
        env.reset(seed=1)
        late = StackStates(env, 3, padding_type)
        result = late.step([0, 0])
        stacks = [result.infos[0]["ended_state"], result.states[1]]
        assert [stack[:, 1].tolist() for stack in stacks] == [[padding, padding, 1]] * 2
        assert result.states[0, :, 1].tolist() == [0, 0, 0]


@pytest.mark.parametrize(
    ("envs", "arguments", "message"),
    [
        (
            [Sheet],
            (2,),
            r"state\['word'\] has no fixed shape and dtype in Dict.* Remove it with a StateWrapper first\.",
        ),
        ([Counter, Words], (2,), "share no observation space, so their states cannot be stacked.*spaces="),
        ([Counter], (0,), "stack_size=0 must be an int of at least 1"),
        ([Counter], (2, "first"), "padding_type='first' is not known; expected 'reset'"),
    ],
)
def test_text_states_and_invalid_arguments_are_refused(envs: Any, arguments: Any, message: str) -> None:
    with ParallelEnv(envs) as env, pytest.raises(ArgumentError, match=message):
        StackStates(env, *arguments)
