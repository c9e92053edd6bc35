"""Waits for replies in a task of an event loop, while the loop's other tasks run."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Callable

from parallelenv.contract.interrupts import DeferSigint

HEARTBEAT = 0.25
"""Seconds after which a sleep ends in any case.

Then the caller notices workers' output, and deaths of workers that no reply reports.
"""
SHORTEST_NAP = 5e-4
_NAP = 1 / 8
"""Length of a nap as a fraction of the time waited so far. The fraction bounds how late a result is found."""


async def sleep_until_woken(fileno: int | None, wakers: set[Callable[[], None]], waited: float, left: float) -> None:
    """Sleep until a descriptor is readable, this task's waker is called, or `HEARTBEAT` or ``left`` has elapsed.

    Args:
        fileno: The descriptor, or ``None`` if there is none.
        wakers: Set that contains the waker of this task during the sleep. The waker is a function that ends the sleep;
            any thread may call it.
        waited: Seconds that this task has waited so far. If no descriptor can be watched, the task sleeps only for a
            fraction of this time.
        left: Seconds that are left until this task must stop waiting.
    """
    nap = min(HEARTBEAT, max(SHORTEST_NAP, waited * _NAP), left)
    loop = asyncio.get_running_loop()
    woken = loop.create_future()

    def wake() -> None:
        with contextlib.suppress(RuntimeError):  # the loop was closed
            loop.call_soon_threadsafe(_finish, woken)

    descriptor = -1
    try:
        wakers.add(wake)
        if fileno is not None:
            # NotImplementedError: the usual loop on Windows; OSError: too many open files.
            with contextlib.suppress(NotImplementedError, OSError), DeferSigint():
                # Watch a copy, because a loop has one reader per descriptor, and because the backend may close its own
                # descriptor during the sleep.
                descriptor = os.dup(fileno)
                loop.add_reader(descriptor, _finish, woken)
                nap = min(HEARTBEAT, left)
        await asyncio.wait([woken], timeout=nap)
    finally:
        with DeferSigint():
            wakers.discard(wake)
            if descriptor >= 0:
                if not loop.is_closed():
                    with contextlib.suppress(NotImplementedError):
                        loop.remove_reader(descriptor)
                os.close(descriptor)


def _finish(woken: asyncio.Future[None]) -> None:
    if not woken.done():
        woken.set_result(None)
