"""Who may use a `ParallelEnv` now: one thread at a time, in the process that made it."""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Callable
from typing import Any, NoReturn, SupportsIndex, TypeVar, cast

from parallelenv.contract.tracebacks import ShortTracebacks, shorten
from parallelenv.errors import ClosedError, ConcurrentUseError, ForkedError, ParallelEnvError, UnpicklableError

_Method = TypeVar("_Method", bound=Callable[..., Any])

_SHOWN = {
    "_hand_over": "to_gymnasium(), to_sb3() or to_tianshou",
    "_reset_each": "reset",
    "_rollout_here": "rollout",
    "_refuse_fresh": "reset",
    "_refuse_unknown": "reset",
    "_latest_states": "reset",
    "_existing_attr": "get_attr",
    "_call_async": "call",
    "_look": "arecv",
    "_take": "arecv",
    "_act": "stream",
    "_is_under_way": "stream",
    "_detached": "stream",
    "_watch": "profile",
}
"""What users call where such a method is called; any other has their name, but for the underscore."""


class _Process:
    """Which process this is, without a system call each time: that takes 1 us between the steps of real envs."""

    pid = os.getpid()

    @classmethod
    def look_again(cls) -> None:
        cls.pid = os.getpid()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_Process.look_again)


class Guarded(ShortTracebacks):
    """Base of a class whose methods marked `exclusive` may not overlap."""

    def __init__(self) -> None:
        self._home = _Process.pid
        self._is_closed = False
        self._user: dict[str, int] = {}

    def __reduce_ex__(self, protocol: SupportsIndex) -> NoReturn:
        """Refuse to be copied or pickled: two objects cannot share the workers."""
        raise UnpicklableError(
            "A ParallelEnv cannot be copied or pickled: its workers belong to one object in one process. Make another "
            "one from the same list of env fns. To go on from where this one is: other.load_state(env.save_state()), "
            "and what save_state() returns can be pickled."
        )

    def _refusal(self, call: str) -> ParallelEnvError:
        """Return the error that says why a call is not possible now."""
        call = _shown(call)
        if self._is_closed:
            return ClosedError(f"{call}() was called on a closed ParallelEnv. Make a new one.")
        if _Process.pid != self._home:
            return ForkedError(
                f"{call}() was called in a process forked from the one that made this ParallelEnv; its workers answer "
                "only there. Make a ParallelEnv in this process."
            )
        return ConcurrentUseError(
            f"{call}() was called while another thread is using this ParallelEnv. Use one per thread, or a lock."
        )


def _shown(method: str) -> str:
    """Return the name of a method for messages."""
    return _SHOWN.get(method) or method.lstrip("_")


def exclusive(method: _Method) -> _Method:
    """Refuse a method after ``close()``, in a forked child, and while another thread is in one.

    What the method raises has a short traceback, as by `short_tracebacks`.
    """

    @functools.wraps(method)
    def guarded(self: Guarded, *args: Any, **kwargs: Any) -> Any:
        thread = threading.get_ident()
        is_refused = False
        try:
            # `setdefault` is atomic, and an interrupt right after it cannot lock this thread out.
            if self._is_closed or _Process.pid != self._home or self._user.setdefault("thread", thread) != thread:
                is_refused = True
                raise self._refusal(method.__name__)
            return method(self, *args, **kwargs)
        except BaseException as error:
            shorten(error)
            # What it used may have been taken away under it.
            if self._is_closed and isinstance(error, Exception) and not isinstance(error, ClosedError):
                raise ClosedError(
                    f"This ParallelEnv was closed while {_shown(method.__name__)}() was running."
                ) from error
            raise
        finally:
            if not is_refused:
                self._user.clear()

    vars(guarded)["has_short_traceback"] = True
    return cast("_Method", guarded)
