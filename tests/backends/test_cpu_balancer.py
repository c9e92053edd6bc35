"""The balancer moves workers that share a core needlessly, and no other process."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from scripts import start

from parallelenv.backends import _process
from parallelenv.backends._process import CpuBalancer

USABLE: set[int] = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set()
LOADAVG = "/proc/loadavg"
CALLER = os.getpid()

pytestmark = pytest.mark.skipif(
    not Path(LOADAVG).exists(), reason="no /proc/loadavg to count the processes that are ready to run"
)


class Machine:
    """A machine on which the caller and workers run.

    Args:
        cores: State and core of each process, such as ``"R0"``; it runs, or sleeps (``S``).
        pinned: The processes that may use only the core on which they are.
        others: Number of other processes that are ready to run.
    """

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, cores: dict[int, str], pinned: Sequence[int] = (), others: int = 0
    ) -> None:
        self.cores = cores
        self.allowed = {pid: {int(core[1:])} if pid in pinned else {0, 1, 2} for pid, core in cores.items()}
        self.num_runnable = others + sum(core.startswith("R") for core in cores.values())
        self.moves: list[tuple[int, set[int]]] = []
        monkeypatch.setattr(_process, "_read", self.read)
        monkeypatch.setattr(os, "sched_getaffinity", self.allowed.__getitem__, raising=False)
        monkeypatch.setattr(os, "sched_setaffinity", self.move, raising=False)

    def read(self, path: str) -> bytes:
        if path == LOADAVG:
            return b"0.00 0.00 0.00 %d/99 9" % self.num_runnable
        pid = int(path.split("/")[2])
        if pid not in self.cores:
            raise FileNotFoundError(path)
        state, core = self.cores[pid][0], self.cores[pid][1:]
        return f"{pid} (w) S 1 (x) {state} {'0 ' * 35}{core}".encode()  # a name like another process's state

    def move(self, pid: int, cores: set[int]) -> None:
        self.moves.append((pid, set(cores)))
        self.allowed[pid] = set(cores)


TOGETHER = {CALLER: "R0", 1: "R1", 2: "R1"}


@pytest.mark.parametrize(
    ("cores", "caller_steps", "options", "moved"),
    [
        (TOGETHER, False, {}, {2: 0}),
        (TOGETHER, True, {}, {2: 2}),  # not to the core of the caller, which is busy itself
        ({CALLER: "R0", 1: "R0", 2: "R1"}, True, {}, {1: 2}),
        ({CALLER: "R0", 1: "R0", 2: "R1"}, False, {}, {}),  # it only waits
        (TOGETHER, False, {"others": 1}, {}),  # another process needs a core
        (TOGETHER, False, {"pinned": [1, 2]}, {}),  # by the user
        ({CALLER: "R0", 1: "R1", 2: "S1"}, False, {}, {}),
        ({CALLER: "R0", 1: "R1"}, False, {}, {}),  # the other worker is dead
    ],
)
def test_balancer_moves_a_worker_off_a_shared_core(
    cores: Any, caller_steps: bool, options: Any, moved: dict[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = Machine(monkeypatch, cores, **options)
    CpuBalancer(caller_steps).balance([1, 2])
    assert machine.moves == [move for pid, core in moved.items() for move in ((pid, {core}), (pid, {0, 1, 2}))]


def test_balancer_looks_at_the_thread_that_steps_and_not_at_the_main_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    with ThreadPoolExecutor(1) as other:
        stepper = other.submit(threading.get_native_id).result()
        machine = Machine(monkeypatch, {**TOGETHER, CALLER: "S0", stepper: "R0"})
        other.submit(CpuBalancer(caller_steps=False).balance, [1, 2]).result()
    assert machine.moves == [(2, {0}), (2, {0, 1, 2})]


@pytest.mark.parametrize("what", ["sched_setaffinity", LOADAVG])
def test_balancer_does_nothing_without_sched_setaffinity_or_loadavg(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(monkeypatch, TOGETHER)
    with monkeypatch.context() as patch:
        if what == LOADAVG:
            patch.setattr(Path, "exists", lambda self: str(self) != what)
        else:
            patch.delattr(os, what)
        balancer = CpuBalancer(caller_steps=False)
    balancer.balance([1, 2])
    assert machine.moves == []


@pytest.fixture
def busy() -> Iterator[list[int]]:
    started = [start("print(flush=True)\nwhile True: pass") for _ in range(2)]
    for process in started:
        assert process.stdout is not None
        assert process.stdout.readline() == "\n"
    yield [process.pid for process in started]
    for process in started:
        process.kill()
        process.communicate()


@pytest.mark.skipif(len(USABLE) < 2, reason="nothing can be moved apart on one core, or where cores cannot be set")
@pytest.mark.parametrize("is_interrupted", [False, True])
def test_real_worker_is_moved_and_not_pinned_even_if_ctrl_c_comes(
    busy: list[int], is_interrupted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    read, set_affinity = _process._read, os.sched_setaffinity
    moves: list[tuple[int, set[int]]] = []
    landed: list[int | None] = []

    def move(pid: int, cores: set[int]) -> None:
        set_affinity(pid, cores)
        moves.append((pid, set(cores)))
        landed.append(_process._core_if_awake(pid))
        if is_interrupted and len(moves) == 1:
            raise KeyboardInterrupt

    monkeypatch.setattr(os, "sched_setaffinity", move)
    monkeypatch.setattr(_process, "_read", lambda path: b"0 0 0 1/9 9" if path == LOADAVG else read(path))
    shared = next(core for core in sorted(USABLE) if core != _process._core_if_awake(CALLER))
    deadline = time.monotonic() + 20.0  # on a quiet machine it takes one look
    while not moves and time.monotonic() < deadline:
        for cores in ({shared}, USABLE):
            for pid in busy:
                set_affinity(pid, cores)
        try:
            CpuBalancer(caller_steps=False).balance(busy)  # the system may move one sooner
        except KeyboardInterrupt:
            assert is_interrupted
    other = min(USABLE - {shared})
    assert moves == [(busy[1], {other}), (busy[1], USABLE)]
    assert landed[0] == other
    assert [os.sched_getaffinity(pid) for pid in busy] == [USABLE] * 2
