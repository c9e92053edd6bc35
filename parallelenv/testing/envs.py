"""The envs of the test suite. They are small and deterministic, and each class poses a particular difficulty.

Every env has a ``number``, which appears in the states of most classes, and a ``length``, the number of steps in an
episode. Envs with even numbers terminate; envs with odd numbers are truncated.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
from gymnasium.spaces import Box, Dict, Discrete, Graph, GraphInstance, MultiBinary, MultiDiscrete, Sequence, Text
from gymnasium.spaces import Tuple as TupleSpace

from parallelenv.contract.batch import Array
from parallelenv.contract.spaces import Action, Env, Info, State
from parallelenv.contract.worker_info import get_worker_info

SteppedEnv = tuple[State, Any, bool, bool, Info]
LETTERS = "abcdefgh"
GATE_PATIENCE = 10.0  # maximum number of seconds that an env waits for a path
LARGE = 20_000  # number of float64 in an array that is too large to be sent within a message

# ---------------------------------------------------------------- states, actions and rewards of all kinds


class Numbered:
    """Base class of this module's envs. The constructor calls `prepare`, which subclasses may override."""

    def __init__(self, number: int = 0, length: int = 4) -> None:
        self.number = number
        self.length = length
        self.count = 0
        self.prepare()

    def prepare(self) -> None: ...

    def _advance(self) -> tuple[bool, bool]:
        self.count += 1
        ends = self.count >= self.length
        return ends and self.number % 2 == 0, ends and self.number % 2 == 1


class Paced(Numbered, gymnasium.Env[State, Action]):
    """Base class of this module's Gymnasium envs; subclasses define the states, rewards and infos."""

    episode = 0
    options: Info | None = None

    def reset(self, *, seed: int | None = None, options: Info | None = None) -> tuple[State, Info]:
        super().reset(seed=seed)
        self.count = 0
        self.episode += 1
        self.options = options
        return self._state(), self._info()

    def step(self, action: Action) -> SteppedEnv:
        terminated, truncated = self._advance()
        state = self._state()
        return state, self._reward(action), terminated, truncated, self._info()

    def _state(self) -> object:
        raise NotImplementedError

    def _reward(self, action: Action) -> object:
        raise NotImplementedError

    def _info(self) -> Info:
        return {}


class Counter(Paced):
    """An env with Box states. It reuses one state array and one info dict; the info of every second step is empty."""

    observation_space = Box(-1e6, 1e6, (3,), np.float32)
    action_space = Discrete(5)

    def prepare(self) -> None:
        self.state = np.zeros(3, np.float32)
        self._latest: Info = {"trace": [], "state": self.state}

    def _state(self) -> object:
        if self.count == 0:
            self._latest["trace"].clear()
        self._latest["trace"].append(self.count)
        self.state[:] = self.number, self.count, self.np_random.random()
        return self.state

    def _reward(self, action: int) -> float:
        return float(action) + float(self.np_random.normal())

    def _info(self) -> Info:
        self._latest["options"] = self.options
        return self._latest if self.count % 2 or self.count == 0 else {}


class Sheet(Paced):
    """An env with Dict states (one dict, updated in place), Dict actions and float32 rewards."""

    observation_space = Dict(
        {
            "image": Box(0, 255, (2, 3), np.uint8),
            "inner": Dict({"bits": MultiBinary(3), "level": Discrete(100, start=-50)}),
            "word": Text(8, charset=LETTERS),
        }
    )
    action_space = Dict({"force": Box(-1, 1, (2,), np.float32), "move": Discrete(3)})

    def prepare(self) -> None:
        inner = {"bits": np.zeros(3, np.int8), "level": 0}
        self.state: Info = {"image": np.zeros((2, 3), np.uint8), "inner": inner, "word": "a"}

    def _state(self) -> object:
        self.state["image"][:] = self.np_random.integers(0, 256, (2, 3))
        self.state["inner"]["bits"][:] = self.np_random.integers(0, 2, 3)
        self.state["inner"]["level"] = self.number * 10 + self.count - 50
        self.state["word"] = LETTERS[: 1 + self.count % 8]
        return self.state

    def _reward(self, action: Info) -> object:
        return np.float32(action["force"].sum() + action["move"])

    def _info(self) -> Info:
        return {"state": self.state}


