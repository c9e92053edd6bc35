"""Sets of collectors, synchronous and streamed, in every mode, with failures of single collectors."""

from __future__ import annotations

import itertools
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from decimal import Decimal
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import cloudpickle
import numpy as np
import pytest
from fragile import EXIT, GO_ON, RAISE, Fragile, interrupt, when_exists
from gymnasium.spaces import Box, Dict
from modes import IN_BACKGROUND, IN_WORKERS, ORACLE, PROCESSES, RAY, THREADS, in_modes
from test_rollout import POLICIES, Count, Scripted, SubDict, counts, steps_of, zeros

from parallelenv import Collector, CollectorSet, ParallelEnv, get_worker_info
from parallelenv.collect.scheduler import CollectRequest
from parallelenv.errors import (
    AbsentAttributeError,
    ArgumentError,
    ClosedError,
    MissingDependencyError,
    UnpicklableError,
    WorkerDiedError,
    WorkerTimeoutError,
)
from parallelenv.results import difference
from parallelenv.testing import envs as zoo
from parallelenv.testing.contract import KINDS, assert_same

MakeSet = Callable[..., CollectorSet]


@pytest.fixture
def make_set(mode: str) -> Iterator[MakeSet]:
    """Make a set of two collectors in the mode under test; it is stopped after the test."""
    made: list[CollectorSet] = []

    def make(make_policy: Any, make_envs: Any, num_steps: int = 40, **kwargs: Any) -> CollectorSet:
        options = {"para_mode": mode, **kwargs}
        made.append(CollectorSet(2, make_policy, make_envs, num_steps=num_steps, **options))
        return made[-1]

    yield make
    for collectors in made:
        collectors.stop()


def rank() -> int:
    info = get_worker_info()
    assert info is not None
    return info.env_id


def own_envs(envs: Any, each: int = 2) -> ParallelEnv:
    """Make the envs of one collector."""
    return ParallelEnv(envs[rank() * each : (rank() + 1) * each], ORACLE, "restart")


def few(lengths: Any = (7, 9)) -> ParallelEnv:
    return ParallelEnv(counts(*lengths), ORACLE, "restart")


class Net:
    """A policy whose actions are its weights, and which reports its settings in extras.

    In collector 1, call number ``at`` does a deed first.
    """

    def __init__(self, rank: int, seed: int | None = None, at: int = 1, deed: Callable[[], Any] = lambda: None) -> None:
        self.rank, self.seed = rank, seed
        self.weights, self.noise = 0, 0
        self.left, self.deed = at, deed

    def set_weights(self, weights: Any) -> None:
        if weights is None:
            raise LookupError("no such weights")
        self.weights = weights

    def __call__(self, states: Any, *, deterministic: bool = False) -> Any:
        self.left -= 1
        if self.rank == 1 and self.left == 0:
            self.deed()
        ones = np.ones(len(states), np.int64)
        return ones * self.weights, None, {"noise": ones * self.noise, "pid": ones * os.getpid()}


def wait(folder: Path, patience: float = 30) -> None:
    """Signal the start, and wait for a file."""
    (folder / "began").mkdir(exist_ok=True)
    deadline = time.monotonic() + patience
    while not (folder / "go").exists() and time.monotonic() < deadline:
        time.sleep(0.005)


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def die_once(folder: Path) -> None:
    if not (folder / "grave").exists():
        (folder / "grave").touch()
        die()


def fail() -> NoReturn:
    raise ZeroDivisionError("not today")


def when_waiting(folder: Path, act: Callable[[], Any]) -> AbstractContextManager[None]:
    return when_exists(folder / "began", act)


# ---------------------------------------------------------------- synchronous collection


@pytest.mark.parametrize("kind", POLICIES)
def test_data_of_two_collectors_equal_those_of_one_with_all_envs(make_set: MakeSet, kind: str) -> None:
    if kind == "tensor":
        pytest.importorskip("torch")
    envs, policy = KINDS[kind]()[:4], POLICIES[kind]
    if kind == "instances":
        envs = [partial(zoo.Wrapped, env.env) for env in envs]
    collectors = make_set(lambda: policy, partial(own_envs, envs), seed=3)
    make_envs = partial(ParallelEnv, KINDS[kind]()[:4], ORACLE, "restart")
    with Collector(lambda: policy, make_envs, num_steps=40, seed=3) as single:
        spaces = single._envs["envs"].single_observation_space, single._envs["envs"].single_action_space
        for _ in range(2):
            (expected, told), (found, info) = single.collect(), collectors.collect(progress=False)
            assert_same(steps_of(expected, *spaces), steps_of(found, *spaces))
            assert_same([expected.env_ids, expected.starts], [found.env_ids, found.starts])
            assert sorted(info["episode_lengths"].tolist()) == sorted(told["episode_lengths"].tolist())
            assert info["num_samples"] == 160


def test_collect_info_covers_all_collectors(make_set: MakeSet) -> None:
    collectors = make_set(Net, few, 20, start_steps=30, weights=1)
    collections = [collectors.collect(), collectors.collect(), collectors.collect(5)]
    assert [len(data) for data, _ in collections] == [30, 20, 5]
    for data, info in collections:  # the later ones continue episodes of the first
        assert info["episode_lengths"].tolist() == info["episode_returns"].tolist() == data.ended_states[:, 1].tolist()
    data, info = collections[0]
    names = "episode_lengths episode_returns lost_samples num_samples num_steps seconds staleness version"
    assert sorted(info) == names.split()
    assert info["num_steps"].tolist() == [30, 30]
    assert (info["num_samples"], info["lost_samples"]) == (120, 0)
    assert sorted(info["episode_lengths"].tolist()) == [7] * 8 + [9] * 6
    assert data.extras["pid"].shape == (30, 4)
    assert data.env_ids.tolist() == [0, 1, 2, 3]
    assert info["seconds"] > 0
    assert [record.samples for record in collectors.history] == [120, 200, 220]
    assert (len(collectors), collectors.num_envs, collectors.num_replaced) == (2, 4, 0)


