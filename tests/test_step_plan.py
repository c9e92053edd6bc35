"""Steps that are repeated take the fast path, with the results of the general way."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.spaces import Box, Dict, Discrete, MultiDiscrete, Text
from modes import ORACLE, PROCESSES

from parallelenv import ParallelEnv, errors
from parallelenv.testing.contract import DONE_POLICIES, AnswerRecord, assert_same
from parallelenv.testing.envs import Sleeper

NUM_ENVS = 6
LOCAL = pytest.mark.parametrize("mode", [ORACLE, PROCESSES])
WAYS = pytest.mark.parametrize(
    ("mode", "options"), [(ORACLE, {}), (PROCESSES, {}), (PROCESSES, {"caller_steps": True})], ids=str
)
ZEROS = [0] * NUM_ENVS
VECTOR = Box(-10, 10, (3,), np.float32)


class Ending(gym.Env[Any, Any]):
    """Ends after some steps, or if the action is 2, with states of a space.

    Args:
        space: Its observation space.
        length: Steps of its first episode; the next ones are one longer each.
        fails_at: The step that raises; 0: none.
    """

    action_space = Discrete(3)

    def __init__(self, space: gym.Space[Any] = VECTOR, length: int = 4, fails_at: int = 0) -> None:
        self.observation_space = space
        self.length, self.fails_at = length, fails_at
        self.total = 0

    def state(self) -> Any:
        self.observation_space.seed(self.total)
        return self.observation_space.sample()

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        self.count = 0
        self.length += 1
        return self.state(), {}

    def step(self, action: Any) -> Any:
        self.count += 1
        self.total += 1
        if self.total == self.fails_at:
            raise ValueError("too far")
        return self.state(), float(action), self.count >= self.length, action == 2, {}


def endings(space: gym.Space[Any] = VECTOR) -> list[Any]:
    """Return env fns whose episodes end at different times."""
    return [partial(Ending, space, length) for length in range(3, 3 + NUM_ENVS)]


@pytest.fixture
def make() -> Iterator[Callable[..., ParallelEnv]]:
    with ExitStack() as stack:

        def made(*arguments: Any, plans: bool = True, **options: Any) -> ParallelEnv:
            env = stack.enter_context(ParallelEnv(*arguments, **options))
            env.engine.plans_steps = plans
            return env

        yield made


def is_planned(env: ParallelEnv) -> bool:
    """Return whether nothing but planned steps has happened since some step was planned."""
    return any(plan.is_valid() for plan in env.engine.plans.values())


def planned(make: Any, mode: str = PROCESSES, env_fns: Any = None, **options: Any) -> ParallelEnv:
    """Return a `ParallelEnv` whose next step of all envs is planned."""
    options.setdefault("asynchronous", "continue")
    env: ParallelEnv = make(env_fns or [Ending] * NUM_ENVS, mode, num_cpus=2, **options)
    env.reset()
    for _ in range(3):
        env.step(np.zeros(len(env), int))
    assert env.engine.plans
    return env


@pytest.mark.parametrize("asynchronous", DONE_POLICIES)
@pytest.mark.parametrize(
    "space",
    [VECTOR, Box(0, 255, (4, 4, 3), np.uint8), Dict({"a": VECTOR, "b": MultiDiscrete([3, 4])}), Text(5)],
    ids=["vector", "image", "dict", "text"],
)
@WAYS
def test_results_equal_those_without_plans_and_are_the_users_own(
    mode: str, options: Any, space: Any, asynchronous: Any, make: Any
) -> None:
    one = make(endings(space), mode, asynchronous, 2, **options)
    other = make(endings(space), ORACLE, asynchronous, plans=False)
    one.reset()
    other.reset()
    found, expected = AnswerRecord(overwrites=True), AnswerRecord()
    num_planned = 0
    for number in range(80):
        align: Any = "batch" if number // 8 % 2 else "item"  # each has its own plans
        ids = [None, [0, 1, 2], (5, 0), slice(3, 6)][number % 4] if number > 15 else None
        actions = np.full(len(one.engine.ids(ids)), number % 2)
        num_planned += bool(one.engine.plans)
        expected.add(align, other.step(actions, ids, align))
        found.add(align, one.step(actions, ids, align))
        assert_same(one.done, other.done)
        assert_same(one.reset_infos, other.reset_infos)
        if asynchronous != "restart" and other.all_done():
            one.reset()
            other.reset()
    found.assert_equals(expected)
    found.check_unchanged()
    assert one.engine.table.stats.summary() == other.engine.table.stats.summary()
    assert num_planned > 40


def test_views_without_copies_are_read_only(make: Any) -> None:
    env = planned(make, copy=False)
    assert not env.step(ZEROS).states.flags.writeable
    assert is_planned(env)


@LOCAL
@pytest.mark.parametrize(
    ("act", "error"),
    [
        (lambda env: env.pause(2), None),
        (lambda env: env.resume(), None),
        (lambda env: env.reset(), None),
        (lambda env: env.send([0], [1]), errors.EnvBusyError),
        (lambda env: env.load_state(env.save_state()), None),
        (lambda env: env.close(), errors.ClosedError),
        (lambda env: env.restart(1), errors.ResetNeededError),
    ],
    ids=["pause", "resume", "reset", "send", "load_state", "close", "restart"],
)
def test_anything_else_ends_a_plan(act: Any, error: Any, mode: str, make: Any) -> None:
    env = planned(make, mode)
    act(env)
    assert not is_planned(env)
    actions = [0] * len(env.engine.table.unpaused)
    if error is None:
        assert len(env.step(actions).states) == len(actions)
    else:
        with pytest.raises(error):
            env.step(actions)


@LOCAL
def test_wrong_actions_are_refused_and_leave_the_plan_valid_as_do_attributes(mode: str, make: Any) -> None:
    env = planned(make, mode)
    for action in ([0] * (NUM_ENVS - 1), np.zeros((NUM_ENVS, 2), int), ["a"] * NUM_ENVS):
        with pytest.raises(errors.ActionError):
            env.step(action)
    assert env.get_env_attr("total") == [3] * NUM_ENVS
    env.set_env_attr("mark", 1)
    assert is_planned(env)
    assert env.step(ZEROS).rewards.tolist() == ZEROS


@WAYS
def test_failure_of_an_env_keeps_the_results_of_the_others(mode: str, options: Any, make: Any) -> None:
    env = planned(make, mode, [partial(Ending, fails_at=5 * (number == 3)) for number in range(NUM_ENVS)], **options)
    env.step(ZEROS)
    with pytest.raises(ValueError, match="too far") as caught:
        env.step([1] * NUM_ENVS)
    assert caught.value.partial.env_ids.tolist() == [0, 1, 2, 4, 5]  # type: ignore[attr-defined]
    assert env.step([1] * NUM_ENVS).rewards.tolist() == [1.0] * NUM_ENVS
    assert env.get_env_attr("total") == [6] * NUM_ENVS


def test_death_before_a_planned_step_is_an_error(make: Any) -> None:
    env = planned(make, env_fns=[Sleeper] * 4)
    os.kill(env.customized_method("process", id=0)[0], signal.SIGKILL)
    with pytest.raises(errors.WorkerDiedError) as caught:
        env.step([0] * 4)
    assert caught.value.env_ids == (0, 1)


def test_timeout_counts_from_the_call_and_the_result_is_received_later(make: Any) -> None:
    env = planned(make, env_fns=[Sleeper] * 2, timeout=0.1)
    with pytest.raises(errors.WorkerTimeoutError, match="within 0.1 s"):
        env.step([50, 0])
    assert env.recv(2, timeout=10).env_ids.tolist() == [0, 1]
    env.step([0, 0])


def test_another_thread_is_refused_during_a_planned_step(make: Any) -> None:
    env = planned(make, env_fns=[Sleeper] * 2)
    found: list[str] = []

    def intrude() -> None:
        while not env.engine.guard.users:
            pass
        try:
            env.step([0, 0])
        except errors.UsageError as error:
            found.append(str(error))

    thread = threading.Thread(target=intrude)
    thread.start()
    env.step([50, 0])
    thread.join()
    assert [message[:6] for message in found] == ["step()"]
    env.step([0, 0])


@LOCAL
def test_paused_envs_that_rest_are_left_out(mode: str, make: Any) -> None:
    """The envs that are stepped stay the same, those of the result do not."""
    env = make([Ending] * 3, mode, "idle", 2)
    env.reset()
    for _ in range(3):
        env.step([0, 0, 2])  # env 2 ends in the first
    for act, num_envs in ((env.pause, 2), (env.resume, 3)):
        act(2)
        for _ in range(3):
            assert env.step([0] * num_envs).env_ids.tolist() == list(range(num_envs))
            with pytest.raises(errors.ActionError):
                env.step([0] * (5 - num_envs))
            env.reset([0, 1])  # they would end soon


def test_mask_of_bools_is_not_taken_for_ids(make: Any) -> None:
    env = planned(make, env_fns=[Ending] * 2)
    for _ in range(3):
        env.step([0, 0], [1, 0])
    assert env.step([0], [True, False]).env_ids.tolist() == [0]


def test_many_shapes_keep_few_plans(make: Any) -> None:
    env = planned(make, ORACLE, [Ending] * 70)
    for number in range(70):
        for _ in range(2):  # the second one is planned
            env.step([0], [number])
    assert 1 < len(env.engine.plans) <= 64