class Pair(Paced):
    """An env with Tuple states that contain a 0-dimensional array. Rewards are arrays of one number."""

    observation_space = TupleSpace(
        (Box(-1e6, 1e6, (), np.float64), TupleSpace((MultiDiscrete([50, 50]), Discrete(9)))),
    )
    action_space = MultiDiscrete([2, 7])

    def _state(self) -> object:
        numbers = np.array([self.number, self.count])
        return np.array(self.np_random.normal()), (numbers, np.int64(self.np_random.integers(9)))

    def _reward(self, action: Action) -> object:
        return np.array([action[0] - action[1]])


class Words(Paced):
    """An env with text states and text actions, neither of a fixed size, and int rewards."""

    observation_space = Text(40, charset=LETTERS + "0123456789 ")
    action_space = Text(5, charset=LETTERS)

    def _state(self) -> object:
        return f"{self.number} {self.count} {LETTERS[int(self.np_random.integers(8))]}"

    def _reward(self, action: str) -> int:
        return len(action)

    def _info(self) -> Info:
        return {"letters": list(LETTERS)}


class Chain(Paced):
    """An env with states of growing length, which contain all actions of the episode so far.

    The env keeps the action objects that it is given, not copies of them.
    """

    observation_space = Sequence(Box(-100, 100, (2,), np.float64))
    action_space = Box(-1, 1, (2,), np.float32)

    def _state(self) -> object:
        if self.count == 0:
            self.kept: list[object] = []
        return tuple(np.asarray(action, np.float64) for action in self.kept)

    def _reward(self, action: object) -> bool:
        return bool(self.np_random.integers(2))

    def step(self, action: Action) -> SteppedEnv:
        self.kept.append(action)
        return super().step(action)


class Net(Paced):
    """An env with Graph states."""

    observation_space = Graph(Box(-10, 10, (2,), np.float32), None)
    action_space = MultiBinary(3)

    def _state(self) -> object:
        nodes = self.np_random.normal(size=(1 + self.count % 3, 2)).astype(np.float32)
        return GraphInstance(nodes=nodes, edges=None, edge_links=None)

    def _reward(self, action: Action) -> int:
        return int(action.sum())


class Old(Numbered):
    """An env of the old API: ``reset()`` returns only the state, ``step`` returns four items, and ``seed()`` exists.

    The class is not a `gymnasium.Env`, and has no spaces.
    """

    def prepare(self) -> None:
        self.chance = random.Random(self.number)
        self.state = np.zeros(2)

    def seed(self, seed: int) -> None:
        self.chance.seed(seed)

    def reset(self) -> object:
        self.count = 0
        self.state[:] = self.number, self.chance.random()
        return self.state

    def step(self, action: float) -> tuple[State, float, bool, Info]:
        terminated, truncated = self._advance()
        self.state[:] = self.count + action, self.chance.random()
        info = {"TimeLimit.truncated": True} if truncated else {}
        return self.state, self.chance.random(), terminated or truncated, info


class Ragged(Numbered):
    """An env without spaces: states change their shape at every step and may be large, and rewards are arrays."""

    chance = np.random.default_rng(0)

    def _state(self) -> object:
        return self.chance.normal(size=LARGE + self.number if self.count == 1 else (self.count, 2))

    def reset(self, *, seed: int | None = None, options: Info | None = None) -> tuple[object, Info]:
        self.count = 0
        self.chance = np.random.default_rng(self.number if seed is None else seed)
        return self._state(), {"seed": seed, "options": options}

    def step(self, action: Action) -> SteppedEnv:
        terminated, truncated = self._advance()
        reward = np.array([self.number, float(np.sum(action))])
        return self._state(), reward, terminated, truncated, {"action": action}


