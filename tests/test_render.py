"""Frames of envs, one by one and tiled."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest

from parallelenv import ParallelEnv
from parallelenv.errors import ArgumentError
from parallelenv.notebook.film import tile_frames
from parallelenv.testing.envs import Counter


def frame(height: int, width: int, value: int) -> np.ndarray[Any, Any]:
    return np.full((height, width, 3), value, np.uint8)


def test_frames_of_different_sizes_are_padded() -> None:
    picture = tile_frames([frame(2, 3, 10), frame(4, 2, 20), frame(1, 1, 30)])
    assert picture.shape == (8, 6, 3)
    assert picture.dtype == np.uint8
    assert (picture[:2, :3] == 10).all()
    assert (picture[:4, 3:5] == 20).all()
    assert (picture[4, 0] == 30).all()
    assert picture[:4, 5].max() == picture[5:].max() == 0


def test_labelled_tiles_are_separated_by_a_grey_gap() -> None:
    frames = [frame(64, 64, 10)] * 5
    picture = tile_frames(frames, labels=True)
    assert picture.shape == (2 * 64 + 2, 3 * 64 + 2 * 2, 3)
    for gap in (picture[64:66], picture[:, 64:66], picture[:, 130:132]):
        assert (gap == 128).all()
    assert (picture[66:, 132:] == 128).all(), "there is no sixth"
    assert (picture[30:64, 30:64] == 10).all()
    small = tile_frames([frame(8, 8, 10)] * 4, labels=True)
    assert np.unique(small).tolist() == [10, 128], "frames of few pixels have no room for ids"
    assert tile_frames([], labels=True).shape == tile_frames([]).shape == (0, 0, 3)


def test_tile_width_is_respected_and_frames_keep_their_proportions() -> None:
    for width in (1, 50, 101, 333, 5000):
        picture = tile_frames([frame(90, 120, 10)] * 7, width=width, labels=True)
        assert picture.shape[1] <= max(width, 5)
        if width > 50:
            assert picture.shape[0] / picture.shape[1] == pytest.approx(90 / 120, rel=0.1)


def test_grey_frames_become_rgb() -> None:
    assert tile_frames([np.full((2, 2), 7, np.uint8)]).tolist() == frame(2, 2, 7).tolist()


def test_tiling_an_invalid_frame_raises() -> None:
    with pytest.raises(
        ArgumentError, match=r"frame of env 1 is None \(NoneType\), not an RGB array.*render_mode='rgb_array'"
    ):
        tile_frames([frame(2, 2, 1), None])


def test_alpha_channel_is_dropped() -> None:
    picture = np.full((2, 2, 4), 9, np.uint8)
    picture[..., 3] = 0
    assert tile_frames([picture]).tolist() == frame(2, 2, 9).tolist()


@pytest.mark.parametrize(
    "wrong",
    [
        np.full((2, 2, 3), 0.5),
        np.full((2, 2, 3), 0.5, np.float32),
        np.full((2, 2), 300, np.uint16),
        np.full((2, 2, 3), -1),
        np.ones((2, 2, 3), bool),
        np.ones((2, 2, 3), complex),
        np.full((2, 2, 3), None),
        np.ones((2, 2, 9), np.uint8),
        np.ones((2, 2, 1), np.uint8),
        np.ones((2, 2, 3, 3), np.uint8),
        np.ones((0, 2, 3), np.uint8),
    ],
    ids=lambda wrong: f"{wrong.dtype}{wrong.shape}",
)
def test_tiling_frames_of_other_dtypes_raises(wrong: Any) -> None:
    place = f"frame of env 7 is of shape {wrong.shape} and dtype {wrong.dtype}, but only uint8"
    with pytest.raises(ArgumentError, match=re.escape(place)):
        tile_frames([frame(2, 2, 1), wrong], [2, 7])


class Grown(Counter):
    """Its number determines the dtype of its frame."""

    def render(self) -> Any:
        return np.full((2, 2, 3), 0.5, np.float32) if self.number else frame(2, 2, 7)


def test_tiling_error_names_the_env(make_env: Callable[..., ParallelEnv]) -> None:
    env = make_env([partial(Grown, number) for number in (0, 1, 0)])
    env.reset()
    assert env.render([2, 0], tile=True).tolist() == np.full((2, 4, 3), 7).tolist()
    with pytest.raises(ArgumentError, match=r"frame of env 1 is of shape \(2, 2, 3\) and dtype float32"):
        env.render([2, 1], tile=True)
    assert env.render(1)[0].dtype == np.float32


def test_every_mode_renders_the_same_frames(make_env: Callable[..., ParallelEnv]) -> None:
    import gymnasium as gym

    def make() -> Any:
        return gym.make("CartPole-v1", render_mode="rgb_array")

    env = make_env([make] * 3, num_cpus=2)
    env.reset(seed=1)
    frames = env.render([2, 0])
    alone = make()
    alone.reset(seed=3)
    assert np.array_equal(frames[0], alone.render())
    alone.close()
    tiled = env.render(tile=True)
    height, width, _ = frames[0].shape
    assert tiled.shape == (2 * height, 2 * width, 3)
    assert np.array_equal(tiled[height:, :width], frames[0])
