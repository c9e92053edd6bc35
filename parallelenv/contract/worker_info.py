"""What an env can query about its worker while it is made, reset or stepped."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import CodeType
from typing import Any, TypeVar

from parallelenv.contract.batch import Array

_Value = TypeVar("_Value")
_Function = TypeVar("_Function", bound=Callable[..., Any])


@dataclass(frozen=True, slots=True)
class WorkerInfo:
    """Facts about an env and its worker.

    Attributes:
        env_id: The env's id.
        num_envs: Number of envs of its `ParallelEnv`.
        worker_id: Index of its worker, from 0.
        num_workers: Number of workers.
        seed: Seed of its latest reset that had one; before that, the seed of the `ParallelEnv` plus the env id, or
            ``None`` if it has none.
        shared: The arrays that the `ParallelEnv` was made with, read-only, shared by all workers.
    """

    env_id: int
    num_envs: int
    worker_id: int
    num_workers: int
    seed: int | None
    shared: Mapping[str, Array]


def get_worker_info() -> WorkerInfo | None:
    """Return the facts of the env whose constructor, reset, step or other method is running in this thread.

    Envs can divide data with it: ``files[info.env_id :: info.num_envs]``. It distinguishes envs of the same worker as
    well. In threads that an env started itself, the env is unknown.

    Returns:
        A `WorkerInfo`; ``None`` outside envs.
    """
    frame = inspect.currentframe()
    while frame is not None and frame.f_code not in _CALLERS_OF_ENVS:
        frame = frame.f_back
    if frame is None:
        return None
    host = frame.f_locals[_CALLERS_OF_ENVS[frame.f_code]]
    env_id = host.current
    info: WorkerInfo | None = None if env_id is None else host.describe(env_id)
    return info


_CALLERS_OF_ENVS: dict[CodeType, str] = {}
"""Code of the functions whose frames tell which host calls envs, and their variable that has the host."""


def calls_envs(function: _Function) -> _Function:
    """Mark a function whose first argument is a host. While it runs, `get_worker_info` queries this host.

    The host is found on the call stack. A variable would have to be set and reset, and Ctrl-C between the two would
    leave it set for good. A call leaves the stack however it ends.
    """
    code = function.__code__
    _CALLERS_OF_ENVS[code] = code.co_varnames[0]
    return function


@calls_envs
def call_for(host: Any, call: Callable[[], _Value]) -> _Value:
    """Call a function. While it runs, `get_worker_info` queries this host."""
    return call()