class Tensors(Numbered):
    """An env without spaces. Every state is the same torch tensor, overwritten in place. ``reset`` returns no info."""

    def prepare(self) -> None:
        import torch

        self.state = torch.zeros(3)

    def reset(self, seed: int | None = None) -> object:
        self.count = 0
        self.state.fill_(float(self.number) + (seed or 0))
        return self.state

    def step(self, action: float) -> SteppedEnv:
        terminated, truncated = self._advance()
        self.state.add_(float(action))
        return self.state, float(self.state[0]), terminated, truncated, {}


# ---------------------------------------------------------------- attributes and methods

SHARED_INFO: Info = {}
"""The info of every step of all `Toolbox` envs in one process. A reset replaces its contents."""


class Toolbox(Counter):
    """An env with methods of many kinds, and an attribute that exists only if the env's number is odd."""

    def prepare(self) -> None:
        super().prepare()
        self.part = Component(self.number * 10)
        self.notes: list[str] = []
        self.box: Any = None
        if self.number % 2:
            self.extra = f"extra{self.number}"

    def _info(self) -> Info:
        if self.count:
            return SHARED_INFO
        SHARED_INFO.update(list=[1, 2], array=np.zeros(2))
        return super()._info()

    def name(self, sleep: float = 0.0, prefix: str = "env") -> str:
        time.sleep(sleep)
        self.notes.append("name")
        return f"{prefix}{self.number}"

    def spoil(self, items: list[int], array: Array) -> int:
        """Modify both arguments, keep a reference to the list, and return the list's length."""
        items.append(self.number)
        array[:] = self.number
        self.box = items
        return len(items)

    def own_box(self) -> object:
        return self.box

    def uncopyable(self, only: int = 0) -> object:
        """If this env's number is ``only``, return an object that cannot be copied; otherwise, return the number."""
        return (item for item in range(1)) if self.number == only else self.number

    def render(self) -> Any:
        return np.full((2, 2, 3), self.number, np.uint8)

    def say(self, text: str) -> None:
        print(f"{text} {self.number}")  # noqa: T201 (the tests check that it reaches the caller)


@dataclass
class Component:
    """An object inside an env."""

    level: int

    def double(self, by: int = 2) -> int:
        return self.level * by


class Wrapped(gymnasium.Wrapper[State, Action, State, Action]):
    """A wrapper that halves rewards and has its own attribute and method."""

    def __init__(self, env: Env, label: str = "outer") -> None:
        super().__init__(env)
        self.label = label

    def step(self, action: Action) -> SteppedEnv:
        state, reward, *rest = self.env.step(action)
        return state, float(reward) / 2, *rest

    def shout(self) -> str:
        return self.label.upper()


def wrapped_toolbox(number: int, length: int = 4) -> Wrapped:
    """Return a `Toolbox` in two wrappers."""
    return Wrapped(Wrapped(Toolbox(number, length), "inner"))


# ---------------------------------------------------------------- worker info and shared arrays


class InfoEnv(Counter):
    """An env that calls `get_worker_info` in its constructor, in ``reset`` and in ``step``.

    ``told`` holds the results as tuples.
    """

    def __init__(self) -> None:
        self.told: Info = {"made": self._facts()}
        super().__init__(self.told["made"][0])

    def _facts(self) -> tuple[int | None, ...] | None:
        info = get_worker_info()  # not kept in `self`, because it refers to the shared arrays
        if info is None:
            return None
        return info.env_id, info.num_envs, info.worker_id, info.num_workers, info.seed

    def _state(self) -> object:
        self.told["step" if self.count else "reset"] = self._facts()
        return super()._state()

    def ask(self) -> Info:
        """Return a copy of ``told`` that also has the worker infos found in this call and in a new thread."""
        told = {**self.told, "asked": self._facts()}
        thread = threading.Thread(target=lambda: told.update({"in a thread": self._facts()}))
        thread.start()
        thread.join()
        return told

    def look(self) -> Info:
        """Try to overwrite the shared arrays; then return copies of them."""
        info: Any = get_worker_info()
        for array in info.shared.values():
            with contextlib.suppress(ValueError):
                array[...] = 0
        return {name: array.copy() for name, array in info.shared.items()}


# ---------------------------------------------------------------- failures, records and waits


