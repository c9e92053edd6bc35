"""Exceptions that the program's signal handlers raise: a time limit, or a request to end."""

from __future__ import annotations

import functools
import gc
import itertools
import os
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from conftest import MakeEnv
from gymnasium.spaces import Box, Discrete
from interrupting import Counting
from modes import LOCAL, ORACLE, PROCESSES, in_modes
from scripts import run

from parallelenv import ParallelEnv
from parallelenv.contract.interrupts import DeferSignals, Ignore, signal_behind
from parallelenv.errors import EnvInterruptedError

pytestmark = pytest.mark.timeout(60, method="thread")  # the other method uses SIGALRM
NUM_ENVS = 4
ZEROS = [0] * NUM_ENVS


class TimeIsUp(TimeoutError):
    """An `OSError`, as is the error of a connection that has broken."""


@pytest.fixture
def handle() -> Iterator[Callable[[int, Any], None]]:
    """Install handlers of signals, until the end of the test."""
    before: dict[int, Any] = {}

    def install(number: int, handler: Any) -> None:
        before.setdefault(number, signal.signal(number, handler))

    yield install
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture
def time_limit(handle: Callable[[int, Any], None]) -> None:
    """A handler of SIGALRM that raises."""

    def give_up(*_: object) -> None:
        raise TimeIsUp

    handle(signal.SIGALRM, give_up)


@pytest.fixture
def no_gc() -> Iterator[None]:
    """No garbage collection, because Python discards an exception that is raised in a finalizer or a callback of it."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


class Telling(Counting):
    def step(self, action: Any) -> Any:
        *others, _ = super().step(action)
        return *others, {"count": str(self.count)}  # is pickled or copied


@pytest.mark.usefixtures("time_limit", "no_gc")
@pytest.mark.parametrize("tells", [False, True], ids=["", "infos"])
@pytest.mark.parametrize(
    ("mode", "options"),
    [*((mode, {}) for mode in LOCAL), (PROCESSES, {"eventfd": False}), (PROCESSES, {"caller_steps": True})],
    ids=itertools.count(),
)
def test_time_limits_at_random_moments_neither_hang_nor_change_results(
    mode: str, options: dict[str, Any], tells: bool
) -> None:
    chance, num_raised = random.Random(0), 0
    envs = [Telling if tells else Counting] * NUM_ENVS
    with ParallelEnv(envs, mode, "continue", **{"num_cpus": 2, **options}) as env:
        for _ in range(200):
            try:
                signal.setitimer(signal.ITIMER_REAL, chance.uniform(20e-6, 600e-6))
                try:
                    env.reset()
                    for count in range(1, 60):
                        assert env.step(ZEROS).states[:, 0].tolist() == [count] * NUM_ENVS
                finally:
                    signal.setitimer(signal.ITIMER_REAL, 0)
            except TimeIsUp:
                num_raised += 1
            assert env.reset().tolist() == [[0]] * NUM_ENVS
            for count in (1, 2):
                result = env.step(ZEROS)
                assert result.states[:, 0].tolist() == [count] * NUM_ENVS
                assert [info.get("count") for info in result.infos] == [str(count) if tells else None] * NUM_ENVS
    assert num_raised > 100


class Limited(gym.Env[Any, Any]):
    """In its method of the given name, the program's time limit is over."""

    observation_space = Box(0, 1, (1,))
    action_space = Discrete(2)
    slow = ""

    def wait(self, name: str) -> None:
        if self.slow == name:
            self.slow = ""
            signal.raise_signal(signal.SIGALRM)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        self.wait("reset")
        return np.zeros(1, np.float32), {}

    def step(self, action: Any) -> Any:
        self.wait("step")
        return np.zeros(1, np.float32), 1.0, False, False, {}

    def work(self) -> None:
        self.wait("work")


