"""`arecv` in an event loop: events that wake it, leaks, and several tasks that wait at the same time."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NoReturn
from unittest.mock import patch

import pytest
from conftest import MakeEnv
from fragile import EXIT, GO_ON, WAIT, Fragile, fragile
from modes import IN_BACKGROUND, IN_WORKERS, PROCESSES, THREADS, in_modes

from parallelenv import ParallelEnv
from parallelenv.backends._process import process_exists
from parallelenv.engine import engine
from parallelenv.errors import ClosedError, WorkerDiedError, WorkerTimeoutError

in_workers = in_modes(*IN_BACKGROUND)
in_processes = in_modes(*IN_WORKERS)
in_subproc = in_modes(PROCESSES)

LIMIT = 20.0
"""Seconds after which a test fails: nothing has woken the loop."""


@pytest.fixture
def without_timer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let only replies wake the waiting tasks."""
    for name in ("HEARTBEAT", "SHORTEST_NAP"):
        monkeypatch.setattr(engine, name, 3600.0)


@pytest.fixture
def readers(monkeypatch: pytest.MonkeyPatch) -> set[int]:
    """The descriptors that are watched by a loop."""
    watched: set[int] = set()
    add, remove = asyncio.SelectorEventLoop.add_reader, asyncio.SelectorEventLoop.remove_reader

    def add_reader(loop: Any, fileno: int, *arguments: Any) -> None:
        assert fileno not in watched
        watched.add(fileno)
        add(loop, fileno, *arguments)

    def remove_reader(loop: Any, fileno: int) -> bool:
        watched.remove(fileno)
        return remove(loop, fileno)

    monkeypatch.setattr(asyncio.SelectorEventLoop, "add_reader", add_reader)
    monkeypatch.setattr(asyncio.SelectorEventLoop, "remove_reader", remove_reader)
    return watched


@pytest.fixture
def make(make_env: MakeEnv, tmp_path: Path) -> Callable[..., ParallelEnv]:
    """Make four envs in workers, and reset them."""

    def make(num_cpus: int = 4, **options: Any) -> ParallelEnv:
        env = make_env(fragile(tmp_path), num_cpus=num_cpus, **options)
        env.reset()
        return env

    return make


@pytest.fixture
def env(make: Callable[..., ParallelEnv]) -> ParallelEnv:
    """Four envs in four workers, after a reset."""
    return make()


async def until(condition: Callable[[], Any]) -> None:
    deadline = time.monotonic() + LIMIT
    while not condition():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.002)


async def begun(env: ParallelEnv, folder: Path, *calls: Any) -> list[Any]:
    """Start tasks with these calls, and return them once env 0 waits in its step and they wait for it."""
    tasks = [asyncio.ensure_future(call) for call in calls]
    await until(lambda: (folder / "began-0").exists() and len(env.engine.pool.wakers) == len(tasks))
    return tasks


def run(play: Any) -> Any:
    return asyncio.run(asyncio.wait_for(play, LIMIT))


# -------------------------------------------------------------------- events that wake it


@in_workers
@pytest.mark.usefixtures("without_timer")
def test_a_reply_wakes_the_loop(env: ParallelEnv, tmp_path: Path, readers: set[int]) -> None:
    env.send([WAIT, GO_ON, GO_ON, GO_ON])

    async def play() -> None:
        assert sorted((await env.arecv(3)).env_ids) == [1, 2, 3]
        (waiting,) = await begun(env, tmp_path, env.arecv())
        assert len(readers) == 1
        with patch.object(type(env.engine), "poll") as poll:
            for _ in range(50):
                await asyncio.sleep(0)
        assert not poll.called  # it is idle until the next reply
        (tmp_path / "go").touch()
        assert (await waiting).states.tolist() == [[0, 1]]

    run(play())
    assert not readers
    assert not env.engine.pool.wakers


@in_workers
@pytest.mark.usefixtures("without_timer")
def test_no_reply_is_missed(env: ParallelEnv) -> None:
    async def serve() -> None:
        for _ in range(50):
            env.send([GO_ON], (await env.arecv(1, 1)).env_ids)

    async def play() -> int:
        env.send([GO_ON] * 4)
        await asyncio.gather(*(serve() for _ in range(4)))
        return int((await env.arecv(4)).states[:, 1].sum())

    assert run(play()) == 204


@in_processes
@pytest.mark.usefixtures("without_timer")
def test_the_end_of_a_worker_and_the_restarted_worker_wake_the_loop(
    env: ParallelEnv, tmp_path: Path, readers: set[int]
) -> None:
    async def die() -> None:
        with pytest.raises(WorkerDiedError, match="env 0"):
            await env.arecv(4)

    async def play() -> None:
        (waiting,) = await begun(env, tmp_path, env.arecv())
        (tmp_path / "go").touch()
        await waiting

    env.send([EXIT, GO_ON, GO_ON, GO_ON])
    run(die())
    assert not readers
    env.restart(0)
    env.reset()
    env.send([WAIT], 0)
    run(play())


