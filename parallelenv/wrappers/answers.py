"""Answers of a step as wrappers need them: who acted, their states alone, and all of it put together again."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import gymnasium
import numpy as np
from gymnasium import spaces
from gymnasium.vector.utils import concatenate, create_empty_array

from parallelenv.answers import Align
from parallelenv.batch import Array, has_true
from parallelenv.chunks import map_leaves
from parallelenv.errors import EnvContractError, ParallelEnvError, SpacesError
from parallelenv.results import StepBatch, StepResult
from parallelenv.spaces import Structure, describe_value, object_array, stack_values

Space: TypeAlias = "gymnasium.Space[Any] | None"


class Acting:
    """Those envs of an answer that were stepped; the others rest, and have neither a state nor a reward.

    Args:
        result: The answer.
        space: Of its states.

    Attributes:
        result: The answer.
        positions: ``(k,)`` int64, their places in the answer.
        env_ids: ``(k,)`` int64.
        states: Theirs, batched.
        dones: ``(k,)`` bool.
        infos: ``(k,)`` object array: the very dicts of the answer.
    """

    def __init__(self, result: StepResult, space: Space) -> None:
        self.result = result
        count = len(result.dones)
        resting = _resting(result)
        self._is_whole = not resting
        # A slice, of which numpy makes views, saves a step 5 us.
        acting = [place for place in range(count) if place not in resting] if resting else slice(None)
        self.positions: Array = np.arange(count)[acting]
        self.env_ids: Array = result.env_ids[acting]
        self.dones: Array = result.dones[acting]
        self.infos: Array = result.infos[acting]
        self.states = result.states if self._is_whole else batch_of(space, result.states[acting].tolist())

    @property
    def is_nobody(self) -> bool:
        """Whether envs were asked, and all of them rest."""
        return not self._is_whole and not len(self.positions)

    @property
    def mended(self) -> Array:
        """``(k,)`` bool: who failed and was built anew. Its state is a first one, and its reward none that it gave."""
        if not has_true(self.dones):  # a failure that was mended ends an episode
            return np.zeros(len(self.dones), dtype=bool)
        return np.array([isinstance(info.get("failure"), BaseException) for info in self.infos], dtype=bool)

    def rewards(self, who_asks: str) -> Array:
        """Return their rewards, ``(k,)`` float64.

        Raises:
            EnvContractError: If one is no number; ``error.partial`` is the answer.
        """
        rewards = self.result.rewards
        if rewards.dtype != object:
            plain: Array = rewards[self.positions]
            return plain
        for env_id, reward in zip(self.env_ids.tolist(), rewards[self.positions], strict=True):
            if not isinstance(reward, (int, float, np.number)):
                error = EnvContractError(
                    f"{who_asks} needs rewards that are numbers; that of env {env_id} is {describe_value(reward)}."
                )
                raise carrying(self.result, error)
        return np.array(rewards[self.positions].tolist(), dtype=np.float64)

    def with_states(self, states: Any) -> StepResult:
        """Return the answer with these in the place of their states."""
        if self._is_whole:
            return _replaced(self.result, states, self.result.rewards)
        rows: list[Any] = [None] * len(self.result.dones)
        for row, place in enumerate(self.positions.tolist()):
            rows[place] = row_of(states, row)
        return _replaced(self.result, object_array(rows), self.result.rewards)

    def with_rewards(self, rewards: Array) -> StepResult:
        """Return the answer with these in the place of their rewards."""
        if self._is_whole:
            return _replaced(self.result, self.result.states, rewards)
        completed = self.result.rewards.copy()
        for place, reward in zip(self.positions.tolist(), rewards.tolist(), strict=True):
            completed[place] = reward
        return _replaced(self.result, self.result.states, completed)


def _resting(result: StepResult) -> set[int]:
    """Return the places of envs that were asked, but rest: they answer ``(None, None, True, {})``."""
    states, rewards = result.states, result.rewards
    if rewards.dtype != object or not isinstance(states, np.ndarray) or states.dtype != object:
        return set()
    return {
        place
        for place, (state, reward) in enumerate(zip(states, rewards, strict=True))
        if state is None and reward is None
    }


def _replaced(result: StepResult, states: Any, rewards: Array) -> StepResult:
    return StepResult(states, rewards, result.dones, result.infos, result.terminated, result.truncated, result.env_ids)


def row_of(states: Any, row: int) -> Any:
    """Return one state of a batch of arrays."""
    return map_leaves(states, lambda leaf: leaf[row])


def batch_of(space: Space, states: Sequence[Any]) -> Any:
    """Return single states as a batch."""
    if space is None:
        return stack_values(states)
    empty: Any = create_empty_array(space, len(states))
    return concatenate(space, states, empty) if states else empty


def aligned(result: StepResult, align: Align, space: Space) -> StepResult | StepBatch:
    """Return an answer in the shape that was asked for. ``space``: of its states.

    Raises:
        SpacesError: If the states are not like the space.
    """
    if align == "item":
        return result
    rows = _unstacked(result, Structure(space))
    items = list(zip(rows, result.rewards.tolist(), result.dones.tolist(), result.infos.tolist(), strict=True))
    return StepBatch(items, terminated=result.terminated, truncated=result.truncated, env_ids=result.env_ids)


def _unstacked(result: StepResult, structure: Structure) -> list[Any]:
    """Return one state per env: copies, for with ``copy=False`` those of the batch may be views."""
    states = result.states
    if isinstance(states, np.ndarray) and states.dtype == object:
        return list(states)
    try:
        leaves = structure.split(states)
    except (LookupError, TypeError) as error:
        raise SpacesError(
            f"A wrapper answers states that are not like its observation_space, {structure.space} "
            f"({type(error).__name__}: {error}). Give StateWrapper the space of what process() returns."
        ) from None
    return [structure.join([_copied(leaf[row]) for leaf in leaves]) for row in range(len(result.dones))]


def _copied(value: Any) -> Any:
    return value.copy() if isinstance(value, np.ndarray) else value


def carrying(result: Any, error: ParallelEnvError) -> ParallelEnvError:
    """Return an error that carries an answer, so that it is not lost with it."""
    error.partial = result  # type: ignore[attr-defined]
    return error


def with_leaves(space: gymnasium.Space[Any], change: Any, path: str = "") -> gymnasium.Space[Any]:
    """Return a space whose leaves are changed.

    Args:
        space: The space.
        change: Called with each leaf and where it lies, as `Structure.describe` says it; returns another one.
        path: Where the space itself lies.
    """
    if type(space) is spaces.Dict:
        return spaces.Dict({key: with_leaves(part, change, f"{path}[{key!r}]") for key, part in space.spaces.items()})
    if type(space) is spaces.Tuple:
        return spaces.Tuple([with_leaves(part, change, f"{path}[{index}]") for index, part in enumerate(space.spaces)])
    return change(space, path)  # type: ignore[no-any-return]
