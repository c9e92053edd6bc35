"""The adapter for Tianshou after failures: which envs wait, and how to continue."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
from conftest import MakeEnv
from modes import LOCAL, PROCESSES, THREADS, here_and_in_processes, in_modes

from adapters.envs import Fragile, Looped, Slow, interrupt_step
from parallelenv.errors import ActionError, EnvBusyError, NothingInFlightError, WorkerDiedError, WorkerTimeoutError

ZEROS = [0, 0, 0]
ONE_ONE = [0, 1, 0]
apart = in_modes(THREADS, PROCESSES)


class Mortal(Looped):
    """Kills its worker for action 1."""

    def step(self, action: Any) -> Any:
        if action == 1:
            os._exit(3)
        return super().step(action)


def finish(env: Any, actions: Any) -> list[int]:
    """Step all envs, and return the ids in the order in which they finished."""
    ids = [info["env_id"] for info in env.step(actions)[4]]
    while env.waiting_id:
        ids += [info["env_id"] for info in env.step(None)[4]]
    return ids


@in_modes(*LOCAL)
def test_env_that_raised_is_no_longer_waiting(make_env: MakeEnv) -> None:
    env: Any = make_env([partial(Fragile, 9)] * 3, num_cpus=3).to_tianshou(wait_num=1)
    env.reset()
    with pytest.raises(KeyError):
        finish(env, ONE_ONE)
    while env.waiting_id:
        env.step(None)
    assert env.ready_id == [0, 1, 2]
    assert sorted(finish(env, ZEROS)) == [0, 1, 2]


@in_modes(PROCESSES)
def test_env_of_dead_worker_is_usable_after_restart(make_env: MakeEnv) -> None:
    env: Any = make_env([partial(Mortal, 9)] * 3, num_cpus=3).to_tianshou(wait_num=1)
    env.reset()
    with pytest.raises(WorkerDiedError):
        finish(env, ONE_ONE)
    assert 1 in env.ready_id
    env.parallel_env.restart(1)
    env.reset([1])
    while env.waiting_id:
        env.step(None)
    assert sorted(finish(env, ZEROS)) == [0, 1, 2]


DROPS: dict[str, Callable[[Any], Any]] = {
    "its own": lambda env: env.reset()[0],
    "that below": lambda env: env.parallel_env.reset(),
    "in part": lambda env: np.concatenate([env.reset([0, 2])[0], env.parallel_env.reset([1])]),
}


@apart
@pytest.mark.parametrize("which", DROPS)
def test_reset_drops_steps_in_flight(which: str, make_env: MakeEnv) -> None:
    env: Any = make_env([partial(Slow, 9)] * 3, num_cpus=3).to_tianshou(wait_num=2)
    env.reset()
    env.step(ONE_ONE)
    assert env.waiting_id == [1]
    assert DROPS[which](env).tolist() == [[0], [0], [0]]
    assert env.waiting_id == []
    with pytest.raises(NothingInFlightError, match="No step is in flight to wait for"):
        env.step(None)
    assert sorted(finish(env, ZEROS)) == [0, 1, 2]


@apart
def test_interrupted_step_can_be_received_or_dropped(make_env: MakeEnv) -> None:
    env: Any = make_env([partial(Slow, 9)] * 3, num_cpus=3).to_tianshou()
    env.reset()
    for end in (lambda: env.step(None)[0].tolist() == [[1], [1], [1]], lambda: not env.reset()[0].any()):
        interrupt_step(env)
        assert env.waiting_id == [0, 1, 2]
        with pytest.raises(EnvBusyError, match=r"Wait for it with step\(None\), or drop all such steps with reset\(\)"):
            env.step(ZEROS)
        assert end()
        assert env.waiting_id == []
    env.step(ZEROS)
    with pytest.raises(ActionError, match="action=None only waits"):
        env.step(None)


@apart
def test_late_step_can_be_received_with_action_none(make_env: MakeEnv) -> None:
    env: Any = make_env([partial(Slow, 9)] * 3, num_cpus=3, timeout=0.1).to_tianshou()
    env.reset()
    with pytest.raises(WorkerTimeoutError, match=r"Continue to wait with step\(None\), give a longer timeout"):
        env.step(ONE_ONE)
    while env.waiting_id:
        with contextlib.suppress(WorkerTimeoutError):
            assert env.step(None)[0].tolist() == [[1], [1], [1]]


@here_and_in_processes
def test_tianshou_step_with_no_envs_returns_empty_arrays(make_env: MakeEnv) -> None:
    env: Any = make_env([Looped] * 2, copy=False).to_tianshou()
    env.reset()
    assert [len(part) for part in env.step([], [])] == [0] * 5
    first = env.step([0, 0])[0]
    env.step([0, 0])
    assert first.tolist() == [[1], [1]]  # copies, even with `copy=False`
