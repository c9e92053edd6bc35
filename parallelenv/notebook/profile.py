"""Where the time went: what `ParallelEnv.profile` has recorded, as a table, a picture and a trace."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from parallelenv.errors import NotRecordedError
from parallelenv.notebook.profile_summary import Summary, summarise
from parallelenv.notebook.recording import Recording, checked_path
from parallelenv.notebook.timeline import Timeline
from parallelenv.notebook.trace import write_trace


class Profile:
    """What was recorded within ``with env.profile() as p``. It can be asked when that is over."""

    _recording: Recording | None = None

    def keep(self, recording: Recording) -> None:
        """Take what was recorded."""
        self._recording = recording

    @property
    def recording(self) -> Recording:
        """What was recorded.

        Raises:
            NotRecordedError: If it is not over.
        """
        if self._recording is None:
            raise NotRecordedError("Nothing is recorded yet: ask when the block `with env.profile() as p` has ended.")
        return self._recording

    def summary(self) -> Summary:
        """Return where the time went, and what to do about it. It shows as a table.

        Raises:
            NotRecordedError: If the block has not ended.
        """
        return summarise(self.recording)

    def plot(self, begin: float | None = None, end: float | None = None, path: str | Path | None = None) -> Any:
        """Return a timeline, which a notebook shows: who worked when, and below it some steps as large as life.

        Args:
            begin: Seconds since the recording began: from then on. ``None``: from the first one.
            end: Likewise, until then.
            path: Where to write it, too: a name that ends in ``.svg``.

        Returns:
            A `Timeline`.

        Raises:
            NotRecordedError: If the block has not ended.
            ArgumentError: If there is nothing between ``begin`` and ``end``, or ``path`` ends otherwise.
            OSError: If it cannot be written.
        """
        timeline = Timeline.of(self.recording, begin, end)
        if path is not None:
            timeline.save(path)
        return timeline

    def save(self, path: str | Path) -> Path:
        """Write a trace for Perfetto (ui.perfetto.dev) or ``chrome://tracing``, and return where to.

        Args:
            path: A name that ends in ``.json``; a file that is there is replaced.

        Raises:
            NotRecordedError: If the block has not ended.
            ArgumentError: If ``path`` ends otherwise.
            OSError: If it cannot be written.
        """
        target = checked_path(path, ".json")
        write_trace(self.recording, target)
        return target

    def __repr__(self) -> str:
        """Return the table, if there is one."""
        return "<Profile, still recording>" if self._recording is None else repr(self.summary())
