"""Signals that the adversary sends during a call."""

from __future__ import annotations

import contextlib
import faulthandler
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import psutil

PATIENCE = 60.0
"""Seconds after which a call is held to hang for ever."""


class StuckError(BaseException):
    """A call did not return. Not an `Exception`, so that it is not handled as an error of an env."""


class StopError(BaseException):
    """The user stops the test."""


class Interrupter:
    """Sends SIGINT to this process while a call runs, and to nothing else.

    Attributes:
        is_asked_to_stop: Whether somebody else sent one: the user wants an end.
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


class Watchdog:
    """Ends a call that does not return within `PATIENCE`."""

    def __init__(self) -> None:
        self._since = time.monotonic()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="soak-watchdog", daemon=True)
        self._previous: Any = None

    def __enter__(self) -> Watchdog:
        self._previous = signal.signal(signal.SIGUSR1, _give_up)
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._ended.set()
        self._thread.join()
        signal.signal(signal.SIGUSR1, self._previous)

    def feed(self) -> None:
        """Note that a call begins."""
        self._since = time.monotonic()

    def _watch(self) -> None:
        has_barked = False
        while not self._ended.wait(1.0):
            silence = time.monotonic() - self._since
            if silence < PATIENCE:
                has_barked = False
            elif not has_barked:
                has_barked = True
                signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGUSR1)
            elif silence > 2 * PATIENCE:  # not even a signal gets through
                faulthandler.dump_traceback()
                os._exit(1)


def _give_up(signum: int, frame: FrameType | None) -> None:
    raise StuckError(f"a call did not return within {PATIENCE:.0f} s")
