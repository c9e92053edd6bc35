"""Waiting in an event loop, so that its other tasks run meanwhile."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Callable

from parallelenv.contract.interrupts import DeferSigint


async def sleep_until_woken(fileno: int | None, wakers: set[Callable[[], None]], timeout: float, nap: float) -> None:
    """Sleep until a descriptor is readable or the waker of this task is called.

    Args:
        fileno: The descriptor; ``None``: there is none.
        wakers: Contains the waker of this task meanwhile. It may be called in any thread.
        timeout: Seconds after which to wake up anyway.
        nap: The same if the descriptor cannot be watched.
    """
    loop = asyncio.get_running_loop()
    woken = loop.create_future()

    def wake() -> None:
        with contextlib.suppress(RuntimeError):  # the loop was closed
            loop.call_soon_threadsafe(_finish, woken)

    own = -1
    try:
        wakers.add(wake)
        if fileno is not None:
            # NotImplementedError: the usual loop on Windows; OSError: too many open files.
            with contextlib.suppress(NotImplementedError, OSError), DeferSigint():
                # A copy: a loop has one reader per descriptor, and the backend may close its own meanwhile.
                own = os.dup(fileno)
                loop.add_reader(own, _finish, woken)
                nap = timeout
        await asyncio.wait([woken], timeout=nap)
    finally:
        with DeferSigint():
            wakers.discard(wake)
            if own >= 0:
                if not loop.is_closed():
                    with contextlib.suppress(NotImplementedError):
                        loop.remove_reader(own)
                os.close(own)


def _finish(woken: asyncio.Future[None]) -> None:
    if not woken.done():
        woken.set_result(None)
