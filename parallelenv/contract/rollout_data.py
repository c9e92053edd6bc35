"""What the two sides of a rollout tell each other: an order for some steps, and the chunk of them that was made."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from parallelenv.contract.batch import Array, Batch
from parallelenv.contract.failures import Failure
from parallelenv.contract.protocol import Extra
from parallelenv.contract.spaces import describe_value, is_tensor, stack_values, tensors
from parallelenv.errors import ArgumentError

StepIndex = tuple[int, int]
"""A step, counted from the beginning of what it is a part of, and an env id."""


class RecurrentState(NamedTuple):
    """What a recurrent policy remembers of some envs.

    Attributes:
        env_ids: Whose rows these are.
        rows: A nest of dicts, tuples and lists of arrays, the first axis of each that of ``env_ids``.
        begins: Those of the envs whose episode has not begun: nothing is to be remembered.
    """

    env_ids: tuple[int, ...]
    rows: Any
    begins: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True)
class RolloutRequest:
    """What a host is to do next in a rollout. What each env may still do stands beside it in the command.

    Attributes:
        rollout: Which rollout it belongs to. A host keeps its copy of the policy until it hears of another one.
        policy: The policy and its `RecurrentState` or ``None``, pickled, ``(nbytes,)`` uint8; ``None`` if every host
            that is asked has its copy.
        num_steps: Steps to make, fewer if no env has any left; 0 if the policy is to be unpickled and nothing else.
        autoreset: As in `DonePolicy`.
        skips_done: As in `DonePolicy`.
    """

    rollout: int
    policy: Array | None
    num_steps: int
    autoreset: bool
    skips_done: bool


class Ended(NamedTuple):
    """Episodes that ended, in the order of their steps and then of their columns.

    Attributes:
        steps: ``(m,)`` int64.
        columns: ``(m,)`` int64, places in ``RolloutChunk.env_ids``.
        states: The last states, one array per leaf, ``(m, *shape)``; of objects for loose leaves.
    """

    steps: Array
    columns: Array
    states: list[Array]


@dataclass(slots=True)
class RolloutChunk:
    """The steps that one host has made with its envs, in ``num_steps`` rows and one column per env.

    Attributes:
        env_ids: Whose columns these are.
        states: What the policy saw, one array per leaf, ``(num_steps, k, *shape)``; of objects for loose leaves.
        actions: Likewise, its actions; a single array of objects if actions are loose.
        rewards: ``(num_steps, k)`` float64.
        flags: ``(num_steps, k, 2)`` bool: terminated, truncated.
        valid: ``(num_steps, k)`` bool: whether the env made this step.
        extras: What the policy said besides, ``(num_steps, k, ...)`` each.
        ended: Episodes that ended.
        said: What steps answered beside rows, by place.
        loose: Loose leaves of the states after the last step, by env id, if there are any.
        memory: What the policy remembers after the last step; ``None`` if it remembers nothing.
        seconds: How long the host took for it, without what messages take.
        failed: In which step an env failed, and why. It made no further one.
        broken: Why the policy has given no actions for the step after the last; ``None`` if it was not at fault.
        exhausted: Envs that have found no further episode. They made no further step.
    """

    env_ids: tuple[int, ...]
    states: list[Array]
    actions: list[Array]
    rewards: Array
    flags: Array
    valid: Array
    ended: Ended
    extras: dict[str, Array] = field(default_factory=dict)
    said: dict[StepIndex, Extra] = field(default_factory=dict)
    loose: dict[int, list[Any]] = field(default_factory=dict)
    memory: RecurrentState | None = None
    seconds: float = 0.0
    failed: Mapping[int, tuple[int, Failure]] = field(default_factory=dict)
    broken: Failure | None = None
    exhausted: Collection[int] = ()

    @property
    def num_steps(self) -> int:
        """Number of steps that were made."""
        return len(self.rewards)

    def __deepcopy__(self, memo: Any) -> RolloutChunk:
        """Return itself: a host has copied what goes in, and lets go of it. In one process that saves a copy of all."""
        return self


class ExtrasFormat(NamedTuple):
    """What one of the policy's extras is like.

    Attributes:
        shape: Of what it says of one env in one step.
        dtype: One that has room for all of it.
    """

    shape: tuple[int, ...]
    dtype: np.dtype[Any]


def join_forms(known: Mapping[str, ExtrasFormat], found: Mapping[str, ExtrasFormat]) -> dict[str, ExtrasFormat]:
    """Return forms of extras in which those known and those found are stacked.

    Raises:
        ArgumentError: If there is no such form.
    """
    joined = {**known, **found}
    for name in known.keys() & found.keys():
        before, now = known[name], found[name]
        try:
            dtype = np.promote_types(before.dtype, now.dtype)
        except TypeError:  # a date and a number, say
            dtype = None
        if dtype is None or before.shape != now.shape:
            raise ArgumentError(
                f"The policy's extras[{name!r}] are of shape {now.shape} and dtype {now.dtype} per env, but before, or "
                f"of other envs, of shape {before.shape} and dtype {before.dtype}. To be stacked they must be alike in "
                "every step."
            )
        joined[name] = ExtrasFormat(now.shape, dtype)
    return joined


def vacant(shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
    """Return an array of zeros, or of ``None`` if it is one of objects."""
    return np.full(shape, None, dtype) if dtype.kind == "O" else np.zeros(shape, dtype)


def room(shape: tuple[int, ...], like: Array | None) -> Array:
    """Return zeros for rows as an array of the batch has them; for a loose leaf ``None`` as many times."""
    return np.full(shape, None, dtype=object) if like is None else np.zeros((*shape, *like.shape[1:]), like.dtype)


def action_rooms(shape: tuple[int, ...], batch: Batch) -> list[Array]:
    """Return `room` for each leaf of the actions; for all together, as objects, if they are not in the batch."""
    return [room(shape, like) for like in batch.actions] or [room(shape, None)]


def join_ends(parts: Sequence[Ended], leaves: Sequence[Array | None]) -> Ended:
    """Return all of these as one, sorted. ``leaves``: the arrays of a batch, for their form."""
    if not parts:
        nothing = np.zeros(0, dtype=np.int64)
        return Ended(nothing, nothing.copy(), [room((0,), like) for like in leaves])
    steps, columns = (np.concatenate([part[index] for part in parts]) for index in (0, 1))
    order = np.lexsort((columns, steps))
    states = [np.concatenate([part.states[index] for part in parts])[order] for index in range(len(leaves))]
    return Ended(steps[order], columns[order], states)


def map_leaves(nest: Any, change: Callable[[Any], Any]) -> Any:
    """Return a nest of dicts, tuples and lists with each leaf changed; ``None`` stays."""
    if isinstance(nest, dict):
        return {key: map_leaves(part, change) for key, part in nest.items()}
    if isinstance(nest, tuple | list):
        parts = [map_leaves(part, change) for part in nest]
        return type(nest)(*parts) if hasattr(nest, "_fields") else type(nest)(parts)
    return None if nest is None else change(nest)


def check_rows(name: str, nest: Any, num_envs: int) -> None:
    """Refuse a nest in which a leaf has not one row per env.

    Raises:
        ArgumentError: If there is such a leaf.
    """

    def check(leaf: Any) -> None:
        shape = getattr(leaf, "shape", None)
        if not shape or shape[0] != num_envs:
            raise ArgumentError(
                f"{name} is {describe_value(leaf)}, for the states of {num_envs} envs. The first axis must be that of "
                "the envs."
            )

    map_leaves(nest, check)


def join_memories(parts: Sequence[tuple[RecurrentState, int] | None]) -> Any:
    """Return rows of memories, each given by its memory and its place there, as one nest.

    ``None`` stands for nothing remembered, a row of zeros. If there is nothing else, ``None`` is returned.

    Raises:
        ArgumentError: If they are not nests of one form.
    """
    first = next((part for part in parts if part is not None), None)
    if first is None:
        return None
    leaves: dict[int, list[Any]] = {}
    for memory in {id(part[0]): part[0] for part in parts if part is not None}.values():
        form, expected = (map_leaves(nest, lambda _: "array") for nest in (memory.rows, first[0].rows))
        if form != expected:
            raise ArgumentError(
                f"The policy's rnn_state is {expected} for some envs, but {form} for others. Return it in one form."
            )
        map_leaves(memory.rows, leaves.setdefault(id(memory), []).append)
    nothing = [_zeros_like(leaf[0]) for leaf in leaves[id(first[0])]]
    rows = [nothing if part is None else [leaf[part[1]] for leaf in leaves[id(part[0])]] for part in parts]
    joined = iter([stack_values(column) for column in zip(*rows, strict=True)])
    return map_leaves(first[0].rows, lambda _: next(joined))


def _zeros_like(row: Any) -> Any:
    return tensors().zeros_like(row) if is_tensor(row) else np.zeros_like(row)
