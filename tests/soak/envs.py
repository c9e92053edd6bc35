"""Envs whose results identify them, and which act according to their actions."""

from __future__ import annotations

import os
import threading
import time
from typing import Any

import gymnasium as gym
import numpy as np

GO, END, CUT, WAIT, RAISE, KNOT, QUIT, EXIT = range(8)
"""Deeds: step on; terminate; truncate; sleep first; raise; raise an error that cannot be pickled; raise `SystemExit`;
end the process."""
TROUBLES = (RAISE, KNOT, QUIT)
NO_TOKEN = -1.0
"""In a state: the value in place of the action's token if there was no action."""
PID = 5
"""Place of the process id in a state: what is before it is known in advance."""


def reward_of(env_id: int, step: int) -> float:
    """Return the reward of a step, which no other env or step of an episode has."""
    return step + env_id / 1024


def info_of(step: int, token: float) -> dict[str, float]:
    """Return the info of a step: only some have one, so that results with and without infos mix."""
    return {"token": token} if step % 3 == 0 else {}


class Numbered(gym.Env[Any, Any]):
    """Numbers its lives, its episodes and its steps, and echoes its action: a token, a deed, and seconds."""

    observation_space = gym.spaces.Box(-np.inf, np.inf, (6,), np.float64)
    action_space = gym.spaces.Box(-np.inf, np.inf, (3,), np.float64)

    def __init__(self, env_id: int) -> None:
        self.env_id = env_id
        self.birth = float(int.from_bytes(os.urandom(6), "big"))  # 48 bits, which a float64 holds
        self.episode = self.steps = 0
        self._view = np.zeros(6)  # the same object at every step: earlier results must not change with it

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        super().reset(seed=seed)
        options = options or {"until": 0.0, "fails": False}
        _sleep_until(options["until"])
        if options["fails"]:
            raise RuntimeError(f"env {self.env_id} cannot begin")
        self.episode += 1
        self.steps = 0
        return self._state(NO_TOKEN), {"birth": self.birth, "episode": self.episode, "seed": seed}

    def step(self, action: Any) -> Any:
        token, deed, seconds = (float(part) for part in action)
        if deed == WAIT:
            time.sleep(seconds)
        if deed == EXIT:
            os._exit(7)
        if deed in TROUBLES:
            error: Any = (SystemExit if deed == QUIT else RuntimeError)(f"env {self.env_id} got token {token:.0f}")
            if deed == KNOT:
                error.lock = threading.Lock()
            raise error
        self.steps += 1
        reward, info = reward_of(self.env_id, self.steps), info_of(self.steps, token)
        return self._state(token), reward, deed == END, deed == CUT, info

    def _state(self, token: float) -> Any:
        self._view[:] = self.env_id, self.birth, self.episode, self.steps, token, os.getpid()
        return self._view

    def echo(self, value: float, until: float) -> tuple[int, float]:
        _sleep_until(until)
        return self.env_id, value


def _sleep_until(moment: float) -> None:
    """Sleep until a moment of the clock: a reset that is tried again does not take long again."""
    time.sleep(max(0.0, moment - time.time()))
