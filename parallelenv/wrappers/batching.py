"""Functions with which wrappers split batched states and results, and join them again."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import numpy as np
from gymnasium.vector.utils import concatenate, create_empty_array

from parallelenv.contract import spaces
from parallelenv.contract.batch import Array, has_true
from parallelenv.contract.spaces import State, Structure, batch_values, describe_value, object_array, pick_rows
from parallelenv.engine.assemble import Align
from parallelenv.engine.rewards import as_number
from parallelenv.errors import ArgumentError, EnvContractError
from parallelenv.results import StepBatch, StepResult

States: TypeAlias = State
"""States of several envs, batched as `ParallelEnv` returns them."""
Space: TypeAlias = "spaces.Space | None"


def apply_to_stepped(
    result: StepResult, hook: Callable[[StepResult], StepResult], space: Space, new_space: Space
) -> StepResult:
    """Return a result in which the hook has processed the rows of stepped envs. Rows of idle envs are not changed.

    ``space`` is the space of the states in ``result``; ``new_space`` is the space of the states that the hook returns.
    """
    states, rewards = result.states, result.rewards
    if not isinstance(states, np.ndarray) or states.dtype != object or rewards.dtype != object:
        return hook(result)
    pairs = enumerate(zip(states, rewards, strict=True))
    rows = [row for row, (state, reward) in pairs if state is not None or reward is not None]
    if len(rows) == len(states):
        return hook(result)
    parts = [part.copy() for part in (rewards, result.dones, result.infos, result.terminated, result.truncated)]
    given = StepResult(batch_of(space, states[rows].tolist()), *(part[rows] for part in (*parts, result.env_ids)))
    seen = hook(given)
    if seen.states is not given.states:
        states = scattered(seen.states, new_space, rows, len(states))
    for part, values in zip(parts, (*seen[1:], seen.terminated, seen.truncated), strict=True):
        part[rows] = values
    rewards, dones, infos, terminated, truncated = parts
    return StepResult(states, rewards, dones, infos, terminated, truncated, result.env_ids)


def changed(result: StepResult, *, states: States = None, rewards: Array | None = None) -> StepResult:
    """Return a copy of ``result`` whose states or rewards are replaced; all other parts are kept."""
    return StepResult(
        result.states if states is None else states,
        result.rewards if rewards is None else rewards,
        *(result.dones, result.infos, result.terminated, result.truncated, result.env_ids),
    )


def rebuilt(result: StepResult) -> Array:
    """Return a bool array that is True in the rows whose env failed and was rebuilt.

    The reward in such a row is not from the env.
    """
    if not has_true(result.dones):  # a rebuilt env ends its episode
        return np.zeros(len(result.dones), dtype=bool)
    return np.array([isinstance(info.get("failure"), BaseException) for info in result.infos], dtype=bool)


def numeric_rewards(result: StepResult) -> Array:
    """Return the rewards as a float64 array; raise an `EnvContractError` if a reward is not a number."""
    if result.rewards.dtype != object:
        return result.rewards  # type: ignore[no-any-return]
    numbers = [as_number(reward) for reward in result.rewards]
    if None in numbers:
        row = numbers.index(None)
        env_id = int(result.env_ids[row])
        raise EnvContractError(
            f"Rewards must be numbers here; the reward of env {env_id} is {describe_value(result.rewards[row])}. "
            "Return a number from its step().",
            (env_id,),
        )
    return np.array(numbers, dtype=np.float64)


def batch_of(space: Space, states: Sequence[object]) -> States:
    """Join single states into a batch."""
    if space is None:
        return batch_values(states)
    empty: Any = create_empty_array(space, len(states))
    return concatenate(space, states, empty) if states else empty


def unstacked(states: States, space: Space, count: int) -> list[State]:
    """Split a batch of ``count`` states into a list of single states.

    Rows of arrays are copied, because a `ParallelEnv` with ``copy=False`` overwrites its arrays in the next step.
    """
    if isinstance(states, np.ndarray) and states.dtype == object:
        return list(states)
    structure = Structure(space)  # tells a batch of tuples from a tuple of batches
    leaves = structure.split(states)
    return [structure.join([_copied(pick_rows(leaf, row)) for leaf in leaves]) for row in range(count)]


def _copied(value: State) -> State:
    if isinstance(value, dict):
        return {key: _copied(part) for key, part in value.items()}
    return value.copy() if isinstance(value, np.ndarray) else value


def scattered(states: States, space: Space, rows: Sequence[int], count: int) -> Array:
    """Return a ``(count,)`` object array with the batch's states at the indices ``rows`` and ``None`` elsewhere."""
    found: list[object] = [None] * count
    for row, state in zip(rows, unstacked(states, space, len(rows)), strict=True):
        found[row] = state
    return object_array(found)


def aligned(result: StepResult, align: Align, space: Space) -> StepResult | StepBatch:
    """Return ``result`` unchanged if ``align`` is ``"item"``, otherwise converted to a `StepBatch`.

    ``space`` is the space of the states in ``result``.
    """
    if align == "item":
        return result
    rows = unstacked(result.states, space, len(result.env_ids))
    items = list(zip(rows, result.rewards.tolist(), result.dones.tolist(), result.infos.tolist(), strict=True))
    return StepBatch(items, terminated=result.terminated, truncated=result.truncated, env_ids=result.env_ids)


def check_states(space: Space, states: States, num_states: int) -> None:
    """Raise an `ArgumentError` unless ``states`` is a batch of the given size; shapes and dtypes are not checked."""
    structure = Structure(space)
    try:
        leaves = structure.split(states)
    except (LookupError, TypeError):
        fault = f"found {describe_value(states)}"
    else:
        wrong = [index for index, leaf in enumerate(leaves) if not _has_rows(leaf, num_states, space is None)]
        if not wrong:
            return
        where, found = structure.describe(wrong[0]), describe_value(leaves[wrong[0]])
        fault = f"states{where} must have a row for each of {num_states} envs; found {found}"
    raise ArgumentError(
        f"A wrapper returned states that do not match its observation_space, {space}: {fault}. Give StateWrapper the "
        "space of the states that process() returns."
    )


def _has_rows(values: Any, num_rows: int, may_be_dict: bool) -> bool:
    if isinstance(values, dict):
        return may_be_dict and all(_has_rows(part, num_rows, True) for part in values.values())
    is_single = isinstance(values, (str, bytes)) or not hasattr(values, "__len__") or getattr(values, "ndim", 1) == 0
    return not is_single and len(values) == num_rows
