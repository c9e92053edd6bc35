"""Tests of worker threads."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import signal
import sys
import threading
import traceback
import weakref
from pathlib import Path
from typing import Any

import pytest
from fragile import GO_ON, WAIT, fragile

from parallelenv import ParallelEnv
from parallelenv.backends.thread import ThreadBackend
from parallelenv.contract.batch import Batch
from parallelenv.contract.env_specs import make_factories
from parallelenv.contract.protocol import Command, WorkerSpec
from parallelenv.errors import WorkerDiedError, WorkerTimeoutError
from parallelenv.testing.envs import Counter
from parallelenv.worker.host import Host


def test_replies_that_arrive_before_the_caller_waits_leave_nothing_behind() -> None:
    backend = ThreadBackend()
    (channel,) = backend.launch([WorkerSpec((0,), make_factories([Counter]))])
    waited: Any = channel
    for number in range(1, 10):
        channel.send(channel.pack(Command(number, "build", (0,))))
        while not waited.advance():
            pass
        assert backend.wait([channel], None) == [channel]
        assert channel.receive().number == number
    backend.close([channel], 10.0)
    assert backend._answered.qsize() == 1


def test_close_of_idle_threads_frees_the_batch_and_allocates_none(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with ParallelEnv(fragile(tmp_path), "thread", num_cpus=2) as env:
        env.reset()
        batch = weakref.ref(env.engine.pool.batch)
        monkeypatch.setattr(Batch, "private", None)
    gc.collect()
    assert batch() is None
    assert env.closed


def test_pool_that_is_garbage_collected_in_one_of_its_threads_is_closed() -> None:
    pools: list[ParallelEnv] = []
    is_sent = threading.Event()

    class Last(Counter):
        def step(self, action: Any) -> Any:
            is_sent.wait(10.0)
            pools.clear()
            gc.collect()
            return super().step(action)

    pools.append(ParallelEnv([Last], "thread"))
    pools[0].reset()
    (thread,) = [worker.channel.thread for worker in pools[0].engine.pool._workers]  # type: ignore[attr-defined]
    pools[0].send([0])
    with pytest.MonkeyPatch.context() as patch:
        unraisable: list[Any] = []
        patch.setattr(sys, "unraisablehook", unraisable.append)
        is_sent.set()
        thread.join(10.0)
        assert unraisable == []
    assert not thread.is_alive()


def test_step_that_ends_after_close_does_not_change_results(tmp_path: Path) -> None:
    with ParallelEnv(fragile(tmp_path), "thread", "continue", num_cpus=2, timeout=0.2, copy=False) as env:
        env.reset()
        states = env.step([GO_ON] * 4).states
        threads = [worker.channel.thread for worker in env.engine.pool._workers]  # type: ignore[attr-defined]
        with pytest.raises(WorkerTimeoutError):
            env.step([WAIT] * 4)
        env.close(0.1)
        (tmp_path / "go").touch()
        for thread in threads:
            thread.join()
        assert states[:, 1].tolist() == [1] * 4


@pytest.mark.parametrize("error", [SystemExit(3), MemoryError("no room")])
def test_thread_that_ends_by_an_exception_is_dead(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, error: BaseException
) -> None:
    def fail(host: Host, command: Command, *others: Any) -> Any:
        if command.operation == "step" and 3 in command.env_ids:
            raise error
        return execute(host, command, *others)

    execute = Host.execute
    with ParallelEnv(fragile(tmp_path), "thread", num_cpus=2, timeout=20.0) as env:
        env.reset()
        monkeypatch.setattr(Host, "execute", fail)
        with pytest.raises(WorkerDiedError, match=f"thread was ended by {type(error).__name__}") as caught:
            env.step([GO_ON] * 4)
        assert "raise error" in str(caught.value)  # the traceback
        assert (caught.value.env_ids, caught.value.pid) == ((2, 3), os.getpid())
        assert caught.value.partial.env_ids.tolist() == [0, 1]  # type: ignore[attr-defined]
        with pytest.raises(WorkerDiedError):
            env.get_env_attr("number")
        monkeypatch.undo()
        assert env.restart(3) == (2, 3)
        env.reset([2, 3])
        assert env.step([GO_ON] * 4).states[:, 1].tolist() == [2, 2, 1, 1]


def test_event_loop_is_woken_by_the_end_of_a_thread(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    async def receive() -> None:
        env.send([GO_ON] * 4)
        await env.arecv(min_envs=4, timeout=20.0)

    def fail(host: Host, command: Command, *others: Any) -> Any:
        raise SystemExit(3)

    with ParallelEnv(fragile(tmp_path), "thread", num_cpus=1) as env:
        env.reset()
        monkeypatch.setattr(Host, "execute", fail)
        with pytest.raises(WorkerDiedError, match="SystemExit: 3"):
            asyncio.run(receive())


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_thread_that_ends_without_a_report_is_dead(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def fail(*_: object) -> Any:
        raise MemoryError

    monkeypatch.setattr(Host, "execute", fail)
    monkeypatch.setattr(traceback, "format_exception_only", fail)
    with pytest.raises(WorkerDiedError, match=r"Its thread has ended\."):
        ParallelEnv(fragile(tmp_path), "thread", num_cpus=1)


def test_interrupt_of_a_wait_does_not_make_a_live_thread_dead(tmp_path: Path) -> None:
    """An exception of a signal handler may come at any moment of a wait."""

    class TimeIsUpError(Exception): ...

    def end(*_: object) -> None:
        raise TimeIsUpError

    before = signal.signal(signal.SIGALRM, end)
    try:
        with ParallelEnv(fragile(tmp_path), "thread", "continue", num_cpus=2) as env:
            channels: list[Any] = [worker.channel for worker in env.engine.pool._workers]
            for number in range(2000):
                with contextlib.suppress(TimeIsUpError):
                    signal.setitimer(signal.ITIMER_REAL, (20 + number % 100) * 1e-6)
                    for _ in range(500):
                        assert not any(channel.advance() for channel in channels)
            signal.setitimer(signal.ITIMER_REAL, 0)
            assert env.reset().shape == (4, 2)
    finally:
        signal.signal(signal.SIGALRM, before)