def saying(says: Callable[[int, int], Any]) -> Any:
    """Make policies that return what ``says`` returns for a rank and a number of envs, besides actions of zero."""
    return lambda rank: lambda states, rnn_state, done: (zeros(states), *says(rank, len(states)))


def test_extras_or_rnn_state_of_only_one_collector_are_zero_for_the_others(make_set: MakeSet) -> None:
    collectors = make_set(saying(lambda rank, number: (None, {"ab"[rank]: np.ones(number)})), few, 20)
    extras = collectors.collect()[0].extras
    assert {name: array[0].tolist() for name, array in extras.items()} == {"a": [1, 1, 0, 0], "b": [0, 0, 1, 1]}
    collectors = make_set(saying(lambda rank, number: (np.ones(number) if rank else None, None)), few, 20)
    assert collectors.collect()[0].rnn_state.tolist() == [0, 0, 1, 1]


def test_none_within_the_recurrent_state_is_kept(make_set: MakeSet) -> None:
    collectors = make_set(saying(lambda rank, number: ({"h": np.ones(number), "c": None}, None)), few, 20)
    for _ in range(2):
        assert_same(collectors.collect()[0].rnn_state, {"h": np.ones(4), "c": None})


class Ranged(Count):
    """Its states are dicts, and its space is of its own."""

    def __init__(self, number: int, kind: Any = Dict, length: int = 7) -> None:
        super().__init__(number, length)
        high = 99 + number if kind is Dict else 99
        self.observation_space = kind({"place": Box(0, high, (2,), np.float64)})

    def _state(self) -> Any:
        return {"place": super()._state()}


def zeros_of_dict(states: Any) -> Any:
    return zeros(states["place"])


@pytest.mark.parametrize("kind", [Dict, SubDict], ids=["no common space", "a subclass of Dict"])
def test_states_that_no_space_splits_are_joined_as_one_collector_returns_them(make_set: MakeSet, kind: Any) -> None:
    envs = [partial(Ranged, number, kind) for number in range(4)]
    collectors = make_set(lambda: zeros_of_dict, partial(own_envs, envs))
    make_envs = partial(ParallelEnv, envs, ORACLE, "restart")
    with Collector(lambda: zeros_of_dict, make_envs, num_steps=40) as single:
        for _ in range(2):
            assert_same(vars(single.collect()[0]), vars(collectors.collect()[0]))


def test_infos_are_those_of_the_env_in_their_column_if_some_are_paused(make_set: MakeSet) -> None:
    class Told(Count):
        def step(self, action: Any) -> Any:
            *results, _ = super().step(action)
            return *results, {"number": self.number}

    def make_envs() -> ParallelEnv:
        env = ParallelEnv([partial(Told, number) for number in range(3)], ORACLE, "restart")
        env.pause(1)
        return env

    data, _ = make_set(Net, make_envs, 20).collect()
    assert data.states[0, :, 0].tolist() == [0, 2, 0, 2]
    assert {place: info["number"] for place, info in data.infos.items()} == {
        (step, column): [0, 2][column % 2] for step in range(20) for column in range(4)
    }


@pytest.mark.parametrize(
    ("make_policy", "make_envs", "match"),
    [
        (saying(lambda rank, k: (None, {"a": np.ones((k, rank + 1))})), few, r"extras\['a'\] have shape \(2,\)"),
        (saying(lambda rank, k: ([np.ones(k)] * (rank + 1), None)), few, r"rnn_state are \['an array'\] and \['an "),
        (
            lambda rank: POLICIES["dict" if rank else "array"],
            lambda: own_envs([zoo.Counter, zoo.Sheet], 1),
            r"their states are an array and \{'image': 'an array', ",
        ),
    ],
)
def test_data_that_cannot_be_merged_raise_and_are_kept(make_policy: Any, make_envs: Any, match: str) -> None:
    with CollectorSet(2, make_policy, make_envs, num_steps=20, para_mode=ORACLE) as collectors:
        for _ in range(2):
            with pytest.raises(ArgumentError, match=f"of collectors 0 and 1 cannot be joined.*{match}") as caught:
                collectors.collect()
        assert str(caught.value).endswith("Nothing is lost: stream() returns them one by one.")
        found = [(info["collector"], len(data)) for data, info in collectors.stream(num_collections=2)]
        assert found == [(0, 20), (1, 20)]


def test_steps_of_replaced_envs_are_returned_separately(make_set: MakeSet) -> None:
    collectors = make_set(Net, few, 40)
    next(collectors.stream())  # both are collecting again
    collectors.replace("envs", partial(few, (3, 3, 3)))
    data, info = collectors.collect(60)
    assert (data.valid.shape, info["num_steps"].tolist()) == ((40, 4), [40, 40])
    data, info = collectors.collect()
    assert (data.valid.shape, info["num_steps"].tolist()) == ((40, 6), [40, 40])
    assert set(info["episode_lengths"].tolist()) == {3}


def test_each_collector_has_its_own_worker_rank_and_seed(mode: str, make_set: MakeSet) -> None:
    collectors = make_set(Net, few, 4, seed=5)
    pids = np.unique(collectors.collect()[0].extras["pid"])
    assert len(pids) == (2 if mode in IN_WORKERS else 1)
    assert collectors._scheduler.env.get_env_attr("policy.rank") == [0, 1]
    assert collectors._scheduler.env.get_env_attr("policy.seed") == [5, 6]


