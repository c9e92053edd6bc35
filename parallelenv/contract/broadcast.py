"""What all hosts are told alike: pickled once, and brought to each by the cheapest way that its backend knows."""

from __future__ import annotations

from typing import Any

import cloudpickle
import numpy as np

from parallelenv.contract.batch import Array
from parallelenv.contract.copying import loads
from parallelenv.errors import UnpicklableError


class Broadcast:
    """A call for many envs: the name of a method, and its arguments.

    Args:
        method: As in `ParallelEnv.customized_method`.
        arguments: Positional ones. Each env gets copies.

    Attributes:
        packed: Both, pickled, ``(nbytes,)`` uint8: so that they travel beside a message, uncopied. ``None`` if a
            backend brings them otherwise.
        stored: Where a backend has put them for hosts that are far, so that it does so but once; it knows what it is.

    Raises:
        UnpicklableError: If an argument cannot be copied.
    """

    def __init__(self, method: str, *arguments: Any) -> None:
        what = f"What {method.rpartition('.')[2]}() was given"
        self.packed: Array | None = pickled((method, arguments), what, "Give plain data.")
        self.stored: Any = None

    def __reduce__(self) -> tuple[Any, ...]:
        """Travel without what only the caller knows."""
        return _travelled, (self.packed,)

    def without_content(self) -> Broadcast:
        """Return one whose content is brought otherwise."""
        return _travelled(None)

    def call(self) -> tuple[str, tuple[Any, ...]]:
        """Return the method and new copies of the arguments."""
        method, arguments = loads(self.packed)
        return method, arguments


def pickled(content: Any, what: str, way_out: str) -> Array:
    """Return something pickled, ``(nbytes,)`` uint8: that travels to all hosts without a copy for each.

    Args:
        content: What is to travel.
        what: It is, for messages.
        way_out: What to do if it cannot.

    Raises:
        UnpicklableError: If it cannot.
    """
    try:
        packed = cloudpickle.dumps(content)
    except Exception as error:  # pickling runs user code: anything may come
        raise UnpicklableError(
            f"{what} cannot be copied to the workers ({type(error).__name__}: {error}). Nothing was sent. {way_out}"
        ) from error
    return np.frombuffer(bytearray(packed), np.uint8)


def _travelled(packed: Array | None) -> Broadcast:
    broadcast = Broadcast.__new__(Broadcast)
    broadcast.packed, broadcast.stored = packed, None
    return broadcast
