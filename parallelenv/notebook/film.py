"""Pictures and films of several envs: their encoding, and their display in a notebook."""

from __future__ import annotations

import base64
import functools
import html
import io
import math
import numbers
import os
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from parallelenv.contract.batch import Array
from parallelenv.contract.error_text import count, show
from parallelenv.contract.protocol import Lookup, MethodCall
from parallelenv.contract.spaces import describe_value
from parallelenv.engine.engine import Engine
from parallelenv.errors import ArgumentError, MissingDependencyError
from parallelenv.rollouts.evaluation import Evaluation

_DARK = (None, "human", "ansi", "rgb_array_list")
"""Render modes in which `render` does not return a single picture."""
_GREY = 128
"""Colour of gaps and empty places, distinct from the white background of CartPole and the black one of Atari."""
_LEAST_LABELLED = 32
"""Minimum width and height, in pixels, of a tile that has room for an env id."""


def tile_frames(
    frames: Sequence[object], env_ids: Sequence[int] | None = None, width: int | None = None, labels: bool = False
) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Return an RGB picture, uint8, with the frames in a near-square grid, row by row.

    Args:
        frames: uint8 arrays: RGB ``(height, width, 3)``, grey ``(height, width)``, or ``(height, width, 4)``, whose
            alpha is ignored. Anything else raises an `ArgumentError`. Each tile has the size of the largest frame;
            smaller frames are padded with black on the right and at the bottom.
        env_ids: Env ids for labels and error messages; ``None`` means 0, 1, 2, ...
        width: Maximum width of the picture in pixels. If necessary, all frames are scaled down by the same factor.
        labels: Whether to leave a grey gap between frames and draw the env id in the upper left corner of each frame. A
            single frame gets neither gap nor id. If tiles are less than 32 pixels wide or high, no ids are drawn.
    """
    ids = range(len(frames)) if env_ids is None else env_ids
    pictures = [_as_rgb(frame, env_id) for frame, env_id in zip(frames, ids, strict=True)]
    columns = max(1, math.ceil(math.sqrt(len(pictures))))
    rows = math.ceil(len(pictures) / columns)
    is_labelled = labels and len(pictures) > 1
    across = max((picture.shape[1] for picture in pictures), default=0)
    narrow = across if width is None else min(across, max(1, width // columns))
    gap = min(4, max(1, narrow // 32)) if is_labelled else 0
    factor = 1.0 if width is None or not across else max(1, (width - gap * (columns - 1)) // columns) / across
    if factor < 1:
        from PIL import Image

        for index, picture in enumerate(pictures):  # each pixel is the mean of the pixels that it replaces
            size = max(1, round(picture.shape[1] * factor)), max(1, round(picture.shape[0] * factor))
            pictures[index] = np.asarray(Image.fromarray(picture).resize(size, Image.Resampling.BOX))
    down, across = (max((picture.shape[axis] for picture in pictures), default=0) for axis in (0, 1))
    shape = (max(0, rows * (down + gap) - gap), max(0, min(columns, len(pictures)) * (across + gap) - gap), 3)
    canvas = np.full(shape, _GREY if is_labelled else 0, np.uint8)
    for index, (env_id, picture) in enumerate(zip(ids, pictures, strict=True)):
        top, left = index // columns * (down + gap), index % columns * (across + gap)
        tile = canvas[top : top + down, left : left + across]
        tile[:] = 0
        tile[: picture.shape[0], : picture.shape[1]] = picture
        if is_labelled and min(across, down) >= _LEAST_LABELLED:
            label = _label(env_id, max(10, down // 13))[:down, :across]
            tile[: label.shape[0], : label.shape[1]] = label
    return canvas


def _as_rgb(frame: object, env_id: int) -> np.ndarray[Any, Any]:
    if not isinstance(frame, np.ndarray):
        raise ArgumentError(
            f"The frame of env {env_id} is {describe_value(frame)}, not an RGB array, so it cannot be tiled. Make the "
            "envs with render_mode='rgb_array'."
        )
    is_picture = frame.ndim == 2 or (frame.ndim == 3 and frame.shape[2] in (3, 4))
    if frame.dtype != np.uint8 or not is_picture or not frame.size:
        raise ArgumentError(
            f"The frame of env {env_id} is {describe_value(frame)}, but only uint8 arrays (height, width, 3), (height, "
            "width) grey or (height, width, 4) with alpha can be tiled. Return one of these from the env's render()."
        )
    return np.repeat(frame[..., None], 3, axis=2) if frame.ndim == 2 else frame[..., :3]


@functools.lru_cache(maxsize=1024)
def _label(env_id: int, size: int) -> Array:
    from PIL import Image, ImageDraw, ImageFont

    font = ImageFont.load_default(size)
    left, top, right, bottom = map(round, font.getbbox(str(env_id)))
    margin = max(2, size // 5)
    label = Image.new("RGB", (right - left + 2 * margin, bottom - top + 2 * margin))
    ImageDraw.Draw(label).text((margin - left, margin - top), str(env_id), fill="white", font=font)
    return np.asarray(label)


def picture_of(engine: Engine, env_ids: Sequence[int], width: int | None = None, labels: bool = True) -> Array:
    """Return the frames of envs as one picture, in which exhausted envs are black if they return no frame.

    See `tile_frames` for ``width`` and ``labels``.
    """
    frames = engine.call_each(env_ids, [MethodCall("render")] * len(env_ids))
    for index, env_id in enumerate(env_ids):
        if frames[index] is None and env_id in engine.table.exhausted:
            frames[index] = np.zeros((1, 1, 3), np.uint8)  # tiles have the size of the largest frame
    return tile_frames(frames, env_ids, width, labels)


def refuse_dark_envs(engine: Engine, env_ids: Sequence[int]) -> None:
    """Raise an `ArgumentError` if the ``render_mode`` of an env does not produce single pictures.

    Envs without that attribute are refused only if they have no method ``render``.
    """
    env_ids = [env_id for env_id in env_ids if engine.pool.facts[env_id].render_mode != "rgb_array"]
    if not env_ids:
        return
    modes = engine.pool.ask("get", env_ids, None, Lookup("render_mode")).values
    for env_id in env_ids:
        if env_id in modes and modes[env_id][0] in _DARK:
            raise ArgumentError(
                f"env {env_id} has render_mode={modes[env_id][0]!r}, so it returns no picture. Make it with "
                "render_mode='rgb_array': ParallelEnv.make(id, n, render_mode='rgb_array'). If the class is your own, "
                "set render_mode in it."
            )
    others = [env_id for env_id in env_ids if env_id not in modes]
    can_draw = engine.pool.ask("get", others, None, Lookup("render", "exists")).values if others else {}
    for env_id in others:
        if not can_draw.get(env_id):
            raise ArgumentError(
                f"env {env_id} has no method render(), so it returns no picture. Give it one that returns a "
                "uint8 array (height, width, 3), or leave it out with id."
            )


FORMATS = ("webp", "gif", "png", "mp4")
"""Formats of films. 60 frames of 8 tiled envs take 13 kB and 0.4 s as WebP, 155 kB and 1.5 s as GIF, 179 kB and 0.8 s
as PNG."""
_FEWEST = 0.02
"""Minimum frames per second, because a frame of an animated PNG can last at most 65 s."""
_SHORTEST = {"gif": 20, "webp": 11, "png": 11}
"""Minimum milliseconds per frame, by format. Browsers show shorter frames for 100 ms."""
_WIDEST = {"gif": 65_535, "webp": 16_383}
"""Maximum width and height in pixels, by format."""
_LARGEST = 2**25
"""Maximum number of bytes of a film in a notebook. A larger film would bloat the notebook and would not play."""


@dataclass(eq=False, repr=False)
class Film:
    """A film of envs. Notebooks, and pages made by nbconvert, play the film even without a network.

    Attributes:
        data: The encoded film.
        video_format: ``"webp"``, ``"gif"``, ``"png"`` or ``"mp4"``.
        num_frames: Number of frames.
        fps: Frames per second.
        episodes: An `Evaluation` of the episodes that ended during the film.
        path: File to which the film was last written; ``None`` if it has not been written yet.
    """

    data: bytes
    video_format: str
    num_frames: int
    fps: float
    episodes: Evaluation
    path: Path | None = None

    def save(self, path: str | Path) -> Path:
        """Write the film to a file, replacing an existing one, and return the path.

        Raises:
            ArgumentError: If the suffix does not match the film's format.
            OSError: If the file cannot be written.
        """
        if format_of(path) != self.video_format:
            raise ArgumentError(
                f"path={str(path)!r} must end in .{self.video_format}, the format of this film. Record another one "
                "with that path."
            )
        target = Path(path)
        target.write_bytes(self.data)
        self.path = target
        return target

    def __repr__(self) -> str:
        where = "" if self.path is None else f", {self.path}"
        return (
            f"<Film of {count(self.num_frames, 'frame')}, {self.fps:g} a second, {self.video_format}, "
            f"{len(self.data):,} bytes{where}>"
        )

    def _repr_mimebundle_(self, include: object = None, exclude: object = None) -> dict[str, str]:
        """Return a player as HTML and a summary as text.

        For a film that is too large to embed, return only the text.
        """
        if len(self.data) > _LARGEST:
            return {"text/plain": f"{self!r} is too large to be played here."}
        source = f"{self.video_format};base64,{base64.b64encode(self.data).decode()}"
        player = f'<img style="max-width:100%" alt="{html.escape(repr(self))}" src="data:image/{source}">'
        if self.video_format == "mp4":
            looks = 'controls autoplay loop muted playsinline style="max-width:100%"'
            player = f'<video {looks} src="data:video/{source}"></video>'
        return {"text/plain": repr(self), "text/html": player}


def has_ffmpeg() -> bool:
    """Return whether MP4 files can be written."""
    try:
        import imageio_ffmpeg

        imageio_ffmpeg.get_ffmpeg_exe()
    except (ImportError, RuntimeError):  # the package or, on some platforms, the program is not installed
        return False
    return True


def check_format(video_format: object) -> None:
    """Refuse a format that is unknown or that the installed packages cannot write."""
    if video_format not in FORMATS:
        raise ArgumentError(f"video_format={show(video_format)} is not known; expected one of {FORMATS}.")
    if video_format == "mp4" and not has_ffmpeg():
        raise MissingDependencyError(
            "MP4 films need the package imageio-ffmpeg and a program ffmpeg that it finds. Install both with: pip "
            "install imageio-ffmpeg, or write .webp, .gif or .png."
        )
    from PIL import features

    if video_format == "webp" and not features.check("webp"):
        raise MissingDependencyError("This Pillow was built without WebP. Give video_format='gif', or install another.")


def format_of(path: str | os.PathLike[str]) -> str:
    """Return the format that a file name's suffix stands for.

    Refuse formats that the installed packages cannot write.
    """
    suffix = Path(path).suffix[1:].lower()
    if suffix not in FORMATS:
        raise ArgumentError(f"path={str(path)!r} must end in one of {tuple('.' + name for name in FORMATS)}.")
    check_format(suffix)
    return suffix


def check_fps(fps: object, metadata: object = None) -> float:
    """Return ``fps`` if given, otherwise ``metadata["render_fps"]`` if present, otherwise 30. Refuse invalid values."""
    name = "fps"
    if fps is None and isinstance(metadata, Mapping):
        name, fps = "The env's metadata['render_fps']", metadata.get("render_fps")
    if fps is None or (not fps and name != "fps"):
        return 30.0
    if not isinstance(fps, numbers.Real) or isinstance(fps, bool) or not _FEWEST <= float(fps) < math.inf:
        raise ArgumentError(
            f"{name}={show(fps)} must be a number of frames per second, at least {_FEWEST:g}, for example fps=30."
        )
    return float(fps)


def playing_fps(fps: float, video_format: str) -> float:
    """Return the possible number of frames per second that is nearest to ``fps``.

    Each format has a maximum, because browsers would play a faster animation at only 10 frames per second. A frame of a
    GIF lasts a whole number of hundredths of a second.
    """
    if video_format == "gif":
        fps = 100 / max(1, round(100 / fps))
    return min(fps, 1000 / _SHORTEST[video_format]) if video_format in _SHORTEST else fps


def check_size(picture: Array, video_format: str) -> None:
    """Refuse a picture, ``(height, width, 3)``, that is too large for a format."""
    height, width = picture.shape[:2]
    most = _WIDEST.get(video_format, math.inf)
    if max(height, width) > most:
        raise ArgumentError(
            f"A picture of {width} x {height} pixels is too large for {video_format}, whose maximum is {most} in each "
            "direction. Record fewer envs, by id, or write .png."
        )


def encode_animation(frames: Sequence[Array], video_format: str, fps: float) -> bytes:
    """Encode frames, each ``(height, width, 3)`` uint8, as a film. The film loops forever unless it is an MP4.

    Smaller frames are padded with black on the right and at the bottom. If necessary, ``fps`` is reduced to the maximum
    of the format; see `playing_fps`.
    """
    if not len(frames):
        raise ArgumentError("There are no frames to write.")
    fps = check_fps(fps)
    multiple = 2 if video_format == "mp4" else 1  # the usual colour format of MP4 needs even sizes
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
    if video_format == "gif":
        # Pillow joins equal frames, but a frame can last at most 655.35 s: one pixel keeps longer runs apart.
        most = 655_350 // duration
        for index in range(most, len(whole), most):
            whole[index] = whole[index].copy()
            whole[index][0, 0] ^= 128
    first, *others = map(Image.fromarray, whole)
    film = io.BytesIO()
    first.save(film, video_format, save_all=True, append_images=others, duration=duration, loop=0)
    return film.getvalue()