class Parent(Fragile):
    """Prints within a step, and can have a child that keeps the worker's pipe open."""

    def wait(self) -> None:
        super().wait()
        print(f"env {self.number} goes on")
        deadline = time.monotonic() + 30
        while not Path(self.folder, "end").exists() and time.monotonic() < deadline:
            time.sleep(0.01)

    def fork(self) -> int:
        child = os.fork()
        if not child:
            while not Path(self.folder, "go").exists():
                time.sleep(0.01)
            os._exit(0)
        return child


@in_subproc
def test_output_is_shown_during_a_step(make_env: MakeEnv, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    env = make_env([partial(Parent, 0, str(tmp_path))])
    env.reset()
    env.send([WAIT])

    async def play() -> None:
        (waiting,) = await begun(env, tmp_path, env.arecv())
        (tmp_path / "go").touch()
        await until(lambda: "[env 0] env 0 goes on" in capsys.readouterr().out)
        assert not waiting.done()
        (tmp_path / "end").touch()
        await waiting

    run(play())


@in_subproc
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")  # newer Pythons, of fork
def test_death_is_noticed_while_a_child_keeps_the_pipe_open(make_env: MakeEnv, tmp_path: Path) -> None:
    env = make_env([partial(Parent, 0, str(tmp_path))])
    env.reset()
    (child,), (worker,) = env.customized_method("fork"), env.customized_method("pid")
    env.send([WAIT])

    async def play() -> None:
        (waiting,) = await begun(env, tmp_path, env.arecv())
        os.kill(worker, signal.SIGKILL)
        began = time.monotonic()
        with pytest.raises(WorkerDiedError):
            await waiting
        assert time.monotonic() - began < 5.0
        assert process_exists(child)
        (tmp_path / "go").touch()
        await until(lambda: not process_exists(child))

    run(play())


@in_workers
def test_loop_without_add_reader_polls(env: ParallelEnv, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(error: type[Exception], *_: Any) -> NoReturn:
        raise error

    for error in (NotImplementedError, OSError):
        monkeypatch.setattr(asyncio.SelectorEventLoop, "add_reader", partial(refuse, error))
        if error is NotImplementedError:
            monkeypatch.setattr(asyncio.SelectorEventLoop, "remove_reader", partial(refuse, error))
        env.send([WAIT, GO_ON, GO_ON, GO_ON])

        async def play() -> None:
            (waiting,) = await begun(env, tmp_path, env.arecv(4))
            descriptors = len(os.listdir("/proc/self/fd"))
            (tmp_path / "go").touch()
            await waiting
            assert len(os.listdir("/proc/self/fd")) < descriptors

        run(play())
        (tmp_path / "go").unlink()
        (tmp_path / "began-0").rmdir()


# -------------------------------------------------------------------- events that end it


@in_workers
@pytest.mark.usefixtures("without_timer")
def test_cancelled_or_late_arecv_leaves_no_reader_and_loses_no_result(
    env: ParallelEnv, tmp_path: Path, readers: set[int]
) -> None:
    env.send([WAIT, GO_ON, GO_ON, GO_ON])

    async def play() -> None:
        await env.arecv(3)
        await begun(env, tmp_path)
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(env.arecv(), 0.02)
        descriptors = len(os.listdir("/proc/self/fd"))
        with pytest.raises(WorkerTimeoutError, match=r"env 0 did not answer within 0.02 s. Continue to wait with recv"):
            await env.arecv(timeout=0.02)
        (waiting,) = await begun(env, tmp_path, env.arecv())
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        assert not readers
        assert not env.engine.pool.wakers
        if env.para_mode in (THREADS, PROCESSES):  # Ray opens connections at any time
            assert len(os.listdir("/proc/self/fd")) == descriptors
        (tmp_path / "go").touch()

    async def play_on() -> None:
        assert (await env.arecv()).env_ids.tolist() == [0]

    run(play())
    run(play_on())  # in another loop
    assert not readers


@in_subproc
def test_close_ends_arecv(env: ParallelEnv, tmp_path: Path, readers: set[int]) -> None:
    env.send([WAIT, GO_ON, GO_ON, GO_ON])

    async def play() -> None:
        (waiting,) = await begun(env, tmp_path, env.arecv(4))
        (tmp_path / "go").touch()
        env.close()
        with pytest.raises(ClosedError):
            await waiting

    run(play())
    assert not readers


# -------------------------------------------------------------------- several at the same time


@in_workers
@pytest.mark.usefixtures("without_timer")
def test_several_tasks_and_a_call_wait_for_replies_that_come_together(
    make: Callable[..., ParallelEnv], tmp_path: Path, readers: set[int]
) -> None:
    env = make(num_cpus=1)
    env.send([WAIT, GO_ON, GO_ON, GO_ON])

    async def play() -> list[int]:
        waiting = await begun(env, tmp_path, *(env.arecv(1, 1) for _ in range(3)))
        assert len(readers) == 3
        (tmp_path / "go").touch()
        taken = env.recv(1, 1).env_ids.tolist()  # reads all that came
        return [*taken, *[int((await one).env_ids[0]) for one in waiting]]

    assert sorted(run(play())) == [0, 1, 2, 3]
    assert not readers
