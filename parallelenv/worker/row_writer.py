"""Writes results of envs to the rows of a batch, and reads the envs' actions from the batch."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from parallelenv.contract.batch import Array, Batch, Index, InfoColumns, InfoForms
from parallelenv.contract.copying import deep_copy, deep_copy_but_graph
from parallelenv.contract.interrupts import signal_behind
from parallelenv.contract.protocol import Extra
from parallelenv.contract.spaces import State, casts_to, describe_value
from parallelenv.contract.tensors import as_array, is_tensor
from parallelenv.errors import EnvContractError

_FLAGS = frozenset({bool, np.bool_})


class RowWriter:
    """A host's access to the rows of a batch.

    Attributes:
        batch: The batch.
        first: Env id of row 0.
        keeps_types: See `Layout`.
        space: The observation space of all envs; ``None`` if they declare none or different ones.
        flat_states: All states, one after another, as a memoryview if each state is a vector; otherwise ``None``. An
            assignment to a slice of the memoryview checks shape and dtype and takes 70 ns; numpy takes 180 ns.
        cells: By row, the slice of ``flat_states`` that holds the row's state.
        rewards: ``(num_envs,)`` float64, as a memoryview: setting a number takes 18 ns; with numpy, it takes 30 ns.
        infos: The columns for infos of steps. If ``None``, infos are sent to the caller as objects instead.
        reset_infos: Like ``infos``, for the infos of resets within steps.
        has_loose: Whether states have loose leaves.
        loose: Loose leaves of the latest states, by row: clones of tensors, and other objects as the env returned them
            (see `own_loose`). They are kept here for rollouts, because no array contains them.
    """

    infos: InfoColumns | None = None
    reset_infos: InfoColumns | None = None

    def __init__(self, batch: Batch) -> None:
        layout, single = batch.layout, batch.single_state
        # `memoryview` does not support numbers in another byte order.
        is_vector = single is not None and single.ndim == 2 and single.size > 0 and single.dtype.isnative
        width = single.shape[1] if single is not None and is_vector else 0
        self.batch, self.first, self.keeps_types = batch, layout.first, layout.keeps_types
        self.rewards = _view(batch.rewards)
        self.flat_states: Any = _view(single.reshape(-1)) if single is not None and is_vector else None
        self.cells = [slice(row * width, row * width + width) for row in range(layout.num_envs)]
        self.loose: dict[int, list[Any]] = {}
        self._owned: dict[int, list[Any]] = {}  # those items of `loose` that are copies
        self.has_loose = None in layout.state_fields
        self._structure, self._single, self._broadcasts = layout.states, single, layout.broadcasts
        self.space = layout.states.space
        self._terminated, self._truncated = _view(batch.terminated), _view(batch.truncated)
        self._flag_bytes = _view(batch.flags.reshape(-1).view(np.uint8))
        # The marks of an earlier host may be for infos that the caller has not received yet. Each mark therefore stays
        # until its env steps again.
        marks = batch.info_marks
        self._marks = _view(marks) if marks is not None and marks.any() else None
        self._single_action: Any = batch.actions[0] if batch.actions and layout.actions.is_single else None
        pairs = zip(batch.states, batch.ended_states, strict=True) if batch.ended_states else ()
        self._kept = [(array, ended) for array, ended in pairs if array is not None and ended is not None]
        self._flat_ended = _view(self._kept[0][1].reshape(-1)) if is_vector and self._kept else None

    def keep_loose(self, values: Mapping[int, Extra]) -> None:
        """Store the loose leaves that these results contain, by env id, in ``loose``."""
        for env_id, extra in values.items():
            if extra.loose is not None:
                self.loose[env_id - self.first] = extra.loose

    def own_loose(self, row: int) -> None:
        """Replace the loose leaves in ``loose`` by copies, before code of the env runs that is not a step or a reset.

        A step copies no leaves here, because it replaces them at the end.
        """
        loose = self.loose.get(row)
        if loose is not None and loose is not self._owned.get(row):
            try:
                self._owned[row] = self.loose[row] = deep_copy_but_graph(loose)
            except Exception as error:  # no call can return such a state, so none can return a changed one
                if signal_behind(error) is not None:
                    raise

    def start_step(self, rows: Index) -> None:
        """Set the flags of these rows to False, and drop their infos."""
        if type(rows) is slice:  # 0.15 us; numpy takes 0.35 us
            begin, end = 2 * rows.start, 2 * rows.stop
            self._flag_bytes[begin:end] = bytes(end - begin)
            if self._marks is not None:
                self._marks[rows] = bytes(rows.stop - rows.start)
        else:
            self.batch.flags[rows] = False
            self.batch.drop_infos(rows)

    def actions(self, rows: Index) -> Any:
        """Return the actions in these rows, as a sequence whose items do not share memory with the batch."""
        if self._single_action is None:
            leaves = [array[rows].copy() for array in self.batch.actions]
            return list(map(self.batch.layout.actions.join, zip(*leaves, strict=True)))
        actions: Any = self._single_action[rows]
        return actions if actions.ndim == 1 else actions.copy()  # reading an item of a vector makes a new number

    def set_info_forms(self, forms: InfoForms, env_ids: Sequence[int]) -> None:
        """Set the forms of the infos that are written to columns, and drop the infos in the rows of ``env_ids``."""
        marks = self.batch.info_marks
        if marks is not None:
            self.batch.drop_infos(self.batch.rows(env_ids))
            self.infos, self.reset_infos = forms.columns(self.batch)
            self._marks = _view(marks) if any(forms) else None

    def store_flags(self, row: int, terminated: Any, truncated: Any) -> None:
        """Write the flags that say whether an episode ended."""
        self._terminated[row] = terminated if type(terminated) in _FLAGS else _as_flag(terminated)
        self._truncated[row] = truncated if type(truncated) in _FLAGS else _as_flag(truncated)

    def store_reward(self, row: int, reward: Any) -> tuple[Any] | None:
        """Write a reward of any type. If it is not a number, write NaN and return the reward in a one-tuple."""
        if isinstance(reward, (float, np.floating)):
            self.rewards[row] = reward
            return None
        shape = getattr(reward, "shape", None)
        if shape is not None and all(length == 1 for length in shape) and hasattr(reward, "item"):
            reward = reward.item()
        if isinstance(reward, (float, int, np.integer, np.floating, np.bool_)):
            with contextlib.suppress(OverflowError):  # an int too large for a float is returned
                self.batch.rewards[row] = reward
                return None
        self.batch.rewards[row] = np.nan
        return (reward,)

    def store_state(self, row: int, state: State) -> list[Any] | None:
        """Write a state and return its loose leaves, if it has any."""
        single = self._single
        if single is not None:
            self._store_leaf(0, single, row, state)
            return None
        loose = self._store_leaves(self.batch.states, row, state)
        if loose:
            self.loose[row] = loose
        return loose

    def store_states(self, rows: Index, states: State) -> None:
        """Write a batch of states, given as one array per leaf. The states must not have loose leaves."""
        single = self._single
        if type(rows) is slice and single is not None and type(states) is np.ndarray and states.dtype == single.dtype:
            target: Any = single[rows]
            if states.shape == target.shape:
                target[:] = states
                return
        for index, (array, leaf) in enumerate(zip(self.batch.states, self._structure.split_state(states), strict=True)):
            target = array
            given = as_array(leaf)
            if given.shape != target[rows].shape or not casts_to(given, target.dtype):
                self._structure.check_leaf(index, given[0] if given.ndim else given)  # this check usually raises
                what = f"The states{self._structure.describe(index)} are {describe_value(given)}"
                raise EnvContractError(f"{what}, but must be of shape {target[rows].shape} and dtype {target.dtype}.")
            target[rows] = given

    def store_ended(self, row: int, state: State) -> list[Any] | None:
        """Write the last state of an episode, and return its loose leaves, if it has any."""
        return deep_copy(self._store_leaves(self.batch.ended_states, row, state))  # type: ignore[no-any-return]

    def store_outcomes(self, rows: Index, *outcomes: Any) -> None:
        """Write three arrays to these rows: the rewards and the terminated and truncated flags."""
        batch = self.batch
        names, arrays = ("rewards", "terminations", "truncations"), (batch.rewards, batch.terminated, batch.truncated)
        for name, given, array in zip(names, outcomes, arrays, strict=True):
            values = given if type(given) is np.ndarray else as_array(given)
            target = array[rows]
            if values.shape != target.shape or values.dtype.kind not in "biuf":
                raise EnvContractError(
                    f"step() returned {name} {describe_value(given)}; for {len(target)} envs it must be an array of "
                    f"{array.dtype} with one item each."
                )
            array[rows] = values

    def keep_ended(self, row: int) -> None:
        """Copy the state in a row to the arrays that hold the last states of ended episodes."""
        if self._flat_ended is not None:  # takes 0.25 us; the loop below takes 0.5 us
            cell = self.cells[row]
            self._flat_ended[cell] = self.flat_states[cell]
            return
        for array, ended in self._kept:
            ended[row] = array[row]

    def as_given(self, state: State) -> tuple[Any] | None:
        """Return a state in a one-tuple if storing it in a row would change the type of a leaf, otherwise ``None``."""
        for array, leaf in zip(self.batch.states, self._structure.split_state(state), strict=True):
            if array is not None:
                kind = np.ndarray if array.ndim > 1 else array.dtype.type
                if type(leaf) is not kind or leaf.dtype != array.dtype or leaf.shape != array.shape[1:]:
                    return (deep_copy(state),)
        return None

    def _store_leaves(self, arrays: Sequence[Array | None], row: int, state: State) -> list[Any] | None:
        loose = []
        for index, (array, leaf) in enumerate(zip(arrays, self._structure.split_state(state), strict=True)):
            if array is None:
                self._structure.check_leaf(index, leaf)
                # A copy or a pickle of a view, such as a row of a data set, would contain the whole tensor.
                loose.append(leaf.clone() if is_tensor(leaf) else leaf)
            else:
                self._store_leaf(index, array, row, leaf)
        return loose or None

    def _store_leaf(self, index: int, array: Array, row: int, value: Any) -> None:
        if type(value) is np.ndarray and value.dtype == array.dtype and value.shape == array.shape[1:]:
            array[row] = value  # the usual case, without further checks
            return
        if self._broadcasts:  # accept smaller arrays and additional axes of length 1, as numpy's assignment does
            with contextlib.suppress(ValueError, TypeError, RuntimeError):  # if it does not fit, `check_leaf` raises
                given = as_array(value)
                lacking = max(0, given.ndim - len(array.shape[1:]))
                value = np.broadcast_to(given.reshape(given.shape[lacking:]), array.shape[1:])
        self._structure.check_leaf(index, value)
        array[row] = as_array(value)


def store_info(columns: InfoColumns | None, row: int, info: Any) -> Any:
    """Write an info to columns. Return the info if it does not fit the columns; otherwise return ``None``."""
    return None if not info or (columns is not None and columns.write(row, info)) else info


def _view(array: Array) -> Any:
    return memoryview(array)  # type: ignore[arg-type]


def _as_flag(value: Any) -> bool:
    if value is None or isinstance(value, str) or as_array(value).size != 1:
        raise EnvContractError(f"terminated and truncated are bools; step() returned {describe_value(value)}.")
    return bool(value)
