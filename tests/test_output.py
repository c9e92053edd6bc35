"""Output of envs in workers: shown at the call, prefixed with the env id, and included in errors."""

from __future__ import annotations

import io
import re
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from conftest import MakeEnv, require_mode
from modes import IN_WORKERS, PROCESSES

from parallelenv import ParallelEnv, errors
from parallelenv.errors import WorkerTimeoutError
from parallelenv.testing.envs import Counter

QUIET, PRINT = range(2)
NUM_ENVS = 4


class Chatty(Counter):
    """Prints text on request."""

    def step(self, action: Any) -> Any:
        if action == PRINT:
            print(f"I am {self.number}")
        return super().step(action)

    def execute(self, code: str) -> None:
        exec(f"import os, pathlib, signal, subprocess, sys, time, warnings\n{code}", {})

    def close(self) -> None:
        if self.number == 0:
            print("good bye")


def chatty(count: int) -> list[Any]:
    return [partial(Chatty, number) for number in range(count)]


def execute(env: ParallelEnv, env_id: int, code: str) -> None:
    env.customized_method("execute", {"code": code}, id=env_id)


@pytest.fixture(params=IN_WORKERS)
def mode(request: pytest.FixtureRequest) -> str:
    return require_mode(request.param, request)


@pytest.fixture
def env(make_env: MakeEnv) -> ParallelEnv:
    env = make_env(chatty(NUM_ENVS), num_cpus=2)
    env.reset()
    return env


@pytest.fixture(params=["forkserver", "spawn", "fork"])
def started(request: pytest.FixtureRequest) -> Iterator[ParallelEnv]:
    """One worker, with each start method."""
    with ParallelEnv(chatty(2), PROCESSES, num_cpus=1, start_method=request.param) as env:
        env.reset()
        yield env


def test_printed_lines_are_prefixed_with_the_env_id(env: ParallelEnv, capsys: pytest.CaptureFixture[str]) -> None:
    env.step([PRINT, QUIET, PRINT, PRINT])
    assert sorted(capsys.readouterr().out.splitlines()) == [f"[env {n}] I am {n}" for n in (0, 2, 3)]
    with pytest.raises(TypeError):  # despite an error
        env.customized_method("execute", [*({"code": f"print({word!r})"} for word in "abc"), {"text": "d"}])
    assert sorted(capsys.readouterr().out.splitlines()) == ["[env 0] a", "[env 1] b", "[env 2] c"]


def test_env_that_prints_all_the_time_is_late_nevertheless(make_env: MakeEnv) -> None:
    env = make_env(chatty(1), timeout=0.5, output="quiet")
    env.reset()
    code = "end = time.monotonic() + 20\nwhile time.monotonic() < end: print('waiting')"
    began = time.monotonic()
    with pytest.raises(WorkerTimeoutError):
        execute(env, 0, code)
    assert time.monotonic() - began < 15
    env.restart()


def test_each_line_is_prefixed_and_no_line_is_split(env: ParallelEnv, capsys: pytest.CaptureFixture[str]) -> None:
    execute(env, 1, "print('one\\ntwo ü 文')")
    assert capsys.readouterr().out == "[env 1] one\n[env 1] two ü 文\n"
    execute(env, 2, "for _ in range(5000): print('x' * 100)")
    assert capsys.readouterr().out.splitlines() == [f"[env 2] {'x' * 100}"] * 5000
    execute(env, 3, "for percent in range(3): print(f'\\r{percent} %', end='')")
    assert capsys.readouterr().out == "[env 3] 2 %\n", "of a progress bar, only the last state"


def test_standard_error_and_warnings_are_shown(make_env: MakeEnv, capsys: pytest.CaptureFixture[str]) -> None:
    env = make_env(chatty(2), num_cpus=1, no_warning=False)
    execute(env, 1, "print('to stderr', file=sys.stderr)")
    assert capsys.readouterr().out == "[env 1] to stderr\n"
    execute(env, 0, "warnings.warn('careful')")
    assert re.match(r"\[env 0\] .*UserWarning: careful", capsys.readouterr().out)


