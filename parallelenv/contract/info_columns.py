"""Infos of a steady form, kept as columns of the batch instead of being pickled.

Many envs return the same keys with numbers in every step: those of MuJoCo four to eight. For 16 HalfCheetahs, whose
steps take 46 us, pickled infos took two fifths of the speed.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from parallelenv.contract.batch import INFO_NBYTES, Array, Batch, DType, Index
from parallelenv.contract.spaces import Info

_PLAIN = {float: np.dtype(np.float64), int: np.dtype(np.int64), bool: np.dtype(bool)}
_MOST_ITEMS = 16
"""Size of the largest array that is written to a column."""
_ALIGNMENT = 8
OF_STEP, OF_RESET = 1, 2
"""Marks of rows whose info is in columns."""


class InfoColumn(NamedTuple):
    """One key of an info, the type of its value (float, int, bool, a NumPy scalar or array), and form of its column."""

    key: str
    kind: type
    dtype: DType
    shape: tuple[int, ...] = ()

    def nbytes(self, num_rows: int) -> int:
        """Return the size of the column, which ends where the next one may begin."""
        return -(-self.dtype.itemsize * int(np.prod(self.shape, dtype=np.int64)) * num_rows // _ALIGNMENT) * _ALIGNMENT


InfoForm = tuple[InfoColumn, ...]
"""The keys of an info, in order, and the types of their values."""


def form_of(info: Mapping[Any, Any]) -> InfoForm | None:
    """Return the form of an info; ``None`` if it has keys or values of other types, or is too large."""
    form = []
    for key, value in info.items():
        kind = type(value)
        dtype = _PLAIN.get(kind) or getattr(value, "dtype", None)
        # With an axis: the item of a column of numbers is a number, no array.
        is_small_array = kind is np.ndarray and value.ndim > 0 and value.size <= _MOST_ITEMS
        if type(key) is not str or not (is_small_array or kind in _PLAIN or isinstance(value, np.generic)):
            return None
        if not isinstance(dtype, np.dtype) or dtype.kind not in "biuf" or dtype.itemsize > 8:
            return None
        form.append(InfoColumn(key, kind, dtype, value.shape if is_small_array else ()))
    return tuple(form) if 0 < sum(column.nbytes(1) for column in form) <= INFO_NBYTES else None


class InfoRows(NamedTuple):
    """Memory for `InfoColumns` outside a batch; its arrays as in `Batch`."""

    infos: Array
    info_marks: Array

    @classmethod
    def new(cls, form: InfoForm, num_rows: int) -> InfoRows:
        """Return memory for so many infos of a form."""
        nbytes = sum(column.nbytes(num_rows) for column in form)
        return cls(np.zeros(nbytes, np.uint8), np.zeros(num_rows, np.uint8))


class InfoForms(NamedTuple):
    """The forms of infos that have columns, each empty if none has: of steps, and of resets within steps."""

    steps: InfoForm = ()
    resets: InfoForm = ()

    def columns(self, batch: Batch) -> tuple[InfoColumns | None, InfoColumns | None]:
        """Return the columns of each in a batch with room for them."""
        marks = batch.info_marks
        steps = InfoColumns(self.steps, batch.infos, marks, OF_STEP) if self.steps else None
        return steps, InfoColumns(self.resets, batch.reset_infos, marks, OF_RESET) if self.resets else None


class InfoColumns:
    """Infos of one form, an array per key.

    Args:
        form: The form.
        memory: ``(num_rows, INFO_NBYTES)`` uint8, or as many bytes as the columns need.
        marks: ``(num_rows,)`` uint8: which kinds of infos of the latest step are in columns.
        mark: Which kind these are, `OF_STEP` or `OF_RESET`.
    """

    def __init__(self, form: InfoForm, memory: Any, marks: Any, mark: int = OF_STEP) -> None:
        self._marks, self._mark = memoryview(marks), mark
        self._keys = [column.key for column in form]
        self._kinds = [column.kind for column in form]
        self._stores: list[Callable[[int, Any], None]] = []
        self._lists: list[Callable[[Index], list[Any]]] = []
        flat, begin, num_rows = memory.reshape(-1), 0, len(marks)
        for column in form:
            array: Array = np.ndarray((num_rows, *column.shape), column.dtype, buffer=flat, offset=begin)
            begin += column.nbytes(num_rows)
            store, as_list = _access(array, column)
            self._stores.append(store)
            self._lists.append(as_list)

    # ---------------------------------------------------------------- for hosts

    def write(self, row: int, info: object) -> bool:
        """Write an info to a row, and mark it; ``False`` if it does not have the form."""
        if type(info) is not dict or list(info) != self._keys:
            return False
        try:
            for value, kind, store in zip(info.values(), self._kinds, self._stores, strict=True):
                if type(value) is not kind:
                    return False
                store(row, value)
        except (ValueError, TypeError, OverflowError):  # an int of more than 64 bits, an array of another shape
            return False
        self._marks[row] |= self._mark
        return True

    # ---------------------------------------------------------------- for the caller

    def read(self, rows: Index, num_rows: int) -> Iterator[tuple[int, Info]]:
        """Return the infos of the marked rows, of ``num_rows``, as new dicts, each after its position among these."""
        marks = bytes(self._marks[rows]) if type(rows) is slice else bytes(self._marks[row] for row in rows)
        positions: Sequence[int] = range(num_rows)
        if marks.count(self._mark) < num_rows:
            positions = [position for position in positions if marks[position] & self._mark]
            chosen = range(rows.start, rows.stop) if type(rows) is slice else rows
            rows = [chosen[position] for position in positions]
        keys = self._keys
        columns = [as_list(rows) for as_list in self._lists] if positions else []
        infos = (dict(zip(keys, values, strict=True)) for values in zip(*columns, strict=True))
        return zip(positions, infos, strict=True)


def _access(array: Array, column: InfoColumn) -> tuple[Callable[[int, Any], None], Callable[[Index], list[Any]]]:
    """Return what writes a value of a column, and what lists the values of rows, each of the very type."""
    if column.kind is np.ndarray:

        def store_array(row: int, value: Array) -> None:
            if value.dtype != column.dtype or value.shape != column.shape:
                raise ValueError("another form")
            array[row] = value

        return store_array, lambda rows: [value.copy() for value in array[rows]]
    store = array.__setitem__
    view: Any = memoryview(array)  # type: ignore[arg-type]
    with contextlib.suppress(NotImplementedError):  # a format that it lacks, such as float16
        view[0] = view[0]
        store = view.__setitem__  # 18 ns; that of an array 30 ns
    return store, (lambda rows: array[rows].tolist()) if column.kind in _PLAIN else (lambda rows: list(array[rows]))
