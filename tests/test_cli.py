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
from typing import Any
from unittest.mock import Mock

import gymnasium
import numpy as np
import pytest
from gymnasium.spaces import Discrete
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
from parallelenv.errors import ArgumentError, MissingDependencyError, WorkerStartError
from parallelenv.registry import known_modes

QUICK = ["--num-envs", "3", "--steps", "40", "--seconds", "0.05"]
OTHER, THIRD = known_modes()[1:3]


class Env(gymnasium.Env[Any, Any]):
    observation_space = Discrete(1000)
    action_space = Discrete(2)

    def __init__(self, mood: str = "good") -> None:
        if mood == "unmade":
            raise RuntimeError("no simulator\nat this address")
        self.mood = mood
        self.chance = np.random.default_rng()  # not seeded by reset: an irreproducible env draws from it

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[int, dict[str, Any]]:
        return 0, {}

    def step(self, action: int) -> tuple[int, float, bool, bool, dict[str, Any]]:
        if self.mood == "talking":
            print("a step")
        if self.mood == "broken":
            raise ZeroDivisionError("it broke")
        return int(self.chance.integers(1000)) if self.mood == "irreproducible" else 1, 1.0, False, False, {}


@pytest.fixture
def registered() -> Iterator[Callable[[str], str]]:
    """Register an env with some behaviour and return its id."""
    names: list[str] = []

    def register(mood: str) -> str:
        names.append(f"test-{mood}-v0")
        gymnasium.register(names[-1], partial(Env, mood), disable_env_checker=True)
        return names[-1]

    yield register
    for name in names:
        del gymnasium.registry[name]


class WrongBackend(DummyBackend):
    """Changes the reward of env 0."""

    batch: Any = None

    def allocate(self, layout: Any) -> Any:
        self.batch = super().allocate(layout)
        return self.batch

    def wait(self, channels: Sequence[Any], timeout: float | None, wanted: int = 1) -> Sequence[Any]:
        ready = super().wait(channels, timeout, wanted)
        if self.batch is not None:
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


def test_every_mode_gives_identical_results(mode: str, capsys: pytest.CaptureFixture[str]) -> None:
    code = main(["compare", "CartPole-v1", "FrozenLake-v1", "--modes", mode, "--num-cpus", "2", *QUICK])
    output = capsys.readouterr().out
    assert code == 0, output
    tables = output.strip().split("\n\n")[:2]
    assert [table.partition(":")[0] for table in tables] == ["CartPole-v1", "FrozenLake-v1"]
    for table in tables:
        assert row_of(table, mode)[-1] == "yes"
        assert "times as fast as dummy in the same round" in table
        assert re.search(r"^Recommended for \S+: .*para_mode='[a-z-]+'.* \(", table, re.MULTILINE)


@pytest.mark.parametrize(
    ("word", "code", "last_cell"),
    [
        ("uninstalled", 0, "It needs the package 'rocket'. Install it with: pip install"),
        ("cramped", 1, "The cluster is too small."),
        ("wrong", 1, "first differs at step 1['rewards'][0]: "),
    ],
)
def test_compare_continues_after_a_mode_fails_and_recommends_a_correct_one(
    word: str, code: int, last_cell: str, odd_modes: None, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["compare", "CartPole-v1", "--modes", f"{word},{OTHER}", *QUICK]) == code
    output = capsys.readouterr().out
    assert row_of(output, word)[-1].startswith(last_cell)
    assert row_of(output, OTHER)[-1] == "yes"
    assert f"para_mode={word!r}" not in output


