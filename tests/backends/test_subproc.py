"""Tests of worker processes on this machine."""

from __future__ import annotations

import enum
import errno
import multiprocessing
import os
import resource
import signal
import threading
import time
from collections.abc import Callable
from functools import partial
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, ClassVar

import gymnasium as gym
import psutil
import pytest
import threadpoolctl
from fragile import WAIT, fragile
from holdings import fork_server_pids, survivors
from scripts import start

from parallelenv import ParallelEnv
from parallelenv.backends._process import WorkerProcess
from parallelenv.errors import WorkerDiedError, WorkerStartError
from parallelenv.testing.envs import Counter

BLAS_TIMEOUT = "OPENBLAS_THREAD_TIMEOUT"
with_each_start_method = pytest.mark.parametrize("method", ["forkserver", "spawn", "fork"])

# A script as users write it: classes in the main module, no guard.
SCRIPT = """
import os, sys, time
import gymnasium as gym
from parallelenv import ParallelEnv

print("main runs", flush=True)

class Plain(gym.Env):
    observation_space = action_space = gym.spaces.Discrete(2)
    def reset(self, seed=None, options=None):
        return 0, {}
    def pid(self):
        return os.getpid()

env = ParallelEnv([Plain, Plain, Plain], "subproc", num_cpus=2, start_method=sys.argv[1])
env.reset()
pids = env.customized_method("pid")
print("workers", *sorted(set(pids)), flush=True)
try:
    print('busy', flush=True)
    env.customized_method('pid')
    time.sleep(60)
except KeyboardInterrupt:
    env.reset()
    print('usable', pids == env.customized_method('pid'), flush=True)
"""


