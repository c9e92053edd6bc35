"""Envs that call `sys.exit`, and other exceptions that ``except Exception`` does not catch, in every mode."""

from __future__ import annotations

import signal
import sys
import traceback
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
from conftest import MakeEnv
from fragile import GO_ON, Fragile
from modes import IN_BACKGROUND, LOCAL, ORACLE, in_modes
from scripts import run

from parallelenv.contract.worker_info import running_hosts
from parallelenv.errors import EnvError, UnpicklableError, WorkerDiedError
from parallelenv.worker import rollout_recorder
from parallelenv.worker.rollout_recorder import new_chunk


class StopAllError(BaseException):
    """An error of a library that must not be caught by accident."""


ERRORS = {
    "sys.exit(0)": SystemExit(0),
    "GeneratorExit": GeneratorExit(),
    "KeyboardInterrupt": KeyboardInterrupt(),
    "StopAllError": StopAllError("enough"),
    "a group": BaseExceptionGroup("several", [SystemExit(3), ValueError("and more")]),
}


class Exiting(Fragile):
    """Raises ``error`` where it is asked to."""

    def __init__(self, number: int, error: str = "sys.exit(0)", where: str = "") -> None:
        super().__init__(number)
        self.error, self.where = error, where
        self.exit("constructor")

    def exit(self, where: str) -> int:
        if where == self.where and self.number == 1:
            raise ERRORS[self.error]
        return self.number

    def reset(self, **kwargs: Any) -> Any:
        self.exit("reset")
        return super().reset(**kwargs)

    def step(self, action: Any) -> Any:
        self.exit("step")
        return super().step(action)

    def close(self) -> None:
        self.exit("close")


def envs(*arguments: Any, cls: Callable[..., Any] = Exiting) -> list[Any]:
    return [partial(cls, number, *arguments) for number in range(4)]


def check(error: BaseException, call: str, cause: BaseException = ERRORS["sys.exit(0)"]) -> None:
    """Check that an error names the env, the call, and the type and text of the exception that the env raised."""
    assert type(error) is EnvError
    assert type(cause).__name__ in str(error)
    assert str(cause) in str(error)
    assert type(error.__cause__) is type(cause)
    text = "".join(traceback.format_exception(error))
    assert [part for part in (f"Raised by env 1 in {call}", "raise ERRORS[self.error]") if part not in text] == [], text


@pytest.mark.parametrize("error", ERRORS)
def test_exit_of_an_env_is_an_error_that_names_the_env(make_env: MakeEnv, mode: str, error: str) -> None:
    if (error, mode) == ("KeyboardInterrupt", ORACLE):
        pytest.skip("there it cannot be distinguished from Ctrl-C")
    env = make_env(envs(error, "step"), num_cpus=2)
    env.reset()
    with pytest.raises(EnvError) as caught:
        env.step([GO_ON] * 4)
    check(caught.value, "step", ERRORS[error])
    assert caught.value.partial.env_ids.tolist() == [0, 2, 3]  # type: ignore[attr-defined]
    assert env.step([GO_ON] * 3, [0, 2, 3]).states[:, 1].tolist() == [2] * 3


def test_exit_in_any_call_is_an_error(make_env: MakeEnv) -> None:
    with pytest.raises(EnvError) as caught:
        make_env(envs("sys.exit(0)", "constructor"), num_cpus=2)
    check(caught.value, "its constructor")
    env = make_env(envs("sys.exit(0)", "reset"), num_cpus=2)
    with pytest.raises(EnvError) as caught:
        env.reset()
    check(caught.value, "reset")
    env.set_env_attr("where", "any method")
    with pytest.raises(EnvError) as caught:
        env.customized_method("exit", {"where": "any method"})
    check(caught.value, "exit()")
    env.set_env_attr("where", "close")
    assert env.reset().shape == (4, 2)


@pytest.mark.parametrize("asynchronous", ["restart", "continue"])
def test_restarted_env_has_failed_by_its_exit(make_env: MakeEnv, asynchronous: Any) -> None:
    env = make_env(envs("sys.exit(0)", "step"), num_cpus=2, asynchronous=asynchronous, on_failure="restart")
    env.reset()
    result = env.step([GO_ON] * 4)
    assert result.truncated.tolist() == [False, True, False, False]
    check(result.infos[1]["failure"], "step")


def exits(states: Any) -> Any:
    sys.exit("no actions today")


def test_exit_of_a_policy_is_an_error(make_env: MakeEnv) -> None:
    env = make_env(envs(), num_cpus=2, asynchronous="restart")
    env.reset()
    with pytest.raises(EnvError, match="SystemExit: no actions today") as caught:
        env.rollout(exits, 3, progress=False)
    assert "Raised by the policy for envs 0, 1" in caught.value.__notes__[0]
    assert env.reset().shape == (4, 2)


class Uncopyable:
    """Exits when it is copied, pickled or unpickled."""

    def __init__(self, when: str) -> None:
        self.when = when

    def __deepcopy__(self, memo: object) -> Any:
        sys.exit("no copies")

    def __reduce__(self) -> Any:
        return (sys.exit, ("no copies",)) if self.when == "unpickled" else sys.exit("no copies")


class Giving(Exiting):
    """Gives away what cannot be copied."""

    def step(self, action: Any) -> Any:
        state, reward, *flags, _ = super().step(action)
        return state, reward, *flags, {"thing": self.give()}

    def give(self) -> Any:
        return Uncopyable(self.error) if self.number == 1 else self.number


