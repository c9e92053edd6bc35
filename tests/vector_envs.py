"""An env, and vector envs that are the same as some of it: NumPy's of each autoreset mode, and Gymnasium's."""

from __future__ import annotations

import os
import signal
import time
from functools import partial
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium.spaces import Box, Discrete
from gymnasium.vector import AutoresetMode, SyncVectorEnv, VectorEnv

from parallelenv import get_worker_info

GO, RUN, RAISE, EXIT, WAIT, INTERRUPT = range(6)
"""Actions."""
NEXT, SAME, DISABLED = "NextStep", "SameStep", "Disabled"
"""Autoreset modes."""


class Walk(gym.Env[Any, Any]):
    """Its state has its length, the steps of the episode, and its luck. Its infos are of every kind.

    Args:
        length: Steps of an episode. Even ones terminate, odd ones are truncated.
    """

    observation_space = Box(-1e3, 1e3, (3,), np.float64)
    action_space = Discrete(6)
    render_mode = "rgb_array"

    def __init__(self, length: int = 4) -> None:
        self.length, self.count, self.luck = length, 0, 0.0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        super().reset(seed=seed)
        self.count, self.luck = (options or {}).get("begin", 0), self.np_random.random()
        return self._state(), {"begun": "afresh", **self._info()}

    def step(self, action: Any) -> Any:
        act([action])
        if info := get_worker_info():
            self.told = info.env_id, info.num_envs, info.worker_id, info.num_workers, info.seed
        self.count += 1
        ends = self.count >= self.length
        return self._state(), action + 0.5, ends and self.length % 2 == 0, ends and self.length % 2 == 1, self._info()

    def _state(self) -> Any:
        return np.array([self.length, self.count, self.luck])

    def _info(self) -> dict[str, Any]:
        info: dict[str, Any] = {"count": np.int64(self.count), "pair": np.full(2, self.count)}
        if self.count % 3 == 1:
            info |= {"note": f"at {self.count}", "inner": {"length": np.float64(self.length)}}
        if (self.count + self.length) % 2:
            info["inner"] = {**info.get("inner", {}), "deep": {"big": np.bool_(self.count > 2), "list": [self.count]}}
        return info

    def render(self) -> Any:
        return np.full((2, 2, 3), self.length, np.uint8)

    def tell(self, word: str = "") -> str:
        return f"{word}{self.length}"

    def where(self) -> int:
        return os.getpid()


def act(actions: Any) -> None:
    """Raise, exit, wait or interrupt this process if an action requests it."""
    if RAISE in actions:
        raise ZeroDivisionError("fell over")
    if EXIT in actions:
        os._exit(7)
    if WAIT in actions:
        time.sleep(0.8)
    if INTERRUPT in actions:
        signal.raise_signal(signal.SIGINT)


class Walks(VectorEnv[Any, Any, Any]):
    """The same as a `Walk` of each length. It has no method beyond those of Gymnasium's `VectorEnv`, and its envs are
    not seen: it takes one seed, resets some envs only with a mask, and, in mode Disabled, steps envs that have ended.
    """

    def __init__(self, lengths: Any = (4, 5), autoreset: str = NEXT) -> None:
        self.num_envs = len(lengths)
        self.metadata, self.render_mode = {"autoreset_mode": AutoresetMode(autoreset)}, "rgb_array"
        self.single_observation_space, self.single_action_space = Walk.observation_space, Walk.action_space
        self._vec: Any = synced(lengths, autoreset) if lengths else None

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        assert seed is None or isinstance(seed, int)
        assert "reset_mask" not in (options or {}) or self._vec.autoreset_mode is AutoresetMode.DISABLED
        return self._vec.reset(seed=seed, options=options)

    def step(self, actions: Any) -> Any:
        if self._vec.autoreset_mode is AutoresetMode.DISABLED:
            self._vec._autoreset_envs[:] = False
        return self._vec.step(actions)

    def render(self) -> Any:
        return self._vec.render()


def synced(lengths: Any = (4, 5), autoreset: str = NEXT, kind: Any = Walk) -> SyncVectorEnv:
    return SyncVectorEnv([partial(kind, length) for length in lengths], autoreset_mode=AutoresetMode(autoreset))
