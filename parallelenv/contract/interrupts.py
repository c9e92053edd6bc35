"""Sections of code that Ctrl-C must not interrupt.

A `KeyboardInterrupt` can be raised between any two bytecodes of the main thread: for example, after the caller has
written a message but before it has recorded that. Caller and host would then disagree about which commands are pending.
The caller may be interrupted while it *waits*; while it sends, records a reply, or opens or closes system resources,
the interrupt is delayed.
"""

from __future__ import annotations

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

    @classmethod
    def is_interrupted(cls) -> bool:
        """Return whether the innermost block of the main thread delays an interrupt now.

        A block that has to wait for another process asks this, and gives up if the process does not answer soon.
        """
        shield = getattr(_get_handler(_INTERRUPT), "__self__", None)
        return isinstance(shield, cls) and shield._noted and threading.get_ident() == shield._main

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
