"""Sections of code that Ctrl-C and other signals must not interrupt.

An exception that a signal handler raises, such as the `KeyboardInterrupt` of Ctrl-C or the error of a time limit, can
be raised between any two bytecodes of the main thread: for example, after the caller has written a message but before
it has recorded that. Caller and host would then disagree about which commands are pending. The caller may be
interrupted while it *waits*; while it sends, records a reply, or opens or closes system resources, the handlers are
called later.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import os
import signal
import threading

# `signal.signal` takes 3 us per call, mostly for enum conversions; the C function that it wraps takes 0.25 us.
from _signal import getsignal as _get_handler  # type: ignore[import-not-found]
from _signal import signal as _set_handler
from collections.abc import Iterator
from typing import Any, ClassVar

# SIGINT is last, so that Ctrl-C while a block is entered is handled at once.
_NAMES = "TERM", "ALRM", "HUP", "QUIT", "USR1", "USR2", "VTALRM", "PROF", "XCPU", "BREAK", "INT"
_SIGNALS = tuple(int(getattr(signal, f"SIG{name}")) for name in _NAMES if hasattr(signal, f"SIG{name}"))
"""The signals that programs handle: Ctrl-C, requests to end, timers, limits, and those without a fixed meaning."""


_PIPE_CLOSED, _IGNORED = int(getattr(signal, "SIGPIPE", signal.SIGINT)), int(signal.SIG_IGN)


class DeferSignals:
    """A context manager that delays the program's signal handlers until the end of the block. It is not reentrant.

    Only handlers that are Python functions are delayed, because only these can raise exceptions: each of `_SIGNALS`
    that has one gets another handler, which notes the signal. At the end of the block, the program's handlers are
    restored, and handle the signals that came, in the order in which they came.

    Outside the main thread the context manager does nothing, because Python runs signal handlers only in the main
    thread. It does not replace a handler that a program that embeds Python has set either, because Python could not
    restore that handler.
    """

    _known: ClassVar[tuple[list[Any], list[tuple[int, Any]]]] = [], []
    """The latest handlers of `_SIGNALS`, and those of them that are Python functions.

    They are kept because a look at each handler would take a quarter of the time of an empty block.
    """

    def __init__(self) -> None:
        self._noted: dict[int, None] = {}  # a set in the order of arrival
        self._previous: list[tuple[int, Any]] = []
        self._main = threading.main_thread().ident
        self._handler = self._note  # bound once, to save look-ups

    def __enter__(self) -> None:
        if threading.get_ident() != self._main:
            self._previous = []
            return
        self._noted = {}  # may not be empty if an earlier exit was interrupted; those signals were handled
        found = list(map(_get_handler, _SIGNALS))
        known, self._previous = DeferSignals._known
        if found != known:
            self._previous = [(one, handler) for one, handler in zip(_SIGNALS, found, strict=True) if callable(handler)]
            DeferSignals._known = found, self._previous
        try:
            for number, _ in self._previous:
                _set_handler(number, self._handler)
        except BaseException:  # raised by a handler that was not replaced yet
            self.__exit__()
            raise

    @classmethod
    def is_interrupted(cls) -> bool:
        """Return whether the innermost block of the main thread delays a signal now.

        A block that has to wait for another process asks this, and gives up if the process does not answer soon.
        """
        shields = (getattr(_get_handler(number), "__self__", None) for number in _SIGNALS)
        return threading.get_ident() == threading.main_thread().ident and any(
            isinstance(shield, cls) and shield._noted for shield in shields
        )

    def _note(self, number: int, _: object) -> None:
        self._noted[number] = None

    def __exit__(self, *error: object) -> None:
        try:
            for number, handler in self._previous:
                _set_handler(number, handler)
        except BaseException:  # raised by a handler that is restored already
            self.__exit__()
            raise
        if self._noted:
            noted, self._noted = iter(self._noted), {}
            self._handle(noted, dict(self._previous))

    def _handle(self, noted: Iterator[int], handlers: dict[int, Any]) -> None:
        """Call the handlers of these signals, also if one of them raises.

        They are not called by sending the signals again, because `signal.set_wakeup_fd` would report them twice.
        """
        for number in noted:
            try:
                handlers[number](number, inspect.currentframe())
            finally:
                self._handle(noted, handlers)


def _restore_in_child() -> None:
    """In a process forked by another thread, restore the handlers that a block of the main thread has replaced.

    The main thread does not exist in the forked process, so nothing else would end the block there.
    """
    for number in _SIGNALS:
        shield = getattr(_get_handler(number), "__self__", None)
        while isinstance(shield, DeferSignals) and shield._main != threading.get_ident():
            handler = dict(shield._previous)[number]
            _set_handler(number, handler)
            shield = getattr(handler, "__self__", None)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_restore_in_child)


def is_sigpipe_ignored() -> bool:
    """Return whether a write to a closed pipe only raises an `OSError`, as it does unless the program changes that."""
    return bool(_get_handler(_PIPE_CLOSED) == _IGNORED)  # takes 0.05 us


@contextlib.contextmanager
def without_sigpipe() -> Iterator[None]:
    """Make writes to a closed pipe in the ``with`` block raise an `OSError` whatever the handler of SIGPIPE is.

    With the default handler of the system, which many command-line tools restore, a write would end the program.
    """
    if is_sigpipe_ignored() or not hasattr(signal, "sigtimedwait"):
        yield
        return
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {_PIPE_CLOSED})
    try:
        yield
    finally:
        signal.sigtimedwait({_PIPE_CLOSED}, 0)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def signal_behind(error: BaseException) -> int | None:
    """Return the number of the signal whose handler raised this exception; ``None`` if no signal handler did.

    An exception that interrupts code of the user, such as a step of an env or the copying of its result, is not a
    failure of that code. It must reach the program unchanged, whatever its type is. This function recognizes it by its
    traceback: one of the frames runs the handler that is installed for a signal. The handler that raises
    `KeyboardInterrupt` is in C and has no frame, so an exception of that type counts as one of SIGINT, unless the
    process ignores SIGINT, as workers do. Handlers that an env installs while it steps, and removes before the step
    ends, are the env's own. Python runs handlers only in the main thread.
    """
    if threading.get_ident() != threading.main_thread().ident:
        return None
    codes: dict[Any, int] = {}
    for number in _SIGNALS:
        handler = _get_handler(number)
        while isinstance(handler, functools.partial):
            handler = handler.func
        if callable(handler):
            for function in (handler, getattr(handler, "__func__", None), type(handler).__call__):
                codes.setdefault(getattr(function, "__code__", None), number)
    place = error.__traceback__
    while place is not None:
        if place.tb_frame.f_code in codes:
            return codes[place.tb_frame.f_code]
        place = place.tb_next
    is_default = isinstance(error, KeyboardInterrupt) and callable(_get_handler(signal.SIGINT))
    return int(signal.SIGINT) if is_default else None


class Ignore(contextlib.suppress):
    """Like `contextlib.suppress`, but an exception that a signal handler raised is not suppressed.

    A handler may raise any type of exception; a time limit usually raises `TimeoutError`, which is an `OSError`.
    """

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, *frames: Any) -> bool:
        """Return whether the exception is suppressed."""
        return bool(super().__exit__(kind, error, *frames)) and (error is None or signal_behind(error) is None)
