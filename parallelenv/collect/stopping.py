"""What ends with `stop` or a ``with`` block, has a history, and refuses to be used afterwards."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any, Concatenate, ParamSpec, Self, TypeVar, cast

from parallelenv.collect.history import History
from parallelenv.contract.tracebacks import ShortTracebacks
from parallelenv.errors import ClosedError, ConcurrentUseError

_Params = ParamSpec("_Params")
_Result = TypeVar("_Result")
_Owner = TypeVar("_Owner", bound="Stoppable")


def alone(
    method: Callable[Concatenate[_Owner, _Params], _Result],
) -> Callable[Concatenate[_Owner, _Params], _Result]:
    """Refuse a method after `stop`, and while another thread is in one: what they share has no lock."""
    call = method.__name__.lstrip("_")

    @functools.wraps(method)
    def guarded(self: _Owner, *args: _Params.args, **kwargs: _Params.kwargs) -> _Result:
        self._refuse_stopped(call)
        mine = threading.get_ident(), call
        try:
            holder = self._users.setdefault("", mine)  # is atomic
            if holder is not mine:
                self._refuse_within(call, holder)
            return method(self, *args, **kwargs)
        except Exception as error:
            if self._is_stopped:  # what it used was taken away under it
                raise ClosedError(f"This {type(self).__name__} was stopped while {call}() was running.") from error
            raise
        finally:
            if self._users.get("") is mine:
                self._users.clear()

    return cast("Callable[Concatenate[_Owner, _Params], _Result]", guarded)


class Stoppable(ShortTracebacks):
    """Base of a collector, and of a set of them.

    Attributes:
        history: What was collected, a record for each collection.
    """

    history: History
    _is_stopped: bool
    _unrepeatable: tuple[str, ...] = ()
    """Methods that nothing may call that is called by one: a policy, say."""

    def __init__(self) -> None:
        self._is_stopped = False
        self._users: dict[str, tuple[int, str]] = {}

    @property
    def closed(self) -> bool:
        """Whether `stop` was called."""
        return self._is_stopped

    def plot(self, axes: Any = None) -> Any:
        """Draw returns against samples and seconds, as `History.plot`."""
        return self.history.plot(axes)

    def stop(self) -> None:
        """Close all envs and the history. Harmless when repeated."""
        self._is_stopped = True
        self._close_envs()
        self.history.close()

    def _close_envs(self) -> None:
        raise NotImplementedError

    def __enter__(self) -> Self:
        """Return itself; the end of the ``with`` block stops it."""
        return self

    def __exit__(self, *error: object) -> None:
        """Stop."""
        self.stop()

    def _refuse_stopped(self, call: str) -> None:
        if self._is_stopped:
            raise ClosedError(f"{call}() was called on a stopped {type(self).__name__}. Make a new one.")

    def _refuse_within(self, call: str, holder: tuple[int, str]) -> None:
        name, (thread, other) = type(self).__name__, holder
        if thread != threading.get_ident():
            raise ConcurrentUseError(
                f"{call}() was called while another thread is in {other}() of this {name}. Use one per thread, or a "
                "lock."
            )
        if call in self._unrepeatable:
            raise ConcurrentUseError(
                f"{call}() was called within {other}() of this {name}, by its policy or what it listens to. Call it "
                "afterwards."
            )
