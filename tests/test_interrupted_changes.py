"""Ctrl-C before any line of a call that changes what the caller and all workers must agree on: all or nothing."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from interrupting import Counting, interrupt_at
from modes import ORACLE, PROCESSES

from parallelenv import ParallelEnv
from parallelenv.adapters.gymnasium import GymnasiumVectorEnv  # so that no line of its import is interrupted
from parallelenv.backends._bell import HAS_BELL

NUM_ENVS = 4
ZEROS = np.zeros(NUM_ENVS, int)
IN_CHANGES = ["adapters/common", "parallelenv/engine", "contract/message_channel", "backends"]
ONES = [1.0] * NUM_ENVS
with_each_way = pytest.mark.parametrize(
    ("mode", "options"),
    [
        (ORACLE, {}),
        (PROCESSES, {"num_cpus": 2, "eventfd": HAS_BELL}),
        (PROCESSES, {"num_cpus": 2, "caller_steps": True}),
    ],
    ids=[ORACLE, PROCESSES, "caller_steps"],
)


def check_steps(env: ParallelEnv, outcome: Any, name: str | None) -> None:
    """Check that the done policy, the table and the batch of all workers fit each other."""
    assert env.asynchronous == name, outcome
    env.reset()
    for count in range(1, 3):
        assert env.step(ZEROS).states.ravel().tolist() == [count] * NUM_ENVS, outcome
    assert env.engine.reward_dtype is None, outcome


@pytest.mark.slow
@pytest.mark.parametrize("mode", [ORACLE, PROCESSES])
def test_interrupted_adapter_is_made_for_all_workers_or_for_none(mode: str) -> None:
    num_undone = num_done = 0
    with ParallelEnv([Counting] * NUM_ENVS, mode, "idle", num_cpus=2, timeout=20) as env:
        engine = env.engine
        done_policy, layout = engine.done_policy, engine.pool.layout
        for line in itertools.count(1):
            env.reset()
            outcome = interrupt_at(line, lambda: GymnasiumVectorEnv(env, "SameStep"), IN_CHANGES)
            if not outcome.line:
                break
            assert outcome.is_raised, outcome
            if engine.adapter is None:
                num_undone += 1
                check_steps(env, outcome, "idle")
                continue
            num_done += 1
            vector_env: Any = env.to_gymnasium("SameStep")  # the user tries again
            vector_env.reset()
            for count in range(1, 3):
                assert vector_env.step(ZEROS)[0].ravel().tolist() == [count] * NUM_ENVS, outcome
            engine.pool.attach(layout)  # because a new pool for each line would take too long
            engine.use_done_policy(done_policy, copies=True)
            engine.adapter = engine.pool.waits_by = None
    assert num_undone > 3
    assert num_done > 3


class Saved(Counting):
    count = 0

    def get_state(self) -> Any:
        return self.count

    def set_state(self, state: Any) -> None:
        self.count = state


@with_each_way
def test_interrupted_load_state_loads_all_or_requires_resets(mode: str, options: dict[str, Any]) -> None:
    num_loaded = 0
    with ParallelEnv([Saved] * NUM_ENVS, mode, "idle", timeout=20, **options) as env:
        env.seed(5)
        env.pause([1])
        env.reset()
        env.step(ZEROS[:3])
        saved, paused = env.save_state(), env.paused.tolist()
        for line in itertools.count(1):
            env.resume()
            env.reset()
            outcome = interrupt_at(line, lambda: env.load_state(saved))
            if not outcome.line:
                break
            assert outcome.is_raised, outcome
            table = env.engine.table
            if table.paused.tolist() == paused:
                num_loaded += 1
                assert set(env.engine.seeds) == set(saved.seeds), outcome
                assert sorted(table.needing_reset()) == [1], outcome
                assert env.step(ZEROS[:3]).states.ravel().tolist() == [2] * 3, outcome
            elif table.needing_reset():
                assert sorted(table.needing_reset()) == list(range(NUM_ENVS)), outcome
            else:  # nothing was sent
                assert env.step(ZEROS).states.ravel().tolist() == ONES, outcome
    assert num_loaded > 2


def test_interrupted_pause_changes_all_or_nothing() -> None:
    with ParallelEnv([Counting] * NUM_ENVS, ORACLE) as env:
        for line in itertools.count(1):
            env.resume()
            outcome = interrupt_at(line, lambda: env.pause([0, 2]))
            assert env.paused.tolist() in ([False] * 4, [True, False, True, False]), outcome
            assert env.engine.table.unpaused == tuple(np.flatnonzero(~env.paused).tolist()), outcome
            if not outcome.line:
                break


@with_each_way
def test_interrupted_start_of_a_profile_records_nothing(mode: str, options: dict[str, Any]) -> None:
    lost = []
    with ParallelEnv([Counting] * NUM_ENVS, mode, "idle", timeout=20, **options) as env:
        env.reset()
        for line in itertools.count(1):
            recording = env.profile()
            outcome = interrupt_at(line, recording.__enter__)
            if not outcome.line:
                recording.__exit__(None, None, None)
                break
            assert outcome.is_raised, outcome
            if env.engine.pool.is_traced:  # the call was about to return
                lost.append(outcome.line)
                recording.__exit__(None, None, None)
            assert env.engine.guard.tracer is None, outcome
            pool = env.engine.pool
            assert not any(pool.ask("manage", pool.env_ids, None, "stop_trace").values.values()), outcome
    assert len(lost) <= 10, lost
