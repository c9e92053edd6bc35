"""The commands: output, refused arguments and exit codes."""

from __future__ import annotations

import io
import json
import platform
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import Mock

import gymnasium
import numpy as np
import pytest
from modes import ORACLE, PROCESSES, THREADS

import parallelenv
from parallelenv import Recommendation, registry
from parallelenv import __main__ as cli
from parallelenv.__main__ import main
from parallelenv.autotune import compare
from parallelenv.autotune.compare import Comparison, ComparisonRow
from parallelenv.autotune.recommend import TimedEnv
from parallelenv.backends.dummy import DummyBackend
from parallelenv.contract.cpu_cores import usable_cores
from parallelenv.errors import MissingDependencyError, WorkerStartError
from parallelenv.registry import known_modes
from parallelenv.testing.envs import Counter

QUICK = "--num-envs 3 --steps 40 --seconds 0.05"
OTHER = known_modes()[1]


class Ended(NamedTuple):
    """What a command has returned and printed."""

    code: Any
    out: str
    err: str


Call = Callable[[str], Ended]


@pytest.fixture
def call(capsys: pytest.CaptureFixture[str]) -> Call:
    """Run a command."""

    def call(words: str) -> Ended:
        capsys.readouterr()
        try:
            code: Any = main(words.split())
        except SystemExit as ended:  # of argparse
            code = ended.code
        return Ended(code, *capsys.readouterr())

    return call


MOODS = ("unmade", "broken", "talking", "irreproducible")


class Env(Counter):
    def __init__(self, mood: str = "good") -> None:
        super().__init__()
        if mood == "talking":
            print("made")
        if mood == "unmade":
            raise RuntimeError("no simulator\nat this address")
        self.mood = mood
        self.chance = np.random.default_rng()  # not seeded by reset

    def _reward(self, action: int) -> float:
        if self.mood == "talking":
            print("a step")
        if self.mood == "broken":
            raise ZeroDivisionError("it broke")
        return float(self.chance.random()) if self.mood == "irreproducible" else 1.0


@pytest.fixture(autouse=True)
def registered() -> Iterator[None]:
    for mood in MOODS:
        gymnasium.register(f"test-{mood}-v0", partial(Env, mood), disable_env_checker=True)
    yield
    for mood in MOODS:
        del gymnasium.registry[f"test-{mood}-v0"]


class WrongBackend(DummyBackend):
    """Changes the reward of env 0."""

    def allocate(self, layout: Any) -> Any:
        self.batch = super().allocate(layout)
        return self.batch

    def wait(self, channels: Sequence[Any], timeout: float | None, wanted: int = 1) -> Sequence[Any]:
        ready = super().wait(channels, timeout, wanted)
        if hasattr(self, "batch"):
            self.batch.rewards[0] += 1
        return ready


def failing(error: Exception) -> type[DummyBackend]:
    return type("Failing", (DummyBackend,), {"plan_workers": Mock(side_effect=error)})


@pytest.fixture
def odd_modes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pretend that other packages have added modes."""
    kinds = {
        "cramped": failing(WorkerStartError("The cluster is\ntoo small.")),
        "uninstalled": failing(MissingDependencyError("It needs the package 'rocket'. Install it with: pip install")),
        "wrong": WrongBackend,
    }
    monkeypatch.setattr(
        registry, "_foreign", lambda: {word: Mock(load=lambda kind=kind: kind) for word, kind in kinds.items()}
    )


def row_of(output: str, mode: str) -> list[str]:
    """Return the cells of a mode's row in a printed table."""
    (line,) = [line for line in output.splitlines() if line.split()[:1] == [mode]]
    return re.split(r"\s{2,}", line)


# ------------------------------------------------------------------ compare


def test_every_mode_gives_identical_results(mode: str, call: Call) -> None:
    ended = call(f"compare CartPole-v1 FrozenLake-v1 --modes {mode} --num-cpus 2 {QUICK}")
    assert ended.code == 0, ended
    tables = ended.out.strip().split("\n\n")[:2]
    assert [table.partition(":")[0] for table in tables] == ["CartPole-v1", "FrozenLake-v1"]
    for table in tables:
        assert row_of(table, mode)[-1] == "yes"
        assert "times as fast as dummy in the same round" in table
        assert re.search(r"^Recommended for \S+: .*para_mode='[a-z-]+'.* \(", table, re.MULTILINE)


