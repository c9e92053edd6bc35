"""Tests of worker processes on this machine."""

from __future__ import annotations

import enum
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
import warnings
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, ClassVar

import gymnasium as gym
import numpy as np
import psutil
import pytest
from holdings import fork_server_pids, survivors
from scripts import run, start

from parallelenv import ParallelEnv
from parallelenv.backends import _channel_group
from parallelenv.backends._cpu_balancer import CpuBalancer
from parallelenv.backends._process import WorkerProcess
from parallelenv.backends._shared_memory import SharedMemory
from parallelenv.errors import ArgumentError, WorkerDiedError, WorkerStartError

START_METHODS = ["forkserver", "spawn", "fork"]
BLAS_TIMEOUT = "OPENBLAS_THREAD_TIMEOUT"

# A script as users write it: classes in the main module, no guard.
SCRIPT = """
import os, signal, sys, time
import gymnasium as gym, numpy as np
from parallelenv import ParallelEnv
from parallelenv.backends import _channel_group

print("main runs", flush=True)

class Slow(gym.Env):
    observation_space = gym.spaces.Box(0, 1, (2,), np.float32)
    action_space = gym.spaces.Discrete(2)
    def reset(self, seed=None, options=None):
        super().reset(seed=seed)
        return self.np_random.random(2, np.float32), {}
    def step(self, action):
        while action == 1:
            pass
        return self.np_random.random(2, np.float32), 0.0, False, False, {}
    def pid(self):
        return os.getpid()

env = ParallelEnv([Slow, Slow, Slow], "subproc", num_cpus=2, start_method=sys.argv[1])
env.reset(seed=1)
pids = env.customized_method("pid")
print("workers", *sorted(set(pids)), flush=True)
"""

BUSY = "print('busy', flush=True); env.step([1, 1, 1])"
IDLE = "print('busy', flush=True); time.sleep(60)"
INTERRUPTED = """
try:
    print('busy', flush=True)
    env.customized_method('pid')
    time.sleep(60)
except KeyboardInterrupt:
    states = env.reset(seed=1)
    print('usable', pids == env.customized_method('pid'), flush=True)
"""


def read_workers(process: subprocess.Popen[str]) -> list[int]:
    """Read up to the line that names the workers."""
    assert process.stdout is not None
    assert process.stdout.readline() == "main runs\n"
    word, *pids = process.stdout.readline().split()
    assert word == "workers", process.communicate()
    return [int(pid) for pid in pids]


def test_windows_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "win32")
    with pytest.raises(ArgumentError, match="'subproc' needs Linux or macOS.*Use 'thread'"):
        ParallelEnv(["CartPole-v1"], "subproc")


@pytest.mark.parametrize("method", START_METHODS)
def test_script_without_main_guard_runs_and_leaks_nothing(method: str) -> None:
    shared_before = set(os.listdir("/dev/shm"))
    out, err, status = run(SCRIPT, method)
    assert status == 0, err
    assert out.count("main runs") == 1  # no worker imported it again
    assert err == ""
    workers = [int(pid) for pid in out.splitlines()[1].split()[1:]]
    assert len(workers) == 2
    assert survivors(workers, patience=2) == []
    assert set(os.listdir("/dev/shm")) <= shared_before


@pytest.mark.parametrize("method", START_METHODS)
@pytest.mark.parametrize("ending", [BUSY, IDLE], ids=["busy", "idle"])
def test_workers_exit_when_the_caller_is_killed(method: str, ending: str) -> None:
    shared_before = set(os.listdir("/dev/shm"))
    process = start(SCRIPT + ending, method)
    workers = read_workers(process)
    assert process.stdout is not None
    assert process.stdout.readline() == "busy\n"
    process.kill()
    process.wait()
    assert survivors(workers, patience=2) == []
    process.stdout.close()
    assert process.stderr is not None
    process.stderr.close()
    assert set(os.listdir("/dev/shm")) <= shared_before


