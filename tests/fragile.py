"""Envs that fail, wait and exit according to their actions, and helpers for tests that use them."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
from faults.envs import Holding, OnlyKeywords, TwoArguments

GO_ON, RAISE, WAIT, EXIT = range(4)


class Fragile(gym.Env[Any, Any]):
    """Acts according to its action; its state has its number and its step count."""

    observation_space = gym.spaces.Box(-np.inf, np.inf, (2,), np.float64)
    action_space = gym.spaces.Discrete(4)

    def __init__(self, number: int, folder: str = "") -> None:
        self.number = number
        self.folder = folder
        self.steps = 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        super().reset(seed=seed)
        self.steps = 0
        return self._state(), {}

    def _state(self) -> Any:
        return np.array([self.number, self.steps], float)

    def step(self, action: Any) -> Any:
        if action == WAIT:
            self.wait()
        self.steps += 1
        if action == RAISE:
            raise ZeroDivisionError(f"env {self.number} fell over")
        if action == EXIT:
            os._exit(7)
        return self._state(), 1.0, False, False, {}

    def wait(self) -> None:
        """Signal the start, and wait for a file."""
        # in `touch` an interrupt would leave a file open
        Path(self.folder, f"began-{self.number}").mkdir(exist_ok=True)
        deadline = time.monotonic() + 30
        while not Path(self.folder, "go").exists() and time.monotonic() < deadline:
            time.sleep(0.01)

    def pid(self) -> int:
        return os.getpid()

    def raise_this(self, kind: str) -> None:
        errors: dict[str, BaseException] = {
            "two": TwoArguments("a", "b"),
            "keyword": OnlyKeywords(code=4),
            "holding": Holding(),
            "exit": SystemExit(3),
            "os": FileNotFoundError(2, "gone", "level.txt"),
        }
        raise errors[kind]

    def chain(self) -> None:
        try:
            self.raise_this("os")
        except FileNotFoundError as error:
            raise RuntimeError("no level") from error


def fragile(folder: Path) -> list[Any]:
    return [partial(Fragile, number, str(folder)) for number in range(4)]


@contextmanager
def when_begun(folder: Path, number: int, act: Callable[[], None]) -> Iterator[None]:
    """Run ``act`` in a thread as soon as env ``number`` waits in its step."""
    with when_exists(folder / f"began-{number}", act):
        yield


@contextmanager
def when_exists(mark: Path, act: Callable[[], Any]) -> Iterator[None]:
    """Run ``act`` in a thread as soon as there is a folder, which is removed first."""
    if mark.exists():
        mark.rmdir()

    def watch() -> None:
        deadline = time.monotonic() + 30
        while not mark.exists() and time.monotonic() < deadline:
            time.sleep(0.005)
        act()

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield
    finally:
        thread.join()


def interrupt() -> None:
    os.kill(os.getpid(), signal.SIGINT)
