"""Splits spaces, states and actions into lists of leaves.

The leaves of a space are its parts that are neither a `Dict` nor a `Tuple`. For each leaf of fixed shape and dtype
(`Box`, `Discrete`, `MultiBinary`, `MultiDiscrete`), the batch has an array with one row per env. All other leaves are
*loose*: their values are sent as Python objects. The loose leaves of a state are sent in `Extra.loose`, and a host
keeps the latest ones of each env in `RowWriter.loose`.
"""

from __future__ import annotations

import contextlib
import functools
import operator
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
from gymnasium import spaces
from gymnasium.vector.utils import batch_space, concatenate, create_empty_array

from parallelenv.contract.error_text import show
from parallelenv.contract.interrupts import signal_behind
from parallelenv.contract.tensors import as_array, imported_torch, is_tensor
from parallelenv.errors import EnvContractError

if TYPE_CHECKING:
    from parallelenv.contract.batch import Array, DType

Space: TypeAlias = "spaces.Space[Any]"
Spaces: TypeAlias = "tuple[Space, Space]"
State: TypeAlias = Any
"""A state, or a batch of states."""
Action: TypeAlias = Any
"""An action, or a batch of actions."""
Info: TypeAlias = dict[str, Any]
Env: TypeAlias = Any
"""An env, whether of Gymnasium or not, or one of its wrappers."""

_FIXED = spaces.Box, spaces.Discrete, spaces.MultiBinary, spaces.MultiDiscrete


class Structure:
    """Splits the values of one space into leaves, and joins leaves into values.

    If there is no space, because the envs declare none or different ones, the whole value is one loose leaf.
    """

    def __init__(self, space: Space | None) -> None:
        self.space = space
        self.leaves: list[Space | None] = []
        self._paths: list[tuple[str | int, ...]] = []
        self._collect(space, ())
        self.is_single = self._paths == [()]

    def _collect(self, space: Space | None, path: tuple[str | int, ...]) -> None:
        if type(space) is spaces.Dict:
            for key, child in space.spaces.items():
                self._collect(child, (*path, key))
        elif type(space) is spaces.Tuple:
            for position, child in enumerate(space.spaces):
                self._collect(child, (*path, position))
        else:
            self.leaves.append(space)
            self._paths.append(path)

    def is_fixed(self, leaf: int) -> bool:
        """Return whether a leaf has a fixed shape and dtype.

        This is true only for a `Box`, `Discrete`, `MultiBinary` or `MultiDiscrete`, not for subclasses of these.
        """
        return type(self.leaves[leaf]) in _FIXED

    def describe(self, leaf: int) -> str:
        """Return the path to a leaf, such as ``"['camera'][0]"``; an empty string if the leaf is the whole value."""
        return "".join(f"[{key!r}]" for key in self._paths[leaf])

    def split(self, value: State) -> list[Any]:
        """Return the leaves of ``value``, in order; raise a `LookupError` or `TypeError` if a leaf is missing."""
        return [value] if self.is_single else [functools.reduce(operator.getitem, path, value) for path in self._paths]

    def split_state(self, state: object) -> list[Any]:
        """Return the leaves of a state, in order; raise an `EnvContractError` if a leaf is missing."""
        try:
            return self.split(state)
        except (LookupError, TypeError) as error:
            what = f"The state returned lacks a part of {self.space}"
            raise EnvContractError(f"{what}: {type(error).__name__}: {error}.") from None

    def check_leaf(self, leaf: int, value: object) -> None:
        """Raise an `EnvContractError` if a leaf of a state does not fit the shape or dtype of the leaf's space."""
        space = self.leaves[leaf]
        shape, dtype = getattr(space, "shape", None), getattr(space, "dtype", None)
        if shape is None or dtype is None:
            return
        try:
            array = as_array(value)
            fits = array.shape == shape and casts_to(array, np.dtype(dtype))
        except (ValueError, TypeError, RuntimeError):  # ragged lists; tensors of dtypes that numpy lacks
            fits = False
        if not fits:
            what = f"the state{self.describe(leaf)} is {describe_value(value)}, but the observation space is {space}"
            raise EnvContractError(f"{what}. Declare the env's actual space, or give it as spaces=.")

    def join(self, leaves: Sequence[object]) -> State:
        """Return the value (a dict, a tuple or the only leaf) that consists of these leaves."""
        return leaves[0] if self.is_single else self._join(self.space, iter(leaves))

    def _join(self, space: Space | None, leaves: Iterator[object]) -> object:
        if type(space) is spaces.Dict:
            return {key: self._join(child, leaves) for key, child in space.spaces.items()}
        if type(space) is spaces.Tuple:
            return tuple(self._join(child, leaves) for child in space.spaces)
        return next(leaves)

    def stack(self, leaf: int, values: Sequence[object]) -> Any:
        """Batch the values of a loose leaf, one per env, as Gymnasium does.

        If a value is ``None``, because it was lost with its worker or has never existed, the result is an object array.

        Raises:
            EnvContractError: If the values cannot be batched, for example because of a user's own space.
        """
        space = self.leaves[leaf]
        if space is None:
            return batch_values(values)
        try:
            # `None` for a user's own space, of which `None` may be a member.
            empty: Any = create_empty_array(space, len(values))
            if empty is not None and any(value is None for value in values):
                return batch_values(values)
            if not values:  # if all envs fail; `concatenate` refuses an empty list
                return () if empty is None else empty
            if isinstance(space, _FIXED):  # `check_leaf` accepts lists of ints that `concatenate` refuses
                values = [as_array(value).astype(space.dtype, copy=False) for value in values]
            return concatenate(space, values, empty)
        except Exception as error:  # a user's own space may raise anything
            if signal_behind(error) is not None:
                raise
            raise EnvContractError(f"The envs' results cannot be batched: {error}.") from error


