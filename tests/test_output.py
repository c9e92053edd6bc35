"""Output of envs in workers: shown at the call, prefixed with the env id, and included in errors."""

from __future__ import annotations

import ctypes
import io
import os
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from conftest import MakeEnv, require_mode
from modes import IN_WORKERS, PROCESSES

from parallelenv import ParallelEnv, errors

QUIET, PRINT = range(2)
NUM_ENVS = 4


class Chatty(gym.Env[Any, Any]):
    """Prints text on request."""

    observation_space = gym.spaces.Box(-np.inf, np.inf, (1,), np.float64)
    action_space = gym.spaces.Discrete(2)

    def __init__(self, number: int) -> None:
        self.number = number

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        return np.zeros(1), {}

    def step(self, action: Any) -> Any:
        if action == PRINT:
            print(f"I am {self.number}")
        return np.zeros(1), 1.0, False, False, {}

    def say(self, text: str, times: int = 1) -> None:
        for _ in range(times):
            print(text)

    def complain(self) -> None:
        print("to stderr", file=sys.stderr)

    def warn(self) -> None:
        warnings.warn("careful", stacklevel=1)

    def write_in_c(self, data: bytes = b"") -> None:
        os.write(1, data or b"from C, to stdout\n")
        os.write(2, b"" if data else b"from C, to stderr\n")

    def start_process(self) -> None:
        subprocess.run(["echo", "from a child"], check=True)

    def bar(self) -> None:
        for percent in range(3):
            print(f"\r{percent} %", end="")

    def say_and_wait(self, text: str, file: str) -> str:
        print(text)
        deadline = time.monotonic() + 30
        while not Path(file).exists() and time.monotonic() < deadline:
            time.sleep(0.01)
        return "heard" if Path(file).exists() else "not heard"

    def speak_and_die(self, how: str) -> None:
        print("these are my last words", file=sys.stderr)
        if how == "exit":
            os._exit(9)
        if how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        ctypes.string_at(0)

    def close(self) -> None:
        if self.number == 0:
            print("good bye")


@pytest.fixture(params=IN_WORKERS)
def mode(request: pytest.FixtureRequest) -> str:
    return require_mode(request.param, request)


@pytest.fixture
def env(make_env: MakeEnv) -> ParallelEnv:
    env = make_env([partial(Chatty, number) for number in range(NUM_ENVS)], num_cpus=2)
    env.reset()
    return env


@pytest.fixture(params=["forkserver", "spawn", "fork"])
def started(request: pytest.FixtureRequest) -> Iterator[ParallelEnv]:
    """One worker, with each start method."""
    envs = [partial(Chatty, number) for number in range(2)]
    with ParallelEnv(envs, PROCESSES, num_cpus=1, start_method=request.param) as env:
        env.reset()
        yield env


def test_printed_lines_are_prefixed_with_the_env_id(env: ParallelEnv, capsys: pytest.CaptureFixture[str]) -> None:
    env.step([PRINT, QUIET, PRINT, PRINT])
    assert sorted(capsys.readouterr().out.splitlines()) == [f"[env {n}] I am {n}" for n in (0, 2, 3)]
    env.step([QUIET] * NUM_ENVS)
    assert capsys.readouterr().out == ""


