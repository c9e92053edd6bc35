"""Facts that an env can query about itself and its worker while one of its methods runs."""

from __future__ import annotations

import functools
import inspect
import os
import platform
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import CodeType
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar, cast

from parallelenv.contract.interrupts import Ignore

if TYPE_CHECKING:
    from parallelenv.contract.batch import Array

_Value = TypeVar("_Value")
_Function = TypeVar("_Function", bound=Callable[..., Any])


@dataclass(frozen=True, slots=True)
class WorkerInfo:
    """Facts about an env and its worker."""

    env_id: int  #: The env's id.
    num_envs: int  #: Number of envs of its `ParallelEnv`.
    worker_id: int  #: Index of its worker, from 0.
    num_workers: int  #: Number of workers.
    #: Seed of the env's latest reset with a seed; before that, the seed of the `ParallelEnv` plus the env id, or
    #: ``None`` if it has no seed.
    seed: int | None
    shared: Mapping[str, Array]  #: The read-only arrays given to the `ParallelEnv`, shared by all workers.


def get_worker_info() -> WorkerInfo | None:
    """Return the facts about the env whose constructor, reset, step or other method is running in this thread.

    With these facts, envs can divide data among themselves: ``files[info.env_id :: info.num_envs]``. Each env gets its
    own facts, even if envs share a worker. Outside envs, and in threads that an env started itself, the result is
    ``None``.
    """
    host: Any = next(running_hosts(), None)
    return None if host is None or host.current is None else cast("WorkerInfo", host.describe(host.current))


def running_hosts() -> Iterator[object]:
    """Yield the hosts that are executing a command in this thread, innermost first.

    There are several if an env has a `ParallelEnv` of its own.
    """
    frame = inspect.currentframe()
    while frame is not None:
        if frame.f_code in _CALLERS_OF_ENVS:
            yield frame.f_locals[frame.f_code.co_varnames[0]]
        frame = frame.f_back


HOST_THREADS: set[int] = set()
"""Ids of the threads that do nothing but execute the commands of a host."""
_CALLERS_OF_ENVS: set[CodeType] = set()
"""Code objects of the functions in whose frames `running_hosts` finds the host."""


def calls_envs(function: _Function) -> _Function:
    """Mark a function whose first argument is a host. While it runs, the host is one of the `running_hosts`.

    `running_hosts` finds the host on the call stack, because Python removes a call from the stack no matter how the
    call ends. If a variable held the host instead, Ctrl-C could prevent the variable from being reset.
    """
    _CALLERS_OF_ENVS.add(function.__code__)
    return function


@calls_envs
def call_for(host: object, call: Callable[[], _Value]) -> _Value:
    """Call a function. While it runs, ``host`` is one of the `running_hosts`."""
    return call()


class ProcessInfo(NamedTuple):
    """The process in which an env runs: its id (0 if unknown) and the name of its machine."""

    pid: int = 0
    machine: str = ""

    @property
    def is_near(self) -> bool:
        """True if the process runs on this machine."""
        return self.pid > 0 and self.machine == platform.node()

    def memory(self) -> int | None:
        """Return the memory that the process uses, in bytes, or ``None`` if it is unknown.

        A page that n processes share counts as 1/n of a page.
        """
        with Ignore(OSError, UnicodeDecodeError):  # ended, another user's process, or not Linux
            if self.is_near:
                text = Path(f"/proc/{self.pid}/smaps_rollup").read_text(encoding="ascii")
                found = re.search(r"^Pss:\s+(\d+) kB", text, re.MULTILINE)
                return int(found[1]) * 1024 if found else None
        return None


UNKNOWN_PROCESS = ProcessInfo()


def this_process() -> ProcessInfo:
    """Return information about this process."""
    return ProcessInfo(os.getpid(), platform.node())


@functools.cache
def clock_id() -> str:
    """Return an id that is equal in two processes if and only if `time.perf_counter` reads the same clock in both."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:  # not Linux
        return platform.node()
