"""A wrapper for frame stacking: it returns the latest states of an episode as one state."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, NoReturn

import numpy as np
from gymnasium.vector.utils import batch_space

from parallelenv.contract.arguments import Ids, check_positive
from parallelenv.contract.batch import Array
from parallelenv.contract.error_text import show
from parallelenv.contract.tensors import as_array
from parallelenv.errors import ArgumentError
from parallelenv.results import StepResult
from parallelenv.wrappers.base import States, StateWrapper, Wrappable, changed, shared_structure


class StackStates(StateWrapper):
    """Stacks the latest ``stack_size`` states of each env, newest last, on a new axis after the env axis.

    A stack contains states of one episode only: a new stack starts with each episode, after a reset or an automatic
    restart. ``info["ended_state"]`` is the stack at the end of the episode. With ``asynchronous="continue"``, however,
    states after the end of an episode are added to the stack until the env is reset.

    Args:
        env: A `ParallelEnv`, or another wrapper. Its envs must share an observation space of fixed shape.
        stack_size: Number of states.
        padding_type: Padding of a stack that does not have enough states yet: ``"reset"`` repeats the first state,
            ``"zero"`` uses zeros.

    Raises:
        ArgumentError: If the envs share no space, part of the space has no fixed shape, or an argument has an invalid
            value.
    """

    _saved = ("_stacks", "_is_known")

    def __init__(self, env: Wrappable, stack_size: int, padding_type: Literal["reset", "zero"] = "reset") -> None:
        check_positive("stack_size", stack_size)
        if padding_type not in ("reset", "zero"):
            raise ArgumentError(
                f"padding_type={show(padding_type)} is not known; expected 'reset' (the first state again) or 'zero'."
            )
        structure = shared_structure(env, "cannot be stacked")
        loose = [structure.describe(index) for index in range(len(structure.leaves)) if not structure.is_fixed(index)]
        space: Any = structure.space
        if loose:
            raise ArgumentError(
                f"state{loose[0]} has no fixed shape and dtype in {space}, so it cannot be stacked. Remove it with a "
                "StateWrapper first."
            )
        super().__init__(env, batch_space(space, stack_size))
        self._structure, self._padding_type = structure, padding_type
        self._is_known: Array = np.zeros(len(env), dtype=bool)
        leaves: list[Any] = structure.leaves
        self._stacks: list[Array] = [np.zeros((len(env), stack_size, *leaf.shape), dtype=leaf.dtype) for leaf in leaves]

    def on_reset(self, states: States, env_ids: tuple[int, ...]) -> States:
        """Start new stacks, and return them."""
        rows = np.array(env_ids, dtype=np.int64)
        self._start(rows, self._structure.split(states))
        return self._shown(rows)

    def on_step(self, result: StepResult) -> StepResult:
        """Add the new states to the stacks, and return a copy of the result with the stacks as its states."""
        rows = result.env_ids
        leaves = [as_array(leaf) for leaf in self._structure.split(result.states)]
        begins = result.restarted
        if self.restarts:
            begins = begins | result.dones
            for row in np.flatnonzero(result.dones).tolist():
                info = result.infos[row]
                if info.get("ended_state") is not None:
                    ended = [np.asarray(leaf)[None] for leaf in self._structure.split(info["ended_state"])]
                    self._add(rows[row : row + 1], ended, False)
                    info["ended_state"] = self._structure.join([stack[rows[row]].copy() for stack in self._stacks])
        self._add(rows, leaves, begins)
        return changed(result, states=self._shown(rows))

    def get_observations(self, id: Ids = None) -> NoReturn:
        """Raise a `UsageError`: the current observation may already be on the stack, and would then be added twice."""
        self._refuse("get_observations")

    def _add(self, rows: Array, leaves: Sequence[Array], begins: Array | bool) -> None:
        """Add states to the stacks. New stacks start where ``begins`` is true, and for envs without a stack."""
        for stack, leaf in zip(self._stacks, leaves, strict=True):
            stack[rows] = np.concatenate([stack[rows, 1:], leaf[:, None]], axis=1)
        begins = ~self._is_known[rows] | begins
        self._start(rows[begins], [leaf[begins] for leaf in leaves])

    def _start(self, rows: Array, leaves: Sequence[Array]) -> None:
        for stack, leaf in zip(self._stacks, leaves, strict=True):
            stack[rows] = 0 if self._padding_type == "zero" else np.expand_dims(leaf, 1)
            stack[rows, -1] = leaf
        self._is_known[rows] = True

    def _shown(self, rows: Array) -> States:
        return self._structure.join([stack[rows] for stack in self._stacks])  # copies, because rows is not a slice
