"""Sections of code that Ctrl-C must not interrupt.

A `KeyboardInterrupt` can be raised between any two bytecodes of the main thread: for example, after the caller has
written a message but before it has recorded that. Caller and host would then disagree about which commands are pending.
The caller may be interrupted while it *waits*; while it sends, records a reply, or opens or closes system resources,
the interrupt is delayed.
"""

from __future__ import annotations

import functools
import inspect
import signal
import threading

# `signal.signal` takes 3 us per call, mostly for enum conversions; the C function that it wraps takes 0.25 us.
from _signal import getsignal as _get_handler  # type: ignore[import-not-found]
from _signal import signal as _set_handler
from typing import Any

_INTERRUPT = int(signal.SIGINT)


class DeferSigint:
    """A context manager that delays SIGINT until the end of the block. It is not reentrant.

    Outside the main thread it does nothing, because Python runs signal handlers only in the main thread. It also does
    nothing if a program that embeds Python has set the handler, because Python could not restore that handler. At the
    end of the block, the previous handler is restored, and handles the delayed interrupt, if there was one.
    """

    def __init__(self) -> None:
        self._noted = False
        self._previous: Any = None
        self._main = None if _get_handler(_INTERRUPT) is None else threading.main_thread().ident
        self._handler = self._note  # bound once, to save look-ups

    def __enter__(self) -> None:
        self._previous = None
        if threading.get_ident() == self._main:
            self._noted = False  # may be set if an earlier exit was interrupted; that interrupt was raised
            self._previous = _set_handler(_INTERRUPT, self._handler)

    def _note(self, *_: object) -> None:
        self._noted = True

    def __exit__(self, *error: object) -> None:
        if self._previous is None:  # nothing was done
            return
        _set_handler(_INTERRUPT, self._previous)
        if not self._noted:
            return
        if callable(self._previous):  # not by a second signal, which `signal.set_wakeup_fd` would report again
            self._previous(_INTERRUPT, inspect.currentframe())
        else:
            signal.raise_signal(signal.SIGINT)


_SIGNALS = tuple(
    int(getattr(signal, name))
    for name in (
        *("SIGINT", "SIGTERM", "SIGALRM", "SIGHUP", "SIGQUIT", "SIGUSR1", "SIGUSR2"),
        *("SIGVTALRM", "SIGPROF", "SIGXCPU", "SIGBREAK"),
    )
    if hasattr(signal, name)
)
"""The signals that programs handle: Ctrl-C, requests to end, timers, limits, and those without a fixed meaning."""


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