def test_output_is_shown_despite_an_error(env: ParallelEnv, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(TypeError):
        env.customized_method("say", [{"text": "a"}, {"text": "b"}, {"words": "c"}, {"text": "d"}])
    assert sorted(capsys.readouterr().out.splitlines()) == ["[env 0] a", "[env 1] b", "[env 3] d"]


def test_each_line_is_prefixed_and_no_line_is_split(env: ParallelEnv, capsys: pytest.CaptureFixture[str]) -> None:
    env.customized_method("say", {"text": "one\ntwo ü 文"}, id=1)
    assert capsys.readouterr().out == "[env 1] one\n[env 1] two ü 文\n"
    env.customized_method("say", {"text": "x" * 100, "times": 5000}, id=2)
    lines = capsys.readouterr().out.splitlines()
    assert lines == [f"[env 2] {'x' * 100}"] * 5000


def test_standard_error_and_warnings_are_shown(make_env: MakeEnv, capsys: pytest.CaptureFixture[str]) -> None:
    envs = [partial(Chatty, number) for number in range(2)]
    env = make_env(envs, num_cpus=1, no_warning=False)
    env.customized_method("complain", id=1)
    assert capsys.readouterr().out == "[env 1] to stderr\n"
    env.customized_method("warn", id=0)
    assert "[env 0] " in (shown := capsys.readouterr().out)
    assert "UserWarning: careful" in shown


def test_progress_bar_is_shown_as_one_line(env: ParallelEnv, capsys: pytest.CaptureFixture[str]) -> None:
    env.customized_method("bar", id=3)
    assert capsys.readouterr().out == "[env 3] 2 %\n"


@pytest.mark.parametrize("options", [{}, {"direct": False}], ids=["near", "far"])
def test_output_of_close_is_shown(
    mode: str, make_env: MakeEnv, options: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    if options and mode == PROCESSES:
        pytest.skip("only Ray modes have the option direct")
    env = make_env([partial(Chatty, number) for number in range(NUM_ENVS)], num_cpus=2, **options)
    env.close()
    assert capsys.readouterr().out == "[env 0] good bye\n"


def test_output_quiet_hides_output(make_env: MakeEnv, capfd: pytest.CaptureFixture[str]) -> None:
    env = make_env([partial(Chatty, 0)], output="quiet")
    env.reset()
    env.step([PRINT])
    env.close()
    assert capfd.readouterr().out == ""


def test_unknown_output_is_refused() -> None:
    with pytest.raises(errors.ArgumentError, match=r"output='loud' is not known; expected 'show' .* or 'quiet'"):
        ParallelEnv([partial(Chatty, 0)], output="loud")  # type: ignore[arg-type]


# ------------------------------------------------------- worker processes of this machine


def test_output_of_c_code_and_child_processes_is_shown(started: ParallelEnv, capfd: pytest.CaptureFixture[str]) -> None:
    started.customized_method("write_in_c", id=0)
    started.customized_method("start_process", id=0)
    out, error = capfd.readouterr()
    assert out.splitlines() == [
        "[envs 0-1] from C, to stdout",
        "[envs 0-1] from C, to stderr",
        "[envs 0-1] from a child",
    ]
    assert error == ""


def test_output_that_is_not_valid_text_is_shown(
    started: ParallelEnv, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    started.customized_method("write_in_c", {"data": b"\xff\x00!\n"}, id=0)
    started.customized_method("say", {"text": "\ud800"}, id=0)
    assert capfd.readouterr().out == "[envs 0-1] \ufffd\0!\n[env 0] \\ud800\n"
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(io.BytesIO(), encoding="ascii"))
    started.customized_method("say", {"text": "ü"}, id=0)
    sys.stdout.seek(0)
    assert sys.stdout.read() == "[env 0] \\xfc\n"


def test_output_is_shown_during_the_call(started: ParallelEnv, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Ear:
        def write(self, text: str) -> None:
            if "are you there" in text:
                (tmp_path / "heard").touch()

        def flush(self) -> None:
            pass

    monkeypatch.setattr(sys, "stdout", Ear())
    arguments = {"text": "are you there?", "file": str(tmp_path / "heard")}
    assert started.customized_method("say_and_wait", arguments, id=1) == ["heard"]


@pytest.mark.parametrize(("how", "told"), [("exit", "exit code is 9"), ("kill", "SIGKILL"), ("segfault", "SIGSEGV")])
def test_worker_died_error_includes_the_last_output(started: ParallelEnv, how: str, told: str) -> None:
    with pytest.raises(errors.WorkerDiedError, match=told) as caught:
        started.customized_method("speak_and_die", {"how": how}, id=0)
    assert "Its last output:\n" in str(caught.value)
    assert "    these are my last words" in str(caught.value)
    if how == "segfault":
        assert "in speak_and_die" in str(caught.value)
