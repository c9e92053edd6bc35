"""Collectors, in every mode."""

from __future__ import annotations

import io
import itertools
import os
import re
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from functools import partial
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from fragile import EXIT, GO_ON, RAISE, WAIT, Fragile, fragile
from modes import IN_BACKGROUND, IN_WORKERS, MODES, ON_RAY, ORACLE, THREADS, in_modes
from test_rollout import POLICIES, Count, Scripted, counts, partial_of, zeros

from parallelenv import Collector, CollectorSet, ParallelEnv
from parallelenv.collect import collector as collector_module
from parallelenv.errors import (
    AbsentAttributeError,
    ArgumentError,
    ClosedError,
    EnvContractError,
    MissingDependencyError,
    UsageError,
    WorkerDiedError,
    WorkerTimeoutError,
)
from parallelenv.rollouts import running_rollout
from parallelenv.testing.contract import KINDS, assert_same
from parallelenv.testing.envs import InfoEnv

MakeCollector = Callable[..., Collector]


@pytest.fixture
def make_collector(mode: str) -> Iterator[MakeCollector]:
    """Make a `Collector` whose envs are in the mode under test; it is stopped after the test."""
    made: list[Collector] = []

    def make(policy: Any, envs: Any, num_steps: int = 5, env_options: Any = None, **kwargs: Any) -> Collector:
        options = {"num_cpus": 2, **(env_options or {})}
        make_envs = partial(ParallelEnv, envs, mode, "restart", **options)
        made.append(Collector(lambda: policy, make_envs, num_steps=num_steps, **kwargs))
        return made[-1]

    yield make
    for collector in made:
        collector.stop()


make_one = partial(ParallelEnv, counts(9), ORACLE, "restart")


def here(policy: Any, envs: Any, num_steps: int = 5, **kwargs: Any) -> Collector:
    """Make a `Collector` of envs in this process."""
    return Collector(lambda: policy, lambda: ParallelEnv(envs, ORACLE, "restart"), num_steps=num_steps, **kwargs)


class Net:
    """A policy with weights, a setting, its own generator, and all optional methods."""

    def __init__(self, rank: int = -1, seed: int | None = None) -> None:
        self.rank, self.seed = rank, seed
        self.weights = 0
        self.noise = 0.0
        self.calls = 0
        self.was_deterministic: list[bool] = []
        self._draws = np.random.default_rng(seed)

    def set_weights(self, weights: Any) -> None:
        self.weights = weights

    @property
    def threshold(self) -> Any:
        raise AttributeError("threshold can be set but not read")

    @threshold.setter
    def threshold(self, value: Any) -> None:
        self.threshold_set = [value]

    def __call__(
        self, states: Any, rnn_state: Any = None, done: Any = None, *, deterministic: bool = False
    ) -> tuple[Any, Any, dict[str, Any]]:
        self.calls += 1
        self.was_deterministic.append(deterministic)
        memory = np.zeros(len(states)) if rnn_state is None else np.where(done, 0.0, rnn_state)
        draw = self._draws.random(len(states)) if self.noise else np.zeros(len(states))
        actions = (states[:, 0] + memory + 5 * draw).astype(np.int64) % 5
        return actions, memory + 1, {"memory": memory, "draw": draw}


# ---------------------------------------------------------------- data


@pytest.mark.parametrize("kind", POLICIES)
def test_collected_data_equal_a_rollout_in_every_mode(make_collector: MakeCollector, kind: str) -> None:
    if kind == "tensor":
        pytest.importorskip("torch")
    collector = make_collector(POLICIES[kind], KINDS[kind](), seed=3)
    with ParallelEnv(KINDS[kind](), ORACLE, "restart") as env:
        env.reset(seed=3)
        for num_steps in (5, 4):
            data, info = collector.collect(num_steps, progress=False)
            assert_same(vars(env.rollout(POLICIES[kind], num_steps)), vars(data))
            assert info["num_steps"] == num_steps
            assert info["num_samples"] == num_steps * len(env)


def test_stochastic_recurrent_policy_gives_the_same_data_in_every_mode(make_collector: MakeCollector) -> None:
    def collect(collector: Collector) -> list[Any]:
        collector.update_policy("noise", 0.5)
        return [vars(collector.collect(4)[0]) for _ in range(3)]

    envs = KINDS["array"]()
    with here(Net(seed=7), envs, seed=3) as oracle:
        expected = collect(oracle)
    assert_same(expected, collect(make_collector(Net(seed=7), envs, seed=3)))
    draws = np.concatenate([data["extras"]["draw"] for data in expected])
    assert len(np.unique(draws)) == draws.size  # no collection starts with the generator state of the one before


