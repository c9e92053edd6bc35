"""Pipes to workers that do not read or write: suspended ones, and dead ones whose pipe a child process keeps open."""

from __future__ import annotations

import asyncio
import contextlib
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import psutil
import pytest
from conftest import MakeEnv
from modes import PROCESSES, RAY, RAY_POOLS, in_modes
from scripts import run

from parallelenv import ParallelEnv
from parallelenv.backends._bell import LOOK
from parallelenv.errors import WorkerDiedError, WorkerTimeoutError

LARGE = 400_000  # numbers, which no pipe holds
direct = in_modes(PROCESSES, RAY)


class Spaceless(gym.Env[Any, Any]):
    """Its actions and states are pickled, and as large as the action of its latest step."""

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        return np.zeros(1), {}

    def step(self, action: Any) -> Any:
        return np.ones(int(action[0])), float(len(action)), False, False, {}

    def pid(self) -> int:
        return os.getpid()

    def fork(self) -> int:
        """Start a child process that keeps all descriptors open, and return its id."""
        child = os.fork()
        if not child:
            time.sleep(60)
            os._exit(0)
        return child


class WideBounds(gym.Env[Any, Any]):
    """The message about a new batch contains the bounds of its states, so it is large."""

    observation_space = gym.spaces.Box(np.arange(-LARGE, 0.0), np.full(LARGE, np.inf), dtype=np.float64)
    action_space = gym.spaces.Discrete(2)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        self.count = 0.0
        return np.full(LARGE, self.count), {}

    def step(self, action: Any) -> Any:
        self.count += 1
        return np.full(LARGE, self.count), 1.0, False, False, {}

    def pid(self) -> int:
        return os.getpid()


def action(length: int, num_results: int = 1) -> Any:
    return np.full(length, float(num_results))


@contextlib.contextmanager
def signalled_at_the_end(pid: int, number: signal.Signals, patience: float = 15.0) -> Iterator[None]:
    """Send a process a signal at the end, or after ``patience`` seconds, so that no test hangs for ever."""
    timer = threading.Timer(patience, os.kill, (pid, number))
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        timer.join()
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


@contextlib.contextmanager
def stopped(pid: int, patience: float = 15.0) -> Iterator[None]:
    """Suspend a process; let it continue at the end, or after ``patience`` seconds."""
    os.kill(pid, signal.SIGSTOP)
    with signalled_at_the_end(pid, signal.SIGCONT, patience):
        yield


@contextlib.contextmanager
def dead_with_open_pipe(env: ParallelEnv, env_id: int = 0) -> Iterator[None]:
    """Kill a worker whose pipe a child process keeps open."""
    (pid,) = env.customized_method("pid", id=[env_id])
    (child,) = env.customized_method("fork", id=[env_id])
    os.kill(pid, signal.SIGKILL)
    with signalled_at_the_end(child, signal.SIGKILL):
        yield


def set_large(env: ParallelEnv) -> None:
    env.set_env_attr("w", np.zeros(LARGE), id=[0])


def step_large(env: ParallelEnv) -> None:
    env.step([action(LARGE), action(1)])


with_each_call = pytest.mark.parametrize("call", [set_large, step_large])


# ---------------------------------------------------------------- commands


@direct
@with_each_call
def test_death_is_reported_though_a_child_keeps_the_full_pipe_open(
    make_env: MakeEnv, call: Callable[[ParallelEnv], None]
) -> None:
    env = make_env([Spaceless] * 2, asynchronous="continue", num_cpus=2, timeout=60)
    env.reset()
    with dead_with_open_pipe(env):
        begin = time.monotonic()
        with pytest.raises(WorkerDiedError):
            call(env)
        assert time.monotonic() - begin < 10
    env.restart(0)
    env.reset()
    call(env)


@direct
@with_each_call
def test_timeout_ends_the_wait_for_a_suspended_worker_that_needs_a_large_message(
    make_env: MakeEnv, call: Callable[[ParallelEnv], None]
) -> None:
    env = make_env([Spaceless] * 2, asynchronous="continue", num_cpus=2, timeout=60)
    env.reset()
    env.engine.pool.timeout = 1.0
    with stopped(env.customized_method("pid")[0]), pytest.raises(WorkerTimeoutError):
        call(env)
    env.engine.pool.timeout = 60.0
    if call is set_large:  # the rest of the message was not lost
        assert env.get_env_attr("w", id=[0])[0].shape == (LARGE,)
    else:
        assert env.recv(2).rewards.sum() == LARGE + 1


@direct
def test_large_message_is_sent_once_the_worker_reads_whatever_the_caller_does_with_the_argument(
    make_env: MakeEnv,
) -> None:
    env = make_env([Spaceless] * 2, asynchronous="continue", num_cpus=2, timeout=60)
    env.reset()
    value, expected = np.arange(LARGE), np.arange(LARGE)
    env.engine.pool.timeout = 0.5
    with stopped(env.customized_method("pid")[0]):
        with pytest.raises(WorkerTimeoutError):
            env.set_env_attr("w", value, id=[0])
        value[:] = 0
        with pytest.raises(WorkerTimeoutError):
            env.step([action(LARGE), action(1)])  # a second one, to a worker that has not read the first
    env.engine.pool.timeout = 60.0
    np.testing.assert_array_equal(env.get_env_attr("w", id=[0])[0], expected)


