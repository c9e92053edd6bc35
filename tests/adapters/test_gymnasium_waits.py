"""Asynchronous calls of the adapter for Gymnasium, and the calls that are refused in the meantime."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from functools import partial
from operator import methodcaller
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import MakeEnv
from fragile import GO_ON, fragile
from fragile import WAIT as HANG
from gymnasium.error import AlreadyPendingCallError, ClosedEnvironmentError, NoAsyncCallError
from gymnasium.vector import AsyncVectorEnv
from modes import PROCESSES, THREADS, here_and_in_processes, in_modes

from adapters.envs import Looped, Slow, interrupt_step
from parallelenv.errors import ArgumentError, WorkerTimeoutError

ZEROS = np.zeros(3, dtype=np.int64)
ONE_ONE = np.array([0, 1, 0])


BEGIN: dict[str, Callable[[Any], Any]] = {
    "reset": lambda env: env.reset_async(),
    "step": lambda env: env.step_async(ZEROS),
    "call": lambda env: env.call_async("add", 1),
}
ANYTHING: dict[str, Callable[[Any], Any]] = {
    **BEGIN,
    "whole reset": lambda env: env.reset(),
    "whole step": lambda env: env.step(ZEROS),
    "whole call": lambda env: env.get_attr("length"),
    "attribute": lambda env: env.call("length"),
    "set": lambda env: env.set_attr("length", 1),
    "render": lambda env: env.render(),
    "generators": lambda env: env.np_random,
    "seeds": lambda env: env.np_random_seed,
}
WAIT: dict[str, Callable[[Any], Any]] = {name: methodcaller(f"{name}_wait") for name in BEGIN}
REFUSALS = (AlreadyPendingCallError, NoAsyncCallError, ClosedEnvironmentError)


@here_and_in_processes
def test_close_warns_of_a_step_that_is_lost(make: Any) -> None:
    env = make()
    env.reset()
    env.step_async(ZEROS)
    with pytest.warns(UserWarning, match=r"^close\(\) was called while step_async\(\) waits for step_wait\(\)") as told:
        env.close()
    assert told[0].filename == __file__
    env.close()


def refusal(call: Callable[[Any], Any], env: Any, message: str | None = None) -> tuple[type[Exception], str | None]:
    """Return the class of Gymnasium's error that a call raises, and the call that it names."""
    with pytest.raises(REFUSALS, match=message) as caught:
        call(env)
    kind = next(known for known in REFUSALS if isinstance(caught.value, known))
    return kind, getattr(caught.value, "name", None)


@here_and_in_processes
def test_errors_equal_those_of_async_vector_env(make: Any) -> None:
    theirs = AsyncVectorEnv([Looped] * 3, shared_memory=False, context="forkserver")
    both = make(), theirs
    try:
        for env in both:
            env.reset()
        for begun in (None, *BEGIN):
            others = {
                wait: rf"{name}_wait\(\) was called, but {name}_async\(\) was not"
                for name, wait in WAIT.items()
                if name != begun
            }
            if begun is not None:
                others |= dict.fromkeys(ANYTHING.values(), rf"while {begun}_async\(\) waits for {begun}_wait\(\)")
                for env in both:
                    BEGIN[begun](env)
            for call, message in others.items():
                assert refusal(call, both[0], message) == refusal(call, theirs)
            if begun is not None:
                for env in both:
                    WAIT[begun](env)
    finally:
        for env in both:
            env.close()
            env.close()
    for call in (*ANYTHING.values(), *WAIT.values()):
        assert refusal(call, both[0]) == refusal(call, theirs) == (ClosedEnvironmentError, None)


