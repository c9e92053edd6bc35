"""Makes copies that share nothing with the original.

An env may reuse its buffers and dicts, and a user may change objects after passing them in. Within one process, only a
copy keeps such changes by one of them from affecting the other. Between processes, pickling makes that copy.
"""

from __future__ import annotations

import copy
import io
import pickle
from collections import ChainMap
from collections.abc import Iterable
from types import CodeType
from typing import TYPE_CHECKING, Any, ClassVar, TypeGuard

import cloudpickle
import cloudpickle.cloudpickle as dynamic
import numpy as np

from parallelenv.contract.interrupts import signal_behind
from parallelenv.contract.tensors import imported_torch, is_tensor
from parallelenv.errors import UnpicklableError

if TYPE_CHECKING:
    from parallelenv.contract.batch import Array


def _reduce_code(code: CodeType) -> tuple[object, ...]:
    function, arguments = cloudpickle.Pickler.dispatch_table[CodeType](code)
    return function, tuple(code.co_filename if one == "<dynamic-code>" else one for one in arguments)


class Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    """cloudpickle's pickler, except that functions keep the name of their file.

    cloudpickle 3.1.3 and later drop that name. Without it, tracebacks could not show the source line of an env defined
    in a notebook.
    """

    dispatch_table: ClassVar[Any] = ChainMap({CodeType: _reduce_code}, cloudpickle.Pickler.dispatch_table)


def dumps(value: object) -> bytes:
    """Pickle a value, including any classes and functions in it that the receiver cannot import."""
    file = io.BytesIO()
    Pickler(file, protocol=pickle.HIGHEST_PROTOCOL).dump(value)
    return file.getvalue()


def pickles(value: object) -> bool:
    """Return whether a value can be pickled, sent to another process and unpickled there."""
    try:
        loads(dumps(value))
    except BaseException as error:
        if signal_behind(error) is not None:
            raise
        return False  # the value cannot be copied, whatever the reason
    return True


_IMMUTABLE = frozenset({bool, int, float, complex, str, bytes, type(None), *np.sctypeDict.values()}) - {np.void}
"""Plain immutable types.

Subclasses of these types are not included, because their instances may have attributes that change. `numpy.void` and
`numpy.record` are not included either, because their instances are writable views of arrays.
"""


def is_unchangeable(value: object) -> bool:
    """Return whether a value is of a plain immutable type, and therefore need not be copied."""
    return type(value) in _IMMUTABLE


def deep_copy(value: Any) -> Any:
    """Return a copy of ``value`` that shares no mutable part with it.

    Common cases have code of their own, which is faster. Copying ``{"a": 1.0, "b": array}`` takes 1.3 us;
    `copy.deepcopy` takes 1.9 us.
    """
    if is_unchangeable(value):
        return value
    if _is_plain_array(value):
        return value.copy()
    if type(value) is dict and _IMMUTABLE.issuperset(map(type, value)):
        copied: dict[object, object] = {}
        arrays: set[int] = set()
        for key, item in value.items():
            if type(item) in _IMMUTABLE:
                copied[key] = item
            elif _is_plain_array(item) and id(item) not in arrays:
                copied[key] = item.copy()
                arrays.add(id(item))
            else:  # only `copy.deepcopy` and pickle preserve that two values are, or contain, the same object
                break
        else:
            return copied
    try:
        return copy.deepcopy(value)
    except BaseException as error:  # copying runs user code, which may raise anything
        if signal_behind(error) is not None:
            raise
    return loads(dumps(value))  # values that other processes could receive must be copied, too


def _is_plain_array(value: object) -> TypeGuard[Array]:
    return type(value) is np.ndarray and not value.dtype.hasobject


def graph_parts(value: object) -> list[Any]:
    """Return the parts of an action or a state through which gradients flow back to the caller.

    The result is empty under ``torch.no_grad()`` and before torch is imported.
    """
    torch = imported_torch()
    is_enabled = getattr(torch, "is_grad_enabled", None)  # absent while torch is being imported
    return _graph_parts(value, torch) if is_enabled is not None and is_enabled() else []


def _graph_parts(value: Any, torch: Any) -> list[Any]:
    if type(value) in _IMMUTABLE or _is_plain_array(value):
        return []
    if isinstance(value, torch.Tensor):
        return [value] if value.requires_grad else []
    if isinstance(value, torch.nn.Module):
        return [value] if any(parameter.requires_grad for parameter in value.parameters()) else []
    if isinstance(value, dict):
        value = value.values()
    elif isinstance(value, np.ndarray):
        value = value.flat if value.dtype.hasobject else ()
    elif not isinstance(value, (list, tuple)):
        return []
    return [part for item in value for part in _graph_parts(item, torch)]


def deep_copy_but_graph(value: Any) -> Any:
    """Copy a value as `deep_copy` does, but share its `graph_parts`: copying them would cut off the gradients."""
    parts = graph_parts(value)
    return copy.deepcopy(value, {id(part): part for part in parts}) if parts else deep_copy(value)