@pytest.mark.parametrize("method", START_METHODS)
def test_ctrl_c_to_the_process_group_does_not_stop_workers(method: str) -> None:
    process = start(SCRIPT + INTERRUPTED, method, start_new_session=True)
    workers = read_workers(process)
    assert process.stdout is not None
    assert process.stdout.readline() == "busy\n"
    time.sleep(0.2)  # so that it sleeps, most of the time; it may also be in the call before
    os.killpg(process.pid, signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert out == "usable True\n", err
    assert err == ""
    assert survivors(workers, patience=2) == []


# ---------------------------------------------------------------- environment of an env


class Witness(gym.Env[Any, Any]):
    observation_space = gym.spaces.Box(0, 1, (2,), np.float32)
    action_space = gym.spaces.Discrete(2)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        return np.zeros(2, np.float32), {}

    def variable(self, name: str) -> str | None:
        return os.environ.get(name)

    def registered(self) -> bool:
        return "OnlyInTheCaller-v0" in gym.registry

    def warn(self) -> int:
        with warnings.catch_warnings(record=True) as caught:
            warnings.warn("heard", UserWarning, stacklevel=1)
        return len(caught)

    def ignores(self) -> bool:
        return ("ignore", None, Warning, None, 0) in warnings.filters

    def blas_threads(self) -> list[int]:
        import threadpoolctl

        return [library["num_threads"] for library in threadpoolctl.threadpool_info()]

    def pid(self) -> int:
        return os.getpid()

    def child(self) -> int:
        """Start a process of its own: workers are not daemonic."""
        import multiprocessing

        process = multiprocessing.get_context("fork").Process(target=time.sleep, args=(0,))
        process.start()
        process.join()
        return process.exitcode or 0

    def forked_pool_in_an_env(self) -> int:
        with ParallelEnv([Witness, Witness], "subproc", num_cpus=2, start_method="fork") as inner:
            return inner.num_workers

    def pool_in_an_env(self) -> list[int]:
        with ParallelEnv([Witness, Witness], "subproc", num_cpus=2) as inner:
            inner.reset()
            return [len(inner), inner.num_workers]


def test_workers_get_environment_variables_and_gym_registry_of_caller(monkeypatch: pytest.MonkeyPatch) -> None:
    with ParallelEnv([Witness], "subproc"):
        pass  # the fork server runs from here on, and knows the environment of this moment
    monkeypatch.setenv("SET_LATER", "yes")
    gym.register("OnlyInTheCaller-v0", entry_point=lambda **kwargs: Witness())
    try:
        with ParallelEnv([Witness, "OnlyInTheCaller-v0", lambda: gym.make("OnlyInTheCaller-v0")], "subproc") as env:
            assert env.customized_method("variable", {"name": "SET_LATER"}) == ["yes"] * 3
            assert env.customized_method("registered") == [True] * 3
    finally:
        del gym.registry["OnlyInTheCaller-v0"]


def test_warnings_are_silenced_in_workers_only() -> None:
    before = list(warnings.filters)
    with ParallelEnv([Witness], "subproc") as quiet, ParallelEnv([Witness], "subproc", no_warning=False) as loud:
        assert quiet.customized_method("ignores") == [True]
        assert loud.customized_method("ignores") == [False]
    assert warnings.filters == before


def test_blas_threads_are_capped_unless_the_user_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "BLIS_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)
    with ParallelEnv([Witness] * 8, "subproc", num_cpus=8) as env:
        env.reset()
        assert all(threads == 1 for threads in env.customized_method("blas_threads", id=0)[0])


@pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="no /proc to see a process's first environment in")
@pytest.mark.parametrize("users", [None, "20"])
def test_idle_blas_threads_sleep_at_once_unless_the_user_decides(
    users: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    if users is None:
        monkeypatch.delenv(BLAS_TIMEOUT, raising=False)
    else:
        monkeypatch.setenv(BLAS_TIMEOUT, users)
    with ParallelEnv([Witness], "subproc", start_method="spawn") as env:  # the fork server's was decided long ago
        (worker,) = multiprocessing.active_children()
        assert os.environ.get(BLAS_TIMEOUT) == users
        assert psutil.Process(worker.pid).environ()[BLAS_TIMEOUT] == (users or "4")
        assert env.customized_method("variable", {"name": BLAS_TIMEOUT}) == [users]


@pytest.mark.parametrize("users", [None, "20"])
def test_failed_start_restores_environment_variables(users: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(self: BaseProcess) -> None:
        seen.append(os.environ[BLAS_TIMEOUT])
        raise BlockingIOError(11, "Resource temporarily unavailable")

    seen: list[str] = []
    if users is None:
        monkeypatch.delenv(BLAS_TIMEOUT, raising=False)
    else:
        monkeypatch.setenv(BLAS_TIMEOUT, users)
    monkeypatch.setattr(BaseProcess, "start", fail)
    before = dict(os.environ)
    with pytest.raises(WorkerStartError, match="could not be started"):
        ParallelEnv([Witness], "subproc", start_method="spawn")
    assert seen == [users or "4"]
    assert dict(os.environ) == before


def test_cpu_balancer_includes_restarted_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    looked_at: list[set[int]] = []
    monkeypatch.setattr(CpuBalancer, "balance", lambda self, pids: looked_at.append(set(pids)))
    monkeypatch.setattr(_channel_group, "_SPIN", 5.0)  # every reply counts as fast
    with ParallelEnv([Witness, Witness], "subproc", num_cpus=2) as env:
        victim, other = env.customized_method("pid")
        assert looked_at[-1] == {victim, other}
        os.kill(victim, signal.SIGKILL)
        with pytest.raises(WorkerDiedError):
            env.customized_method("pid")
        env.restart(0)
        assert {*env.customized_method("pid")} == looked_at[-1] != {victim, other}


# ---------------------------------------------------------------- classes that only cloudpickle takes


def test_info_keys_can_be_instances_of_a_user_class() -> None:
    class Key(enum.Enum):
        SPEED = 1

    class Talking(Witness):
        def step(self, action: Any) -> Any:
            return np.zeros(2, np.float32), 0.0, False, False, {Key.SPEED: 1.5}

    with ParallelEnv([Talking, Talking], "subproc", num_cpus=1) as env:
        env.reset()
        assert env.step([0, 0]).infos.tolist() == [{Key.SPEED: 1.5}] * 2


def test_results_do_not_modify_classes_of_the_caller() -> None:
    class Score:
        best: ClassVar[list[int]] = []

        def total(self) -> int:
            return sum(self.best)

    class Scoring(Witness):
        def score(self) -> Score:
            return Score()

    with ParallelEnv([Scoring], "subproc") as env:
        before = {name: vars(Score)[name] for name in ("best", "total")}
        Score.best.append(7)
        (score,) = env.customized_method("score")
        assert type(score) is Score
        assert {name: vars(Score)[name] for name in before} == before
        assert Score.best == [7]


# ---------------------------------------------------------------- processes of an env's own


def test_env_can_start_processes_and_pools() -> None:
    with ParallelEnv([Witness], "subproc") as env:
        assert env.customized_method("child") == [0]
        assert env.customized_method("pool_in_an_env") == [[2, 2]]


def test_env_in_a_forked_worker_can_start_a_pool() -> None:
    with ParallelEnv([Witness], "subproc", start_method="fork") as env:
        assert env.customized_method("forked_pool_in_an_env") == [2]


def test_used_env_that_pickles_without_its_state_warns() -> None:
    fresh, used = gym.make("LunarLander-v3"), gym.make("LunarLander-v3")
    used.reset(seed=1)
    with (
        pytest.warns(UserWarning, match=r"env 1, .*EzPickle.*its state is lost"),
        ParallelEnv([fresh, used], "subproc"),
    ):
        pass
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with ParallelEnv([fresh], "subproc"):
            pass


# ---------------------------------------------------------------- memory


def test_too_large_shared_memory_raises(tmp_path: Path) -> None:
    with pytest.raises(WorkerStartError, match="bytes of shared memory, which are not available"):
        SharedMemory.create(1 << 60)


def test_worker_reaped_elsewhere_is_reported_as_dead() -> None:
    children: Any = multiprocessing.process
    process = multiprocessing.get_context("fork").Process(target=int)
    process.start()
    assert process.pid is not None
    os.waitpid(process.pid, 0)
    assert process.is_alive()  # `multiprocessing` does not notice
    worker = WorkerProcess(process)
    worker.join()
    assert not worker.is_alive()
    children._children.discard(process)


def test_close_leaks_nothing_if_fork_server_reports_exit_late(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with ParallelEnv([Witness], "subproc", num_cpus=1, start_method="forkserver"):
        pass  # the fork server runs from now on
    server = fork_server_pids()[-1]
    descriptors = len(os.listdir("/proc/self/fd"))
    env = ParallelEnv([Witness], "subproc", num_cpus=1, start_method="forkserver")
    os.kill(server, signal.SIGSTOP)
    wake = threading.Timer(0.2, os.kill, (server, signal.SIGCONT))
    wake.start()
    monkeypatch.setattr("parallelenv.backends._process.process_exists", lambda pid: False)
    env.close()
    wake.join()
    assert len(os.listdir("/proc/self/fd")) == descriptors