@direct
def test_ctrl_c_ends_the_wait_for_a_suspended_worker_that_needs_a_large_message(make_env: MakeEnv) -> None:
    env = make_env([Spaceless] * 2, asynchronous="continue", num_cpus=2)
    env.reset()
    pid = env.customized_method("pid")[0]
    with stopped(pid):
        timer = threading.Timer(1.0, os.kill, (os.getpid(), signal.SIGINT))
        timer.start()
        begin = time.monotonic()
        with pytest.raises(KeyboardInterrupt):
            step_large(env)
        assert time.monotonic() - begin < 10
        timer.join()
    assert env.recv(2).rewards.sum() == LARGE + 1


@direct
def test_suspended_worker_with_a_half_sent_message_can_be_replaced(make_env: MakeEnv) -> None:
    env = make_env([Spaceless] * 2, asynchronous="continue", num_cpus=2, timeout=60)
    env.reset()
    env.engine.pool.timeout = 0.5
    with stopped(env.customized_method("pid")[0]):
        with pytest.raises(WorkerTimeoutError):
            set_large(env)
        env.engine.pool.timeout = 60.0
        env.restart(0)
    env.reset()
    assert env.step([action(2), action(3)]).rewards.tolist() == [2, 3]


def test_pool_with_a_half_sent_message_is_closed_in_time() -> None:
    with ParallelEnv([Spaceless] * 2, "subproc", num_cpus=2, timeout=0.5) as env:
        env.reset()
        with stopped(env.customized_method("pid")[0], patience=30.0):
            with pytest.raises(WorkerTimeoutError):
                set_large(env)
            begin = time.monotonic()
            env.close()
            assert time.monotonic() - begin < 15


def test_event_loop_sends_the_rest_of_a_message() -> None:
    with ParallelEnv([Spaceless] * 2, "subproc", "continue", num_cpus=2) as env:
        env.reset()
        with stopped(env.customized_method("pid")[0]):
            env.send([action(LARGE), action(1)])
        result = asyncio.run(asyncio.wait_for(env.arecv(2), 20))
        assert result.rewards.sum() == LARGE + 1


@in_modes(RAY_POOLS)
def test_suspended_worker_does_not_delay_its_neighbour_behind_the_same_actor(make_env: MakeEnv) -> None:
    env = make_env([Spaceless] * 2, asynchronous="continue", num_cpus=2, timeout=30, direct=False)
    env.reset()
    with stopped(env.customized_method("pid")[0], patience=60.0):
        env.send([action(LARGE), action(LARGE)])
        assert env.recv(1).env_ids.tolist() == [1]
    assert env.recv(1).rewards.tolist() == [LARGE]


# ---------------------------------------------------------------- replies


def wait_until_blocked(env: ParallelEnv, pid: int) -> None:
    """Return once a worker waits for the caller to read on."""
    channel: Any = env.engine.pool._workers[0].channel
    deadline = time.monotonic() + 20
    while not select.select([channel.fileno], [], [], 1.0)[0]:
        assert time.monotonic() < deadline
    while psutil.Process(pid).status() != psutil.STATUS_SLEEPING:
        assert time.monotonic() < deadline


@direct
def test_timeout_ends_the_wait_for_a_worker_suspended_in_the_middle_of_a_reply(make_env: MakeEnv) -> None:
    env = make_env([Spaceless] * 2, asynchronous="continue", num_cpus=2, timeout=60)
    env.reset()
    (pid, _) = env.customized_method("pid")
    env.send([action(2, LARGE), action(1)])
    wait_until_blocked(env, pid)
    with stopped(pid), pytest.raises(WorkerTimeoutError):
        env.recv(2, timeout=1.0)
    states = env.recv(2).states
    assert sorted(len(state) for state in states) == [1, LARGE]
    assert env.step([action(2, LARGE), action(2, LARGE)]).states.shape == (2, LARGE)


@direct
def test_worker_killed_in_the_middle_of_a_reply_is_dead_though_a_child_keeps_its_pipe_open(make_env: MakeEnv) -> None:
    env = make_env([Spaceless] * 2, asynchronous="continue", num_cpus=2, timeout=60)
    env.reset()
    (pid, _) = env.customized_method("pid")
    (child,) = env.customized_method("fork", id=[0])
    env.send([action(2, LARGE), action(1)])
    wait_until_blocked(env, pid)
    os.kill(pid, signal.SIGKILL)
    timer = threading.Timer(15.0, os.kill, (child, signal.SIGKILL))
    timer.start()
    begin = time.monotonic()
    try:
        with pytest.raises(WorkerDiedError):
            env.recv(2)
        assert time.monotonic() - begin < 10
    finally:
        timer.cancel()
        timer.join()
        os.kill(child, signal.SIGKILL)


