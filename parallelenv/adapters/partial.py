"""What an error has of a step, in the form in which an adapter would have returned it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from parallelenv.batch import Array
from parallelenv.failures import put
from parallelenv.results import StepBatch, StepResult


class Partial(tuple):  # type: ignore[type-arg]
    """What a step returns, with rows of those envs alone that did not fail.

    Attributes:
        env_ids: ``(k,)`` int64, the envs in the order of the rows.
    """

    env_ids: Array

    def __new__(cls, items: Sequence[Any], env_ids: Array) -> Partial:
        """Return the items as a tuple that carries the ids as an attribute."""
        self = tuple.__new__(cls, items)
        self.env_ids = env_ids
        return self

    def __getnewargs__(self) -> tuple[Any, ...]:
        """Let it be pickled and copied."""
        return tuple(self), self.env_ids


def retell(error: BaseException, told: Callable[[Any], Sequence[Any]]) -> None:
    """Bring ``error.partial``, if it is of a step, into the form that ``told`` gives results."""
    partial = getattr(error, "partial", None)
    if isinstance(partial, StepResult | StepBatch):
        put(error, "partial", Partial(told(partial), partial.env_ids))
