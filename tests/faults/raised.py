"""Envs that raise, and objects that do not pickle."""

from __future__ import annotations

import threading
import time
import traceback
from collections.abc import Callable
from typing import Any

import pytest
from fragile import TwoArguments
from modes import ORACLE

from faults.context import CLOSE_PATIENCE, STARTS_POOL, Context, begin_all, fault, step_all
from faults.envs import Loose, actions, faulty
from parallelenv import ParallelEnv
from parallelenv.errors import EnvError, EnvInterruptedError, UnpicklableError


@fault("an exception in __init__", more=STARTS_POOL)
def in_constructor(context: Context) -> float:
    began = time.monotonic()
    with pytest.raises(ZeroDivisionError, match="env 1 fell over"):
        context.make(faulty(context.folder, number=1, birth="fall"))
    told = time.monotonic()
    assert [context.has("closed", number) for number in range(4)] == [True, False, True, True]
    return max(told - began, begin_all(context.make()) - told)


def _raise(context: Context, kind: Any, act: Callable[[Any], Any], *parts: str) -> float:
    """Let env 1 raise; check that the error names the env, the operation and the line of the user, by parts of it."""
    env = context.make()
    began = time.monotonic()
    with pytest.raises(kind) as caught:
        act(env)
    text = "".join(traceback.format_exception(caught.value))
    assert [part for part in ("env 1", *parts) if part not in text] == [], text
    return begin_all(env) - began


def _do(what: Any) -> Callable[[Any], Any]:
    """Return a call of a method, with an argument of its own for env 1."""
    return lambda env: env.customized_method("do", [{"what": word} for word in ("go", what, "go", "go")])


def _set_lock(env: ParallelEnv) -> None:
    env.set_env_attr("thing", values=[1, threading.Lock(), 3, 4])


_ONE_FALLS, _ONE_LOCKS = actions("go", "fall"), actions("go", "hand_out_lock")
_THREE_FALL = actions("fall", "fall", "go", "fall")
_FALL = "env 1 fell over", "raise ZeroDivisionError("
_REFUSED = "cannot be copied", "lock"
_OPTIONS = {"options": [None, {"do": "fall"}, None, None]}
for _name, _kind, _act, *_parts in (
    ("an exception in reset", ZeroDivisionError, lambda env: env.reset(**_OPTIONS), "env 1 in reset, process ", *_FALL),
    ("an exception in step", ZeroDivisionError, lambda env: env.step(_ONE_FALLS), "env 1 in step, process ", *_FALL),
    ("an exception in a method", ZeroDivisionError, _do("fall"), "env 1 in do(), process ", *_FALL),
    ("exceptions in the steps of several envs", ExceptionGroup, lambda env: env.step(_THREE_FALL), "(0, 1, 3)", *_FALL),
    ("an exception whose constructor wants two arguments", TwoArguments, _do("raise_two"), "raise TwoArguments("),
    ("SystemExit in a method", EnvError, _do("raise_exit"), "SystemExit: 3", "raise SystemExit(3)"),
    ("endless recursion", RecursionError, _do("recurse"), "self.recurse()"),
    ("a result that does not pickle", UnpicklableError, _do("hand_out_lock"), *_REFUSED),
    ("an argument that does not pickle", UnpicklableError, _do(threading.Lock()), *_REFUSED),
    ("an attribute that does not pickle", UnpicklableError, lambda env: env.get_env_attr("lock", 1), *_REFUSED),
    ("an attribute to be set that does not pickle", UnpicklableError, _set_lock, *_REFUSED),
    ("an info that does not pickle", UnpicklableError, lambda env: env.step(_ONE_LOCKS), "lock"),
):
    fault(_name, _kind, _act, *_parts)(_raise)


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
    with pytest.raises(KeyboardInterrupt if context.mode == ORACLE else EnvError):
        env.step(actions("go", "raise_interrupt"))
    if context.mode == ORACLE:  # there it cannot be distinguished from Ctrl-C
        with pytest.raises(EnvInterruptedError, match="env 1 was interrupted in the middle of step"):
            env.recv(min_envs=4)
        env.reset(1)
    return step_all(env) - began


# In the oracle it is the caller's own call.
@fault("a close that never returns", impossible=(ORACLE,), limit=1.0 + CLOSE_PATIENCE, is_slow=True)
def endless_close(context: Context) -> float:
    env = context.make(faulty(context.folder, number=0, end="wait"))
    began = time.monotonic()
    env.close()
    seconds = time.monotonic() - began
    assert env.closed
    assert context.has("closed", 3)  # of the other worker
    return seconds
