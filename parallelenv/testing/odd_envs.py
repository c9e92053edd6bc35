"""Envs of the suite with methods, shared objects, exceptions, sleeps or records."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
from gymnasium.spaces import Discrete

from parallelenv.testing.envs import Counter, SteppedEnv

SHARED_INFO: dict[str, Any] = {"list": [1, 2], "array": np.zeros(2)}
"""In the infos of all envs of one process. A reset makes a new one, in case it was overwritten."""


class Toolbox(Counter):
    """Methods of all kinds."""

    def __init__(self, number: int = 0, length: int = 4) -> None:
        super().__init__(number, length)
        self.part = Component(number)
        self.notes: list[Any] = []
        self.box: Any = None

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Begin an episode."""
        SHARED_INFO.update(list=[1, 2], array=np.zeros(2))
        return super().reset(seed=seed, options=options)

    def step(self, action: int) -> SteppedEnv:
        """Return the info shared by all envs."""
        state, reward, terminated, truncated, _ = super().step(action)
        return state, reward, terminated, truncated, SHARED_INFO

    def name(self, sleep: float = 0.0, prefix: str = "env") -> str:
        """Return the env's name after ``sleep`` seconds."""
        time.sleep(sleep)
        self.notes.append("name")
        return f"{prefix}{self.number}"

    def nothing(self) -> None:
        """Return nothing."""

    def spoil(self, items: list[Any], array: Any) -> int:
        """Change the arguments, and keep them."""
        items.append(self.number)
        array[:] = self.number
        self.box = items
        return len(items)

    def shared(self) -> dict[str, Any]:
        """Return an object that other envs also return."""
        return SHARED_INFO

    def own_notes(self) -> list[Any]:
        """Return a list that the env keeps."""
        return self.notes

    def uncopyable(self, only: int = 0) -> Any:
        """Return something that cannot be copied, if this is the env ``only``."""
        return (item for item in range(1)) if self.number == only else self.number

    def render(self) -> Any:
        """Return a frame in the env's own grey."""
        return np.full((2, 2, 3), self.number, np.uint8)

    def grow(self, size: int) -> Any:
        """Return an array of ``size`` numbers."""
        return np.full(size, float(self.number))


class Spaceless(Toolbox):
    """Declares no spaces: its states and actions are sent as objects."""

    observation_space: Any = None
    action_space: Any = None


class OnlySome(Counter):
    """A method and an attribute that only some envs have."""

    def __init__(self, number: int = 0, length: int = 4) -> None:
        super().__init__(number, length)
        self.calls = 0
        if number % 2:
            self.extra = f"extra{number}"
            self.rare = self._rare

    def _rare(self) -> int:
        self.calls += 1
        return self.number


class Component:
    """An object inside an env."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.level = number * 10

    def double(self, by: int = 2) -> int:
        """Return a multiple of the number."""
        return self.number * by


class Wrapped(gymnasium.Wrapper[Any, Any, Any, Any]):
    """A wrapper with an attribute and a method of its own that changes the reward."""

    def __init__(self, env: Any, label: str = "outer") -> None:
        super().__init__(env)
        self.label = label
        self.steps = 0

    def step(self, action: Any) -> SteppedEnv:
        """Count the steps and halve the reward."""
        self.steps += 1
        state, reward, terminated, truncated, info = self.env.step(action)
        return state, float(reward) / 2, terminated, truncated, info

    def shout(self) -> str:
        """Return the label in capitals."""
        return self.label.upper()


class TroubleError(Exception):
    """A user's exception whose constructor takes two arguments."""

    def __init__(self, number: int, where: str) -> None:
        super().__init__(f"{where} of {number}")
        self.number = number


class KeywordTroubleError(Exception):
    """A user's exception whose constructor takes keywords."""

    def __init__(self, *, number: int) -> None:
        super().__init__("keywords")
        self.number = number


class UncopyableError(Exception):
    """An exception that cannot be pickled."""

    def __init__(self) -> None:
        super().__init__("cannot be copied")
        self.guilty = (item for item in range(1))


class FailingEnv(Counter):
    """Raises in the given place.

    Args:
        number: Number of the env.
        where: ``"init"``, ``"reset"``, ``"step"`` (the second), ``"method"`` or ``"quiet"``.
    """

    def __init__(self, number: int = 0, where: str = "", length: int = 50) -> None:
        super().__init__(number, length)
        self.where = where
        if where == "init":
            raise TroubleError(number, "init")

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Begin an episode, or raise."""
        if self.where == "reset":
            raise TroubleError(self.number, "reset")
        return super().reset(seed=seed, options=options)

    def step(self, action: int) -> SteppedEnv:
        """Step, or raise."""
        if self.where == "step" and self.count == 1:
            self.where = ""
            raise TroubleError(self.number, "step")
        return super().step(action)

    def method(self, kind: str = "plain") -> int:
        """Return the number, or raise an exception of the given kind."""
        if self.where == "method":
            kinds: dict[str, BaseException] = {
                "plain": TroubleError(self.number, "method"),
                "keyword": KeywordTroubleError(number=self.number),
                "uncopyable": UncopyableError(),
                "exit": SystemExit(3),
            }
            raise kinds[kind]
        return self.number

    def quiet(self) -> None:
        """Return nothing, or raise."""
        if self.where == "quiet":
            raise TroubleError(self.number, "quiet")


class Witness(Counter):
    """Writes a line into a file whenever it is made, reset, stepped or closed.

    Args:
        number: Number of the env.
        folder: Folder of its file ``<number>``.
        length: Steps of an episode.
    """

    def __init__(self, number: int, folder: str, length: int = 50) -> None:
        super().__init__(number, length)
        self.path = Path(folder) / str(number)
        self._write("made")

    def _write(self, word: str) -> None:
        with self.path.open("a") as file:
            file.write(f"{word}\n")

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Begin an episode."""
        self._write("reset")
        return super().reset(seed=seed, options=options)

    def step(self, action: int) -> SteppedEnv:
        """Step."""
        self._write("stepped")
        return super().step(action)

    def close(self) -> None:
        """Close, and fail, which must not matter."""
        self._write("closed")
        raise RuntimeError("close() fails")


class Sleeper(Counter):
    """Sleeps during a step or method as long as requested.

    The action is in hundredths of a second.
    """

    action_space = Discrete(1000)

    def step(self, action: int) -> SteppedEnv:
        """Sleep and step."""
        time.sleep(int(action) / 100)
        return super().step(action)

    def nap(self, sleep: float, answer: str) -> str:
        """Sleep and return the answer."""
        time.sleep(sleep)
        return f"{answer}{self.number}"

    def process(self) -> int:
        """Return the id of its process."""
        return os.getpid()


class Interrupter(Counter):
    """Interrupts the process whose id is its action, and then sleeps."""

    action_space = Discrete(2**31)

    def step(self, action: int) -> SteppedEnv:
        """Step; if the action is not 0, interrupt as Ctrl-C does."""
        if action == os.getpid():  # a thread, or the caller itself
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
        elif action:
            os.kill(int(action), signal.SIGINT)
        time.sleep(0.3 if action else 0.0)
        return super().step(0)
