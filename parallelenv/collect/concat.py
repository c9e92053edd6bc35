"""Joining rollouts, in time or side by side, and evaluations."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

from parallelenv.contract.batch import Array
from parallelenv.contract.rollout_data import ExtrasFormat, StepIndex, empty_array, join_forms, map_leaves
from parallelenv.contract.spaces import is_tensor, object_array
from parallelenv.errors import ArgumentError
from parallelenv.rollouts.evaluation import Evaluation
from parallelenv.rollouts.trajectory import Rollout

IN_TIME, BESIDE = 0, 1
"""Axes of rollouts along which they can be joined."""


def refuse_different(one: Rollout, other: Rollout, what: str) -> None:
    """Check that rollouts can be joined. ``what`` names them in messages.

    Raises:
        ArgumentError: If the nesting of states, actions or memories, or the shapes of extras differ.
    """
    for name in ("states", "actions", "rnn_state"):
        forms = [map_leaves(getattr(part, name), lambda _: "an array") for part in (one, other)]
        if forms[0] != forms[1] and (name != "rnn_state" or None not in forms):
            raise ArgumentError(f"{what} cannot be put together: their {name} are {forms[0]} and {forms[1]}.")
    try:
        _extras_forms((one, other))
    except ArgumentError as error:
        raise ArgumentError(f"{what} cannot be put together. {error}") from None


def can_follow(one: Rollout, other: Rollout) -> bool:
    """Return whether rollouts can be joined in time; not if envs or policy were replaced in between."""
    try:
        refuse_different(one, other, "They")
    except ArgumentError:
        return False
    return len(one.env_ids) == len(other.env_ids)


def join(parts: Sequence[Rollout], axis: int) -> Rollout:
    """Join rollouts that `refuse_different` accepts.

    Args:
        parts: The rollouts.
        axis: `IN_TIME` joins consecutive rollouts of the same envs. If a part begins an episode while the one before
            it left the env's episode open, because the env was lost, the open one becomes truncated, with its last
            known state. `BESIDE` joins rollouts of different envs, which are renumbered. Shorter ones are padded with
            steps that are not valid.
    """
    if len(parts) == 1:
        return parts[0]
    edges, zeros = np.cumsum([0, *(part.valid.shape[axis] for part in parts)]).tolist(), [0] * len(parts)
    if axis == IN_TIME:
        shape, offsets = (edges[-1], len(parts[0].env_ids)), list(zip(edges, zeros, strict=False))
    else:
        shape, offsets = (max(map(len, parts)), edges[-1]), list(zip(zeros, edges, strict=False))
    columns = [slice(column, column + len(part.env_ids)) for part, (_, column) in zip(parts, offsets, strict=True)]
    places = [
        (slice(step, step + len(part)), own) for part, (step, _), own in zip(parts, offsets, columns, strict=True)
    ]

    def stacked(name: str) -> Any:
        return _walk(getattr(parts[0], name), _each(parts, name), partial(_placed, places=places, shape=shape))

    def beside(name: str, form: Any) -> Any:
        return _walk(form, _each(parts, name), partial(_placed, places=columns, shape=shape[1:]))

    joined = {name: stacked(name) for name in ("states", "actions", "rewards", "terminated", "truncated", "valid")}
    joined["extras"] = _extras(parts, places, shape)
    joined |= {name: _moved(_each(parts, name), offsets) for name in ("infos", "reset_infos")}
    ends = [(part.ended_states, np.argwhere(part.dones) + offset) for part, offset in zip(parts, offsets, strict=True)]
    if axis == IN_TIME:
        cuts = [_cut_off(*pair) for pair in itertools.pairwise(parts)]
        ends += [(states, at + offset) for (states, at), offset in zip(cuts, offsets, strict=False)]
        for _, at in ends[len(parts) :]:
            joined["truncated"][tuple(at.T)] = True
        joined |= {name: getattr(parts[0], name) for name in ("env_ids", "starts")}
        joined |= {name: getattr(parts[-1], name) for name in ("final_states", "rnn_state")}
    else:
        joined |= {"env_ids": np.arange(edges[-1], dtype=np.int64), "starts": beside("starts", None)}
        has_memory = all(part.rnn_state is not None for part in parts)
        joined["rnn_state"] = beside("rnn_state", parts[0].rnn_state) if has_memory else None
        joined["final_states"] = beside("final_states", parts[0].states)
    joined["ended_states"] = _ended_states(joined["terminated"] | joined["truncated"], ends)
    return Rollout(**joined)


def _each(parts: Sequence[Rollout], name: str) -> list[Any]:
    return [getattr(part, name) for part in parts]


def _walk(form: Any, nests: Sequence[Any], join_leaves: Callable[[list[Any]], Any]) -> Any:
    """Join nests leaf by leaf. ``form`` tells the leaves, as a batch of texts or graphs is a tuple as well."""
    if isinstance(form, dict):
        return {key: _walk(form[key], [nest[key] for nest in nests], join_leaves) for key in form}
    if isinstance(form, tuple | list):
        joined = [_walk(part, [nest[index] for nest in nests], join_leaves) for index, part in enumerate(form)]
        return type(form)(*joined) if hasattr(form, "_fields") else type(form)(joined)
    return join_leaves(list(nests))


def _placed(leaves: list[Any], places: Sequence[Any], shape: tuple[int, ...]) -> Any:
    """Return one leaf with all of these at their places; of objects if their shapes or types differ.

    Args:
        leaves: Arrays, tensors, or tuples of objects.
        places: Index of each in the result.
        shape: Leading axes of the result.
    """
    if all(isinstance(leaf, tuple) for leaf in leaves):
        return tuple(value for leaf in leaves for value in leaf)
    leaves = [object_array(leaf) if isinstance(leaf, tuple) else leaf for leaf in leaves]
    axes = len(shape)
    if len({(is_tensor(leaf), leaf.shape[axes:], leaf.dtype == object) for leaf in leaves}) > 1:
        places_of = [np.ndindex(*leaf.shape[:axes]) for leaf in leaves]
        leaves = [
            object_array([leaf[at] for at in every]).reshape(leaf.shape[:axes])
            for leaf, every in zip(leaves, places_of, strict=True)
        ]
    shape = (*shape, *leaves[0].shape[axes:])
    if is_tensor(leaves[0]):
        whole = leaves[0].new_zeros(shape)
    else:
        whole = empty_array(shape, np.result_type(*[leaf.dtype for leaf in leaves]))
    for leaf, place in zip(leaves, places, strict=True):
        whole[place] = leaf
    return whole


def _extras_forms(parts: Sequence[Rollout]) -> dict[str, ExtrasFormat]:
    forms: dict[str, ExtrasFormat] = {}
    for part in parts:
        found = {name: ExtrasFormat(array.shape[2:], array.dtype) for name, array in part.extras.items()}
        forms = join_forms(forms, found)
    return forms


def _extras(parts: Sequence[Rollout], places: Sequence[Any], shape: tuple[int, int]) -> dict[str, Array]:
    """Return the extras of policies, with zeros where a policy returned none."""
    extras = {name: empty_array((*shape, *form.shape), form.dtype) for name, form in _extras_forms(parts).items()}
    for part, place in zip(parts, places, strict=True):
        for name, array in part.extras.items():
            extras[name][place] = array
    return extras


def _cut_off(part: Rollout, later: Rollout) -> tuple[Any, Array]:
    """Return last states and places of episodes that a rollout leaves open and the later one does not continue."""
    last = len(part) - 1 - part.valid[::-1].argmax(axis=0)
    is_open = part.valid.any(axis=0) & ~part.dones[last, np.arange(len(last))]
    columns = np.flatnonzero(later.starts & is_open)

    def chosen(leaves: list[Any]) -> Any:
        (leaf,) = leaves
        return object_array([leaf[column] for column in columns]) if isinstance(leaf, tuple) else leaf[columns]

    return _walk(part.states, [part.final_states], chosen), np.column_stack([last[columns], columns])


def _ended_states(dones: Array, ends: Sequence[tuple[Any, Array]]) -> Any:
    """Return last states in the order of the ``True`` in ``dones``. ``ends``: states of some ends, and their places."""
    number = dones.ravel().cumsum().reshape(dones.shape) - 1
    known = [(states, number[tuple(at.T)]) for states, at in ends if len(at)] or [(ends[0][0], slice(0))]
    states, numbers = zip(*known, strict=True)
    return _walk(states[0], states, partial(_placed, places=numbers, shape=(int(dones.sum()),)))


def _moved(infos_of: Sequence[dict[StepIndex, Any]], offsets: Sequence[tuple[int, int]]) -> dict[StepIndex, Any]:
    """Return infos by their place in the joined rollout, sorted by step."""
    moved = {
        (step + first, env_id + column): info
        for infos, (first, column) in zip(infos_of, offsets, strict=True)
        for (step, env_id), info in infos.items()
    }
    return {place: moved[place] for place in sorted(moved)}


def join_evaluations(parts: Sequence[Evaluation]) -> Evaluation:
    """Return the episodes of all, those of the first, then those of the second ... Envs are renumbered in order."""
    env_ids, offset = [], 0
    for part in parts:
        env_ids.append(part.env_ids + offset)
        offset += int(part.env_ids.max(initial=-1)) + 1
    names = ("returns", "lengths", "terminated", "truncated", "infos")
    joined = {name: np.concatenate([getattr(part, name) for part in parts]) for name in names}
    return Evaluation(**joined, env_ids=np.concatenate(env_ids))