def test_fraction_samples_stops_slow_collectors_without_losing_steps(make_set: MakeSet) -> None:
    def make_envs() -> ParallelEnv:
        return ParallelEnv([partial(zoo.Sleeper, length=1000)], ORACLE, "restart")

    # A step takes 0.1 s in collector 1.
    collectors = make_set(lambda rank: lambda states: zeros(states) + 10 * rank, make_envs, 200, fraction_samples=0.5)
    reached = np.zeros(2, int)
    for _ in range(2):
        data, info = collectors.collect()
        assert info["num_steps"][0] == 200
        assert 1 <= info["num_steps"][1] < 100  # it would take 20 s
        assert info["seconds"] < 10
        assert data.valid.sum(axis=0).tolist() == info["num_steps"].tolist()
        assert info["num_samples"] == data.valid.sum()
        for column in range(2):
            steps = data.states[data.valid[:, column], column, 1]
            assert steps.tolist() == list(range(reached[column], reached[column] + len(steps)))
        reached += info["num_steps"]
        assert not data.dones.any()
    assert data.final_states[:, 1].tolist() == reached.tolist()


class Paid(Count):
    """Its rewards are not floats."""

    def step(self, action: Any) -> Any:
        state, _, *rest = super().step(action)
        return state, Decimal(1), *rest


@in_modes(THREADS)  # the steps are joined in the caller
def test_rewards_of_any_type_can_be_summed_where_a_collector_made_fewer_steps(make_set: MakeSet) -> None:
    def act(rank: int, states: Any) -> Any:
        time.sleep(0.02 * rank)
        return zeros(states)

    make_envs = partial(ParallelEnv, [partial(Paid, 0)], ORACLE, "restart")
    data, info = make_set(lambda rank: partial(act, rank), make_envs, 200, fraction_samples=0.5).collect()
    assert info["num_samples"] < 400
    assert data.rewards.sum() == info["num_samples"]


def test_listen_to_stops_all_collectors(make_set: MakeSet) -> None:
    collectors = make_set(Net, few, 10**7)
    end = time.monotonic() + 0.3
    _, info = collectors.collect(listen_to=[lambda: time.monotonic() > end])
    assert 0 < info["num_samples"] < 10**7
    before = collectors.collect(2)[0]
    for _ in range(2):
        data, info = collectors.collect(listen_to=[lambda: True])
        assert (info["num_samples"], info["num_steps"].tolist()) == (0, [0, 0])
        assert data.states.shape == (0, *before.states.shape[1:])
        assert data.starts.tolist() == before.dones[-1].tolist()
        assert difference(before.final_states, data.final_states) is None
    data, info = collectors.collect(3)
    assert info["num_steps"].tolist() == [3, 3]
    assert data.valid.all()
    assert difference(before.final_states, data.states[0]) is None


def test_events_that_are_set_stop_a_collector_and_a_set_before_the_first_step(make_set: MakeSet) -> None:
    collectors = make_set(Net, few, 4)
    with Collector(Net, few, num_steps=4) as alone:
        for listen_to in [lambda: True], (), [lambda: True]:
            one, info = alone.collect(listen_to=listen_to, progress=False)
            data, infos = collectors.collect(listen_to=listen_to, progress=False)
            assert infos["num_steps"].tolist() == [info["num_steps"]] * 2 == [4 if not listen_to else 0] * 2
            assert data.states.shape[1:] == (2 * one.states.shape[1], *one.states.shape[2:])
            assert data.starts.tolist() == one.starts.tolist() * 2


def test_set_that_is_stopped_returns_the_steps_that_some_collectors_have_made(make_set: MakeSet) -> None:
    collectors = make_set(Net, few, 4)
    collectors._scheduler.request({1: CollectRequest(3)})  # as after an interrupt
    data, info = collectors.collect(listen_to=[lambda: True])
    assert info["num_steps"].tolist() == [0, 3]
    half = len(data.env_ids) // 2
    assert len(data) == 3
    assert data.valid[:, half:].all()
    assert not data.valid[:, :half].any()
    data, info = collectors.collect()
    assert info["num_steps"].tolist() == [4, 4]
    assert data.valid.all()


# ---------------------------------------------------------------- weights


def test_set_weights_reaches_all_collectors_and_counts_versions(make_set: MakeSet) -> None:
    collectors = make_set(Net, few, 4, weights=2)
    data, info = collectors.collect()
    assert (data.actions == 2).all()
    assert (collectors.version, info["version"].tolist(), info["staleness"].tolist()) == (0, [0, 0], [0, 0])
    collectors.set_weights(np.int64(3))
    data, info = collectors.collect()
    assert (data.actions == 3).all()
    assert info["version"].tolist() == [1, 1]
    collectors.set_weights(1, version=9)
    assert collectors.collect()[1]["version"].tolist() == [9, 9]
    collectors.update_policy("noise", 4)
    assert (collectors.collect()[0].extras["noise"] == 4).all()
    collectors.replace("policy", lambda rank: Net(rank + 5))
    data, info = collectors.collect()
    assert (data.actions == 0).all()
    assert (data.extras["noise"] == 0).all()
    collectors.replace("envs", partial(few, (3, 3, 3)))
    assert collectors.num_envs == 6
    assert collectors.collect()[0].states.shape == (4, 6, 2)


def test_refused_weights_and_settings_change_nothing(make_set: MakeSet) -> None:
    collectors = make_set(Net, few, 4, weights=1)
    with pytest.raises(LookupError, match="no such weights") as caught:
        collectors.set_weights(None)
    assert caught.value.__notes__[-1] == "The envs of a CollectorSet are its collectors."
    with pytest.raises(UnpicklableError, match=r"The argument of set_weights\(\) cannot be copied .* Nothing was sent"):
        collectors.set_weights(threading.Lock())
    with pytest.raises(AbsentAttributeError, match="name='nois'.* has no such attribute"):
        collectors.update_policy("nois", 1)
    assert collectors.version == 0
    assert (collectors.collect()[0].actions == 1).all()


