"""Films of envs: how they are encoded, and how a notebook plays them."""

from __future__ import annotations

import base64
import html
import importlib.util
import io
import math
import numbers
import os
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from parallelenv.contract.batch import Array
from parallelenv.contract.error_text import count, show
from parallelenv.errors import ArgumentError, MissingDependencyError
from parallelenv.rollouts.evaluation import Evaluation

FORMATS = ("webp", "gif", "png", "mp4")
"""60 frames of 8 tiled envs: WebP 13 kB in 0.4 s, GIF 155 kB in 1.5 s, PNG 179 kB in 0.8 s."""
_FEWEST = 0.02
"""Frames per second: a frame of an animated PNG lasts at most 65 s."""
_SHORTEST = {"gif": 20, "webp": 11, "png": 11}
"""Milliseconds per frame; browsers show shorter frames for 100 ms."""
_WIDEST = {"gif": 65_535, "webp": 16_383}
"""Maximum width and height in pixels."""
_LARGEST = 2**25
"""Maximum number of bytes embedded: larger films would bloat the notebook and not play."""


@dataclass(eq=False, repr=False)
class Film:
    """A film of envs. A notebook plays it, even without a network, and so does a page made by nbconvert.

    Attributes:
        data: The encoded film.
        video_format: ``"webp"``, ``"gif"``, ``"png"`` or ``"mp4"``.
        num_frames: Number of frames.
        fps: Frames per second.
        episodes: An `Evaluation` of the episodes that ended in it.
        path: File of the film; ``None`` if it was not written.
    """

    data: bytes
    video_format: str
    num_frames: int
    fps: float
    episodes: Evaluation
    path: Path | None = None

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

    def _repr_mimebundle_(self, include: object = None, exclude: object = None) -> dict[str, str]:
        """Return a player, and a text."""
        if len(self.data) > _LARGEST:
            return {"text/plain": f"{self!r} is too large to be played here."}
        source = f"{self.video_format};base64,{base64.b64encode(self.data).decode()}"
        player = f'<img style="max-width:100%" alt="{html.escape(repr(self))}" src="data:image/{source}">'
        if self.video_format == "mp4":
            looks = 'controls autoplay loop muted playsinline style="max-width:100%"'
            player = f'<video {looks} src="data:video/{source}"></video>'
        return {"text/plain": repr(self), "text/html": player}


def has_ffmpeg() -> bool:
    """Return whether MP4 can be written."""
    return importlib.util.find_spec("imageio_ffmpeg") is not None


def check_format(video_format: object) -> None:
    """Refuse an unknown format, and one that the installed packages cannot write."""
    if video_format not in FORMATS:
        raise ArgumentError(f"video_format={show(video_format)} is not known; expected one of {FORMATS}.")
    if video_format == "mp4" and not has_ffmpeg():
        raise MissingDependencyError(
            "MP4 films need the package imageio-ffmpeg, which is not installed. Install it with: pip install "
            "imageio-ffmpeg, or write .webp, .gif or .png."
        )
    try:
        from PIL import features
    except ModuleNotFoundError:
        raise MissingDependencyError(
            "Pictures and films need the package pillow, which is not installed. Install it with: pip install pillow"
        ) from None
    if video_format == "webp" and not features.check("webp"):
        raise MissingDependencyError("This Pillow was made without WebP. Give video_format='gif', or another Pillow.")


def format_of(path: str | os.PathLike[str]) -> str:
    """Return the format of a file name's suffix, after checking that it can be written here."""
    suffix = Path(path).suffix[1:].lower()
    if suffix not in FORMATS:
        raise ArgumentError(f"path={str(path)!r} must end in one of {tuple('.' + name for name in FORMATS)}.")
    check_format(suffix)
    return suffix


def check_fps(fps: object, metadata: object = None) -> float:
    """Return frames per second: ``fps``, or else that of the env's metadata, or else 30. Refuse other values."""
    name = "fps"
    if fps is None and isinstance(metadata, Mapping):
        name, fps = "The env's metadata['render_fps']", metadata.get("render_fps")
    if fps is None or (not fps and name != "fps"):
        return 30.0
    if not isinstance(fps, numbers.Real) or isinstance(fps, bool) or not _FEWEST <= float(fps) < math.inf:
        raise ArgumentError(
            f"{name}={show(fps)} must be a number of frames a second, at least {_FEWEST:g}. Give fps=30, say."
        )
    return float(fps)


def playing_fps(fps: float, video_format: str) -> float:
    """Return the frames per second at which a film plays: browsers play pictures with shorter frames at 10."""
    return min(fps, 1000 / _SHORTEST[video_format]) if video_format in _SHORTEST else fps


def check_size(picture: Array, video_format: str) -> None:
    """Refuse a picture, ``(height, width, 3)``, that is too large for a format."""
    height, width = picture.shape[:2]
    most = _WIDEST.get(video_format, math.inf)
    if max(height, width) > most:
        raise ArgumentError(
            f"A picture of {width} x {height} pixels is too large for {video_format}, which has room for {most} each "
            "way. Film fewer envs, by id, or write .png."
        )


def save_animation(path: str | Path, frames: Sequence[Array], fps: float = 30.0) -> None:
    """Write frames as a film in the format of the file name's suffix. See `encode_animation`."""
    Path(path).write_bytes(encode_animation(frames, format_of(path), fps))


def encode_animation(frames: Sequence[Array], video_format: str, fps: float) -> bytes:
    """Return frames, ``(height, width, 3)`` uint8 each, as a film, which loops forever unless it is an MP4.

    Smaller frames are padded with black, to the right and below. Pictures play at most as fast as browsers can.
    """
    if not len(frames):
        raise ArgumentError("There are no frames to write.")
    fps = check_fps(fps)
    multiple = 2 if video_format == "mp4" else 1  # its usual colour format needs even sizes
    height, width = (-(-max(frame.shape[axis] for frame in frames) // multiple) * multiple for axis in (0, 1))
    whole = [
        np.pad(frame, ((0, height - frame.shape[0]), (0, width - frame.shape[1]), (0, 0)))
        if frame.shape[:2] != (height, width)
        else np.ascontiguousarray(frame)
        for frame in frames
    ]
    if video_format == "mp4":
        import imageio_ffmpeg

        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "film.mp4")
            options = {"fps": fps, "macro_block_size": 1, "output_params": ["-movflags", "+faststart"]}
            writer = imageio_ffmpeg.write_frames(str(path), (width, height), **options)
            writer.send(None)
            for frame in whole:
                writer.send(frame)
            writer.close()
            return path.read_bytes()
    from PIL import Image

    check_size(whole[0], video_format)
    duration = round(1000 / playing_fps(fps, video_format))  # milliseconds
    first, *others = map(Image.fromarray, whole)
    film = io.BytesIO()
    first.save(film, video_format, save_all=True, append_images=others, duration=duration, loop=0)
    return film.getvalue()
