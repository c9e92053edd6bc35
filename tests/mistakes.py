"""Mistakes in notebooks, and the errors that they should show."""

from __future__ import annotations

import re
import time
from dataclasses import dataclass

from kernels import Notebook
from modes import IN_CALLER

DEFINITIONS = """
import os, signal, time
from functools import partial
import gymnasium as gym, numpy as np
from parallelenv import ParallelEnv

GO_ON, FALL, DIE, HANG = range(4)


class Clumsy(gym.Env):
    observation_space = gym.spaces.Box(-np.inf, np.inf, (2,), np.float64)
    action_space = gym.spaces.Discrete(4)

    def __init__(self, number=0, level=None):
        self.number = number
        if level is not None:
            raise LookupError(f"there is no level {level}")

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        if options is not None:
            raise OSError("the disk is full")
        return np.zeros(2), {}

    def step(self, action):
        if action == FALL:
            self.fall("the cart fell over")
        if action == DIE:
            os.kill(os.getpid(), signal.SIGKILL)
        if action == HANG:
            time.sleep(20)
        return np.ones(2), 1.0, False, False, {}

    def fall(self, reason):
        raise ZeroDivisionError(reason)

    def differ(self):
        raise ValueError("even") if self.number % 2 == 0 else KeyError("odd")


def make(mode, **options):
    return ParallelEnv([partial(Clumsy, number) for number in range(4)], mode, num_cpus=2, **options)
"""
"""Cells use these names, and ``env``, which has four envs in two workers, and was reset."""

ENV = "env = make({mode!r})\nstates = env.reset()"

_STARTED = 100.0  # seconds in which Ray has started its processes, even on a busy machine


@dataclass(frozen=True)
class Mistake:
    """A cell that fails.

    Attributes:
        cell: Its code, with ``{mode!r}`` for the mode.
        error: Name of the exception's class.
        text: A part of the exception's message.
        line: The line of the env that must be shown, if one has raised.
        unlike: Modes in which it cannot be made.
    """

    cell: str
    error: str
    text: str
    line: str = ""
    unlike: tuple[str, ...] = ()

    @property
    def limit(self) -> int:
        """Lines that the traceback may have."""
        return 35 if self.line else 20


_FALL = "raise ZeroDivisionError(reason)"
MISTAKES = {
    "an env raises in step": Mistake(
        "env.step([GO_ON, FALL, GO_ON, GO_ON])", "ZeroDivisionError", "the cart fell over", _FALL
    ),
    "16 envs raise in step": Mistake(
        "many = ParallelEnv([Clumsy] * 16, {mode!r}, num_cpus=2)\nmany.reset()\nmany.step([FALL] * 16)",
        *("ZeroDivisionError", "env 0 and 15 other envs", _FALL),
    ),
    "16 envs refuse an action": Mistake(
        "carts = ParallelEnv(['CartPole-v1'] * 16, {mode!r}, num_cpus=2)\ncarts.reset()\ncarts.step([7] * 16)",
        *("AssertionError", "env 0 and 15 other envs", "assert self.action_space.contains(action)"),
    ),
    "an env raises in reset": Mistake(
        "env.reset(options={{'level': 3}})", "OSError", "the disk is full", 'raise OSError("the disk is full")'
    ),
    "an env raises in a method": Mistake(
        "env.customized_method('fall', {{'reason': 'on purpose'}}, id=2)", "ZeroDivisionError", "on purpose", _FALL
    ),
    "an env raises in its constructor": Mistake(
        "ParallelEnv([Clumsy, partial(Clumsy, level=3)], {mode!r}, num_cpus=1)",
        *("LookupError", "there is no level 3", 'raise LookupError(f"there is no level {level}")'),
    ),
    "envs raise different errors": Mistake(
        "env.customized_method('differ')", "ExceptionGroup", "KeyError: 'odd'", 'raise ValueError("even")'
    ),
    "a mistyped method": Mistake("env.customized_method('fal')", "AbsentAttributeError", "fal"),
    "an action of the wrong type": Mistake("env.step(['left'] * 4)", "ActionError", "Discrete(4)"),
    "a mistyped mode": Mistake("ParallelEnv([Clumsy], 'tread')", "ArgumentError", "thread"),
    "a missing argument": Mistake("env.step()", "TypeError", "action"),
    "a vector env that is stepped wrong": Mistake(
        "carts = env.to_gymnasium()\ncarts.reset()\ncarts.step([GO_ON] * 2)", "ActionError", "2 actions were given"
    ),
    "a worker that dies": Mistake(
        "env.step([DIE, GO_ON, GO_ON, GO_ON])", "WorkerDiedError", "is dead", unlike=IN_CALLER
    ),
    "an env that hangs": Mistake(
        "late = make({mode!r}, timeout=0.3)\nlate.reset()\nlate.step([HANG, GO_ON, GO_ON, GO_ON])",
        *("WorkerTimeoutError", "0.3 s"),
        unlike=IN_CALLER,  # a call in the caller's own process cannot be given up, and would be waited for
    ),
}


@dataclass(frozen=True)
class Reading:
    """The error shown after a mistake."""

    traceback: str
    seconds: float

    @property
    def num_lines(self) -> int:
        """Number of lines of the traceback."""
        return len(self.traceback.splitlines())


def make_mistake(notebook: Notebook, mistake: Mistake, mode: str) -> Reading:
    """Make a mistake in a kernel that has `DEFINITIONS`, and check that the next cell runs."""
    notebook.run(ENV.format(mode=mode), _STARTED)
    began = time.monotonic()
    request = notebook.send(mistake.cell.format(mode=mode))
    reply = notebook.finish(request, _STARTED)
    seconds = time.monotonic() - began
    # IPython prints exception groups, rather than to send them as the traceback.
    shown = "\n".join(reply.get("traceback", ())) or notebook.printed[request]
    traceback = re.sub(r"\x1b\[[0-9;]*m", "", shown)
    assert notebook.evaluate("40 + 2") == 42
    notebook.run("ParallelEnv.close_all()")
    return Reading(traceback, seconds)
