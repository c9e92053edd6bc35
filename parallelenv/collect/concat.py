"""Joining rollouts, in time or side by side, and evaluations."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

from parallelenv.contract.batch import Array
from parallelenv.contract.rollout_data import ExtrasFormat, empty_array, join_forms, map_leaves
from parallelenv.contract.spaces import is_tensor, object_array
from parallelenv.errors import ArgumentError
from parallelenv.rollouts.evaluation import Evaluation
from parallelenv.rollouts.trajectory import Rollout


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
        _forms((one, other))
    except ArgumentError as error:
        raise ArgumentError(f"{what} cannot be put together. {error}") from None


def can_follow(one: Rollout, other: Rollout) -> bool:
    """Return whether rollouts can be joined in time; not if envs or policy were replaced in between."""
    try:
        refuse_different(one, other, "They")
    except ArgumentError:
        return False
    return len(one.env_ids) == len(other.env_ids)


def join_in_time(parts: Sequence[Rollout]) -> Rollout:
    """Join consecutive rollouts of the same envs.

    If a part begins an episode while the one before it left the env's episode open, because the env was lost, the open
    one becomes truncated, with its last known state.
    """
    if len(parts) == 1:
        return parts[0]
    firsts = np.cumsum([0, *map(len, parts[:-1])]).tolist()
    dones = np.concatenate([part.dones for part in parts])
    made = np.concatenate([part.valid for part in parts]) | dones
    cuts = []
    for before, later, step in zip(parts, parts[1:], firsts[1:], strict=False):
        last = step - 1 - made[:step][::-1].argmax(axis=0)
        is_open = made[:step].any(axis=0) & ~dones[last, np.arange(len(last))]
        columns = np.flatnonzero(later.starts & is_open)
        states = _walk(before.states, [before.final_states], partial(_chosen, columns=columns))
        cuts.append((states, np.column_stack([last[columns], columns])))
    return Rollout(
        **_stacked(parts, [(step, 0) for step in firsts], cuts),
        env_ids=parts[0].env_ids,
        starts=parts[0].starts,
        final_states=parts[-1].final_states,
        rnn_state=parts[-1].rnn_state,
    )


def join_beside(parts: Sequence[Rollout]) -> Rollout:
    """Join rollouts of different envs, which are renumbered. Shorter ones are padded with steps that are not valid."""
    if len(parts) == 1:
        return parts[0]
    *columns, num_envs = np.cumsum([0, *(len(part.env_ids) for part in parts)]).tolist()
    own = [slice(column, column + len(part.env_ids)) for part, column in zip(parts, columns, strict=True)]
    join_leaves = partial(_placed, places=own, shape=(num_envs,))
    memories = [part.rnn_state for part in parts]
    return Rollout(
        **_stacked(parts, [(0, column) for column in columns], []),
        env_ids=np.arange(num_envs, dtype=np.int64),
        starts=np.concatenate([part.starts for part in parts]),
        final_states=_walk(parts[0].states, [part.final_states for part in parts], join_leaves),
        rnn_state=None if any(one is None for one in memories) else _walk(memories[0], memories, join_leaves),
    )


Ends = tuple[Any, Array]
"""Last states of episodes, and the step and column where each ended."""


def _stacked(parts: Sequence[Rollout], offsets: Sequence[tuple[int, int]], cuts: Sequence[Ends]) -> dict[str, Any]:
    """Return what joined rollouts have of every step.

    Args:
        parts: The rollouts.
        offsets: First step and column of each.
        cuts: Episodes that become truncated.
    """
    sizes = np.add([part.valid.shape for part in parts], offsets)
    shape = tuple(sizes.max(axis=0).tolist())
    places = [tuple(map(slice, offset, size)) for offset, size in zip(offsets, sizes.tolist(), strict=True)]
    join_leaves = partial(_placed, places=places, shape=shape)
    joined: dict[str, Any] = {}
    for name in ("states", "actions", "rewards", "terminated", "truncated", "valid"):
        nests = [getattr(part, name) for part in parts]
        joined[name] = _walk(nests[0], nests, join_leaves)
    for _, at in cuts:
        joined["truncated"][tuple(at.T)] = True
    forms = _forms(parts).items()
    joined["extras"] = {name: empty_array((*shape, *form.shape), form.dtype) for name, form in forms}
    for part, place in zip(parts, places, strict=True):
        for name, array in part.extras.items():
            joined["extras"][name][place] = array
    ends = [(part.ended_states, np.argwhere(part.dones) + offset) for part, offset in zip(parts, offsets, strict=True)]
    joined["ended_states"] = _ended_states(joined["terminated"] | joined["truncated"], [*ends, *cuts])
    for name in ("infos", "reset_infos"):
        infos = {
            (step + first, env_id + column): info
            for part, (first, column) in zip(parts, offsets, strict=True)
            for (step, env_id), info in getattr(part, name).items()
        }
        joined[name] = {place: infos[place] for place in sorted(infos)}
    return joined


def _chosen(leaves: list[Any], columns: Array) -> Any:
    (leaf,) = leaves
    return object_array([leaf[column] for column in columns]) if isinstance(leaf, tuple) else leaf[columns]


def _ended_states(dones: Array, ends: Sequence[Ends]) -> Any:
    """Return all last states in the order of the ``True`` in ``dones``."""
    number = dones.ravel().cumsum().reshape(dones.shape) - 1
    known = [(states, number[tuple(at.T)]) for states, at in ends if len(at)] or [(ends[0][0], slice(0))]
    states, numbers = zip(*known, strict=True)
    return _walk(states[0], states, partial(_placed, places=numbers, shape=(int(dones.sum()),)))


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
        heads = [leaf.shape[:axes] for leaf in leaves]
        leaves = [
            object_array([leaf[place] for place in np.ndindex(*head)]).reshape(head)
            for leaf, head in zip(leaves, heads, strict=True)
        ]
    first, shape = leaves[0], (*shape, *leaves[0].shape[axes:])
    is_array = not is_tensor(first)
    whole = empty_array(shape, np.result_type(*[leaf.dtype for leaf in leaves])) if is_array else first.new_zeros(shape)
    for leaf, place in zip(leaves, places, strict=True):
        whole[place] = leaf
    return whole


def _forms(parts: Sequence[Rollout]) -> dict[str, ExtrasFormat]:
    forms: dict[str, ExtrasFormat] = {}
    for part in parts:
        found = {name: ExtrasFormat(array.shape[2:], array.dtype) for name, array in part.extras.items()}
        forms = join_forms(forms, found)
    return forms


def join_evaluations(parts: Sequence[Evaluation]) -> Evaluation:
    """Return the episodes of all, those of the first, then those of the second ... Envs are renumbered in order."""
    env_ids, offset = [], 0
    for part in parts:
        env_ids.append(part.env_ids + offset)
        offset += int(part.env_ids.max(initial=-1)) + 1
    names = ("returns", "lengths", "terminated", "truncated", "infos")
    joined = {name: np.concatenate([getattr(part, name) for part in parts]) for name in names}
    return Evaluation(**joined, env_ids=np.concatenate(env_ids))
