"""Samplers as envs, the methods of task pools, and envs that have no further episode in every kind of call."""

from __future__ import annotations

import os
import pickle
import signal
import threading
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from conftest import MakeEnv, MakePool, needs_ray, require_mode
from gymnasium.utils.env_checker import check_env
from gymnasium.wrappers import TimeLimit
from modes import MODES, ORACLE, PROCESSES, in_modes
from samplers import Walk, Walks
from test_rollout import Count, SubBox

from parallelenv import CLOSE, TERMINATED, ParallelEnv, ParallelWrapper
from parallelenv.engine import recovery
from parallelenv.errors import (
    AbsentAttributeError,
    ArgumentError,
    EnvBusyError,
    EnvContractError,
    ExhaustedError,
    InvalidEnvError,
    ResetNeededError,
    UnpicklableError,
    WorkerDiedError,
)
from parallelenv.tasks.sampler_env import Task, TaskEnv, TaskSampler, TaskStep, make_task_env
from parallelenv.tasks.task_pool import TaskPool
from parallelenv.testing.contract import DONE_POLICIES, assert_same, drain, items
from parallelenv.wrappers import (
    CheckFinite,
    NormalizeStates,
    RecordEpisodeStatistics,
    RecordVideo,
    StackStates,
    StateWrapper,
)

FOUR = [{"total": 9}] * 4
TOTALS = (1, 3, 0, 2)
ONES = np.ones(len(TOTALS), np.int64)
EXHAUSTED = {"exhausted": True}


@pytest.fixture(params=[ORACLE, PROCESSES])
def mode(request: pytest.FixtureRequest) -> str:
    """The modes of a test that names none: messages are pickled in one of them."""
    return require_mode(request.param, request)


def walks(kind: str = "plain", totals: Any = TOTALS) -> list[dict[str, Any]]:
    return [{"total": total, "kind": kind} for total in totals]


def env_fns(kind: str = "plain", totals: Any = TOTALS) -> list[Any]:
    return [partial(make_task_env, Walks, arguments) for arguments in walks(kind, totals)]


def ones(states: Any) -> Any:
    return np.ones(len(states["word"] if isinstance(states, dict) else states), np.int64)


@pytest.fixture(autouse=True)
def _no_delay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recovery, "_FIRST_DELAY", 0.0)


# ---------------------------------------------------------------- a sampler as an env


def test_task_env_is_a_gymnasium_env_of_the_sampler(monkeypatch: pytest.MonkeyPatch) -> None:
    sampler = Walks(99)
    env = TaskEnv(sampler)
    env.reset(seed=3, options={"level": 2})
    env.reset(options={"length": 2})
    assert sampler.asked == [{"level": 2}, {}]
    assert env.step(0)[2:4] == (False, False)
    assert env.step(0)[2:4] == (False, True), "an end that only is_done() reports is a truncation"
    # `check_env` wants new observations in each step, and equal tasks for equal seeds.
    monkeypatch.setattr(Walk, "get_observations", lambda task: np.zeros(3))
    monkeypatch.setattr(sampler, "next_task", lambda: Walk(sampler, 1, 9, 0.0))
    check_env(env, skip_render_check=True)
    env.close()


def test_step_of_a_task_may_return_a_done_flag_but_nothing_else() -> None:
    env: Any = TaskEnv(Walks())
    env.reset()
    for done, info, flags in (
        (False, {}, (False, False)),
        (True, {"a": 1}, (True, False)),
        (True, {"TimeLimit.truncated": True}, (False, True)),
    ):
        for result in (TaskStep(np.zeros(3), 2.0, done, info), (np.zeros(3), 2.0, done, info)):
            env.task.step = lambda action, result=result: result
            assert env.step(0)[1:] == (2.0, *flags, info)
    for wrong in (None, (1, 2, 3), [0, 0.0, False, False, {}]):
        env.task.step = lambda action, wrong=wrong: wrong
        with pytest.raises(TypeError, match=f"Walk returned a {type(wrong).__name__}. Return .*TaskStep"):
            env.step(0)


