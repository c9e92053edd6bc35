"""Samplers as envs, and the methods of task pools."""

from __future__ import annotations

import math
import threading
from functools import partial
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from conftest import MakePool
from gymnasium.utils.env_checker import check_env
from gymnasium.wrappers import TimeLimit
from modes import here_and_in_processes
from samplers import PLAIN, Walk, Walks

from parallelenv import ParallelEnv, ParallelWrapper
from parallelenv.errors import (
    AbsentAttributeError,
    ArgumentError,
    EnvBusyError,
    EnvContractError,
    InvalidEnvError,
    ResetNeededError,
    UnpicklableError,
)
from parallelenv.results import difference
from parallelenv.tasks.sampler_env import Task, TaskEnv, TaskSampler, TaskStep
from parallelenv.tasks.task_pool import TaskPool
from parallelenv.wrappers import CheckFinite, StackStates

FOUR = [{"total": 9}] * 4


# ---------------------------------------------------------------- a sampler as an env


class Count(Task):
    """A task that inherits the optional methods."""

    def __init__(self) -> None:
        self.count = 0

    def step(self, action: Any) -> Any:
        self.count += 1
        return self.get_observations(), 1.0, False, False, {}

    def is_done(self) -> bool:
        return self.count >= 2

    def get_observations(self) -> Any:
        return np.full(3, float(self.count))


class Counts(TaskSampler):
    """A sampler of equal tasks without end that inherits the optional methods and records its calls."""

    observation_space = PLAIN
    action_space = gym.spaces.Discrete(2)

    def __init__(self, make_task: Any = Count) -> None:
        self.make_task = make_task
        self.log: list[Any] = []

    def next_task(self, **kwargs: Any) -> Any:
        self.log.append(kwargs)
        return self.make_task()

    def reset(self) -> None:
        self.log.append("reset")

    def set_seed(self, seed: int) -> None:
        self.log.append(seed)


def test_task_env_is_a_gymnasium_env_of_the_sampler() -> None:
    sampler = Counts()
    env = TaskEnv(sampler)
    env.reset(seed=3, options={"level": 2})
    env.reset()
    assert sampler.log == [3, {"level": 2}, {}]
    assert sampler.length is None
    assert env.render() is None
    assert env.step(0)[2:4] == (False, False)
    assert env.step(0)[2:4] == (False, True), "an end that only is_done() reports is a truncation"
    check_env(env, skip_render_check=True)
    env.close()


@pytest.mark.parametrize("kind", [TaskStep, lambda *items: items])
@pytest.mark.parametrize(
    ("done", "info", "flags"),
    [
        (False, {}, (False, False)),
        (True, {"a": 1}, (True, False)),
        (True, {"TimeLimit.truncated": True}, (False, True)),
    ],
)
def test_done_flag_is_split_into_terminated_and_truncated(kind: Any, done: bool, info: Any, flags: Any) -> None:
    class Told(Count):
        def step(self, action: Any) -> Any:
            return kind(np.zeros(3), 2.0, done, info)

    env = TaskEnv(Counts(Told))
    env.reset()
    _, reward, terminated, truncated, found = env.step(0)
    assert (reward, (terminated, truncated), found) == (2.0, flags, info)


@pytest.mark.parametrize("returned", [None, (1, 2, 3), [0, 0.0, False, False, {}]])
def test_invalid_step_results_of_a_task_raise(returned: Any) -> None:
    class Odd(Count):
        def step(self, action: Any) -> Any:
            return returned

    env = TaskEnv(Counts(Odd))
    env.reset()
    with pytest.raises(TypeError, match=f"Odd returned a {type(returned).__name__}. Return .*TaskStep"):
        env.step(0)


def test_invalid_samplers_and_tasks_are_refused() -> None:
    cases: list[tuple[Any, str]] = [
        (Count(), r"sampler is Count, which lacks next_task\(\), reset\(\), set_seed\(\)\. A"),
        (Counts, "sampler is the class Counts, which is not an instance"),
        (Counts(int), r"next_task\(\) of Counts returned int, which lacks step\(\), is_done"),
    ]
    for sampler, message in cases:
        with pytest.raises(InvalidEnvError, match=message):
            TaskEnv(sampler).reset()


