"""Ctrl-C at any line of starting and closing workers, in the modes that run on this machine alone.

Leaks are found at the end of each test, as in every test file.
"""

from __future__ import annotations

import os
import signal
import threading
from typing import Any

import psutil
import pytest
from interrupting import Moments, at_many_moments, interrupt_at

from parallelenv import ParallelEnv
from parallelenv.errors import WorkerDiedError, WorkerTimeoutError
from parallelenv.testing.envs import Sleeper

pytestmark = pytest.mark.timeout(method="thread")
# Mode, its options, workers, and every how many lines it is interrupted: as many as some seconds allow.
WAYS: dict[str, tuple[str, dict[str, Any], int, int]] = {
    "dummy": ("dummy", {}, 1, 5),
    "thread": ("thread", {}, 2, 23),
    "fork": ("subproc", {"start_method": "fork"}, 1, 7),
    "fork-2": ("subproc", {"start_method": "fork"}, 2, 67),
    "forkserver": ("subproc", {"start_method": "forkserver"}, 1, 89),
    "spawn": ("subproc", {"start_method": "spawn"}, 1, 307),
    "caller_steps": ("subproc", {"start_method": "fork", "caller_steps": True}, 2, 19),
}


@at_many_moments
@pytest.mark.parametrize("way", WAYS)
def test_interrupt_during_close_is_raised_and_leaks_nothing(way: str, moments: Moments) -> None:
    mode, options, workers, stride = WAYS[way]
    for number, interrupt in moments.every(stride):
        env = ParallelEnv([Sleeper] * 2, mode, num_cpus=workers, **options)
        outcome = interrupt_at(number, env.close, interrupt=interrupt)
        env.close()
        if not outcome.line:
            break
        assert outcome.is_raised, outcome
    assert number > stride


def test_close_after_two_interrupts_closes_the_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    env = ParallelEnv([Sleeper] * 2, "subproc", num_cpus=2, start_method="fork")
    close, interrupts = env.engine.pool.backend.close, iter([KeyboardInterrupt] * 2)

    def interrupted(*arguments: Any) -> Any:
        for interrupt in interrupts:
            raise interrupt
        return close(*arguments)

    monkeypatch.setattr(env.engine.pool.backend, "close", interrupted)
    with pytest.raises(KeyboardInterrupt):
        env.close()


# The files in which a worker and the batch get their descriptors.
OPENERS = tuple(f"backends/{name}.py" for name in ("_fork_server_client", "_process", "_shared_memory", "subproc"))
OPENERS += ("parallelenv/worker/worker_log.py", "multiprocessing/connection.py")


@at_many_moments
@pytest.mark.parametrize(("way", "stride"), [("fork", 2), ("forkserver", 29)])
def test_interrupt_during_construction_is_raised_and_leaks_nothing(way: str, stride: int, moments: Moments) -> None:
    mode, options, _, _ = WAYS[way]
    for number, interrupt in moments.every(stride):
        outcome = interrupt_at(
            number, lambda: ParallelEnv([Sleeper] * 2, mode, num_cpus=1, **options), OPENERS, interrupt
        )
        ParallelEnv.close_all()
        if not outcome.line:
            break
        assert outcome.is_raised, outcome
    assert number > stride


RESTARTERS = ("parallelenv/engine/worker_pool.py", *OPENERS)


@at_many_moments
def test_interrupted_restart_leaks_no_worker(moments: Moments) -> None:
    stride = 3
    with ParallelEnv([Sleeper] * 2, "subproc", num_cpus=2, start_method="fork") as env:
        before = len(psutil.Process().children())
        for number, interrupt in moments.every(stride):
            os.kill(env.customized_method("process")[1], signal.SIGKILL)
            with pytest.raises(WorkerDiedError):
                env.reset()
            outcome = interrupt_at(number, lambda: env.restart([1]), RESTARTERS, interrupt)
            if not outcome.line:
                break
            assert outcome.is_raised, outcome
            env.restart([1])
            assert len(psutil.Process().children()) == before, outcome
            assert env.reset().shape == (2, 3)
    assert number > stride


class Stuck(Sleeper):
    is_over = threading.Event()

    def step(self, action: Any) -> Any:
        self.is_over.wait(60)


@pytest.mark.parametrize("mode", ["thread", "subproc"])
def test_interrupt_during_close_by_garbage_collection_is_raised_later(mode: str) -> None:
    env: Any = ParallelEnv([Stuck] * 2, mode, timeout=0.2, num_cpus=2)
    env.reset()
    with pytest.raises(WorkerTimeoutError):
        env.step([0, 0])
    timer = threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT))  # to close takes 3 s: the envs hang
    timer.start()
    del env  # not interrupted: Python would drop it
    with pytest.raises(KeyboardInterrupt):
        threading.Event().wait(10)
    timer.join()
    Stuck.is_over.set()
