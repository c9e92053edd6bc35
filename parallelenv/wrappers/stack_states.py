"""Frame stacking: the latest states of an episode as one."""

from __future__ import annotations

from typing import Any, Literal, NoReturn

import numpy as np
from gymnasium.vector.utils import batch_space

from parallelenv.contract import migration_hints
from parallelenv.contract.arguments import check_positive
from parallelenv.contract.batch import Array
from parallelenv.contract.error_text import show
from parallelenv.contract.spaces import Structure, as_array
from parallelenv.errors import ArgumentError
from parallelenv.results import StepResult
from parallelenv.wrappers.answer_rows import SteppedRows
from parallelenv.wrappers.base import space_of
from parallelenv.wrappers.state_wrapper import StateWrapper


class StackStates(StateWrapper):
    """Stacks the latest ``stack_size`` states of each env, newest last, on a new axis after the env axis.

    A stack has states of one episode only: it starts anew with each episode, after a reset or an automatic restart.
    ``info["ended_state"]`` is the stack at the end. With ``"continue"`` an ended env continues its stack until its
    reset.

    Args:
        env: A `ParallelEnv`, or another wrapper. Its envs must share an observation space of fixed shape.
        stack_size: Number of states.
        padding_type: Fill before the first state: ``"reset"`` repeats the first state, ``"zero"`` uses zeros.

    Raises:
        ArgumentError: If there is no shared space, part of it has no fixed shape, or an argument has an invalid value.
    """

    def __init__(self, env: Any, stack_size: int, padding_type: Literal["reset", "zero"] = "reset") -> None:
        check_positive("stack_size", stack_size)
        if padding_type not in ("reset", "zero"):
            raise ArgumentError(
                f"padding_type={show(padding_type)} is not known; expected 'reset' (the first state again) or 'zero'."
            )
        structure = Structure(space_of(env))
        loose = [structure.describe(index) for index in range(len(structure.leaves)) if not structure.is_fixed(index)]
        if structure.space is None:
            raise ArgumentError(
                "The envs share no observation space, so their states cannot be stacked. If they declare none, "
                f"{migration_hints.GIVE_SPACES}."
            )
        if loose:
            raise ArgumentError(
                f"state{loose[0]} has no fixed shape and dtype in {structure.space}, so it cannot be stacked. Take it "
                "out with a StateWrapper first."
            )
        space: Any = structure.space
        super().__init__(env, batch_space(space, stack_size))
        self._structure = structure
        self._padding_type = padding_type
        self._is_known: Array = np.zeros(len(env), dtype=bool)
        leaves: list[Any] = structure.leaves
        self._stacks: list[Array] = [np.zeros((len(env), stack_size, *leaf.shape), dtype=leaf.dtype) for leaf in leaves]

    def on_reset(self, states: Any, env_ids: tuple[int, ...]) -> Any:
        """Start new stacks, and return them."""
        rows = np.array(env_ids, dtype=np.int64)
        self._fill(rows, self._structure.split(states))
        return self._shown(rows)

    def get_observations(self, id: Any = None) -> NoReturn:
        """Raise an error: the current observation may or may not be on the stack already."""
        self._refuse("get_observations")

    def on_step(self, result: StepResult) -> StepResult:
        """Push the states, and return the result with stacks as states."""
        stepped = SteppedRows(result, self.raw_space)
        if stepped.all_rest:
            return result
        leaves = [as_array(leaf) for leaf in self._structure.split(stepped.states)]
        begins = stepped.restarted | ~self._is_known[stepped.env_ids]
        if self.restarts:
            begins |= stepped.dones
            self._stack_ended(stepped)
        for stack, leaf in zip(self._stacks, leaves, strict=True):
            stack[stepped.env_ids] = np.concatenate([stack[stepped.env_ids, 1:], leaf[:, None]], axis=1)
        self._fill(stepped.env_ids[begins], [leaf[begins] for leaf in leaves])
        return stepped.with_states(self._shown(stepped.env_ids), self.single_observation_space)

    def _stack_ended(self, stepped: SteppedRows) -> None:
        """Replace ``ended_state`` in the infos of ended episodes by the last stack."""
        for env_id, info in zip(stepped.env_ids.tolist(), stepped.infos, strict=True):
            if info.get("ended_state") is not None and self._is_known[env_id]:
                ended = self._structure.split(info["ended_state"])
                info["ended_state"] = self._structure.join(
                    [
                        np.concatenate([stack[env_id, 1:], np.asarray(leaf, stack.dtype)[None]])
                        for stack, leaf in zip(self._stacks, ended, strict=True)
                    ]
                )

    def _fill(self, rows: Array, leaves: list[Any]) -> None:
        """Start the stacks of these envs, with one state each."""
        for stack, leaf in zip(self._stacks, leaves, strict=True):
            stack[rows] = 0 if self._padding_type == "zero" else np.expand_dims(leaf, 1)
            stack[rows, -1] = leaf
        self._is_known[rows] = True

    def _shown(self, rows: Array) -> Any:
        return self._structure.join([stack[rows] for stack in self._stacks])  # copies, as rows is not a slice

    def remembered(self) -> dict[str, Any]:
        """Return the stacks."""
        return {"_stacks": self._stacks, "_is_known": self._is_known}