class Bare(Task):
    """A task that inherits the optional methods."""

    def step(self, action: Any) -> Any: ...

    def is_done(self) -> bool:
        return False

    def get_observations(self) -> Any:
        return 0


class Bares(TaskSampler):
    """A sampler that inherits the optional methods."""

    def next_task(self, **kwargs: Any) -> Any:
        return Bare()

    def reset(self) -> None: ...

    def set_seed(self, seed: int) -> None: ...


def test_tasks_and_samplers_inherit_optional_methods() -> None:
    sampler = Bares()
    env = TaskEnv(sampler)
    env.reset()
    assert env.render() is sampler.length is sampler.observation_space is sampler.action_space is None
    env.close()


def test_task_env_raises_without_a_task() -> None:
    env: gym.Env[Any, Any] = TaskEnv(Walks(1))
    env.reset()
    with pytest.raises(ExhaustedError, match=r"Walks has no further task. Call its reset\(\)"):
        env.reset()
    with pytest.raises(ResetNeededError, match="no task to step"):
        env.step(1)


def test_invalid_samplers_and_tasks_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Walks, "next_task", lambda sampler: 0)
    cases: list[tuple[Any, str]] = [
        (object(), r"sampler is object, which lacks next_task\(\), reset\(\), set_seed\(\)\. A"),
        (Walks, "sampler is the class Walks, which is not an instance"),
        (Walks(), r"next_task\(\) of Walks returned int, which lacks step\(\), is_done"),
    ]
    for sampler, message in cases:
        with pytest.raises(InvalidEnvError, match=message):
            TaskEnv(sampler).reset()


@pytest.mark.parametrize("name", ["render_mode", "metadata", "observation_space", "action_space", "next_task"])
def test_sampler_whose_property_fails_is_not_taken_for_one_without_it(name: str) -> None:
    failing = type("Failing", (Walks,), {name: property(lambda self: self.declard, lambda self, value: None)})
    with pytest.raises(AttributeError, match="no attribute 'declard'"):
        TaskEnv(failing())


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


def test_render_mode_and_metadata_are_those_of_the_sampler() -> None:
    sampler: Any = Walks()
    assert TaskEnv(sampler).metadata == gym.Env.metadata
    assert TaskEnv(sampler).metadata is not gym.Env.metadata
    sampler.render_mode, sampler.metadata = "rgb_array", {"render_modes": ["rgb_array"], "render_fps": 7}
    assert (TaskEnv(sampler).render_mode, TaskEnv(sampler).metadata["render_fps"]) == ("rgb_array", 7)


# ---------------------------------------------------------------- task pools


def test_dicts_without_a_space_are_batched_by_key_if_their_keys_are_equal(make_pool: MakePool) -> None:
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
    env.set_env_attr("sampler.kind", values=["pieces", "sheet", "pieces"])
    states = env.next_task()
    assert states.dtype == object
    assert [set(state) for state in states[:2]] == [{"place", "parts"}, {"place", "word"}]


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


@in_modes(*MODES)
@pytest.mark.parametrize("way", ["steps", "rounds", "rollout"])
def test_tasks_have_the_same_order_in_every_mode(make_pool: MakePool, mode: str, way: str) -> None:
    totals = (25, 1, 40)
    env = make_pool(Walks, [{"total": total} for total in totals], way != "rounds")
    env.reset(seed=3)
    if way == "rollout":
        env.rollout(ones, num_episodes=3 * 50)  # more than there are
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
def test_auto_resample_or_asynchronous_sets_the_done_policy(make_pool: MakePool, auto: bool, done_policy: str) -> None:
    env = make_pool(Walks, [{"total": 9}] * 2, auto)
    assert f"asynchronous={done_policy!r}" in repr(env)
    env.reset(options=[{"length": 1}, {"length": 3}])
    env.step([1, 1])
    assert env.attr("number", id=0) == [2 if auto else 1]
    assert (env.step([1, 1]).states[0] is None) is not auto
    (given,) = env.attr("given", id=0)
    assert env.next_task(0)[0, :2].tolist() == [given + 1, 0]
    with TaskPool(env_fns(totals=(2,)), asynchronous="continue") as other:
        other.next_task(length=1)
        assert [bool(other.step([1]).dones[0]) for _ in range(2)] == [True, True]


