"""A check for nan and infinite numbers in actions, states and rewards."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from parallelenv.contract import arguments
from parallelenv.contract.spaces import Structure, as_array, is_tensor
from parallelenv.engine.assemble import Align
from parallelenv.errors import EnvContractError
from parallelenv.results import StepResult
from parallelenv.wrappers.answer_rows import SteppedRows
from parallelenv.wrappers.answer_wrapper import AnswerWrapper
from parallelenv.wrappers.refused_answers import WHERE_THEY_ARE

_FLOATS = "fc"
_LOOK = f"{WHERE_THEY_ARE} Look into these envs with get_env_attr(), or reset() them."
Found = tuple[int, str]
"""An env id (or a row), and the place of a number that is not finite."""


class CheckFinite(AnswerWrapper):
    """Raises `EnvContractError` as soon as an action, a state or a reward is nan or infinite.

    The error names the env and the place in its action or state. Actions are checked before anything is sent, except
    those of resting envs; results when they arrive. ``error.refused`` has the results of the envs with such numbers, by
    env id, and ``error.partial`` those of all others.

    Args:
        env: A `ParallelEnv`, or another wrapper.
        check_inf: Whether to refuse infinite numbers as well as nan.
    """

    def __init__(self, env: Any, check_inf: bool = True) -> None:
        arguments.check_flags(check_inf=check_inf)
        super().__init__(env)
        self.check_inf = check_inf
        self._states, self._actions = Structure(env.single_observation_space), Structure(env.single_action_space)

    def step(self, action: Any, id: Any = None, align: Align = "item") -> Any:
        """Step envs. See `ParallelEnv.step`."""
        self.check_actions(action, id)
        return super().step(action, id, align)

    def send(self, action: Any, id: Any = None) -> None:
        """Begin a step. See `ParallelEnv.send`."""
        self.check_actions(action, id)
        super().send(action, id)

    def step_async(self, action: Any, id: Any = None) -> None:
        """Begin a step. See `ParallelEnv.step_async`."""
        self.check_actions(action, id)
        super().step_async(action, id)

    def check_actions(self, action: Any, id: Any = None) -> None:
        """Check that actions are finite. Other errors in them are left to the step.

        Raises:
            EnvContractError: If some are not.
        """
        env_ids = self.chosen(id)
        resting = self.exhausted | (self.done & (self.unwrapped.asynchronous in (None, "idle")))
        found = [
            (env_ids[row], f"action{where}")
            for row, where in find_in_actions(self._actions, action, self.check_inf)
            if row < len(env_ids) and not resting[env_ids[row]]
        ]
        if found:
            raise _error(found, self.check_inf, "Nothing was sent.")

    def began(self, states: Any, env_ids: tuple[int, ...]) -> Any:
        """Return the first states after checking that they are finite.

        Raises:
            EnvContractError: If some are not. The other envs keep their results.
        """
        found = self._find_in_states(states, env_ids)
        if found:
            error = _error(found, self.check_inf, _LOOK)
            self.refuse_begun(error, states, env_ids, error.env_ids)
        return states

    def answered(self, result: StepResult) -> StepResult:
        """Return the result after checking that it is finite.

        Raises:
            EnvContractError: If some of it is not. The other envs keep their results.
        """
        stepped = SteppedRows(result, self.single_observation_space)
        if stepped.is_nobody:
            return result
        found = self._find_in_states(stepped.states, stepped.env_ids.tolist())
        rewards = result.rewards[stepped.positions]
        found += [(int(stepped.env_ids[row]), "reward") for row in _bad_rows(rewards, self.check_inf)]
        if self.restarts:
            found += self._find_in_ended(stepped)
        if found:
            error = _error(found, self.check_inf, _LOOK)
            self.refuse(error, result, error.env_ids)
        return result

    def _find_in_states(self, states: Any, env_ids: Sequence[int]) -> list[Found]:
        return [
            (env_ids[row], f"state{self._states.describe(index)}")
            for index, leaf in enumerate(self._states.split(states))
            for row in _bad_rows(leaf, self.check_inf)
        ]

    def _find_in_ended(self, stepped: SteppedRows) -> list[Found]:
        return [
            (env_id, "last state")
            for env_id, info in zip(stepped.env_ids[stepped.dones].tolist(), stepped.infos[stepped.dones], strict=True)
            if _is_bad(info.get("ended_state"), self.check_inf)
        ]


def find_in_actions(structure: Structure, action: Any, check_inf: bool) -> list[Found]:
    """Return where actions are not finite; nothing if a step would reject their form."""
    try:
        if structure.is_single:
            return [(row, "") for row in _bad_rows(action, check_inf)]
        if not isinstance(action, (dict, tuple)):
            return [found for row, single in enumerate(action) for found in _in_one(structure, row, single, check_inf)]
        return [
            (row, structure.describe(index))
            for index, leaf in enumerate(structure.split(action))
            for row in _bad_rows(leaf, check_inf)
        ]
    except (LookupError, TypeError):  # not valid actions: the step raises the error
        return []


def _in_one(structure: Structure, row: int, single: Any, check_inf: bool) -> list[Found]:
    leaves = structure.split(single)
    return [(row, structure.describe(index)) for index, leaf in enumerate(leaves) if _is_bad(leaf, check_inf)]


def _bad_rows(leaf: Any, check_inf: bool) -> list[int]:
    """Return the rows of a batch that have a number that is not finite."""
    if isinstance(leaf, dict):  # of undeclared space
        return sorted({row for part in leaf.values() for row in _bad_rows(part, check_inf)})
    if is_tensor(leaf):
        leaf = as_array(leaf)
    if not isinstance(leaf, np.ndarray) or leaf.dtype == object:
        return [row for row, item in enumerate(leaf) if _is_bad(item, check_inf)]
    if leaf.dtype.kind not in _FLOATS or not leaf.ndim:
        return []
    bad = ~np.isfinite(leaf) if check_inf else np.isnan(leaf)
    if not bad.any():  # the usual case
        return []
    return np.flatnonzero(bad.reshape(len(leaf), -1).any(axis=1)).tolist()


def _is_bad(value: Any, check_inf: bool) -> bool:
    """Return whether a single value, of any type, has a number that is not finite."""
    if isinstance(value, dict):
        return any(_is_bad(part, check_inf) for part in value.values())
    if isinstance(value, (tuple, list)):
        return any(_is_bad(part, check_inf) for part in value)
    if is_tensor(value):
        value = as_array(value)
    if not isinstance(value, (float, complex, np.ndarray, np.inexact)):
        return False
    array = np.asarray(value)
    if array.dtype == object:
        return any(_is_bad(part, check_inf) for part in array.reshape(-1).tolist())
    if array.dtype.kind not in _FLOATS:
        return False
    return bool((~np.isfinite(array) if check_inf else np.isnan(array)).any())


def describe_places(found: Sequence[Found]) -> str:
    """Return envs and places as text for messages."""
    by_place: dict[str, list[int]] = {}
    for env_id, where in found:
        by_place.setdefault(where, []).append(env_id)
    return "; ".join(
        f"{where} of {'env' if len(env_ids) == 1 else 'envs'} {', '.join(map(str, sorted(env_ids)))}"
        for where, env_ids in by_place.items()
    )


def env_ids_of(found: Sequence[Found]) -> tuple[int, ...]:
    """Return the env ids of the findings, ascending."""
    return tuple(sorted({env_id for env_id, _ in found}))


def _error(found: Sequence[Found], check_inf: bool, ending: str) -> EnvContractError:
    """Return the error that names the envs and places."""
    kind = "nan or infinite" if check_inf else "nan"
    return EnvContractError(f"Something is {kind} in: {describe_places(found)}. {ending}", env_ids_of(found))
