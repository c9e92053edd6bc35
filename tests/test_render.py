"""Frames of envs, one by one and tiled."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from parallelenv import ParallelEnv
from parallelenv.errors import ArgumentError
from parallelenv.tiles import tile_frames


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


def test_grey_frames_become_rgb() -> None:
    assert tile_frames([np.full((2, 2), 7, np.uint8)]).tolist() == frame(2, 2, 7).tolist()


def test_what_is_no_frame_cannot_be_tiled() -> None:
    with pytest.raises(ArgumentError, match="Frame 1 is NoneType.*render_mode='rgb_array'"):
        tile_frames([frame(2, 2, 1), None])


def test_every_mode_renders_the_same(make_env: Callable[..., ParallelEnv]) -> None:
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


def test_no_envs_is_a_fine_subset(make_env: Callable[..., ParallelEnv]) -> None:
    env = make_env(["CartPole-v1"] * 2)
    env.reset()
    result = env.step([], id=[])
    assert result.states.shape == (0, 4)
    assert result.env_ids.tolist() == env.get_env_attr("gravity", id=[]) == []