# ---------------------------------------------------------------- batches and descriptors


@direct
def test_suspended_worker_gets_a_new_batch_as_soon_as_it_continues(make_env: MakeEnv) -> None:
    env = make_env([WideBounds] * 2, asynchronous="continue", num_cpus=2, timeout=60)
    env.reset()
    pid = env.customized_method("pid")[0]
    with stopped(pid):
        begin = time.monotonic()
        vector_env = env.to_gymnasium("SameStep")
        assert time.monotonic() - begin < 10
        env.engine.pool.timeout = 0.5
        with pytest.raises(WorkerTimeoutError):
            vector_env.reset()
        env.engine.pool.timeout = 60.0
    assert vector_env.reset()[0][:, -1].tolist() == [0, 0]
    for count in range(1, 4):
        assert vector_env.step(np.zeros(2, int))[0][:, -1].tolist() == [count, count]


@direct
def test_nothing_is_written_to_files_that_get_the_descriptor_numbers_of_a_dead_worker(
    make_env: MakeEnv, tmp_path: Path
) -> None:
    env = make_env(["CartPole-v1"] * 2, num_cpus=2, timeout=60)
    env.reset(seed=0)
    os.kill(env.engine.pool.processes[0].pid, signal.SIGKILL)
    with pytest.raises(WorkerDiedError):
        env.step([0, 0])
    paths = [tmp_path / str(number) for number in range(16)]
    with contextlib.ExitStack() as files:
        for path in paths:
            files.enter_context(path.open("wb", buffering=0))
        adapted = env.to_gymnasium("SameStep")
    assert [path.stat().st_size for path in paths] == [0] * 16
    env.restart(0)
    adapted.reset()
    states, *_ = adapted.step(np.zeros(2, int))
    assert np.abs(states).sum(axis=1).all()  # the new worker writes to the new batch


def test_closed_objects_have_no_descriptors(tmp_path: Path) -> None:
    """The system gives the numbers of closed descriptors to the files that the user opens next."""
    env = ParallelEnv(["CartPole-v1"] * 2, "subproc", num_cpus=2)
    env.reset(seed=0)
    group: Any = env.engine.pool.backend._group  # type: ignore[attr-defined]
    channels, bell, batch = list(group.channels), group.bell, env.engine.pool.batch
    env.close()
    del env
    with contextlib.ExitStack() as files:
        opened = [files.enter_context((tmp_path / str(number)).open("w+b", buffering=0)) for number in range(24)]
        for file in opened:
            file.write(b"mine")
            file.seek(0)
        for channel in channels:
            assert channel.fileno == channel.wire.fileno == channel._log.fileno == -1
            assert channel.take_output(is_idle=True) == []
            for use, *arguments in [(channel.wire.send, LOOK), (channel.send_descriptors, 0), (channel.wire.receive,)]:
                with pytest.raises(OSError, match="Bad file descriptor"):
                    use(*arguments)
            channel.attach(batch)
        if bell is not None:
            bell.ring()
            bell.silence()
            assert (bell.fileno, bell.descriptors) == (-1, [])
        assert [(file.tell(), file.read()) for file in opened] == [(0, b"mine")] * len(opened)


SHORT_OF_MEMORY = """
import os, resource, signal, sys
import numpy as np
import gymnasium as gym
from parallelenv import ParallelEnv

class Counting(gym.Env):
    def reset(self, *, seed=None, options=None):
        self.count = 0
        return 0, {}

    def step(self, action):
        self.count += 1
        return self.count, 1.0, False, False, {}

    def result(self, megabytes):
        return np.zeros(megabytes * 2**17)

    def pid(self):
        return os.getpid()

def limit(more):
    used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + more if more else -1, resource.RLIM_INFINITY))

with ParallelEnv([Counting] * 2, "subproc", "continue", num_cpus=2, timeout=10) as env:
    env.reset()
    pids, large = env.customized_method("pid"), np.zeros(120 * 2**17)
    if sys.argv[1] == "send":
        os.kill(pids[0], signal.SIGSTOP)
    limit(60 * 2**20)
    try:
        if sys.argv[1] == "send":
            env.set_env_attr("w", large)
        else:
            env.customized_method("result", {"megabytes": 120}, id=0)
    except MemoryError:
        print("too little memory")
    limit(0)
    os.kill(pids[0], signal.SIGCONT)
    try:
        env.get_env_attr("count")
    except RuntimeError as error:
        print(type(error).__name__, error.env_ids, "cut off" in str(error))
    print(env.get_env_attr("count", 1), env.restart(0), env.reset().tolist(), env.step([0, 0]).states.tolist())
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("way", ["send", "receive"])
def test_lack_of_memory_in_the_middle_of_a_message_costs_the_worker_only(way: str) -> None:
    printed, errors, status = run(SHORT_OF_MEMORY, way)
    expected = ["too little memory", "WorkerDiedError (0,) True", "[0] (0,) [0, 0] [1, 1]", ""]
    assert (printed.split("\n"), status) == (expected, 0), errors
