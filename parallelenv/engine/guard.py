"""One thread at a time, in the process that made an object, until it is closed."""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Callable
from typing import Any, NoReturn, TypeVar, cast

from parallelenv.contract.tracebacks import shorten
from parallelenv.errors import ClosedError, ConcurrentUseError, ForkedError, ParallelEnvError, UnpicklableError

_Method = TypeVar("_Method", bound=Callable[..., Any])
Use = tuple[int, str]
"""A call that uses an object: its thread and its name."""


class _Process:
    """Which process this is, without a system call each time: that takes 1 us between the steps of real envs."""

    pid = os.getpid()

    @classmethod
    def look_again(cls) -> None:
        cls.pid = os.getpid()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_Process.look_again)


class Guard:
    """Refuses calls of an object that would meet another thread's, or come too late.

    Args:
        name: What the object is called in messages.
        ended: What it is when it can be used no more: ``"closed"`` or ``"stopped"``.
        unrepeatable: Calls that must not be made within another one, by a policy for instance.

    Attributes:
        is_closed: Whether it can be used no more.
        home: Id of the process that made it.
        users: Under the key ``""`` the outermost call that is under way, if there is one.
    """

    def __init__(self, name: str = "ParallelEnv", ended: str = "closed", unrepeatable: tuple[str, ...] = ()) -> None:
        self.is_closed = False
        self.users: dict[str, Use] = {}
        self._name = name
        self._ended = ended
        self._unrepeatable = unrepeatable
        self.home = _Process.pid

    def check_within(self, use: Use, outermost: Use) -> None:
        """Refuse a call while another one is under way, unless it was made within that one and may be.

        Raises:
            ConcurrentUseError: If the other one is another thread's, or this one must not be made within another.
        """
        (thread, call), (other_thread, other) = use, outermost
        if thread != other_thread:
            raise ConcurrentUseError(
                f"{call}() was called while another thread is in {other}() of this {self._name}. Use one per thread, "
                "or a lock."
            )
        if call in self._unrepeatable:
            raise ConcurrentUseError(
                f"{call}() was called within {other}() of this {self._name}, by its policy or what it listens to. "
                "Call it afterwards."
            )

    def refusal(self, call: str) -> ParallelEnvError:
        """Return the error for a call that comes too late, or in another process."""
        if self.is_closed:
            return ClosedError(f"{call}() was called on a {self._ended} {self._name}. Make a new one.")
        return ForkedError(
            f"{call}() was called in a process forked from the one that made this {self._name}; its workers answer "
            f"only there. Make a {self._name} in this process."
        )

    def closed_within(self, call: str) -> ClosedError:
        """Return the error for a call from under which the object was closed."""
        return ClosedError(f"This {self._name} was {self._ended} while {call}() was running.")


def single_threaded(method: _Method, call: str | None = None) -> _Method:
    """Refuse a method after the end of its object, in a forked child, and while another thread is in such a method.

    A call within a call of the same thread is let in, and the outermost one keeps other threads out to its end. What
    the method raises has a short traceback, as by `short_tracebacks`.

    Args:
        method: The method of a class whose objects have a `Guard` as ``_guard``.
        call: What users call when they come to it; by default its own name.
    """
    name = call or method.__name__.lstrip("_")

    @functools.wraps(method)
    def guarded(self: Any, *args: Any, **kwargs: Any) -> Any:
        guard: Guard = self._guard
        use = threading.get_ident(), name
        outermost: Use | None = None
        try:
            if guard.is_closed or _Process.pid != guard.home:
                raise guard.refusal(name)
            # `setdefault` is atomic, and an interrupt right after it cannot lock this thread out.
            outermost = guard.users.setdefault("", use)
            if outermost is not use:
                guard.check_within(use, outermost)
            return method(self, *args, **kwargs)
        except BaseException as error:
            shorten(error)
            # What the method used may have been taken away under it.
            if guard.is_closed and outermost is use and isinstance(error, Exception):
                raise guard.closed_within(name) from error
            raise
        finally:
            if outermost is use or guard.users.get("") is use:
                guard.users.clear()

    vars(guarded)["has_short_traceback"] = True
    return cast("_Method", guarded)


def single_threaded_in(call: str) -> Callable[[_Method], _Method]:
    """Do as `single_threaded`, for a method that users come to by another call."""
    return functools.partial(single_threaded, call=call)


def refuse_copy() -> NoReturn:
    """Refuse to copy or pickle a `ParallelEnv`: two objects cannot share the workers."""
    raise UnpicklableError(
        "A ParallelEnv cannot be copied or pickled: its workers belong to one object in one process. Make another "
        "one from the same list of env fns. To go on from where this one is: other.load_state(env.save_state()), "
        "and what save_state() returns can be pickled."
    )
