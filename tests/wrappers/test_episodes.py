"""Episode statistics, compared with those of Gymnasium's wrapper around each env."""

from __future__ import annotations

from decimal import Decimal
from fractions import Fraction
from functools import partial
from typing import Any

import numpy as np
import pytest
from conftest import MakeEnv
from fragile import GO_ON, RAISE, Fragile
from gymnasium.wrappers import RecordEpisodeStatistics as AroundOne
from modes import here_and_in_processes

from parallelenv import ParallelEnv
from parallelenv.errors import ArgumentError, EnvContractError, ResetNeededError
from parallelenv.testing.envs import Counter
from parallelenv.wrappers import RecordEpisodeStatistics

LENGTHS = [3, 4, 6]


class Plain(Counter):
    """Returns a new info in every step."""

    def step(self, action: int) -> Any:
        *others, _ = super().step(action)
        return (*others, {})


def around_one(number: int) -> Any:
    return AroundOne(Plain(number, LENGTHS[number]))


def play(env: Any) -> list[Any]:
    """Step all, some and by send and recv, reset one in between; return the episode statistics."""
    actions = np.array([1, 2, 3])
    env.reset(seed=2)
    told: list[Any] = []
    for step in range(16):
        if step == 5 or (step > 10 and env.done[2]):
            env.reset(2, seed=4)
        if step % 3 == 0:
            result = env.step(actions)
        elif step % 3 == 1:
            env.send(actions[:2], id=[1, 0])
            result = env.recv(2)
        else:
            result = env.step(actions[2:], id=2, align="batch")
            episodes = [item[3]["episode"] for item in result if "episode" in item[3]]
            told.append([(2, one["r"], one["l"]) for one in episodes])
            continue
        pairs = zip(result.env_ids.tolist(), (info.get("episode") for info in result.infos), strict=True)
        told.append(sorted((env_id, one["r"], one["l"]) for env_id, one in pairs if one))
    return told


@here_and_in_processes
@pytest.mark.parametrize("asynchronous", [None, "idle", "restart"])
def test_statistics_match_those_of_a_wrapper_around_each_env(asynchronous: Any, make_env: MakeEnv) -> None:
    theirs = make_env([partial(around_one, number) for number in range(3)], asynchronous=asynchronous)
    env_fns = [partial(Plain, number, LENGTHS[number]) for number in range(3)]
    ours = RecordEpisodeStatistics(make_env(env_fns, asynchronous=asynchronous))
    expected, found = play(theirs), play(ours)
    assert [[(i, length) for i, _, length in step] for step in expected] == [
        [(i, length) for i, _, length in step] for step in found
    ]
    returns = [episode[1] for step in found for episode in step]
    assert returns == pytest.approx([episode[1] for step in expected for episode in step])
    assert len(returns) == ours.episode_count == len(ours.length_queue) > 0
    assert list(ours.return_queue) == returns


@here_and_in_processes
def test_episode_statistics_have_plain_types(make_env: MakeEnv) -> None:
    env = RecordEpisodeStatistics(make_env([Counter]), stats_key="told")
    env.reset()
    for _ in range(3):
        assert "told" not in env.step([0]).infos[0]
    told = env.step([0]).infos[0]["told"]
    assert {name: type(value) for name, value in told.items()} == {"r": float, "l": int, "t": float}
    assert 0 < told["t"] == env.time_queue[0] < 60


@here_and_in_processes
def test_done_policy_continue_reports_an_episode_once(make_env: MakeEnv) -> None:
    env = RecordEpisodeStatistics(make_env([partial(Counter, 0, 2)], asynchronous="continue"), buffer_length=1)
    for _ in range(2):
        env.reset()
        told = [env.step([1]).infos[0].get("episode") for _ in range(5)]
        assert [episode["l"] if episode else None for episode in told] == [None, 2, None, None, None]
    assert env.episode_count == 2
    assert len(env.return_queue) == 1


