"""Makes calls monitored by a watchdog, and interrupts them on request."""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType
from typing import Any

from .signals import Interrupter, StopError, Watchdog, meanwhile
from .tally import Tally


class Caller:
    """Makes calls. A context: outside of it signals are dealt with as ever.

    Args:
        tally: Where to count.
        note: Told of what happens, a line each.

    Attributes:
        interrupt_after: Seconds after which the next call is interrupted; ``None`` if it is not.
    """

    def __init__(self, tally: Tally, note: Callable[[str], None]) -> None:
        self.note = note
        self.interrupt_after: float | None = None
        self._tally = tally
        self._interrupter = Interrupter()
        self._watchdog = Watchdog()

    def __enter__(self) -> Caller:
        self._interrupter.__enter__()
        self._watchdog.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, frames: TracebackType | None
    ) -> None:
        self._watchdog.__exit__(kind, error, frames)
        self._interrupter.__exit__(kind, error, frames)

    def make(self, call: Callable[[], Any]) -> Any:
        """Make a call and return its answer.

        Raises:
            KeyboardInterrupt: If it was interrupted before it had one.
            StopError: If it was the user who interrupted it.
        """
        interrupt_after, self.interrupt_after = self.interrupt_after, None
        answer: list[Any] = []
        self._watchdog.feed()
        try:
            with meanwhile(interrupt_after, self._interrupter.strike), self._interrupter.exposed():
                answer.append(call())
        except KeyboardInterrupt:
            if self._interrupter.is_asked_to_stop:
                raise StopError from None
            self._tally.interrupts += 1
            if not answer:  # else it came too late to do harm
                self.note("  interrupted")
                raise
        return answer[0]
