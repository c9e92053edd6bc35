"""Encoding of films: formats that Pillow writes, and MP4 with imageio-ffmpeg."""

from __future__ import annotations

import importlib.util
import io
import math
import numbers
import os
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from parallelenv.contract.batch import Array
from parallelenv.contract.error_text import show
from parallelenv.errors import ArgumentError, MissingDependencyError

FORMATS = ("webp", "gif", "png", "mp4")
"""60 frames of 8 tiled envs: WebP 13 kB in 0.4 s, GIF 155 kB in 1.5 s, PNG 179 kB in 0.8 s."""


_FEWEST = 0.02
"""Frames per second: a frame of an animated PNG lasts at most 65 s."""
_FPS = 30.0
"""Frames per second of envs that do not declare it."""
_SHORTEST = {"gif": 20, "webp": 11, "png": 11}
"""Milliseconds per frame; browsers show shorter frames for 100 ms."""
_WIDEST = {"gif": 65_535, "webp": 16_383}
"""Maximum width and height in pixels."""


def has_ffmpeg() -> bool:
    """Return whether MP4 can be written."""
    return importlib.util.find_spec("imageio_ffmpeg") is not None


def check_format(video_format: str) -> None:
    """Check that a format can be written here.

    Raises:
        ArgumentError: If the format is unknown.
        MissingDependencyError: If the package for it is not installed, or Pillow was built without the format.
    """
    if video_format not in FORMATS:
        raise ArgumentError(f"video_format={show(video_format)} is not known; expected one of {FORMATS}.")
    if video_format == "mp4" and not has_ffmpeg():
        raise MissingDependencyError(
            "MP4 films need the package imageio-ffmpeg, which is not installed. Install it with: pip install "
            "imageio-ffmpeg, or write .webp, .gif or .png."
        )
    require_pillow("Pictures and films")
    from PIL import features

    if video_format == "webp" and not features.check("webp"):
        raise MissingDependencyError("This Pillow was made without WebP. Give video_format='gif', or another Pillow.")


def require_pillow(what: str) -> None:
    """Check that Pillow is installed.

    Args:
        what: What needs it, in the plural, as the beginning of the message.

    Raises:
        MissingDependencyError: If it is not.
    """
    if importlib.util.find_spec("PIL") is None:
        raise MissingDependencyError(
            f"{what} need the package pillow, which is not installed. Install it with: pip install pillow"
        )


def format_of(path: str | os.PathLike[str]) -> str:
    """Return the format of a file name's suffix.

    Raises:
        ArgumentError: If the suffix is not that of a format.
        MissingDependencyError: See `check_format`.
    """
    suffix = Path(path).suffix[1:].lower()
    if suffix not in FORMATS:
        raise ArgumentError(f"path={str(path)!r} must end in one of {tuple('.' + name for name in FORMATS)}.")
    check_format(suffix)
    return suffix


def check_fps(fps: Any, metadata: Any = None) -> float:
    """Return frames per second.

    Args:
        fps: The number; ``None`` takes that of the env, or else 30.
        metadata: Metadata of the env.

    Raises:
        ArgumentError: If it is not a number, or less than one in 50 s.
    """
    if fps is not None:
        return _checked_fps("fps", fps)
    said = metadata.get("render_fps") if isinstance(metadata, Mapping) else None
    return _checked_fps("The env's metadata['render_fps']", said) if said else _FPS


def _checked_fps(name: str, fps: Any) -> float:
    if not isinstance(fps, numbers.Real) or isinstance(fps, bool) or not _FEWEST <= float(fps) < math.inf:
        raise ArgumentError(
            f"{name}={show(fps)} must be a number of frames a second, at least {_FEWEST:g}. Give fps=30, say."
        )
    return float(fps)


def playing_fps(fps: float, video_format: str) -> float:
    """Return the frames per second at which a film plays: browsers play pictures with shorter frames at 10."""
    return min(fps, 1000 / _SHORTEST[video_format]) if video_format in _SHORTEST else fps


