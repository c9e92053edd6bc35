"""The adapter for Tianshou equals `DummyVectorEnv`, collectors accept it, and it can be used after failures."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from functools import partial
from typing import Any

import gymnasium
import numpy as np
import pytest
from conftest import MakeEnv
from modes import LOCAL, PROCESSES, THREADS, here_and_in_processes, in_modes

from adapters.envs import Fragile, Looped, Slow, Varied, interrupt_step
from adapters.neighbours import Twins, require
from parallelenv import ParallelEnv
from parallelenv.errors import ArgumentError, EnvBusyError, InvalidEnvError, NothingInFlightError, WorkerTimeoutError
from parallelenv.results import difference

NUM_ENVS = 5
ZEROS = [0, 0, 0]
ONE_ONE = [0, 1, 0]
apart = in_modes(THREADS, PROCESSES)


@pytest.mark.neighbours
@pytest.mark.parametrize("kind", ["vector", "number", "image", "dict", "text"])
def test_steps_and_resets_equal_those_of_dummy_vector_env(kind: str, make_env: MakeEnv, num_steps: int) -> None:
    env_fns = [partial(Varied, kind, 4.0 + number, is_plain=False) for number in range(NUM_ENVS)]
    twins = Twins(make_env(env_fns, num_cpus=2).to_tianshou(), require("tianshou.env").DummyVectorEnv(env_fns))
    twins.seed(3)
    twins.same("action_space")
    samples = [[space.sample() for space in env.action_space] for env in (twins.ours, twins.theirs)]
    assert difference(samples[0], samples[1]) is None
    twins.reset(options={"level": 2})
    random = np.random.default_rng(7)
    for _ in range(num_steps):
        ids = random.permutation(NUM_ENVS)[: random.integers(1, NUM_ENVS + 1)].tolist()
        actions = [twins.theirs.action_space[env_id].sample() for env_id in ids]
        *_, terminated, truncated, infos = twins.step(actions, ids)
        ended = ids_of([infos[terminated | truncated]])
        if ended:
            twins.reset(ended)
    twins.reset(0)
    twins.reset(seed=7)
    twins.get_env_attr("mean")
    twins.set_env_attr("mean", 3.0, [1, 2])
    twins.get_env_attr("mean", 2)


@pytest.mark.filterwarnings("ignore:Using async setting")
@pytest.mark.neighbours
@here_and_in_processes
@pytest.mark.parametrize("is_async", [False, True])
def test_collectors_collect_the_same_as_with_dummy_vector_env(is_async: bool, make_env: MakeEnv) -> None:
    torch = require("torch")
    env, data = require("tianshou.env"), require("tianshou.data")
    base = require("tianshou.algorithm.algorithm_base")

    class Leaning(base.Policy):  # type: ignore[misc, name-defined]
        def forward(self, batch: Any, state: Any = None, **kwargs: Any) -> Any:
            leans = torch.as_tensor((batch.obs[:, 2] > 0).astype(np.int64))
            nothing = torch.zeros(len(leans), 1)  # required by the async collector
            return data.Batch(act=leans, state=nothing, policy=data.Batch(nothing=nothing))

    options: dict[str, Any] = {"wait_num": 3} if is_async else {}
    collector_class = data.AsyncCollector if is_async else data.Collector
    ours = make_env(["CartPole-v1"] * 4, num_cpus=4).to_tianshou(**options)
    theirs = env.DummyVectorEnv([partial(gymnasium.make, "CartPole-v1")] * 4, **options)
    found = []
    for venv in (ours, theirs):
        buffer = data.VectorReplayBuffer(2000, 4)
        collector = collector_class(Leaning(action_space=venv.action_space[0]), venv, buffer)
        venv.seed(3)
        collector.reset()
        collector.collect(n_step=400)
        found.append([buffer.obs[:400], buffer.act[:400], buffer.rew[:400], buffer.terminated[:400]])
        assert len(buffer) >= 400
    if not is_async:  # otherwise the result depends on which env finishes first
        assert difference(found[0], found[1]) is None


def ids_of(step: Any) -> list[int]:
    return [info["env_id"] for info in step[-1]]


@apart
def test_step_returns_when_wait_num_envs_have_finished(make_env: MakeEnv) -> None:
    env: Any = make_env([partial(Slow, 9)] * 3, num_cpus=3).to_tianshou(wait_num=2)
    assert env.is_async
    env.reset()
    assert sorted(ids_of(env.step([0, 1, 0]))) == sorted(env.ready_id) == [0, 2]
    assert env.waiting_id == [1]
    calls: list[Callable[[], Any]] = [
        partial(env.step, [0], [1]),
        partial(env.reset, [1]),
        partial(env.get_env_attr, "length", 1),
        partial(env.set_env_attr, "length", 2, 1),
        env.render,
        partial(env.seed, 1),
    ]
    for call in calls:
        with pytest.raises(EnvBusyError, match=r"envs \[1\] have a step in flight"):
            call()
    late = env.step(None)
    assert (ids_of(late), late[0].tolist(), env.waiting_id) == ([1], [[1]], [])
    with pytest.raises(NothingInFlightError, match="No step is in flight to wait for"):
        env.step(None)


@apart
def test_step_returns_finished_envs_after_timeout(make_env: MakeEnv) -> None:
    env: Any = make_env([partial(Slow, 9)] * 3, num_cpus=3).to_tianshou(timeout=0.2)
    env.reset()
    assert ids_of(env.step([1, 1, 0])) == [2]
    ids: list[int] = []
    while env.waiting_id:
        ids += ids_of(env.step(None))
    assert sorted(ids) == [0, 1]


@here_and_in_processes
@pytest.mark.parametrize("kind", [WorkerTimeoutError, NothingInFlightError])
def test_error_of_a_parallel_env_in_an_env_does_not_end_the_wait(kind: Any, make_env: MakeEnv) -> None:
    env: Any = make_env([partial(Fragile, 9, partial(kind, "inside"))] * 3, num_cpus=3).to_tianshou(timeout=30.0)
    env.reset()
    with pytest.raises(kind, match="inside") as caught:
        env.step(ONE_ONE)
    assert sorted(caught.value.partial.env_ids.tolist()) == [0, 2]


@here_and_in_processes
def test_envs_are_reached_by_id_and_reset_only_by_the_user(make_env: MakeEnv) -> None:
    env_fns = [partial(Looped, length) for length in (2, 5, 6)]
    env: Any = make_env(env_fns, asynchronous="restart", copy=False).to_tianshou()
    assert len(env) == env.env_num == 3
    env.reset()
    first = env.step(ZEROS)[0]
    env.step(ZEROS)
    assert env.step(ZEROS)[0].tolist() == [[3]] * 3  # env 0 has ended
    assert first.tolist() == [[1]] * 3  # a copy, even with `copy=False`
    assert env.reset([-1, 0])[0].tolist() == [[0]] * 2
    assert [frame.max() for frame in env.render()] == [0, 3, 0]
    assert ids_of(env.step([0], -1)) == [2]
    assert [len(part) for part in env.step([], [])] == [0] * 5
    assert env.get_env_attr("length", [-1, 0]) == [6, 2]
    env.set_env_attr("length", [1, 2], -1)
    assert env.get_env_attr("length") == [2, 5, [1, 2]]
    with pytest.raises(AttributeError, match="envs 0, 1, 2 have no attribute 'nonsense'"):
        env.get_env_attr("nonsense")


def test_invalid_arguments_are_refused() -> None:
    with ParallelEnv(["Blackjack-v1"]) as env, pytest.raises(InvalidEnvError, match="Tianshou does not accept tuples"):
        env.to_tianshou()
    with ParallelEnv([Looped] * 2) as env:
        for name, value in (("wait_num", 0), ("wait_num", 3), ("wait_num", 1.5), ("timeout", 0)):
            with pytest.raises(ArgumentError, match=f"{name}={value}"):
                env.to_tianshou(**{name: value})  # type: ignore[arg-type]
        adapter = env.to_tianshou()
        adapter.reset()
        with pytest.raises(ArgumentError, match="action=None only waits"):
            adapter.step(None)


@in_modes(PROCESSES)
def test_async_mode_warns_if_envs_share_workers(make_env: MakeEnv) -> None:
    with pytest.warns(UserWarning, match=r"3 envs share 2 workers.*num_cpus=len\(envs\)") as caught:
        make_env([Looped] * 3, num_cpus=2).to_tianshou(wait_num=2)
    assert caught[0].filename == __file__
    # These do not warn, or the warning would be raised.
    make_env([Looped] * 3, num_cpus=3).to_tianshou(timeout=1.0)
    make_env([Looped] * 3, num_cpus=2).to_tianshou()
    ParallelEnv([Looped] * 3).to_tianshou(wait_num=2).close()  # dummy mode has one worker


# -------------------------------------------------------------------- after failures


@in_modes(*LOCAL)
def test_env_that_raised_is_no_longer_waiting(make_env: MakeEnv) -> None:
    def finish(actions: Any) -> list[int]:
        ids = ids_of(env.step(actions))
        while env.waiting_id:
            ids += ids_of(env.step(None))
        return sorted(ids)

    env: Any = make_env([partial(Fragile, 9)] * 3, num_cpus=3).to_tianshou(wait_num=1)
    env.reset()
    with pytest.raises(KeyError):
        finish(ONE_ONE)
    while env.waiting_id:
        env.step(None)
    assert env.ready_id == finish(ZEROS) == [0, 1, 2]


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


@apart
def test_late_step_can_be_received_with_action_none(make_env: MakeEnv) -> None:
    env: Any = make_env([partial(Slow, 9)] * 3, num_cpus=3, timeout=0.1).to_tianshou()
    env.reset()
    with pytest.raises(WorkerTimeoutError, match=r"Continue to wait with step\(None\), give a longer timeout"):
        env.step(ONE_ONE)
    while env.waiting_id:
        with contextlib.suppress(WorkerTimeoutError):
            assert env.step(None)[0].tolist() == [[1], [1], [1]]