@pytest.mark.parametrize("options", [{}, {"direct": False}], ids=["near", "far"])
def test_output_of_close_is_shown(
    mode: str, make_env: MakeEnv, options: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    if options and mode == PROCESSES:
        pytest.skip("only Ray modes have the option direct")
    env = make_env(chatty(NUM_ENVS), num_cpus=2, **options)
    env.close()
    assert capsys.readouterr().out == "[env 0] good bye\n"


def test_output_quiet_hides_output(make_env: MakeEnv, capfd: pytest.CaptureFixture[str]) -> None:
    env = make_env(chatty(1), output="quiet")
    env.reset()
    env.step([PRINT])
    env.close()
    assert capfd.readouterr().out == ""
    with pytest.raises(errors.ArgumentError, match=r"output='loud' is not known; expected 'show' .* or 'quiet'"):
        make_env(chatty(1), output="loud")


def test_invalid_output_is_refused_before_an_env_is_made() -> None:
    made: list[int] = []
    with pytest.raises(errors.ArgumentError, match="output='loud' is not known"):
        ParallelEnv([lambda: made.append(1)], "auto", output="loud")  # type: ignore[arg-type]
    assert not made


def test_output_of_c_code_and_child_processes_is_shown(started: ParallelEnv, capfd: pytest.CaptureFixture[str]) -> None:
    execute(started, 0, "os.write(1, b'from C, to stdout\\n')\nos.write(2, b'from C, to stderr\\n')")
    execute(started, 0, "subprocess.run(['echo', 'from a child'], check=True)")
    texts = ("from C, to stdout", "from C, to stderr", "from a child")
    assert capfd.readouterr() == ("".join(f"[envs 0-1] {text}\n" for text in texts), "")


def test_output_of_printf_is_shown_at_once(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("PYTHONUNBUFFERED", "")  # if set, it also switches off the buffer of the C library
    with ParallelEnv(chatty(1), PROCESSES, start_method="spawn") as env:
        execute(env, 0, "import ctypes; ctypes.CDLL(None).printf(b'from the C library\\n')")
        assert capfd.readouterr().out == "[env 0] from the C library\n"


def test_output_that_is_not_valid_text_is_shown(
    started: ParallelEnv, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    execute(started, 0, r"os.write(1, b'\xff\x00!\n')")
    execute(started, 0, r"print('\ud800')")
    assert capfd.readouterr().out == "[envs 0-1] \ufffd\0!\n[env 0] \\ud800\n"
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(io.BytesIO(), encoding="ascii"))
    execute(started, 0, "print('ü')")
    sys.stdout.seek(0)
    assert sys.stdout.read() == "[env 0] \\xfc\n"


def test_binary_output_that_resembles_a_mark_is_shown(started: ParallelEnv, capfd: pytest.CaptureFixture[str]) -> None:
    digits = "1" * 5000  # more than Python converts to an int
    execute(started, 0, rf"os.write(1, b'\x1e' + b'1' * {len(digits)} + b'\x1f\n')")
    assert capfd.readouterr().out == f"[envs 0-1] \x1e{digits}\x1f\n"


WAIT_FOR = """
print('are you there?')
deadline = time.monotonic() + 30
while not pathlib.Path({heard!r}).exists():
    assert time.monotonic() < deadline, 'not heard'
    time.sleep(0.01)
"""


def test_output_is_shown_during_the_call(started: ParallelEnv, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    heard = tmp_path / "heard"

    class Ear(io.StringIO):
        def write(self, text: str) -> int:
            if "are you there" in text:
                heard.touch()
            return len(text)

    monkeypatch.setattr(sys, "stdout", Ear())
    execute(started, 1, WAIT_FOR.format(heard=str(heard)))


def test_worker_died_error_includes_the_last_output(started: ParallelEnv) -> None:
    last = "\nIts last output:\n    these are my last words"
    with pytest.raises(errors.WorkerDiedError, match=last):
        execute(started, 0, "print('these are my last words', file=sys.stderr)\nos.kill(os.getpid(), signal.SIGKILL)")
