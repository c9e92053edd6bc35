"""Numbers that are none: found in actions before they are sent, and in what envs answer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from parallelenv.errors import NotFiniteError
from parallelenv.results import StepResult
from parallelenv.spaces import Structure, as_array, is_tensor
from parallelenv.wrappers.answers import Acting, carrying
from parallelenv.wrappers.seeing import AnswerWrapper

_FLOATS = "fc"
Found = tuple[int, str]
"""A row, and where in it something is not finite."""


class CheckFinite(AnswerWrapper):
    """Raises `NotFiniteError` as soon as an action, a state or a reward is nan, or infinite.

    It says which env it is and where in its action or state. Actions are looked at before anything is sent, but not
    those of envs that rest; answers when they are here, and the error has them as its ``partial``.

    Args:
        env: As in `ParallelWrapper`.
        check_inf: Whether infinite numbers are refused too, and not nan alone.
    """

    def __init__(self, env: Any, check_inf: bool = True) -> None:
        super().__init__(env)
        self.check_inf = check_inf
        self._states, self._actions = Structure(env.single_observation_space), Structure(env.single_action_space)

    def step(self, action: Any, id: Any = None, align: Any = "item") -> Any:
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
        resting = self.done & (self.unwrapped._asynchronous in (None, "idle"))
        found = [
            (env_ids[row], where)
            for row, where in find_in_actions(self._actions, action, self.check_inf)
            if row < len(env_ids) and not resting[env_ids[row]]
        ]
        if found:
            raise _error("action", found, self.check_inf, "Nothing was sent.")

    def began(self, states: Any, env_ids: tuple[int, ...]) -> Any:
        """Return first states that are finite."""
        refuse_states(self._states, states, env_ids, states, self.check_inf)
        return states

    def answered(self, result: StepResult) -> StepResult:
        """Return an answer in which all is finite."""
        acting = Acting(result, self.single_observation_space)
        if acting.is_nobody:
            return result
        refuse_states(self._states, acting.states, acting.env_ids.tolist(), result, self.check_inf)
        rewards = result.rewards[acting.positions]
        found = [(int(acting.env_ids[row]), "") for row in _bad_rows(rewards, self.check_inf)]
        if found:
            raise carrying(result, _error("reward", found, self.check_inf))
        if self.restarts:
            self._refuse_ended(acting)
        return result

    def _refuse_ended(self, acting: Acting) -> None:
        found = [
            (env_id, "")
            for env_id, info in zip(acting.env_ids[acting.dones].tolist(), acting.infos[acting.dones], strict=True)
            if _is_bad(info.get("ended_state"), self.check_inf)
        ]
        if found:
            raise carrying(acting.result, _error("last state", found, self.check_inf))


def refuse_states(
    structure: Structure, states: Any, env_ids: Sequence[int], answer: Any, check_inf: bool = True
) -> None:
    """Refuse states that are not finite.

    Args:
        structure: Theirs.
        states: Batched.
        env_ids: Whose they are.
        answer: What the error is to have as its ``partial``.
        check_inf: Whether infinite ones are refused too.

    Raises:
        NotFiniteError: If there are any.
    """
    found = [
        (env_ids[row], structure.describe(index))
        for index, leaf in enumerate(structure.split(states))
        for row in _bad_rows(leaf, check_inf)
    ]
    if found:
        raise carrying(answer, _error("state", found, check_inf))


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


def _error(what: str, found: Sequence[Found], check_inf: bool, ending: str = "") -> NotFiniteError:
    """Return the error that names envs and places."""
    by_place: dict[str, list[int]] = {}
    for env_id, where in found:
        by_place.setdefault(where, []).append(env_id)
    places = "; ".join(
        f"{what}{where} of {'env' if len(env_ids) == 1 else 'envs'} {', '.join(map(str, sorted(env_ids)))}"
        for where, env_ids in by_place.items()
    )
    kind = "nan or infinite" if check_inf else "nan"
    ids = tuple(sorted({env_id for env_id, _ in found}))
    ending = ending or "The answer is error.partial; look into these envs with get_env_attr(), or reset() them."
    return NotFiniteError(f"Something is {kind} in: {places}. {ending}", ids)
