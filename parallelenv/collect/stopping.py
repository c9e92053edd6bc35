"""What ends with `stop` or a ``with`` block, has a history, and refuses to be used afterwards."""

from __future__ import annotations

from typing import Any, Self

from parallelenv.collect.history import History
from parallelenv.contract.tracebacks import ShortTracebacks
from parallelenv.engine.guard import Guard


class Stoppable(ShortTracebacks):
    """Base of a collector, and of a set of them.

    Attributes:
        history: What was collected, a record for each collection.
    """

    history: History
    _unrepeatable: tuple[str, ...] = ()
    """Methods that nothing may call that is called by one: a policy, say."""

    def __init__(self) -> None:
        self._guard = Guard(type(self).__name__, "stopped", self._unrepeatable)

    @property
    def closed(self) -> bool:
        """Whether `stop` was called."""
        return self._guard.is_closed

    def plot(self, axes: Any = None) -> Any:
        """Draw returns against samples and seconds, as `History.plot`."""
        return self.history.plot(axes)

    def stop(self) -> None:
        """Close all envs and the history. Harmless when repeated."""
        self._guard.is_closed = True
        self._close_envs()
        self.history.close()

    def _close_envs(self) -> None:
        raise NotImplementedError

    def __enter__(self) -> Self:
        """Return itself; the end of the ``with`` block stops it."""
        return self

    def __exit__(self, *error: object) -> None:
        """Stop."""
        self.stop()
