"""Samplers for the tests of tasks: small, deterministic, with numbered tasks."""

from __future__ import annotations

from typing import Any

import numpy as np
from gymnasium.spaces import Box, Dict, Discrete, Text

from parallelenv.tasks.sampler_env import TaskStep

LETTERS = "abcdefgh"
PLAIN = Box(-1e6, 1e6, (3,), np.float64)
SPACES: dict[str, Any] = {
    "plain": PLAIN,
    "sheet": Dict({"place": PLAIN, "word": Text(8, charset=LETTERS)}),
    "bare": None,  # nothing declared
    "pieces": None,  # likewise, and states are dicts
    "digits": Box(0, 99, (3,), np.uint8),  # and states are int64
}


class Walk:
    """A task with a given number of steps. Its observation: its number, its step count, and a random number.

    It overwrites its array, so that references to it change.
    """

    def __init__(self, sampler: Walks, number: int, length: int, draw: float) -> None:
        self.sampler, self.number, self.length, self.count = sampler, number, length, 0
        self.place = np.array([number, 0, draw])

    def step(self, action: Any) -> Any:
        self.count += 1
        self.place[1] = self.count
        if self.sampler.crash is not None and (self.number, self.count) == self.sampler.crash:
            raise RuntimeError("crash")
        reward, info = float(action) + self.number, {"walk": self.number} if self.count % 2 else {}
        if self.number % 2:  # as Gymnasium has it, and terminated
            return self.get_observations(), reward, self.count == self.length, False, info
        return TaskStep(self.get_observations(), reward, False, info)  # only is_done() reports the end

    def is_done(self) -> bool:
        return self.count >= self.length

    def get_observations(self) -> Any:
        if self.sampler.kind == "sheet":
            return {"place": self.place, "word": LETTERS[: 1 + self.count]}
        if self.sampler.kind == "pieces":
            return {"place": self.place, "parts": {"count": self.count}}
        if self.sampler.kind == "digits":
            return self.place.astype(np.int64)
        return self.place

    def render(self) -> Any:
        return np.full((2, 3, 3), self.number, np.uint8)

    def close(self) -> None:
        self.sampler.closed.append(self.number)

    def name(self, mark: str = "") -> str:
        return f"walk {self.number}{mark}"

    def command(self, name: str, data: Any) -> Any:
        return self.number, name, data


class Walks:
    """Gives a number of walks of random lengths."""

    action_space = Discrete(5)

    def __init__(
        self, total: float = 3, kind: str = "plain", crash: tuple[int, int] | None = None, log: Any = None
    ) -> None:
        self.total = self.length = total
        self.kind, self.crash, self.log = kind, crash, log
        self.observation_space = SPACES[kind]
        self.given = 0
        self.rng = np.random.default_rng(0)
        self.closed, self.asked, self.tasks = list[Any](), list[Any](), list[Any]()

    def next_task(self, length: int | None = None, **kwargs: Any) -> Walk | None:
        self.asked.append(kwargs)
        if self.given >= self.total:
            return None
        self.given += 1
        drawn, draw = int(self.rng.integers(1, 4)), float(self.rng.random())
        self.tasks.append((self.given, length or drawn, draw))
        return Walk(self, *self.tasks[-1])

    def reset(self) -> None:
        self.given = 0

    def set_seed(self, seed: int) -> None:
        self.rng = np.random.default_rng(seed)

    def close(self) -> None:
        self.closed.append("sampler")
        if self.log is not None:
            self.log.append(self.closed)
