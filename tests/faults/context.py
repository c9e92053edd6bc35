"""The columns and rows of the fault table, and the context of a cell."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from holdings import survivors
from modes import IN_CALLER, MODES, ON_RAY, ORACLE, PROCESSES, RAY

from faults.caller import Caller
from faults.envs import NUM_ENVS, actions, faulty
from parallelenv import ParallelEnv
from parallelenv.errors import WorkerDiedError

PATIENCE = 10.0
"""Seconds after which a fault that does not happen is given up."""
CLOSE_PATIENCE = 3.3
"""Seconds that `ParallelEnv.close` gives envs to close and workers to exit."""

NO_WORKERS = IN_CALLER  # its envs live in the caller, and die with it
IN_THREAD_OF_CALLER = (ORACLE,)  # a call in the caller's own thread cannot be given up
# Seconds that modes get beyond the promise: Ray took 1.6 s to shut down, and an empty actor 1.7 to 2.7 s to start on a
# busy machine.
ENDS_INTERPRETER = dict.fromkeys(ON_RAY, 2.5)
STARTS_WORKER = {RAY: 2.0}
STARTS_POOL = dict.fromkeys(ON_RAY, 2.0)


@dataclass(frozen=True)
class Column:
    mode: str
    start_method: str = ""

    @property
    def name(self) -> str:
        return f"{self.mode}/{self.start_method}" if self.start_method else self.mode


_START_METHODS = {PROCESSES: ("forkserver", "spawn", "fork")}
COLUMNS = [Column(mode, method) for mode in MODES for method in _START_METHODS.get(mode, ("",))]


@dataclass
class Context:
    """A mode, a folder for the files of the envs, and options; envs made here are closed at the end."""

    column: Column
    folder: Path
    options: dict[str, Any] = field(default_factory=dict)
    _made: list[ParallelEnv] = field(default_factory=list)
    _callers: list[Caller] = field(default_factory=list)

    @property
    def mode(self) -> str:
        return self.column.mode

    def close(self) -> None:
        self.release()
        for env in self._made:
            env.close()
        for caller in self._callers:
            caller.end()

    def make(self, env_fns: list[Any] | None = None, **options: Any) -> ParallelEnv:
        """Return four envs in two workers, which have been reset."""
        start = {"start_method": self.column.start_method} if self.column.start_method else {}
        options = {"num_cpus": 2, **start, **self.options, **options}
        self._made.append(ParallelEnv(env_fns or faulty(self.folder), self.mode, **options))
        self._made[-1].reset()
        return self._made[-1]

    def call(self, program: str, *details: Any, prefix: Sequence[str] = ()) -> Caller:
        """Start an interpreter, with a session of its own, that is the caller of envs."""
        words = [program, self.mode, self.column.start_method, str(self.folder), *map(str, details)]
        caller = Caller(prefix, words, self.folder)
        self._callers.append(caller)
        return caller

    def release(self) -> None:
        (self.folder / "go").touch()

    @property
    def is_process(self) -> bool:
        """Whether workers are processes started here or by one of our actors, whose exit is observed."""
        return PROCESSES in self.mode

    def has(self, what: str, number: int = 0) -> bool:
        return (self.folder / f"{what}-{number}").exists()

    def check_death_error(self, error: BaseException, pid: int, ending: str, env_ids: tuple[int, ...] = (0, 1)) -> None:
        """Check the error about a dead worker that owned the first two envs."""
        assert isinstance(error, WorkerDiedError)
        assert error.env_ids == env_ids
        text = str(error)
        parts = ["The worker of envs 0, 1", f"process {pid}", "is dead", "All other envs continue", "restart([0, 1])"]
        if self.is_process:  # for an actor the message has the text of Ray
            parts.append(ending)
        assert [part for part in parts if part not in text] == [], text

    def rebuild(self, env: ParallelEnv) -> float:
        """Check that the envs of the other worker continue, rebuild those of the first, and step all."""
        assert env.step([0, 0], [2, 3]).states[:, 0].tolist() == [2, 3]
        assert env.restart([0, 1]) == (0, 1)
        return begin_all(env)


@dataclass(frozen=True, eq=False)
class Fault:
    """A row of the table.

    Attributes:
        name: The fault.
        provoke: Provokes it, checks everything that is promised for it, and returns the seconds from the fault
            until all envs were stepped again, or everything that had to end has ended.
        impossible: Modes in which it cannot happen.
        limit: Seconds that are promised, with a timeout of the user's or of `close`.
        more: Seconds that some modes get in addition.
        is_slow: Whether it is left to `make test-all` in every mode.
    """

    name: str
    provoke: Callable[[Context], float]
    impossible: Collection[str] = ()
    limit: float = 1.0
    more: Mapping[str, float] = field(default_factory=dict)
    is_slow: bool = False


FAULTS: list[Fault] = []
Provoke = TypeVar("Provoke", bound=Callable[..., float])


def fault(name: str, *arguments: Any, impossible: Collection[str] = (), **details: Any) -> Callable[[Provoke], Provoke]:
    """Add a function with these arguments to the table."""

    def enter(provoke: Provoke) -> Provoke:
        FAULTS.append(Fault(name, lambda context: provoke(context, *arguments), impossible, **details))
        return provoke

    return enter


def step_all(env: ParallelEnv) -> float:
    """Step every env and return the time at which all had replied."""
    result = env.step(actions())
    moment = time.monotonic()
    assert result.env_ids.tolist() == list(range(NUM_ENVS))
    assert result.states[:, 0].tolist() == list(range(NUM_ENVS))
    assert not result.dones.any()
    return moment


def begin_all(env: ParallelEnv) -> float:
    """Reset and step every env, and return the time at which all had replied."""
    assert env.reset().tolist() == [[number, 0] for number in range(NUM_ENVS)]
    moment = step_all(env)
    assert env.get_env_attr("steps") == [1] * NUM_ENVS
    return moment


def poll(is_true: Callable[[], Any]) -> None:
    deadline = time.monotonic() + PATIENCE
    while not is_true():
        assert time.monotonic() < deadline, is_true
        time.sleep(0.002)


def check_gone(pids: Sequence[int]) -> float:
    """Wait until processes have ended, and return the time."""
    assert survivors(pids, PATIENCE) == []
    return time.monotonic()


def kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)
