"""The base classes of wrappers, stacked wrappers, and their saved states."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from conftest import MakeEnv
from fragile import EXIT, GO_ON, RAISE, Fragile
from modes import ORACLE, PROCESSES, in_modes

from parallelenv import ParallelEnv, ParallelWrapper, StateWrapper
from parallelenv.errors import ArgumentError, ClosedError, ResetNeededError, UsageError, WorkerDiedError
from parallelenv.results import difference
from parallelenv.testing.contract import DONE_POLICIES, KINDS, Actions
from parallelenv.testing.envs import Counter, FailingEnv, Pair, Sheet, TroubleError
from parallelenv.wrappers import (
    CheckFinite,
    NormalizeRewards,
    NormalizeStates,
    RecordEpisodeStatistics,
    StackStates,
)
from wrappers.envs import Reporting

ENV_FNS = [partial(Counter, number, 3 + number) for number in range(3)]
ONES = np.ones(3, np.int64)


def twice(states: Any) -> Any:
    """Return states of any number of envs with all numbers doubled, without the other parts."""
    if isinstance(states, dict):
        return {"image": states["image"] * 2.0}
    return None if states is None else states * 2.0


class Doubled(StateWrapper):
    def process(self, states: Any) -> Any:
        return twice(states)


class Same(StateWrapper):
    """Returns the states, but ``second`` in its second call, or raises it."""

    def __init__(self, env: Any, *second: Any) -> None:
        super().__init__(env)
        self.calls, self.second = 0, second

    def process(self, states: Any) -> Any:
        self.calls += 1
        answer = self.second[0] if self.second and self.calls == 2 else states
        if isinstance(answer, BaseException):
            raise answer
        return answer


class Largest(StateWrapper):
    """Returns the largest number of each state. It cannot process an empty batch."""

    def __init__(self, env: Any) -> None:
        super().__init__(env, gym.spaces.Box(-np.inf, np.inf, (), np.float64))

    def process(self, states: Any) -> Any:
        return np.stack([np.float64(state.max()) for state in states])


class Watching(ParallelWrapper):
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


# ---------------------------------------------------------------- results


def rows(result: Any) -> list[Any]:
    """Return a result of either alignment as rows with the env ids in front, in their order."""
    items = result if isinstance(result, list) else zip(*result, strict=True)
    named = zip(result.env_ids.tolist(), items, strict=True)
    return sorted(((env_id, *item) for env_id, item in named), key=lambda row: row[0])


@pytest.mark.parametrize("asynchronous", DONE_POLICIES)
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


def test_dicts_are_processed(make_env: MakeEnv) -> None:
    space = gym.spaces.Dict({"image": gym.spaces.Box(0, 510, (2, 3))})
    env = Doubled(make_env([partial(Sheet, number, 2) for number in range(2)], asynchronous="restart"), space)
    assert env.observation_space == gym.vector.utils.batch_space(space, 2)
    assert env.reset(seed=1).keys() == {"image"}
    actions = env.action_space.sample()
    env.step(actions)
    result = env.step(actions, align="batch")
    assert result[0][0]["image"].shape == (2, 3)
    assert result[0][3]["ended_state"]["image"].shape == (2, 3)


@pytest.mark.parametrize("kind", ["dict", "tuple", "text", "sequence", "graph", "old", "ragged", "mixed"])
@pytest.mark.parametrize(
    ("mode", "asynchronous"),
    [*((ORACLE, policy) for policy in DONE_POLICIES), (PROCESSES, "restart")],
    indirect=["mode"],
)
@pytest.mark.parametrize("copy", [True, False])
def test_states_of_every_kind_pass_unchanged(kind: str, asynchronous: Any, copy: bool, make_env: MakeEnv) -> None:
    plain, *wrapped = (make_env(KINDS[kind](), asynchronous=asynchronous, copy=copy) for _ in range(3))
    actions = Actions(plain, 1).draw(range(5))
    for env in (Same(wrapped[0]), Same(CheckFinite(wrapped[1]))):
        assert difference(plain.reset(seed=1), env.reset(seed=1)) is None
        for align in ("item", "batch", "item", "item", "batch"):  # the shortest episode has three steps
            expected, found = plain.step(actions, align=align), env.step(actions, align=align)
            assert difference(list(expected), list(found)) is None


@pytest.mark.parametrize("kind", [Largest, NormalizeStates, partial(StackStates, stack_size=2)])
def test_batch_without_envs_has_the_form_of_processed_states(kind: Any, make_env: MakeEnv) -> None:
    env = kind(make_env([partial(Fragile, number) for number in range(3)], asynchronous="continue"))
    env.reset()
    states = env.step([GO_ON] * 3).states
    expected = states.copy()
    states[env.done] = env.reset(id=env.done)  # no episode has ended
    assert difference(expected, states) is None
    for empty in (env.reset(id=[]), env.step([], id=[]).states):
        assert difference(states[:0], empty) is None


class OwnBox(gym.spaces.Box):
    """A space of an unknown class."""


class Listed(gym.Env[Any, Any]):
    """Its states are lists of ints, and each step ends an episode."""

    observation_space, action_space = OwnBox(0, 255, (2,), np.uint8), gym.spaces.Discrete(2)

    def reset(self, **_: Any) -> Any:
        return [0, 1], {}

    def step(self, action: Any) -> Any:
        return [2, 255], 0.0, True, False, {}


def test_ended_states_are_cast_like_states(make_env: MakeEnv) -> None:
    env = Same(make_env([Listed] * 2, asynchronous="restart"))
    env.reset()
    result = env.step([0, 0])
    for states in (result.states, result.infos[1]["ended_state"]):
        assert states.dtype == np.uint8
    assert result.infos[1]["ended_state"].tolist() == [2, 255]


def test_wrapper_sees_every_result_once(make_env: MakeEnv) -> None:
    env = Watching(Doubled(make_env(ENV_FNS)))
    env.reset()
    env.reset([2, 0])
    env.pause(1)
    env.reset()
    env.step([0] * 2, align="batch")
    env.step_async([0], id=2)
    env.step_wait()
    env.send([0], id=slice(0, 1))
    env.recv()
    assert env.seen == [(0, 1, 2), (2, 0), (0, 2), (0, 2), (2,), (0,)]


def test_hooks_do_not_see_envs_that_rest(make_env: MakeEnv) -> None:
    env_fns = [partial(Counter, number, 1 + number) for number in range(2)]
    env = Watching(Doubled(make_env(env_fns, asynchronous="idle")))
    env.reset(seed=1)
    env.step([1, 1])
    result = env.step([1, 1])
    assert (result.states[0], result.rewards[0], result.infos[0]) == (None, None, {})
    assert result.states[1][:2].tolist() == [2, 4]
    assert (result.dones.tolist(), result.env_ids.tolist()) == ([True, True], [0, 1])
    assert env.step([1, 1], align="batch")[1][0] is None
    assert env.seen == [(0, 1), (0, 1), (1,), ()]


# ---------------------------------------------------------------- infos with the library's own keys


@pytest.mark.parametrize("asynchronous", ["restart", "continue"])
def test_keys_of_an_env_do_not_count_as_facts(asynchronous: Any, make_env: MakeEnv) -> None:
    stacks = StackStates(make_env([Reporting] * 2, asynchronous=asynchronous), 3)
    rewards = NormalizeRewards(make_env([Reporting] * 2, asynchronous=asynchronous))
    episodes = RecordEpisodeStatistics(make_env([Reporting] * 2, asynchronous=asynchronous), stats_key="own")
    for env in (stacks, rewards, episodes):
        env.reset()
    for _ in range(3):
        result = stacks.step([1, 1])
        rewards.step([1, 1])
        episodes.step([1, 1])
    last = result.states if asynchronous == "continue" else [info["ended_state"] for info in result.infos]
    assert np.ravel(last).tolist() == [1, 2, 3] * 2
    assert rewards.statistics.count == 6
    assert list(episodes.length_queue) == [3, 3]


# ---------------------------------------------------------------- everything else


class LastWords(ParallelWrapper):
    """Overrides a method, with fewer arguments."""

    def close(self) -> None:  # type: ignore[override]
        super().close()


def test_wrapper_forwards_everything_else(make_env: MakeEnv) -> None:
    inner = make_env(ENV_FNS)
    space = gym.spaces.Box(-1, 1, (3,))
    env = ParallelWrapper(Doubled(inner, space))
    assert env.unwrapped is copy.copy(env).unwrapped is inner
    assert len(env) == 3
    assert repr(env).startswith("<ParallelWrapper around <Doubled around <parallelenv.ParallelEnv of 3 envs")
    assert env.observation_spaces == Doubled(env).observation_spaces == [space] * 3
    assert Doubled(inner).observation_spaces == inner.observation_spaces
    env.reset(seed=1)
    env.pause([1])
    assert env.step(ONES[:2]).env_ids.tolist() == [0, 2]
    assert env.get_env_attr("number") == [0, 2]
    with pytest.raises(AttributeError, match="nonsense"):
        env.nonsense  # noqa: B018
    with pytest.raises(ArgumentError, match=r"timeout=-1 must be .* Nothing was closed"):
        env.close(-1)
    with ParallelWrapper(LastWords(env)):
        pass
    with pytest.raises(ClosedError):
        env.reset()


@pytest.mark.parametrize("call", ["rollout", "to_gymnasium", "to_sb3", "to_tianshou"])
def test_calls_that_bypass_the_wrapper_are_refused(call: str) -> None:
    with ParallelEnv([Counter]) as env, pytest.raises(UsageError, match=rf"{call}.* bypass Doubled.*reset them"):
        getattr(Doubled(env), call)()


def test_wrapping_anything_but_a_parallel_env_is_refused() -> None:
    for kind in (ParallelWrapper, NormalizeStates, RecordEpisodeStatistics):
        for wrong in (ParallelEnv, Counter()):
            with pytest.raises(ArgumentError, match="is not a ParallelEnv"):
                kind(wrong)  # type: ignore[arg-type]
    with ParallelEnv([Counter]) as env, pytest.raises(UsageError, match="StateWrapper lacks process"):
        StateWrapper(env).reset()


def test_wrapper_around_a_converted_env_is_refused(make_env: MakeEnv) -> None:
    env = Doubled(make_env(ENV_FNS))
    env.unwrapped.to_gymnasium()
    for call in (lambda actions: env.reset(), env.step, env.send, env.step_async):
        with pytest.raises(UsageError, match=r"in Doubled was handed over by to_gymnasium.*another ParallelEnv"):
            call(ONES)


# ---------------------------------------------------------------- errors


@pytest.mark.parametrize("align", ["item", "batch"])
def test_partial_results_are_processed_by_wrappers(align: Any, make_env: MakeEnv) -> None:
    failing = [partial(FailingEnv, number, where) for number, where in enumerate(("step", "reset", ""))]
    env = Watching(Doubled(make_env(failing)))
    with pytest.raises(TroubleError) as caught:
        env.reset([2, 1, 0])
    begun: Any = caught.value
    assert begun.partial[:, :2].tolist() == [[4, 0], [0, 0]]
    env.reset(1)
    env.step(ONES)
    with pytest.raises(TroubleError) as caught:
        env.step(ONES, align=align)
    left: Any = caught.value
    states = left.partial.states if align == "item" else [item[0] for item in left.partial]
    assert np.stack(states)[:, :2].tolist() == [[2, 4], [4, 4]]
    assert env.seen == [(2, 0), (1,), (0, 1, 2), (1, 2)]
    with pytest.raises(ArgumentError, match="align='rows' is not known"):
        env.step(ONES, align="rows")  # type: ignore[arg-type]
    assert env.get_env_attr("count") == [2, 2, 2]


@pytest.mark.parametrize(
    ("kind", "answer", "message"),
    [
        (Counter, None, r"must have a row for each of 2 envs; found None \(NoneType\)"),
        (Counter, 5.0, r"must have a row for each of 2 envs; found 5\.0 \(float\)"),
        (Counter, "ab", r"must have a row for each of 2 envs; found 'ab' \(str\)"),
        (Counter, np.array(1.0), r"found .*of shape \(\) and dtype float64"),
        (Counter, np.zeros((1, 3)), r"found .*of shape \(1, 3\) and dtype float64"),
        (Counter, {"a": np.zeros((2, 3))}, r"found \{'a': .*\(dict\)"),
        (Pair, (np.zeros(2),), r"do not match its observation_space, Tuple.*: found \("),
        (
            Sheet,
            {"other": 1},
            r"do not match its observation_space, Dict.*: found \{'other': 1\} \(dict\). .*Give State",
        ),
    ],
)
def test_process_result_that_does_not_match_the_space_is_refused(
    kind: Any, answer: Any, message: str, make_env: MakeEnv
) -> None:
    env = Same(make_env([partial(kind, number, 9) for number in range(2)]), answer)
    env.reset(seed=1)
    with pytest.raises(ArgumentError, match=message) as caught:
        env.step(env.action_space.sample())
    assert caught.value.partial.env_ids.tolist() == [0, 1]  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("call", "count"),
    [
        (lambda env: env.reset(1), 0),
        (lambda env: env.step([GO_ON], id=[1]), 1),
        (lambda env: env.step([GO_ON], id=[1], align="batch"), 1),
        (lambda env: env.step([RAISE, GO_ON]), 1),
    ],
    ids=["reset", "step", "batch", "an env also fails"],
)
def test_error_in_process_is_raised_unchanged_and_asks_for_a_reset(call: Any, count: int, make_env: MakeEnv) -> None:
    inner = Same(make_env([partial(Fragile, number) for number in range(2)]), IndexError("mine"))
    env = Watching(StackStates(inner, 2))
    env.reset()
    with pytest.raises(IndexError, match="mine") as caught:
        call(env)
    error: Any = caught.value
    assert error.wrapper is inner
    states = getattr(error.partial, "states", error.partial)
    assert states.tolist() == [[1, count]], "as the env gave it"
    assert env.seen == [(0, 1)]
    has_failed = isinstance(error.__context__, ZeroDivisionError)  # in its step
    assert env.step([GO_ON], id=[0]).states[0, :, 1].tolist() == [0, 1 + has_failed]
    for action in (env.step, env.send, env.step_async):
        with pytest.raises(ResetNeededError, match=r"env 1 has no running episode"):
            action([GO_ON] * 2)
    env.reset(1)
    assert env.step([GO_ON] * 2).states[1, :, 1].tolist() == [0, 1]


@in_modes(PROCESSES)
def test_reset_that_cannot_restart_an_env_raises_the_death_of_its_worker(make_env: MakeEnv) -> None:
    env_fns = [partial(Fragile, number) for number in range(2)]
    env = NormalizeStates(make_env(env_fns, asynchronous="restart", on_failure="restart", max_restarts=1, num_cpus=2))
    env.reset()
    assert env.step([EXIT, GO_ON]).dones.tolist() == [True, False]
    with pytest.raises(WorkerDiedError):
        env.step([EXIT, GO_ON])
    with pytest.raises(WorkerDiedError, match="env 0"):
        env.reset()
    assert env.step([GO_ON], id=[1]).rewards.tolist() == [1.0]


# ---------------------------------------------------------------- saved states


def wrapped(env: Any, stack_size: int = 2) -> RecordEpisodeStatistics:
    stacked = StackStates(NormalizeStates(env), stack_size)
    return RecordEpisodeStatistics(NormalizeRewards(Doubled(stacked)))


def parts_of(result: Any) -> tuple[Any, ...]:
    """Return a result without the durations of episodes."""
    for info in result.infos:
        info.get("episode", {}).pop("t", None)
    return tuple(result)


class Locked(Counter):
    """Has no get_state() and cannot be pickled."""

    def __reduce__(self) -> Any:
        raise TypeError("not me")


def test_wrappers_continue_identically_after_load_state(make_env: MakeEnv) -> None:
    env = wrapped(make_env(ENV_FNS, asynchronous="restart"))
    env.reset(seed=1)
    env.step(ONES)
    saved = env.save_state()
    expected = [parts_of(env.step(ONES)) for _ in range(6)]
    other = wrapped(make_env(ENV_FNS, asynchronous="restart"))
    for one in (env, other):
        assert one.load_state(saved) == ()
        for step in expected:
            assert difference(step, parts_of(one.step(ONES))) is None
    with wrapped(ParallelEnv([Counter, Locked])) as locked:
        locked.reset(seed=1)
        saved = locked.save_state()
        assert saved.unsaved == (1,)
        assert locked.load_state(saved) == (1,)


def test_state_of_other_wrappers_is_refused_and_changes_nothing(make_env: MakeEnv) -> None:
    env = wrapped(make_env(ENV_FNS))
    bare = env.unwrapped
    env.reset(seed=1)
    env.step(ONES)
    saved = env.save_state()
    less = NormalizeRewards(bare, 0.9).save_state()
    cases: list[tuple[Any, Any, str]] = [
        (env, bare.save_state(), r"is of no wrapper \(it is a SavedState\), but RecordEpisodeStatistics has state"),
        (StackStates(bare, 2), saved, "is of RecordEpisodeStatistics, but StackStates has state of its own"),
        (bare, saved, "is of RecordEpisodeStatistics, but this is .*the same wrappers"),
        (Doubled(bare), saved, "is of RecordEpisodeStatistics, but this is .*the same wrappers"),
        (bare, {}, "state is a dict. Give the result of save_state"),
        (wrapped(bare, stack_size=3), saved, "saved state of StackStates has the form .*same arguments"),
        (NormalizeRewards(bare, 0.5), less, r"'gamma': 0\.9}.*here it is .*'gamma': 0\.5}.*the same arguments"),
    ]
    for loading, state, message in cases:
        with pytest.raises(ArgumentError, match=message):
            loading.load_state(state)
    assert Doubled(bare).load_state(Doubled(bare).save_state()) == ()
