"""Steps that are announced by a bell: faults of workers, the caller and the counter."""

from __future__ import annotations

import contextlib
import errno
import gc
import os
import signal
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gymnasium.spaces import Discrete
from interrupting import Counting

from parallelenv import ParallelEnv
from parallelenv.backends import _bell, _channel_group
from parallelenv.backends._bell import BellEnd
from parallelenv.engine import step_plan
from parallelenv.errors import WorkerStartError, WorkerTimeoutError

pytestmark = pytest.mark.skipif(not _bell.HAS_BELL, reason="there is no bell on this system")


class Meddler(Counting):
    """Counts its steps. An action above 0 first disturbs its worker's side of the bell.

    Actions: 1 counts once more, 2 fills the counter, 3 writes the word without counting.
    """

    action_space = Discrete(4)

    def step(self, action: Any) -> Any:
        if action:
            end = next(one for one in gc.get_objects() if isinstance(one, BellEnd))
            if action == 3:
                vars(end)["finish"] = partial(finish_without_counting, end)
            else:
                with contextlib.suppress(BlockingIOError):  # it is full already
                    os.eventfd_write(end._counter, 1 if action == 1 else 2**64 - 2)
        return super().step(action)

    def pid(self) -> int:
        return os.getpid()


class Gated(Counting):
    """With action 1 it waits for a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def step(self, action: Any) -> Any:
        while action and not self.path.exists():
            pass
        return super().step(action)


def finish_without_counting(end: BellEnd, *, has_message: bool) -> None:
    assert not has_message
    end._words[end._line + _bell.DONE] = end._word
    del vars(end)["finish"]


def make(num_workers: int = 2) -> ParallelEnv:
    env = ParallelEnv([Meddler] * (2 * num_workers), "subproc", "continue", num_workers)
    env.reset()
    env.step([0] * len(env))  # the bell announces the next ones
    return env


@pytest.mark.parametrize("meddling", [1, 2])
def test_too_high_counter_affects_no_step(meddling: int) -> None:
    with make() as env:
        for number in range(2, 12):
            assert env.step([meddling, 0, 0, meddling]).states[:, 0].tolist() == [number] * 4


def test_finished_worker_that_did_not_count_is_found_with_the_heartbeat(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_channel_group, "_HEARTBEAT", 0.01)
    monkeypatch.setattr(step_plan, "PATIENCE", 0.01)
    with make() as env:
        assert env.step([3, 0, 3, 0]).states[:, 0].tolist() == [2.0] * 4
        assert env.step([0] * 4).states[:, 0].tolist() == [3.0] * 4


def test_worker_that_sleeps_through_rings_blocks_nothing_and_does_its_step() -> None:
    with make() as env:
        pid = env.customized_method("pid", id=[2])[0]
        os.kill(pid, signal.SIGSTOP)
        try:
            env.send([0] * 4)
            for number in range(2, 602):  # 280 messages would fill its pipe: it gets one
                result = env.recv(2)
                assert result.env_ids.tolist() == [0, 1]
                assert result.states[:, 0].tolist() == [number] * 2
                env.send([0, 0], [0, 1])
        finally:
            os.kill(pid, signal.SIGCONT)
        result = env.recv(4)
        states = dict(zip(result.env_ids.tolist(), result.states[:, 0].tolist(), strict=True))
        assert states == {0: 602, 1: 602, 2: 2, 3: 2}
        assert env.step([0] * 4).states[:, 0].tolist() == [603, 603, 3, 3]


def test_step_that_finished_before_a_later_call_is_not_lost_by_a_large_argument(tmp_path: Path) -> None:
    with ParallelEnv([partial(Gated, tmp_path / "go")] * 2, "subproc", "continue", 1, timeout=0.05) as env:
        env.reset()
        env.step([0] * 2)
        env.send([1] * 2)
        with pytest.raises(WorkerTimeoutError):
            env.customized_method("close")
        (tmp_path / "go").touch()
        (worker,) = env.engine.pool._workers
        channel: Any = worker.channel
        while not (channel.has_finished and channel.wire.connection.poll(1.0)):
            pass
        env.set_env_attr("weights", b"x" * 100_000)
        assert env.recv(2).rewards.tolist() == [1.0, 1.0]


def test_few_of_many_workers_are_not_woken_by_the_bell() -> None:
    with make(5) as env:
        words = env.engine.pool.backend._group.bell.words  # type: ignore[attr-defined]
        rings = words[0]
        for number in range(2, 5):
            assert env.step([0, 0], [4, 5]).states[:, 0].tolist() == [number] * 2
        assert words[0] == rings


def test_step_right_after_an_adapter_was_made_uses_the_new_batch() -> None:
    with make() as env:
        vector_env: Any = env.to_gymnasium("SameStep")
        for number in range(2, 5):
            assert vector_env.step(np.zeros(4, int))[0][:, 0].tolist() == [number] * 4


def test_too_few_descriptors_for_the_bell_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[int] = []
    eventfd = os.eventfd

    def limited(value: int, flags: int) -> int:
        if len(opened) == 2:
            raise OSError(errno.EMFILE, "Too many open files")
        opened.append(eventfd(value, flags))
        return opened[-1]

    monkeypatch.setattr(os, "eventfd", limited)
    with pytest.raises(WorkerStartError, match=r"The workers' eventfds could not be opened .*ulimit -n"):
        ParallelEnv([Meddler] * 2, "subproc", num_cpus=2)
