"""The frames shown in tracebacks: the same in every mode."""

from __future__ import annotations

import linecache
import re
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from conftest import MakeEnv
from modes import PROCESSES

import parallelenv
from parallelenv import ParallelEnv
from parallelenv.errors import EnvContractError, InvalidEnvError, ParallelEnvError
from parallelenv.testing.envs import Counter
from parallelenv.wrappers import NormalizeStates


class Sly(Exception):
    """Its attribute lookup and its description fail."""

    def __getattr__(self, name: str) -> Any:
        raise KeyError(name)

    def __str__(self) -> str:
        raise SystemExit(3)


class Failing(Counter):
    """Each of its methods fails in its own way."""

    again = ValueError("one and the same")

    def step(self, action: Any) -> Any:
        raise KeyError("it fell over")

    def look_up(self) -> Any:
        empty: dict[str, int] = {}
        return sorted(["absent"], key=lambda name: empty[name])

    def chain(self) -> None:
        try:
            np.zeros(2).reshape(3)
        except ValueError as error:
            raise RuntimeError("no level") from error

    def raise_within(self) -> None:
        try:
            self.chain()
        finally:
            raise LookupError("no floor")

    def recurse(self) -> None:
        self.recurse()

    def raise_in_no_line(self) -> None:
        code = compile("raise KeyboardInterrupt", "between_lines.py", "exec")
        exec(code.replace(co_linetable=bytes([0xFF])))  # one entry of 8 code units, without a place

    def vanish(self) -> None:
        lines = ["def fall(): raise ValueError('gone')\n", "\n", "fall()\n"]
        linecache.cache["/far/env.py"] = 9, None, lines, "/far/env.py"  # as a file of another machine
        exec(compile("".join(lines), "/far/env.py", "exec"), {})

    def slyly(self) -> None:
        raise Sly

    def in_circles(self) -> None:
        first, second = KeyError("first"), KeyError("second")
        first.__cause__, second.__cause__ = second, first
        raise first

    def in_a_long_chain(self) -> None:
        error: Exception = ValueError(0)
        for number in range(3000):
            error, cause = ValueError(number), error
            error.__context__ = cause
        raise error

    def in_a_group(self) -> None:
        errors = []
        for call in (self.chain, self.raise_within):
            try:
                call()
            except Exception as error:  # noqa: BLE001
                errors.append(error)
        raise ExceptionGroup("both", errors)

    def the_same_again(self) -> None:
        raise self.again


class Clumsy(gym.ActionWrapper[Any, Any, Any]):
    def action(self, action: Any) -> Any:
        return 1 // int(action)


def frames(error: BaseException) -> list[str]:
    """Return the functions of a traceback, starting with the test."""
    return [frame.name for frame in traceback.extract_tb(error.__traceback__)]


def make_wrapped() -> gym.Env[Any, Any]:
    return gym.wrappers.TimeLimit(Clumsy(gym.wrappers.PassiveEnvChecker(Failing())), 10)


@pytest.mark.parametrize("method", ["step", "look_up", "chain", "raise_within", "recurse"])
def test_traceback_text_is_the_same_in_every_mode(make_env: MakeEnv, method: str) -> None:
    texts = []
    for make in (ParallelEnv, make_env):
        with make([Failing] * 2, num_cpus=1) as env:
            env.reset()
            call = partial(env.step, [1, 1]) if method == "step" else partial(env.customized_method, method)
            with pytest.raises((KeyError, RuntimeError, LookupError)) as caught:
                call()
        text = "".join(traceback.format_exception(caught.value))
        # The middle of a very deep traceback is not sent; the text states how often a line was repeated.
        texts.append(re.sub(r"process \d+|repeated \d+ more times", "", text))
    assert texts[0] == texts[1]
    assert "parallelenv/" not in texts[0].replace(str(Path(__file__).parent), "")


def test_interrupt_between_two_lines_is_not_another_error() -> None:
    """Python has no line for some bytecodes, such as those that end an `except` block."""
    with ParallelEnv([Failing]) as env:
        with pytest.raises((KeyboardInterrupt, TypeError)) as caught:  # pytest cannot show an error without a line
            env.customized_method("raise_in_no_line")
        assert caught.type is KeyboardInterrupt
        assert frames(caught.value)[1:] == ["raise_in_no_line", "<module>"]


