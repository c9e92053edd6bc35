"""Frames of several envs as one picture."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from parallelenv.animation import reduce
from parallelenv.errors import ArgumentError
from parallelenv.spaces import describe_value

_DARK = (None, "human", "ansi", "rgb_array_list")
"""What an env is not to be made with, as ``render_mode``."""


def tile_frames(
    frames: Sequence[Any], env_ids: Sequence[int] | None = None, width: int | None = None
) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Return an RGB picture with the frames in a near-square grid, row by row.

    Args:
        frames: uint8 arrays ``(height, width, 3)``, ``(height, width)`` grey, or ``(height, width, 4)``, of which the
            alpha is left out; their sizes may differ. Smaller ones are padded with black, to the right and below.
        env_ids: Whose they are, for messages; ``None``: they are counted.
        width: Pixels that are enough: frames are made smaller, all alike and by a whole number, as long as the picture
            stays that wide. ``None``: they stay as they are.

    Returns:
        ``(rows * max_height, columns * max_width, 3)`` uint8.

    Raises:
        ArgumentError: If a frame is no such array, as with a render mode that draws a window. Numbers of another dtype
            are refused too: nobody knows which of them is white.
    """
    whose = range(len(frames)) if env_ids is None else env_ids
    pictures = [_as_rgb(frame, env_id) for frame, env_id in zip(frames, whose, strict=True)]
    columns = math.ceil(math.sqrt(len(pictures)))
    factor = 1 if width is None else columns * max((picture.shape[1] for picture in pictures), default=0) // width
    if factor > 1:
        pictures = [reduce(picture, factor) for picture in pictures]
    rows = math.ceil(len(pictures) / max(columns, 1))
    height = max((picture.shape[0] for picture in pictures), default=0)
    width = max((picture.shape[1] for picture in pictures), default=0)
    canvas = np.zeros((rows * height, columns * width, 3), dtype=np.uint8)
    for index, picture in enumerate(pictures):
        top, left = index // columns * height, index % columns * width
        canvas[top : top + picture.shape[0], left : left + picture.shape[1]] = picture
    return canvas


def refuse_dark(env_ids: Sequence[int], modes: Sequence[Any]) -> None:
    """Refuse envs that answer no single picture.

    Args:
        env_ids: The envs.
        modes: What each has as ``render_mode``; ``"rgb_array"`` for what has none at all, and may do as it likes.

    Raises:
        ArgumentError: If there is one.
    """
    for env_id, mode in zip(env_ids, modes, strict=True):
        if mode in _DARK:
            raise ArgumentError(
                f"env {env_id} has render_mode={mode!r}, so there is nothing to see of it. Make it with "
                "render_mode='rgb_array': ParallelEnv.make(id, n, render_mode='rgb_array'). A class of your own sets "
                "render_mode itself."
            )


def _as_rgb(frame: Any, env_id: int) -> np.ndarray[Any, Any]:
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
