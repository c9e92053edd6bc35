"""The envs of the suite: small, deterministic, each with one difficulty.

Every env has a ``number``, which appears in its states, so that results of different envs always differ, and a
``length``, the steps of an episode. Even numbers terminate, odd ones are truncated.
"""

from __future__ import annotations

import random
from typing import Any

import gymnasium
import numpy as np
from gymnasium.spaces import Box, Dict, Discrete, Graph, GraphInstance, MultiBinary, MultiDiscrete, Sequence, Text
from gymnasium.spaces import Tuple as TupleSpace

SteppedEnv = tuple[Any, Any, bool, bool, dict[str, Any]]
LETTERS = "abcdefgh"
LARGE = 20_000  # number of float64 sent beside a message instead of in it


class Paced(gymnasium.Env[Any, Any]):
    """Base of envs that count their steps.

    Args:
        number: Number of the env.
        length: Steps of an episode.
    """

    def __init__(self, number: int = 0, length: int = 4) -> None:
        self.number = number
        self.length = length
        self.count = 0
        self.episode = 0

    def _begin(self, seed: int | None) -> None:
        super().reset(seed=seed)
        self.count = 0
        self.episode += 1

    def _advance(self) -> tuple[bool, bool]:
        self.count += 1
        ends = self.count >= self.length
        return ends and self.number % 2 == 0, ends and self.number % 2 == 1


class Counter(Paced):
    """Box states. Every step overwrites its one state array and one info dict."""

    observation_space = Box(-1e6, 1e6, (3,), np.float32)
    action_space = Discrete(5)

    def __init__(self, number: int = 0, length: int = 4) -> None:
        super().__init__(number, length)
        self.state = np.zeros(3, np.float32)
        self.info: dict[str, Any] = {"trace": [], "state": self.state}

    def _show(self) -> np.ndarray[Any, np.dtype[np.float32]]:
        self.state[:] = self.number, self.count, self.np_random.random()
        self.info["trace"].append(self.count)
        return self.state

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Begin an episode; the info has the options."""
        self._begin(seed)
        self.info["trace"].clear()
        self.info["options"] = options
        return self._show(), self.info

    def step(self, action: int) -> SteppedEnv:
        """Return an empty info in every other step."""
        terminated, truncated = self._advance()
        state = self._show()
        reward = float(action) + float(self.np_random.normal())
        return state, reward, terminated, truncated, self.info if self.count % 2 else {}


class Sheet(Paced):
    """Dict states with a text among arrays, overwritten in place, and Dict actions."""

    observation_space = Dict(
        {
            "image": Box(0, 255, (2, 3), np.uint8),
            "inner": Dict({"bits": MultiBinary(3), "level": Discrete(100, start=-50)}),
            "word": Text(8, charset=LETTERS),
        }
    )
    action_space = Dict({"force": Box(-1, 1, (2,), np.float32), "move": Discrete(3)})

    def __init__(self, number: int = 0, length: int = 4) -> None:
        super().__init__(number, length)
        self.state: dict[str, Any] = {
            "image": np.zeros((2, 3), np.uint8),
            "inner": {"bits": np.zeros(3, np.int8), "level": 0},
            "word": "a",
        }

    def _show(self) -> dict[str, Any]:
        self.state["image"][:] = self.np_random.integers(0, 256, (2, 3))
        self.state["inner"]["bits"][:] = self.np_random.integers(0, 2, 3)
        self.state["inner"]["level"] = self.number * 10 + self.count - 50
        self.state["word"] = LETTERS[: 1 + self.count % 8]
        return self.state

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Begin an episode."""
        self._begin(seed)
        return self._show(), {"first": self.state["image"]}

    def step(self, action: dict[str, Any]) -> SteppedEnv:
        """Return the reward as a numpy number."""
        terminated, truncated = self._advance()
        reward = np.float32(action["force"].sum() + action["move"])
        return self._show(), reward, terminated, truncated, {"state": self.state}


class Pair(Paced):
    """Tuple states, one of them 0-dimensional, and MultiDiscrete actions."""

    observation_space = TupleSpace(
        (
            Box(-1e6, 1e6, (), np.float64),
            TupleSpace((MultiDiscrete([50, 50]), Discrete(9))),
        )
    )
    action_space = MultiDiscrete([2, 7])

    def _show(self) -> tuple[Any, ...]:
        numbers = np.array([self.number, self.count])
        return np.array(self.np_random.normal()), (numbers, np.int64(self.np_random.integers(9)))

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Begin an episode."""
        self._begin(seed)
        return self._show(), {}

    def step(self, action: Any) -> SteppedEnv:
        """Return the reward as an array of one number."""
        terminated, truncated = self._advance()
        return self._show(), np.array([action[0] - action[1]]), terminated, truncated, {}


class Words(Paced):
    """Text states and text actions, without a fixed size."""

    observation_space = Text(40, charset=LETTERS + "0123456789 ")
    action_space = Text(5, charset=LETTERS)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Begin an episode."""
        self._begin(seed)
        return f"{self.number} begins", {"letters": list(LETTERS)}

    def step(self, action: str) -> SteppedEnv:
        """Return the reward as an int."""
        terminated, truncated = self._advance()
        letter = LETTERS[int(self.np_random.integers(8))]
        return f"{self.number} {self.count} {action} {letter}", len(action), terminated, truncated, {}