@pytest.mark.parametrize("when", ["pickled", "unpickled"])
def test_exit_in_the_copying_of_a_result_is_an_error(make_env: MakeEnv, when: str) -> None:
    env = make_env(envs(when, cls=Giving), num_cpus=2, asynchronous="restart")
    env.reset()
    for call in (lambda: env.customized_method("give"), lambda: env.step([GO_ON] * 4)):
        with pytest.raises(UnpicklableError, match="SystemExit: no copies") as caught:
            call()
        assert caught.value.env_ids == (1,)  # type: ignore[attr-defined]
        assert "Raised by env 1 in the copying of its result" in caught.value.__notes__[0]
    env.reset()
    with pytest.raises(UnpicklableError, match="SystemExit: no copies"):
        env.rollout(Policy(), 2, progress=False)
    assert env.customized_method("give", id=[0, 2, 3]) == [0, 2, 3]


class Policy:
    def __call__(self, states: Any) -> Any:
        return [GO_ON] * len(states)


class Signalled(Fragile):
    def step(self, action: Any) -> Any:
        if self.number == 1:
            signal.raise_signal(signal.SIGUSR1)
        return super().step(action)


@in_modes(ORACLE)
def test_exit_of_a_signal_handler_is_none_of_the_env(make_env: MakeEnv) -> None:
    def end(*_: object) -> None:
        sys.exit("the time is over")

    env = make_env([partial(Signalled, number) for number in range(3)])
    env.reset()
    before = signal.signal(signal.SIGUSR1, end)
    try:
        with pytest.raises(SystemExit, match="the time is over"):
            env.step([GO_ON] * 3)
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert env.reset().shape == (3, 2)


_SHORT_OF_MEMORY = """
import resource, sys
import numpy as np
import gymnasium as gym
from parallelenv import ParallelEnv

class Large(gym.Env):
    observation_space = gym.spaces.Box(-1, 1, (700, 700), np.float32)
    action_space = gym.spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        return np.zeros((700, 700), np.float32), {}

    def step(self, action):
        return np.zeros((700, 700), np.float32), 1.0, False, False, {}

    def limit(self, more):
        used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + more, resource.RLIM_INFINITY))

with ParallelEnv([Large] * 3, sys.argv[1], "restart", num_cpus=2) as env:
    env.reset()
    env.customized_method("limit", {"more": 60 * 2**20}, id=0)
    try:
        env.rollout(lambda states: [0] * len(states), 400, progress=False)
    except MemoryError:
        print("too little")
    env.customized_method("limit", {"more": 8 * 2**30}, id=0)
    env.reset()
    print(env.step([0] * 3).rewards)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@in_modes(*LOCAL)
def test_rollout_that_needs_too_much_memory_fails(mode: str) -> None:
    output, errors, status = run(_SHORT_OF_MEMORY, mode)
    assert (output, errors, status) == ("too little\n[1. 1. 1.]\n", "", 0)


class Short(Exiting):
    """Can make its process lack the memory for the next chunk of a rollout."""

    def lack_memory(self) -> None:
        rollout_recorder.new_chunk = _no_chunk  # type: ignore[assignment]


def _no_chunk(*_: object) -> Any:
    rollout_recorder.new_chunk = new_chunk
    raise MemoryError("no room for the steps")


@pytest.mark.parametrize("on_failure", ["raise", "restart"])
def test_failure_before_the_first_env_is_one_of_all_envs_of_the_command(make_env: MakeEnv, on_failure: Any) -> None:
    env = make_env(envs(cls=Short), num_cpus=2, asynchronous="restart", on_failure=on_failure)
    env.reset()
    env.customized_method("lack_memory", id=0)
    if on_failure == "raise":
        with pytest.raises(MemoryError, match="no room for the steps") as caught:
            env.rollout(Policy(), 3, progress=False)
        assert len(caught.value.env_ids) == 4 // env.num_workers  # type: ignore[attr-defined]
        assert " in rollout, process" in caught.value.__notes__[0]
        env.reset()
    else:
        truncated = env.rollout(Policy(), 3, progress=False).truncated
        assert truncated.sum() == 4 // env.num_workers
    assert env.rollout(Policy(), 3, progress=False).valid.all()


class Breaking(Fragile):
    def break_worker(self, kind: type[BaseException]) -> None:
        """Let the worker end by an exception that no env has raised."""

        def fail(*_: object) -> Any:
            raise kind("out of order")

        host: Any = next(running_hosts())
        host.execute = host.repeat = fail


@in_modes(*IN_BACKGROUND)
@pytest.mark.parametrize("kind", [MemoryError, SystemExit, OSError, EOFError])
def test_worker_that_ends_by_an_exception_is_dead(make_env: MakeEnv, kind: type[BaseException]) -> None:
    env = make_env(envs(cls=Breaking), num_cpus=2, timeout=20.0)
    env.reset()
    env.customized_method("break_worker", {"kind": kind}, id=2)
    with pytest.raises(WorkerDiedError) as caught:
        env.step([GO_ON] * 4)
    assert caught.value.env_ids == (2, 3)
    assert caught.value.partial.env_ids.tolist() == [0, 1]  # type: ignore[attr-defined]
    assert env.restart(3) == (2, 3)
    env.reset([2, 3])
    assert env.step([GO_ON] * 4).states[:, 1].tolist() == [2, 2, 1, 1]