def test_next_task_returns_first_states_and_accepts_arguments(make_pool: MakePool) -> None:
    env = make_pool(Walks, FOUR)
    assert env.render() == [None] * 4
    assert_same(env.next_task(), env.get_observations())
    assert env.render(tile=True).shape[-1] == 3
    assert_same(env.reset([]), env.get_observations([]))
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
    assert_same(env.next_task(), first)
    assert env.attr("closed", id=2) == [[1, 1]]


def test_set_seeds_takes_effect_immediately(make_pool: MakePool) -> None:
    env = make_pool(Walks, FOUR)
    env.next_task()
    assert env.set_seeds(3) == [3, 4, 5, 6]
    drawn = env.next_task()[:, 2]
    env.seed(50)  # for the next task, unless it is dropped
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


def test_get_observations_returns_the_dtype_of_the_space(make_pool: MakePool) -> None:
    env = make_pool(Walks, walks("digits", totals=(2, 0, 2)))
    first = env.next_task()
    assert first[0].dtype == np.uint8
    assert_same(first, env.get_observations())
    assert_same(env.reset([2, 0]), env.get_observations([2, 0]))


@pytest.mark.parametrize("seen", [None, 3, "x", np.zeros(5), np.zeros(3, complex)])
def test_observation_contradicting_its_space_raises(make_pool: MakePool, seen: Any) -> None:
    env = make_pool(Walks, FOUR[:3])
    env.next_task()
    env.set_env_attr("task.get_observations", lambda: seen, id=1)
    with pytest.raises(EnvContractError, match="the state is .*, but the observation space is Box") as caught:
        env.get_observations()
    assert "env 1 in get_observations()" in "".join(caught.value.__notes__)
    assert caught.value.partial.keys() == {0, 2}  # type: ignore[attr-defined]
    assert env.get_observations([2, 0]).shape == (2, 3)
    env.next_task(1)
    assert env.step([1, 1, 1]).states.shape == (3, 3)


def test_names_are_looked_up_in_task_and_sampler_through_wrappers(make_pool: MakePool) -> None:
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
    with TaskPool([lambda: TimeLimit(TaskEnv(Walks(9)), 3)]) as wrapped:
        wrapped.next_task(length=9)
        assert wrapped.call("name") == ["walk 1"]
        wrapped.set_env_attr("length", 2)
        assert wrapped.attr("task.length") == [2]
        assert wrapped.get_observations().shape == (1, 3)


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


def test_arguments_errors_and_results_of_make_sampler_fn_are_checked(make_pool: MakePool) -> None:
    with pytest.raises(TypeError, match="unexpected keyword argument 'wrong'"):
        make_pool(Walks, [{}, {"wrong": 1}])
    with pytest.raises(InvalidEnvError, match="sampler is dict, which lacks"):
        make_pool(dict, [{"a": 1}])
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


# ---------------------------------------------------------------- envs without a further episode


def play(env: ParallelEnv, asynchronous: Any) -> list[Any]:
    """Return all results until all envs are exhausted, and those of some calls more."""
    log: list[Any] = [env.reset(seed=7), env.reset_infos]
    env.send_reset()
    log += [drain(env), env.done, env.exhausted, env.reset_infos]
    for step in range(40):
        if step % 3 == 1:
            env.send(ONES)
            log.append(drain(env, max_envs=1))
        else:
            log.append(items(env.step(ONES, align="batch" if step % 3 else "item")))
        log += [env.done, env.exhausted, env.reset_infos]
        if env.all_exhausted():
            break
        if env.all_done() and asynchronous != "restart":
            log += [env.reset(), env.reset_infos]
        elif asynchronous == "continue" and env.has_done():
            log += [env.reset(env.done), env.reset_infos]
    assert env.all_exhausted()
    assert env.all_done()
    log += [list(env.step(ONES)), list(env.step(ONES[:2], id=[2, 0], align="batch")), env.reset(), env.reset(seed=3)]
    for send in (env.send_reset, partial(env.send, ONES)):
        send()
        log += [drain(env), env.exhausted]
    return log