def pickle_roundtrip(value: Any) -> Any:
    """Return a copy of a value as another process would receive it; raise if the value cannot be pickled."""
    is_plain = is_unchangeable(value) or _is_plain_array(value) or is_tensor(value)
    return deep_copy(value) if is_plain else loads(dumps(value))


_KNOWN: dict[str, type] = getattr(dynamic, "_DYNAMIC_CLASS_TRACKER_BY_ID", {})


class Unpickler(pickle.Unpickler):
    """Loads pickles of `cloudpickle` and `pickle` without changing classes that this process already has.

    A class that was defined in a notebook is pickled with its content. If this process already has the class,
    cloudpickle alone would overwrite its attributes with those from the time of pickling. Changes made to the class
    since then would be lost, and its methods would be replaced by new function objects.
    """

    def __init__(self, file: io.BytesIO, buffers: Iterable[Any] = ()) -> None:
        super().__init__(file, buffers=buffers)
        self._left_alone: set[type] = set()

    def find_class(self, module: str, name: str) -> object:
        """Return the object called ``name`` in ``module``.

        cloudpickle's functions that rebuild a class are replaced by functions that first look for an existing class.
        """
        found = super().find_class(module, name)
        if module != dynamic.__name__:
            return found

        def find_or_make(*args: Any) -> object:
            known = _KNOWN.get(args[-2])  # the class id comes before fields reserved for later versions
            if known is None:
                return found(*args)
            self._left_alone.add(known)
            return known

        def fill_new(kind: type, state: object) -> object:
            return kind if kind in self._left_alone else found(kind, state)

        makers = dict.fromkeys(("_make_skeleton_class", "_make_skeleton_enum"), find_or_make)
        return {**makers, "_class_setstate": fill_new}.get(name, found)


def loads(data: Any, buffers: Iterable[Any] = ()) -> Any:
    """Return the object that a pickle and its out-of-band buffers contain."""
    return Unpickler(io.BytesIO(data), buffers).load()


def cannot_be_given(operation: str, env_id: int, argument: Any, error: Exception) -> UnpicklableError:
    """Return the error for an argument that cannot be copied to its env."""
    if operation == "call":  # the argument is a `MethodCall`
        operation, argument = f"{argument.name}()", argument[1:]
    argument = _unpicklable_part(argument)
    return UnpicklableError(
        f"The argument of {operation} for env {env_id}, of type {type(argument).__name__}, cannot be copied to the env "
        f"({type(error).__name__}: {error}). Nothing was sent. Give plain data."
    )


def cannot_travel(value: object, error: BaseException) -> UnpicklableError:
    """Return the error for a result that cannot be copied from its env to the caller.

    An ``error`` that a signal handler raised is not about the result, and is raised again.
    """
    if signal_behind(error) is not None:
        raise error
    failure = UnpicklableError(
        f"The result contains a {type(_unpicklable_part(value)).__name__}, which cannot be copied to the caller "
        f"({type(error).__name__}: {error}). Return plain data, or ask for a part of it with a dotted name."
    )
    failure.__cause__ = error
    return failure


def _unpicklable_part(value: object, outer: frozenset[int] = frozenset()) -> object:
    outer |= {id(value)}  # a container may contain itself
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, (tuple, list)) else ()
    culprit = next((part for part in parts if id(part) not in outer and not pickles(part)), None)
    return value if culprit is None else _unpicklable_part(culprit, outer)


class Broadcast:
    """A call to one method with the same arguments for all envs; each env gets copies of the arguments.

    Attributes:
        packed: The content of the call: the method and the arguments, in the form that `pickled` returns; ``None`` if
            the backend sends the content separately from the message.
        stored: The place where the backend has stored the content for remote hosts. It is kept here so that the backend
            stores the content only once.
    """

    def __init__(self, method: str, *arguments: object) -> None:
        what = f"The argument of {method.rpartition('.')[2]}()"
        self.packed: Array | None = pickled((method, arguments), what, "Give plain data.")
        self.stored: object = None

    def __getstate__(self) -> dict[str, object]:
        """Return the state to pickle, in which ``stored`` is ``None``, because only the caller uses ``stored``."""
        return {"packed": self.packed, "stored": None}

    def without_content(self) -> Broadcast:
        """Return a copy whose ``packed`` is ``None``, for a backend that sends the content separately."""
        other = copy.copy(self)
        other.packed = None
        return other

    def call(self) -> tuple[str, tuple[object, ...]]:
        """Return the name of the method, and new copies of the arguments."""
        method, arguments = loads(self.packed)
        return method, arguments


def pickled(content: object, what: str, way_out: str) -> Array:
    """Return the pickle of ``content`` as an array, ``(nbytes,)`` uint8."""
    try:
        packed = dumps(content)
    except Exception as error:  # pickling runs user code, which may raise anything
        if signal_behind(error) is not None:
            raise
        raise UnpicklableError(
            f"{what} cannot be copied to the workers ({type(error).__name__}: {error}). Nothing was sent. {way_out}"
        ) from error
    return np.frombuffer(bytearray(packed), np.uint8)
