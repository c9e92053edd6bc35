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


@fault("an exception in __init__", replaces="pool")
def in_constructor(context: Context) -> float:
    began = time.monotonic()
    with pytest.raises(ZeroDivisionError, match="env 1 fell over"):
        context.make(faulty(context.folder, number=1, birth="fall"))
    told = time.monotonic()
    assert [context.has("closed", number) for number in range(4)] == [True, False, True, True]
    return max(told - began, begin_all(context.make()) - told)


def _raise(kind: Any, parts: tuple[str, ...], act: Callable[[Any], Any], context: Context) -> float:
    """Let env 1 raise, and check that the error names the env, the operation and the line of the user.

    Args:
        kind: Class of the exception.
        parts: Parts of its text, notes and traceback.
        act: The call.
        context: How to run envs.
    """
    env = context.make(faulty(context.folder, number=1, picture="fall"))
    began = time.monotonic()
    with pytest.raises(EnvError if kind is Holding and context.mode in IN_WORKERS else kind) as caught:
        act(env)
    text = "".join(traceback.format_exception(caught.value))
    assert [part for part in ("env 1", *parts) if part not in text] == [], text
    return begin_all(env) - began


def _method(what: Any) -> Callable[[Any], Any]:
    """Return a call of a method, with an argument of its own for env 1."""
    return lambda env: env.customized_method("do", [{"what": word} for word in ("go", what, "go", "go")])


_FALL = ("env 1 fell over", "raise ZeroDivisionError(")
for _name, _kind, _parts, _act in (
    (
        "an exception in reset",
        ZeroDivisionError,
        ("Raised by env 1 in reset, process ", *_FALL),
        lambda env: env.reset(options=[None, {"do": "fall"}, None, None]),
    ),
    (
        "an exception in step",
        ZeroDivisionError,
        ("Raised by env 1 in step, process ", *_FALL),
        lambda env: env.step(actions("go", "fall")),
    ),
    (
        "exceptions in the steps of several envs",
        ExceptionGroup,
        ("3 envs failed: (0, 1, 3)", "env 0 fell over", *_FALL),
        lambda env: env.step(actions("fall", "fall", "go", "fall")),
    ),
    (
        "an exception in render",
        ZeroDivisionError,
        ("Raised by env 1 in render(), process ", *_FALL),
        lambda env: env.render(),
    ),
    (
        "an exception in a method",
        ZeroDivisionError,
        ("Raised by env 1 in do(), process ", *_FALL),
        _method("fall"),
    ),
    (
        "an exception whose constructor wants two arguments",
        TwoArguments,
        ("first-second", "raise TwoArguments("),
        _method("raise_two"),
    ),
    (
        "an exception whose constructor wants keywords",
        OnlyKeywords,
        ("code 1", "raise OnlyKeywords("),
        _method("raise_keyword"),
    ),
    ("an exception that holds a lock", Holding, ("held", "raise Holding"), _method("raise_lock")),
    ("SystemExit in a method", SystemExit, ("SystemExit: 3", "raise SystemExit(3)"), _method("raise_exit")),
    ("endless recursion", RecursionError, ("self.recurse()",), _method("recurse")),
    ("a result that does not pickle", UnpicklableError, ("cannot be copied", "lock"), _method("hand_out_lock")),
    (
        "an attribute that does not pickle",
        UnpicklableError,
        ("cannot be copied", "lock"),
        lambda env: env.get_env_attr("lock", 1),
    ),
    (
        "an attribute to be set that does not pickle",
        UnpicklableError,
        ("cannot be copied", "lock"),
        lambda env: env.set_env_attr("thing", values=[1, threading.Lock(), 3, 4]),
    ),
    ("an argument that does not pickle", UnpicklableError, ("cannot be copied", "lock"), _method(threading.Lock())),
    (
        "an info that does not pickle",
        UnpicklableError,
        ("lock",),
        lambda env: env.step(actions("go", "hand_out_lock")),
    ),
):
    fault(_name)(partial(_raise, _kind, _parts, _act))


@fault("an action that does not pickle")
def locked_action(context: Context) -> float:
    env = context.make(faulty(context.folder, Loose))
    began = time.monotonic()
    with pytest.raises(UnpicklableError, match="env 1.*lock"):
        env.step(["go", threading.Lock(), "go", "go"])
    assert env.step(["go"] * 4).states[:, 1].tolist() == [1] * 4
    return time.monotonic() - began


@fault("KeyboardInterrupt raised by an env")
def keyboard_interrupt(context: Context) -> float:
    env = context.make()
    began = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        env.step(actions("go", "raise_interrupt"))
    if context.mode == ORACLE:  # there it cannot be distinguished from Ctrl-C
        with pytest.raises(EnvInterruptedError, match="env 1 was interrupted in the middle of step"):
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
