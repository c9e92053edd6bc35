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

PATIENCE = 60
"""Seconds after which a call is assumed to hang for ever."""


class StuckError(BaseException):
    """A call did not return. Not an `Exception`, so that it is not handled as an error of an env."""


class StopError(BaseException): ...


@contextlib.contextmanager
def meanwhile(delay: float | None, act: Callable[[], None]) -> Iterator[None]:
    """Do something after some seconds in another thread, unless the block has ended; ``None``: never."""
    timer = threading.Timer(delay or 0.0, act)
    if delay is not None:
        timer.start()
    try:
        yield
    finally:
        timer.cancel()
        if delay is not None:
            timer.join()


def kill(pids: list[int]) -> int:
    """Kill processes that are ours and return how many there were: the ids of dead ones may be those of others."""
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

    def __init__(self) -> None:
        self.num_interrupted = 0
        self._is_ours = False
        self._is_exposed = False
        self._handlers: dict[int, Any] = {}

    def __enter__(self) -> Caller:
        for number, handler in ((signal.SIGINT, self._interrupt), (signal.SIGALRM, self._give_up)):
            self._handlers[number] = signal.signal(number, handler)
        return self

    def __exit__(self, *error: object) -> None:
        signal.alarm(0)
        faulthandler.cancel_dump_traceback_later()
        for number, handler in self._handlers.items():
            signal.signal(number, handler)

    def _give_up(self, signum: int, frame: FrameType | None) -> None:
        raise StuckError(f"a call did not return within {PATIENCE} s")

    def _interrupt(self, signum: int, frame: FrameType | None) -> None:
        if not self._is_ours:
            raise StopError
        self._is_ours = False
        if self._is_exposed:
            self._is_exposed = False
            raise KeyboardInterrupt

    def strike(self) -> None:
        """Interrupt the call that is running; nothing if there is none."""
        if self._is_exposed:
            self._is_ours = True
            os.kill(os.getpid(), signal.SIGINT)

    def attempt(self, call: Callable[[], Any]) -> tuple[Any, BaseException | None]:
        answer: list[Any] = []
        signal.alarm(PATIENCE)
        faulthandler.dump_traceback_later(2 * PATIENCE, exit=True)  # where not even a signal gets through
        try:
            self._is_exposed = True
            try:
                answer.append(call())
            finally:
                self._is_exposed = False
        except (StuckError, StopError):
            raise
        except BaseException as error:  # noqa: BLE001 (the callers decide which are expected)
            self.num_interrupted += isinstance(error, KeyboardInterrupt)
            if not answer:  # else an interrupt came too late to do harm
                return None, error
        return answer[0], None

    def make(self, call: Callable[[], Any]) -> Any:
        """Make a call; return its result, or ``None`` if it was interrupted."""
        result, error = self.attempt(call)
        if error is not None and not isinstance(error, KeyboardInterrupt):
            raise error
        return result
