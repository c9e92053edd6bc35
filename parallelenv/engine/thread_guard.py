"""A guard that refuses calls from envs, other threads and forked processes, and calls after the object was closed."""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Callable
from typing import Any, TypeVar, cast

from parallelenv.contract.tracebacks import shorten, shortens_tracebacks
from parallelenv.contract.worker_info import HOST_THREADS
from parallelenv.errors import ClosedError, ParallelEnvError, UsageError

_Method = TypeVar("_Method", bound=Callable[..., Any])
Use = tuple[int, str]
"""A call in progress: the id of its thread, and its name."""


# The id of this process. It is kept because asking the system at each call takes 1 us between the steps of real envs.
_process = {"id": os.getpid()}
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=lambda: _process.update(id=os.getpid()))


class Guard:
    """Refuses calls on an object from a second thread or another process, and all calls once the object is closed.

    Args:
        unrepeatable: Names of calls that must not be made within another call, for example by a policy.

    Attributes:
        home: Id of the process that made the object.
        users: A dict that is empty while no call is in progress; otherwise, its only key ``""`` maps to the outermost
            call. It is a dict because ``setdefault`` is atomic.
        is_called_by_env: A function that returns whether code that a worker of the object is running in this thread,
            such as a step of an env, makes the current call. Such a call is refused, because the worker is busy.
        tracer: An object whose ``begin()`` and ``end()`` are called when an outermost call starts and ends, and whose
            ``finish()`` is called before the workers are ended; ``None`` if there is none.
    """

    def __init__(self, name: str = "ParallelEnv", ended: str = "closed", unrepeatable: tuple[str, ...] = ()) -> None:
        self.is_closed = False
        self.users: dict[str, Use] = {}
        self.is_called_by_env: Callable[[], bool] = bool
        self.tracer: Any = None
        self._name = name
        self._ended = ended
        self._unrepeatable = unrepeatable
        self.home = _process["id"]

    def is_usable(self) -> bool:
        """Return True unless the object is closed, or was made in another process, from which this one was forked."""
        return not self.is_closed and _process["id"] == self.home

    def check(self, use: Use, outermost: Use) -> None:
        """Raise a `UsageError` unless the call ``use`` may be made while the call ``outermost`` is in progress.

        The thread of the outermost call may make further calls, except unrepeatable ones. Other threads may not, and
        envs may not either: not even if there is no other call, so that ``use`` itself is the outermost one.
        """
        (thread, call), (other_thread, other) = use, outermost
        if self.is_called_by_env():
            within = "" if use is outermost else f" during {other}()"
            raise UsageError(
                f"{call}() was called{within} by an env of this {self._name}, or by a policy that runs in a worker. "
                "The worker cannot answer while it is running that code. Make the call between the calls of your own "
                "loop, and give the envs what they need with set_env_attr() or in their actions."
            )
        if thread != other_thread:
            raise UsageError(
                f"{call}() was called while another thread is in {other}() of this {self._name}. Use one per thread, "
                "or a lock."
            )
        if call in self._unrepeatable and use is not outermost:
            raise UsageError(
                f"{call}() was called within {other}() of this {self._name}, by its policy or a callback. "
                "Call it afterwards."
            )

    def call_user(self, function: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
        """Call a function of the user, such as a policy. A tracer does not count its time as part of the call."""
        if self.tracer is not None:
            self.tracer.end()
        try:
            return function(*arguments, **named)
        finally:
            if self.tracer is not None:
                self.tracer.begin()

    def refusal(self, call: str) -> ParallelEnvError:
        """Return the error for a call on a closed object or in a forked process."""
        if self.is_closed:
            return ClosedError(f"{call}() was called on a {self._ended} {self._name}. Make a new one.")
        return UsageError(
            f"{call}() was called in a process forked from the one that made this {self._name}; its workers reply "
            f"only there. Make a {self._name} in this process."
        )

    def shorten(self, error: BaseException, call: str) -> None:
        """Shorten the traceback of an error.

        ``call`` is the name of the outermost call if that raised the error; it is empty if a call within another one
        did.

        Raises:
            ClosedError: If the object was closed during the outermost call. ``error`` is its cause.
        """
        shorten(error)
        if self.is_closed and call and isinstance(error, Exception):
            raise ClosedError(f"This {self._name} was {self._ended} while {call}() was running.") from error


def single_threaded(method: _Method, call: str | None = None) -> _Method:
    """Decorate a method so that only one thread at a time can call the decorated methods of an object.

    While one of them runs, its thread may make further calls, but calls from other threads and from envs are refused.
    Calls are also refused once the object is closed, and in a forked process. Exceptions that the method raises get a
    short traceback; see `short_tracebacks`. The object's ``_guard`` must be a `Guard`. Error messages use ``call``, the
    name of the public method; ``None`` means the name of ``method``.
    """
    name = call or method.__name__.lstrip("_")

    @functools.wraps(method)
    def guarded(self: Any, *args: Any, **kwargs: Any) -> Any:
        guard: Guard = self._guard
        use = threading.get_ident(), name
        outermost: Use | None = None
        try:
            if not guard.is_usable():
                raise guard.refusal(name)
            # `setdefault` is atomic. An interrupt between `setdefault` and the assignment cannot lock this thread out,
            # because `finally` also looks in `users`.
            outermost = guard.users.setdefault("", use)
            if outermost is not use or use[0] in HOST_THREADS:
                guard.check(use, outermost)
            if outermost is use and guard.tracer is not None:
                guard.tracer.begin()
            return method(self, *args, **kwargs)
        except BaseException as error:
            guard.shorten(error, name if outermost is use else "")
            raise
        finally:
            if outermost is use or guard.users.get("") is use:
                guard.users.clear()
                if guard.tracer is not None:
                    guard.tracer.end()

    return cast("_Method", shortens_tracebacks(guarded))


def single_threaded_in(call: str) -> Callable[[_Method], _Method]:
    """Return a form of the decorator `single_threaded` for a method that users reach by calling ``call``."""
    return functools.partial(single_threaded, call=call)
