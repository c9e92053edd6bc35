"""What ends with `stop` or a ``with`` block, has a history, and refuses to be used afterwards."""

from __future__ import annotations

from typing import Any, Self

from parallelenv.collect.history import History
from parallelenv.errors import ClosedError


class Stoppable:
    """Base of a collector, and of a set of them.

    Attributes:
        history: What was collected, a record for each collection.
    """

    history: History
    _is_stopped: bool

    @property
    def closed(self) -> bool:
        """Whether `stop` was called."""
        return self._is_stopped

    def plot(self, axes: Any = None) -> Any:
        """Draw returns against samples and seconds, as `History.plot`."""
        return self.history.plot(axes)

    def stop(self) -> None:
        """Close all envs and the history. Harmless when repeated."""
        self._is_stopped = True
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

    def _refuse_stopped(self, call: str) -> None:
        if self._is_stopped:
            raise ClosedError(f"{call}() was called on a stopped {type(self).__name__}. Make a new one.")