@in_modes(*MODES)
@pytest.mark.parametrize("asynchronous", DONE_POLICIES)
@pytest.mark.parametrize("kind", ["plain", "sheet", "bare"])
def test_every_mode_equals_oracle_until_all_envs_are_exhausted(
    make_env: MakeEnv, mode: str, asynchronous: Any, kind: str
) -> None:
    if needs_ray(mode) and kind == "bare":
        pytest.skip("takes a second each; states without a space use the same code as texts")
    envs = env_fns(kind, totals=(2, 4, 0, 3))
    with ParallelEnv(envs, asynchronous=asynchronous) as oracle:
        expected = play(oracle, asynchronous)
    found = play(make_env(envs, asynchronous=asynchronous, num_cpus=2), asynchronous)
    assert_same(expected, found)


@pytest.mark.parametrize("asynchronous", DONE_POLICIES)
def test_reset_without_further_task_returns_none_and_env_is_skipped(make_env: MakeEnv, asynchronous: Any) -> None:
    env = make_env(env_fns(), asynchronous=asynchronous, num_cpus=2)
    states = env.reset()
    assert [state is None for state in states] == [False, False, True, False]
    assert env.reset_infos == [{}, {}, EXHAUSTED, {}]
    assert env.done.tolist() == env.exhausted.tolist() == [False, False, True, False]
    assert not env.all_exhausted()
    result = env.step(ONES)
    assert (result.states[2], result.rewards[2], result.infos[2]) == (None, None, EXHAUSTED)
    assert (result.dones[2], result.terminated[2], result.truncated[2]) == (True, False, True)
    assert "exhausted" not in result.infos[0]
    assert env.step([1], id=2, align="batch") == [(None, None, True, EXHAUSTED)]
    assert env.reset([2]).tolist() == [None]
    env.reset([2, 0], options={"any": 1})
    assert env.done[2]


@pytest.mark.parametrize("kind", ["plain", "bare"])
def test_final_step_of_the_last_task_returns_full_results(make_pool: MakePool, kind: str) -> None:
    env = make_pool(Walks, walks(kind, totals=(1, 9)))
    env.next_task(length=2)
    env.step([1, 1])
    result = env.step([4, 4])
    assert result.dones.tolist() == [True, True]
    assert result.rewards.tolist() == [5.0, 5.0]  # a float array: no env is absent yet
    # The last state of env 0, and the first of env 1's next episode.
    assert [state[:2].tolist() for state in result.states] == [[1, 2], [2, 0]]
    last, other = result.infos
    assert (last["exhausted"], last["reset"]) == (True, False)
    assert "reset_info" not in last
    assert (other["reset"], "exhausted" in other) == (True, False)
    assert np.array_equal(last["ended_state"], result.states[0])
    last["ended_state"][:] = 99
    assert result.states[0][0] == 1
    assert env.reset_infos == [EXHAUSTED, {}]


@pytest.mark.parametrize("asynchronous", [None, "idle", "continue"])
def test_last_task_without_autoreset_ends_like_any_other(make_env: MakeEnv, asynchronous: Any) -> None:
    env = make_env(env_fns(totals=(1, 9)), asynchronous=asynchronous)
    env.reset(options=[{"length": 1}, {"length": 9}])
    assert "exhausted" not in env.step([1, 1]).infos[0]
    assert not env.exhausted.any()
    env.reset()
    assert env.exhausted.tolist() == [True, False]
    assert env.step([1, 1]).infos.tolist() == [EXHAUSTED, {"walk": 2}]
    if asynchronous is None:  # the end of one episode ends all, but does not exhaust all
        while not env.done[1]:
            env.step([1, 1])
        assert env.step([1, 1]).infos.tolist() == [EXHAUSTED, {}]


class Ending(Count):
    """An env with one episode."""

    has_begun = False

    def reset(self, **kwargs: Any) -> Any:
        if self.has_begun:
            raise ExhaustedError("all were played")
        self.has_begun = True
        return super().reset()

    def step(self, action: Any) -> Any:
        if action == 1:
            raise ExhaustedError("in the middle of a step")
        return super().step(action)


