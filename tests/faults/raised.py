"""Envs that raise, and objects that do not pickle."""

from __future__ import annotations

import threading
import time
import traceback
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
from fragile import TwoArguments
from modes import IN_WORKERS, ORACLE

from faults.context import CLOSE_PATIENCE, Context, begin_all, fault, step_all
from faults.envs import Holding, Loose, OnlyKeywords, actions, faulty
from parallelenv.errors import EnvError, EnvInterruptedError, UnpicklableError


def _check_message(error: BaseException, operation: str, line: str = "raise ZeroDivisionError(") -> None:
    """Check that an exception names env 1, and shows the line of the user that raised it."""
    assert f"Raised by env 1 in {operation}, process " in "".join(error.__notes__)
    assert line in "".join(traceback.format_exception(error))


@fault("an exception in __init__", replaces="pool")
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


@fault("an exception in render")
def in_render(context: Context) -> float:
    env = context.make(faulty(context.folder, number=1, picture="fall"))
    began = time.monotonic()
    with pytest.raises(ZeroDivisionError, match="env 1 fell over") as caught:
        env.render()
    _check_message(caught.value, "render()")
    return step_all(env) - began


def _raise_in_method(what: str, kind: Any, line: str, is_kept: Callable[[Any], bool], context: Context) -> float:
    """Let env 1 raise in a method, and check class, line and contents of the exception, and the other results."""
    env = context.make()
    began = time.monotonic()
    with pytest.raises(EnvError if kind is Holding and context.mode in IN_WORKERS else kind) as caught:
        env.customized_method("do", [{"what": word} for word in ("go", what, "go", "go")])
    _check_message(caught.value, "do()", line)
    assert is_kept(caught.value)
    assert caught.value.partial == {0: None, 2: None, 3: None}
    return step_all(env) - began


for _name, _what, _kind, _line, _is_kept in (
    ("an exception in a method", "fall", ZeroDivisionError, "raise Zero", lambda error: "env 1 fell" in str(error)),
    (
        "an exception whose constructor wants two arguments",
        *("raise_two", TwoArguments, "raise TwoArguments("),
        lambda error: (str(error), error.second) == ("first-second", "second"),
    ),
    (
        "an exception whose constructor wants keywords",
        *("raise_keyword", OnlyKeywords, "raise OnlyKeywords(", lambda error: error.code == 1),
    ),
    (
        "an exception that holds a lock",
        *("raise_lock", Holding, "raise Holding", lambda error: "held" in str(error) and "Holding" in repr(error)),
    ),
    ("SystemExit in a method", "raise_exit", SystemExit, "raise SystemExit(3)", lambda error: error.code == 3),
    ("endless recursion", "recurse", RecursionError, "self.recurse()", lambda error: True),
):
    fault(_name)(partial(_raise_in_method, _what, _kind, _line, _is_kept))


@fault("KeyboardInterrupt raised by an env")
def keyboard_interrupt(context: Context) -> float:
    env = context.make()
    began = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        env.step(actions("go", "raise_interrupt"))
    if context.mode == ORACLE:  # there it cannot be distinguished from Ctrl-C
        with pytest.raises(EnvInterruptedError, match="env 1"):
            env.recv(min_envs=4)
        env.reset(1)
    return step_all(env) - began


def _close(number: int, what: str, closed: range, context: Context) -> float:
    """Close envs of which one fails in `close`; check that the others were also closed."""
    env = context.make(faulty(context.folder, number=number, end=what))
    began = time.monotonic()
    env.close()
    seconds = time.monotonic() - began
    assert env.closed
    assert all(context.has("closed", env_id) for env_id in closed)
    return seconds


fault("an exception in close")(partial(_close, 1, "fall", range(4)))
fault("SystemExit in close")(partial(_close, 0, "raise_exit", range(4)))
# In the oracle it is the caller's own call.
_add = fault("a close that never returns", (ORACLE,), patience=CLOSE_PATIENCE, is_slow=True)
_add(partial(_close, 0, "wait", range(3, 4)))


# ---------------------------------------------------------------- objects that do not pickle


def _lock_in(act: Callable[[Any], Any], context: Context) -> float:
    """Check that an object that contains a lock fails only its env and its call."""
    env = context.make()
    began = time.monotonic()
    with pytest.raises(UnpicklableError, match="cannot be copied") as caught:
        act(env)
    text = "".join(traceback.format_exception(caught.value))
    assert "env 1" in text
    assert "lock" in text
    return begin_all(env) - began


_DATA = [{"what": word} for word in ("go", threading.Lock(), "go", "go")]
for _name, _act in {
    "a result": lambda env: env.customized_method("do", {"what": "hand_out_lock"}, 1),
    "an attribute": lambda env: env.get_env_attr("lock", 1),
    "an attribute to be set": lambda env: env.set_env_attr("thing", values=[1, threading.Lock(), 3, 4]),
    "an argument": lambda env: env.customized_method("do", _DATA),
}.items():
    fault(f"{_name} that does not pickle")(partial(_lock_in, _act))


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
