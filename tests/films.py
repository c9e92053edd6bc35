"""Envs that draw, and functions that read their films."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
from conftest import MakeEnv
from PIL import Image

from parallelenv import ParallelEnv
from parallelenv.testing.envs import Counter


class Lamp(Counter):
    """Its brightness shows its step count; each env is larger than the one before."""

    metadata = {"render_modes": ["rgb_array"], "render_fps": 10}  # noqa: RUF012
    render_mode: str | None = "rgb_array"

    def render(self) -> Any:
        return np.full((8 + 8 * self.number, 16, 3), 20 * self.count, np.uint8)


def lamps(make_env: MakeEnv, *numbers: int, **kwargs: Any) -> ParallelEnv:
    return make_env([lambda number=number: Lamp(number, 4) for number in numbers], **kwargs)


def counts(frames: list[Any]) -> list[int]:
    """Return the step counts that the first lamp shows."""
    return [round(float(frame[:8, :16].mean()) / 20) for frame in frames]


def frames_of(film: Path | bytes) -> list[Any]:
    with Image.open(film if isinstance(film, Path) else io.BytesIO(film)) as opened:
        frames = []
        for index in range(getattr(opened, "n_frames", 1)):
            opened.seek(index)
            frames.append(np.asarray(opened.convert("RGB")))
    return frames
