"""The benchmark: repeated rounds, CPU time of other programs, and concurrent loops. No time is asserted."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import psutil
import pytest

sys.path.append(str(Path(__file__).parent.parent))  # last: the package that is installed comes before the checkout's

from benchmarks import report, runner
from benchmarks.cases import LIMIT, Case, Target, above
from benchmarks.disturbance import CpuTimes, Disturbance
from benchmarks.envs import STILL, EnvKind, Timed
from benchmarks.runner import REPEATS, Outcome, Pace, SystemFailedError
from benchmarks.systems import BY_NAME, SIDE_BY_SIDE, Opened, SideBySide, bare_loop
from benchmarks.verdicts import verdicts
from parallelenv.contract.cpu_cores import usable_cores

CASE = Case("case", STILL, 2, ("dummy",), rounds=1)


class Scripted(runner.Children):
    """Children whose measurements have given numbers or failures."""

    def __init__(self, *others_percent: float | str) -> None:
        super().__init__()
        self.script = list(others_percent)

    def measure(self, system: str, case: Case, seconds: float) -> dict[str, float]:
        others = self.script.pop(0)
        if isinstance(others, str):
            raise SystemFailedError(others)
        return {"rate": 1000 - others, "others_percent": others}


def measured(children: Scripted, pace: Pace | None = None) -> Outcome:
    outcomes = {"dummy": Outcome()}
    runner._run_case(CASE, pace or Pace(), children, outcomes)
    return outcomes["dummy"]


@pytest.mark.parametrize(
    ("script", "is_quick", "kept", "is_disturbed", "num_left"),
    [
        ((2.0, 0.0), False, 2.0, False, 1),  # a quiet round is measured once
        ((50.0, 9.0, 1.0, 0.0), False, 1.0, False, 1),  # a disturbed one until it is quiet
        ((*([50.0] * (REPEATS - 1)), 7.0, 30.0), False, 7.0, True, 0),  # the quietest is kept
        ((50.0, 0.0), True, 50.0, True, 1),  # a quick run repeats none
    ],
)
def test_disturbed_rounds_are_repeated_or_marked(
    script: tuple[float, ...], is_quick: bool, kept: float, is_disturbed: bool, num_left: int
) -> None:
    children = Scripted(*script)
    outcome = measured(children, Pace(is_quick=is_quick))
    assert outcome.rounds == {0: {"rate": 1000 - kept, "others_percent": kept}}
    assert outcome.disturbed == ({0} if is_disturbed else set())
    assert len(children.script) == num_left


def test_failure_of_a_repeat_is_a_failure() -> None:
    outcome = measured(Scripted(50.0, "it hangs"))
    assert (outcome.failure, outcome.disturbed) == ("it hangs", {0})


def test_absent_system_is_a_row_with_its_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    absent = replace(BY_NAME["dummy"], absence=lambda: "no such package")
    monkeypatch.setitem(BY_NAME, "dummy", absent)
    case = replace(CASE, systems=("bare", "dummy"), targets=(above("dummy", 2, "bare"),))
    monkeypatch.setattr(runner, "Children", lambda: Scripted(0.0))
    results: runner.Results = {}
    runner.run([case], Pace(), results)
    assert results["case"]["dummy"] == Outcome(absence="no such package")
    assert "| ParallelEnv dummy | 0; left out: no such package |" in report._case(case, results["case"])
    assert [verdict.word for verdict in verdicts([case], results)] == ["not measured"]


def test_case_whose_systems_are_all_absent_is_not_measured() -> None:
    outcomes = {"dummy": Outcome(absence="no such package")}
    runner._run_case(CASE, Pace(), Scripted(), outcomes)
    assert "| ParallelEnv dummy | 0; left out: no such package |" in report._case(CASE, outcomes)


def rates(*values: float, disturbed: tuple[int, ...] = ()) -> Outcome:
    others = {turn: 50.0 if turn in disturbed else 0.0 for turn in range(len(values))}
    return Outcome({turn: {"rate": rate, "others_percent": others[turn]} for turn, rate in enumerate(values)})


def test_target_counts_compared_rounds_with_a_disturbed_side(tmp_path: Path) -> None:
    targets = (above("dummy", 2, "bare"), above("dummy", 2, "process peer"), Target("dummy", ">", 1.0))
    case = replace(CASE, systems=("bare", "dummy", "gym-async", "sb3-subproc"), targets=targets)
    outcomes = {
        "bare": rates(1, 1, 1, disturbed=(1,)),
        "dummy": rates(3, 4, 5, disturbed=(2,)),
        "gym-async": rates(1, 1),
        "sb3-subproc": rates(2, 2, disturbed=(0, 1)),
    }
    found = verdicts([case], {case.name: outcomes})
    assert [verdict.values for verdict in found] == [(3, 4, 5), (1.5, 2), (3, 4, 5)]
    assert [verdict.disturbed for verdict in found] == [2, 2, 1]

    report.write(tmp_path, [case], {case.name: outcomes}, {}, "make bench")
    text = (tmp_path / "RESULTS.md").read_text(encoding="utf-8")
    assert "*disturbed*: 4 of 10 rounds" in text
    assert "| 4 (3 .. 5) | met, 2 of 3 rounds disturbed |" in text
    assert "| ParallelEnv dummy | 3, 1 disturbed |" in text
    assert report.read(tmp_path)[0] == {case.name: outcomes}


def test_limit_is_measured_with_concurrent_loops_else_computed() -> None:
    targets = (above("dummy", 0.9, SIDE_BY_SIDE), above("dummy", 0.9, LIMIT))
    case = replace(CASE, systems=("bare", SIDE_BY_SIDE, "dummy"), targets=targets)
    outcomes = {"bare": rates(100.0), SIDE_BY_SIDE: rates(160.0), "dummy": rates(150.0)}
    found = verdicts([case], {case.name: outcomes})
    assert [verdict.measured for verdict in found] == [150 / 160, 150 / (100 * usable_cores())]
    assert "x side by side" in report._case(case, outcomes)


def test_cpu_time_of_processes_that_have_ended_is_ours() -> None:
    before = CpuTimes.now()
    burn = "import time\nwhile time.process_time() < 0.2: pass"
    subprocess.run([sys.executable, "-c", burn], check=True)
    assert CpuTimes.now().ours - before.ours > 0.17  # measured in units of 10 ms, of user and of system time


def test_threads_of_the_kernel_count_as_ours() -> None:
    now = CpuTimes.now()
    kernel = {one.pid for one in psutil.process_iter(["name"]) if one.info["name"] == "kthreadd"}
    threads = {one.pid for one in psutil.process_iter(["ppid"]) if one.info["ppid"] in kernel}
    assert bool(threads) == now.is_complete
    assert threads.isdisjoint(now.others)


def times(wall: float, busy: float, ours: float, **changes: Any) -> CpuTimes:
    return replace(CpuTimes(wall, busy, 0.0, ours, {1: 10.0, 2: 20.0}, 5.0, True), **changes)


BEGIN = times(100, 50, 30)


@pytest.mark.parametrize(
    ("end", "percent"),
    [
        (times(101, 51.5, 31.4), 0.0),  # 0.1 s of the kernel's own, which no process has
        (times(101, 51.5, 31.2, others={1: 10.0, 2: 20.1, 3: 0.1}, steal=0.1), 30.0),
        (times(101, 51.5, 31.2, others={1: 10.0}), 29.0),  # one has ended: the machine's busy time counts
        (times(101, 51.5, 31.2, others_ended=5.2), 29.0),  # likewise, one that started in the meantime
        (times(101, 51.5, 31.2, is_complete=False), 29.0),  # in a container
    ],
)
def test_time_of_other_processes_is_measured_or_else_inferred(end: CpuTimes, percent: float) -> None:
    assert BEGIN.others_percent(end) == pytest.approx(percent)


def test_disturbance_during_steps_is_noted_despite_a_long_opening() -> None:
    disturbance = Disturbance()
    assert disturbance.numbers() == {}
    disturbance.note(BEGIN, times(109, 59, 39), times(110, 60.5, 40, others={1: 10.5, 2: 20.0}))
    disturbance.note(BEGIN, BEGIN, times(110, 60, 40))
    assert disturbance.numbers() == {"others_percent": pytest.approx(50.0)}


class Recorder(Timed):
    """Records its arguments, as names of files."""

    def __init__(self, folder: str) -> None:
        super().__init__()
        self.folder = Path(folder)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        (self.folder / f"{seed} {os.getpid()}").touch()
        return super().reset(seed=seed, options=options)

    def step(self, action: Any) -> Any:
        (self.folder / f"action {action}").touch()
        return super().step(action)


def test_concurrent_loops_share_the_envs(tmp_path: Path) -> None:
    env_fns = EnvKind("", Recorder, {"folder": str(tmp_path)}).env_fns(5)
    with contextlib.closing(SideBySide(bare_loop, env_fns, 2)) as loops:
        loops.reset(10)
        seeds, processes = zip(*(path.name.split() for path in sorted(tmp_path.iterdir())), strict=True)
        assert seeds == ("10", "11", "12", "13", "14")
        assert processes[0] == processes[1] != processes[2] == processes[3] == processes[4]
        assert loops.rate([np.arange(5)], 0.01, 0.05) > 0
        assert {path.name for path in tmp_path.glob("action *")} == {f"action {index}" for index in range(5)}


def fails_when_stepped(env_fns: Any, options: Any) -> Opened:
    return Opened(lambda seed: None, lambda actions: 1 // 0, lambda: None)


def test_failure_of_a_loop_is_raised_and_the_others_end() -> None:
    loops = SideBySide(bare_loop, EnvKind("", gymnasium.make, {"id": "NoSuchEnv-v0"}).env_fns(2), 2)
    with contextlib.closing(loops), pytest.raises(RuntimeError, match=r"NameNotFound: .*NoSuchEnv"):
        loops.reset(0)
    with contextlib.closing(SideBySide(fails_when_stepped, STILL.env_fns(3), 2)) as loops:
        loops.reset(0)
        with pytest.raises(RuntimeError, match="ZeroDivisionError"):
            loops.rate([np.arange(3)], 0.01, 0.01)