def common_space(candidates: Iterable[Space | None]) -> Space | None:
    """Return the space if all candidates are equal; ``None`` if they differ or if one of them is ``None``."""
    first, *others = candidates
    return first if all(space is first or space == first for space in others) else None


def batched(space: Space | None, num_envs: int) -> Space | None:
    """Return the batched form of the space that all envs share, or ``None`` if ``space`` is ``None``."""
    return None if space is None else batch_space(space, num_envs)


def batch_values(values: Sequence[Any]) -> State:
    """Batch values that have no space.

    Dicts with the same keys become one dict of batched values, or an object array of the dicts if any of their values
    cannot be stacked.
    """
    if not values or any(type(value) is not dict or value.keys() != values[0].keys() for value in values):
        return stack_values(values)
    batched = {key: batch_values([value[key] for value in values]) for key in values[0]}
    is_loose = any(getattr(part, "dtype", None) == np.dtype(object) for part in batched.values())
    return object_array(values) if is_loose or not batched else batched


def pick_rows(batch: Any, rows: int | Sequence[int]) -> Any:
    """Return the row of a batch at an index, or the rows at several indices."""
    if isinstance(batch, dict):
        return {key: pick_rows(part, rows) for key, part in batch.items()}
    return batch[rows] if hasattr(batch, "shape") or isinstance(rows, int) else tuple(batch[row] for row in rows)


def stack_values(values: Sequence[Any]) -> State:
    """Stack arrays, tensors or numbers of the same shape; put any other values into an object array.

    Values that no dtype represents exactly, such as 2**53 + 1 and 0.5, are put into an object array, too.
    """
    with contextlib.suppress(TypeError, RuntimeError):  # such as dates and numbers, or tensors on several devices
        if values and all(isinstance(value, (np.ndarray, np.generic, int, float)) for value in values):
            arrays = [np.asarray(value) for value in values]
            is_masked = any(isinstance(value, np.ma.MaskedArray) for value in values)
            if len({array.shape for array in arrays}) == 1 and not is_masked and exact_dtype(arrays) is not None:
                return np.stack(arrays)
        elif values and all(is_tensor(value) for value in values) and len({value.shape for value in values}) == 1:
            return imported_torch().stack(list(values))
    return object_array(values)


def exact_dtype(arrays: Sequence[Array]) -> DType | None:
    """Return a dtype that represents all values of these arrays, of one shape, exactly; ``None`` if there is none."""
    dtypes = {array.dtype for array in arrays}
    if len(dtypes) == 1:
        return dtypes.pop()
    if len({"number" if dtype.kind in "biufc" else dtype.kind for dtype in dtypes}) > 1:
        return None
    common = np.result_type(*dtypes)
    for dtype in dtypes:
        values = np.stack([array for array in arrays if array.dtype == dtype])
        with np.errstate(all="ignore"):
            kept = (values.astype(common).astype(dtype) == values) | (values != values)  # noqa: PLR0124 (NaN)
        if not kept.all():
            return None
    return common


def object_array(values: Sequence[object]) -> Array:
    """Return a one-dimensional object array of exactly these objects."""
    array = np.empty(len(values), dtype=object)
    for index, value in enumerate(values):  # `array[:] = values` would unpack nested lists
        array[index] = value
    return array


def casts_to(array: Array, dtype: DType) -> bool:
    """Return whether an array can be cast to a dtype.

    As in Gymnasium, floats may lose precision. Ints can be cast to another int dtype only if no value changes.
    """
    if array.dtype == dtype:
        return True
    if array.dtype.kind in "iu" and dtype.kind in "iu":  # by value: Python ints become int64, but may fit in uint8
        return np.can_cast(array.dtype, dtype, "safe") or bool((array.astype(dtype) == array).all())
    return np.can_cast(array.dtype, dtype, "same_kind")


def describe_value(value: object) -> str:
    """Return a description of a value, for messages."""
    shape, dtype = getattr(value, "shape", None), getattr(value, "dtype", None)
    if shape is None or dtype is None:
        return f"{show(value)} ({type(value).__name__})"
    return f"of shape {tuple(shape)} and dtype {dtype}"
