"""Frames of several envs as one picture."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from parallelenv.errors import ArgumentError


def tile_frames(frames: Sequence[Any]) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Return an RGB picture with the frames in a near-square grid, row by row.

    Args:
        frames: Arrays ``(height, width, 3)`` uint8, or ``(height, width)`` grey; their sizes
            may differ. Smaller ones are padded with black, to the right and below.

    Returns:
        ``(rows * max_height, columns * max_width, 3)`` uint8.

    Raises:
        ArgumentError: If a frame is no such array, as with a render mode that draws a window.
    """
    pictures = [_as_rgb(frame, index) for index, frame in enumerate(frames)]
    columns = math.ceil(math.sqrt(len(pictures)))
    rows = math.ceil(len(pictures) / max(columns, 1))
    height = max((picture.shape[0] for picture in pictures), default=0)
    width = max((picture.shape[1] for picture in pictures), default=0)
    canvas = np.zeros((rows * height, columns * width, 3), dtype=np.uint8)
    for index, picture in enumerate(pictures):
        top, left = index // columns * height, index % columns * width
        canvas[top : top + picture.shape[0], left : left + picture.shape[1]] = picture
    return canvas


def _as_rgb(frame: Any, index: int) -> np.ndarray[Any, Any]:
    if not isinstance(frame, np.ndarray) or frame.ndim not in (2, 3) or (frame.ndim == 3 and frame.shape[2] < 3):
        raise ArgumentError(
            f"Frame {index} is {type(frame).__name__}, no RGB array, so it cannot be tiled. "
            "Make the envs with render_mode='rgb_array'."
        )
    return np.repeat(frame[..., None], 3, axis=2) if frame.ndim == 2 else frame[..., :3]