def test_weights_refused_with_a_timeout_error_change_nothing(make_set: MakeSet) -> None:
    class Late(Net):
        def set_weights(self, weights: Any) -> None:
            raise WorkerTimeoutError("a ParallelEnv of this policy is late")

    collectors = make_set(Late, few, 4)
    with pytest.raises(WorkerTimeoutError, match="of this policy is late"):
        collectors.set_weights(1)
    assert collectors.version == 0


def test_weights_that_a_busy_collector_refuses_raise_once() -> None:
    with CollectorSet(1, Net, few, num_steps=4, para_mode=ORACLE) as collectors:
        next(collectors.stream())  # the collector has its next request already
        collectors.set_weights(None)
        with pytest.raises(LookupError, match="no such weights"):
            collectors.collect(8)
        assert collectors.collect(8)[1]["num_samples"] == 16


def test_new_policy_has_the_version_of_weights_that_a_busy_collector_did_not_load() -> None:
    with CollectorSet(1, Net, few, num_steps=4, para_mode=ORACLE) as collectors:
        next(collectors.stream())  # the collector has its next request already
        collectors.set_weights(3)
        collectors.replace("policy", Net)
        assert collectors.collect(8)[1]["version"].tolist() == [0]
        data, info = collectors.collect()
    assert (info["version"].tolist(), info["staleness"].tolist()) == ([1], [0])
    assert (data.actions == 0).all()


class Pondering(Net):
    """Collector 1 waits for a file before it takes weights."""

    def set_weights(self, weights: Any) -> None:
        if self.rank:
            self.deed()
        super().set_weights(weights)


@pytest.mark.parametrize("error", [KeyboardInterrupt, WorkerTimeoutError])
def test_set_weights_that_ctrl_c_or_a_timeout_ends_are_set_later(
    mode: str, make_set: MakeSet, tmp_path: Path, error: type[BaseException]
) -> None:
    is_late = error is WorkerTimeoutError
    if is_late and mode == ORACLE:
        pytest.skip("a call in the caller's own thread has no timeout")
    collectors = make_set(partial(Pondering, deed=partial(wait, tmp_path)), few, 4, timeout=1.0 if is_late else None)
    match = r"^collector 1 did not answer within 1.0 s\. The next call of the set" if is_late else "^$"
    with pytest.raises(error, match=match), when_waiting(tmp_path, (lambda: None) if is_late else interrupt):
        collectors.set_weights(5)
    (tmp_path / "go").touch()
    assert collectors.version == 1
    data, info = collectors.collect()
    assert (data.actions == 5).all()
    assert (info["version"].tolist(), info["staleness"].tolist()) == ([1, 1], [0, 0])
    collectors.set_weights(6)
    assert collectors.collect()[1]["version"].tolist() == [2, 2]


class Weighing(Pondering):
    """Its actions are the size of its weights."""

    def set_weights(self, weights: bytes) -> None:
        super().set_weights(len(weights))


@in_modes(PROCESSES)
def test_weights_that_are_too_large_for_a_busy_worker_are_set_later(make_set: MakeSet, tmp_path: Path) -> None:
    collectors = make_set(partial(Weighing, deed=partial(wait, tmp_path)), few, 4, timeout=1.0)
    for weights in (b"x", b"x" * 100_000):  # the second message does not fit into the pipe
        with pytest.raises(WorkerTimeoutError, match=r"^collector 1 did not answer within 1\.0 s\. The next call of"):
            collectors.set_weights(weights)
    (tmp_path / "go").touch()
    data, info = collectors.collect()
    assert (data.actions == 100_000).all()
    assert info["version"].tolist() == [2, 2]


# ---------------------------------------------------------------- streams


def test_stream_yields_ready_data_and_sends_newer_weights(make_set: MakeSet) -> None:
    collectors = make_set(Net, few, 12, start_steps=20)
    seen: list[tuple[int, int]] = []
    lengths: dict[int, list[int]] = {0: [], 1: []}
    for data, info in collectors.stream(num_collections=8):
        assert (data.actions == info["version"]).all()
        assert info["staleness"] == collectors.version - info["version"]
        assert info["num_steps"] == len(data)
        seen.append((info["collector"], info["version"]))
        lengths[info["collector"]].append(len(data))
        collectors.set_weights(collectors.version + 1)
    assert len(seen) == 8
    for one in (0, 1):
        versions = [version for rank, version in seen if rank == one]
        assert versions == sorted(versions)
        assert lengths[one] == [20, *[12] * (len(lengths[one]) - 1)]
    assert not collectors._scheduler.in_flight


def test_max_in_flight_limits_staleness_of_weights(make_set: MakeSet) -> None:
    collectors = make_set(Net, few, 4)
    versions = []
    for _, info in collectors.stream(max_in_flight=1, num_collections=6):
        versions.append(info["version"])
        assert info["staleness"] <= 1
        collectors.set_weights(0)
    assert versions[0] == 0
    assert versions[-1] >= 4


@in_modes(*IN_BACKGROUND)  # those of the oracle reply together
def test_busy_collector_gets_new_weights_before_its_next_batch(make_set: MakeSet, tmp_path: Path) -> None:
    collectors = make_set(partial(Net, deed=partial(wait, tmp_path)), partial(few, (1000,)), 10)
    stream = collectors.stream()
    assert next(stream)[1]["collector"] == 0
    collectors.set_weights(4)
    (tmp_path / "go").touch()
    found: dict[int, list[int]] = {0: [], 1: []}
    while len(found[1]) < 2:
        data, info = next(stream)
        assert (data.actions == 4 * info["version"]).all()
        found[info["collector"]].append(info["version"])
    assert found[1] == [0, 1]


