"""An env that causes a fault on request."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
import threading
import time
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
from fragile import Fragile, TwoArguments

NUM_ENVS = 4
ACTIONS = (
    *("go", "wait", "hang_stubbornly", "hang_with_the_lock", "fall", "raise_interrupt", "leave", "crash"),
    *("hand_out_lock", "hand_out_much", "close_stdin"),
)
"""The deeds of a step: see `Faulty.do`."""
LARGE = 1 << 27
"""Bytes of a result that takes a while to send."""
_FOR_EVER = 60.0
"""Seconds after which a waiting env continues anyway, so that a failed test leaves nothing behind."""


class Faulty(Fragile):
    """Causes the fault that its action, the options of a reset, or a call of `do` names; it reports events by files.

    Args:
        number: The index of the env; its state starts with it.
        folder: For the files ``began-0`` (which contains the process id), ``closed-0`` and ``go``.
        birth: The fault in the constructor.
        end: The fault in `close`.
    """

    action_space = gym.spaces.Discrete(len(ACTIONS))

    def __init__(self, number: int, folder: str, birth: str = "go", end: str = "go") -> None:
        super().__init__(number, folder)
        self.end = end
        self.lock = threading.Lock()
        self.do(birth)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        if options:
            self.do(options["do"])
        return super().reset(seed=seed)

    def step(self, action: Any) -> Any:
        result = self.do(action if isinstance(action, str) else ACTIONS[action])
        self.steps += 1
        return self._state(), 1.0, False, False, {} if result is None else {"said": result}

    def close(self) -> None:
        self._tell("closed")
        self.do(self.end)

    def do(self, what: str) -> Any:
        return getattr(self, what)()

    def _tell(self, what: str) -> None:
        """Create a file atomically."""
        draft = Path(self.folder, f"{what}-{self.number}-draft")
        draft.write_text(str(os.getpid()))
        draft.rename(Path(self.folder, f"{what}-{self.number}"))

    def go(self) -> None: ...

    def wait(self) -> None:
        self._tell("began")
        deadline = time.monotonic() + _FOR_EVER
        while not Path(self.folder, "go").exists() and time.monotonic() < deadline:
            time.sleep(0.005)

    def hang_stubbornly(self) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        self.wait()

    def hang_with_the_lock(self) -> None:
        """Sleep in C code that holds the GIL, as most C code does."""
        self._tell("began")
        ctypes.PyDLL(None).sleep(int(_FOR_EVER))

    def fall(self) -> None:
        raise ZeroDivisionError(f"env {self.number} fell over")

    def raise_two(self) -> None:
        raise TwoArguments("first", "second")

    def raise_exit(self) -> None:
        raise SystemExit(3)

    def raise_interrupt(self) -> None:
        raise KeyboardInterrupt

    def recurse(self) -> None:
        self.recurse()

    def leave(self) -> None:
        os._exit(7)

    def crash(self) -> None:
        ctypes.string_at(0)

    def hand_out_lock(self) -> Any:
        return self.lock

    def hand_out_much(self) -> Any:
        much = np.zeros(LARGE, np.uint8)
        self._tell("began")
        return much

    def close_stdin(self) -> None:
        if sys.stdin is not None:
            sys.stdin.close()
        with contextlib.suppress(OSError):  # that may have closed it already
            os.close(0)


class Loose(Faulty):
    """An env without an action space of fixed shape."""

    action_space = gym.spaces.Text(20)  # type: ignore[assignment]


class Vast(Faulty):
    """An env whose states exceed the memory of any machine."""

    observation_space = gym.spaces.MultiBinary(1 << 45)  # type: ignore[assignment]


def faulty(folder: Path, kind: type[Faulty] = Faulty, number: int = -1, **keywords: Any) -> list[Any]:
    """Return env fns; that of env ``number`` gets these keywords."""
    return [partial(kind, env_id, str(folder), **(keywords if env_id == number else {})) for env_id in range(NUM_ENVS)]


def actions(*words: str) -> np.ndarray[Any, Any]:
    """Return the actions of all envs; envs without a given fault just step."""
    numbers = [ACTIONS.index(word) for word in words]
    return np.array(numbers + [0] * (NUM_ENVS - len(numbers)))
