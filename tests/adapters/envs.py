"""Envs for comparing an adapter with the vector env that it replaces, step for step.

They return new objects each time: the neighbours' vector envs pass on objects that an env changes later, and the
adapters need not imitate that.
"""

from __future__ import annotations

import copy
import os
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.spaces import Box, Dict, Discrete, MultiBinary, MultiDiscrete, Text, Tuple

Space = gym.Space[Any]
VECTOR = Box(-np.inf, np.inf, (3,), np.float32)
SPACES: dict[str, tuple[Space, Space]] = {
    "vector": (VECTOR, Discrete(3)),
    "number": (Discrete(9, start=-4), Box(-1, 1, (2,), np.float32)),
    "image": (Box(0, 255, (4, 4, 3), np.uint8), MultiDiscrete([3, 2])),
    "dict": (Dict({"a": VECTOR, "b": Dict({"c": MultiBinary(4)})}), Dict({"x": Discrete(2), "y": Discrete(3)})),
    "flat dict": (Dict({"a": VECTOR, "b": MultiBinary(4)}), MultiBinary(3)),
    "tuple": (Tuple((VECTOR, Discrete(5))), Tuple((Discrete(2), Box(0, 1, (2,), np.float64)))),
    "text": (Text(6, charset="abc"), Text(4, charset="xyz")),
    "text inside": (Dict({"a": VECTOR, "word": Text(6, charset="abc")}), Discrete(2)),
}


class Varied(gym.Env[Any, Any]):
    """Random states of a space, and episodes and infos of different lengths and keys.

    Args:
        kind: Which of `SPACES`.
        mean: Steps of an episode, on average.
        is_plain: Whether infos have one type under each key, as Gymnasium's own vector envs need it.
    """

    def __init__(self, kind: str = "vector", mean: float = 6.0, is_plain: bool = True) -> None:
        self.observation_space, self.action_space = copy.deepcopy(SPACES[kind])  # it samples from its own
        self.mean = mean
        self.is_plain = is_plain
        self.total = 0.0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        if seed is not None:
            self.observation_space.seed(seed)
        self.total = 0.0
        return self.observation_space.sample(), {"first": float(self.np_random.random()), "told": str(options)}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        luck = self.np_random.random(4)
        self.total += float(luck[0])
        terminated, truncated = bool(luck[1] < 0.8 / self.mean), bool(luck[2] < 0.4 / self.mean)
        state, reward = self.observation_space.sample(), float(luck[0]) + weight(action)
        return state, reward, terminated, truncated, self._info(float(luck[3]))

    def _info(self, luck: float) -> dict[str, Any]:
        if luck < 0.3:
            return {}
        info = {"total": self.total, "count": int(10 * luck), "lucky": luck > 0.7, "part": {"luck": np.float32(luck)}}
        if luck > 0.5:
            info |= {"word": "much", "array": np.full(2, luck)}
        if not self.is_plain:
            info |= {"odd": [1, 1.5, None, "word", np.zeros(int(10 * luck)), True][int(6 * luck)]}
        return info


def weight(action: Any) -> float:
    """Return a number that differs between actions."""
    if isinstance(action, dict | tuple):
        return sum(map(weight, action.values() if isinstance(action, dict) else action))
    return float(sum(map(ord, action))) if isinstance(action, str) else float(np.sum(action))


class Looped(gym.Env[Any, Any]):
    """One state array, which every step overwrites."""

    observation_space = Box(0, 100, (1,), np.float32)
    action_space = Discrete(2)

    def __init__(self, length: int = 2) -> None:
        self.length = length
        self.state = np.zeros(1, np.float32)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.state[:] = 0
        return self.state, {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.state += 1
        return self.state, 2 * float(self.state[0]), bool(self.state >= self.length), False, {}

    def add(self, one: float, other: float = 0.0) -> float:
        return float(self.state[0] + one + other)

    def render(self) -> Any:
        return np.full((2, 2, 3), int(self.state[0]), np.uint8)


class Fragile(Looped):
    """Raises an exception for action 1."""

    def __init__(
        self, length: int = 2, make_error: Callable[[], BaseException] = lambda: KeyError("one is too much")
    ) -> None:
        super().__init__(length)
        self.make_error = make_error

    def step(self, action: Any) -> Any:
        if action == 1:
            raise self.make_error()
        return super().step(action)


class Once(Looped):
    """Can be reset only once."""

    was_reset = False

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        if self.was_reset:
            raise KeyError("once is enough")
        self.was_reset = True
        return super().reset(seed=seed)[0], {"was_reset": True}


class Slow(Looped):
    """Takes long for action 1, and for a reset or a call on request."""

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        self.rest((options or {}).get("rest", 0.0))
        return super().reset(seed=seed)

    def step(self, action: Any) -> Any:
        self.rest(0.3 * float(action))
        return super().step(action)

    def rest(self, duration: float) -> float:
        time.sleep(duration)
        return duration


def interrupt_step(env: Any) -> None:
    """Interrupt a step of three envs, of which one is `Slow`."""
    interrupt = threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGINT))
    interrupt.start()
    with pytest.raises(KeyboardInterrupt):
        env.step(np.array([0, 1, 0]))
    interrupt.join()


class Drawn(Looped):
    """Draws frames that show seed and step."""

    metadata = {"render_modes": ["rgb_array"], "render_fps": 30}  # noqa: RUF012
    render_mode = "rgb_array"

    def render(self) -> Any:
        return super().render() + self.np_random.integers(200, size=3).astype(np.uint8)


class Typed(Looped):
    """Returns a state of another type or shape than its space. Action 1 ends the episode."""

    def __init__(self, observation_space: Any, state: Any) -> None:
        super().__init__()
        self.observation_space, self.given = observation_space, state

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        return self.given, {}

    def step(self, action: Any) -> Any:
        return self.given, 1.0, bool(action == 1), False, {}


class Echo(Looped):
    """Keeps its latest action."""

    def __init__(self, action_space: Any) -> None:
        super().__init__(9)
        self.action_space = action_space

    def step(self, action: Any) -> Any:
        self.action = action
        return super().step(0)
