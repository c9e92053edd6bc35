"""The answers of a step in the shapes that users ask for."""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from opcode import opmap
from operator import itemgetter
from typing import Any

import numpy as np

from parallelenv.batch import Array, Batch, Layout
from parallelenv.errors import EnvContractError, UnpackingError
from parallelenv.failures import Failure, raise_failures
from parallelenv.flights import Landed
from parallelenv.protocol import Extra
from parallelenv.spaces import object_array
from parallelenv.tracebacks import shorten

_UNPACK = opmap["UNPACK_SEQUENCE"]


class StepResult(tuple[Any, Any, Any, Any]):
    """``states, rewards, dones, infos`` of a step, batched over envs.

    Gymnasium's ``step`` returns five items; `terminated` and `truncated` are attributes here. Unpacking into another
    number than four raises `UnpackingError`. The envs of `ParallelEnv.to_gymnasium` return five.

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
        terminated: Array,
        truncated: Array,
        env_ids: Array,
    ) -> StepResult:
        """Return the four items as a tuple that carries the other three as attributes."""
        self = tuple.__new__(cls, (states, rewards, dones, infos))
        self.terminated = terminated
        self.truncated = truncated
        self.env_ids = env_ids
        return self

    def __iter__(self) -> Iterator[Any]:
        """Return an iterator over the four items.

        Python says of a wrong number of targets only that there are not enough values, so the instruction that the
        caller is at is looked up here: 0.25 us, where the smallest step takes 14 us.

        Raises:
            UnpackingError: If they are being unpacked into another number of targets.
        """
        frame = sys._getframe().f_back
        if frame is not None:
            code, place = frame.f_code.co_code, frame.f_lasti
            if code[place + 1] != 4 and code[place] == _UNPACK:
                try:
                    raise UnpackingError(
                        f"The result of a step has 4 items, not {code[place + 1]}: states, rewards, dones, infos = "
                        "env.step(actions). result.terminated and result.truncated are attributes; the step() of "
                        "env.to_gymnasium() returns Gymnasium's five items."
                    )
                except UnpackingError as error:
                    shorten(error)
                    raise  # which adds no frame
        return tuple.__iter__(self)

    def __getnewargs__(self) -> tuple[Any, ...]:
        """Let a result be pickled and copied."""
        return (*self, self.terminated, self.truncated, self.env_ids)

    states: Any = property(itemgetter(0))
    rewards: Any = property(itemgetter(1))
    dones: Any = property(itemgetter(2))
    infos: Any = property(itemgetter(3))


class StepBatch(list[tuple[Any, Any, Any, Any]]):
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


Flags = tuple[Array, Array, Array]
"""How a step left episodes, one row per env of the answer: terminated, truncated, either of them."""


def by_item(batch: Batch, landed: Landed, rows: Any, flags: Flags, infos: Array, copy: bool) -> StepResult:
    """Return an answer as four batched items; with ``copy=False`` states may be read-only views.

    Args:
        batch: The pool's batch.
        landed: Who answered what beside the batch.
        rows: Rows of the envs that were stepped.
        flags: How the step left episodes, already the user's.
        infos: One per env of the answer, already the user's.
        copy: Whether states are copied.
    """
    states: Any
    rewards = _rewards(batch, landed, rows) if landed.extras else batch.rewards[rows].copy()
    if len(landed.stepped) == len(landed.env_ids):
        states = gather_states(batch, landed.stepped, rows, landed.extras, copy)
        env_ids = batch.env_ids[rows].copy()
    else:
        states = object_array(_completed(landed, list_states(batch, landed.stepped, landed.extras)))
        rewards = object_array(_completed(landed, rewards.tolist()))
        env_ids = np.array(landed.env_ids, dtype=np.int64)
    return StepResult(states, rewards, flags[2], infos, flags[0], flags[1], env_ids)


def by_env(batch: Batch, landed: Landed, rows: Any, flags: Flags, infos: Array) -> StepBatch:
    """Return an answer as one 4-tuple per env. Arguments as in `by_item`."""
    states = _completed(landed, list_states(batch, landed.stepped, landed.extras))
    rewards = _completed(landed, _rewards(batch, landed, rows).tolist())
    items = list(zip(states, rewards, flags[2].tolist(), infos.tolist(), strict=True))
    env_ids = np.array(landed.env_ids, dtype=np.int64)
    return StepBatch(items, terminated=flags[0], truncated=flags[1], env_ids=env_ids)


def first_states(batch: Batch, landed: Landed, is_listed: bool, copy: bool) -> Any:
    """Return the states of a reset, ``None`` where an env is absent: batched, or as a list with one per env."""
    is_whole = len(landed.stepped) == len(landed.env_ids)
    if is_whole and not is_listed:
        return gather_states(batch, landed.stepped, batch.rows(landed.stepped), landed.extras, copy)
    states = _completed(landed, list_states(batch, landed.stepped, landed.extras))
    return states if is_listed else object_array(states)


def batch_states(layout: Layout, states: Mapping[int, Any], env_ids: Sequence[int], absent: Collection[int]) -> Any:
    """Return states that are not in a batch as if they were.

    Args:
        layout: Of the batch.
        states: By env id.
        env_ids: Whose, in the order of the answer.
        absent: Those of them that have none: in their place is ``None``.

    Raises:
        EnvContractError: If one does not fit its space; ``error.partial`` maps the others' ids to theirs.
    """
    structure, leaves, failures = layout.states, {}, []
    for env_id in env_ids:
        if env_id in absent:
            continue
        try:
            leaves[env_id] = structure.split_state(states.get(env_id))
            for index, leaf in enumerate(leaves[env_id]):
                structure.check_leaf(index, leaf)
        except EnvContractError as error:
            failures.append(Failure(error, env_id, "get_observations()"))
    if failures:
        failed = {failure.env_id for failure in failures}
        raise_failures(failures, {env_id: states.get(env_id) for env_id in leaves if env_id not in failed})
    if len(leaves) < len(env_ids):
        return object_array([None if env_id in absent else states.get(env_id) for env_id in env_ids])
    columns = zip(*leaves.values(), strict=True)
    return structure.join([structure.stack(index, column) for index, column in enumerate(columns)])


def _rewards(batch: Batch, landed: Landed, rows: Any) -> Array:
    """Return the rewards of the envs that were stepped."""
    rewards: Array = batch.rewards[rows].copy()
    loose = {env_id: extra.reward for env_id, extra in landed.extras.items() if extra.reward is not None}
    if not loose:
        return rewards
    plain = rewards.tolist()
    return object_array(
        [loose[env_id][0] if env_id in loose else plain[index] for index, env_id in enumerate(landed.stepped)]
    )


def _completed(landed: Landed, values: list[Any]) -> list[Any]:
    """Put ``None`` where an env is absent."""
    if len(values) == len(landed.env_ids):
        return values
    found = dict(zip(landed.stepped, values, strict=True))
    return [found.get(env_id) for env_id in landed.env_ids]


def gather_states(batch: Batch, env_ids: Sequence[int], rows: Any, extras: Mapping[int, Extra], copy: bool) -> Any:
    """Return the states of these envs, which have these rows, batched, in the order of ``env_ids``."""
    if batch.single_state is not None:  # what most envs have
        return _selected(batch.single_state, rows, copy)
    structure = batch.layout.states
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
    if extra.ended_state is not None:
        return extra.ended_state[0]
    if batch.single_state is not None:
        single: Any = batch.ended_states[0]
        return single[row].copy()
    loose = iter(extra.ended_loose or ())
    leaves = [next(loose) if array is None else array[row].copy() for array in batch.ended_states]
    return batch.layout.states.join(leaves)


def _selected(array: Array, rows: Any, copy: bool) -> Array:
    selected: Array = array[rows]
    if type(rows) is slice:  # else the selection is a copy already
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