def test_episodes_and_recurrent_state_continue_across_collections(make_collector: MakeCollector) -> None:
    collector = make_collector(Net(), counts(2, 5, 12), 4)
    collections = [collector.collect() for _ in range(3)]
    for data, _ in collections:
        assert data.extras["memory"].tolist() == data.states[:, :, 1].tolist()
    assert collections[1][0].states[0].tolist() == collections[0][0].final_states.tolist()
    lengths, returns = (
        [info[name].tolist() for _, info in collections] for name in ("episode_lengths", "episode_returns")
    )
    assert lengths == [[2, 2], [5, 2, 2], [2, 5, 2, 12]]
    assert returns == [[1, 1], [10, 1, 1], [1, 10, 1, 25]]


def test_modifying_collected_data_does_not_affect_later_data(make_collector: MakeCollector) -> None:
    collector, twin = (make_collector(Net(), KINDS["array"](), seed=1) for _ in range(2))
    data, info = collector.collect()
    before = data.states.copy()
    for array in (data.states, data.actions, data.rnn_state, data.extras["memory"], info["episode_returns"]):
        array[...] = 9
    twin.collect()
    assert_same(vars(twin.collect()[0]), vars(collector.collect()[0]))
    assert not np.array_equal(before, data.states)


def test_envs_can_call_get_worker_info_while_the_policy_acts_in_the_caller(mode: str) -> None:
    env = ParallelEnv([InfoEnv] * 2, mode, "restart", 2)
    with Collector(lambda: zeros, lambda: env, num_steps=2) as collector:
        collector.collect()
        assert [told["step"][0] for told in env.get_env_attr("told")] == [0, 1]


def test_start_steps_sets_the_size_of_the_first_collection() -> None:
    with here(zeros, counts(9, 9), 3, start_steps=10) as collector:
        assert [len(collector.collect()[0]) for _ in range(3)] == [10, 3, 3]
        assert len(collector.collect(5)[0]) == 5


def test_seeds_of_envs_and_policy_depend_on_rank_and_number_of_envs() -> None:
    envs = KINDS["array"]()
    make_envs = partial(ParallelEnv, envs[:2], ORACLE, "restart")
    with (
        here(zeros, [*envs[:2], *envs[:2]], seed=4) as both,
        Collector(Net, make_envs, num_steps=5, seed=4, rank=1, world_size=2) as second,
    ):
        policy: Any = second.policy
        assert (policy.rank, policy.seed) == (1, 5)
        assert second.collect()[0].states.tolist() == both.collect()[0].states[:, 2:].tolist()


def test_listen_to_stops_collection_at_the_next_step(make_collector: MakeCollector) -> None:
    event = threading.Event()

    def setting(states: Any) -> Any:
        if states[1, 1] == 3:
            event.set()
        return zeros(states)

    collector = make_collector(setting, counts(3, 9), 50)
    nothing, info = collector.collect(listen_to=[lambda: True])
    assert (nothing.states.shape, info["num_samples"]) == ((0, 2, 2), 0)
    assert nothing.starts.all()
    data, info = collector.collect(listen_to=[lambda: False, event])
    assert (len(data), info["num_steps"], info["num_samples"]) == (4, 4, 8)
    assert data.starts.all()  # the episodes have not begun before
    assert data.valid.all()
    assert (info["episode_lengths"].tolist(), data.whole_episodes.tolist()) == ([3], [True])
    assert data.final_states.tolist() == [[0, 1], [1, 4]]
    assert collector.collect(2)[0].states[:, :, 1].tolist() == [[1, 4], [2, 5]]
    assert len(collector.collect(listen_to=[event])[0]) == 0
    assert collector.collect(1)[0].states[:, :, 1].tolist() == [[0, 6]]


# ---------------------------------------------------------------- weights, settings and replacement