def test_reset_of_any_env_may_raise_exhausted_error(make_env: MakeEnv) -> None:
    env = make_env([partial(Ending, number, length=2) for number in range(2)], asynchronous="restart")
    env.reset()
    with pytest.raises(ExhaustedError, match="in the middle") as caught:
        env.step([0, 1])  # an error in a step is an ordinary failure
    assert caught.value.partial.env_ids.tolist() == [0]  # type: ignore[attr-defined]
    assert not env.exhausted.any()
    assert [info.get("exhausted") for info in env.step([0, 0]).infos] == [True, None]
    env.step([0, 0])
    assert env.all_exhausted()


def test_states_are_an_array_again_where_no_env_is_exhausted(make_pool: MakePool) -> None:
    env = make_pool(Walks, walks(), timeout=20)
    env.next_task(length=9)
    env.pause(2)
    assert env.num_unpaused == 3
    assert env.step(ONES[:3]).states.shape == (3, 3)
    env.resume()
    assert env.num_unpaused == 4
    assert env.step(ONES[:2], id=[3, 0]).states.dtype == np.float64
    env.set_env_attr("total", 2, id=2)
    assert env.next_task(2)[0, :2].tolist() == [1, 0]


# ---------------------------------------------------------------- sent resets and streams


def test_exhausted_env_is_received_without_state_and_reward(make_pool: MakePool) -> None:
    env = make_pool(Walks, walks())
    env.send_reset()
    result = env.recv(min_envs=len(env))
    assert sorted(result.env_ids.tolist()) == [0, 1, 2, 3]
    place = result.env_ids.tolist().index(2)
    row = result.states[place], result.rewards[place], bool(result.dones[place]), result.infos[place]
    assert row == (None, None, True, EXHAUSTED)
    assert all(info["reset"] for info in np.delete(result.infos, place))
    assert env.reset_infos[2] == EXHAUSTED
    env.send_reset(2)
    assert env.get_state() == (TERMINATED, 2)  # no other episode has started, though ended envs are reset


@pytest.mark.parametrize("auto", [True, False])
def test_get_state_and_send_action_until_all_envs_are_exhausted(make_pool: MakePool, auto: bool) -> None:
    env = make_pool(Walks, walks(), auto)
    ends = [0] * len(env)
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
    assert auto or tuple(ends) == TOTALS


def test_stream_ends_when_all_envs_are_exhausted(make_pool: MakePool) -> None:
    env = make_pool(Walks, walks())
    env.next_task(length=2)
    steps = [0] * len(env)
    for env_ids, result in env.stream(ones):
        for row, env_id in enumerate(env_ids.tolist()):
            assert result.states[row] is not None
            steps[env_id] += 1
    assert env.all_exhausted()
    assert steps[2] == 0
    assert all(count >= total for count, total in zip(steps, TOTALS, strict=True))


def test_run_episodes_stops_when_no_tasks_are_left(make_pool: MakePool) -> None:
    env = make_pool(Walks, walks())
    played = env.run_episodes(ones, 8, progress=False)
    assert played.env_ids.tolist() == [0, 1, 1, 3, 3]  # two each, where there are two
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


def test_rebuilt_env_needs_a_reset_and_is_not_exhausted(make_pool: MakePool) -> None:
    env = make_pool(Walks, walks(totals=(0, 0)))
    env.next_task()
    assert env.restart(0) == (0,)
    assert env.exhausted.tolist() == [False, True]
    with pytest.raises(ResetNeededError, match="env 0 has no"):
        env.step([1, 1])


# ---------------------------------------------------------------- rollouts


def test_rollout_of_exhausted_envs_equals_steps(make_pool: MakePool) -> None:
    outside, beside = make_pool(Walks, walks()), make_pool(Walks, walks())
    for env in (outside, beside):
        env.reset(seed=3)
    results = [outside.step(ONES) for _ in range(10)]
    rollout = beside.rollout(ones, 10)
    for step, result in enumerate(results):
        steps = [reward is not None for reward in result.rewards]
        assert rollout.valid[step].tolist() == steps
        assert rollout.rewards[step, steps].tolist() == result.rewards[steps].tolist()
        assert rollout.dones[step, steps].tolist() == result.dones[steps].tolist()
    assert not rollout.valid[:, 2].any()
    assert [info for (_, env_id), info in rollout.reset_infos.items() if env_id == 0] == [EXHAUSTED]
    assert_same([outside.done, outside.exhausted], [beside.done, beside.exhausted])