def check_size(picture: Array, video_format: str) -> None:
    """Check that a picture, ``(height, width, 3)``, is not too large for a format.

    Raises:
        ArgumentError: If it is.
    """
    height, width = picture.shape[:2]
    most = _WIDEST.get(video_format, math.inf)
    if max(height, width) > most:
        raise ArgumentError(
            f"A picture of {width} x {height} pixels is too large for {video_format}, which has room for {most} each "
            "way. Film fewer envs, by id, or write .png."
        )


def save_animation(path: str | Path, frames: Sequence[Array], fps: float = 30.0) -> None:
    """Write frames as a film in the format of the file name's suffix. Films other than MP4 loop forever.

    Args:
        path: File; an existing one is replaced.
        frames: See `encode_animation`.
        fps: Frames per second.

    Raises:
        ArgumentError: If there are no frames, they are too large, ``fps`` is too small, or the suffix is unknown.
        MissingDependencyError: See `check_format`.
        OSError: If it cannot be written.
    """
    Path(path).write_bytes(encode_animation(frames, format_of(path), fps))


def encode_animation(frames: Sequence[Array], video_format: str, fps: float) -> bytes:
    """Return frames as a film.

    Args:
        frames: ``(height, width, 3)`` uint8 each. Smaller ones are padded with black, to the right and below.
        video_format: One of `FORMATS` that can be written here.
        fps: Frames per second, limited for pictures to what browsers play.

    Raises:
        ArgumentError: If there are no frames, they are too large, or ``fps`` is too small.
    """
    if not len(frames):
        raise ArgumentError("There are no frames to write.")
    fps = check_fps(fps)
    if video_format == "mp4":
        return _encode_mp4(frames, fps)
    from PIL import Image

    duration = round(1000 / playing_fps(fps, video_format))  # milliseconds
    whole = _of_one_size(frames)
    check_size(whole[0], video_format)
    first, *others = map(Image.fromarray, whole)
    film = io.BytesIO()
    first.save(film, video_format, save_all=True, append_images=others, duration=duration, loop=0)
    return film.getvalue()


def _encode_mp4(frames: Sequence[Array], fps: float) -> bytes:
    import imageio_ffmpeg

    whole = _of_one_size(frames, 2)  # its usual colour format needs even sizes
    height, width = whole[0].shape[:2]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "film.mp4")
        options = {"fps": fps, "macro_block_size": 1, "output_params": ["-movflags", "+faststart"]}
        writer = imageio_ffmpeg.write_frames(str(path), (width, height), **options)
        writer.send(None)
        for frame in whole:
            writer.send(np.ascontiguousarray(frame))
        writer.close()
        return path.read_bytes()


def encode_picture(picture: Array) -> bytes:
    """Return a picture, ``(height, width, 3)`` uint8, as PNG."""
    from PIL import Image

    file = io.BytesIO()
    Image.fromarray(picture).save(file, "png", compress_level=1)  # 400 x 600 takes 4 ms, 13 ms at the default level
    return file.getvalue()


def resize(picture: Array, width: int, height: int) -> Array:
    """Return a smaller picture, ``(h, w, 3)`` uint8; each pixel is the mean of those it replaces."""
    from PIL import Image

    return np.asarray(Image.fromarray(picture).resize((width, height), Image.Resampling.BOX))


def _of_one_size(frames: Sequence[Array], multiple: int = 1) -> list[Array]:
    """Return frames padded to the size of the largest, rounded up to a multiple of ``multiple``."""
    height = -(-max(frame.shape[0] for frame in frames) // multiple) * multiple
    width = -(-max(frame.shape[1] for frame in frames) // multiple) * multiple
    return [
        np.pad(frame, ((0, height - frame.shape[0]), (0, width - frame.shape[1]), (0, 0)))
        if frame.shape[:2] != (height, width)
        else frame
        for frame in frames
    ]
