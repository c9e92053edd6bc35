"""Sections that Ctrl-C may not cut in two.

A `KeyboardInterrupt` can appear between any two bytecodes of the main thread: after a message
was written and before that was noted, say, and then the two ends disagree for ever. While the
caller *waits* it may be interrupted freely; while it sends or files a reply, or opens or closes
what the system lends, the interrupt is held back for those few microseconds.
"""

from __future__ import annotations

import signal
import threading

# `signal.signal` spends 3 us a call on enum conversions; the C function that it wraps 0.25 us.
from _signal import signal as _set_handler  # type: ignore[import-not-found]
from types import FrameType, TracebackType
from typing import Any

_INTERRUPT = int(signal.SIGINT)


class DeferSigint:
    """A context manager that delays SIGINT to its end. Not reentrant; main thread only.

    In other threads it does nothing, as Python runs signal handlers in the main thread only.
    The handler found is put back, and is the one that deals with a delayed interrupt.
    """

    def __init__(self) -> None:
        self._noted = False
        self._previous: Any = None
        self._main = threading.main_thread().ident
        self._handler = self._note  # bound once

    def __enter__(self) -> None:
        self._previous = None
        if threading.get_ident() == self._main:
            self._noted = False  # an earlier end of it may have been interrupted, and that was told
            self._previous = _set_handler(_INTERRUPT, self._handler)

    def _note(self, signum: int, frame: FrameType | None) -> None:
        self._noted = True

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, frames: TracebackType | None
    ) -> None:
        if self._previous is None:  # another thread, or a handler that was not set from Python
            return
        _set_handler(_INTERRUPT, self._previous)
        if self._noted:
            signal.raise_signal(signal.SIGINT)