@pytest.mark.usefixtures("time_limit")
@pytest.mark.parametrize("call", ["reset", "step", "work"])
def test_time_limit_within_an_env_of_the_caller_is_not_a_failure_of_the_env(call: str) -> None:
    with ParallelEnv([Limited] * 3, ORACLE, "continue") as env:
        env.reset()
        env.set_env_attr("slow", call, 1)
        calls: dict[str, Callable[[], Any]] = {
            "reset": env.reset,
            "step": lambda: env.step(ZEROS[1:]),
            "work": lambda: env.customized_method("work"),
        }
        with pytest.raises(TimeIsUp) as caught:
            calls[call]()
        assert not hasattr(caught.value, "env_ids")
        if call == "step":
            with pytest.raises(EnvInterruptedError, match="env 1 was interrupted in the middle of step"):
                env.recv(3)
        env.reset()
        assert env.step(ZEROS[1:]).rewards.tolist() == [1, 1, 1]


class Timed(Limited):
    """Sets a time limit of its own, as a simulator does that a solver may keep busy."""

    def step(self, action: Any) -> Any:
        def give_up(*_: object) -> None:
            raise TimeoutError("the solver")

        before = signal.signal(signal.SIGALRM, give_up)
        try:
            return super().step(action)
        finally:
            signal.signal(signal.SIGALRM, before)


@pytest.mark.usefixtures("time_limit")
@in_modes(ORACLE, PROCESSES)
def test_time_limit_of_an_env_is_a_failure_of_the_env(make_env: MakeEnv) -> None:
    env = make_env([Timed] * 3, asynchronous="continue", num_cpus=2)
    env.reset()
    env.set_env_attr("slow", "step", 1)
    with pytest.raises(TimeoutError, match="the solver") as caught:
        env.step(ZEROS[1:])
    assert caught.value.env_ids == (1,)  # type: ignore[attr-defined]
    assert env.step(ZEROS[1:]).rewards.tolist() == [1, 1, 1]


class Slow:
    """The program's time limit is over when it is copied for the first time."""

    is_new = True

    def __reduce__(self) -> Any:
        if self.is_new:
            self.is_new = False
            signal.raise_signal(signal.SIGALRM)
        return Slow, ()


class Giving(Limited):
    def give(self) -> Slow:
        return Slow()


@pytest.mark.usefixtures("time_limit")
@in_modes(*LOCAL)
def test_time_limit_in_the_copying_of_an_argument_is_raised(make_env: MakeEnv) -> None:
    env = make_env([Limited] * 2, num_cpus=1)
    for call in (lambda: env.set_env_attr("slow", Slow()), lambda: env.customized_method("wait", {"name": Slow()})):
        with pytest.raises(TimeIsUp):
            call()
    assert env.get_env_attr("slow") == [""] * 2


@pytest.mark.usefixtures("time_limit")
def test_time_limit_in_the_copying_of_a_result_is_raised() -> None:
    with ParallelEnv([Giving], ORACLE) as env:
        with pytest.raises(TimeIsUp):
            env.customized_method("give")
        env.reset()


@pytest.mark.usefixtures("time_limit")
def test_time_limit_in_close_is_raised_after_all_workers_have_ended() -> None:
    class Staying(Limited):
        def close(self) -> None:
            time.sleep(60)

    env = ParallelEnv([Staying] * 2, PROCESSES, num_cpus=2)
    signal.setitimer(signal.ITIMER_REAL, 0.3)
    with pytest.raises(TimeIsUp):
        env.close()  # the fixture `no_leaks` looks for workers


# ---------------------------------------------------------------- the context managers


def test_delayed_signals_are_handled_in_order_each_by_its_own_handler(handle: Callable[[int, Any], None]) -> None:
    seen: list[int] = []
    numbers = [signal.SIGUSR1, signal.SIGTERM, signal.SIGALRM]
    for number in numbers:
        handle(number, lambda number, _: seen.append(number))
    before = [signal.getsignal(number) for number in numbers]
    with DeferSignals():
        for number in reversed(numbers):
            signal.raise_signal(number)
        assert seen == []
    assert seen == list(reversed(numbers))
    assert [signal.getsignal(number) for number in numbers] == before