@with_each_start_method
def test_script_without_main_guard_survives_ctrl_c_to_its_process_group_and_leaks_nothing(method: str) -> None:
    with start(SCRIPT, method, start_new_session=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "main runs\n"  # no worker runs it again: the next line is
        word, *workers = process.stdout.readline().split()
        assert (word, len(workers)) == ("workers", 2), process.communicate()
        assert process.stdout.readline() == "busy\n"
        time.sleep(0.2)  # so that it sleeps, most of the time; it may also be in the call before
        os.killpg(process.pid, signal.SIGINT)
        assert process.communicate(timeout=60) == ("usable True\n", "")
        assert process.returncode == 0
        assert survivors([int(pid) for pid in workers], patience=2) == []


FORKING = """
import os, signal, sys, threading, time
from functools import partial
from multiprocessing import resource_tracker
from parallelenv import ParallelEnv
from parallelenv.testing.envs import Counter

class Sleeper(Counter):
    def sleep(self):
        print("busy")  # the caller shows it while the call runs
        time.sleep(60)
    def pid(self):
        return os.getpid()

env = ParallelEnv([partial(Sleeper, 0), partial(Sleeper, 1)], "subproc", num_cpus=2, start_method=sys.argv[1])
pids = env.customized_method("pid")
child = os.fork()
if not child:
    time.sleep(60)
print("pids", child, resource_tracker._resource_tracker._pid, *pids, flush=True)
env.customized_method("sleep", id=0)
"""


@with_each_start_method
def test_no_process_outlives_a_killed_caller_whose_forked_child_lives(method: str) -> None:
    with start(FORKING, method) as process:
        assert process.stdout is not None
        word, child, tracker, *workers = process.stdout.readline().split()
        assert (word, len(workers)) == ("pids", 2), process.communicate()
        assert process.stdout.readline() == "[env 0] busy\n"
        others = {str(one.pid) for one in psutil.Process(process.pid).children(recursive=True)} - {child, tracker}
        assert others.issuperset(workers)
        process.kill()
        try:
            assert survivors(list(map(int, others)), patience=2.0) == []
        finally:
            os.kill(int(child), signal.SIGKILL)


class Witness(Counter):
    def call(self, function: Callable[[], Any]) -> Any:
        return function()


def ask(env: ParallelEnv, function: Callable[[], Any]) -> list[Any]:
    return list(env.customized_method("call", {"function": function}))


def test_workers_get_environment_variables_and_gym_registry_of_caller(monkeypatch: pytest.MonkeyPatch) -> None:
    with ParallelEnv([Witness], "subproc"):
        pass  # the fork server runs from here on, and knows the environment of this moment
    monkeypatch.setenv("SET_LATER", "yes")
    gym.register("OnlyInTheCaller-v0", entry_point=lambda **kwargs: Witness())
    try:
        with ParallelEnv([Witness, "OnlyInTheCaller-v0", lambda: gym.make("OnlyInTheCaller-v0")], "subproc") as env:
            assert ask(env, lambda: os.environ.get("SET_LATER")) == ["yes"] * 3
            assert ask(env, lambda: "OnlyInTheCaller-v0" in gym.registry) == [True] * 3
    finally:
        del gym.registry["OnlyInTheCaller-v0"]


def test_blas_threads_are_capped(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "BLIS_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)
    with ParallelEnv([Witness] * 8, "subproc", num_cpus=8) as env:
        env.reset()
        for libraries in ask(env, threadpoolctl.threadpool_info):
            assert {library["num_threads"] for library in libraries} <= {1}


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
        assert ask(env, lambda: os.environ.get(BLAS_TIMEOUT)) == [users]


def test_failed_start_restores_environment_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(self: BaseProcess) -> None:
        raise BlockingIOError(11, "Resource temporarily unavailable")

    monkeypatch.delenv(BLAS_TIMEOUT, raising=False)
    monkeypatch.setattr(BaseProcess, "start", fail)
    with pytest.raises(WorkerStartError, match="could not be started"):
        ParallelEnv([Witness], "subproc", start_method="spawn")
    assert BLAS_TIMEOUT not in os.environ


def test_results_may_be_of_classes_of_the_caller_which_do_not_change() -> None:
    class Key(enum.Enum):
        SPEED = 1

    class Score:
        best: ClassVar[list[int]] = []

        def total(self) -> int:
            return sum(self.best)

    class Scoring(Witness):
        def _info(self) -> Any:
            return {Key.SPEED: Score()}

    with ParallelEnv([Scoring], "subproc") as env:
        before = {name: vars(Score)[name] for name in ("best", "total")}
        Score.best.append(7)
        env.reset()
        assert type(env.step([0]).infos[0][Key.SPEED]) is Score
        assert {name: vars(Score)[name] for name in before} == before
        assert Score.best == [7]


def start_child() -> int | None:
    process = multiprocessing.get_context("fork").Process(target=int)
    process.start()
    process.join()
    return process.exitcode


def start_pool(method: str) -> int:
    with ParallelEnv([Witness, Witness], "subproc", num_cpus=2, start_method=method) as inner:
        return len(inner.reset())


@pytest.mark.parametrize("method", ["forkserver", "fork"])
def test_env_can_start_processes_and_pools(method: str) -> None:
    with ParallelEnv([Witness], "subproc", start_method=method) as env:
        assert ask(env, start_child) == [0]  # workers are not daemonic
        assert ask(env, partial(start_pool, method)) == [2]


def test_used_env_that_pickles_without_its_state_warns() -> None:
    fresh, used = gym.make("LunarLander-v3"), gym.make("LunarLander-v3")
    used.reset(seed=1)
    with pytest.warns(UserWarning, match=r"env 1, .*EzPickle.*its state is lost") as caught:
        ParallelEnv([fresh, used], "subproc").close()
    assert [one.filename for one in caught] == [__file__]


def test_worker_that_lacks_descriptors_for_a_new_batch_says_so() -> None:
    def exhaust_descriptors() -> None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (3, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))

    with ParallelEnv([partial(Witness, number) for number in range(2)], "subproc", num_cpus=2) as env:
        ask(env, exhaust_descriptors)
        adapter = env.to_gymnasium("SameStep")
        with pytest.raises(WorkerDiedError, match=r"exit code is 1(?s:.*)Too many open files"):
            adapter.reset()


def test_lack_of_shared_memory_names_the_limit_on_files(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(fileno: int, *sizes: int) -> None:
        raise OSError(errno.EFBIG, "File too large")

    monkeypatch.setattr(os, "posix_fallocate", refuse)
    with pytest.raises(WorkerStartError, match=r"File too large. Raise the limit on the size of files \(ulimit -f\)"):
        ParallelEnv([Counter], "subproc")


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


def test_exit_code_255_is_reported() -> None:
    with (
        ParallelEnv([Witness], "subproc") as env,
        pytest.raises(WorkerDiedError, match="Its exit code is 255"),
    ):
        ask(env, partial(os._exit, 255))


def test_close_does_not_wait_for_a_process_that_does_not_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with ParallelEnv(fragile(tmp_path), "subproc", num_cpus=1) as env:
        env.reset()
        for name in ("terminate", "kill"):  # they have no effect during some system calls
            monkeypatch.setattr(WorkerProcess, name, lambda self: None)
        env.send([WAIT] * 4)
        began = time.monotonic()
        env.close(0.1)
        assert time.monotonic() - began < 10.0
    (tmp_path / "go").touch()


def test_close_leaks_nothing_if_fork_server_reports_exit_late(monkeypatch: pytest.MonkeyPatch) -> None:
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


@pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="elsewhere only the process id is known")
def test_another_process_that_gets_the_id_of_a_dead_worker_gets_no_signal(monkeypatch: pytest.MonkeyPatch) -> None:
    with ParallelEnv([Witness] * 2, "subproc", num_cpus=2, start_method="forkserver") as env:
        workers = {*ask(env, os.getpid)}
        servers = fork_server_pids()
        for pid in (*servers, *workers):
            os.kill(pid, signal.SIGKILL)
        assert survivors(workers, patience=5) == []
        signals: list[Any] = []  # sent to the processes that now have these ids
        monkeypatch.setattr(os, "kill", lambda pid, number: signals.append((pid, number)))
    assert [number for pid, number in signals if pid in {*workers, *servers} and number] == []


def test_workers_die_and_are_replaced_where_the_system_has_no_pidfd(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "pidfd_open", raising=False)
    with ParallelEnv([Witness] * 2, "subproc", num_cpus=2, start_method="forkserver") as env:
        for pid in (ask(env, os.getpid)[0], *fork_server_pids()):
            os.kill(pid, signal.SIGKILL)
        with pytest.raises(WorkerDiedError):
            ask(env, os.getpid)
        env.restart(0)
        workers = ask(env, os.getpid)
    assert survivors(workers, patience=2) == []