class EndingBox(Ending):
    observation_space = SubBox(-np.inf, np.inf, (2,), np.float64)


def test_rollout_has_no_final_state_of_an_env_that_never_had_an_episode(make_env: MakeEnv) -> None:
    env = make_env([partial(EndingBox, number) for number in range(2)], asynchronous="restart", num_cpus=2)
    env.set_env_attr("has_begun", True, id=0)
    env.reset()
    absent, state = env.rollout(lambda states: np.zeros(len(states), np.int64), 3).final_states
    assert (absent, state.tolist()) == (None, [1, 3])


def test_rollout_ends_early_if_no_episodes_are_left(make_pool: MakePool) -> None:
    env = make_pool(Walks, walks(totals=(1, 4, 0)), timeout=60)
    env.next_task()
    rollout = env.rollout(ones, num_episodes=8)  # four each, of the two that have any
    assert rollout.env_ids.tolist() == [0, 1, 2]
    assert rollout.dones.sum(axis=0).tolist() == [1, 4, 0]
    assert env.all_exhausted()
    assert len(env.rollout(ones, num_episodes=8)) == 0
    assert not env.rollout(ones, 3).valid.any()


@in_modes(*MODES)
@pytest.mark.parametrize("asynchronous", ["idle", "restart"])
def test_saved_state_includes_exhausted_flags(make_env: MakeEnv, mode: str, asynchronous: Any) -> None:
    env = make_env(env_fns(), asynchronous=asynchronous, num_cpus=2)
    env.reset(seed=5)
    for _ in range(2):
        env.step(ONES)
    state = pickle.loads(pickle.dumps(env.save_state()))
    expected = [*(list(env.step(ONES)) for _ in range(6)), env.exhausted]
    with ParallelEnv(env_fns(), asynchronous=asynchronous) as other:
        assert other.load_state(state) == ()
        assert other.exhausted[2]
        assert_same(expected, [*(list(other.step(ONES)) for _ in range(6)), other.exhausted])


# ---------------------------------------------------------------- failures


class Fleeting(Walks):
    """Has tasks until one crashes; after a rebuild it has none."""

    def __init__(self, folder: str, kind: str) -> None:
        births = Path(folder, "births")
        super().__init__(0 if births.exists() else 3, kind, crash=(1, 2))
        births.touch()


@pytest.mark.parametrize("kind", ["plain", "sheet"])
@pytest.mark.parametrize("auto", [True, False])
def test_rebuilt_sampler_may_have_no_task(make_pool: MakePool, tmp_path: Path, kind: str, auto: bool) -> None:
    env = make_pool(Fleeting, [{"folder": str(tmp_path), "kind": kind}], auto, on_failure="restart")
    env.next_task(length=9)
    env.step([1])
    result = env.step([1])
    assert (result.dones[0], result.truncated[0], str(result.infos[0]["failure"])) == (True, True, "crash")
    assert result.infos[0]["exhausted"] is True
    assert env.all_exhausted()
    assert env.step([1], align="batch") == [(None, None, True, EXHAUSTED)]
    (tmp_path / "births").unlink()
    env = make_pool(Fleeting, [{"folder": str(tmp_path), "kind": kind}], on_failure="restart")
    env.next_task(length=9)
    rollout = env.rollout(ones, 6)
    assert rollout.valid[:, 0].tolist() == [True, True, False, False, False, False]
    assert rollout.truncated[:, 0].tolist() == [False, True, False, False, False, False]
    assert env.all_exhausted()