def test_leaving_a_stream_loses_no_steps(make_set: MakeSet) -> None:
    collectors = make_set(Net, partial(few, (10**6,)), 8)
    last = np.zeros(2, int)
    for data, info in collectors.stream():
        assert data.states[0, 0, 1] == last[info["collector"]]
        last[info["collector"]] += len(data)
        if last.sum() >= 40:
            break
    data, _ = collectors.collect()
    assert data.states[0, :, 1].tolist() == last.tolist()
    for data, _ in collectors.stream(num_collections=3):
        assert data.starts.tolist() == [False]


def test_stream_ends_when_the_set_is_stopped() -> None:
    with CollectorSet(2, Net, few, num_steps=4, para_mode=ORACLE) as collectors:
        count = 0
        for _ in collectors.stream():
            count += 1
            if count == 3:
                collectors.stop()
    assert count == 3


def test_stream_ends_when_another_thread_stops_the_set(make_set: MakeSet, tmp_path: Path) -> None:
    collectors = make_set(partial(Net, deed=partial(wait, tmp_path)), few, 4)

    def stop() -> None:
        thread = threading.Timer(1, (tmp_path / "go").touch)
        thread.start()
        collectors.stop()
        thread.join()

    with when_waiting(tmp_path, stop):
        assert {info["collector"] for _, info in collectors.stream()} <= {0, 1}
    with pytest.raises(ClosedError, match=r"collect\(\) was called on a stopped CollectorSet"):
        collectors.collect()


# ---------------------------------------------------------------- deaths


@in_modes(*IN_WORKERS)
def test_dead_collector_is_replaced_and_loses_no_steps_it_has_sent(make_set: MakeSet, tmp_path: Path) -> None:
    make_policy = partial(Net, at=20, deed=partial(die_once, tmp_path))
    collectors = make_set(make_policy, partial(few, (1000, 1000)), 60, weights=3, seed=1)
    collectors.update_policy("noise", 2)
    data, info = collectors.collect()
    assert collectors.num_replaced == 1
    assert data.valid.all()
    assert info["num_steps"].tolist() == [60, 60]
    # Collector 1 has sent 16 steps of two envs, and died in the 4th of at most 44 steps that were then requested.
    assert 6 <= info["lost_samples"] <= 88
    assert data.truncated.sum(axis=0).tolist() == [0, 0, 1, 1]
    assert data.truncated[15].tolist() == [False, False, True, True]
    assert data.ended_states.tolist() == [[0, 16], [1, 16]]
    assert info["episode_lengths"].tolist() == [16, 16]
    assert info["episode_returns"].tolist() == [48, 48]
    assert data.states[14:18, 2, 1].tolist() == [14, 15, 0, 1]
    assert data.states[:, 0, 1].tolist() == list(range(60))
    assert (data.actions == 3).all()
    assert (data.extras["noise"] == 2).all()
    assert collectors.collect()[1]["lost_samples"] == 0


@in_modes(*IN_WORKERS)
def test_stream_continues_after_death_of_a_collector(make_set: MakeSet, tmp_path: Path) -> None:
    collectors = make_set(partial(Net, at=30, deed=partial(die_once, tmp_path)), few, 20, weights=3)
    lost, found = [], 0
    for data, info in collectors.stream():
        lost += [info["lost_samples"]] if info["lost_samples"] else []
        found += info["collector"] == 1 and bool(lost)
        assert (data.actions == 3).all()
        if found == 3:
            break
    assert lost == [40]  # all that was requested from it: 20 steps of two envs
    assert collectors.num_replaced == 1


@in_modes(*IN_WORKERS)
def test_idle_collector_that_dies_is_replaced(make_set: MakeSet) -> None:
    collectors = make_set(Net, few, 20, weights=3, seed=1)
    data, _ = collectors.collect()
    os.kill(int(data.extras["pid"][0, 2]), signal.SIGKILL)
    for _ in range(3):  # the death may be noticed after the next command was sent
        data, info = collectors.collect()
        assert info["lost_samples"] <= 40
        assert (data.actions == 3).all()
        assert data.valid.all()
    assert collectors.num_replaced == 1


@in_modes(*IN_WORKERS)
def test_replacement_collector_with_a_replaced_policy_has_the_current_version(make_set: MakeSet) -> None:
    collectors = make_set(Net, few, 20, weights=3)
    collectors.set_weights(4)
    collectors.replace("policy", Net)
    data, info = collectors.collect()
    os.kill(int(data.extras["pid"][0, 2]), signal.SIGKILL)
    for _ in range(3):  # the death may be noticed after the next command was sent
        data, info = collectors.collect()
        assert (info["version"].tolist(), info["staleness"].tolist()) == ([1, 1], [0, 0])
        assert (data.actions == 0).all()
    assert collectors.num_replaced == 1


@in_modes(*IN_WORKERS)
def test_replacement_collector_gets_a_different_seed(make_set: MakeSet, tmp_path: Path) -> None:
    make_policy = partial(Net, at=18, deed=partial(die_once, tmp_path))
    collectors = make_set(make_policy, lambda: ParallelEnv([zoo.Counter], ORACLE, "restart"), 16, seed=1)
    (first, _), (second, _) = collectors.collect(), collectors.collect()
    assert collectors.num_replaced == 1
    assert second.states[0, 1, 2] not in first.states[:, 1, 2]


@in_modes(*IN_WORKERS)
def test_collector_is_not_replaced_beyond_max_restarts(make_set: MakeSet) -> None:
    collectors = make_set(partial(Net, at=5, deed=die), few, 20, max_restarts=2)
    with pytest.raises(WorkerDiedError, match="is dead. It was killed by SIGKILL|is dead. Ray reports") as caught:
        collectors.collect()
    assert "It was collector 1 of a set, which died more often" in caught.value.__notes__[-1]
    assert collectors.num_replaced == 2


