"""Mistakes in notebooks, and the errors that they should show."""

from __future__ import annotations

from dataclasses import dataclass

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

_REFUSED, _RAISED = 20, 35  # lines


@dataclass(frozen=True)
class Mistake:
    """A cell that fails.

    Attributes:
        cell: Its code, with ``{mode!r}`` for the mode.
        error: Name of the exception's class.
        text: A part of the exception's message.
        line: The line of the env that must be shown, if one has raised.
        limit: Lines that the traceback may have.
        unlike: Modes in which it cannot be made.
    """

    cell: str
    error: str
    text: str
    line: str = ""
    limit: int = _REFUSED
    unlike: tuple[str, ...] = ()


MISTAKES = {
    "an env raises in step": Mistake(
        "env.step([GO_ON, FALL, GO_ON, GO_ON])",
        "ZeroDivisionError",
        "the cart fell over",
        "raise ZeroDivisionError(reason)",
        _RAISED,
    ),
    "16 envs raise in step": Mistake(
        "many = ParallelEnv([Clumsy] * 16, {mode!r}, num_cpus=2)\nmany.reset()\nmany.step([FALL] * 16)",
        "ZeroDivisionError",
        "env 0 and 15 other envs",
        "raise ZeroDivisionError(reason)",
        _RAISED,
    ),
    "an env raises in reset": Mistake(
        "env.reset(options={{'level': 3}})", "OSError", "the disk is full", 'raise OSError("the disk is full")', _RAISED
    ),
    "an env raises in its constructor": Mistake(
        "ParallelEnv([Clumsy, partial(Clumsy, level=3)], {mode!r}, num_cpus=1)",
        "LookupError",
        "there is no level 3",
        'raise LookupError(f"there is no level {level}")',
        _RAISED,
    ),
    "envs raise different errors": Mistake(
        "env.customized_method('differ')", "ExceptionGroup", "KeyError: 'odd'", 'raise ValueError("even")', _RAISED
    ),
    "a mistyped method": Mistake("env.customized_method('fal')", "AbsentAttributeError", "fal"),
    "actions of the wrong number": Mistake("env.step([GO_ON] * 3)", "ActionError", "3"),
    "a missing argument": Mistake("env.step()", "TypeError", "action"),
    "a vector env that is stepped wrong": Mistake(
        "carts = env.to_gymnasium()\ncarts.reset()\ncarts.step([GO_ON] * 2)", "ActionError", "2 actions were given"
    ),
    "a step before the first reset": Mistake("make({mode!r}).step([GO_ON] * 4)", "ResetNeededError", "reset"),
    "a step after close": Mistake("env.close()\nenv.step([GO_ON] * 4)", "ClosedError", "closed"),
    "a worker that dies": Mistake(
        "env.step([DIE, GO_ON, GO_ON, GO_ON])", "WorkerDiedError", "is dead", unlike=IN_CALLER
    ),
    "an env that hangs": Mistake(
        "late = make({mode!r}, timeout=0.3)\nlate.reset()\nlate.step([HANG, GO_ON, GO_ON, GO_ON])",
        "WorkerTimeoutError",
        "0.3 s",
        unlike=IN_CALLER,  # a call in the caller's own process cannot be given up, and would be waited for
    ),
}
