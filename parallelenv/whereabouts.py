"""Where an env is: what it may ask while it is made, reset or stepped."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Protocol

from parallelenv.batch import Array
from parallelenv.shared import frozen


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


_here = threading.local()


def get_worker_info() -> WorkerInfo | None:
    """Return where the env is whose constructor, reset, step or other method is running in this thread.

    So envs share data out among them: ``files[info.env_id :: info.num_envs]``. Envs are told apart also where several
    live in one worker. In threads that an env has started itself nobody knows whose they are.

    Returns:
        A `WorkerInfo`; ``None`` outside of envs.
    """
    host: Asked | None = getattr(_here, "host", None)
    env_id = None if host is None else host.current
    return None if host is None or env_id is None else host.describe(env_id)


def enter(host: Asked | None) -> Asked | None:
    """Let a host answer for what runs in this thread from now on; return who has answered so far."""
    before: Asked | None = getattr(_here, "host", None)
    _here.host = host
    return before


class Trial:
    """Answers for an env that is tried before it has a host.

    Args:
        env_id: Its id.
        num_envs: Number of envs.
    """

    def __init__(self, env_id: int, num_envs: int) -> None:
        self.current = env_id
        self._num_envs = num_envs

    def describe(self, env_id: int) -> WorkerInfo:
        """Return what it will know of where it is, if there is one worker."""
        seed, shared = offered()["seed"], offered()["shared"]
        return WorkerInfo(
            env_id, self._num_envs, 0, 1, None if seed is None else seed + env_id, MappingProxyType(shared)
        )


@contextlib.contextmanager
def answering(host: Asked) -> Iterator[None]:
    """Let something answer in this thread for a while."""
    before = None  # if an interrupt comes too early to know
    try:
        before = enter(host)
        yield
    finally:
        enter(before)


@contextlib.contextmanager
def offering(seed: int | None, shared: Mapping[str, Array]) -> Iterator[None]:
    """Let envs that are tried in this thread know what `ParallelEnv` is to be made with."""
    _here.offer = {"seed": seed, "shared": frozen(shared)}
    try:
        yield
    finally:
        del _here.offer


def offered() -> dict[str, Any]:
    """Return what is offered in this thread, by the names of arguments of `ParallelEnv`."""
    nothing: dict[str, Any] = {"seed": None, "shared": {}}
    return getattr(_here, "offer", nothing)