@in_modes(*IN_WORKERS)
def test_collector_death_during_evaluation_does_not_change_the_returns(make_set: MakeSet, tmp_path: Path) -> None:
    tests = partial(ParallelEnv, KINDS["array"]()[:2], ORACLE)
    collectors = make_set(partial(Net, deed=partial(die_once, tmp_path)), few, seed=1, weights=2, make_test_envs=tests)
    returns = collectors.evaluate(5).returns
    assert collectors.num_replaced == 1
    with CollectorSet(2, Net, few, num_steps=4, para_mode=ORACLE, seed=1, weights=2, make_test_envs=tests) as calm:
        assert_same(returns, calm.evaluate(5).returns)


@in_modes(*IN_WORKERS)
def test_interrupted_replacement_is_completed_later(make_set: MakeSet, tmp_path: Path) -> None:
    def make_policy(rank: int) -> Net:
        if rank == 1 and (tmp_path / "grave").exists():  # it is the replacement
            wait(tmp_path)
        return Net(rank, at=20, deed=partial(die_once, tmp_path))

    collectors = make_set(make_policy, partial(few, (1000,)), 40, weights=3)
    with pytest.raises(KeyboardInterrupt), when_waiting(tmp_path, interrupt):
        collectors.collect()
    (tmp_path / "go").touch()
    data, info = collectors.collect()
    assert info["num_steps"].tolist() == [40, 40]
    assert (data.actions == 3).all()
    assert collectors.num_replaced >= 1
    assert 3 <= info["lost_samples"] <= 24


def test_collector_survives_death_of_one_of_its_env_workers(make_set: MakeSet) -> None:
    def make_envs() -> ParallelEnv:
        return ParallelEnv([partial(Fragile, 10 * rank() + place) for place in range(3)], PROCESSES, "restart", 3)

    def exits(states: Any) -> Any:
        return np.where((states == [12, 4]).all(axis=1), EXIT, GO_ON)

    collectors = make_set(lambda: exits, make_envs)
    with pytest.raises(WorkerDiedError, match=r"The worker of env 2 \(process \d+\) is dead") as caught:
        collectors.collect()
    assert "It was raised in collector 1, which is an env of its set." in caught.value.__notes__
    assert "A collector has no restart(): replace('envs', make_envs)" in "".join(caught.value.__notes__)
    collectors.replace("envs", partial(few, (1000, 1000, 1000)))
    assert collectors.collect()[1]["num_steps"].tolist() == [40, 40]
    assert collectors.num_replaced == 0


# ---------------------------------------------------------------- other failures


def test_error_of_a_policy_keeps_steps_for_the_next_collect(make_set: MakeSet) -> None:
    collectors = make_set(partial(Net, at=20, deed=fail), partial(few, (1000,)), 60)
    with pytest.raises(ZeroDivisionError, match="not today") as caught:
        collectors.collect()
    assert "It was raised in collector 1, which is an env of its set." in caught.value.__notes__
    data, info = collectors.collect()
    assert info["num_steps"].tolist() == [60, 60]
    assert data.states[:60, 0, 1].tolist() == list(range(60))
    assert data.states[16:21, 1, 1].tolist() == [16, 17, 18, 0, 1]  # also those before the error
    assert np.argwhere(data.truncated).tolist() == [[18, 1]]
    assert info["episode_lengths"].tolist() == [19]
    assert (info["num_samples"], info["lost_samples"], collectors.num_replaced) == (120, 0, 0)


def test_error_of_an_env_ends_its_episode_at_its_last_step() -> None:
    script = Scripted(*[[GO_ON] * 2] * 16, [RAISE, GO_ON], [GO_ON] * 2)  # the first step after a collector has sent 16
    make_envs = partial(ParallelEnv, [partial(Fragile, 0), partial(Fragile, 1)], ORACLE, "restart")
    with CollectorSet(1, lambda: script, make_envs, num_steps=60, para_mode=ORACLE) as collectors:
        with pytest.raises(ZeroDivisionError, match="env 0 fell over"):
            collectors.collect()
        data, info = collectors.collect(100)
    assert data.truncated[15].tolist() == [True, False]
    assert data.truncated.sum(axis=0).tolist() == [1, 1]
    assert not data.valid[16, 0]
    assert info["episode_lengths"][0] == info["episode_returns"][0] == 16
    assert data.ended_states[0].tolist() == [0, 16]
    assert data.valid[-1].all()


class Twenty(Fragile):
    """Its episodes have 20 steps."""

    def step(self, action: Any) -> Any:
        state, reward, _, *rest = super().step(action)
        return state, reward, self.steps == 20, *rest


def test_episode_after_an_error_is_not_added_to_the_one_before() -> None:
    script = Scripted(*[[GO_ON] * 2] * 16, [RAISE, GO_ON], [GO_ON] * 2)
    make_envs = partial(ParallelEnv, [partial(Twenty, 0), partial(Twenty, 1)], ORACLE, "restart")
    with CollectorSet(1, lambda: script, make_envs, num_steps=16, para_mode=ORACLE) as collectors:
        collectors.collect()
        with pytest.raises(ZeroDivisionError, match="env 0 fell over"):
            collectors.collect()
        data, info = collectors.collect(40)
    assert not data.valid[:16, 0].any()  # the steps before the error are those of the first collection
    assert data.starts.tolist() == [True, False]
    assert info["episode_lengths"].tolist() == info["episode_returns"].tolist() == [20, 12, 20, 20]
    assert data.whole_episodes.tolist() == [False, True, True, True]


