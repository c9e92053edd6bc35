"""The saved state of a `ParallelEnv`, which can be pickled and loaded later."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from parallelenv.contract.batch import Array
from parallelenv.contract.error_text import count
from parallelenv.contract.spaces import Info
from parallelenv.errors import ArgumentError

VERSION = 1


@dataclass(frozen=True)
class Checkpoint:
    """The state of each env's episode.

    The arrays are bool, with one entry per env. ``terminated`` and ``truncated`` are the flags of each env's latest
    step.
    """

    done: Array
    terminated: Array
    truncated: Array
    paused: Array
    fresh: tuple[int, ...]  #: Ids of envs that need a reset.
    reset_infos: tuple[Info, ...]  #: The info of each env's latest reset.
    exhausted: tuple[int, ...] = ()  #: Ids of envs without a further episode. Older saved states lack this field.


@dataclass(frozen=True)
class SavedState:
    """The result of `ParallelEnv.save_state`: plain data, which you can pickle and store with a model's checkpoint."""

    envs: tuple[bytes | None, ...]  #: The state of each env, pickled; ``None`` where it cannot be saved.
    checkpoint: Checkpoint  #: State of the episodes.
    seeds: dict[int, int | None]  #: Seeds of the next resets, by env id.
    asynchronous: str | None  #: The done policy.
    version: int = VERSION  #: Version of this format.

    @property
    def unsaved(self) -> tuple[int, ...]:
        """Ids of envs whose state could not be saved. After `ParallelEnv.load_state` they need a reset."""
        return tuple(env_id for env_id, env in enumerate(self.envs) if env is None)

    def __repr__(self) -> str:
        size = sum(len(env) for env in self.envs if env is not None)
        lost = f", without that of {list(self.unsaved)}" if self.unsaved else ""
        return f"<SavedState of {len(self.envs)} envs, {size:,} bytes{lost}>"


@dataclass(frozen=True)
class WrappedState:
    """What ``save_state`` returns for a wrapper that has a memory of its own: plain data, like `SavedState`."""

    wrapper: str  #: Name of the wrapper's class.
    memory: Info  #: The wrapper's memory.
    state: SavedState | WrappedState  #: The saved state of the wrapped object.

    @property
    def unsaved(self) -> tuple[int, ...]:
        """Ids of envs whose state could not be saved, as in `SavedState.unsaved`."""
        return self.state.unsaved


def check_saved(state: Any, num_envs: int, asynchronous: str | None) -> SavedState:
    """Return ``state`` after checking that a `ParallelEnv` with these arguments can load it.

    Raises:
        ArgumentError: If the state is not a `SavedState`, or has a different number of envs, done policy or format.
    """
    if isinstance(state, WrappedState):
        raise ArgumentError(
            f"The state is of {state.wrapper}, but this is a ParallelEnv, which cannot restore a wrapper's memory. "
            "Load it through the same wrappers, in the same order, as when it was saved."
        )
    if not isinstance(state, SavedState):
        raise ArgumentError(f"state is a {type(state).__name__}. Give the result of save_state().")
    if state.version != VERSION:
        raise ArgumentError(
            f"The state has format {state.version}; this version of parallelenv reads format {VERSION}. Load it with "
            "the version that saved it."
        )
    if len(state.envs) != num_envs:
        raise ArgumentError(f"The state is of {count(len(state.envs), 'env')}, but there are {num_envs}. Make as many.")
    if state.asynchronous != asynchronous:
        raise ArgumentError(
            f"The state was saved with asynchronous={state.asynchronous!r}, but this is a ParallelEnv with "
            f"asynchronous={asynchronous!r}. Make it with the same done policy."
        )
    return state
