"""Samplers with sent resets, streams, evaluation, and loops over all tasks."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from conftest import MakeEnv, MakePool
from samplers import Walks
from test_exhausted import TOTALS, env_fns, walks

from parallelenv import CLOSE, TERMINATED, ParallelEnv
from parallelenv.results import difference
from parallelenv.testing.contract import DONE_POLICIES, drain

RESTS = (None, None, True, {"exhausted": True})


def ones(states: Any) -> Any:
    return np.ones(len(states), np.int64)


def play_sent_resets(env: ParallelEnv) -> list[Any]:
    """Return the results of sent resets until all envs are exhausted, and the flags after each."""
    log: list[Any] = []
    for _ in range(max(TOTALS) + 1):
        env.send_reset()
        log += [drain(env), env.done, env.exhausted, env.reset_infos]
    assert env.all_exhausted()
    env.send([1] * len(env))
    return [*log, drain(env)]


@pytest.mark.parametrize("done_policy", DONE_POLICIES)
@pytest.mark.parametrize("kind", ["plain", "sheet"])
def test_send_reset_of_an_exhausted_env_equals_the_oracle(make_env: MakeEnv, done_policy: Any, kind: str) -> None:
    with ParallelEnv(env_fns(kind), asynchronous=done_policy) as oracle:
        expected = play_sent_resets(oracle)
    found = play_sent_resets(make_env(env_fns(kind), asynchronous=done_policy, num_cpus=2))
    assert difference(expected, found) is None, difference(expected, found)


def test_exhausted_env_is_received_without_state_and_reward(make_pool: MakePool) -> None:
    env = make_pool(Walks, walks())
    env.send_reset()
    result = env.recv(min_envs=len(env))
    assert sorted(result.env_ids.tolist()) == [0, 1, 2, 3]
    place = result.env_ids.tolist().index(2)
    assert (result.states[place], result.rewards[place], bool(result.dones[place]), result.infos[place]) == RESTS
    assert all(info["reset"] for info in np.delete(result.infos, place))
    env.send_reset(2)
    assert env.get_state() == (TERMINATED, 2)  # no other episode has started, though ended envs are reset


@pytest.mark.parametrize("auto", [True, False])
def test_get_state_and_send_action_until_all_envs_are_exhausted(make_pool: MakePool, auto: bool) -> None:
    env = make_pool(Walks, walks(), auto)
    ends = dict.fromkeys(range(len(env)), 0)
    env.send_reset()
    while env.num_unpaused:
        state, env_id = env.get_state() or (None, -1)
        if state is not TERMINATED:
            assert state is not None
            env.send_action(1, env_id)
        elif env.exhausted[env_id]:
            env.send_action(CLOSE, env_id)
        else:
            ends[env_id] += 1
            env.send_reset(env_id)
    assert auto or tuple(ends.values()) == TOTALS


def test_stream_ends_when_all_envs_are_exhausted(make_pool: MakePool) -> None:
    env = make_pool(Walks, walks())
    env.next_task(length=2)
    steps = dict.fromkeys(range(len(env)), 0)
    for env_ids, result in env.stream(ones):
        for row, env_id in enumerate(env_ids.tolist()):
            assert result.states[row] is not None
            steps[env_id] += 1
    assert env.all_exhausted()
    assert steps[2] == 0
    assert all(count >= TOTALS[env_id] for env_id, count in steps.items())


def test_run_episodes_stops_when_no_tasks_are_left(make_pool: MakePool) -> None:
    env = make_pool(Walks, walks())
    evaluation = env.run_episodes(ones, 8, progress=False)
    assert evaluation.env_ids.tolist() == [0, 1, 1, 3, 3]  # two each, where there are two
    with ParallelEnv.from_samplers(Walks, walks()) as oracle:
        expected = oracle.run_episodes(ones, 8, progress=False)
    assert difference(vars(expected), vars(evaluation)) is None
    assert env.next_task().tolist()[0] is None  # all its tasks were played


@pytest.mark.parametrize("auto", [True, False])
def test_loop_until_all_done_plays_every_task(make_pool: MakePool, auto: bool) -> None:
    env = make_pool(Walks, walks(totals=(3, 3, 3)), auto)
    states, ended = env.next_task(length=2), 0
    while states[0] is not None:
        while not env.all_done():
            ended += int(env.step([1, 1, 1]).dones.sum())
        states = env.next_task(length=2)
    assert ended == 9  # all end an episode in the same step
