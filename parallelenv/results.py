"""The answers of a step in the shapes that users ask for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from operator import itemgetter
from typing import Any

import numpy as np

from parallelenv.batch import Array, Batch
from parallelenv.flights import Landed
from parallelenv.protocol import Extra
from parallelenv.spaces import object_array


class StepResult(tuple):  # type: ignore[type-arg]
    """``states, rewards, dones, infos`` of a step, batched over envs.

    Attributes:
        states: As Gymnasium batches them, first axis env; an object array if an env has none.
        rewards: ``(k,)`` float64; an object array if some are not numbers.
        dones: ``(k,)`` bool, terminated or truncated.
        infos: ``(k,)`` object array of dicts.
        terminated: ``(k,)`` bool.
        truncated: ``(k,)`` bool.
        env_ids: ``(k,)`` int64, the envs in the order of the rows.
    """

    terminated: Array
    truncated: Array
    env_ids: Array

    def __new__(
        cls,
        states: Any,
        rewards: Array,
        dones: Array,
        infos: Array,
        *,
        terminated: Array,
        truncated: Array,
        env_ids: Array,
    ) -> StepResult:
        """Return the four items as a tuple that carries the other three as attributes."""
        self = super().__new__(cls, (states, rewards, dones, infos))
        self.terminated = terminated
        self.truncated = truncated
        self.env_ids = env_ids
        return self

    def __getnewargs_ex__(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Let a result be pickled and copied."""
        return tuple(self), {"terminated": self.terminated, "truncated": self.truncated, "env_ids": self.env_ids}

    states: Any = property(itemgetter(0))
    rewards: Any = property(itemgetter(1))
    dones: Any = property(itemgetter(2))
    infos: Any = property(itemgetter(3))


class StepBatch(list):  # type: ignore[type-arg]
    """One ``(state, reward, done, info)`` per env, in the order asked.

    Attributes:
        terminated: ``(k,)`` bool.
        truncated: ``(k,)`` bool.
        env_ids: ``(k,)`` int64.
    """

    def __init__(self, items: Sequence[Any], *, terminated: Array, truncated: Array, env_ids: Array) -> None:
        super().__init__(items)
        self.terminated = terminated
        self.truncated = truncated
        self.env_ids = env_ids


class Answers:
    """What some envs answered, before it is aligned.

    Args:
        batch: The pool's batch.
        landed: Who answered what beside the batch.
        infos: One per env of the answer, already the user's.
        terminated: ``(k,)`` bool, one per env of the answer.
        truncated: ``(k,)`` bool.
    """

    def __init__(
        self, batch: Batch, landed: Landed, infos: list[dict[str, Any]], terminated: Array, truncated: Array
    ) -> None:
        self._batch = batch
        self._env_ids = landed.env_ids
        self._stepped = landed.stepped
        self._extras = landed.extras
        self._infos = infos
        self._attributes = {
            "terminated": terminated,
            "truncated": truncated,
            "env_ids": np.array(landed.env_ids, dtype=np.int64),
        }
        self._dones = terminated | truncated

    def by_item(self, copy: bool) -> StepResult:
        """Return four batched items; with ``copy=False`` states may be read-only views."""
        infos = np.empty(len(self._infos), dtype=object)
        infos[:] = self._infos  # dicts are not taken apart
        if len(self._stepped) == len(self._env_ids):
            states = gather_states(self._batch, self._env_ids, self._extras, copy)
            return StepResult(states, self._rewards(), self._dones, infos, **self._attributes)
        states = object_array(self._completed(list_states(self._batch, self._stepped, self._extras)))
        rewards = object_array(self._completed(self._rewards().tolist()))
        return StepResult(states, rewards, self._dones, infos, **self._attributes)

    def by_env(self) -> StepBatch:
        """Return one 4-tuple per env."""
        states = self._completed(list_states(self._batch, self._stepped, self._extras))
        rewards = self._completed(self._rewards().tolist())
        items = list(zip(states, rewards, self._dones.tolist(), self._infos, strict=True))
        return StepBatch(items, **self._attributes)

    def _rewards(self) -> Array:
        """Return the rewards of the envs that were stepped."""
        rewards: Array = self._batch.rewards[self._batch.rows(self._stepped)].copy()
        loose = {env_id: extra.reward for env_id, extra in self._extras.items() if extra.reward is not None}
        if not loose:
            return rewards
        plain = rewards.tolist()
        return object_array(
            [loose[env_id][0] if env_id in loose else plain[index] for index, env_id in enumerate(self._stepped)]
        )

    def _completed(self, values: list[Any]) -> list[Any]:
        """Put ``None`` where an env is absent."""
        if len(values) == len(self._env_ids):
            return values
        found = dict(zip(self._stepped, values, strict=True))
        return [found.get(env_id) for env_id in self._env_ids]


def gather_states(batch: Batch, env_ids: Sequence[int], extras: Mapping[int, Extra], copy: bool) -> Any:
    """Return the states of these envs, batched, in the order of ``env_ids``."""
    structure = batch.layout.states
    rows = batch.rows(env_ids)
    loose = iter(_loose_columns(batch, env_ids, extras))
    leaves = [
        structure.stack(index, next(loose)) if array is None else _selected(array, rows, copy)
        for index, array in enumerate(batch.states)
    ]
    return structure.join(leaves)


def list_states(batch: Batch, env_ids: Sequence[int], extras: Mapping[int, Extra]) -> list[Any]:
    """Return the states of these envs as a list with one state per env."""
    structure = batch.layout.states
    rows = batch.rows(env_ids)
    loose = iter(_loose_columns(batch, env_ids, extras))
    columns = [next(loose) if array is None else list(_selected(array, rows, copy=True)) for array in batch.states]
    if structure.is_single:
        return list(columns[0])
    return [structure.join(leaves) for leaves in zip(*columns, strict=True)]


def ended_state(batch: Batch, env_id: int, extra: Extra) -> Any:
    """Return the last state of an env's episode that ended in its latest step."""
    row = env_id - batch.layout.first
    loose = iter(extra.ended_loose or ())
    leaves = [next(loose) if array is None else array[row].copy() for array in batch.ended_states]
    return batch.layout.states.join(leaves)


def _selected(array: Array, rows: Any, copy: bool) -> Array:
    selected: Array = array[rows]
    if isinstance(rows, slice):  # else the selection is a copy already
        if copy:
            return selected.copy()
        selected.flags.writeable = False
    return selected


def _loose_columns(batch: Batch, env_ids: Sequence[int], extras: Mapping[int, Extra]) -> list[list[Any]]:
    """Return, for each loose leaf, its values in the order of ``env_ids``."""
    number = sum(array is None for array in batch.states)
    if not number:
        return []
    values = [extras[env_id].loose or [] for env_id in env_ids]
    return [[leaves[index] for leaves in values] for index in range(number)]
