"""Makes calls, interrupts them on request, and kills workers during them."""

from __future__ import annotations

import contextlib
import faulthandler
import os
import signal
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import psutil

from .tally import Tally

PATIENCE = 60
"""Seconds after which a call is assumed to hang for ever."""


class StuckError(BaseException):
    """A call did not return. Not an `Exception`, so that it is not handled as an error of an env."""


class StopError(BaseException):
    """The user stops the test."""


class Interrupter:
    """Sends SIGINT to this process while a call runs, and to nothing else.

    Attributes:
        is_asked_to_stop: Whether one came that this program had not sent: the user wants to stop.
    """

    def __init__(self) -> None:
        self.is_asked_to_stop = False
        self._is_ours = False
        self._is_exposed = False
        self._previous: Any = None

    def __enter__(self) -> Interrupter:
        self._previous = signal.signal(signal.SIGINT, self._handle)
        return self

    def __exit__(self, *error: object) -> None:
        signal.signal(signal.SIGINT, self._previous)

    def _handle(self, signum: int, frame: FrameType | None) -> None:
        if not self._is_ours:
            self.is_asked_to_stop = True
            raise KeyboardInterrupt
        self._is_ours = False
        if self._is_exposed:
            self._is_exposed = False
            raise KeyboardInterrupt

    def strike(self) -> None:
        """Interrupt the call that is running; nothing if it has returned."""
        if self._is_exposed:
            self._is_ours = True
            os.kill(os.getpid(), signal.SIGINT)

    @contextlib.contextmanager
    def exposed(self) -> Iterator[None]:
        """Let interrupts through."""
        self._is_exposed = True
        try:
            yield
        finally:
            self._is_exposed = False


@contextlib.contextmanager
def meanwhile(delay: float | None, act: Callable[[], None]) -> Iterator[None]:
    """Do something after some seconds in another thread, unless the block has ended; ``None``: never."""
    if delay is None:
        yield
        return
    timer = threading.Timer(delay, act)
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        timer.join()


def kill(pids: list[int]) -> int:
    """Kill processes that are ours and return how many there were.

    The system may have given the id of a dead process to another one.
    """
    count = 0
    for pid in pids:
        with contextlib.suppress(psutil.NoSuchProcess):
            process = psutil.Process(pid)
            if any(parent.pid == os.getpid() for parent in process.parents()):
                process.kill()
                count += 1
    return count


def node_of(pid: int) -> int:
    """Return the Ray actor that started a worker, or the worker itself if none did."""
    with contextlib.suppress(psutil.NoSuchProcess):
        for parent in psutil.Process(pid).parents():
            if parent.pid != os.getpid() and " ".join(parent.cmdline()).startswith("ray::"):
                return parent.pid
    return pid


class Caller:
    """Makes calls, and ends those that do not return. A context manager: outside of it signals are handled as usual."""

    def __init__(self, tally: Tally, note: Callable[[str], None]) -> None:
        self.note = note
        self.interrupt_after: float | None = None
        self._tally = tally
        self._interrupter = Interrupter()
        self._alarm: Any = None

    def __enter__(self) -> Caller:
        self._interrupter.__enter__()
        self._alarm = signal.signal(signal.SIGALRM, _give_up)
        return self

    def __exit__(self, *error: object) -> None:
        signal.alarm(0)
        faulthandler.cancel_dump_traceback_later()
        signal.signal(signal.SIGALRM, self._alarm)
        self._interrupter.__exit__(*error)

    def make(self, call: Callable[[], Any]) -> Any:
        """Make a call and return its result.

        Raises:
            KeyboardInterrupt: If it was interrupted before it had one.
            StopError: If the user interrupted it.
        """
        interrupt_after, self.interrupt_after = self.interrupt_after, None
        answer: list[Any] = []
        signal.alarm(PATIENCE)
        faulthandler.dump_traceback_later(2 * PATIENCE, exit=True)  # where not even a signal gets through
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


def _give_up(signum: int, frame: FrameType | None) -> None:
    raise StuckError(f"a call did not return within {PATIENCE} s")