class TroubleError(Exception):
    """An exception that pickle alone cannot copy. The constructor takes two arguments, but ``args`` has only one."""

    def __init__(self, number: int, where: str) -> None:
        super().__init__(f"{where} of {number}")
        self.number = number


class FailingEnv(Toolbox):
    """An env that raises errors in ``where``: ``"init"``, ``"reset"``, ``"step"``, ``"method"``, or ``""`` for nowhere.

    Each error is a `TroubleError`, unless `method` is asked for another kind. With ``"step"``, the second step of an
    episode raises the error. After an error in a reset or step, the env raises no more errors.
    """

    def __init__(self, number: int = 0, where: str = "", length: int = 50) -> None:
        super().__init__(number, length)
        self.where = where
        if where == "init":
            raise TroubleError(number, "init")

    def _state(self) -> object:
        where = "step" if self.count else "reset"
        if self.where == where and self.count != 1:
            self.where = ""
            raise TroubleError(self.number, where)
        return super()._state()

    def method(self, kind: str = "plain") -> int:
        """Return the env's number or, if ``where`` is ``"method"``, raise an exception.

        Args:
            kind: ``"plain"`` raises a `TroubleError`; ``"uncopyable"`` raises one with an attribute that cannot be
                copied. ``"exit"`` raises a `SystemExit`.
        """
        if self.where != "method":
            return self.number
        error = SystemExit(3) if kind == "exit" else TroubleError(self.number, "method")
        if kind == "uncopyable":
            error.guilty = (item for item in range(1))  # type: ignore[union-attr]
        raise error


class Witness(Counter):
    """An env that writes a line to the file ``<folder>/<number>`` whenever it is made, reset, stepped or closed."""

    def __init__(self, number: int, folder: str, length: int = 50) -> None:
        super().__init__(number, length)
        self.path = Path(folder) / str(number)
        self._write("made")

    def _write(self, word: str) -> None:
        with self.path.open("a") as file:
            file.write(f"{word}\n")

    def _state(self) -> object:
        self._write("stepped" if self.count else "reset")
        return super()._state()

    def close(self) -> None:
        """Write a line, then raise an error, which the caller must ignore."""
        self._write("closed")
        raise RuntimeError("close() fails")


class Sleeper(Counter):
    """An env that sleeps in each step and in `nap`.

    The action is the time that a step sleeps, in hundredths of a second.
    """

    action_space = Discrete(1000)

    def _reward(self, action: int) -> float:
        time.sleep(int(action) / 100)
        return super()._reward(action)

    def nap(self, sleep: float, answer: str) -> str:
        time.sleep(sleep)
        return f"{answer}{self.number}"

    def process(self) -> int:
        return os.getpid()


class Gated(Counter):
    """An env that waits until the path ``gate`` exists, in a step with action 1, and in `pass_gate` on request.

    It does not wait in the process and thread ``caller``, because there nothing could create the path.
    """

    action_space = Discrete(2)

    def __init__(self, number: int, gate: str, caller: tuple[int, int], length: int = 50) -> None:
        super().__init__(number, length)
        self.gate, self.caller, self.has_waited = Path(gate), caller, False

    def _reward(self, action: int) -> float:
        self.pass_gate(waits=action == 1)
        return super()._reward(action)

    def pass_gate(self, answer: str = "", *, waits: bool = False) -> str:
        if waits and place() != self.caller:
            self.has_waited = True
            give_up_at = time.monotonic() + GATE_PATIENCE
            while not self.gate.exists() and time.monotonic() < give_up_at:
                time.sleep(0.01)
        return f"{answer}{self.number}"


def place() -> tuple[int, int]:
    """Return the ids of the process and the thread that call this function."""
    return os.getpid(), threading.get_ident()


class Interrupter(Counter):
    """An env whose actions are process ids: a step interrupts that process as Ctrl-C would, and then sleeps.

    With the action 0, a step does neither.
    """

    action_space = Discrete(2**31)

    def _reward(self, action: int) -> float:
        if action == os.getpid():  # the env is in the caller's process
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
        elif action:
            os.kill(int(action), signal.SIGINT)
        time.sleep(0.3 if action else 0.0)
        return super()._reward(0)
