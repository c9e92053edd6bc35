"""Films for notebooks."""

from __future__ import annotations

import base64
import html
from pathlib import Path
from typing import Any

from parallelenv.contract.error_text import count
from parallelenv.errors import ArgumentError
from parallelenv.notebook.animation import format_of
from parallelenv.rollouts.evaluation import Evaluation

_LARGEST = 2**25
"""Maximum number of bytes embedded: larger films would bloat the notebook and not play."""
_STYLE = "max-width:100%"


class Film:
    """A film of envs. A notebook plays it, even without a network, and so does a page made by nbconvert.

    Attributes:
        data: The encoded film.
        video_format: ``"webp"``, ``"gif"``, ``"png"`` or ``"mp4"``.
        path: File of the film; ``None`` if it was not written.
        num_frames: Number of frames.
        fps: Frames per second.
        episodes: An `Evaluation` of the episodes that ended in it.
    """

    def __init__(
        self, data: bytes, video_format: str, path: Path | None, num_frames: int, fps: float, episodes: Evaluation
    ) -> None:
        self.data = data
        self.video_format = video_format
        self.path = path
        self.num_frames = num_frames
        self.fps = fps
        self.episodes = episodes

    def save(self, path: str | Path) -> Path:
        """Write the film, and return the path; an existing file is replaced.

        Raises:
            ArgumentError: If the suffix is not that of the film's format.
            OSError: If it cannot be written.
        """
        if format_of(path) != self.video_format:
            raise ArgumentError(
                f"path={str(path)!r} must end in .{self.video_format}: that is what this film is. Record another one "
                "with that path."
            )
        target = Path(path)
        target.write_bytes(self.data)
        self.path = target
        return target

    def __repr__(self) -> str:
        """Return one line."""
        where = "" if self.path is None else f", {self.path}"
        return (
            f"<Film of {count(self.num_frames, 'frame')}, {self.fps:g} a second, {self.video_format}, "
            f"{len(self.data):,} bytes{where}>"
        )

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, str]:
        """Return a player, and a text."""
        if len(self.data) > _LARGEST:
            return {"text/plain": f"{self!r} is too large to be played here."}
        data = base64.b64encode(self.data).decode()
        if self.video_format == "mp4":
            source = f"data:video/mp4;base64,{data}"
            player = f'<video controls autoplay loop muted playsinline style="{_STYLE}" src="{source}"></video>'
        else:
            said = html.escape(repr(self), quote=True)
            player = f'<img style="{_STYLE}" alt="{said}" src="data:image/{self.video_format};base64,{data}">'
        return {"text/plain": repr(self), "text/html": player}
