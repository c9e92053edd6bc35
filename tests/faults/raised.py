"""Envs that raise, and objects that do not pickle."""

from __future__ import annotations

import threading
import time
import traceback
from collections.abc import Callable
from typing import Any

import pytest

from faults.columns import begin_all, step_all
from faults.context import CLOSE_PATIENCE, Context, fault
from faults.envs import Holding, Loose, OnlyKeywords, TwoArguments, actions, faulty
from parallelenv.errors import EnvError, EnvInterruptedError, UnpicklableError


def _check_message(error: BaseException, operation: str, line: str = "raise ZeroDivisionError(") -> None:
    """Check that an exception names env 1, and shows the line of the user that raised it."""
    assert f"Raised by env 1 in {operation}, process " in "".join(error.__notes__)
    assert line in "".join(traceback.format_exception(error))


def _fail_in_do(context: Context, what: str, kind: Any, line: str) -> tuple[BaseException, float]:
    """Let env 1 raise in a method, check the promised behaviour, and return the error and the recovery time."""
    env = context.make()
    began = time.monotonic()
    with pytest.raises(kind) as caught:
        env.customized_method("do", [{"what": word} for word in ("go", what, "go", "go")])
    _check_message(caught.value, "do()", line)
    assert caught.value.partial == {0: None, 2: None, 3: None}
    return caught.value, step_all(env) - began


@fault("an exception in __init__")
def in_constructor(context: Context) -> float:
    began = time.monotonic()
    with pytest.raises(ZeroDivisionError, match="env 1 fell over") as caught:
        context.make(faulty(context.folder, number=1, birth="fall"))
    _check_message(caught.value, "its constructor")
    told = time.monotonic()
    assert [context.has("closed", number) for number in range(4)] == [True, False, True, True]
    return max(told - began, begin_all(context.make()) - told)


@fault("an exception in reset")
def in_reset(context: Context) -> float:
    env = context.make()
    began = time.monotonic()
    with pytest.raises(ZeroDivisionError, match="env 1 fell over") as caught:
        env.reset(options=[None, {"do": "fall"}, None, None])
    _check_message(caught.value, "reset")
    assert caught.value.partial.tolist() == [[0, 0], [2, 0], [3, 0]]  # type: ignore[attr-defined]
    assert env.step([0] * 3, [0, 2, 3]).states[:, 1].tolist() == [1, 1, 1]
    env.reset(1)
    return step_all(env) - began


@fault("an exception in step")
def in_step(context: Context) -> float:
    env = context.make()
    began = time.monotonic()
    with pytest.raises(ZeroDivisionError, match="env 1 fell over") as caught:
        env.step(actions("go", "fall"))
    _check_message(caught.value, "step")
    assert caught.value.partial.states.tolist() == [[0, 1], [2, 1], [3, 1]]  # type: ignore[attr-defined]
    return step_all(env) - began


@fault("exceptions in the steps of several envs")
def in_several(context: Context) -> float:
    env = context.make()
    began = time.monotonic()
    with pytest.raises(ExceptionGroup, match=r"2 envs failed: \(0, 3\)") as caught:
        env.step(actions("fall", "go", "go", "fall"))
    assert [str(error) for error in caught.value.exceptions] == ["env 0 fell over", "env 3 fell over"]
    assert caught.value.partial.env_ids.tolist() == [1, 2]  # type: ignore[attr-defined]
    return step_all(env) - began


@fault("an exception in a method")
def in_method(context: Context) -> float:
    error, seconds = _fail_in_do(context, "fall", ZeroDivisionError, "raise ZeroDivisionError(")
    assert str(error) == "env 1 fell over"
    return seconds


@fault("an exception in close")
def in_close(context: Context) -> float:
    env = context.make(faulty(context.folder, number=1, end="fall"))
    began = time.monotonic()
    env.close()
    seconds = time.monotonic() - began
    assert env.closed
    assert all(context.has("closed", number) for number in range(4))
    return seconds


@fault("SystemExit in close")
def exit_in_close(context: Context) -> float:
    env = context.make(faulty(context.folder, number=0, end="raise_exit"))
    began = time.monotonic()
    env.close()
    seconds = time.monotonic() - began
    assert all(context.has("closed", number) for number in range(4))
    return seconds


@fault("a close that never returns", {"dummy": "it is the caller's own call"}, patience=CLOSE_PATIENCE, is_slow=True)
def hung_close(context: Context) -> float:
    env = context.make(faulty(context.folder, number=0, end="hang"))
    began = time.monotonic()
    env.close()
    seconds = time.monotonic() - began
    assert context.has("closed", 3)
    return seconds


