"""Envs and policies that call the `ParallelEnv` that is running them: the call is refused before anything happens."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable
from typing import Any, ClassVar

import numpy as np
import pytest
from conftest import MakeEnv
from modes import IN_CALLER, ORACLE, PROCESSES, THREADS, in_modes

from parallelenv import ParallelEnv, get_worker_info
from parallelenv.errors import ClosedError, UsageError
from parallelenv.testing.envs import Counter

NUM_ENVS = 3
REFUSED = r"by an env of this ParallelEnv, or by a policy that runs in a worker\. .*cannot answer.*set_env_attr"


class Calling(Counter):
    """Env ``caller`` makes a call of the `ParallelEnv` where it is asked to; all envs count their steps."""

    parallel_env: ClassVar[Any] = None  # a class attribute is not copied with instances and env fns
    act: ClassVar[Callable[[Any], object]]
    where: ClassVar = ""
    caller: ClassVar = 1

    def __init__(self) -> None:
        info = get_worker_info()
        assert info is not None
        super().__init__(info.env_id)
        self.num_steps = 0
        self.call_in("constructor")

    def call_in(self, where: str) -> int:
        if where == Calling.where and self.number == Calling.caller and Calling.parallel_env is not None:
            Calling.act(Calling.parallel_env)
        return self.num_steps

    def reset(self, **kwargs: Any) -> Any:
        self.call_in("reset")
        return super().reset(**kwargs)

    def step(self, action: Any) -> Any:
        self.num_steps += 1
        self.call_in("step")
        return super().step(action)

    def render(self) -> Any:
        self.call_in("render")
        return np.zeros((2, 2, 3), np.uint8)

    @property
    def looked_up(self) -> int:
        return self.call_in("property")

    def close(self) -> None:
        self.call_in("close")

    def give(self) -> Any:
        return Given(self)


class Given:
    """Makes the call while it is copied."""

    def __init__(self, env: Calling) -> None:
        self.env = env

    def __reduce__(self) -> Any:
        self.env.call_in("copying")
        return str, ("a copy",)


@pytest.fixture
def env(make_env: MakeEnv) -> Any:
    """Three envs in two workers, after a reset; `Calling.parallel_env` is set."""
    Calling.caller, Calling.where = 1, ""
    env = make_env([Calling] * NUM_ENVS, num_cpus=2, asynchronous="restart", timeout=20.0)
    env.reset(seed=0)
    Calling.parallel_env = env
    yield env
    Calling.parallel_env, Calling.where = None, ""
    gc.collect()


def calling(where: str, act: Callable[[Any], object]) -> None:
    Calling.where, Calling.act = where, staticmethod(act)


STEP = [1] * NUM_ENVS
CALLS: dict[str, Callable[[ParallelEnv], Any]] = {
    "get_env_attr": lambda env: env.get_env_attr("num_steps"),
    "set_env_attr": lambda env: env.set_env_attr("level", 3),
    "customized_method": lambda env: env.customized_method("call_in", {"where": "nowhere"}, id=0),
    "step": lambda env: env.step(STEP),
    "send": lambda env: env.send([1], 0),
    "recv": lambda env: env.recv(1),
    "reset": lambda env: env.reset(0),
    "restart": lambda env: env.restart(0),
    "pause": lambda env: env.pause(0),
    "render": lambda env: env.render(0),
    "save_state": lambda env: env.save_state(),
    "rollout": lambda env: env.rollout(acts, 2),
    "run_episodes": lambda env: env.run_episodes(acts, 2),
    "to_gymnasium": lambda env: env.to_gymnasium("SameStep"),
}


def acts(states: Any) -> Any:
    return [1] * len(states)


@in_modes(*IN_CALLER)
@pytest.mark.parametrize("call", CALLS)
def test_call_within_a_step_is_refused_and_no_env_steps_twice(env: ParallelEnv, call: str) -> None:
    for _ in range(3):  # later steps may be planned
        env.step(STEP)
    calling("step", CALLS[call])
    for num_steps in (4, 5):
        with pytest.raises(UsageError, match=rf"^{call}\b.*\(\) was called during step\(\) {REFUSED}") as caught:
            env.step(STEP)
        assert "Raised by env 1 in step" in caught.value.__notes__[0]
        assert caught.value.partial.env_ids.tolist() == [0, 2]  # type: ignore[attr-defined]
        assert env.get_env_attr("num_steps") == [num_steps] * NUM_ENVS
        assert not env.paused.any()
    calling("", CALLS[call])
    assert env.step(STEP).env_ids.tolist() == [0, 1, 2]
    assert env.get_env_attr("num_steps") == [6] * NUM_ENVS


PLACES: dict[str, tuple[str, Callable[[ParallelEnv], Any]]] = {
    "reset": ("reset", lambda env: env.reset()),
    "render": ("render", lambda env: env.render()),
    "property": ("get_env_attr", lambda env: env.get_env_attr("looked_up")),
    "anywhere": ("customized_method", lambda env: env.customized_method("call_in", {"where": "anywhere"})),
    "constructor": ("restart", lambda env: env.restart()),
    "step": ("rollout", lambda env: env.rollout(acts, 2, progress=False)),
    "copying": ("customized_method", lambda env: env.customized_method("give")),
}


@in_modes(*IN_CALLER)
@pytest.mark.parametrize("place", PLACES)
def test_call_within_any_other_call_is_refused(env: ParallelEnv, place: str) -> None:
    outer, run = PLACES[place]
    calling(place, CALLS["get_env_attr"])
    with pytest.raises(Exception, match=rf"get_env_attr\(\) was called during {outer}\(\) {REFUSED}") as caught:
        run(env)
    assert "Raised by env 1" in caught.value.__notes__[0]
    calling("", CALLS["get_env_attr"])
    env.restart(1)
    env.reset()
    assert env.step(STEP).env_ids.tolist() == [0, 1, 2]


@in_modes(ORACLE)
def test_call_by_an_env_whose_step_was_sent_is_refused(env: ParallelEnv) -> None:
    calling("step", CALLS["get_env_attr"])
    env.send(STEP)
    with pytest.raises(UsageError, match=rf"get_env_attr\(\) was called during recv\(\) {REFUSED}"):
        env.recv(min_envs=NUM_ENVS)
    assert env.get_env_attr("num_steps") == [1] * NUM_ENVS


@in_modes(THREADS)
def test_call_by_a_worker_thread_while_there_is_no_other_call_is_refused(env: ParallelEnv) -> None:
    def act(env: ParallelEnv) -> None:
        is_sent.wait(10.0)
        env.get_env_attr("num_steps")

    is_sent = threading.Event()
    calling("step", act)
    env.send(STEP)
    is_sent.set()
    pool: Any = env.engine.pool
    pool.backend.wait([pool._workers[0].channel], 20.0)
    with pytest.raises(UsageError, match=rf"get_env_attr\(\) was called {REFUSED}"):
        env.recv(min_envs=NUM_ENVS)
    assert env.get_env_attr("num_steps") == [1] * NUM_ENVS


@in_modes(PROCESSES)
def test_call_within_the_callers_share_is_refused(make_env: MakeEnv) -> None:
    env = make_env([Calling] * 4, num_cpus=2, asynchronous="restart", caller_steps=True, timeout=20.0)
    (own,) = [worker.env_ids for worker in env.engine.pool._workers if worker.channel.in_caller]
    env.reset()
    for _ in range(3):
        env.step([1] * 4)
    calling("step", CALLS["get_env_attr"])
    Calling.caller, Calling.parallel_env = own[0], env
    try:
        for _ in range(2):
            with pytest.raises(UsageError, match=rf"get_env_attr\(\) was called during step\(\) {REFUSED}") as caught:
                env.step([1] * 4)
            assert caught.value.env_ids == own[:1]  # type: ignore[attr-defined]
    finally:
        Calling.parallel_env = None
    assert env.get_env_attr("num_steps") == [5] * 4


@in_modes(*IN_CALLER)
def test_policy_that_runs_in_a_worker_may_not_call(env: ParallelEnv) -> None:
    with pytest.raises(UsageError, match=rf"get_env_attr\(\) was called during rollout\(\) {REFUSED}") as caught:
        env.rollout(asks, 3, progress=False)
    assert "Raised by the policy" in caught.value.__notes__[0]
    env.reset()
    assert env.step(STEP).env_ids.tolist() == [0, 1, 2]


def asks(states: Any) -> Any:
    Calling.parallel_env.get_env_attr("num_steps")
    return acts(states)


def test_policy_in_the_caller_may_call(env: ParallelEnv) -> None:
    env.run_episodes(asks, NUM_ENVS, progress=False)
    env.reset()
    for place, _ in enumerate(env.stream(asks)):
        if place == 5:
            break
    env.reset()
    assert env.step(STEP).env_ids.tolist() == [0, 1, 2]


@in_modes(*IN_CALLER)
def test_env_may_close_the_object(env: ParallelEnv) -> None:
    calling("step", lambda env: env.close())
    with pytest.raises(ClosedError, match=r"closed while step\(\) was running"):
        env.step(STEP)
    assert env.closed


class Owning(Counter):
    """Steps envs of its own in each step."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = ParallelEnv([Counter] * 2, "thread", num_cpus=2)
        self.inner.reset()

    def step(self, action: Any) -> Any:
        self.inner.step([1, 1])
        self.inner.send([1, 1])
        self.inner.recv(2)
        self.inner.get_env_attr("spec")
        return super().step(action)

    def close(self) -> None:
        self.inner.close()


def test_env_may_call_its_own_envs(make_env: MakeEnv) -> None:
    env = make_env([Owning] * 2, num_cpus=2)
    env.reset()
    for _ in range(4):
        assert env.step([1, 1]).env_ids.tolist() == [0, 1]
