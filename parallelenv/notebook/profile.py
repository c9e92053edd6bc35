"""The result of `ParallelEnv.profile`: a table, a timeline and a trace of where the time goes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from parallelenv.errors import UsageError
from parallelenv.notebook.profile_summary import Summary, summarise
from parallelenv.notebook.recording import Recording, checked_path
from parallelenv.notebook.timeline import Timeline
from parallelenv.notebook.trace import write_trace


class Profile:
    """The recording of a ``with env.profile() as p`` block. Available once the block has ended."""

    _recording: Recording | None = None

    def keep(self, recording: Recording) -> None:
        """Store the recording."""
        self._recording = recording

    @property
    def recording(self) -> Recording:
        """The recording.

        Raises:
            UsageError: If the block has not ended.
        """
        if self._recording is None:
            raise UsageError("Nothing is recorded yet: ask when the block `with env.profile() as p` has ended.")
        return self._recording

    def summary(self) -> Summary:
        """Return where the time went, with advice. It displays as a table.

        Raises:
            UsageError: If the block has not ended.
        """
        return summarise(self.recording)

    def plot(self, begin: float | None = None, end: float | None = None, path: str | Path | None = None) -> Any:
        """Return a timeline that a notebook displays: which worker ran when, and below it a few steps in detail.

        Args:
            begin: Start in seconds from the beginning of the recording; ``None`` means the beginning.
            end: End, likewise; ``None`` means the end of the recording.
            path: File to write it to as well: a name that ends in ``.svg``.

        Returns:
            A `Timeline`.

        Raises:
            UsageError: If the block has not ended.
            ArgumentError: If nothing was recorded between ``begin`` and ``end``, or ``path`` has another suffix.
            OSError: If it cannot be written.
        """
        timeline = Timeline.of(self.recording, begin, end)
        if path is not None:
            timeline.save(path)
        return timeline

    def save(self, path: str | Path) -> Path:
        """Write a trace for Perfetto (ui.perfetto.dev) or ``chrome://tracing``, and return the path.

        Args:
            path: A name that ends in ``.json``; an existing file is replaced.

        Raises:
            UsageError: If the block has not ended.
            ArgumentError: If ``path`` has another suffix.
            OSError: If it cannot be written.
        """
        target = checked_path(path, ".json")
        write_trace(self.recording, target)
        return target

    def __repr__(self) -> str:
        """Return the table, if the block has ended."""
        return "<Profile, still recording>" if self._recording is None else repr(self.summary())
