"""Errors as another library's vector env raises them, with what the other envs answered in that library's form."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from parallelenv.contract.batch import Array
from parallelenv.contract.failures import add_note, put
from parallelenv.contract.messages import one_line
from parallelenv.contract.tracebacks import short_tracebacks
from parallelenv.results import StepBatch, StepResult

_Class = TypeVar("_Class", bound=type)


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


def raises_first(adapter: _Class) -> _Class:
    """Let an adapter raise the exception of the first env where several failed, as its library does."""
    return short_tracebacks(adapter, _first)


def _first(error: BaseException) -> BaseException:
    """Return the first exception of a group of envs that failed, with the others in its notes."""
    if not isinstance(error, BaseExceptionGroup) or not hasattr(error, "failures"):
        return error
    first, *others = error.exceptions
    for other in others:
        add_note(first, f"Also: {one_line(other)} {' '.join(getattr(other, '__notes__', ()))}")
    for name in ("env_ids", "failures", "partial"):
        put(first, name, getattr(error, name))
    return first
