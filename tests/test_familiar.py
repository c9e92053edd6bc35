"""Methods with the names of other libraries."""

from __future__ import annotations

from functools import partial
from typing import Any

import gymnasium as gym
import pytest
from conftest import MakeEnv
from modes import ORACLE

from parallelenv import ParallelEnv
from parallelenv.errors import ArgumentError, EnvBusyError, NothingInFlightError
from parallelenv.results import difference
from parallelenv.testing.contract import items
from parallelenv.testing.envs import Counter

ENV_FNS = [partial(Counter, number, 3) for number in range(3)]


@pytest.mark.parametrize("asynchronous", [None, "idle", "restart"])
def test_step_async_and_step_wait_equal_step(asynchronous: Any, make_env: MakeEnv) -> None:
    plain, env = ParallelEnv(ENV_FNS, ORACLE, asynchronous), make_env(ENV_FNS, asynchronous=asynchronous)
    plain.reset(seed=1)
    env.reset(seed=1)
    for step in range(5):
        id: Any = [2, 0] if step % 2 else None
        actions = [step % 4] * (2 if id else 3)
        align: Any = "batch" if step == 2 else "item"
        env.step_async(actions, id)
        expected, found = plain.step(actions, id, align), env.step_wait(align=align)
        assert difference(items(expected), items(found)) is None
    plain.close()


def test_step_wait_without_step_async_is_refused(make_env: MakeEnv) -> None:
    env = make_env(ENV_FNS)
    env.reset(seed=1)
    with pytest.raises(NothingInFlightError, match=r"Call step_async\(\) first"):
        env.step_wait()
    env.step_async([0, 0, 0])
    with pytest.raises(EnvBusyError, match=r"recv\(min_envs=3\), or drop it with reset"):
        env.step_async([0, 0, 0])
    with pytest.raises(ArgumentError, match="timeout=-1"):
        env.step_wait(-1)
    env.step_wait(30)
    with pytest.raises(NothingInFlightError, match="step_async"):
        env.step_wait()
    env.step_async([0, 0, 0])
    env.reset()
    with pytest.raises(NothingInFlightError, match=r"No step of envs \[0, 1, 2\] is in flight"):
        env.step_wait()


def test_get_images_returns_rendered_frames(make_env: MakeEnv) -> None:
    env = make_env([lambda: gym.make("CartPole-v1", render_mode="rgb_array")] * 2)
    env.reset(seed=1)
    assert difference(env.get_images(), env.render()) is None
    assert len(env.get_images(1)) == 1
    assert env.unwrapped is env
