"""Ctrl-C, a time limit or a request to end, at any line that a call executes."""

from __future__ import annotations

import dis
import gc
import itertools
import os
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from types import FrameType
from typing import Any, NamedTuple

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.spaces import Box, Discrete

_EVERYWHERE = ("parallelenv", "backends", "multiprocessing")
# What a line with only `try:` compiles to. Python handles no signal there, and an error there would skip the exit of a
# `with` around it.
_NOP = dis.opmap["NOP"]


class Interrupt(NamedTuple):
    """A signal, and the exception that its handler raises; ``None`` for an exception that no signal causes."""

    number: signal.Signals | None
    error: type[BaseException]


CTRL_C = Interrupt(signal.SIGINT, KeyboardInterrupt)
TIME_LIMIT = Interrupt(signal.SIGALRM, TimeoutError)
REQUEST_TO_END = Interrupt(signal.SIGTERM, SystemExit)
NO_MEMORY = Interrupt(None, MemoryError)


class Moments:
    """Numbers of lines, each with the interrupt that comes before it: every so many lines, from the first."""

    def __init__(self, *interrupts: Interrupt, stride: int = 1) -> None:
        self._interrupts = interrupts
        self.stride = stride

    def __iter__(self) -> Iterator[tuple[int, Interrupt]]:
        return zip(itertools.count(1, self.stride), itertools.cycle(self._interrupts), strict=False)

    def every(self, stride: int) -> Moments:
        """Return so many times fewer moments, for a test whose calls take long."""
        return Moments(*self._interrupts, stride=stride * self.stride)


at_many_moments = pytest.mark.parametrize(
    "moments",
    [
        pytest.param(Moments(CTRL_C), id="ctrl-c"),
        pytest.param(Moments(TIME_LIMIT, REQUEST_TO_END, stride=7), id="others"),
        pytest.param(Moments(TIME_LIMIT), id="time limit", marks=pytest.mark.long),
        pytest.param(Moments(REQUEST_TO_END), id="request to end", marks=pytest.mark.long),
    ],
)
"""Runs a test with Ctrl-C before every line, and with other signals before some lines or, if long, before every line.

The marked tests cannot be timed by SIGALRM, see `pytest.mark.timeout`.
"""


class Outcome(NamedTuple):
    line: str  # before which the interrupt came; empty if the call had fewer lines
    error: type[BaseException] | None  # not the error itself: its traceback would keep the objects of the call alive
    is_raised: bool  # whether the error is that of the interrupt


class _Tracer:
    """Interrupts the line of that number, in files of whose paths one is a part, before it is executed."""

    def __init__(self, number: int, paths: Sequence[str], interrupt: Interrupt) -> None:
        self._left = number
        self._interrupt = interrupt
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
                if self._interrupt.number is None:
                    raise self._interrupt.error
                signal.raise_signal(self._interrupt.number)
        return self.trace


def interrupt_at(
    number: int, call: Callable[[], Any], paths: Sequence[str] = _EVERYWHERE, interrupt: Interrupt = CTRL_C
) -> Outcome:
    """Make a call and interrupt it before a line: the one of that number, from 1, in files with such parts of paths."""
    tracer = _Tracer(number, paths, interrupt)
    error: type[BaseException] | None = None
    made: Any = None

    def raise_error(*_: object) -> None:
        raise interrupt.error

    before: Any = None
    if interrupt.number is not None and interrupt is not CTRL_C:
        before = signal.signal(interrupt.number, raise_error)
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
        if interrupt.number is not None and interrupt is not CTRL_C:
            signal.signal(interrupt.number, before)
    del made
    return Outcome(tracer.line, error, error is interrupt.error)


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
