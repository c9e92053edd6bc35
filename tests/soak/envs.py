"""Envs whose results identify them, and which act according to their actions."""

from __future__ import annotations

import os
import threading
import time
from typing import Any

import gymnasium as gym
import numpy as np

GO, END, CUT, WAIT, RAISE, KNOT, QUIT, EXIT, STUMBLE = range(9)
"""Deeds: step on; terminate; truncate; sleep first; raise; raise an error that cannot be pickled; raise
`SystemExit`; end the process; terminate, and raise in the reset that follows."""

ENDINGS = (END, CUT, STUMBLE)
TROUBLES = (RAISE, KNOT, QUIT)
NO_TOKEN = -1.0
"""In a state: the value in place of the action's token if there was no action."""

ENV_ID, BIRTH, EPISODE, STEP, TOKEN, PID = range(6)
"""Places in a state."""

Action = tuple[float, float, float]
"""A token that is never given twice, a deed, and seconds for `WAIT`."""


class TroubleError(Exception):
    """An exception that an env raises on request."""


class KnottedError(Exception):
    """An exception that does not pickle."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.lock = threading.Lock()


def reward_of(env_id: int, step: int) -> float:
    """Return the reward of a step, which no other env or step of an episode has."""
    return step + env_id / 1024


class Numbered(gym.Env[Any, Any]):
    """Numbers its lives, its episodes and its steps, and echoes its action."""

    observation_space = gym.spaces.Box(-np.inf, np.inf, (6,), np.float64)
    action_space = gym.spaces.Box(-np.inf, np.inf, (3,), np.float64)

    def __init__(self, env_id: int) -> None:
        self.env_id = env_id
        self.birth = float(int.from_bytes(os.urandom(6), "big"))  # 48 bits, which a float64 holds
        self.episode = 0
        self.steps = 0
        self.token = NO_TOKEN
        self.mark = NO_TOKEN
        self.stumbles = False
        self._view = np.zeros(6)  # the same object at every step: earlier results must not change with it

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        super().reset(seed=seed)
        options = options or {}
        _sleep_until(options.get("until", 0.0))
        fails = self.stumbles or options.get("fails", False)
        self.stumbles = False
        if fails:
            raise TroubleError(f"env {self.env_id} cannot begin")
        self.episode += 1
        self.steps = 0
        self.token = NO_TOKEN
        return self._state(), {"birth": self.birth, "episode": self.episode, "seed": seed}

    def step(self, action: Any) -> Any:
        token, deed, seconds = (float(part) for part in action)
        if deed == WAIT:
            time.sleep(seconds)
        if deed == EXIT:
            os._exit(7)
        if deed in TROUBLES:
            self._raise(token, deed)
        self.steps += 1
        self.token = token
        self.stumbles = deed == STUMBLE
        info = {"token": token} if speaks(self.steps) else {}
        return self._state(), reward_of(self.env_id, self.steps), deed in (END, STUMBLE), deed == CUT, info

    def _raise(self, token: float, deed: float) -> None:
        text = f"env {self.env_id} got token {token:.0f}"
        raise {RAISE: TroubleError, KNOT: KnottedError, QUIT: SystemExit}[int(deed)](text)

    def _state(self) -> Any:
        self._view[:] = self.env_id, self.birth, self.episode, self.steps, self.token, os.getpid()
        return self._view

    def echo(self, value: float, until: float = 0.0) -> tuple[int, float]:
        """Return its env id and its arguments."""
        _sleep_until(until)
        return self.env_id, value

    def where(self) -> tuple[int, float, int, int]:
        """Return its env id, its birth, its episode and its step."""
        return self.env_id, self.birth, self.episode, self.steps


def _sleep_until(moment: float) -> None:
    """Sleep until a moment of the clock: a reset that is tried again does not take long again."""
    time.sleep(max(0.0, moment - time.time()))


def speaks(step: int) -> bool:
    """Return whether a step has an info, so that results with and without infos mix."""
    return step % 3 == 0
