"""The context of a case of the fault table, and the decorator that adds it to the table."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any

from fragile import when_begun
from holdings import survivors
from modes import ORACLE, PROCESSES, THREADS

from faults.caller import Caller
from faults.columns import Column, begin_all
from parallelenv import ParallelEnv
from parallelenv.errors import WorkerDiedError

PATIENCE = 10.0
"""Seconds after which a fault that does not happen is given up."""
CLOSE_PATIENCE = 3.3
"""Seconds that `ParallelEnv.close` gives envs to close and workers to exit."""

NO_WORKERS = {ORACLE: "its envs live in the caller", THREADS: "its envs live in the caller"}
IN_THREAD_OF_CALLER = {ORACLE: "a call in the caller's own thread cannot be given up"}


class Context:
    """A mode and a folder; envs made here are closed at the end."""

    def __init__(self, column: Column, folder: Path) -> None:
        self.column = column
        self.mode = column.mode
        self.folder = folder
        self._made: list[ParallelEnv] = []
        self._callers: list[Caller] = []

    def __enter__(self) -> Context:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, frames: TracebackType | None
    ) -> None:
        self.release()
        for env in self._made:
            env.close()
        for caller in self._callers:
            caller.end()

    def make(self, env_fns: list[Any] | None = None, **options: Any) -> ParallelEnv:
        """Return four envs in two workers, which have been reset."""
        env = self.column.make(self.folder, env_fns, **options)
        self._made.append(env)
        env.reset()
        return env

    def call(self, program: str, number: int = 0, prefix: Sequence[str] = ()) -> Caller:
        """Start an interpreter, with a session of its own, that is the caller of envs."""
        caller = Caller(program, self.column, self.folder, number, prefix)
        self._callers.append(caller)
        return caller

    def release(self) -> None:
        """Let waiting envs continue."""
        (self.folder / "go").touch()

    @property
    def is_process(self) -> bool:
        """Whether workers are processes started here or by one of our actors, whose exit is observed."""
        return PROCESSES in self.mode

    def has(self, what: str, number: int = 0) -> bool:
        """Return whether an env has made the file of an event."""
        return (self.folder / f"{what}-{number}").exists()

    @contextmanager
    def once_begun(self, act: Callable[[], None], number: int = 0) -> Iterator[list[float]]:
        """Call a function as soon as an env has started; yield a list that gets the time of the call."""
        moments: list[float] = []

        def note_and_act() -> None:
            moments.append(time.monotonic())
            act()

        with when_begun(self.folder, number, note_and_act):
            yield moments

    def check_death_error(self, error: BaseException, pid: int, ending: str, env_ids: tuple[int, ...] = (0, 1)) -> None:
        """Check the error about a dead worker that owned the first two envs."""
        assert isinstance(error, WorkerDiedError)
        assert error.env_ids == env_ids
        text = str(error)
        parts = ["The worker of envs 0, 1", f"process {pid}", "is dead", "All other envs continue", "restart([0, 1])"]
        if self.is_process:  # for an actor the message has the text of Ray
            parts.append(ending)
        assert [part for part in parts if part not in text] == [], text

    def rebuild(self, env: ParallelEnv, env_ids: Sequence[int] = (0, 1)) -> float:
        """Check that the envs of the other worker continue, rebuild those of the first, and step all."""
        assert env.step([0, 0], [2, 3]).states[:, 0].tolist() == [2, 3]
        assert env.restart(env_ids) == tuple(env_ids)
        return begin_all(env)


@dataclass(frozen=True, eq=False)
class Fault:
    """A row of the table.

    Attributes:
        name: The fault.
        provoke: Provokes it, checks everything that is promised for it, and returns the seconds from the fault
            until all envs were stepped again, or everything that had to end has ended.
        impossible: The reasons why it cannot happen, by mode.
        patience: Seconds that a timeout of the user's, or that of `close`, adds to the limit.
        limit: Seconds that are promised beyond that.
        ends_interpreter: Whether the mode's own services end with the interpreter, which takes additional time.
        replaces: The part that must start before all envs step again, a ``"worker"`` or a ``"pool"``; empty if none.
        is_slow: Whether the everyday tests leave out some columns.
    """

    name: str
    provoke: Callable[[Context], float]
    impossible: Mapping[str, str] = field(default_factory=dict)
    patience: float = 0.0
    limit: float = 1.0
    ends_interpreter: bool = False
    replaces: str = ""
    is_slow: bool = False

    def allowed(self, column: Column) -> float:
        """Return the seconds within which it should be over."""
        own = column.shutdown * self.ends_interpreter + column.startup(self.replaces)
        return self.limit + self.patience + own


FAULTS: list[Fault] = []
Provoke = Callable[[Context], float]


def enter(
    name: str,
    provoke: Callable[..., float],
    *arguments: Any,
    impossible: Mapping[str, str] | None = None,
    **details: Any,
) -> None:
    """Add a row to the table, whose function gets these arguments before the context."""
    FAULTS.append(Fault(name, partial(provoke, *arguments), impossible or {}, **details))


def fault(name: str, impossible: Mapping[str, str] | None = None, **details: Any) -> Callable[[Provoke], Provoke]:
    """Add a function to the table."""

    def decorate(provoke: Provoke) -> Provoke:
        enter(name, provoke, impossible=impossible, **details)
        return provoke

    return decorate


def poll(is_true: Callable[[], Any], patience: float = PATIENCE) -> Any:
    """Call a function until its result is true; return the last result."""
    deadline = time.monotonic() + patience
    while not (answer := is_true()) and time.monotonic() < deadline:
        time.sleep(0.002)
    return answer


def check_gone(pids: Sequence[int], patience: float = PATIENCE) -> float:
    """Wait until processes have ended, and return the time."""
    assert survivors(pids, patience) == []
    return time.monotonic()


def kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)