def test_episode_of_dict_states_is_cut_off_at_its_last_state() -> None:
    calls = itertools.count()

    def act(states: Any) -> Any:
        return fail() if next(calls) == 18 else zeros_of_dict(states)

    envs = [partial(Ranged, number, length=99) for number in range(2)]
    make_envs = partial(ParallelEnv, envs, ORACLE, "restart")
    with CollectorSet(1, lambda: act, make_envs, num_steps=40, para_mode=ORACLE) as collectors:
        with pytest.raises(ZeroDivisionError, match="not today"):
            collectors.collect()
        data, _ = collectors.collect()
    assert np.argwhere(data.truncated).tolist() == [[17, 0], [17, 1]]
    assert_same(list(data.ended_states), [{"place": np.array([number, 18.0])} for number in range(2)])


def test_interrupted_collection_is_returned_by_the_next_collect(mode: str, make_set: MakeSet, tmp_path: Path) -> None:
    collectors = make_set(partial(Net, at=21, deed=partial(wait, tmp_path)), partial(few, (1000,)), 40)
    with pytest.raises(KeyboardInterrupt), when_waiting(tmp_path, interrupt):
        collectors.collect()
    (tmp_path / "go").touch()
    data, info = collectors.collect()
    assert data.valid.all()
    assert info["num_samples"] == 80
    assert data.states[:, 0, 1].tolist() == list(range(40))
    if mode == ORACLE:  # there interrupted calls cannot be resumed
        assert 4 <= info["lost_samples"] <= 24
        assert data.states[:, 1, 1].tolist() == [*range(16), *range(24)]
        assert np.argwhere(data.truncated).tolist() == [[15, 1]]
    else:
        assert info["lost_samples"] == 0
        assert data.states[:, 1, 1].tolist() == list(range(40))


@pytest.mark.parametrize("name", ["send", "recv"])
def test_interrupt_between_a_message_and_its_record_loses_nothing(
    make_set: MakeSet, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    collectors = make_set(Net, partial(few, (1000, 1000)), 40)
    call = getattr(collectors._scheduler.env, name)

    def interrupted(*arguments: Any, **named: Any) -> Any:
        found = call(*arguments, **named)
        monkeypatch.undo()
        interrupt()
        return found

    monkeypatch.setattr(collectors._scheduler.env, name, interrupted)
    with pytest.raises(KeyboardInterrupt):
        collectors.collect()
    data, info = collectors.collect()
    assert (info["num_steps"].tolist(), info["lost_samples"]) == ([40, 40], 0)
    assert data.states[:, 2, 1].tolist() == list(range(40))


@in_modes(*IN_BACKGROUND)
def test_collector_timeout_is_raised_and_next_collect_keeps_waiting(make_set: MakeSet, tmp_path: Path) -> None:
    collectors = make_set(partial(Net, deed=partial(wait, tmp_path)), partial(few, (1000,)), 40, timeout=1.0)
    late = r"^collector 1 did not answer within 1\.0 s\. The next call of the set continues the wait\."
    with pytest.raises(WorkerTimeoutError, match=late):
        collectors.collect()
    (tmp_path / "go").touch()
    data, _ = collectors.collect()
    assert data.states[:, :, 1].T.tolist() == [list(range(40))] * 2


@in_modes(*IN_WORKERS)
def test_set_with_a_hung_collector_continues_and_stops_in_time(make_set: MakeSet, tmp_path: Path) -> None:
    hang = partial(wait, tmp_path, patience=10**4)
    collectors = make_set(partial(Net, deed=hang), partial(few, (1000,)), 10, timeout=1.0)
    with pytest.raises(WorkerTimeoutError, match="^collector 1 did not answer"):
        collectors.collect()
    collectors.set_weights(4)
    found = [(info["collector"], info["version"]) for _, info in itertools.islice(collectors.stream(), 3)]
    assert found == [(0, 0), (0, 1), (0, 1)]
    begin = time.monotonic()
    collectors.stop()  # the fixture checks for leaks
    assert time.monotonic() - begin < 20


# ---------------------------------------------------------------- evaluation, factories, compression


def test_evaluation_is_shared_by_all_collectors(make_set: MakeSet) -> None:
    tests = partial(ParallelEnv, KINDS["array"]()[:2], ORACLE)
    collectors = make_set(Net, few, 4, seed=1, weights=2, make_test_envs=tests)
    collectors.collect()
    found = collectors.evaluate(5)
    assert found.lengths.tolist() == [4, 4, 7, 4, 7]
    assert found.env_ids.tolist() == [0, 0, 1, 2, 3]
    assert collectors.evaluate(2).env_ids.tolist() == [0, 2]
    assert_same(found.returns, collectors.evaluate(5, progress=False).returns)
    assert found.returns[0] != found.returns[3]
    assert len(collectors.evaluate(1)) == 1
    assert collectors.history[-1].is_test
    stream = collectors.stream()
    next(stream)
    assert len(collectors.evaluate(4)) == 4  # collections in flight are received later
    assert next(stream)[1]["num_steps"] == 4
    with pytest.raises(ArgumentError, match="num_episodes=0 must be"):
        collectors.evaluate(0)
    with pytest.raises(ArgumentError, match="there are no test envs") as caught:
        make_set(Net, few, 4).evaluate(2)
    assert caught.value.__notes__[-1] == "The envs of a CollectorSet are its collectors."


def test_evaluation_with_a_seed_equals_that_of_one_collector_with_all_envs(make_set: MakeSet) -> None:
    envs = KINDS["array"]()[:4]
    collectors = make_set(Net, few, weights=2, make_test_envs=partial(own_envs, envs))
    tests = partial(ParallelEnv, envs, ORACLE)
    with Collector(Net, few, num_steps=4, weights=2, make_test_envs=tests) as single:
        assert_same(vars(single.evaluate(8, seed=3)), vars(collectors.evaluate(8, seed=3)))


def test_factory_can_be_pickled_and_creates_sets() -> None:
    factory = CollectorSet.create_factory(2, Net, few, num_steps=4, para_mode=ORACLE)
    again = cloudpickle.loads(cloudpickle.dumps(factory))
    with factory() as one, again(num_steps=6, weights=3) as other:
        assert len(one.collect()[0]) == 4
        data, _ = other.collect()
        assert (len(data), data.actions[0, 0]) == (6, 3)
    with factory(num_workers=3, num_steps=5) as larger:
        assert (len(larger), len(larger.collect()[0])) == (3, 5)
    with CollectorSet.create(1, Net, few, num_steps=3, para_mode=ORACLE) as made:
        assert made.collect()[0].valid.shape == (3, 2)


def test_compressed_data_are_equal_and_smaller(make_set: MakeSet) -> None:
    pytest.importorskip("zstandard")
    plain, packed = (make_set(Net, few, 200, compress_data=one) for one in (False, True))
    (expected, _), (found, info) = plain.collect(), packed.collect()
    del expected.extras["pid"], found.extras["pid"]
    assert_same(vars(expected), vars(found))
    assert info["num_bytes_sent"] < info["num_bytes"] / 3
    found.states[...] = 1
    for _, one in packed.stream(num_collections=1):
        assert one["num_bytes_sent"] < one["num_bytes"]


def test_compression_without_zstandard_names_the_package_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "zstandard", None)
    with pytest.raises(MissingDependencyError, match="compress_data=True needs .*'zstandard'.* pip install zstandard"):
        CollectorSet(1, Net, few, num_steps=4, para_mode=ORACLE, compress_data=True)


