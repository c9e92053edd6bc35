"""Wrappers around a whole `ParallelEnv`."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from conftest import MakeEnv
from fragile import GO_ON, RAISE, Fragile
from modes import here_and_in_processes

from parallelenv import ParallelEnv, ParallelWrapper, StateWrapper
from parallelenv.errors import (
    ArgumentError,
    ClosedError,
    NothingInFlightError,
    UsageError,
)
from parallelenv.results import difference
from parallelenv.testing.envs import Counter, Sheet
from parallelenv.wrappers import (
    AnswerWrapper,
    CheckFinite,
    NormalizeRewards,
    NormalizeStates,
    RecordEpisodeStatistics,
    StackStates,
)

ENV_FNS = [partial(Counter, number, 3 + number) for number in range(3)]
ONES = np.ones(3, np.int64)


class Doubled(StateWrapper):
    def process(self, states: Any) -> Any:
        return states * 2.0


class Cheered(ParallelWrapper):
    def step(self, *args: Any, **kwargs: Any) -> Any:
        result = super().step(*args, **kwargs)
        result.rewards[:] += 10
        return result


def rows(result: Any) -> list[Any]:
    """Return a result of either alignment as rows with the env ids in front, in their order."""
    items = result if isinstance(result, list) else zip(*result, strict=True)
    named = zip(result.env_ids.tolist(), items, strict=True)
    return sorted(((env_id, *item) for env_id, item in named), key=lambda row: row[0])


def twice(state: Any) -> Any:
    return None if state is None else state * 2.0


@here_and_in_processes
@pytest.mark.parametrize("asynchronous", [None, "idle", "restart", "continue"])
def test_states_are_processed_in_every_kind_of_call(asynchronous: Any, make_env: MakeEnv) -> None:
    both: list[Any] = [make_env(ENV_FNS, asynchronous=asynchronous) for _ in range(2)]
    both[1] = Doubled(both[1])
    expected, found = (env.reset(seed=1) for env in both)
    assert difference(twice(expected), found) is None
    for step in range(12):
        if step % 3 == 2:
            for env in both:
                env.send(ONES)
        results = [env.recv(3) if step % 3 == 2 else env.step(ONES, align=("item", "batch")[step % 3]) for env in both]
        for (*names, state, reward, done, info), row in zip(*map(rows, results), strict=True):
            if info.get("ended_state") is not None:
                info["ended_state"] = twice(info["ended_state"])
            assert difference((*names, twice(state), reward, done, info), row) is None


@here_and_in_processes
def test_dicts_are_processed(make_env: MakeEnv) -> None:
    class Picture(StateWrapper):
        def process(self, states: Any) -> Any:
            return {"image": states["image"] / 255}

    env_fns = [partial(Sheet, number, 2) for number in range(2)]
    space = gym.spaces.Dict({"image": gym.spaces.Box(0, 1, (2, 3))})
    env = Picture(make_env(env_fns, asynchronous="restart"), space)
    batched: Any = env.observation_space
    assert batched["image"].shape == (2, 2, 3)
    assert env.reset(seed=1).keys() == {"image"}
    actions = env.action_space.sample()
    env.step(actions)
    result = env.step(actions, align="batch")
    assert result[0][0]["image"].shape == (2, 3)
    assert result[0][3]["ended_state"]["image"].shape == (2, 3)


@here_and_in_processes
def test_wrapper_forwards_everything_else(make_env: MakeEnv) -> None:
    inner = make_env(ENV_FNS)
    env = Cheered(Doubled(inner))
    assert env.unwrapped is inner
    assert len(env) == 3
    assert repr(env).startswith("<Cheered around <Doubled around <parallelenv.ParallelEnv of 3 envs")
    assert copy.copy(env).unwrapped is inner
    env.reset(seed=1)
    assert (env.step(ONES).rewards > 5).all()
    assert env.get_env_attr("number") == [0, 1, 2]
    env.pause([1])
    assert env.step(ONES[:2]).env_ids.tolist() == [0, 2]
    with pytest.raises(AttributeError, match="nonsense"):
        env.nonsense  # noqa: B018
    with env:
        pass
    with pytest.raises(ClosedError):
        env.reset()


@pytest.mark.parametrize("call", ["rollout", "to_gymnasium", "to_sb3", "to_tianshou"])
def test_calls_that_bypass_the_wrapper_are_refused(call: str) -> None:
    with ParallelEnv([Counter]) as env, pytest.raises(UsageError, match=rf"{call}\(\) would bypass Cheered"):
        getattr(Cheered(env), call)()


def test_wrapping_anything_but_a_parallel_env_is_refused() -> None:
    with pytest.raises(ArgumentError, match="is not a ParallelEnv"):
        ParallelWrapper(Counter())  # type: ignore[arg-type]
    for kind in (ParallelWrapper, NormalizeStates, RecordEpisodeStatistics):
        with pytest.raises(ArgumentError, match="is not a ParallelEnv"):
            kind(ParallelEnv)  # type: ignore[arg-type]
    with ParallelEnv([Counter]) as env, pytest.raises(UsageError, match="StateWrapper lacks process"):
        StateWrapper(env).reset()


class Fallen(Fragile):
    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        if options:
            raise ZeroDivisionError("at the beginning")
        return super().reset(seed=seed)


class Watching(AnswerWrapper):
    """Records the env ids of the results it has seen."""

    def __init__(self, env: Any) -> None:
        super().__init__(env)
        self.seen: list[tuple[int, ...]] = []

    def on_reset(self, states: Any, env_ids: tuple[int, ...]) -> Any:
        assert len(states) == len(env_ids)
        self.seen.append(env_ids)
        return states

    def on_step(self, result: Any) -> Any:
        self.seen.append(tuple(result.env_ids.tolist()))
        return result


@here_and_in_processes
def test_wrapper_sees_every_result_once(make_env: MakeEnv) -> None:
    env = Watching(Doubled(make_env([partial(Fallen, number) for number in range(3)])))
    env.reset()
    env.reset([2, 0])
    env.pause(1)
    env.reset()
    env.step([GO_ON] * 2, align="batch")
    env.step_async([GO_ON], id=2)
    env.step_wait()
    env.send([GO_ON], id=slice(0, 1))
    env.recv()
    assert env.seen == [(0, 1, 2), (2, 0), (0, 2), (0, 2), (2,), (0,)]


@here_and_in_processes
def test_hooks_do_not_see_envs_that_rest(make_env: MakeEnv) -> None:
    env = Watching(
        Doubled(make_env([partial(Counter, number, 1 + number) for number in range(2)], asynchronous="idle"))
    )
    env.reset(seed=1)
    env.step([1, 1])
    result = env.step([1, 1])
    assert (result.states[0], result.rewards[0], result.infos[0]) == (None, None, {})
    assert result.states[1][:2].tolist() == [2, 4]
    assert (result.dones.tolist(), result.env_ids.tolist()) == ([True, True], [0, 1])
    assert env.step([1, 1], align="batch")[1][0] is None
    assert env.seen == [(0, 1), (0, 1), (1,), ()]


@here_and_in_processes
@pytest.mark.parametrize("align", ["item", "batch"])
def test_partial_results_are_processed_by_wrappers(align: Any, make_env: MakeEnv) -> None:
    env = Watching(Doubled(make_env([partial(Fallen, number) for number in range(3)])))
    with pytest.raises(ZeroDivisionError) as caught:
        env.reset([2, 0, 1], options=[None, {"fall": 1}, None])
    begun: Any = caught.value
    assert begun.partial.tolist() == [[4, 0], [2, 0]]
    env.reset(0)
    with pytest.raises(ZeroDivisionError) as caught:
        env.step([GO_ON, RAISE, GO_ON], align=align)
    left: Any = caught.value
    states = left.partial.states if align == "item" else [item[0] for item in left.partial]
    assert np.stack(states).tolist() == [[0, 2], [4, 2]]
    assert env.seen == [(2, 1), (0,), (0, 2)]
    with pytest.raises(ArgumentError, match="align='rows' is not known"):
        env.step([GO_ON] * 3, align="rows")  # type: ignore[arg-type]
    assert env.get_env_attr("steps") == [1, 1, 1]


@here_and_in_processes
def test_step_wait_is_refused_without_a_step(make_env: MakeEnv) -> None:
    env = Doubled(make_env(ENV_FNS))
    env.reset()
    with pytest.raises(NothingInFlightError):
        env.step_wait()


@here_and_in_processes
def test_observation_spaces_are_those_of_the_wrapper(make_env: MakeEnv) -> None:
    space = gym.spaces.Box(-1, 1, (3,))
    env = Doubled(make_env(ENV_FNS), space)
    assert env.observation_spaces == [space] * 3
    assert Doubled(env).observation_spaces == [space] * 3
    assert Doubled(env.unwrapped).observation_spaces == env.unwrapped.observation_spaces


class Renamed(StateWrapper):
    def process(self, states: Any) -> Any:
        return {"other": states["image"]}


def test_processed_states_that_do_not_match_the_space_are_refused() -> None:
    with CheckFinite(ParallelEnv([Counter])) as env:
        assert env.reset().shape == (1, 3)
    with Cheered(Renamed(ParallelEnv([Sheet]))) as renamed:
        with pytest.raises(
            ArgumentError,
            match=r"do not match its observation_space, Dict.*found \{'other': .*\(dict\).*StateWrapper",
        ) as caught:
            renamed.reset()
        error: Any = caught.value
        assert error.partial.keys() == {"image", "inner", "word"}


@here_and_in_processes
def test_wrapper_around_a_converted_env_is_refused(make_env: MakeEnv) -> None:
    env = Doubled(make_env(ENV_FNS))
    env.unwrapped.to_gymnasium()
    with pytest.raises(UsageError, match=r"in Doubled was handed over by to_gymnasium"):
        env.reset()
    for call in (env.step, env.send, env.step_async):
        with pytest.raises(UsageError, match="another ParallelEnv"):
            call(ONES)


def wrapped(env: Any, stack_size: int = 2) -> RecordEpisodeStatistics:
    stacked = StackStates(NormalizeStates(env), stack_size)
    return RecordEpisodeStatistics(NormalizeRewards(Doubled(stacked)))


@here_and_in_processes
def test_wrappers_continue_identically_after_load_state(make_env: MakeEnv) -> None:
    env = wrapped(make_env(ENV_FNS, asynchronous="restart"))
    env.reset(seed=1)
    env.step(ONES)
    saved = env.save_state()
    expected = [env.step(ONES) for _ in range(6)]
    other = wrapped(make_env(ENV_FNS, asynchronous="restart"))
    for one in (env, other):
        assert one.load_state(saved) == ()
        for step in expected:
            found = one.step(ONES)
            for info in (*step.infos, *found.infos):
                info.get("episode", {}).pop("t", None)
            assert difference(tuple(step), tuple(found)) is None


class Locked(Counter):
    """Has no get_state() and cannot be pickled."""

    def __reduce__(self) -> Any:
        raise TypeError("not me")


def test_saved_state_of_wrappers_names_unsaved_envs() -> None:
    with wrapped(ParallelEnv([Counter, Locked])) as env:
        env.reset(seed=1)
        saved = env.save_state()
        assert saved.unsaved == env.unwrapped.save_state().unsaved == (1,)
        assert env.load_state(saved) == (1,)


@here_and_in_processes
def test_state_of_other_wrappers_is_refused_and_changes_nothing(make_env: MakeEnv) -> None:
    env = wrapped(make_env(ENV_FNS))
    env.reset(seed=1)
    env.step(ONES)
    saved = env.save_state()
    with pytest.raises(ArgumentError, match=r"is of no wrapper \(it is a SavedState\), but RecordEpisodeStatistics"):
        env.load_state(env.unwrapped.save_state())
    with pytest.raises(ArgumentError, match="is of RecordEpisodeStatistics, but StackStates has state of its own"):
        StackStates(env.unwrapped, 2).load_state(saved)
    bares: list[Any] = [env.unwrapped, Doubled(env.unwrapped)]
    for bare in bares:
        with pytest.raises(ArgumentError, match="is of RecordEpisodeStatistics, but this is .*the same wrappers"):
            bare.load_state(saved)
    with pytest.raises(ArgumentError, match="state is a dict. Give the result of save_state"):
        bares[0].load_state({})
    longer = wrapped(env.unwrapped, stack_size=3)
    with pytest.raises(ArgumentError, match="saved state of StackStates has the form .*same arguments"):
        longer.load_state(saved)
    assert Doubled(env.unwrapped).load_state(Doubled(env.unwrapped).save_state()) == ()
