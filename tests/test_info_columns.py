"""Infos of a steady form travel as columns: each value keeps its type, and infos of another form are not lost."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.spaces import Box, Discrete
from hypothesis import given
from hypothesis import strategies as st
from interrupting import Moments, at_many_moments, interrupt_at
from modes import LOCAL, ORACLE, PROCESSES, THREADS

from parallelenv import ParallelEnv
from parallelenv.contract.batch import INFO_NBYTES
from parallelenv.engine.engine import Engine
from parallelenv.errors import WorkerDiedError
from parallelenv.testing.contract import DONE_POLICIES, assert_same

NUM_ENVS = 5


class Telling(gym.Env[Any, Any]):
    """Has infos with numbers in most steps, with something else in some, and empty ones in others."""

    observation_space = Box(-1, 1, (4,), np.float32)
    action_space = Discrete(2)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        self.count = 0
        self.trace = np.zeros(3)
        return np.zeros(4, np.float32), {"begun": 1}

    def step(self, action: Any) -> Any:
        self.count += 1
        self.trace += 1  # one array, changed in each step
        info: dict[str, Any] = {"x": self.count * 0.5, "n": np.float64(self.count), "b": self.count % 2 == 0}
        info |= {"i": self.count, "trace": self.trace}
        if self.count % 7 == 0:
            info = {"other": "x"}
        if self.count % 11 == 0:
            info = {}
        if self.count % 13 == 0:
            info["i"] = 2**70
        if self.count % 17 == 0:
            info["trace"] = np.zeros(1)
        return np.full(4, self.count, np.float32), 1.0, self.count == 25, False, info


def ordered(infos: Any) -> list[Any]:
    """Return the keys and values of infos in their order, which must not change either."""
    return [list(info.items()) for info in infos]


MODES = [
    (ORACLE, {}),
    (THREADS, {}),
    (PROCESSES, {}),
    (PROCESSES, {"eventfd": False}),
    (PROCESSES, {"caller_steps": True}),
]


class Brief(gym.Env[Any, Any]):
    """Episodes of one to three steps, whose resets have infos, mostly of one form."""

    observation_space = Box(-1, 1000, (1,), np.float32)
    action_space = Discrete(2)

    def __init__(self) -> None:
        self.episode = 0
        self.place = np.zeros(2)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        self.episode += 1
        self.left = self.episode % 3 + 1
        self.place += 1  # one array, changed in each reset
        info: dict[str, Any] = {"episode": self.episode, "place": self.place, "p": np.float32(self.left)}
        if self.episode % 7 == 0:
            info = {"other": "x"} if self.episode % 2 else {}
        return np.full(1, self.episode, np.float32), info

    def step(self, action: Any) -> Any:
        self.left -= 1
        state = np.full(1, self.episode, np.float32)
        return state, 1.0, self.left == 0, False, {"left": self.left} if self.episode % 5 else {"odd": [1]}


@pytest.mark.parametrize("plans", [True, False])
@pytest.mark.parametrize(
    ("kind", "asynchronous"),
    [*((Telling, done_policy) for done_policy in DONE_POLICIES), (Brief, "restart")],
)
@pytest.mark.parametrize(("mode", "options"), MODES, ids=str)
def test_infos_equal_those_without_columns(
    mode: str, options: dict[str, Any], kind: Any, asynchronous: Any, plans: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Engine, "plans_steps", plans)
    with (
        ParallelEnv([kind] * NUM_ENVS, mode, asynchronous, 2, **options) as env,
        ParallelEnv([kind] * NUM_ENVS, ORACLE, asynchronous) as oracle,
    ):
        monkeypatch.setattr(oracle.engine.pool, "learn_infos", lambda *_: None)
        env.reset(seed=0)
        oracle.reset(seed=0)
        kept, copies = [], []
        for number in range(1, 100):
            ids = None if number % 3 else [0, 4, 2]
            actions = np.zeros(3 if ids else NUM_ENVS, int)
            expected = oracle.step(actions, ids)
            if number % 9 or asynchronous != "restart":
                kept.append(ordered(env.step(actions, ids).infos))
                copies.append(ordered(expected.infos))
            else:
                env.send(actions, ids)
                found = env.recv(NUM_ENVS)
                kept.append(ordered(found.infos[np.argsort(found.env_ids)]))
                copies.append(ordered(expected.infos[np.argsort(expected.env_ids)]))
            assert_same(copies[-1], kept[-1], str(number))
            assert_same(ordered(oracle.reset_infos), ordered(env.reset_infos), str(number))
            if asynchronous != "restart" and oracle.all_done():
                env.reset()
                oracle.reset()
        batch = env.engine.pool.batch
        assert (batch.info_columns if kind is Telling else batch.reset_columns) is not None
        assert_same(copies, kept)  # none changed later
        if asynchronous == "restart":
            one, other = (each.rollout(lambda states: np.zeros(len(states), int), 9) for each in (env, oracle))
            for name in ("infos", "reset_infos"):
                assert_same(getattr(other, name), getattr(one, name))


@contextmanager
def settled(
    kind: Any, num_envs: int = 4, mode: str = PROCESSES, asynchronous: Any = "continue", num_cpus: int = 2, **more: Any
) -> Iterator[ParallelEnv]:
    """Make envs that have made five steps, so that the form of their infos is known."""
    with ParallelEnv([kind] * num_envs, mode, asynchronous, num_cpus, **more) as env:
        env.reset()
        for _ in range(5):
            env.step([0] * num_envs)
        assert env.engine.pool.batch.info_columns is not None
        yield env


@pytest.mark.parametrize("mode", [ORACLE, PROCESSES])
def test_infos_are_the_users_own(mode: str) -> None:
    with settled(Telling, mode=mode) as env:
        first = env.step([0] * 4).infos
        first[0]["trace"][:] = -1
        first[0]["x"] = "mine"
        env.step([0] * 4)
        assert [info["trace"][0] for info in first] == [-1, 6, 6, 6]


def test_infos_received_out_of_order_and_of_resets_are_not_mixed() -> None:
    with settled(Telling, asynchronous="idle") as env:
        env.step([0] * 4)
        env.send([0, 0], [2, 3])
        env.send_reset([0, 1])
        result = env.recv(4)
        infos = dict(zip(result.env_ids.tolist(), result.infos, strict=True))
        assert infos[2] == {"other": "x"}
        assert infos[0] == {"begun": 1, "reset": True}


class Exiting(Telling):
    """Action 1 ends its process."""

    def step(self, action: Any) -> Any:
        if action == 1:
            os._exit(7)
        return super().step(action)


def test_infos_outlive_the_worker_that_wrote_them() -> None:
    with settled(Exiting, 3, num_cpus=1, on_failure="restart") as env:
        env.send([0, 0], [0, 1])
        assert env.get_env_attr("count") == [6, 6, 5]  # their replies have arrived
        env.send([1], [2])
        result = env.recv(3)
        assert [info["i"] for info in result.infos[:2]] == [6, 6]
        assert "failure" in result.infos[2]
        for _ in range(5):  # the two were also rebuilt
            result = env.step([0] * 3)
        assert [info["i"] for info in result.infos] == [4, 4, 5]


@pytest.mark.parametrize("is_dead", [False, True])
def test_rebuilt_worker_learns_the_form_again_and_infos_of_others_wait_to_be_received(is_dead: bool) -> None:
    with settled(Exiting) as env:
        env.send([0], [3])
        if is_dead:
            with pytest.raises(WorkerDiedError):
                env.step([1], [0])
        env.restart([0, 1])
        env.reset([0, 1])
        for number in range(1, 6):
            result = env.step([0] * 2, [0, 1])
            assert [info["i"] for info in result.infos] == [number] * 2
            env.step([0], [2])
        assert env.recv().infos[0]["i"] == 6


class Replaying(Telling):
    """Returns given infos, and ends after them."""

    def __init__(self, said: list[Any], at_reset: dict[str, Any] | None = None) -> None:
        self.said, self.at_reset = said, at_reset or {}

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        return super().reset()[0], self.at_reset

    def step(self, action: Any) -> Any:
        state, reward, *_ = super().step(action)
        return state, reward, self.count == len(self.said), False, self.said[self.count - 1]


CHANGING = partial(Replaying, [{"n": n} if n <= 8 else {"n": n, "other": [n]} for n in range(1, 200)])
"""Its info has another form after eight steps."""


@at_many_moments
@pytest.mark.timeout(method="thread")
@pytest.mark.parametrize("mode", LOCAL)
@pytest.mark.parametrize("num_changes", [1, 2], ids=["learned", "given up"])
def test_interrupt_while_hosts_are_sent_a_form_loses_no_info(mode: str, num_changes: int, moments: Moments) -> None:
    def step_or_receive() -> None:
        result = env.recv(2) if env.engine.in_flight else env.step([0, 0])
        assert [info["n"] for info in result.infos] == result.states[:, 0].tolist()

    def num_steps_until(change: int) -> int:
        columns, seen, steps = [env.engine.pool.batch.info_columns], 0, 0
        while seen < change:
            step_or_receive()
            steps += 1
            columns.append(env.engine.pool.batch.info_columns)
            seen += columns[-1] is not columns[-2]
        return steps

    with ParallelEnv([CHANGING] * 2, mode, "continue", 2) as env:
        env.reset()
        num_steps = num_steps_until(num_changes)
    for number, interrupt in moments.every(1 if mode == ORACLE else 4):  # the others start workers
        with ParallelEnv([CHANGING] * 2, mode, "continue", 2) as env:
            env.reset()
            for _ in range(num_steps - 1):
                step_or_receive()
            outcome = interrupt_at(number, step_or_receive, ("engine/worker_pool.py",), interrupt)
            for _ in range(4):
                step_or_receive()
        if not outcome.line:
            break
    assert number > 10


# ---------------------------------------------------------------- forms and columns


numbers = st.floats(allow_nan=False) | st.integers(-(2**63), 2**63 - 1) | st.booleans()
scalars = numbers.flatmap(lambda value: st.sampled_from([value, np.float64(value), np.bool_(value)]))
others = st.sampled_from([np.float32(2.5), np.float16(1), np.int64(7), np.zeros((2, 3), np.float32), np.arange(3)])
infos = st.dictionaries(st.text(max_size=5), scalars | others, min_size=1, max_size=6)
VALUES = (0.5, 1, 2**63, True, np.float64(1), np.zeros(2), np.zeros(17), np.array(3), 1j, "a", None, [1.0], {"x": 1.0})
CHANGES: list[Callable[[dict[Any, Any]], dict[Any, Any]]] = [
    lambda info: info,
    lambda info: {},
    lambda info: {**info, "more": 1},
    lambda info: dict(reversed(info.items())),
    lambda info: {**info, 3: 1.0},
    lambda info: {**info, "objects": np.array([None])},
    lambda info: {str(number): 1.0 for number in range(INFO_NBYTES // 8 + 1)},
    *(lambda info, value=value: dict.fromkeys(info, value) for value in VALUES),
]
"""Make infos that may be of another form, or of none."""


@pytest.mark.parametrize("mode", LOCAL)
def test_info_of_a_reset_in_the_next_step_is_kept_though_it_is_in_columns(mode: str) -> None:
    said = [{"x": 1.0}, {"x": 2.0}, {"x": 3.0}]
    with ParallelEnv([partial(Replaying, said, {"x": 100.0})] * 2, mode, "restart", num_cpus=2) as env:
        adapter: Any = env.to_gymnasium()
        adapter.reset()
        for _ in range(24):
            infos = adapter.step(np.zeros(2, int))[4]
        assert env.engine.pool.batch.info_columns is not None
        assert infos["x"].tolist() == [100.0, 100.0]
        assert env.reset_infos == [{"x": 100.0}] * 2


@given(infos, st.sampled_from(CHANGES), st.lists(st.sampled_from(CHANGES), max_size=5))
def test_any_info_is_read_as_it_was_written(info: dict[str, Any], most: Any, changes: list[Any]) -> None:
    usual = most(info)
    said = [usual] * 5 + [one for change in changes for one in (change(info), usual)]
    with ParallelEnv([partial(Replaying, said)] * 2, ORACLE, "continue") as env:
        env.reset()
        for expected in said:
            assert_same(ordered([expected] * 2), ordered(env.step([0, 0]).infos))
        assert usual is not info or env.engine.pool.batch.info_columns is not None


def times_learned(*said: list[Any]) -> int:
    """Return how often columns are made or given up, if each env returns these infos."""
    with ParallelEnv([partial(Replaying, infos) for infos in said], ORACLE, "continue") as env:
        env.reset()
        columns = []
        for _ in said[0]:
            env.step([0] * len(said))
            columns.append(env.engine.pool.batch.info_columns)
    return sum(one is not next_one for one, next_one in itertools.pairwise(columns))


def test_forms_are_learned_and_given_up() -> None:
    steady = {"speed": 0.5, "lap": 3}
    assert times_learned([steady] * 6) == 1
    assert times_learned([steady] * 6 + [{"x": "y"}] * 20) == 2
    assert times_learned(([{"x": 1.0}] * 40 + [{"y": 1}] * 40) * 50) < 20
    assert times_learned(([steady] * 100 + [{"episode": {}}]) * 50) == 1
    assert times_learned([steady] * 10, *[[{}] * 10] * 3) == 0