def test_weights_are_passed_uncopied_and_counted_and_settings_are_copied() -> None:
    weights, value = {"w": np.ones(3)}, [1]
    with here(Net(), counts(9)) as collector:
        policy: Any = collector.policy
        assert collector.collect()[1]["version"] == 0
        collector.set_weights(weights)
        assert policy.weights is weights
        assert collector.collect()[1]["version"] == 1
        collector.set_weights(weights, version=7)
        collector.set_weights(weights)
        assert (collector.version, collector.collect()[1]["version"]) == (8, 8)
        assert policy.weights is weights
        collector.update_policy("weights", value)
        assert (policy.weights, policy.weights is value) == ([1], False)
        collector.update_policy("threshold", 3)
        assert policy.threshold_set == [3]
    with here(zeros, counts(9)) as collector:
        with pytest.raises(ArgumentError, match=r"does not accept weights. Give it a method set_weights\(weights\)"):
            collector.set_weights(1)
        assert collector.version == 0
    failing = type("Failing", (Net,), {"set_weights": property(lambda self: self.loadr)})
    with (
        here(failing(), counts(9)) as collector,
        pytest.raises(AttributeError, match="no attribute 'loadr'"),
    ):
        collector.set_weights(1)


def test_initial_weights_can_be_a_torch_state_dict() -> None:
    torch: Any = pytest.importorskip("torch")

    class Best(torch.nn.Linear):  # type: ignore[misc]
        def forward(self, states: Any) -> Any:
            return super().forward(torch.as_tensor(states, dtype=torch.float32)).argmax(1)

    weights = {"weight": torch.ones(5, 2), "bias": torch.arange(5.0)}
    with Collector(partial(Best, 2, 5), make_one, num_steps=3, weights=weights) as collector:
        assert collector.collect()[0].actions.tolist() == [[4]] * 3


def test_replace_replaces_envs_policy_and_test_envs(mode: str, make_collector: MakeCollector) -> None:
    collector = make_collector(zeros, counts(9, 9), 2, seed=1)
    collector.collect()
    # Both exist for a moment, and Ray in the tests has resources for one.
    room: dict[str, Any] = {"ray_options": {"num_cpus": 0}} if mode in ON_RAY else {}
    other = partial(ParallelEnv, counts(4, 4, 4), mode, "restart", num_cpus=2, **room)
    old = collector._envs["envs"]
    collector.replace("envs", other)
    assert old.closed
    assert collector.num_envs == 3
    assert collector.collect()[0].starts.all()
    collector.replace("policy", lambda: lambda states: np.full(len(states), 3))
    data, info = collector.collect()
    assert (data.actions == 3).all()
    assert info["episode_lengths"].tolist() == [4, 4, 4]
    collector.replace("test_envs", other)
    assert len(collector.evaluate(3)) == 3
    test_env = collector._envs["test_envs"]
    collector.replace("test_envs", other)
    assert test_env.closed
    assert not data.starts.any()


@pytest.mark.parametrize(
    ("call", "arguments", "match"),
    [
        ("collect", (0,), "num_steps=0 must be"),
        *[("collect", (1, wrong), "Give .*events, such as threading.Event") for wrong in ("now", 3, [3])],
        *[("set_weights", ({}, wrong), "version=.* must be an int of 0 or more") for wrong in (-1, 1.5, True, "2")],
        ("update_policy", ("nois", 1), "name='nois': the policy, a Net, has no such attribute"),
        ("update_policy", ("noise.part", 1), "name='noise.part': .* has no such"),
        ("update_policy", ("a b", 1), "is not a valid name"),
        ("replace", ("env", dict), r"component='env' is not known; expected one of \('policy', 'envs'"),
        ("replace", ("envs", list), r"make\(\) returned a list. Give a function .* returns a ParallelEnv"),
        ("replace", ("policy", lambda: 3), "cannot be called"),
        ("evaluate", (), "no test envs. Give make_test_envs"),
    ],
)
@pytest.mark.parametrize("kind", [Collector, partial(CollectorSet, 1, para_mode=ORACLE)])
def test_bad_calls_are_refused_and_change_nothing(kind: Any, call: str, arguments: Any, match: str) -> None:
    with kind(make_policy=Net, make_envs=make_one, num_steps=5) as collector:
        policy = getattr(collector, "policy", None)
        error = AbsentAttributeError if "has no such" in match else ArgumentError
        with pytest.raises(error, match=match):
            getattr(collector, call)(*arguments)
        assert (collector.version, getattr(collector, "policy", None)) == (0, policy)
        assert len(collector.collect()[0]) == 5


