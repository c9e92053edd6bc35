"""The balancer moves workers that share a core needlessly, and no other process."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from parallelenv.backends import _cpu_balancer
from parallelenv.backends._cpu_balancer import CpuBalancer

USABLE: set[int] = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set()
LOADAVG = "/proc/loadavg"
read = _cpu_balancer._read
set_affinity: Any = getattr(os, "sched_setaffinity", None)  # not counted among the moves
PATIENCE = 20.0  # seconds until a worker must have been moved; on a quiet machine it takes one look

pytestmark = [
    pytest.mark.skipif(
        not Path(LOADAVG).exists(), reason="no /proc/loadavg to count the processes that are ready to run"
    ),
    pytest.mark.skipif(len(USABLE) < 2, reason="nothing can be moved apart on one core, or where cores cannot be set"),
]

# It gives itself a name that could be parsed as another process state, and prints a line when it is ready.
SPIN = "open('/proc/self/comm', 'w').write('w) S 1 (x'); print(flush=True)\nwhile True: pass"
SLEEP = "import time; print(flush=True); time.sleep(60)"
Start = Callable[[str], int]


@pytest.fixture
def start() -> Iterator[Start]:
    """Start a process that runs a script, and return its id."""
    started: list[subprocess.Popen[str]] = []

    def start(script: str) -> int:
        started.append(subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True))
        assert started[-1].stdout is not None
        assert started[-1].stdout.readline() == "\n"
        return started[-1].pid

    yield start
    for process in started:
        process.kill()
        process.communicate()


class Moves(list[tuple[int, set[int]]]):
    """Every ``sched_setaffinity`` of the code under test; and where the process was right after the first."""

    landed: int | None = None

    def record(self, pid: int, cores: set[int]) -> None:
        set_affinity(pid, cores)
        if not self:
            self.landed = _cpu_balancer._core_if_awake(pid)
        self.append((pid, set(cores)))


def pretend_runnable(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    """Let the system report this number of runnable threads."""
    monkeypatch.setattr(
        _cpu_balancer, "_read", lambda path: b"0 0 0 %d/9 9" % number if path == LOADAVG else read(path)
    )


@pytest.fixture
def moves(monkeypatch: pytest.MonkeyPatch) -> Moves:
    """The recorded moves, while no other process seems to be runnable."""
    moves = Moves()
    monkeypatch.setattr(os, "sched_setaffinity", moves.record)
    pretend_runnable(monkeypatch, 1)
    return moves


def crowd(pids: list[int], core: int) -> None:
    """Move processes to one core without pinning them."""
    for cores in ({core}, USABLE):
        for pid in pids:
            set_affinity(pid, cores)


def other_core() -> int:
    """Return a core that is not the one of this process."""
    ours = _cpu_balancer._core_if_awake(os.getpid())
    return next(core for core in sorted(USABLE) if core != ours)


def look_until(moves: Moves, pids: list[int]) -> int:
    """Put processes on one core and check at once, repeatedly until one was moved; return that core.

    The system may move one sooner, and then there is nothing to do.
    """
    deadline = time.monotonic() + PATIENCE
    while time.monotonic() < deadline:
        core = other_core()
        crowd(pids, core)
        CpuBalancer(caller_steps=False).balance(pids)
        if moves:
            return core
    pytest.fail("no worker was moved")


@pytest.fixture
def busy(start: Start) -> list[int]:
    return [start(SPIN), start(SPIN)]


def test_balancer_moves_one_of_two_busy_workers_off_a_shared_core(busy: list[int], moves: Moves) -> None:
    shared = look_until(moves, busy)
    other = min(USABLE - {shared})
    assert moves == [(busy[1], {other}), (busy[1], USABLE)]
    assert moves.landed == other
    assert [os.sched_getaffinity(pid) for pid in busy] == [USABLE] * 2  # not pinned


@pytest.mark.parametrize("caller_steps", [False, True])
def test_balancer_moves_worker_off_the_core_of_a_caller_that_steps(
    caller_steps: bool, start: Start, moves: Moves
) -> None:
    pid = start(SPIN)
    ours, other, *_ = sorted(USABLE)
    set_affinity(0, {ours})
    try:
        deadline = time.monotonic() + (PATIENCE if caller_steps else 0.2)
        while not moves and time.monotonic() < deadline:
            crowd([pid], ours)
            CpuBalancer(caller_steps).balance([pid])
    finally:
        set_affinity(0, USABLE)
    assert moves == ([(pid, {other}), (pid, USABLE)] if caller_steps else [])


def test_ctrl_c_during_a_move_does_not_pin_the_worker(
    busy: list[int], moves: Moves, monkeypatch: pytest.MonkeyPatch
) -> None:
    def move_and_interrupt(pid: int, cores: set[int]) -> None:
        moves.record(pid, cores)
        if len(moves) == 1:
            raise KeyboardInterrupt

    monkeypatch.setattr(os, "sched_setaffinity", move_and_interrupt)
    with pytest.raises(KeyboardInterrupt):
        look_until(moves, busy)
    assert [os.sched_getaffinity(pid) for pid in busy] == [USABLE] * 2


def test_balancer_moves_no_process_while_other_processes_are_runnable(
    busy: list[int], moves: Moves, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend_runnable(monkeypatch, 4)  # these two, this one, and another
    for _ in range(50):
        crowd(busy, other_core())
        CpuBalancer(caller_steps=False).balance(busy)
    assert moves == []
    pretend_runnable(monkeypatch, 3)
    look_until(moves, busy)


def test_balancer_does_not_move_sleeping_workers(start: Start, moves: Moves) -> None:
    pids = [start(SLEEP), start(SLEEP)]
    deadline = time.monotonic() + PATIENCE
    while any(psutil.Process(pid).status() != psutil.STATUS_SLEEPING for pid in pids) and time.monotonic() < deadline:
        time.sleep(0.01)
    crowd(pids, other_core())
    for caller_steps in (False, True):
        CpuBalancer(caller_steps).balance(pids)
    assert moves == []


def test_balancer_does_not_move_workers_pinned_by_the_user(busy: list[int], moves: Moves) -> None:
    core = max(USABLE)
    for pid in busy:
        set_affinity(pid, {core})
    for _ in range(20):
        CpuBalancer(caller_steps=False).balance(busy)
    assert moves == []
    assert [os.sched_getaffinity(pid) for pid in busy] == [{core}] * 2


def test_balancer_ignores_dead_workers(busy: list[int], moves: Moves) -> None:
    gone, zombie = (subprocess.Popen([sys.executable, "-c", ""]) for _ in range(2))
    gone.wait()
    os.waitid(os.P_PID, zombie.pid, os.WEXITED | os.WNOWAIT)
    for dead in (gone.pid, zombie.pid):
        crowd(busy, other_core())
        CpuBalancer(caller_steps=True).balance([dead])
        CpuBalancer(caller_steps=False).balance([dead, *busy])
    assert {pid for pid, _ in moves} <= {*busy}
    zombie.wait()


@pytest.mark.parametrize("what", ["sched_setaffinity", LOADAVG])
def test_balancer_does_nothing_without_sched_setaffinity_or_loadavg(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        if what == LOADAVG:
            patch.setattr(Path, "exists", lambda self: str(self) != what)
        else:
            patch.delattr(os, what)
        balancer = CpuBalancer(caller_steps=False)
    monkeypatch.setattr(CpuBalancer, "_spread", lambda self, pids: pytest.fail("it looked"))
    balancer.balance([os.getpid()])