class Chain(Paced):
    """States of growing length. Keeps the actions it gets, without copying them."""

    observation_space = Sequence(Box(-100, 100, (2,), np.float64))
    action_space = Box(-1, 1, (2,), np.float32)

    def __init__(self, number: int = 0, length: int = 4) -> None:
        super().__init__(number, length)
        self.kept: list[Any] = []

    def _show(self) -> tuple[Any, ...]:
        return tuple(np.asarray(action, np.float64) for action in self.kept)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Begin an episode."""
        self._begin(seed)
        self.kept = []
        return self._show(), {}

    def step(self, action: Any) -> SteppedEnv:
        """Return all kept actions in the state."""
        terminated, truncated = self._advance()
        self.kept.append(action)
        return self._show(), bool(self.np_random.integers(2)), terminated, truncated, {"kept": len(self.kept)}


class Net(Paced):
    """Graph states."""

    observation_space = Graph(Box(-10, 10, (2,), np.float32), None)
    action_space = MultiBinary(3)

    def _show(self) -> GraphInstance:
        nodes = self.np_random.normal(size=(1 + self.count % 3, 2)).astype(np.float32)
        return GraphInstance(nodes=nodes, edges=None, edge_links=None)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Begin an episode."""
        self._begin(seed)
        return self._show(), {"number": self.number}

    def step(self, action: Any) -> SteppedEnv:
        """Reward the bits that are set."""
        terminated, truncated = self._advance()
        return self._show(), int(action.sum()), terminated, truncated, {}


class Old:
    """Not a `gymnasium.Env`: bare state from ``reset()``, four items from ``step``, ``seed(s)``, no spaces."""

    def __init__(self, number: int = 0, length: int = 4) -> None:
        self.number = number
        self.length = length
        self.count = 0
        self.chance = random.Random(number)
        self.state = np.zeros(2)

    def seed(self, seed: int) -> None:
        """Seed the next episodes."""
        self.chance.seed(seed)

    def reset(self) -> Any:
        """Return only the state."""
        self.count = 0
        self.state[:] = self.number, self.chance.random()
        return self.state

    def step(self, action: float) -> tuple[Any, float, bool, dict[str, Any]]:
        """Report in the info whether an odd env was truncated."""
        self.count += 1
        self.state[:] = self.count + action, self.chance.random()
        done = self.count >= self.length
        return self.state, self.chance.random(), done, {"TimeLimit.truncated": True} if done and self.number % 2 else {}


class Ragged:
    """States of a new shape at every step, also large ones, and array rewards; no spaces."""

    def __init__(self, number: int = 0, length: int = 4) -> None:
        self.number = number
        self.length = length
        self.count = 0
        self.chance = np.random.default_rng(number)

    def _show(self) -> Any:
        return self.chance.normal(size=LARGE + self.number if self.count == 1 else (self.count, 2))

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Begin an episode."""
        self.count = 0
        if seed is not None:
            self.chance = np.random.default_rng(seed)
        return self._show(), {"seed": seed, "options": options}

    def step(self, action: Any) -> SteppedEnv:
        """Return a reward with two parts."""
        self.count += 1
        ends = self.count >= self.length
        reward = np.array([self.number, float(np.sum(action))])
        return self._show(), reward, ends and self.number % 2 == 0, ends and self.number % 2 == 1, {"action": action}


class Tensors:
    """States that are torch tensors, always in the same memory; no spaces."""

    def __init__(self, number: int = 0, length: int = 4) -> None:
        import torch

        self.number = number
        self.length = length
        self.count = 0
        self.state = torch.zeros(3)

    def reset(self, seed: int | None = None) -> Any:
        """Return a state without an info."""
        self.count = 0
        self.state.fill_(float(self.number) + (seed or 0))
        return self.state

    def step(self, action: Any) -> SteppedEnv:
        """Add the action to the state."""
        self.count += 1
        self.state.add_(float(action))
        ends = self.count >= self.length
        return self.state, float(self.state[0]), ends and self.number % 2 == 0, ends and self.number % 2 == 1, {}
