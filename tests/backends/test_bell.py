"""Steps that are announced by a bell."""

from __future__ import annotations

import errno
import os
import select
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fragile import GO_ON, WAIT, fragile
from interrupting import Moments, at_many_moments, interrupt_at

from parallelenv import ParallelEnv
from parallelenv.backends._bell import HAS_BELL, Bell
from parallelenv.errors import WorkerStartError, WorkerTimeoutError

pytestmark = pytest.mark.skipif(not HAS_BELL, reason="there is no bell on this system")


@pytest.fixture
def env(tmp_path: Path) -> Iterator[ParallelEnv]:
    with ParallelEnv(fragile(tmp_path), "subproc", "continue", num_cpus=2) as env:
        env.reset()
        env.step([GO_ON] * 4)  # the bell announces the next ones
        yield env


def test_worker_that_sleeps_through_rings_blocks_nothing_and_does_its_step(env: ParallelEnv) -> None:
    pid = env.customized_method("pid", id=[2])[0]
    os.kill(pid, signal.SIGSTOP)
    try:
        env.send([GO_ON] * 4)
        for number in range(2, 602):  # 280 messages would fill its pipe: it gets one
            assert env.recv(2).states.tolist() == [[0, number], [1, number]]
            env.send([GO_ON] * 2, [0, 1])
    finally:
        os.kill(pid, signal.SIGCONT)
    assert sorted(env.recv(4).states.tolist()) == [[0, 602], [1, 602], [2, 2], [3, 2]]
    assert env.step([GO_ON] * 4).states[:, 1].tolist() == [603, 603, 3, 3]


def test_step_that_finished_before_a_later_call_is_not_lost_by_a_large_argument(tmp_path: Path) -> None:
    with ParallelEnv(fragile(tmp_path), "subproc", "continue", 1, timeout=0.5) as env:
        env.reset()
        env.step([GO_ON] * 4)
        env.send([WAIT] * 4)
        with pytest.raises(WorkerTimeoutError):
            env.customized_method("pid")
        (tmp_path / "go").touch()
        (worker,) = env.engine.pool._workers
        channel: Any = worker.channel
        while not (channel.has_finished and select.select([channel.fileno], [], [], 1.0)[0]):
            pass
        env.set_env_attr("weights", b"x" * 100_000)
        assert env.recv(4).states[:, 1].tolist() == [2] * 4


@at_many_moments
@pytest.mark.timeout(method="thread")
def test_interrupted_ring_leaves_no_eventfd_readable_for_which_workers_wait(moments: Moments) -> None:
    for line, interrupt in moments:
        bell = Bell(1)
        bell.ring()
        outcome = interrupt_at(line, bell.ring, ["_bell"], interrupt)
        waited_for = bell._descriptors[1 + (bell.words[0] + 1 & 1)]
        assert select.select([waited_for], [], [], 0.0)[0] == [], outcome
        bell.ring()  # of the next step
        assert select.select([waited_for], [], [], 0.0)[0] == [waited_for], outcome
        if not outcome.line:
            break
    assert line > 4


def test_few_of_many_workers_are_not_woken_by_the_bell(tmp_path: Path) -> None:
    with ParallelEnv(fragile(tmp_path), "subproc", "continue", num_cpus=4) as env:
        env.reset()
        env.step([GO_ON] * 4)
        words = env.engine.pool.backend._group.bell.words  # type: ignore[attr-defined]
        rings = words[0]
        for number in range(2, 5):
            assert env.step([GO_ON], [3]).states.tolist() == [[3, number]]
        assert words[0] == rings


def test_step_right_after_an_adapter_was_made_uses_the_new_batch(env: ParallelEnv) -> None:
    vector_env: Any = env.to_gymnasium("SameStep")
    for number in range(2, 5):
        assert vector_env.step(np.zeros(4, int))[0][:, 1].tolist() == [number] * 4


def test_too_few_descriptors_for_the_bell_are_an_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    opened: list[int] = []
    eventfd = os.eventfd

    def limited(value: int, flags: int) -> int:
        if len(opened) == 2:
            raise OSError(errno.EMFILE, "Too many open files")
        opened.append(eventfd(value, flags))
        return opened[-1]

    monkeypatch.setattr(os, "eventfd", limited)
    with pytest.raises(WorkerStartError, match=r"The workers' eventfds could not be opened .*ulimit -n"):
        ParallelEnv(fragile(tmp_path), "subproc", num_cpus=2)
