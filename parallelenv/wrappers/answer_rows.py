"""Results of a step as wrappers use them: those of envs that acted, taken apart and put together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import gymnasium
import numpy as np
from gymnasium import spaces
from gymnasium.vector.utils import concatenate, create_empty_array

from parallelenv.contract.batch import Array, has_true
from parallelenv.contract.spaces import Structure, batch_values, describe_value, object_array, pick_rows
from parallelenv.engine.assemble import Align
from parallelenv.engine.rewards import as_number
from parallelenv.errors import ArgumentError
from parallelenv.results import StepBatch, StepResult

Space: TypeAlias = "gymnasium.Space[Any] | None"


class SteppedRows:
    """The envs of a result that were stepped. Resting envs have neither a state nor a reward.

    Args:
        result: The result.
        space: Space of its states.

    Attributes:
        result: The result.
        positions: ``(k,)`` int64, positions of these envs in the result.
        env_ids: ``(k,)`` int64.
        states: Their states, batched.
        dones: ``(k,)`` bool.
        infos: ``(k,)`` object array with the dicts of the result, not copies.
    """

    def __init__(self, result: StepResult, space: Space) -> None:
        self.result = result
        count = len(result.dones)
        resting = _resting(result)
        self._is_whole = not resting
        # A slice, of which numpy makes views, saves 5 us per step.
        stepped = [place for place in range(count) if place not in resting] if resting else slice(None)
        self.positions: Array = np.arange(count)[stepped]
        self.env_ids: Array = result.env_ids[stepped]
        self.dones: Array = result.dones[stepped]
        self.infos: Array = result.infos[stepped]
        self.states = result.states if self._is_whole else batch_of(space, result.states[stepped].tolist())

    @property
    def is_nobody(self) -> bool:
        """Whether all envs of the result rest, and there is at least one."""
        return not self._is_whole and not len(self.positions)

    @property
    def restarted(self) -> Array:
        """``(k,)`` bool: env failed and was rebuilt. Its state is a first state, its reward not its own."""
        if not has_true(self.dones):  # a rebuilt env ends its episode
            return np.zeros(len(self.dones), dtype=bool)
        return np.array([was_restarted(info) for info in self.infos], dtype=bool)

    def rewards(self) -> tuple[Array, dict[int, Any]]:
        """Return rewards, ``(k,)`` float64 with 0 for those that are not numbers, and the latter by env id."""
        rewards = self.result.rewards
        if rewards.dtype != object:
            plain: Array = rewards[self.positions]
            return plain, {}
        numbers, others = np.zeros(len(self.positions)), {}
        for row, (env_id, reward) in enumerate(zip(self.env_ids.tolist(), rewards[self.positions], strict=True)):
            number = as_number(reward)
            if number is None:
                others[env_id] = reward
            else:
                numbers[row] = number
        return numbers, others

    def with_states(self, states: Any, space: Space) -> StepResult:
        """Return the result with other states, which are in this space."""
        if self._is_whole:
            return _replaced(self.result, states, self.result.rewards)
        structure = Structure(space)
        rows: list[Any] = [None] * len(self.result.dones)
        for row, place in enumerate(self.positions.tolist()):
            rows[place] = row_of(structure, states, row)
        return _replaced(self.result, object_array(rows), self.result.rewards)

    def with_rewards(self, rewards: Array) -> StepResult:
        """Return the result with other rewards."""
        if self._is_whole:
            return _replaced(self.result, self.result.states, rewards)
        completed = self.result.rewards.copy()
        for place, reward in zip(self.positions.tolist(), rewards.tolist(), strict=True):
            completed[place] = reward
        return _replaced(self.result, self.result.states, completed)


def _resting(result: StepResult) -> set[int]:
    """Return the positions of resting envs: their entry is ``(None, None, True, {})``."""
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


def was_restarted(info: dict[str, Any]) -> bool:
    """Return whether an info says that its env failed and was rebuilt."""
    return isinstance(info.get("failure"), BaseException)


def row_of(structure: Structure, states: Any, row: int) -> Any:
    """Return a copy of one state of a batch. The structure tells a batch of tuples from a tuple of batches."""
    return structure.join([_copied(pick_rows(leaf, row)) for leaf in structure.split(states)])


def rows_of(structure: Structure, states: Any, rows: Sequence[int]) -> Any:
    """Return some states of a batch as a batch; also of object arrays, where envs may rest."""
    if isinstance(states, np.ndarray) and states.dtype == object:
        return states[list(rows)]
    return structure.join([pick_rows(leaf, list(rows)) for leaf in structure.split(states)])


def batch_of(space: Space, states: Sequence[Any]) -> Any:
    """Return single states as a batch."""
    if space is None:
        return batch_values(states)
    empty: Any = create_empty_array(space, len(states))
    return concatenate(space, states, empty) if states else empty


def aligned(result: StepResult, align: Align, space: Space) -> StepResult | StepBatch:
    """Return a result with the requested alignment. ``space`` is that of its states.

    Raises:
        ArgumentError: If the states do not fit the space.
    """
    if align == "item":
        return result
    rows = unstacked(result.states, Structure(space), len(result.env_ids))
    items = list(zip(rows, result.rewards.tolist(), result.dones.tolist(), result.infos.tolist(), strict=True))
    return StepBatch(items, terminated=result.terminated, truncated=result.truncated, env_ids=result.env_ids)


def unstacked(states: Any, structure: Structure, count: int) -> list[Any]:
    """Return one state per env, copied because with ``copy=False`` those of the batch may be views.

    Args:
        states: States of ``count`` envs, batched.
        structure: Structure of the states.
        count: Number of envs.

    Raises:
        ArgumentError: If the states do not fit the space.
    """
    if not count:
        return []
    if isinstance(states, np.ndarray) and states.dtype == object:
        return list(states)
    check_states(structure.space, states, count)
    return [row_of(structure, states, row) for row in range(count)]


def check_states(space: Space, states: Any, num_states: int) -> None:
    """Check that ``states`` is a batch of that size of a space. Shapes and dtypes of leaves are not checked.

    Raises:
        ArgumentError: If it is not.
    """
    found = _unlike(space, states, num_states, "")
    if found:
        raise ArgumentError(
            f"A wrapper answers states that are not like its observation_space, {space}: {found}. Give StateWrapper "
            "the space of what process() returns."
        )


def _unlike(space: Space, states: Any, num_states: int, path: str) -> str:
    """Return what is wrong with a batch of states; empty if nothing."""
    parts: list[tuple[Space, Any, str]]
    if type(space) is spaces.Dict:
        if not isinstance(states, dict) or states.keys() != space.spaces.keys():
            return f"states{path} must be a dict with the keys {list(space.spaces)}; found was {_described(states)}"
        parts = [(space.spaces[key], states[key], f"{path}[{key!r}]") for key in states]
    elif type(space) is spaces.Tuple:
        if not isinstance(states, tuple) or len(states) != len(space.spaces):
            return f"states{path} must be a tuple of {len(space.spaces)}; found was {_described(states)}"
        parts = [(part, states[index], f"{path}[{index}]") for index, part in enumerate(space.spaces)]
    elif space is None and isinstance(states, dict):
        parts = [(None, part, f"{path}[{key!r}]") for key, part in states.items()]
    else:
        return _unlike_leaf(states, num_states, path)
    return next(filter(None, (_unlike(part, values, num_states, where) for part, values, where in parts)), "")


def _unlike_leaf(values: Any, num_states: int, path: str) -> str:
    is_single = isinstance(values, (str, bytes, dict)) or not hasattr(values, "__len__")
    if not is_single and getattr(values, "ndim", None) != 0 and len(values) == num_states:
        return ""
    return f"states{path} must have a row for each of {num_states} envs; found was {_described(values)}"


def _described(states: Any) -> str:
    return f"a dict with the keys {list(states)}" if isinstance(states, dict) else describe_value(states)


def _copied(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _copied(part) for key, part in value.items()}
    return value.copy() if isinstance(value, np.ndarray) else value


def with_leaves(space: gymnasium.Space[Any], change: Any, path: str = "") -> gymnasium.Space[Any]:
    """Return a space with changed leaves.

    Args:
        space: The space.
        change: Called with each leaf and its path, as `Structure.describe` gives it; returns the new leaf.
        path: Path of the space itself.
    """
    if type(space) is spaces.Dict:
        return spaces.Dict({key: with_leaves(part, change, f"{path}[{key!r}]") for key, part in space.spaces.items()})
    if type(space) is spaces.Tuple:
        return spaces.Tuple([with_leaves(part, change, f"{path}[{index}]") for index, part in enumerate(space.spaces)])
    return change(space, path)  # type: ignore[no-any-return]
