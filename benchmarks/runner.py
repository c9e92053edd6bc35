"""Runs cases. Systems take turns, and only one system runs at a time. Each has a process that it uses for all cases."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, field
from multiprocessing import Pipe
from pathlib import Path
from typing import Any

import psutil

from benchmarks.cases import Case
from benchmarks.disturbance import is_disturbed
from benchmarks.systems import BY_NAME, System

ROOT = Path(__file__).resolve().parent.parent
_TOKEN = "PARALLELENV_BENCHMARK"  # environment variable of a child and of all processes that it starts
_QUIET = {"PYTHONWARNINGS": "ignore", "RAY_DEDUP_LOGS": "0", "TF_CPP_MIN_LOG_LEVEL": "3"}
_IMPORT_TIMEOUT = 120
_FAREWELL = 5  # seconds for a child to exit by itself
_PATIENCE = 90  # seconds for opening, one slow step and closing, after which a system counts as hanging
_PATIENCE_WITH_RAY = 300  # Tianshou's workers import torch one by one: 45 to 90 s for 16 workers on 2 cores
REPEATS = 3  # maximum number of repeats of a round that other programs disturbed


@dataclass(frozen=True, slots=True)
class Pace:
    """The duration of a measurement. ``None`` means the value of the case.

    Attributes:
        rounds: Rounds of every system.
        seconds: Seconds per system and round.
        is_quick: Whether to make only one round, in a fifth of the time, without repeats, and without systems that use
            Ray.
    """

    rounds: int | None = None
    seconds: float | None = None
    is_quick: bool = False

    def rounds_of(self, case: Case, system: System) -> int:
        """Return the number of rounds, from the first one, in which a system takes part."""
        if self.is_quick:
            return 0 if system.uses_ray else self.rounds or 1
        wanted = case.rounds_of(system)
        # Systems that use Ray have few rounds, because such a round takes as long as those of all other systems
        # together.
        return wanted if self.rounds is None else min(self.rounds, wanted if system.uses_ray else self.rounds)

    def seconds_of(self, case: Case) -> float:
        """Return the seconds for which a system is timed in a round."""
        wanted = case.seconds / 5 if self.is_quick else case.seconds
        return wanted if self.seconds is None else self.seconds


@dataclass(slots=True)
class Outcome:
    """The results of one system in one case.

    Attributes:
        rounds: Numbers of each round that the system finished, by round.
        failure: Why the system did not finish the other rounds; ``None`` if it finished all.
        absence: Why the system did not take part; empty if it took part.
    """

    rounds: dict[int, dict[str, float]] = field(default_factory=dict)
    failure: str | None = None
    absence: str = ""

    def values(self, metric: str) -> list[float]:
        """Return the numbers of a metric, for all rounds that have the metric."""
        return [numbers[metric] for numbers in self.rounds.values() if metric in numbers]

    @property
    def disturbed(self) -> set[int]:
        """The rounds in which other programs used too much CPU in every repeat."""
        return {turn for turn, numbers in self.rounds.items() if is_disturbed(numbers)}


Outcomes = dict[str, Outcome]  # by the name of the system
Results = dict[str, Outcomes]  # by the name of the case


class SystemFailedError(Exception):
    """A system returned no numbers. The message is the reason, in one line."""


class Child:
    """The process of one system, used for many cases.

    Args:
        system: Name of the system.
    """

    def __init__(self, system: str) -> None:
        self._token = uuid.uuid4().hex
        self._output = tempfile.TemporaryFile()  # noqa: SIM115 (closed in `end`)
        self._folder = tempfile.TemporaryDirectory()  # current folder of the process; MuJoCo writes a log there
        self._pipe, theirs = Pipe()
        # The process has its own session, so that Ctrl-C reaches only the runner, which then ends all children.
        self._process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.child", system, str(theirs.fileno())],
            cwd=self._folder.name,
            env={**os.environ, **_QUIET, "PYTHONPATH": _python_path(), _TOKEN: self._token},
            stdin=subprocess.DEVNULL,
            stdout=self._output,
            stderr=subprocess.STDOUT,
            pass_fds=[theirs.fileno()],
            start_new_session=True,
        )
        theirs.close()

    def start(self) -> None:
        """Wait until the process has imported the packages of the system.

        Raises:
            SystemFailedError: If a package cannot be imported.
        """
        self._receive(_IMPORT_TIMEOUT)

    def measure(self, case: str, seconds: float, timeout: float) -> dict[str, float]:
        """Let the process measure one round of a case, and return the numbers.

        Args:
            case: Name of the case.
            seconds: Seconds to time.
            timeout: Seconds after which the system counts as hanging.

        Raises:
            SystemFailedError: If the process returned no numbers.
        """
        self._pipe.send((case, seconds))
        numbers: dict[str, float] = self._receive(timeout)
        return numbers

    def _receive(self, timeout: float) -> Any:
        try:
            if not self._pipe.poll(timeout):
                raise SystemFailedError(f"no answer within {timeout:.0f} s: it hangs")
            numbers, failure = self._pipe.recv()
        except (EOFError, OSError):
            raise SystemFailedError(f"its process died ({self._exit()}): {self._last_words()}") from None
        if failure is not None:
            raise SystemFailedError(failure)
        return numbers

    def _exit(self) -> str:
        try:
            return f"exit code {self._process.wait(_FAREWELL)}"
        except subprocess.TimeoutExpired:
            return "it has no exit code yet"

    def _last_words(self) -> str:
        self._output.seek(0)
        lines = self._output.read().decode(errors="replace").split("\n")
        return next((line.strip()[:200] for line in reversed(lines) if line.strip()), "it printed nothing")

    def end(self, patiently: bool = True) -> None:
        """End the process and all processes that it started.

        Args:
            patiently: Whether to give the process time to exit by itself.
        """
        self._pipe.close()
        if patiently:
            self._exit()
        self._process.kill()
        self._process.wait()
        _kill_marked(self._token)
        self._output.close()
        self._folder.cleanup()


def _kill_marked(token: str) -> None:
    """Kill all processes with the token of a child, including those that left its session or outlived their parent."""
    marked = [process for process in psutil.process_iter() if _has(process, token)]
    for process in marked:
        process.kill()  # psutil makes sure that the id does not belong to a new process
    psutil.wait_procs(marked, timeout=_FAREWELL)


def _has(process: psutil.Process, token: str) -> bool:
    try:
        return process.environ().get(_TOKEN) == token
    except psutil.Error:  # the process has ended, or belongs to a different user
        return False


def _python_path() -> str:
    """Return a search path that includes the checkout, so that the child and spawned workers find `benchmarks`."""
    return os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))


class Children:
    """The processes of all systems, started when first needed."""

    def __init__(self) -> None:
        self._running: dict[str, Child] = {}

    def measure(self, system: str, case: Case, seconds: float) -> dict[str, float]:
        """Let a system measure one round. If that fails, end the system's process, because its state is unknown.

        Raises:
            SystemFailedError: If the process returned no numbers.
        """
        if case.is_fresh:
            self._end(system)
        try:
            if system not in self._running:
                self._running[system] = Child(system)
                self._running[system].start()
            patience = _PATIENCE_WITH_RAY if BY_NAME[system].uses_ray else _PATIENCE
            return self._running[system].measure(case.name, seconds, patience + 3 * seconds)
        except BaseException:
            self._end(system, patiently=False)
            raise

    def _end(self, system: str, patiently: bool = True) -> None:
        child = self._running.pop(system, None)
        if child is not None:
            child.end(patiently)

    def close(self) -> None:
        """End the processes of all systems."""
        while self._running:
            self._end(next(iter(self._running)))


def run(cases: Sequence[Case], pace: Pace, results: Results) -> None:
    """Measure cases one after the other.

    Args:
        cases: The cases.
        pace: The durations.
        results: Filled with the results case by case, so that it contains the results so far after an interrupt.
    """
    begin = time.monotonic()
    with closing(Children()) as running:
        for number, case in enumerate(cases, 1):
            minutes = (time.monotonic() - begin) / 60
            print(f"[{minutes:5.1f} min] case {number} of {len(cases)}: {case.name} ", end="", flush=True)
            results[case.name] = {name: Outcome(absence=BY_NAME[name].absence()) for name in case.systems}
            _run_case(case, pace, running, results[case.name])
            failed = [name for name, outcome in results[case.name].items() if outcome.failure]
            disturbed = sum(len(outcome.disturbed) for outcome in results[case.name].values())
            print(f" {disturbed} rounds disturbed" * bool(disturbed), end="")
            print(f" failed: {', '.join(failed)}" * bool(failed), flush=True)


def _run_case(case: Case, pace: Pace, running: Children, outcomes: Outcomes) -> None:
    systems = [BY_NAME[name] for name in case.systems if not outcomes[name].absence]
    for turn in range(max((pace.rounds_of(case, system) for system in systems), default=0)):
        taking_part = [system.name for system in systems if turn < pace.rounds_of(case, system)]
        for name in rotated(taking_part, turn):
            _run_round(name, turn, case, pace, running, outcomes[name])
        print(".", end="", flush=True)


def _run_round(name: str, turn: int, case: Case, pace: Pace, running: Children, outcome: Outcome) -> None:
    """Measure a system once, and up to `REPEATS` times more if other programs disturb it. Keep the quietest round."""
    if outcome.failure:
        return
    try:
        for _ in range(1 if pace.is_quick else 1 + REPEATS):
            numbers = running.measure(name, case, pace.seconds_of(case))
            kept = outcome.rounds.setdefault(turn, numbers)
            if numbers.get("others_percent", 0.0) < kept.get("others_percent", 0.0):
                outcome.rounds[turn] = numbers
            if turn not in outcome.disturbed:
                return
    except SystemFailedError as failure:
        outcome.failure = str(failure)


def rotated(names: Sequence[str], turn: int) -> list[str]:
    """Return the names in an order that differs in each round, so that no system always follows the same one."""
    start = turn * 5 % len(names)  # 5 divides few lists' lengths
    order = [*names[start:], *names[:start]]
    return order if turn % 2 == 0 else order[::-1]