@pytest.fixture(scope="module")
def drawing(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Let matplotlib open its font file, which it keeps open."""
    pytest.importorskip("matplotlib")
    compare.plot([Comparison("Env-v0", (LOOP,))], tmp_path_factory.mktemp("drawing") / "out.png")


@pytest.mark.usefixtures("drawing", "odd_modes")
def test_compare_continues_after_failures_and_recommends_a_correct_mode(call: Call, tmp_path: Path) -> None:
    path = tmp_path / "out.png"
    ended = call(f"compare CartPole-v1 --modes uninstalled,{OTHER},cramped,wrong --plot {path} {QUICK}")
    assert ended.code == 1
    for word, last_cell in {
        "uninstalled": "It needs the package 'rocket'. Install it with: pip install",
        "cramped": "The cluster is too small.",
        "wrong": "first differs at step 1['rewards'][0]: ",
    }.items():
        assert row_of(ended.out, word)[-1].startswith(last_cell)
        assert f"para_mode={word!r}" not in ended.out
    assert row_of(ended.out, OTHER)[-1] == "yes"
    assert path.read_bytes().startswith(b"\x89PNG")
    assert f"Picture: {path}" in ended.out


def test_compare_continues_after_an_env_that_fails_in_a_plain_loop(call: Call) -> None:
    ended = call(f"compare CartPole-v1 test-broken-v0 FrozenLake-v1 --modes {OTHER} {QUICK}")
    assert ended.code == 1
    message = r"parallelenv: The env 'test-broken-v0' fails in a plain loop: ZeroDivisionError: it broke.*\n"
    assert re.fullmatch(message, ended.err)
    assert re.findall("^Recommended for (.*?):", ended.out, re.MULTILINE) == ["CartPole-v1", "FrozenLake-v1"]
    ended = call(f"compare test-broken-v0 --modes {OTHER} --json {QUICK}")
    assert (ended.code, json.loads(ended.out)) == (1, [])
    assert re.match(message, ended.err)


def test_recommend_continues_after_an_env_that_cannot_be_tried(call: Call) -> None:
    ended = call("recommend test-broken-v0 CartPole-v1 test-unmade-v0 --num-envs 2")
    assert ended.code == 1
    assert [line.partition(":")[0] for line in ended.out.splitlines()] == ["CartPole-v1"]
    assert re.fullmatch(
        r"parallelenv: test-broken-v0: No env could be tried: ZeroDivisionError: it broke.*\n"
        r"parallelenv: test-unmade-v0: No env could be tried: RuntimeError: no simulator at this address.*\n",
        ended.err,
    )


@pytest.mark.usefixtures("drawing")
def test_compare_draws_nothing_if_every_env_fails(call: Call, tmp_path: Path) -> None:
    assert call(f"compare test-broken-v0 --modes {OTHER} --plot {tmp_path / 'out.png'} {QUICK}").code == 1
    assert not list(tmp_path.iterdir())


def test_compare_distinguishes_irreproducible_envs_from_incorrect_modes(call: Call) -> None:
    ended = call(f"compare test-irreproducible-v0 --modes {OTHER} {QUICK}")
    assert ended.code == 0
    assert row_of(ended.out, ORACLE)[-2] == "no"
    assert "is not reproducible from its seeds" in ended.out
    assert "Recommended for" in ended.out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("CartPole-v1 test-unmade-v0", r"The env .* cannot be made: RuntimeError: no simulator at this address"),
        ("CartPole-v1 NoSuchEnv-v0", r"The env 'NoSuchEnv-v0' cannot be made: .*"),
        ("Env --modes tread", r"--modes tread is not known; expected some of dummy, .*\. Did you mean 'thread'\?"),
        ("Env --plot nowhere/out.png", "--plot nowhere/out.png: the folder nowhere does not exist."),
        ("Env --plot out.exe", r"--plot out.exe: the name must end in one of \..*, \.png, \..*"),
        ("Env --plot out.png", r"--plot out.png needs the package 'matplotlib', .*pip install 'parallelenv\[plot\]'"),
    ],
)
def test_impossible_requests_are_refused_in_one_line_before_any_env_is_measured(
    words: str, message: str, call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    if "package" in message:
        monkeypatch.setattr(compare, "find_spec", lambda _: None)
    elif "--plot" in words:
        pytest.importorskip("matplotlib")
    ended = call(f"compare {words} {QUICK}")
    assert (ended.code, ended.out) == (2, "")
    assert re.fullmatch(f"parallelenv: {message}\n", ended.err)


@pytest.mark.parametrize(
    "words",
    ["--num-envs 0", "--num-cpus two", "--steps 1.5", "--seconds 0", "--seconds nan", "--seconds soon", "--seed -3"],
)
def test_invalid_numbers_are_refused(words: str, call: Call) -> None:
    option, value = words.split()
    ended = call(f"compare CartPole-v1 {words}")
    assert ended.code == 2
    assert f"argument {option}: {value!r} must be " in ended.err.replace("\n", " ")


def test_modes_are_compared_once_and_after_the_oracle(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    assert [word for word in compare.comparable_words() if word != "subproc+caller_steps"] == list(known_modes())
    monkeypatch.setattr(compare, "comparable_words", lambda: (ORACLE, OTHER))
    for words in f"--modes {OTHER},{ORACLE} {OTHER}", "":
        output = call(f"compare CartPole-v1 {words} {QUICK}").out
        assert re.findall(rf"^({ORACLE}|{OTHER}) ", output, re.MULTILINE) == [ORACLE, OTHER]


def test_interrupt_exits_without_traceback(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli, "choose", Mock(side_effect=KeyboardInterrupt))
    assert call("recommend CartPole-v1") == (130, "", "parallelenv: interrupted\n")


@pytest.mark.parametrize("option", ["", "--no-progress"])
def test_progress_bar_is_shown_on_a_terminal(call: Call, monkeypatch: pytest.MonkeyPatch, option: str) -> None:
    terminal = io.StringIO()
    monkeypatch.setattr(terminal, "isatty", lambda: True)
    monkeypatch.setattr(sys, "stderr", terminal)
    assert call(f"compare CartPole-v1 --modes {OTHER} {option} {QUICK}").code == 0
    for mode in ORACLE, OTHER:
        assert (f"CartPole-v1: {mode} " in terminal.getvalue()) == (not option)


def test_busy_machine_is_mentioned(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    for load, is_mentioned in (0.1, False), (1000.0, True):
        monkeypatch.setattr("os.getloadavg", lambda load=load: (load, 0.0, 0.0), raising=False)
        assert ("keep cores busy" in call(f"compare CartPole-v1 --modes {ORACLE} {QUICK}").out) == is_mentioned


# ------------------------------------------------------------------ measuring and judging


def test_mode_and_oracle_are_timed_alternately_and_compared_per_round() -> None:
    order: list[str] = []

    def timed(name: str, *times: float) -> Any:
        env, coming = Mock(times=[]), iter(times)

        def time() -> None:
            order.append(name)
            env.times.append(next(coming))

        env.time = time
        return env

    mode, loop = timed("m", 1, 10, 1, 100, 50), timed("l", 2, 20, 2, 200, 1)
    assert TimedEnv.speedup(mode, loop) == 2.0  # neither the rounds in which both were slow nor the odd last one count
    assert "".join(order) == "lmmllmmllm"


def test_compare_uses_the_number_of_workers_that_recommend_chooses(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compare, "choose", lambda factories, num_cpus: Recommendation(THREADS, 3))
    output = call(f"compare CartPole-v1 --num-cpus 2 --modes {THREADS} subproc+caller_steps {QUICK}").out
    assert [row_of(output, mode)[1] for mode in (ORACLE, THREADS, "subproc+caller_steps")] == ["1", "3", "3"]
    (found,) = json.loads(call(f"compare CartPole-v1 --modes {ORACLE} --json {QUICK}").out)
    assert found["estimated"] == {"para_mode": THREADS, "num_cpus": 3}


def row(mode: str, ratio: float | None = None, **findings: Any) -> ComparisonRow:
    return ComparisonRow(mode, 2, 2, 0.5, ratio and 100 * ratio, ratio, **findings)


LOOP, THREAD, CALLER = row(ORACLE, 1), row(THREADS, 2.0), row("subproc+caller_steps", 2.04)


@pytest.mark.parametrize(
    ("rows", "chosen", "best"),
    [
        ([LOOP, row(THREADS, 1.04)], ORACLE, ORACLE),
        ([LOOP, row(THREADS, 1.06)], ORACLE, THREADS),
        ([LOOP, row(THREADS, 9.0, deviation="step 1"), row(PROCESSES, 2.0)], THREADS, PROCESSES),
        ([LOOP, row(THREADS, failure="no")], THREADS, ORACLE),
        ([row(ORACLE, 1, deviation="step 1"), row(THREADS, 3.0, deviation="step 1")], ORACLE, THREADS),
        ([LOOP, THREAD, CALLER], ORACLE, THREADS),
        ([LOOP, THREAD, CALLER], THREADS, THREADS),
        ([LOOP, THREAD, CALLER], "subproc+caller_steps", "subproc+caller_steps"),
    ],
)
def test_choice_is_kept_unless_another_is_clearly_faster(rows: list[ComparisonRow], chosen: str, best: str) -> None:
    compared = Comparison("Env-v0", tuple(rows), chosen, 8)
    found = compared.recommended()
    assert found.mode == best
    reason = "no other mode is clearly faster here" if best == ORACLE else f"{found.ratio:.1f} times as fast as dummy"
    assert re.search(
        rf"^Recommended for Env-v0: para_mode=.*, num_cpus=2.* \({reason}\)\.", str(compared), re.MULTILINE
    )
    estimated = ", after a short trial, chose para_mode='" + chosen.replace("+caller_steps", "', num_cpus=8")
    assert (estimated in str(compared)) == (best != chosen)
    assert ("num_cpus=8" in str(compared)) == (best != chosen)


# ------------------------------------------------------------------ the commands themselves


def test_compare_json_prints_only_json(odd_modes: None, call: Call) -> None:
    modes = "uninstalled,subproc+caller_steps"
    ended = call(f"compare CartPole-v1 test-talking-v0 --modes {modes} --json {QUICK}")
    assert ended.code == 0
    first, second = json.loads(ended.out)
    assert (first["env"], second["env"]) == ("CartPole-v1", "test-talking-v0")
    assert set(first) == documented("compare")
    plain, missing, caller = first["modes"]
    assert set(plain) == documented("Of each mode")
    assert plain["arguments"] == {"para_mode": ORACLE}
    assert plain["ratio"] == 1.0
    assert caller["arguments"] | {"num_cpus": 0} == {"para_mode": PROCESSES, "num_cpus": 0, "caller_steps": True}
    assert caller["steps_per_second"] > 0
    assert "rocket" in missing["failure"]
    assert missing["ratio"] is None
    assert first["recommended"]["para_mode"] in (ORACLE, PROCESSES)


def documented(heading: str) -> set[str]:
    """Return the keys in the first table after some words of the reference."""
    page = (Path(__file__).parents[1] / "docs/api/command_line.md").read_text(encoding="utf-8")
    _, _, after = page.partition(f"{heading} --json`" if heading.islower() else heading)
    table = after[after.index("| --- |") :].partition("\n\n")[0]
    return set(re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE))


def test_doctor_json_prints_only_json(call: Call) -> None:
    found = json.loads(call("doctor --json").out)
    assert set(found) == documented("doctor")
    assert found["cores"]["usable"] == usable_cores()
    assert found["versions"]["python"] == platform.python_version()
    assert set(found["cores"]) == {"usable", "machine", "affinity", "cgroup_quota"}


@pytest.mark.parametrize(
    ("words", "code", "text"),
    [
        ("--version", 0, f"parallelenv {parallelenv.__version__}\n"),
        ("--help", 0, "{compare,recommend,doctor}"),
        *[(f"{command} --help", 0, f"usage: parallelenv {command}") for command in ("compare", "recommend", "doctor")],
        ("", 2, ""),
    ],
)
def test_version_and_help_are_printed(words: str, code: int, text: str, call: Call) -> None:
    ended = call(words)
    assert ended.code == code
    assert text in ended.out


def test_python_m_parallelenv_returns_the_exit_code() -> None:
    words = [sys.executable, "-m", "parallelenv", "compare", "NoSuchEnv-v0"]
    ended = subprocess.run(words, capture_output=True, text=True, check=False, timeout=60)
    assert (ended.returncode, ended.stdout) == (2, "")
    assert "NoSuchEnv" in ended.stderr