def test_each_task_is_closed_before_the_next_and_the_sampler_last(monkeypatch: pytest.MonkeyPatch) -> None:
    log: list[Any] = []
    env = TaskEnv(Walks(3, log=log))
    env.reset()
    env.reset()
    assert env.sampler.closed == [1]  # type: ignore[attr-defined]
    assert env.render().shape == (2, 3, 3)
    monkeypatch.setattr(Walk, "close", lambda task: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        env.close()
    assert log == [[1, "sampler"]]


def test_dicts_without_a_space_are_batched_by_key(make_pool: MakePool) -> None:
    env = make_pool(Walks, [{"kind": "pieces", "total": 9}] * 3)
    first = env.next_task(length=4)
    assert first["place"].shape == (3, 3)
    assert env.get_observations([2, 0])["parts"]["count"].tolist() == [0, 0]
    assert env.step([1, 1, 1]).states["parts"]["count"].tolist() == [1, 1, 1]
    assert env.step([1, 1, 1], align="batch")[1][0]["parts"] == {"count": 2}
    seen: list[Any] = []

    def act(states: Any) -> list[int]:
        seen.append(states["parts"]["count"].tolist())
        return [1] * len(states["place"])

    list(env.stream(act, 3, min_envs=3))
    assert seen == [[2, 2, 2]]
    env.set_env_attr("task.place", np.full(3, np.nan), 1)
    with pytest.raises(EnvContractError, match="state of env 1"):
        CheckFinite(env).step([1, 1, 1], align="batch")


@here_and_in_processes
def test_dict_states_with_different_keys_stay_objects(make_pool: MakePool) -> None:
    class Odd(Walks):
        def next_task(self, length: int | None = None, **kwargs: Any) -> Any:
            self.kind = "pieces" if self.total == 1 else "sheet"
            return super().next_task(**kwargs)

    env = make_pool(Odd, [{"kind": "bare", "total": 1}, {"kind": "bare", "total": 2}])
    states = env.next_task()
    assert states.dtype == object
    assert [set(state) for state in states] == [{"place", "parts"}, {"place", "word"}]


def test_render_mode_and_metadata_are_those_of_the_sampler() -> None:
    class Drawn(Counts):
        render_mode = "rgb_array"
        metadata = {"render_modes": ["rgb_array"], "render_fps": 7}  # noqa: RUF012

    env = TaskEnv(Drawn())
    assert (env.render_mode, env.metadata["render_fps"]) == ("rgb_array", 7)
    assert TaskEnv(Counts()).metadata == gym.Env.metadata
    assert TaskEnv(Counts()).metadata is not gym.Env.metadata


# ---------------------------------------------------------------- task pools


def test_samplers_are_made_in_workers_and_share_nothing(make_pool: MakePool) -> None:
    shared = {"total": 3, "log": []}
    env = make_pool(Walks, [shared, shared])
    assert type(env) is TaskPool
    env.next_task()
    env.set_env_attr("total", 7, id=0)
    env.call("sampler.log.append", [["mine"]], id=0)
    assert env.attr("sampler.log") == [["mine"], []]
    assert env.attr("total") == [7, 3]
    assert shared == {"total": 3, "log": []}
    assert env.restart(0) == (0,)
    assert env.attr("sampler.log", id=0) == [[]]


@pytest.mark.parametrize("way", ["steps", "rounds", "rollout"])
def test_tasks_have_the_same_order_in_every_mode(make_pool: MakePool, way: str) -> None:
    totals = (25, 1, 40)
    env = make_pool(Walks, [{"total": total} for total in totals], way != "rounds")
    env.reset(seed=3)
    if way == "rollout":
        env.rollout(lambda states: np.ones(len(states), int), num_episodes=3 * 50)  # more than there are
    while not env.all_exhausted():
        env.step([1] * len(env))
        if way == "rounds" and env.all_done():
            env.next_task()
    for tasks, total, seed in zip(env.attr("sampler.tasks"), totals, (3, 4, 5), strict=True):
        alone = Walks(total)
        alone.set_seed(seed)
        while alone.next_task() is not None:
            pass
        assert tasks == alone.tasks
        assert len(tasks) == total


@pytest.mark.parametrize(("auto", "done_policy"), [(True, "restart"), (False, "idle")])
def test_auto_resample_sets_the_done_policy(make_pool: MakePool, auto: bool, done_policy: str) -> None:
    env = make_pool(Walks, [{"total": 9}] * 2, auto)
    assert f"asynchronous={done_policy!r}" in repr(env)
    env.reset(options=[{"length": 1}, {"length": 3}])
    env.step([1, 1])
    assert env.attr("number", id=0) == [2 if auto else 1]
    assert (env.step([1, 1]).states[0] is None) is not auto
    (given,) = env.attr("given", id=0)
    assert env.next_task(0)[0, :2].tolist() == [given + 1, 0]


def test_next_task_returns_first_states_and_accepts_arguments(make_pool: MakePool) -> None:
    env = make_pool(Walks, FOUR)
    assert difference(env.next_task(), env.get_observations()) is None
    assert difference(env.reset([]), env.get_observations([])) is None
    states = env.next_task([3, 1], length=1, other=(2, 3))
    assert states[:, :2].tolist() == [[2, 0], [2, 0]]
    assert env.attr("asked", id=[1, 0]) == [[{}, {"other": (2, 3)}], [{}]]
    assert env.attr("length", id=3) == [1]  # of the task, which comes before the sampler
    assert env.attr("sampler.length", id=3) == [9]


def test_reset_all_restarts_tasks_but_not_random_numbers(make_pool: MakePool) -> None:
    env = make_pool(Walks, FOUR)
    first = env.reset(seed=3, options={"length": 9})
    env.pause(0)
    env.send([1, 1, 1])
    env.reset_all()
    with pytest.raises(ResetNeededError, match=r"envs \[1, 2, 3\]"):
        env.step([1, 1, 1])
    env.resume()
    again = env.next_task()
    assert again[:, 0].tolist() == [1, 1, 1, 1]
    assert not np.array_equal(again[:, 2], first[:, 2])
    env.reset_all()
    env.set_seeds([3, 4, 5, 6])
    assert difference(env.next_task(), first) is None
    assert env.attr("closed", id=2) == [[1, 1]]


def test_set_seeds_takes_effect_immediately(make_pool: MakePool) -> None:
    env = make_pool(Walks, FOUR)
    env.next_task()
    assert env.set_seeds(3) == [3, 4, 5, 6]
    drawn = env.next_task()[:, 2]
    assert env.set_seeds([5, None, 3, None]) == [5, None, 3, None]
    again = env.next_task()[:, 2]
    assert (again[2], again[0]) == (drawn[0], drawn[2])
    assert again[1] not in drawn
    with pytest.raises(ArgumentError, match="2 seeds were given for 4 envs"):
        env.set_seeds([1, 2])


def test_get_observations_returns_current_observations(make_pool: MakePool) -> None:
    env = make_pool(Walks, [{"total": total, "kind": "sheet"} for total in (2, 0, 2)])
    with pytest.raises(ResetNeededError, match=r"envs \[0, 1, 2\]"):
        env.get_observations()
    env.next_task(length=5)
    env.step([1, 1, 1])
    env.set_env_attr("count", 3, id=2)  # of the task
    seen = env.get_observations()
    assert (seen[0]["word"], seen[1], seen[2]["word"]) == ("ab", None, "abcd")
    batch = env.get_observations([2, 0])
    assert batch["word"] == ("abcd", "ab")
    assert batch["place"].shape == (2, 3)
    batch["place"][:] = 99
    assert env.get_observations(0)["place"][0].tolist()[:2] == [1, 1]
    env.send([1], id=0)
    with pytest.raises(EnvBusyError, match=r"envs \[0\]"):
        env.get_observations()
    env.recv()


class Shows(Count):
    """Returns a given observation after its first step."""

    seen: Any = None

    def step(self, action: Any) -> Any:
        self.count = 1
        return np.zeros(3), 1.0, False, False, {}

    def get_observations(self) -> Any:
        return self.seen if self.count else np.zeros(3)


@here_and_in_processes
@pytest.mark.parametrize("seen", [None, 3, "x", np.zeros(5), np.zeros(3, complex)])
def test_observation_contradicting_its_space_raises(make_pool: MakePool, seen: Any) -> None:
    env = make_pool(partial(Counts, Shows), [{}] * 3)
    env.next_task()
    env.step([1], id=1)
    env.set_env_attr("seen", values=[seen] * 3)
    with pytest.raises(EnvContractError, match="the state is .*, but the observation space is Box") as caught:
        env.get_observations()
    assert "env 1 in get_observations()" in "".join(caught.value.__notes__)
    assert caught.value.partial.keys() == {0, 2}  # type: ignore[attr-defined]
    assert env.get_observations([2, 0]).shape == (2, 3)
    assert env.step([1, 1, 1]).states.shape == (3, 3)


@here_and_in_processes
def test_names_are_looked_up_in_task_and_sampler(make_pool: MakePool) -> None:
    env = make_pool(Walks, FOUR)
    assert env.get_env_attr("given", id=0) == [0]
    env.next_task()
    assert env.customized_method("name", {"mark": "!"}) == ["walk 1!"] * 4
    env.set_env_attr("count", 2)
    env.set_env_attr("given", 7)
    assert env.attr("task.count") == env.get_env_attr("count") == [2] * 4
    assert env.next_task()[:, 0].tolist() == [8] * 4
    message = "TaskEnv has no method 'nothing'.*Neither has its sampler, Walks, or its task"
    with pytest.raises(AbsentAttributeError, match=message):
        env.call("nothing")


class Rewinds(Counts):
    def rewind(self) -> str:
        return "of the sampler"


def test_wrappers_and_task_env_do_not_hide_names_of_task_and_sampler() -> None:
    with TaskPool([lambda: TimeLimit(TaskEnv(Walks(9)), 3), lambda: TaskEnv(Rewinds())]) as env:
        env.next_task(length=9)
        assert env.call("rewind", id=1) == ["of the sampler"]
        assert env.call("name", id=0) == ["walk 1"]
        env.set_env_attr("length", 2, id=0)
        assert env.attr("task.length", id=0) == [2]
        assert env.get_observations([0]).shape == (1, 3)


@here_and_in_processes
def test_task_pool_supports_render(make_pool: MakePool) -> None:
    env = make_pool(Walks, [{"total": math.inf}] * 2)
    assert env.render() == [None, None]
    env.next_task()
    assert env.render(tile=True).shape[-1] == 3


@here_and_in_processes
def test_rebuilt_sampler_uses_the_seeds_that_were_set(make_pool: MakePool) -> None:
    drawn = []
    for _ in range(2):
        env = make_pool(Walks, [{"total": 9, "crash": (1, 1)}] * 2, on_failure="restart")
        env.set_seeds([11, 12])
        env.next_task()
        drawn.append(env.step([1, 1]).states[:, 2])
    assert difference(*drawn) is None
    assert drawn[0][0] != drawn[0][1]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"make_sampler_fn": 3}, "make_sampler_fn=3 cannot be called"),
        ({"sampler_fn_args": {"total": 3}}, "sampler_fn_args={'total': 3} is not a list. Give a list with a dict"),
        ({"sampler_fn_args": "ab"}, "is not a list"),
        ({"sampler_fn_args": 4}, "sampler_fn_args=4 is not a list"),
        ({"sampler_fn_args": []}, "sampler_fn_args is empty"),
        ({"sampler_fn_args": [{}, 3]}, r"sampler_fn_args\[1\] is 3, not a dict"),
        ({"sampler_fn_args": [{1: 2}]}, r"sampler_fn_args\[0\] is {1: 2}, not a dict"),
        ({"auto_resample_when_done": "no"}, "auto_resample_when_done='no' must be True or False"),
        ({"asynchronous": "idle"}, "asynchronous='idle' was given.*auto_resample_when_done"),
    ],
)
def test_invalid_arguments_are_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        ParallelEnv.from_samplers(**{"make_sampler_fn": Walks, "sampler_fn_args": [{}], **arguments})