@in_modes(PROCESSES)
def test_restarted_worker_has_no_state_of_an_exhausted_env(make_pool: MakePool, tmp_path: Path) -> None:
    env = make_pool(Fleeting, [{"folder": str(tmp_path), "kind": "sheet"}], on_failure="restart")
    env.next_task()
    env.set_env_attr("task.step", lambda action: os._exit(3))
    result = env.step([1])
    assert isinstance(result.infos[0]["failure"], WorkerDiedError)
    assert result.infos[0]["exhausted"] is True
    assert result.states["word"] == (None,)
    assert env.all_exhausted()


@in_modes(PROCESSES)
def test_death_of_a_worker_costs_no_sampler_a_task(make_pool: MakePool) -> None:
    env = make_pool(Walks, [{"total": 9}] * 2, on_failure="restart")
    env.next_task()
    os.kill(env.engine.pool.processes[0].pid, signal.SIGKILL)
    env.next_task()
    assert env.attr("number") == [1, 2]
    os.kill(env.engine.pool.processes[0].pid, signal.SIGKILL)
    with pytest.raises(WorkerDiedError):
        env.attr("number")
    env.next_task()
    assert env.attr("number") == [1, 3]


def test_rebuilt_sampler_starts_with_its_first_task_and_the_seeds_that_were_set(make_pool: MakePool) -> None:
    drawn = []
    for _ in range(2):
        env = make_pool(Walks, [{"total": 3, "crash": (2, 1)}] * 2, on_failure="restart", max_restarts=2)
        env.set_seeds([11, 12])
        env.next_task(length=1)
        env.step([1, 1])
        assert env.attr("number") == [2, 2]
        result = env.step([1, 1])
        assert [str(info["failure"]) for info in result.infos] == ["crash"] * 2
        assert env.attr("number") == [1, 1]
        drawn.append(result.states[:, 2])
    assert_same(*drawn)
    assert drawn[0][0] != drawn[0][1]


class Drawn(Walks):
    render_mode = "rgb_array"


def test_films_show_exhausted_envs_as_black(make_pool: MakePool, tmp_path: Path) -> None:
    arguments = [{"total": 1}, {"total": 9}]
    film = make_pool(Drawn, arguments, True).record(lambda states: [1] * len(states), 6, progress=False)
    assert film.num_frames == 7
    env = RecordVideo(make_pool(Drawn, arguments, True), tmp_path, video_length=6)
    env.reset()
    for _ in range(6):
        env.step([1, 1])
    assert len(env.paths) == 1


# ---------------------------------------------------------------- wrappers


class Doubled(StateWrapper):
    def process(self, states: Any) -> Any:
        return states * 2


def test_wrappers_process_only_envs_that_have_a_state(make_pool: MakePool) -> None:
    doubled = Doubled(RecordEpisodeStatistics(make_pool(Walks, walks())))
    states = doubled.next_task(length=2)
    assert [None if state is None else state[0] for state in states] == [2, 2, None, 2]
    seen = doubled.get_observations()
    assert [None if state is None else state[0] for state in seen] == [2, 2, None, 2]
    assert doubled.get_observations([3, 1])[:, 0].tolist() == [2, 2]
    doubled.step(ONES)
    infos = doubled.step(ONES).infos
    assert [info.get("episode", {}).get("l") for info in infos] == [2, 2, None, 2]
    assert infos[0]["ended_state"][:2].tolist() == [2, 4]
    assert doubled.step(ONES).states[0] is None
    while not doubled.all_exhausted():
        doubled.step(ONES)
    assert doubled.next_task().tolist() == [None] * 4


def test_normalize_and_stack_wrappers_ignore_exhausted_envs(make_pool: MakePool) -> None:
    normalized = NormalizeStates(CheckFinite(make_pool(Walks, walks(totals=(0, 9)))))
    assert normalized.next_task()[0] is None
    assert normalized.statistics.count == 1
    normalized.step([np.nan, 1])  # the action of an exhausted env is ignored
    assert normalized.statistics.count == 2
    stacked = StackStates(make_pool(Walks, walks(totals=(0, 9))), 2)
    assert stacked.next_task()[1][:, 1].tolist() == [0, 0]
    assert stacked.step([1, 1]).states[1][:, 1].tolist() == [0, 1]
