"""Arguments that are the same for all hosts: pickled once and sent in the cheapest way that the backend has."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np

from parallelenv.contract.batch import Array
from parallelenv.contract.copying import dumps, loads
from parallelenv.errors import UnpicklableError


class Broadcast:
    """A call of one method, with the same arguments, on many envs.

    Args:
        method: See `ParallelEnv.customized_method`.
        arguments: Positional arguments. Each env gets copies.

    Attributes:
        packed: Both, pickled, ``(nbytes,)`` uint8, so that they can be sent outside the message, without a copy.
            ``None`` if a backend sends them in another way.
        stored: For the backend: where it has stored them for remote hosts, so that it does so only once.

    Raises:
        UnpicklableError: If an argument cannot be copied.
    """

    def __init__(self, method: str, *arguments: Any) -> None:
        what = f"What {method.rpartition('.')[2]}() was given"
        self.packed: Array | None = pickled((method, arguments), what, "Give plain data.")
        self.stored: Any = None

    def __getstate__(self) -> dict[str, Any]:
        """Leave out what only the caller uses."""
        return {"packed": self.packed, "stored": None}

    def without_content(self) -> Broadcast:
        """Return one without content, which is sent in another way."""
        other = copy.copy(self)
        other.packed = None
        return other

    def call(self) -> tuple[str, tuple[Any, ...]]:
        """Return the method and new copies of the arguments."""
        method, arguments = loads(self.packed)
        return method, arguments


def pickled(content: Any, what: str, way_out: str) -> Array:
    """Return a pickle, ``(nbytes,)`` uint8, which can be sent to all hosts without a copy for each.

    Raises:
        UnpicklableError: If it cannot be pickled; the message says what it is and what to do, as given.
    """
    try:
        packed = dumps(content)
    except Exception as error:  # pickling runs user code, which may raise anything
        raise UnpicklableError(
            f"{what} cannot be copied to the workers ({type(error).__name__}: {error}). Nothing was sent. {way_out}"
        ) from error
    return np.frombuffer(bytearray(packed), np.uint8)