def test_envs_of_a_collector_are_not_taken_again() -> None:
    with here(zeros, counts(9)) as collector:
        env = collector._envs["envs"]
        for component in ("envs", "test_envs"):
            with pytest.raises(ArgumentError, match=r"make\(\) returned a ParallelEnv that a collector already uses"):
                collector.replace(component, lambda: env)
        assert collector._envs["envs"] is env
        assert len(collector.collect()[0]) == 5


def test_collect_skips_paused_envs() -> None:
    env = ParallelEnv(counts(3, 4, 5), ORACLE, "restart")
    env.pause(1)
    with Collector(lambda: zeros, lambda: env, num_steps=7) as collector:
        lengths = [collector.collect()[1]["episode_lengths"].tolist() for _ in range(2)]
        assert lengths == [[3, 5, 3], [3, 5, 3]]
        env.pause([0, 2])
        data, info = collector.collect()
    assert (data.valid.shape, info["episode_lengths"].tolist()) == ((7, 0), [])


# ---------------------------------------------------------------- evaluation


def test_evaluation_plays_whole_episodes_deterministically(mode: str, make_collector: MakeCollector) -> None:
    tests = partial(ParallelEnv, KINDS["array"]()[:2], mode, num_cpus=2)
    net = Net()
    collector = make_collector(net, counts(9), 2, seed=1, make_test_envs=tests)
    collector.collect()
    first, second = collector.evaluate(4, progress=False), collector.evaluate(4)
    assert first.lengths.tolist() == [4, 4, 7, 7]
    assert first.returns.tolist() == second.returns.tolist()
    assert collector.evaluate(4, seed=99).returns.tolist() != first.returns.tolist()
    assert net.was_deterministic[:2] == [False, False]
    assert all(net.was_deterministic[2:])
    assert collector.collect()[0].states[0, 0, 1] == 2  # collecting continues where it was


def test_evaluation_keeps_the_recurrent_state_of_a_torch_module() -> None:
    torch: Any = pytest.importorskip("torch")
    counted: list[float] = []

    class Counting(torch.nn.Module):  # type: ignore[misc]
        def forward(self, states: Any, rnn_state: Any, done: Any, *, deterministic: bool = False) -> Any:
            assert deterministic
            count = np.zeros(len(states)) if rnn_state is None else np.where(done, 0, rnn_state)
            counted.extend(count)
            return zeros(states), count + 1, None

    with Collector(Counting, make_one, num_steps=3, make_test_envs=partial(ParallelEnv, counts(3))) as collector:
        collector.evaluate(2)
    assert counted == [0, 1, 2, 0, 1, 2]


# ---------------------------------------------------------------- failures


@pytest.mark.parametrize(
    ("mode", "deed", "error", "match"),
    [
        *[(mode, RAISE, ZeroDivisionError, "env 0 fell over") for mode in MODES],
        *[(mode, WAIT, WorkerTimeoutError, "did not answer within 0.5 s") for mode in IN_BACKGROUND],
        *[(mode, EXIT, WorkerDiedError, "is dead") for mode in IN_WORKERS],
    ],
    indirect=["mode"],
)
def test_failure_of_an_env_keeps_other_steps_and_the_next_collection_starts_new_episodes(
    make_collector: MakeCollector, tmp_path: Any, deed: int, error: Any, match: str
) -> None:
    envs = fragile(tmp_path)[:2]
    script = Scripted([GO_ON] * 2, [GO_ON] * 2, [deed, GO_ON], [GO_ON] * 2)
    collector = make_collector(script, envs, 4, {"timeout": 0.5 if deed == WAIT else None})
    with pytest.raises(error, match=match) as caught:
        collector.collect()
    (tmp_path / "go").touch()
    assert partial_of(caught).valid.tolist() == [[True, True], [True, True], [False, True], [False, True]]
    if deed == EXIT:
        assert "A collector has no restart(): replace('envs', make_envs) gives it new" in caught.value.__notes__[-1]
        collector.replace("envs", lambda: ParallelEnv(envs, THREADS, "restart"))
    data, info = collector.collect()
    assert data.starts.all()
    assert info["num_samples"] == 8


@in_modes(*IN_WORKERS)
def test_dead_worker_is_replaced_with_on_failure_restart(make_collector: MakeCollector, tmp_path: Any) -> None:
    script = Scripted([GO_ON] * 2, [EXIT, GO_ON], [GO_ON] * 2)
    data, info = make_collector(script, fragile(tmp_path)[:2], 4, {"on_failure": "restart"}).collect()
    assert data.truncated.T.tolist() == [[False, True, False, False], [False] * 4]
    assert isinstance(data.infos[1, 0]["failure"], WorkerDiedError)
    assert info["episode_lengths"].tolist() == [2]