@in_modes(PROCESSES, THREADS)
def test_to_gymnasium_of_a_busy_env_raises_timeout_error(make_env: MakeEnv, tmp_path: Path) -> None:
    env = make_env(fragile(tmp_path), num_cpus=2, timeout=0.3)
    env.reset()
    for call in (lambda: env.customized_method("wait", id=0), lambda: env.to_gymnasium("SameStep")):
        with pytest.raises(WorkerTimeoutError, match=r"did not answer within 0.3 s\..* Give a longer timeout, or"):
            call()
    (tmp_path / "go").touch()
    assert env.get_env_attr("number") == [0, 1, 2, 3]  # it continued unchanged
    vector_env = env.to_gymnasium("SameStep")
    vector_env.reset()
    assert vector_env.step([GO_ON] * 4)[0][:, 1].tolist() == [1, 1, 1, 1]


@in_modes(PROCESSES, THREADS)
@pytest.mark.parametrize(
    ("name", "begin", "expected"),
    [
        ("step", methodcaller("step_async", ONE_ONE), 1),
        ("reset", methodcaller("reset_async", options={"rest": 0.3}), 0),
        ("call", methodcaller("call_async", "rest", 0.3), 0.3),
    ],
)
def test_waits_can_be_repeated_after_a_timeout_or_an_error(name: str, begin: Any, expected: float, make: Any) -> None:
    env = make([partial(Slow, 9)] * 3)
    env.reset()
    begin(env)
    wait = getattr(env, f"{name}_wait")
    with pytest.raises(ArgumentError, match="timeout='x' must be a positive number of seconds"):
        wait("x")
    with pytest.raises(AlreadyPendingCallError, match=rf"while {name}_async\(\) waits for {name}_wait\(\)"):
        env.get_attr("length")
    message = rf"did not answer within 0.05 s\. Continue to wait with {name}_wait\(\), give a longer timeout"
    with pytest.raises(multiprocessing.TimeoutError, match=message) as caught:
        wait(timeout=0.05)
    assert isinstance(caught.value, WorkerTimeoutError)
    found = wait(timeout=60)
    assert np.ravel(found if name == "call" else found[0]).tolist() == [expected] * 3
    with pytest.raises(NoAsyncCallError):
        wait()
    assert env.step(ZEROS)[0].tolist() == [[2 if name == "step" else 1]] * 3


@here_and_in_processes
def test_wait_is_over_if_an_env_itself_raises_a_timeout_error(make: Any) -> None:
    class Late(Looped):
        def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
            raise WorkerTimeoutError("inside")

    env = make([Looped, Late, Looped])
    env.reset_async()
    with pytest.raises(WorkerTimeoutError, match="inside"):
        env.reset_wait()
    with pytest.raises(NoAsyncCallError):
        env.reset_wait()


def time_out(env: Any) -> None:
    env.step_async(ONE_ONE)
    with pytest.raises(TimeoutError):
        env.step_wait(timeout=0.05)


@in_modes(PROCESSES, THREADS)
@pytest.mark.parametrize("leave", [time_out, interrupt_step])
def test_late_or_interrupted_step_can_be_received_or_dropped(leave: Callable[[Any], None], make: Any) -> None:
    env = make([partial(Slow, 9)] * 3)
    env.reset()
    for end, expected in ((env.step_wait, 1), (env.reset, 0)):
        leave(env)
        with pytest.raises(AlreadyPendingCallError, match=r"Get it with step_wait\(\), or drop it with reset\(\)"):
            env.step(ZEROS)
        assert end()[0].tolist() == [[expected]] * 3
    assert env.step(ZEROS)[0].tolist() == [[1]] * 3


@in_modes(THREADS, PROCESSES)
def test_reset_of_some_envs_is_refused_while_the_step_of_others_is_late(make_env: MakeEnv, tmp_path: Path) -> None:
    env: Any = make_env(fragile(tmp_path), num_cpus=4, timeout=0.5).to_gymnasium()
    env.reset()
    with pytest.raises(WorkerTimeoutError):
        env.step([HANG, GO_ON, GO_ON, GO_ON])
    with pytest.raises(AlreadyPendingCallError, match=r"step_wait\(\), or drop it with reset\(\) of all envs"):
        env.reset(options={"reset_mask": np.array([False, True, True, True])})
    (tmp_path / "go").touch()
    assert env.step_wait(30)[0][:, 1].tolist() == [1] * 4
