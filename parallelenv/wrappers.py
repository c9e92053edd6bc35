"""Wrappers around a whole `ParallelEnv`, which see the answers of all envs at once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NoReturn

import gymnasium
import numpy as np
from gymnasium.vector.utils import concatenate, create_empty_array

from parallelenv.chunks import map_leaves
from parallelenv.errors import ArgumentError, MissingMethodError, WrappedError
from parallelenv.results import StepBatch, StepResult
from parallelenv.spaces import batched, object_array, stack_values

if TYPE_CHECKING:
    from parallelenv.answers import Align
    from parallelenv.env import ParallelEnv


class ParallelWrapper:
    """Has everything that the `ParallelEnv` in it has. Override what is to be different.

    Args:
        env: A `ParallelEnv`, or another wrapper.

    Attributes:
        env: What it wraps.
    """

    def __init__(self, env: ParallelEnv | ParallelWrapper) -> None:
        if not hasattr(env, "customized_method"):
            raise ArgumentError(
                f"env={env!r} is no ParallelEnv, and no wrapper of one. Wrap single envs where you make them."
            )
        self.env = env

    @property
    def unwrapped(self) -> ParallelEnv:
        """The `ParallelEnv` without any wrapper."""
        inner = self.env
        return inner.unwrapped if isinstance(inner, ParallelWrapper) else inner

    def reset(self, id: Any = None, *, seed: Any = None, options: Any = None) -> Any:
        """Begin new episodes, as `ParallelEnv.reset`."""
        return self.env.reset(id, seed=seed, options=options)

    def step(self, action: Any, id: Any = None, align: Align = "item") -> Any:
        """Step envs, as `ParallelEnv.step`."""
        return self.env.step(action, id, align)

    def send(self, action: Any, id: Any = None) -> None:
        """Begin a step, as `ParallelEnv.send`."""
        self.env.send(action, id)

    def recv(
        self, min_envs: int = 1, max_envs: int | None = None, timeout: float | None = None, align: Align = "item"
    ) -> Any:
        """Return the results of steps, as `ParallelEnv.recv`."""
        return self.env.recv(min_envs, max_envs, timeout, align)

    async def arecv(
        self, min_envs: int = 1, max_envs: int | None = None, timeout: float | None = None, align: Align = "item"
    ) -> Any:
        """Await the results of steps, as `ParallelEnv.arecv`."""
        return await self.env.arecv(min_envs, max_envs, timeout, align)

    def close(self) -> None:
        """Close the `ParallelEnv`."""
        self.env.close()

    def rollout(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Refuse: it steps beside the envs, where no wrapper is.

        Raises:
            WrappedError: Always.
        """
        self._refuse("rollout")

    def run_episodes(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Refuse, as `rollout` does: it steps the `ParallelEnv` itself."""
        self._refuse("run_episodes")

    def stream(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Refuse, as `run_episodes` does."""
        self._refuse("stream")

    def get_state(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Refuse, as `run_episodes` does."""
        self._refuse("get_state")

    def to_gymnasium(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Refuse, as `rollout` does: an adapter steps the `ParallelEnv` itself."""
        self._refuse("to_gymnasium")

    def to_sb3(self) -> NoReturn:
        """Refuse, as `to_gymnasium` does."""
        self._refuse("to_sb3")

    def to_tianshou(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Refuse, as `to_gymnasium` does."""
        self._refuse("to_tianshou")

    def _refuse(self, call: str) -> NoReturn:
        raise WrappedError(
            f"{call}() would go past {type(self).__name__}. Wrap the single envs instead, or what the other library "
            f"gives; env.unwrapped.{call}() does without this wrapper."
        )

    def __getattr__(self, name: str) -> Any:
        """Return what the wrapped one has of this name."""
        if name.startswith("_") or name == "env":
            raise AttributeError(f"{type(self).__name__} has no attribute {name!r}.")
        return getattr(self.env, name)

    def __len__(self) -> int:
        """Return the number of envs."""
        return len(self.env)

    def __enter__(self) -> ParallelWrapper:
        """Return itself; the end of the ``with`` block closes it."""
        return self

    def __exit__(self, *error: object) -> None:
        """Close."""
        self.close()

    def __repr__(self) -> str:
        """Return one line."""
        return f"<{type(self).__name__} around {self.env!r}>"


class StateWrapper(ParallelWrapper):
    """Base of wrappers that change states: `process` is called with those of all envs that answer.

    Args:
        env: As in `ParallelWrapper`.
        observation_space: The space of a processed state of one env; ``None``: it stays the same.
    """

    def __init__(
        self, env: ParallelEnv | ParallelWrapper, observation_space: gymnasium.Space[Any] | None = None
    ) -> None:
        super().__init__(env)
        self._raw_space = env.single_observation_space
        self.single_observation_space = self._raw_space if observation_space is None else observation_space
        self.observation_space = batched(self.single_observation_space, len(env))

    def process(self, states: Any) -> Any:
        """Return states in another form.

        Called for states of `reset`, `step` and `recv`, without those of envs that have none, and for each
        ``info["ended_state"]``, as a batch of one.

        Args:
            states: Batched as `ParallelEnv.step` gives them; of any number of envs.

        Returns:
            An array whose first axis is that of the envs, or a dict or tuple of such arrays.

        Raises:
            MissingMethodError: If a subclass does not have it.
        """
        raise MissingMethodError(
            f"{type(self).__name__} lacks process(states). Write it: it returns states in another form."
        )

    def reset(self, id: Any = None, *, seed: Any = None, options: Any = None) -> Any:
        """Begin new episodes and return the first states, processed."""
        return self.process(super().reset(id, seed=seed, options=options))

    def step(self, action: Any, id: Any = None, align: Align = "item") -> Any:
        """Step envs, as `ParallelEnv.step`; states are processed."""
        return self._processed(super().step(action, id), align)

    def recv(
        self, min_envs: int = 1, max_envs: int | None = None, timeout: float | None = None, align: Align = "item"
    ) -> Any:
        """Return the results of steps, as `ParallelEnv.recv`; states are processed."""
        return self._processed(super().recv(min_envs, max_envs, timeout), align)

    async def arecv(
        self, min_envs: int = 1, max_envs: int | None = None, timeout: float | None = None, align: Align = "item"
    ) -> Any:
        """Await the results of steps, as `ParallelEnv.arecv`; states are processed."""
        return self._processed(await super().arecv(min_envs, max_envs, timeout), align)

    def _processed(self, result: StepResult, align: Align) -> StepResult | StepBatch:
        states, rewards, dones, infos = result
        count = len(dones)
        for info in infos:
            if info.get("ended_state") is not None:
                info["ended_state"] = _row(self.process(self._batch([info["ended_state"]])), 0)
        missing = [state is None for state in states] if _may_lack(states) else [False] * count
        if any(missing) or align == "batch":
            rows = self._rows(states, missing)
            states = object_array(rows)
        else:
            rows, states = [], self.process(states)
        if align == "batch":
            items = list(zip(rows, rewards.tolist(), dones.tolist(), infos.tolist(), strict=True))
            return StepBatch(items, terminated=result.terminated, truncated=result.truncated, env_ids=result.env_ids)
        return StepResult(states, rewards, dones, infos, result.terminated, result.truncated, result.env_ids)

    def _rows(self, states: Any, missing: Sequence[bool]) -> list[Any]:
        """Return the processed states as one per env, ``None`` where there is none."""
        if any(missing):
            present = [state for state, is_missing in zip(states, missing, strict=True) if not is_missing]
            states = self._batch(present) if present else None
        changed = None if states is None else self.process(states)
        numbers = iter(range(len(missing)))
        return [None if is_missing else _row(changed, next(numbers)) for is_missing in missing]

    def _batch(self, states: Sequence[Any]) -> Any:
        """Return single states as a batch."""
        space = self._raw_space
        if space is None:
            return stack_values(states)
        empty: Any = create_empty_array(space, len(states))
        return concatenate(space, states, empty)


def _may_lack(states: Any) -> bool:
    return isinstance(states, np.ndarray) and states.dtype == object


def _row(states: Any, row: int) -> Any:
    return map_leaves(states, lambda leaf: leaf[row])