@fault("an exception in render")
def in_render(context: Context) -> float:
    env = context.make(faulty(context.folder, number=1, picture="fall"))
    began = time.monotonic()
    with pytest.raises(ZeroDivisionError, match="env 1 fell over") as caught:
        env.render()
    _check_message(caught.value, "render()")
    return step_all(env) - began


@fault("an exception whose constructor wants two arguments")
def two_arguments(context: Context) -> float:
    error, seconds = _fail_in_do(context, "raise_two", TwoArguments, "raise TwoArguments(")
    assert isinstance(error, TwoArguments)
    assert (str(error), error.second) == ("first-second", "second")
    return seconds


@fault("an exception whose constructor wants keywords")
def only_keywords(context: Context) -> float:
    error, seconds = _fail_in_do(context, "raise_keyword", OnlyKeywords, "raise OnlyKeywords(")
    assert isinstance(error, OnlyKeywords)
    assert error.code == 1
    return seconds


@fault("an exception that holds a lock")
def holding(context: Context) -> float:
    kind = Holding if context.mode in ("dummy", "thread") else EnvError
    error, seconds = _fail_in_do(context, "raise_lock", kind, "raise Holding")
    assert "held" in str(error)
    assert "Holding" in repr(error)
    return seconds


@fault("SystemExit in a method")
def system_exit(context: Context) -> float:
    error, seconds = _fail_in_do(context, "raise_exit", SystemExit, "raise SystemExit(3)")
    assert isinstance(error, SystemExit)
    assert error.code == 3
    return seconds


@fault("KeyboardInterrupt raised by an env")
def keyboard_interrupt(context: Context) -> float:
    env = context.make()
    began = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        env.step(actions("go", "raise_interrupt"))
    if context.mode == "dummy":  # there it cannot be distinguished from Ctrl-C
        with pytest.raises(EnvInterruptedError, match="env 1"):
            env.recv(min_envs=4)
        env.reset(1)
    return step_all(env) - began


@fault("endless recursion")
def recursion(context: Context) -> float:
    _, seconds = _fail_in_do(context, "recurse", RecursionError, "self.recurse()")
    return seconds


# ---------------------------------------------------------------- objects that do not pickle


def _check_alone(context: Context, act: Callable[[Any], Any], match: str, **options: Any) -> float:
    """Check that an uncopyable object fails only its env and its call."""
    env = context.make(**options)
    began = time.monotonic()
    with pytest.raises(UnpicklableError, match=match) as caught:
        act(env)
    text = "".join(traceback.format_exception(caught.value))
    assert "env 1" in text
    assert "lock" in text
    return begin_all(env) - began


@fault("a result that does not pickle")
def locked_result(context: Context) -> float:
    return _check_alone(
        context, lambda env: env.customized_method("do", {"what": "hand_out_lock"}, 1), "cannot be copied"
    )


@fault("an attribute that does not pickle")
def locked_attribute(context: Context) -> float:
    return _check_alone(context, lambda env: env.get_env_attr("lock", 1), "cannot be copied")


@fault("an attribute to be set that does not pickle")
def locked_value(context: Context) -> float:
    values = [1, threading.Lock(), 3, 4]
    return _check_alone(context, lambda env: env.set_env_attr("thing", values=values), "cannot be copied")


@fault("an argument that does not pickle")
def locked_argument(context: Context) -> float:
    data: list[Any] = [{"what": word} for word in ("go", threading.Lock(), "go", "go")]
    return _check_alone(context, lambda env: env.customized_method("do", data), "cannot be copied")


@fault("an action that does not pickle")
def locked_action(context: Context) -> float:
    env = context.make(faulty(context.folder, Loose))
    began = time.monotonic()
    with pytest.raises(UnpicklableError, match="env 1.*lock"):
        env.step(["go", threading.Lock(), "go", "go"])
    assert env.step(["go"] * 4).states[:, 1].tolist() == [1] * 4
    return time.monotonic() - began


@fault("an info that does not pickle")
def locked_info(context: Context) -> float:
    env = context.make()
    began = time.monotonic()
    with pytest.raises(UnpicklableError, match="lock") as caught:
        env.step(actions("go", "hand_out_lock"))
    assert "env 1" in "".join(caught.value.__notes__)
    assert caught.value.partial.env_ids.tolist() == [0, 2, 3]  # type: ignore[attr-defined]
    return begin_all(env) - began
