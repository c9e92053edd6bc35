"""Where an env is: what it may ask while it is made, reset or stepped."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Protocol, TypeVar

from parallelenv.contract.batch import Array

_Value = TypeVar("_Value")


@dataclass(frozen=True, slots=True)
class WorkerInfo:
    """What an env may know of where it is.

    Attributes:
        env_id: Its id.
        num_envs: Number of envs of its `ParallelEnv`.
        worker_id: Number of its worker, from 0.
        num_workers: Number of workers.
        seed: Of its latest reset that had one. Before that, what `ParallelEnv` was made with, plus the env id;
            ``None`` if that is nothing.
        shared: The arrays that `ParallelEnv` was made with, read-only, one and the same in all workers.
    """

    env_id: int
    num_envs: int
    worker_id: int
    num_workers: int
    seed: int | None
    shared: Mapping[str, Array]


class Asked(Protocol):
    """What knows which env it is at."""

    @property
    def current(self) -> int | None:
        """The env whose turn it is."""
        ...

    def describe(self, env_id: int) -> WorkerInfo:
        """Return what this env may know."""
        ...


def get_worker_info() -> WorkerInfo | None:
    """Return where the env is whose constructor, reset, step or other method is running in this thread.

    So envs share data out among them: ``files[info.env_id :: info.num_envs]``. Envs are told apart also where several
    live in one worker. In threads that an env has started itself nobody knows whose they are.

    Returns:
        A `WorkerInfo`; ``None`` outside of envs.
    """
    frame = inspect.currentframe()
    while frame is not None and frame.f_code is not call_for.__code__:
        frame = frame.f_back
    if frame is None:
        return None
    host: Asked = frame.f_locals["host"]
    env_id = host.current
    return None if env_id is None else host.describe(env_id)


def call_for(host: Asked, call: Callable[[], _Value]) -> _Value:
    """Call a function. While it runs, `get_worker_info` asks this host.

    It finds the host on the call stack. A variable would have to be set and put back, and Ctrl-C can come between any
    two bytecodes: a host would then answer for ever. A call leaves the stack however it ends.
    """
    return call()


class Trial:
    """Answers for an env that is tried before it has a host.

    Args:
        env_id: Its id.
        num_envs: Number of envs.
        seed: What `ParallelEnv` is to be made with.
        shared: Likewise, read-only.
    """

    def __init__(self, env_id: int, num_envs: int, seed: int | None, shared: Mapping[str, Array]) -> None:
        self.current = env_id
        self._num_envs = num_envs
        self._seed = seed
        self._shared = shared

    def describe(self, env_id: int) -> WorkerInfo:
        """Return what it will know of where it is, if there is one worker."""
        seed = None if self._seed is None else self._seed + env_id
        return WorkerInfo(env_id, self._num_envs, 0, 1, seed, MappingProxyType(dict(self._shared)))
