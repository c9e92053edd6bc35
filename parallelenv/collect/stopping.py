"""The base of collectors: `stop`, the ``with`` block, the history, and errors after `stop`."""

from __future__ import annotations

from typing import Any, Self

from parallelenv.collect.history import History
from parallelenv.contract.tracebacks import ShortTracebacks
from parallelenv.engine.thread_guard import Guard


class Stoppable(ShortTracebacks):
    """Base of `Collector` and `CollectorSet`.

    Attributes:
        history: One `Record` per collection or evaluation.
    """

    history: History
    _unrepeatable: tuple[str, ...] = ()
    """Methods that must not be called within another call, for instance by a policy."""

    def __init__(self) -> None:
        self._guard = Guard(type(self).__name__, "stopped", self._unrepeatable)

    @property
    def closed(self) -> bool:
        """Whether `stop` was called."""
        return self._guard.is_closed

    def plot(self, axes: Any = None) -> Any:
        """Draw returns against samples and seconds. See `History.plot`."""
        return self.history.plot(axes)

    def stop(self) -> None:
        """Close all envs and the history. Can be called more than once."""
        self._guard.is_closed = True
        self._close_envs()
        self.history.close()

    def _close_envs(self) -> None:
        raise NotImplementedError

    def __enter__(self) -> Self:
        """Return itself; the end of the ``with`` block calls `stop`."""
        return self

    def __exit__(self, *error: object) -> None:
        """Call `stop`."""
        self.stop()
