"""Films: what Pillow can write, and MP4 where imageio-ffmpeg is installed."""

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
from parallelenv.contract.messages import show
from parallelenv.errors import ArgumentError, MissingDependencyError

FORMATS = ("webp", "gif", "png", "mp4")
"""Of 60 frames of 8 tiled envs WebP makes 13 kB in 0.4 s, GIF 155 kB in 1.5 s, PNG 179 kB in 0.8 s."""


_FEWEST = 0.02
"""Frames a second: an animated PNG knows of no frame that is longer than 65 s."""
_FPS = 30.0
"""Frames a second of envs that do not say it."""
_SHORTEST = {"gif": 20, "webp": 11, "png": 11}
"""Milliseconds of a frame; browsers show one that is shorter for 100 of them."""
_WIDEST = {"gif": 65_535, "webp": 16_383}
"""Pixels, each way."""


def has_ffmpeg() -> bool:
    """Whether MP4 can be written."""
    return importlib.util.find_spec("imageio_ffmpeg") is not None


def check_format(video_format: str) -> None:
    """Refuse what cannot be written here.

    Raises:
        ArgumentError: If the format is not known.
        MissingDependencyError: If what writes it is not installed, or Pillow was made without the format.
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
    """Refuse what needs Pillow.

    Args:
        what: What needs it, in the plural, as the beginning of the message.

    Raises:
        MissingDependencyError: If Pillow is not installed.
    """
    if importlib.util.find_spec("PIL") is None:
        raise MissingDependencyError(
            f"{what} need the package pillow, which is not installed. Install it with: pip install pillow"
        )


def format_of(path: str | os.PathLike[str]) -> str:
    """Return the format that the suffix of a name says.

    Raises:
        ArgumentError: If it says none.
        MissingDependencyError: As in `check_format`.
    """
    suffix = Path(path).suffix[1:].lower()
    if suffix not in FORMATS:
        raise ArgumentError(f"path={str(path)!r} must end in one of {tuple('.' + name for name in FORMATS)}.")
    check_format(suffix)
    return suffix


def check_fps(fps: Any, metadata: Any = None) -> float:
    """Return frames a second.

    Args:
        fps: So many, or ``None``: as many as an env says, else 30.
        metadata: Of the env.

    Raises:
        ArgumentError: If they are no number, or fewer than one in 50 s.
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
    """Return at how many frames a second a film plays: browsers play pictures that are quicker at 10 only."""
    return min(fps, 1000 / _SHORTEST[video_format]) if video_format in _SHORTEST else fps


def check_size(picture: Array, video_format: str) -> None:
    """Refuse a picture, ``(height, width, 3)``, that a format has no room for.

    Raises:
        ArgumentError: If it has not.
    """
    height, width = picture.shape[:2]
    most = _WIDEST.get(video_format, math.inf)
    if max(height, width) > most:
        raise ArgumentError(
            f"A picture of {width} x {height} pixels is too large for {video_format}, which has room for {most} each "
            "way. Film fewer envs, by id, or write .png."
        )


def save_animation(path: str | Path, frames: Sequence[Array], fps: float = 30.0) -> None:
    """Write frames as a film, in the format that the name's suffix says. But for MP4 it begins anew for ever.

    Args:
        path: Where to; a file that is there is replaced.
        frames: As in `encode_animation`.
        fps: Frames a second.

    Raises:
        ArgumentError: If there are no frames, or they are too large, ``fps`` is too small, or the suffix is another.
        MissingDependencyError: As in `check_format`.
        OSError: If it cannot be written.
    """
    Path(path).write_bytes(encode_animation(frames, format_of(path), fps))


def encode_animation(frames: Sequence[Array], video_format: str, fps: float) -> bytes:
    """Return frames as a film.

    Args:
        frames: ``(height, width, 3)`` uint8 each. Smaller ones are padded with black, to the right and below.
        video_format: One of `FORMATS` that can be written here.
        fps: Frames a second; a picture has at most as many as browsers play.

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

    whole = _of_one_size(frames, 2)  # the only sizes that its usual colours have
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
    Image.fromarray(picture).save(file, "png", compress_level=1)  # for 400 x 600 4 ms, 13 ms at the usual level
    return file.getvalue()


def resize(picture: Array, width: int, height: int) -> Array:
    """Return a picture, ``(h, w, 3)`` uint8, made smaller; each pixel is the mean of those that it stands for."""
    from PIL import Image

    return np.asarray(Image.fromarray(picture).resize((width, height), Image.Resampling.BOX))


def _of_one_size(frames: Sequence[Array], multiple: int = 1) -> list[Array]:
    """Return frames padded to the size of the largest, or to the next multiple of a number."""
    height = -(-max(frame.shape[0] for frame in frames) // multiple) * multiple
    width = -(-max(frame.shape[1] for frame in frames) // multiple) * multiple
    return [
        np.pad(frame, ((0, height - frame.shape[0]), (0, width - frame.shape[1]), (0, 0)))
        if frame.shape[:2] != (height, width)
        else frame
        for frame in frames
    ]