def test_compare_distinguishes_irreproducible_envs_from_incorrect_modes(
    registered: Callable[[str], str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["compare", registered("irreproducible"), "--modes", OTHER, *QUICK]) == 0
    output = capsys.readouterr().out
    assert row_of(output, ORACLE)[-2] == "no"
    assert "is not reproducible from its seeds" in output
    assert "Recommended for" in output


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("unmade", "The env 'test-unmade-v0' cannot be made: RuntimeError: no simulator at this address"),
        ("broken", "The env 'test-broken-v0' fails in a plain loop: ZeroDivisionError: it broke"),
        ("NoSuchEnv-v0", "The env 'NoSuchEnv-v0' cannot be made: "),
    ],
)
def test_env_that_cannot_run_gives_a_one_line_error(
    name: str, message: str, registered: Callable[[str], str], capsys: pytest.CaptureFixture[str]
) -> None:
    name = name if "v0" in name else registered(name)
    words = ["CartPole-v1", name] if "cannot be made" in message else [name]  # found before any mode is measured
    assert main(["compare", *words, "--modes", OTHER, *QUICK]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith(f"parallelenv: {message}")
    assert printed.err.count("\n") == 1


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--modes tread", r"--modes tread is not known; expected some of dummy, .*\. Did you mean 'thread'\?"),
        ("--plot nowhere/out.png", "--plot nowhere/out.png: the folder nowhere does not exist."),
        ("--plot out.exe", r"--plot out.exe: the name must end in one of \..*, \.png, \..*"),
        ("--plot out.png", r"--plot out.png needs the package 'matplotlib', .*pip install 'parallelenv\[plot\]'"),
    ],
)
def test_impossible_requests_are_refused_first(
    words: str, message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    if "package" in message:
        monkeypatch.setattr(compare, "find_spec", lambda _: None)
    elif "--plot" in words:
        pytest.importorskip("matplotlib")
    assert main(["compare", "CartPole-v1", *words.split()]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert re.fullmatch(f"parallelenv: {message}\n", printed.err)


@pytest.mark.parametrize(
    "words",
    ["--num-envs 0", "--num-cpus two", "--steps 1.5", "--seconds 0", "--seconds nan", "--seconds soon", "--seed -3"],
)
def test_invalid_numbers_are_refused(words: str, capsys: pytest.CaptureFixture[str]) -> None:
    option, value = words.split()
    with pytest.raises(SystemExit) as ended:
        main(["compare", "CartPole-v1", option, value])
    assert ended.value.code == 2
    assert f"argument {option}: {value!r} must be " in capsys.readouterr().err.replace("\n", " ")


def test_modes_are_listed_once_after_the_oracle(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = Mock(side_effect=ArgumentError("seen"))
    monkeypatch.setattr(compare, "ComparisonSettings", settings)
    for words, expected in (["--modes", f"{OTHER},dummy", OTHER], (ORACLE, OTHER)), ([], compare.comparable_words()):
        assert main(["compare", "CartPole-v1", *words]) == 2
        assert settings.call_args.kwargs["modes"] == expected
    assert [word for word in compare.comparable_words() if word != "subproc+caller_steps"] == list(known_modes())


def test_interrupt_exits_without_traceback(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(cli, "recommend", Mock(side_effect=KeyboardInterrupt))
    assert main(["recommend", "CartPole-v1"]) == 130
    assert capsys.readouterr().err == "parallelenv: interrupted\n"


@pytest.mark.parametrize("option", [[], ["--no-progress"]])
def test_progress_bar_is_shown_on_a_terminal(monkeypatch: pytest.MonkeyPatch, option: list[str]) -> None:
    terminal = io.StringIO()
    monkeypatch.setattr(terminal, "isatty", lambda: True)
    monkeypatch.setattr(sys, "stderr", terminal)
    assert main(["compare", "CartPole-v1", "--modes", OTHER, *option, *QUICK]) == 0
    for mode in ORACLE, OTHER:
        assert (f"CartPole-v1: {mode} " in terminal.getvalue()) == (not option)


def test_busy_machine_is_mentioned(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    for load, is_mentioned in (0.1, False), (1000.0, True):
        monkeypatch.setattr("os.getloadavg", lambda load=load: (load, 0.0, 0.0), raising=False)
        assert main(["compare", "CartPole-v1", "--modes", ORACLE, *QUICK]) == 0
        assert ("keep cores busy" in capsys.readouterr().out) == is_mentioned


# ------------------------------------------------------------------ measuring and judging


class Timed(TimedEnv):
    """An env with given times in each round."""

    def __init__(self, name: str, times: Sequence[float], order: list[str]) -> None:
        self.name, self.coming, self.order = name, iter(times), order
        self.times: Any = []

    def time(self) -> None:
        self.order.append(self.name)
        self.times.append(next(self.coming))


def test_mode_and_oracle_are_timed_alternately_and_compared_per_round() -> None:
    order: list[str] = []
    mode, loop = Timed("m", [1, 10, 1, 100, 50], order), Timed("l", [2, 20, 2, 200, 1], order)
    assert mode.speedup(loop) == 2.0  # neither the rounds in which both were slow nor the odd last one count
    assert "".join(order) == "lmmllmmllm"


def test_compare_uses_the_number_of_workers_that_recommend_chooses(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(compare, "recommend", lambda envs, num_cpus: Recommendation(THREADS, 3))
    words = ["compare", "CartPole-v1", "--num-cpus", "2", "--modes", THREADS, "subproc+caller_steps", *QUICK]
    assert main(words) == 0
    output = capsys.readouterr().out
    assert [row_of(output, mode)[1] for mode in (ORACLE, THREADS, "subproc+caller_steps")] == ["1", "3", "3"]


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
def test_choice_of_recommend_is_kept_unless_a_correct_mode_is_clearly_faster(
    rows: list[ComparisonRow], chosen: str, best: str
) -> None:
    compared = Comparison("Env-v0", tuple(rows), chosen)
    found = compared.recommended()
    assert found.mode == best
    reason = "no other mode is clearly faster here" if best == ORACLE else f"{found.ratio:.1f} times as fast as dummy"
    assert re.search(
        rf"^Recommended for Env-v0: para_mode=.*, num_cpus=2.* \({reason}\)\.", str(compared), re.MULTILINE
    )
    assert (f"recommend(), after a short trial, chose para_mode='{chosen}" in str(compared)) == (best != chosen)


# ------------------------------------------------------------------ pictures


@pytest.fixture(scope="module")
def drawing(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Let matplotlib open its font file, which it keeps open."""
    pytest.importorskip("matplotlib")
    compare.plot([Comparison("Env-v0", (LOOP,))], tmp_path_factory.mktemp("drawing") / "out.png")


@pytest.mark.usefixtures("drawing")
def test_plot_option_writes_a_picture_of_modes_that_failed_too(
    tmp_path: Path, odd_modes: None, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "out.png"
    words = ["compare", "CartPole-v1", "FrozenLake-v1", "--modes", f"{OTHER},cramped,uninstalled,wrong"]
    assert main([*words, "--plot", str(path), *QUICK]) == 1
    assert path.read_bytes().startswith(b"\x89PNG")
    assert f"Picture: {path}" in capsys.readouterr().out


# ------------------------------------------------------------------ the commands themselves


def test_compare_json_prints_only_json(
    registered: Callable[[str], str], odd_modes: None, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["compare", "CartPole-v1", registered("talking"), "--modes", "uninstalled,subproc+caller_steps"]
    assert main([*words, "--json", *QUICK]) == 0
    first, second = json.loads(capsys.readouterr().out)
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


def test_doctor_json_prints_only_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
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
def test_version_and_help_are_printed(words: str, code: int, text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(words.split())
    assert ended.value.code == code
    assert text in capsys.readouterr().out


def test_python_m_parallelenv_returns_the_exit_code() -> None:
    words = [sys.executable, "-m", "parallelenv", "compare", "NoSuchEnv-v0"]
    ended = subprocess.run(words, capture_output=True, text=True, check=False, timeout=60)
    assert (ended.returncode, ended.stdout) == (2, "")
    assert "NoSuchEnv" in ended.stderr