def test_each_delayed_signal_is_handled_even_if_a_handler_raises(handle: Callable[[int, Any], None]) -> None:
    def end(*_: object) -> None:
        raise SystemExit(3)

    def give_up(*_: object) -> None:
        raise TimeIsUp

    seen: list[int] = []
    handle(signal.SIGALRM, give_up)
    handle(signal.SIGTERM, end)
    handle(signal.SIGUSR1, lambda number, _: seen.append(number))
    with pytest.raises(SystemExit) as caught, DeferSignals():  # noqa: PT012 (raised at the end of the block)
        for number in (signal.SIGALRM, signal.SIGTERM, signal.SIGUSR1):
            signal.raise_signal(number)
    assert isinstance(caught.value.__context__, TimeIsUp)
    assert seen == [signal.SIGUSR1]


def test_signals_without_a_python_handler_are_left_alone(handle: Callable[[int, Any], None]) -> None:
    handle(signal.SIGTERM, signal.SIG_IGN)
    with DeferSignals():
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_IGN
        assert signal.getsignal(signal.SIGUSR2) is signal.SIG_DFL


class Handler:
    def __call__(self, *_: object) -> None:
        raise TimeIsUp

    def handle(self, *_: object) -> None:
        self()


@pytest.mark.parametrize(
    "handler",
    [Handler(), Handler().handle, functools.partial(Handler().handle, 1)],
    ids=["object", "method", "partial"],
)
def test_exception_is_recognized_whatever_the_handler_is(handler: Any, handle: Callable[[int, Any], None]) -> None:
    handle(signal.SIGALRM, handler)
    with pytest.raises(TimeIsUp) as caught, Ignore(OSError):
        signal.raise_signal(signal.SIGALRM)
    assert signal_behind(caught.value) == signal.SIGALRM
    with Ignore(OSError):
        raise TimeIsUp
    assert signal_behind(TimeIsUp()) is None
    assert signal_behind(KeyboardInterrupt()) == signal.SIGINT


DEAD = """
import os, signal, sys
import psutil
from parallelenv import ParallelEnv
from parallelenv.backends._fork_server_client import SERVERS
from parallelenv.errors import WorkerDiedError
signal.signal(signal.SIGPIPE, signal.SIG_DFL)
with ParallelEnv(["CartPole-v1"] * 2, "subproc", num_cpus=2, start_method=sys.argv[1]) as env:
    env.reset(seed=0)
    worker = psutil.Process(env.engine.pool.processes[0].pid)
    worker.kill()
    psutil.wait_procs([worker], timeout=10)
    for call in (lambda: env.set_env_attr("x", 1), lambda: env.step([0, 0])):
        try:
            call()
        except WorkerDiedError as error:
            print(error.env_ids)
    if SERVERS.root is not None:
        os.kill(SERVERS.root.pid, signal.SIGKILL)
    print(env.restart(0), len(env.reset()))
"""


@pytest.mark.parametrize("method", ["forkserver", "spawn"])
def test_dead_process_does_not_end_a_program_with_the_default_handler_of_sigpipe(method: str) -> None:
    printed, errors, status = run(DEAD, method)
    assert (printed.split("\n")[:3], status) == (["(0,)", "(0,)", "(0,) 2"], 0), errors


def test_process_forked_by_another_thread_during_a_block_has_the_programs_handlers() -> None:
    reading, writing = os.pipe()

    def fork() -> None:
        pid = os.fork()
        if not pid:
            os.write(writing, str(signal.getsignal(signal.SIGINT) is signal.default_int_handler).encode())
            os._exit(0)
        os.waitpid(pid, 0)

    thread = threading.Thread(target=fork)
    with DeferSignals(), DeferSignals():
        thread.start()
        thread.join()
    assert os.read(reading, 100) == b"True"
    os.close(reading)
    os.close(writing)
