"""Joining rollouts, in time and side by side, and evaluations."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, TypeAlias

import numpy as np

from parallelenv.contract.batch import Array
from parallelenv.contract.rollout_data import ExtrasFormat, empty_array, forms_of, join_forms, map_leaves, stack_extras
from parallelenv.contract.spaces import object_array
from parallelenv.contract.tensors import is_tensor
from parallelenv.errors import ArgumentError
from parallelenv.rollouts.evaluation import Evaluation
from parallelenv.rollouts.rollout import Rollout

Nest: TypeAlias = Any
"""States, actions or memories: arrays, tensors or tuples of objects in dicts, tuples and lists."""
Ends = tuple[Nest, Array]
"""Last states of episodes, and the step and column where each ended."""


def refuse_different(one: Rollout, other: Rollout, what: str) -> None:
    """Raise an `ArgumentError` if nesting of states, actions or memories, or shapes of extras of rollouts differ.

    ``what`` names them in messages.
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


def join(histories: Sequence[Sequence[Rollout]]) -> Rollout:
    """Join rollouts: consecutive ones of the same envs in time, and the results side by side, with envs renumbered.

    If a part begins an episode while the one before it left the env's episode open, because the env was lost, the open
    one becomes truncated, with its last known state. Shorter histories are padded with steps that are not valid.
    """
    (first, *rest), *others = histories
    if not rest and not others:
        return first
    parts = [part for history in histories for part in history]
    lasts = [history[-1] for history in histories]
    *columns, num_envs = np.cumsum([0, *(len(last.env_ids) for last in lasts)]).tolist()
    offsets: list[tuple[int, int]] = []
    cuts: list[Ends] = []
    for history, column in zip(histories, columns, strict=True):
        steps = np.cumsum([0, *map(len, history[:-1])]).tolist()
        offsets += [(step, column) for step in steps]
        cuts += _cut_off(history, steps, column)
    own = [slice(column, column + len(last.env_ids)) for column, last in zip(columns, lasts, strict=True)]
    join_envs = partial(_placed, places=own, shape=(num_envs,))
    memories = [last.rnn_state for last in lasts]
    return Rollout(
        **_stacked(parts, offsets, cuts),
        env_ids=np.arange(num_envs, dtype=np.int64) if others else first.env_ids,
        starts=np.concatenate([history[0].starts for history in histories]),
        final_states=_walk(first.states, [last.final_states for last in lasts], join_envs),
        rnn_state=None if any(one is None for one in memories) else _walk(memories[0], memories, join_envs),
    )


def _cut_off(history: Sequence[Rollout], steps: Sequence[int], column: int) -> Iterator[Ends]:
    """Yield the ends of episodes that a part left open though the next one, from its step on, has begun others."""
    dones = np.concatenate([part.dones for part in history])
    made = np.concatenate([part.valid for part in history]) | dones
    for before, later, step in zip(history, history[1:], steps[1:], strict=False):
        last = step - 1 - made[:step][::-1].argmax(axis=0)
        is_open = made[:step].any(axis=0) & ~dones[last, np.arange(len(last))]
        chosen = np.flatnonzero(later.starts & is_open)
        states = _walk(before.states, [before.final_states], partial(_chosen, rows=chosen))
        yield states, np.column_stack([last[chosen], chosen + column])


def _chosen(leaves: Sequence[Nest], rows: Array) -> Nest:
    (leaf,) = leaves
    return object_array([leaf[row] for row in rows]) if isinstance(leaf, tuple) else leaf[rows]


def _stacked(parts: Sequence[Rollout], offsets: Sequence[tuple[int, int]], cuts: Sequence[Ends]) -> dict[str, Any]:
    """Return what joined rollouts, given the first step and column of each, have of every step."""
    sizes = np.add([part.valid.shape for part in parts], offsets)
    shape = tuple(sizes.max(axis=0).tolist())
    places = [tuple(map(slice, offset, size)) for offset, size in zip(offsets, sizes.tolist(), strict=True)]
    join_steps = partial(_placed, places=places, shape=shape)
    joined: dict[str, Any] = {}
    for name in ("states", "actions", "rewards", "terminated", "truncated", "valid"):
        nests = [getattr(part, name) for part in parts]
        joined[name] = _walk(nests[0], nests, join_steps)
    for _, at in cuts:
        joined["truncated"][tuple(at.T)] = True
    extras = zip([part.extras for part in parts], places, strict=True)
    joined["extras"] = stack_extras(extras, _forms(parts), shape)
    for name in ("infos", "reset_infos"):
        infos = {
            (step + first, env_id + column): info
            for part, (first, column) in zip(parts, offsets, strict=True)
            for (step, env_id), info in getattr(part, name).items()
        }
        joined[name] = {place: infos[place] for place in sorted(infos)}
    # Last states, in the order of the True in `dones`.
    dones = joined["terminated"] | joined["truncated"]
    number = dones.ravel().cumsum().reshape(shape) - 1
    ends = [(part.ended_states, np.argwhere(part.dones) + offset) for part, offset in zip(parts, offsets, strict=True)]
    known = [(states, number[tuple(at.T)]) for states, at in (*ends, *cuts) if len(at)] or [(ends[0][0], slice(0))]
    states, numbers = zip(*known, strict=True)
    joined["ended_states"] = _walk(states[0], states, partial(_placed, places=numbers, shape=(int(dones.sum()),)))
    return joined


def _walk(form: Nest, nests: Sequence[Nest], join_leaves: Callable[[Sequence[Nest]], Nest]) -> Nest:
    """Join nests leaf by leaf. ``form`` tells the leaves, as a batch of texts or graphs is a tuple as well."""
    if isinstance(form, dict):
        return {key: _walk(form[key], [nest[key] for nest in nests], join_leaves) for key in form}
    if isinstance(form, tuple | list):
        joined = [_walk(part, [nest[index] for nest in nests], join_leaves) for index, part in enumerate(form)]
        return type(form)(*joined) if hasattr(form, "_fields") else type(form)(joined)
    return join_leaves(nests)


def _placed(leaves: Sequence[Nest], places: Sequence[Any], shape: tuple[int, ...]) -> Nest:
    """Return one leaf, with the leading axes ``shape``, that has each of these at its place.

    The leaves are arrays, tensors, or tuples of objects; the result is of objects if their shapes or types differ.
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
        forms = join_forms(forms, forms_of(part.extras))
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
