"""Frames of several envs as one picture."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from parallelenv.contract.batch import Array
from parallelenv.contract.protocol import Lookup, MethodCall
from parallelenv.contract.spaces import describe_value
from parallelenv.engine.engine import Engine
from parallelenv.errors import ArgumentError

_DARK = (None, "human", "ansi", "rgb_array_list")
"""Render modes whose `render` does not return a single picture."""
_GREY = 128
"""Colour of gaps and empty places, distinct from the white of CartPole and the black of Atari."""
_LEAST_LABELLED = 32
"""Smallest frame, in pixels each way, that has room for an env id."""


def tile_frames(
    frames: Sequence[object], env_ids: Sequence[int] | None = None, width: int | None = None, labels: bool = False
) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Return an RGB picture, uint8, with the frames in a near-square grid, row by row.

    Args:
        frames: uint8 arrays ``(height, width, 3)``, ``(height, width)`` grey, or ``(height, width, 4)`` with ignored
            alpha; anything else is refused. Smaller ones are padded with black, to the right and below.
        env_ids: Env ids for labels and messages; ``None`` means 0, 1, 2, ...
        width: Maximum width of the picture in pixels: all frames are scaled down by the same factor.
        labels: Leave a grey gap between frames and draw the env id into the upper left corner of each. A single frame
            gets neither, and frames below 32 pixels each way get no id.
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

        for index, picture in enumerate(pictures):  # each pixel is the mean of those it replaces
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
            f"The frame of env {env_id} is {describe_value(frame)}, no RGB array, so it cannot be tiled. Make the envs "
            "with render_mode='rgb_array'."
        )
    is_picture = frame.ndim == 2 or (frame.ndim == 3 and frame.shape[2] in (3, 4))
    if frame.dtype != np.uint8 or not is_picture or not frame.size:
        raise ArgumentError(
            f"The frame of env {env_id} is {describe_value(frame)}; tiled are uint8 arrays (height, width, 3), "
            "(height, width) grey or (height, width, 4) with alpha. Let the env's render() return one of them."
        )
    return np.repeat(frame[..., None], 3, axis=2) if frame.ndim == 2 else frame[..., :3]


@functools.lru_cache(maxsize=1024)
def _label(env_id: int, size: int) -> Array:
    """Return an env id in white on black, ``(height, width, 3)`` uint8, in letters of ``size`` pixels."""
    from PIL import Image, ImageDraw, ImageFont

    font = ImageFont.load_default(size)
    left, top, right, bottom = map(round, font.getbbox(str(env_id)))
    margin = max(2, size // 5)
    label = Image.new("RGB", (right - left + 2 * margin, bottom - top + 2 * margin))
    ImageDraw.Draw(label).text((margin - left, margin - top), str(env_id), fill="white", font=font)
    return np.asarray(label)


def picture_of(engine: Engine, env_ids: Sequence[int], width: int | None = None, labels: bool = True) -> Array:
    """Return the frames of envs as one picture. See `tile_frames` for ``width`` and ``labels``."""
    return tile_frames(engine.call_each(env_ids, [MethodCall("render")] * len(env_ids)), env_ids, width, labels)


def refuse_dark_envs(engine: Engine, env_ids: Sequence[int]) -> None:
    """Refuse envs that do not render single pictures. Envs without a ``render_mode`` may render anything."""
    env_ids = [env_id for env_id in env_ids if engine.pool.facts[env_id].render_mode != "rgb_array"]
    if not env_ids:
        return
    modes = engine.pool.ask("get", env_ids, None, Lookup("render_mode")).values
    for env_id in env_ids:
        if env_id in modes and modes[env_id][0] in _DARK:
            raise ArgumentError(
                f"env {env_id} has render_mode={modes[env_id][0]!r}, so there is nothing to see of it. Make it with "
                "render_mode='rgb_array': ParallelEnv.make(id, n, render_mode='rgb_array'). A class of your own sets "
                "render_mode itself."
            )
    unsaid = [env_id for env_id in env_ids if env_id not in modes]
    can_draw = engine.pool.ask("get", unsaid, None, Lookup("render", "exists")).values if unsaid else {}
    for env_id in unsaid:
        if not can_draw.get(env_id):
            raise ArgumentError(
                f"env {env_id} has no method render(), so there is nothing to see. Give it one that returns a "
                "uint8 array (height, width, 3), or leave it out with id."
            )