class TextStates(Fragile):
    """Its states are texts, which no array contains."""

    observation_space: Any = gym.spaces.Text(9, charset="0123456789 ")

    def _state(self) -> Any:
        return f"{self.number} {self.steps}"


def go_on(states: Any) -> Any:
    return np.full(len(states), GO_ON)


@pytest.mark.parametrize(
    ("mode", "deed"),
    [*((mode, RAISE) for mode in MODES), *((mode, EXIT) for mode in IN_WORKERS)],
    indirect=["mode"],
)
def test_policy_gets_the_first_state_of_a_restarted_env(
    make_collector: MakeCollector, deed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(running_rollout, "_GROWTH", 1)  # chunks have one step: a failed env rests until the next chunk
    calls = itertools.count()

    def act(states: Any) -> Any:
        return np.array([deed if next(calls) == 2 else GO_ON, GO_ON])

    collector = make_collector(act, [partial(TextStates, 0), partial(TextStates, 1)], 5, {"on_failure": "restart"})
    data, info = collector.collect()
    assert data.states[:, 0].tolist() == ["0 0", "0 1", "0 2", "0 0", "0 1"]
    assert data.states[:, 1].tolist() == [f"1 {step}" for step in range(5)]
    assert (data.final_states, data.ended_states.tolist()) == (("0 2", "1 5"), ["0 2"])
    assert info["episode_lengths"].tolist() == [3]


@pytest.mark.parametrize(
    ("kind", "num_cpus", "is_noticed"),
    [(TextStates, 2, True), (TextStates, 2, False), (Fragile, 2, True), (Fragile, 1, True)],
)
@in_modes(*IN_WORKERS)
def test_worker_that_died_before_a_collection_is_replaced(
    make_collector: MakeCollector, kind: Any, num_cpus: int, is_noticed: bool
) -> None:
    options = {"on_failure": "restart", "num_cpus": num_cpus}
    collector = make_collector(go_on, [partial(kind, 0), partial(kind, 1)], 3, options)
    collector.collect()
    env = collector._envs["envs"]
    os.kill(env.customized_method("pid", id=[0])[0], signal.SIGKILL)
    if is_noticed:
        with pytest.raises(WorkerDiedError):
            env.get_env_attr("steps", id=[0])
        stopped, info = collector.collect(listen_to=[lambda: True])
        assert (stopped.valid.tolist(), info["num_samples"]) == ([[False] * 2], 0)
        assert stopped.truncated[0].tolist() == [True, num_cpus == 1]
        assert len(stopped.ended_states) == len(info["episode_lengths"]) == 3 - num_cpus
    data, info = collector.collect()
    assert data.valid.T.tolist() == [[is_noticed, True, True], [True] * 3]
    assert data.truncated.T.tolist() == [[not is_noticed, False, False], [False] * 3]
    assert info["episode_lengths"].tolist() == ([] if is_noticed else [4])
    states = data.states[data.valid[:, 0], 0].tolist()
    assert states == (["0 0", "0 1", "0 2"] if kind is TextStates else [[0, 0], [0, 1], [0, 2]])[: len(states)]


@in_modes(*IN_WORKERS)
def test_paused_env_whose_worker_died_does_not_disturb_a_collection(make_collector: MakeCollector) -> None:
    collector = make_collector(go_on, [partial(TextStates, 0), partial(TextStates, 1)], 3)
    collector.collect()
    env = collector._envs["envs"]
    os.kill(env.customized_method("pid", id=[0])[0], signal.SIGKILL)
    with pytest.raises(WorkerDiedError):
        env.get_env_attr("steps", id=[0])
    env.pause(0)
    assert collector.collect()[0].states.tolist() == [["1 3"], ["1 4"], ["1 5"]]


def test_interrupt_after_the_last_step_starts_new_episodes(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: Any) -> Any:
        monkeypatch.undo()
        raise KeyboardInterrupt

    with here(zeros, counts(9), 5) as collector:
        monkeypatch.setattr(collector_module, "count_episodes", interrupted)
        with pytest.raises(KeyboardInterrupt):
            collector.collect()
        data, info = collector.collect(9)
    assert data.starts.all()
    assert info["episode_lengths"].tolist() == [9]


def test_error_of_the_policy_has_earlier_steps_in_partial(make_collector: MakeCollector) -> None:
    calls = itertools.count()

    def collecting(states: Any) -> Any:
        if next(calls) == 2:
            collector.collect()
        return zeros(states)

    collector = make_collector(collecting, counts(9, 9), 4)
    with pytest.raises(UsageError, match=r"collect\(\) was called within collect\(\) of this Collector") as caught:
        collector.collect()
    assert partial_of(caught).valid[:, 0].tolist() == [True, True, False, False]
    assert collector.collect()[0].valid.all()


class Paying(Count):
    """Its rewards cannot be added."""

    def step(self, action: Any) -> Any:
        state, _, *rest = super().step(action)
        return state, {"gold": 1}, *rest


@pytest.mark.parametrize("kind", [Collector, partial(CollectorSet, 1, para_mode=ORACLE)])
def test_rewards_that_cannot_be_added_raise_with_the_steps_in_partial(kind: Any) -> None:
    make_envs = partial(ParallelEnv, [*counts(9), partial(Paying, 1)], ORACLE, "restart")
    with kind(make_policy=lambda: zeros, make_envs=make_envs, num_steps=3) as collector:
        for _ in range(2):
            with pytest.raises(EnvContractError, match="env 1 returned the reward {'gold': 1}, which cannot") as caught:
                collector.collect()
            assert partial_of(caught).rewards.tolist() == [[0, {"gold": 1}]] * 3


class Growing(Count):
    """Its rewards are arrays, which have one more entry in each episode."""

    size = 1

    def reset(self, **kwargs: Any) -> Any:
        self.size += 1
        return super().reset(**kwargs)

    def step(self, action: Any) -> Any:
        state, _, *rest = super().step(action)
        return state, np.ones(self.size), *rest


def test_error_about_rewards_names_the_env_whose_rewards_cannot_be_added() -> None:
    with ParallelEnv([partial(Growing, 0, 2), partial(Paying, 1)], ORACLE, "restart") as env:
        env.reset()
        with pytest.raises(EnvContractError, match="env 1 returned the reward {'gold': 1}"):
            env.rollout(zeros, 6).episode_returns  # noqa: B018


# ---------------------------------------------------------------- bad input, stop, repr and plots


@pytest.mark.parametrize(
    ("given", "match"),
    [
        ({"num_steps": 0}, "num_steps=0 must be an int of at least 1"),
        ({"start_steps": 0}, "start_steps=0 must be an int of at least 1"),
        ({"seed": "x"}, "seed='x' is not an int"),
        ({"make_policy": 3}, "make_policy=3 cannot be called"),
        ({"make_policy": zeros}, "needs states, but is only given rank, .* the policy itself, lambda: policy"),
        ({"make_envs": lambda rank: None}, r"make_envs=.* needs rank. Give a function without arguments"),
        ({"make_policy": lambda: 3}, "policy is a int, which cannot be called"),
        ({"make_envs": []}, r"make_envs=\[\] cannot be called. Give a function without arguments"),
        ({"make_envs": lambda: gym.make("CartPole-v1")}, r"make_envs\(\) returned a TimeLimit. Give"),
        ({"make_test_envs": dict}, r"make_test_envs\(\) returned a dict"),
        ({"rank": -1}, "rank=-1 must be an int from 0 to 0: below world_size=1"),
        ({"rank": 1.5, "world_size": 3}, "rank=1.5 must be an int from 0 to 2"),
        ({"world_size": 0}, "world_size=0 must be an int of at least 1"),
        ({"make_envs": partial(ParallelEnv, counts(9), ORACLE)}, "asynchronous=None. A collector does not stop"),
    ],
)
def test_bad_arguments_are_refused(given: dict[str, Any], match: str) -> None:
    with pytest.raises(ArgumentError, match=match):
        Collector(**{"make_policy": lambda: zeros, "make_envs": make_one, "num_steps": 3, **given})


class Waiting(Net):
    """Waits for an event in its first call, until another one is set."""

    within, told = threading.Event(), threading.Event()

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        self.within.set()
        self.told.wait(30)
        return super().__call__(*arguments, **keywords)


@pytest.mark.parametrize(
    ("name", "kind"), [("Collector", Collector), ("CollectorSet", partial(CollectorSet, 1, para_mode=THREADS))]
)
def test_calls_of_a_second_thread_and_after_stop_are_refused(name: str, kind: Any) -> None:
    Waiting.within.clear()
    Waiting.told.clear()
    with kind(make_policy=Waiting, make_envs=make_one, num_steps=3) as collector:
        assert re.search(rf"<parallelenv\.{name} of 1 (env|collector), (para_mode=.*, )?version 0>", repr(collector))
        calls = {
            "collect": collector.collect,
            "evaluate": collector.evaluate,
            "set_weights": partial(collector.set_weights, 1),
            "update_policy": partial(collector.update_policy, "noise", 1),
            "replace": partial(collector.replace, "policy", Net),
        }
        if isinstance(collector, CollectorSet):
            calls["stream"] = lambda: list(collector.stream())
        found: list[int] = []
        thread = threading.Thread(target=lambda: found.append(len(collector.collect()[0])))
        thread.start()
        assert Waiting.within.wait(30)
        for call_name, call in calls.items():
            with pytest.raises(UsageError, match=rf"{call_name}\(\) was called while another thread is in collect"):
                call()
        Waiting.told.set()
        thread.join()
        assert found == [3]
        collector.stop()
        collector.stop()
        assert collector.closed
        assert repr(collector).endswith("stopped>")
        for call in calls.values():
            with pytest.raises(ClosedError, match=f"on a stopped {name}. Make a new one"):
                call()


@pytest.fixture(scope="session")
def fonts() -> None:
    """Let matplotlib open its fonts, which it keeps open."""
    figure = pytest.importorskip("matplotlib.figure").Figure()
    figure.subplots().set_title("text")
    figure.savefig(io.BytesIO())


@pytest.mark.usefixtures("fonts")
def test_history_counts_samples_and_seconds_and_can_be_plotted() -> None:
    tests = partial(ParallelEnv, counts(3))
    with here(lambda states: zeros(states) + 2, counts(4, 4), 3, make_test_envs=tests) as collector:
        infos = [collector.collect()[1]]
        assert repr(collector.history).startswith("<History of 1 record, 6 samples in ")
        infos += [collector.collect()[1] for _ in range(3)]
        collector.evaluate(2)
        history = collector.history
        assert [record.samples for record in history] == [6, 12, 18, 24, 24]
        assert history[3].seconds == pytest.approx(sum(info["seconds"] for info in infos))
        assert [record.episodes for record in history] == [0, 2, 2, 2, 2]
        assert [record.mean_return for record in history][1:] == [8, 8, 8, 6]
        assert [record.is_test for record in history] == [False] * 4 + [True]
        assert repr(history).startswith("<History of 5 records, 24 samples in ")
        figure = collector.plot()
        drawn = [[line.get_xydata().tolist() for line in axis.lines] for axis in figure.axes]
        assert drawn[0] == [[[12, 8], [18, 8], [24, 8]], [[24, 6]]]
        assert [axis.get_xlabel() for axis in figure.axes] == ["samples", "seconds"]
        assert figure._repr_png_().startswith(b"\x89PNG")  # shown by notebooks
        assert collector.plot(figure.axes) is figure
        for wrong in (figure.axes[:1], figure.axes[0], [1, 2], 3):
            with pytest.raises(ArgumentError, match=r"axes=.* are not two axes of matplotlib"):
                collector.plot(wrong)


@pytest.mark.parametrize("kind", [Collector, partial(CollectorSet, 1, para_mode=ORACLE)])
def test_history_is_closed_if_the_constructor_fails(monkeypatch: pytest.MonkeyPatch, kind: Any) -> None:
    closed: list[str] = []
    writer = SimpleNamespace(close=lambda: closed.append("closed"))
    monkeypatch.setitem(sys.modules, "tensorboardX", SimpleNamespace(SummaryWriter=lambda log_dir: writer))
    with pytest.raises(ArgumentError, match=r"make_envs\(\) returned a int"):
        kind(make_policy=lambda: zeros, make_envs=lambda: 3, num_steps=3, log_dir="anywhere")
    assert closed == ["closed"]


def test_tensorboard_log_is_written_or_the_missing_package_named(tmp_path: Any) -> None:
    if not (find_spec("tensorboardX") or find_spec("tensorboard")):
        with pytest.raises(MissingDependencyError, match="pip install tensorboardX"):
            here(zeros, counts(2), log_dir=tmp_path)
        return
    with here(zeros, counts(2), log_dir=tmp_path) as collector:
        collector.collect()
    (written,) = tmp_path.glob("events*")
    assert b"train/mean_return" in written.read_bytes()