@here_and_in_processes
def test_errors_and_results_of_make_sampler_fn_are_checked(make_pool: MakePool) -> None:
    with pytest.raises(TypeError, match="unexpected keyword argument 'wrong'"):
        make_pool(Walks, [{}, {"wrong": 1}])
    with pytest.raises(InvalidEnvError, match="sampler is dict, which lacks"):
        make_pool(dict, [{"a": 1}])


def test_unpicklable_task_arguments_raise_in_every_mode(make_pool: MakePool) -> None:
    with pytest.raises(UnpicklableError, match="cannot pickle '_thread.lock' object.*(make_sampler_fn|env fn) "):
        make_pool(Walks, [{"log": threading.Lock()}])


def test_wrapper_has_task_methods_only_around_a_task_pool(make_pool: MakePool) -> None:
    with ParallelEnv(["CartPole-v1"]) as env:
        with pytest.raises(AttributeError, match="has no next_task"):
            ParallelWrapper(env).next_task()
        with pytest.raises(AttributeError, match="get_observations"):
            ParallelWrapper(env).get_observations()
    stacked = StackStates(make_pool(Walks, FOUR), 2)
    assert stacked.next_task(length=2).shape == (4, 2, 3)
    with pytest.raises(RuntimeError, match=r"get_observations\(\) would bypass StackStates"):
        stacked.get_observations()
