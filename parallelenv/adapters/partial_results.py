"""Errors in the form of another library's vector env, with the results of the other envs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from parallelenv.contract.batch import Array
from parallelenv.contract.error_text import one_line
from parallelenv.contract.failures import add_note, put
from parallelenv.contract.tracebacks import short_tracebacks
from parallelenv.results import StepBatch, StepResult

_Class = TypeVar("_Class", bound=type)


class PartialStep(tuple):  # type: ignore[type-arg]
    """The return value of a step, with only the rows of envs that did not fail.

    Attributes:
        env_ids: ``(k,)`` int64, the envs of the rows, in order.
    """

    env_ids: Array

    def __new__(cls, items: Sequence[Any], env_ids: Array) -> PartialStep:
        """Return the items as a tuple with the ids as an attribute."""
        self = tuple.__new__(cls, items)
        self.env_ids = env_ids
        return self

    def __getnewargs__(self) -> tuple[Any, ...]:
        """Return the arguments for pickling and copying."""
        return tuple(self), self.env_ids


def convert_partial(error: BaseException, convert: Callable[[Any], Sequence[Any]]) -> None:
    """Convert ``error.partial``, if it is of a step, with ``convert``, the adapter's conversion of results."""
    partial = getattr(error, "partial", None)
    if isinstance(partial, StepResult | StepBatch):
        put(error, "partial", PartialStep(convert(partial), partial.env_ids))


def raises_first(adapter: _Class) -> _Class:
    """Make an adapter raise the first env's exception if several failed, as its library does."""
    return short_tracebacks(adapter, _first)


def _first(error: BaseException) -> BaseException:
    """Return the first exception of a group of env failures, with the others in its notes."""
    if not isinstance(error, BaseExceptionGroup) or not hasattr(error, "failures"):
        return error
    first, *others = error.exceptions
    for other in others:
        add_note(first, f"Also: {one_line(other)} {' '.join(getattr(other, '__notes__', ()))}")
    for name in ("env_ids", "failures", "partial"):
        put(first, name, getattr(error, name))
    return first