@here_and_in_processes
@pytest.mark.parametrize("asynchronous", ["idle", "restart", "continue"])
def test_failed_step_counts_as_the_last_of_its_episode(asynchronous: Any, make_env: MakeEnv) -> None:
    env_fns = [partial(Fragile, number) for number in range(2)]
    env = RecordEpisodeStatistics(make_env(env_fns, asynchronous=asynchronous, on_failure="restart"))
    env.reset()
    env.step([GO_ON, GO_ON])
    told = env.step([GO_ON, RAISE]).infos
    assert "episode" not in told[0]
    assert (told[1]["episode"]["r"], told[1]["episode"]["l"]) == (1.0, 2)
    if asynchronous == "idle":
        env.reset(1)
    env.step([GO_ON, GO_ON])
    with_others = env.step([GO_ON, RAISE])
    assert with_others.infos[1]["episode"]["l"] == 2


@here_and_in_processes
def test_partial_results_are_counted(make_env: MakeEnv) -> None:
    env = RecordEpisodeStatistics(make_env([partial(Counter, 0, 2), partial(Fragile, 1)], asynchronous="idle"))
    env.reset()
    for _ in range(2):
        with pytest.raises(ZeroDivisionError) as caught:
            env.step([1, RAISE], align="batch")
    error: Any = caught.value
    assert error.partial[0][3]["episode"]["l"] == 2


@here_and_in_processes
def test_clashing_keys_and_invalid_rewards_are_refused(make_env: MakeEnv) -> None:
    twice = RecordEpisodeStatistics(make_env([partial(around_one, 0)]))
    twice.reset()
    twice.step([0])
    twice.step([0])
    with pytest.raises(
        EnvContractError, match=r"info of envs \[0\] already has the key 'episode'.*another stats_key"
    ) as caught:
        twice.step([0])
    error: Any = caught.value
    assert error.partial.infos[0]["episode"]["l"] == 3
    with ParallelEnv([Counter]) as env, pytest.raises(ArgumentError, match="buffer_length=0 must be an int"):
        RecordEpisodeStatistics(env, 0)


class Says(Plain):
    """Ends after ``length`` steps; its third step returns a given reward."""

    def __init__(self, length: int, reward: Any = 1.0) -> None:
        super().__init__(0, length)
        self.reward = reward

    def step(self, action: int) -> Any:
        state, _, *ends, _ = super().step(action)
        return (state, self.reward if self.count == 3 else 1.0, *ends, {})


@here_and_in_processes
@pytest.mark.parametrize("reward", [Fraction(5, 2), Decimal("2.5")])
def test_rewards_of_any_number_type_are_counted(reward: Any, make_env: MakeEnv) -> None:
    env = RecordEpisodeStatistics(make_env([partial(Says, 3, reward)], asynchronous="restart"))
    env.reset(seed=0)
    infos = [env.step([1]).infos[0] for _ in range(3)]
    assert infos[2]["episode"]["r"] == 4.5


@here_and_in_processes
@pytest.mark.parametrize("reward", ["x", 1j, np.complex128(1), 10**400, None, np.zeros(2)])
def test_rewards_that_are_not_numbers_are_refused(reward: Any, make_env: MakeEnv) -> None:
    env = RecordEpisodeStatistics(make_env([partial(Says, 3), partial(Says, 3, reward)], asynchronous="restart"))
    env.reset()
    env.step([0, 0])
    env.step([0, 0])
    with pytest.raises(EnvContractError, match="must be numbers here; the reward of env 1 is"):
        env.step([0, 0], align="batch")
    with pytest.raises(ResetNeededError):
        env.step([0], id=[0])
    env.reset()
    env.step([0, 0])
    assert env.episode_count == 0


@here_and_in_processes
def test_load_state_keeps_the_buffer_length_of_the_wrapper(make_env: MakeEnv) -> None:
    env = RecordEpisodeStatistics(make_env([partial(Says, 1)], asynchronous="restart"), 2)
    env.reset()
    for _ in range(3):
        env.step([0])
    longer = RecordEpisodeStatistics(env.unwrapped, 5)
    longer.load_state(env.save_state())
    assert longer.return_queue.maxlen == longer.time_queue.maxlen == 5
    longer.step([0])
    assert list(longer.length_queue) == [1, 1, 1]