# ---------------------------------------------------------------- bad input and stop


@pytest.mark.parametrize(
    ("given", "match"),
    [
        ({"num_workers": 0}, "num_workers=0 must be an int of at least 1"),
        ({"max_restarts": 0}, "max_restarts=0 must be"),
        ({"compress_data": "lz4"}, "compress_data='lz4' must be True or False"),
        ({"fraction_samples": 0}, "fraction_samples=0 must be a number above 0 and at most 1"),
        ({"fraction_samples": 1.5}, "fraction_samples=1.5 must be"),
        ({"seed": -1}, "seed=-1 is not a seed"),
        ({"para_mode": "auto"}, "measures envs, but collectors are not envs. Give a mode"),
        ({"para_mode": "sub"}, "para_mode='sub' is not known"),
        ({"worker_resources": {"num_cpus": 1}}, "worker_resources was passed on as ray_options: only Ray"),
        ({"worker_resources": 3}, "worker_resources=3 must be a dict"),
        ({"on_failure": "restart"}, "on_failure='restart' is for envs, .* in make_envs"),
        ({"make_policy": lambda: zeros, "weights": 1}, "does not accept weights"),
        ({"make_policy": zeros}, "make_policy=.* needs states, but is only given rank, world_size and seed"),
        ({"make_test_envs": 3}, "make_test_envs=3 cannot be called"),
        ({"steps": 3}, "steps=3 is neither an argument of CollectorSet nor an option of para_mode="),
        ({"fraction_sample": 0.5}, "fraction_sample=0.5 is neither .* Did you mean 'fraction_samples'"),
        ({"context": "fork"}, "context='fork' is not an option of .* Give start_method"),
        ({"make_test_envs": lambda rank: few()}, "make_test_envs=.* needs rank. Give a function without arguments"),
    ],
)
def test_bad_arguments_are_refused(given: dict[str, Any], match: str) -> None:
    arguments: dict[str, Any] = {"num_workers": 1, "make_policy": Net, "make_envs": few, "num_steps": 4}
    with pytest.raises(ArgumentError, match=match):
        CollectorSet(**{**arguments, "para_mode": ORACLE, **given})


@pytest.mark.parametrize("name", ["make_policy", "make_envs", "make_test_envs"])
def test_unpicklable_collector_set_argument_is_named_in_the_error(name: str) -> None:
    lock = threading.Lock()
    arguments: dict[str, Any] = {"make_policy": Net, "make_envs": few, "num_steps": 4}
    with pytest.raises(UnpicklableError, match=f"_thread.lock.* makes such objects(.|\n)* {name}=.* cannot be pickled"):
        CollectorSet(1, **{**arguments, name: lambda: lock})


@pytest.mark.parametrize(
    ("given", "match"),
    [
        ({"num_steps": 0}, "num_steps=0 must be"),
        ({"num_collections": 0}, "num_collections=0 must be"),
        ({"max_in_flight": 0}, "max_in_flight=0 must be"),
        ({"max_in_flight": 2}, "max_in_flight=2 is more than 1 collector can have"),
    ],
)
def test_bad_arguments_of_stream_are_refused(given: dict[str, int], match: str) -> None:
    with CollectorSet(1, Net, few, num_steps=4, para_mode=ORACLE) as collectors:
        with pytest.raises(ArgumentError, match=match):
            collectors.stream(**given)
        assert len(collectors.collect()[0]) == 4


def test_failed_start_leaks_nothing() -> None:
    with pytest.raises(ZeroDivisionError, match="not today"):
        CollectorSet(2, Net, lambda: fail() if rank() else few(), num_steps=4)  # the fixture checks for leaks


@pytest.mark.filterwarnings("ignore:Setting 'object_store_memory' for:DeprecationWarning")  # Ray's own advice
@in_modes(RAY)
def test_ray_workers_get_the_requested_resources(make_set: MakeSet) -> None:
    class Asking(Net):
        def resources(self) -> Any:
            import ray

            return ray.get_runtime_context().get_assigned_resources()  # type: ignore[no-untyped-call]

    wanted = {"num_cpus": 1.5, "num_gpus": 0, "memory": 2**27, "object_store_memory": 2**26}
    collectors = make_set(Asking, few, 4, worker_resources=wanted)
    found = collectors._scheduler.env.customized_method("policy.resources")
    assert [[one[name] for name in ("CPU", "memory", "object_store_memory")] for one in found] == [
        [1.5, 2**27, 2**26]
    ] * 2
