"""Numbers that are none: found in actions before they are sent, and in what envs answer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from parallelenv.contract import arguments
from parallelenv.contract.spaces import Structure, as_array, is_tensor
from parallelenv.engine.assemble import Align
from parallelenv.errors import NotFiniteError
from parallelenv.results import StepResult
from parallelenv.wrappers.answers import Acting
from parallelenv.wrappers.refused import WHERE_THEY_ARE
from parallelenv.wrappers.seeing import AnswerWrapper

_FLOATS = "fc"
_LOOK = f"{WHERE_THEY_ARE} Look into these envs with get_env_attr(), or reset() them."
Found = tuple[int, str]
"""An env, or a row, and where something of it is not finite."""


class CheckFinite(AnswerWrapper):
    """Raises `NotFiniteError` as soon as an action, a state or a reward is nan, or infinite.

    It says which env it is and where in its action or state. Actions are looked at before anything is sent, but not
    those of envs that rest; answers when they are here. What such envs have answered is in ``error.refused``, by env
    id, and what all others have is ``error.partial``.

    Args:
        env: As in `ParallelWrapper`.
        check_inf: Whether infinite numbers are refused too, and not nan alone.
    """

    def __init__(self, env: Any, check_inf: bool = True) -> None:
        arguments.check_flags(check_inf=check_inf)
        super().__init__(env)
        self.check_inf = check_inf
        self._states, self._actions = Structure(env.single_observation_space), Structure(env.single_action_space)

    def step(self, action: Any, id: Any = None, align: Align = "item") -> Any:
        """Step envs, as `ParallelEnv.step`."""
        self.check_actions(action, id)
        return super().step(action, id, align)

    def send(self, action: Any, id: Any = None) -> None:
        """Begin a step, as `ParallelEnv.send`."""
        self.check_actions(action, id)
        super().send(action, id)

    def step_async(self, action: Any, id: Any = None) -> None:
        """Begin a step, as `ParallelEnv.step_async`."""
        self.check_actions(action, id)
        super().step_async(action, id)

    def check_actions(self, action: Any, id: Any = None) -> None:
        """Refuse actions that are not finite. What is wrong with them otherwise is for the step to say.

        Raises:
            NotFiniteError: If there are any.
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
        """Return first states that are finite.

        Raises:
            NotFiniteError: If some are not; all other envs are answered.
        """
        found = self._find_in_states(states, env_ids)
        if found:
            error = _error(found, self.check_inf, _LOOK)
            self.refuse_begun(error, states, env_ids, error.env_ids)
        return states

    def answered(self, result: StepResult) -> StepResult:
        """Return an answer in which all is finite.

        Raises:
            NotFiniteError: If something is not; all other envs are answered.
        """
        acting = Acting(result, self.single_observation_space)
        if acting.is_nobody:
            return result
        found = self._find_in_states(acting.states, acting.env_ids.tolist())
        rewards = result.rewards[acting.positions]
        found += [(int(acting.env_ids[row]), "reward") for row in _bad_rows(rewards, self.check_inf)]
        if self.restarts:
            found += self._find_in_ended(acting)
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

    def _find_in_ended(self, acting: Acting) -> list[Found]:
        return [
            (env_id, "last state")
            for env_id, info in zip(acting.env_ids[acting.dones].tolist(), acting.infos[acting.dones], strict=True)
            if _is_bad(info.get("ended_state"), self.check_inf)
        ]


def find_in_actions(structure: Structure, action: Any, check_inf: bool) -> list[Found]:
    """Return where actions are not finite; nothing if they are not in a form that a step takes."""
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
    except (LookupError, TypeError):  # no such action: the step says so
        return []


def _in_one(structure: Structure, row: int, single: Any, check_inf: bool) -> list[Found]:
    leaves = structure.split(single)
    return [(row, structure.describe(index)) for index, leaf in enumerate(leaves) if _is_bad(leaf, check_inf)]


def _bad_rows(leaf: Any, check_inf: bool) -> list[int]:
    """Return the rows of a batch in which something is not finite."""
    if isinstance(leaf, dict):  # of no declared space
        return sorted({row for part in leaf.values() for row in _bad_rows(part, check_inf)})
    if is_tensor(leaf):
        leaf = as_array(leaf)
    if not isinstance(leaf, np.ndarray) or leaf.dtype == object:
        return [row for row, item in enumerate(leaf) if _is_bad(item, check_inf)]
    if leaf.dtype.kind not in _FLOATS or not leaf.ndim:
        return []
    bad = ~np.isfinite(leaf) if check_inf else np.isnan(leaf)
    if not bad.any():  # nearly always
        return []
    return np.flatnonzero(bad.reshape(len(leaf), -1).any(axis=1)).tolist()


def _is_bad(value: Any, check_inf: bool) -> bool:
    """Whether something in a single value, of whatever type, is not finite."""
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
    """Return which envs it is and where, for messages."""
    by_place: dict[str, list[int]] = {}
    for env_id, where in found:
        by_place.setdefault(where, []).append(env_id)
    return "; ".join(
        f"{where} of {'env' if len(env_ids) == 1 else 'envs'} {', '.join(map(str, sorted(env_ids)))}"
        for where, env_ids in by_place.items()
    )


def env_ids_of(found: Sequence[Found]) -> tuple[int, ...]:
    """Return the envs in which something was found, ascending."""
    return tuple(sorted({env_id for env_id, _ in found}))


def _error(found: Sequence[Found], check_inf: bool, ending: str) -> NotFiniteError:
    """Return the error that names envs and places."""
    kind = "nan or infinite" if check_inf else "nan"
    return NotFiniteError(f"Something is {kind} in: {describe_places(found)}. {ending}", env_ids_of(found))
