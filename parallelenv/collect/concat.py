"""Joining rollouts, in time or side by side."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from parallelenv.contract.batch import Array
from parallelenv.contract.rollout_data import ExtrasFormat, StepIndex, empty_array, join_forms
from parallelenv.contract.spaces import is_tensor, object_array, tensors
from parallelenv.errors import ArgumentError
from parallelenv.rollouts.evaluation import Evaluation
from parallelenv.rollouts.trajectory import Rollout

LeafJoin = Callable[[Sequence[Any]], Any]


def are_of_one_kind(one: Rollout, other: Rollout) -> bool:
    """Return whether two rollouts can be joined in time; not if envs or policy were replaced in between."""
    try:
        _refuse_different(one, other, "")
    except ArgumentError:
        return False
    return len(one.env_ids) == len(other.env_ids)


def _refuse_different(one: Rollout, other: Rollout, what: str) -> None:
    """Check that rollouts can be joined. ``what`` names them in messages.

    Raises:
        ArgumentError: If the nesting of states or actions, or the shapes of extras differ.
    """
    for name in ("states", "actions", "rnn_state"):
        forms = [_form(getattr(part, name)) for part in (one, other)]
        if forms[0] != forms[1] and (name != "rnn_state" or None not in forms):
            raise ArgumentError(f"{what} cannot be put together: their {name} are {forms[0]} and {forms[1]}.")
    try:
        join_forms(*(_forms(part) for part in (one, other)))
    except ArgumentError as error:
        raise ArgumentError(f"{what} cannot be put together. {error}") from None


def _form(nest: Any) -> Any:
    """Return the nesting of a value, without its content."""
    if isinstance(nest, dict):
        return {key: _form(nest[key]) for key in sorted(nest, key=str)}
    if isinstance(nest, tuple | list):
        return tuple(_form(part) for part in nest)
    return None if nest is None else _Leaf()


class _Leaf:
    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Leaf)

    def __hash__(self) -> int:
        return 0

    def __repr__(self) -> str:
        return "an array"


def _forms(part: Rollout) -> dict[str, ExtrasFormat]:
    return {name: ExtrasFormat(array.shape[2:], array.dtype) for name, array in part.extras.items()}


def join_in_time(parts: Sequence[Rollout]) -> Rollout:
    """Join consecutive rollouts of the same envs.

    If a part begins an episode while the one before it left the env's episode open, because the env was lost, the open
    one becomes truncated, with its last known state.
    """
    parts = [part for part in parts if len(part)] or list(parts[-1:])
    if len(parts) == 1:
        return parts[0]
    firsts = np.cumsum([0, *map(len, parts)])
    states = _joined_leaves(parts[0].states, [part.states for part in parts], 0)
    flags = {name: np.concatenate([getattr(part, name) for part in parts]) for name in ("terminated", "truncated")}
    ended = [_JoinedEnds.of(part, int(first)) for part, first in zip(parts, firsts, strict=False)]
    for part, later, first in zip(parts, parts[1:], firsts, strict=False):
        cut = _JoinedEnds.cut_off(part, later, int(first))
        flags["truncated"][cut.steps, cut.columns] = True
        ended.append(cut)
    return Rollout(
        states=states,
        actions=_joined_leaves(parts[0].actions, [part.actions for part in parts], 0),
        rewards=np.concatenate([part.rewards for part in parts]),
        **flags,
        valid=np.concatenate([part.valid for part in parts]),
        extras=_joined_extras(parts, np.concatenate),
        final_states=parts[-1].final_states,
        ended_states=_JoinedEnds.joined(states, ended),
        infos=_shifted([part.infos for part in parts], [(int(first), 0) for first in firsts]),
        reset_infos=_shifted([part.reset_infos for part in parts], [(int(first), 0) for first in firsts]),
        env_ids=parts[0].env_ids,
        starts=parts[0].starts,
        rnn_state=parts[-1].rnn_state,
    )


def join_beside(parts: Sequence[Rollout]) -> Rollout:
    """Join the rollouts of collectors side by side: the envs of the first, then those of the second ...

    Envs are renumbered. Shorter rollouts are padded with steps that are not valid.

    Raises:
        ArgumentError: If they differ too much.
    """
    for rank, part in enumerate(parts):
        try:
            _refuse_different(parts[0], part, f"The collections of collectors 0 and {rank}")
        except ArgumentError as error:
            raise ArgumentError(f"{error} Nothing is lost: stream() gives them one by one.") from None
    num_steps = max(map(len, parts))
    columns = np.cumsum([0, *(len(part.env_ids) for part in parts)])
    shifts = [(0, int(column)) for column in columns]
    parts = [_lengthened(part, num_steps) for part in parts]
    states = _joined_leaves(parts[0].states, [part.states for part in parts], 1)
    names = ("rewards", "terminated", "truncated", "valid")
    ended = [_JoinedEnds.of(part, 0, int(column)) for part, column in zip(parts, columns, strict=False)]
    finals = [part.final_states for part in parts]
    memories = [part.rnn_state for part in parts]
    return Rollout(
        states=states,
        actions=_joined_leaves(parts[0].actions, [part.actions for part in parts], 1),
        **{name: np.concatenate([getattr(part, name) for part in parts], axis=1) for name in names},
        extras=_joined_extras(parts, lambda arrays: np.concatenate(arrays, axis=1)),
        final_states=_walk(states, finals, lambda leaves: _joined_leaf(leaves, 0, 1)),
        ended_states=_JoinedEnds.joined(states, ended),
        infos=_shifted([part.infos for part in parts], shifts),
        reset_infos=_shifted([part.reset_infos for part in parts], shifts),
        env_ids=np.arange(columns[-1], dtype=np.int64),
        starts=np.concatenate([part.starts for part in parts]),
        rnn_state=None if any(one is None for one in memories) else _joined_memory(memories),
    )


class _JoinedEnds:
    """Ends of episodes: steps, columns and last states, the latter nested like the space."""

    def __init__(self, steps: Array, columns: Array, states: Any) -> None:
        self.steps, self.columns, self.states = steps, columns, states

    @classmethod
    def of(cls, part: Rollout, first: int, column: int = 0) -> _JoinedEnds:
        """Return the ends in a rollout whose first step and column have these numbers."""
        places = np.argwhere(part.dones)
        return cls(places[:, 0] + first, places[:, 1] + column, part.ended_states)

    @classmethod
    def cut_off(cls, part: Rollout, later: Rollout, first: int) -> _JoinedEnds:
        """Return the episodes that a rollout leaves open and the later one does not continue."""
        last = len(part) - 1 - part.valid[::-1].argmax(axis=0)
        everyone = np.arange(len(part.env_ids))
        is_open = part.valid.any(axis=0) & ~part.dones[last, everyone]
        columns = np.flatnonzero(later.starts & is_open)
        states = _walk(part.states, [part.final_states], lambda leaves: _picked(leaves[0], columns))
        return cls(last[columns] + first, columns, states)

    @staticmethod
    def joined(form: Any, parts: Sequence[_JoinedEnds]) -> Any:
        """Return all last states, ordered by step, then column. ``form`` gives their nesting."""
        parts = [part for part in parts if len(part.steps)] or list(parts[:1])
        steps, columns = (np.concatenate([getattr(part, name) for part in parts]) for name in ("steps", "columns"))
        order = np.lexsort((columns, steps))
        return _walk(form, [part.states for part in parts], lambda leaves: _picked(_joined_leaf(leaves, 0, 1), order))


def _walk(form: Any, nests: Sequence[Any], join: LeafJoin) -> Any:
    """Join nests leaf by leaf. ``form`` tells the leaves, as a batch of texts or graphs is a tuple as well."""
    if isinstance(form, dict):
        return {key: _walk(form[key], [nest[key] for nest in nests], join) for key in form}
    if isinstance(form, tuple):
        return tuple(_walk(part, [nest[index] for nest in nests], join) for index, part in enumerate(form))
    return join(nests)


def _joined_leaves(form: Any, nests: Sequence[Any], axis: int) -> Any:
    return _walk(form, nests, lambda leaves: _joined_leaf(leaves, axis, 2))


def _joined_leaf(leaves: Sequence[Any], axis: int, num_axes: int) -> Any:
    """Concatenate leaves; as objects if shapes or types differ.

    Args:
        leaves: Arrays, tensors, or tuples of objects.
        axis: Axis to concatenate along.
        num_axes: Number of axes before those of a value.
    """
    if all(map(is_tensor, leaves)) and len({leaf.shape[num_axes:] for leaf in leaves}) == 1:
        return tensors().cat(list(leaves), dim=axis)
    if all(isinstance(leaf, tuple) for leaf in leaves):
        return tuple(value for leaf in leaves for value in leaf)
    is_alike = all(isinstance(leaf, np.ndarray) for leaf in leaves) and (
        len({(leaf.shape[num_axes:], leaf.dtype == object) for leaf in leaves}) == 1
    )
    return np.concatenate([leaf if is_alike else _as_objects(leaf, num_axes) for leaf in leaves], axis=axis)


def _as_objects(leaf: Any, num_axes: int) -> Array:
    shape = np.shape(leaf)[:num_axes] if not isinstance(leaf, tuple) else (len(leaf),)
    if isinstance(leaf, np.ndarray) and leaf.dtype == object and leaf.ndim == num_axes:
        return leaf
    return object_array([leaf[place if len(place) > 1 else place[0]] for place in np.ndindex(*shape)]).reshape(shape)


def _picked(leaf: Any, rows: Array) -> Any:
    return object_array([leaf[row] for row in rows.tolist()]) if isinstance(leaf, tuple) else leaf[rows]


def _joined_memory(nests: Sequence[Any]) -> Any:
    first = nests[0]
    if isinstance(first, dict):
        return {key: _joined_memory([nest[key] for nest in nests]) for key in first}
    if isinstance(first, tuple | list):
        parts = [_joined_memory(column) for column in zip(*nests, strict=True)]
        return type(first)(*parts) if hasattr(first, "_fields") else type(first)(parts)
    return None if first is None else _joined_leaf(nests, 0, 1)


def _joined_extras(parts: Sequence[Rollout], join: LeafJoin) -> dict[str, Array]:
    """Join the extras of policies, with zeros where a policy returned none."""
    forms: dict[str, ExtrasFormat] = {}
    for part in parts:
        forms = join_forms(forms, _forms(part))
    return {name: join([_extra(part, name, form) for part in parts]) for name, form in forms.items()}


def _extra(part: Rollout, name: str, form: ExtrasFormat) -> Array:
    return part.extras[name] if name in part.extras else empty_array((*part.valid.shape, *form.shape), form.dtype)


def _shifted(infos_of: Sequence[Mapping[StepIndex, Any]], shifts: Sequence[StepIndex]) -> dict[StepIndex, Any]:
    """Return infos by their place in the joined rollout, sorted by step."""
    moved = {
        (step + first, env_id + column): info
        for infos, (first, column) in zip(infos_of, shifts, strict=False)
        for (step, env_id), info in infos.items()
    }
    return {place: moved[place] for place in sorted(moved)}


def without_rest(part: Rollout) -> Rollout:
    """Return a rollout without trailing steps that no env made."""
    num_steps = int(np.flatnonzero(part.valid.any(axis=1)).max(initial=-1)) + 1
    return part if num_steps == len(part) else _changed(part, lambda leaf: leaf[:num_steps])


def _lengthened(part: Rollout, num_steps: int) -> Rollout:
    """Return a rollout padded to a number of steps; the added ones are not valid."""
    missing = num_steps - len(part)

    def longer(leaf: Any) -> Any:
        shape = (missing, *leaf.shape[1:])
        if is_tensor(leaf):
            return tensors().cat([leaf, leaf.new_zeros(shape)])
        return np.concatenate([leaf, empty_array(shape, leaf.dtype)])

    return _changed(part, longer) if missing else part


def _changed(part: Rollout, change: Callable[[Any], Any]) -> Rollout:
    """Return a rollout of another length. ``change`` is applied to each of its arrays."""
    changed: dict[str, Any] = {
        name: _walk(getattr(part, name), [getattr(part, name)], lambda leaves: change(leaves[0]))
        for name in ("states", "actions")
    }
    changed |= {name: change(getattr(part, name)) for name in ("rewards", "terminated", "truncated", "valid")}
    changed["extras"] = {name: change(array) for name, array in part.extras.items()}
    return Rollout(**{**vars(part), **changed})


def join_evaluations(parts: Sequence[Evaluation]) -> Evaluation:
    """Return the episodes of all, those of the first, then those of the second ... Envs are renumbered in order."""
    names = ("returns", "lengths", "terminated", "truncated", "infos")
    env_ids, offset = [], 0
    for part in parts:
        env_ids.append(part.env_ids + offset)
        offset += int(part.env_ids.max(initial=-1)) + 1
    return Evaluation(
        **{name: np.concatenate([getattr(part, name) for part in parts]) for name in names},
        env_ids=np.concatenate(env_ids),
    )