def test_frames_of_wrappers_are_shown_only_if_they_fail(make_env: MakeEnv) -> None:
    env = make_env([make_wrapped] * 2)
    env.reset()
    with pytest.raises(KeyError) as caught:
        env.step([1, 1])
    assert frames(caught.value)[1:] == ["step"]
    with pytest.raises(ZeroDivisionError) as in_wrapper:
        env.step([0, 0])
    assert frames(in_wrapper.value)[1:] == ["step", "action"]  # of gym.ActionWrapper, and its own


def test_frames_of_the_package_are_shown_only_for_its_own_defects(monkeypatch: pytest.MonkeyPatch) -> None:
    made: Any = ParallelEnv
    with ParallelEnv([Failing] * 2, asynchronous="continue") as opened:
        env: Any = opened
        refused: list[Callable[[], Any]] = [
            lambda: env.reset(id=9),
            lambda: env.step([0]),
            lambda: env.call(3),
            lambda: NormalizeStates(3),  # type: ignore[arg-type]
            lambda: NormalizeStates(env).step([0]),
            lambda: env.to_gymnasium("tomorrow"),
            lambda: made([Failing], "tread"),
            lambda: made.make("CartPole-v1", 0),
            lambda: made.from_samplers(Failing, 3),
            lambda: env.arecv(min_envs=0).send(None),
            lambda: parallelenv.ParalelEnv,  # type: ignore[attr-defined]
            lambda: env.stepp,
            lambda: NormalizeStates(env).stepp,
            lambda: setattr(env, "on_failure", "restart"),
        ]
        for call in refused:
            with pytest.raises(ParallelEnvError) as caught:
                call()
            assert frames(caught.value)[1:] == ["<lambda>"]
        env.reset()
        with pytest.raises(ZeroDivisionError) as in_policy:
            next(iter(env.stream(lambda states: 1 // 0)))
        assert frames(in_policy.value)[1:] == ["<lambda>"]
        monkeypatch.delattr(type(env.engine.pool), "ask")
        with pytest.raises(AttributeError) as defect:
            env.get_env_attr("metadata")
        assert "get_env_attr" in frames(defect.value)


def test_source_lines_of_other_machines_are_sent_with_the_error() -> None:
    with ParallelEnv([Failing], PROCESSES) as env, pytest.raises(ValueError, match="gone") as caught:
        env.customized_method("vanish")
    text = "".join(traceback.format_exception(caught.value))
    assert re.search(r'File "/far/env.py", line 3, in <module>\n    fall\(\)\n', text)
    assert re.search(r'File "/far/env.py", line 1, in fall\n    def fall\(\): raise ValueError\(.gone.\)\n', text)
    assert caught.value.__cause__ is None


@pytest.mark.parametrize(
    ("method", "expected"),
    [("slyly", Sly), ("in_circles", KeyError), ("in_a_long_chain", ValueError), ("in_a_group", ExceptionGroup)],
)
def test_env_survives_unusual_exceptions(make_env: MakeEnv, method: str, expected: type[Exception]) -> None:
    env = make_env([Failing] * 2, num_cpus=1)
    env.reset()
    with pytest.raises(expected) as caught:
        env.customized_method(method)
    error: Any = caught.value
    assert frames(error)[1:] == [method]
    assert error.env_ids == (0, 1)
    if method == "in_a_group":
        first, second = error.exceptions
        assert frames(first) == ["in_a_group", "chain"]
        assert frames(second) == ["in_a_group", "raise_within"]
        assert isinstance(first.__cause__, ValueError)
    assert len(env.reset()) == 2


def test_exception_object_raised_repeatedly_does_not_grow(make_env: MakeEnv) -> None:
    env = make_env([Failing])
    for _ in range(200):
        with pytest.raises(ValueError, match="one and the same") as caught:
            env.customized_method("the_same_again")
    assert len(frames(caught.value)) <= 2 * 50 + 1
    assert len(caught.value.__notes__) == 1


def test_handled_internal_errors_are_not_shown_as_context(make_env: MakeEnv) -> None:
    class Wrong(Counter):
        def _state(self) -> object:
            return np.zeros(2) if self.count else super()._state()

    env = make_env([Wrong] * 2)
    env.reset()
    with pytest.raises(EnvContractError, match="shape") as caught:
        env.step([0, 0])
    assert "During handling" not in "".join(traceback.format_exception(caught.value))


def test_errors_that_differ_only_in_the_env_are_merged() -> None:
    with pytest.raises(InvalidEnvError, match="An env fn returned None") as caught:
        ParallelEnv([lambda: None] * 3)
    assert "env 0 and 2 other envs in its constructor" in caught.value.__notes__[0]
