"""Ctrl-C at any line that a call executes."""

from __future__ import annotations

import dis
import gc
import os
import signal
import sys
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any, NamedTuple

import gymnasium as gym
import numpy as np
from gymnasium.spaces import Box, Discrete

_EVERYWHERE = ("parallelenv", "backends", "multiprocessing")
# What a line with only `try:` compiles to. Python handles no signal there, and an error there would skip the exit of a
# `with` around it.
_NOP = dis.opmap["NOP"]


class Outcome(NamedTuple):
    line: str  # before which the interrupt came; empty if the call had fewer lines
    error: type[BaseException] | None  # not the error itself: its traceback would keep the objects of the call alive

    @property
    def is_raised(self) -> bool:
        return self.error is KeyboardInterrupt


class _Tracer:
    """Sends this process SIGINT before the line of that number, in files of whose paths one is a part."""

    def __init__(self, number: int, paths: Sequence[str]) -> None:
        self._left = number
        self._paths = paths
        self._pid = os.getpid()
        self.line = ""

    def trace(self, frame: FrameType, event: str, argument: Any) -> Any:
        if self.line or os.getpid() != self._pid or not any(part in frame.f_code.co_filename for part in self._paths):
            return None
        if event == "line":
            self._left -= 1
            if self._left <= 0 and frame.f_code.co_code[frame.f_lasti] != _NOP:
                self.line = f"{frame.f_code.co_filename}:{frame.f_lineno}"
                signal.raise_signal(signal.SIGINT)
        return self.trace


def interrupt_at(number: int, call: Callable[[], Any], paths: Sequence[str] = _EVERYWHERE) -> Outcome:
    """Make a call and interrupt it before a line: the one of that number, from 1, in files with such parts of paths."""
    tracer = _Tracer(number, paths)
    error: type[BaseException] | None = None
    made: Any = None
    found = sys.gettrace()
    gc.disable()  # an interrupt in a `__del__` is lost, and what is collected by chance is not a part of the call
    sys.settrace(tracer.trace)
    try:
        made = call()  # keeps the result alive until the tracing ends
    except BaseException as raised:  # noqa: BLE001 (the caller decides which is expected)
        error = type(raised)
    finally:
        sys.settrace(found)
        gc.enable()
    del made
    return Outcome(tracer.line, error)


class Counting(gym.Env[Any, Any]):
    """Its state is the number of its steps."""

    observation_space = Box(0, np.inf, (1,), np.float64)
    action_space = Discrete(2)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        self.count = 0
        return np.zeros(1), {}

    def step(self, action: Any) -> Any:
        self.count += 1
        return np.full(1, float(self.count)), 1.0, False, False, {}
