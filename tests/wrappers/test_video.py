"""Films of envs, read back."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from conftest import MakeEnv

from parallelenv import ParallelEnv
from parallelenv.animation import save_animation
from parallelenv.errors import ArgumentError, MissingDependencyError
from parallelenv.testing.envs import Counter
from parallelenv.wrappers import RecordVideo

Image = pytest.importorskip("PIL.Image")
nearby = pytest.mark.parametrize("mode", ["dummy", "subproc"], indirect=True)


class Lamp(Counter):
    """Shows how often it was stepped, by its brightness."""

    metadata = {"render_modes": ["rgb_array"], "render_fps": 10}  # noqa: RUF012

    def render(self) -> Any:
        return np.full((8 + 8 * self.number, 16, 3), 20 * self.count, np.uint8)


class Dark(Counter):
    def render(self) -> None:
        return None


def lamps(make_env: MakeEnv, *numbers: int, **kwargs: Any) -> ParallelEnv:
    return make_env([lambda number=number: Lamp(number, 4) for number in numbers], **kwargs)


def read(path: Path) -> list[Any]:
    """Return the frames of a film."""
    with Image.open(path) as film:
        frames = []
        for index in range(film.n_frames):
            film.seek(index)
            frames.append(np.asarray(film.convert("RGB")))
    return frames


@nearby
@pytest.mark.parametrize("video_format", ["webp", "gif", "png"])
def test_a_film_shows_each_step(video_format: str, make_env: MakeEnv, tmp_path: Path) -> None:
    env = RecordVideo(lamps(make_env, 0, 1), tmp_path / "films", video_length=4, video_format=video_format)
    env.reset()
    for _ in range(3):
        assert env.paths == []
        env.step([0, 0])
    assert env.paths == [tmp_path / "films" / f"parallelenv-step-0.{video_format}"]
    frames = read(env.paths[0])
    assert [frame.shape for frame in frames] == [(16, 32, 3)] * 4
    assert [round(int(frame[4, 4, 0]) / 20) for frame in frames] == [0, 1, 2, 3]
    with Image.open(env.paths[0]) as film:
        film.seek(1)
        film.load()
        assert film.info["duration"] == 100
    env.step([0, 0])
    assert len(env.paths) == 1


@nearby
def test_films_begin_when_they_are_wanted_and_end_with_close(make_env: MakeEnv, tmp_path: Path) -> None:
    asked: list[int] = []

    def is_wanted(step: int) -> bool:
        asked.append(step)
        return step % 3 == 0

    env = RecordVideo(lamps(make_env, 0, asynchronous="restart"), tmp_path, is_wanted, 2, name_prefix="lamp", fps=5)
    env.reset()
    for _ in range(4):
        env.send([0])
        env.recv()
    assert [path.name for path in env.paths] == ["lamp-step-0.webp", "lamp-step-3.webp"][: len(env.paths)]
    env.close()
    assert [path.name for path in env.paths] == ["lamp-step-0.webp", "lamp-step-3.webp"]
    assert len(read(env.paths[1])) == 1
    assert asked == sorted(set(asked))
    env.close()


@nearby
def test_a_film_begins_once_at_a_step(make_env: MakeEnv, tmp_path: Path) -> None:
    env = RecordVideo(lamps(make_env, 0), tmp_path, lambda step: step % 2 == 0, 1)
    env.reset()
    for _ in range(3):
        env.step([0])
    assert [path.stem for path in env.paths] == ["parallelenv-step-0", "parallelenv-step-2"]


@nearby
def test_a_film_may_be_of_some_envs_and_waits_for_their_reset(make_env: MakeEnv, tmp_path: Path) -> None:
    env = RecordVideo(lamps(make_env, 0, 1, 2), tmp_path, id=[2, 0], video_format="png")
    env.reset(0)
    env.step([0], id=0)
    assert env.save() is None
    env = RecordVideo(env.unwrapped, tmp_path, id=[2, 0], video_format="png")
    env.reset()
    env.step([0], id=0)
    path = env.save()
    assert path is not None
    first, second = read(path)
    assert first.shape == (24, 32, 3)
    assert (second[:8, 16:] == 20).all()
    assert (second[:24, :16] == 0).all()


@nearby
def test_an_env_without_frames_loses_no_answer(make_env: MakeEnv, tmp_path: Path) -> None:
    env = RecordVideo(make_env([Dark]), tmp_path)
    with pytest.raises(ArgumentError, match="render_mode='rgb_array'") as caught:
        env.reset(seed=1)
    error: Any = caught.value
    assert error.partial.shape == (1, 3)
    with pytest.raises(ArgumentError, match="render_mode='rgb_array'") as caught:
        env.step([0], align="batch")
    error = caught.value
    assert error.partial.dones.tolist() == [False]


def test_arguments_that_do_not_fit_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with ParallelEnv([Lamp]) as env:
        cases: list[tuple[dict[str, Any], str]] = [
            ({"video_format": "mp4"}, r"video_format='mp4' is not known; expected one of \('webp', 'gif', 'png'\)"),
            ({"video_length": 0}, "video_length=0 must be an int"),
            ({"step_trigger": 5}, "step_trigger=5 cannot be called"),
            ({"fps": 0}, "fps=0 must be a positive number of frames"),
            ({"id": []}, r"id=\[\] names no envs"),
            ({"id": 3}, "names env 3"),
        ]
        for wrong, message in cases:
            with pytest.raises(ArgumentError, match=message):
                RecordVideo(env, tmp_path, **wrong)
        monkeypatch.setitem(sys.modules, "PIL", None)
        with pytest.raises(MissingDependencyError, match="pip install pillow"):
            RecordVideo(env, tmp_path)


def test_frames_of_different_sizes_make_a_film(tmp_path: Path) -> None:
    frames = [np.full((4, 6, 3), 50, np.uint8), np.full((6, 4, 3), 90, np.uint8)]
    save_animation(tmp_path / "film.PNG", frames, fps=50)
    first, second = read(tmp_path / "film.PNG")
    assert first.shape == second.shape == (6, 6, 3)
    assert (first[:4] == 50).all()
    assert not first[4:].any()
    assert not second[:, 4:].any()
    with pytest.raises(ArgumentError, match=r"film.mp4' must end in one of \('.webp', '.gif', '.png'\)"):
        save_animation(tmp_path / "film.mp4", frames)
    with pytest.raises(ArgumentError, match="no frames"):
        save_animation(tmp_path / "film.png", [])


def test_a_real_env_is_filmed(tmp_path: Path) -> None:
    def make() -> Any:
        return gym.make("CartPole-v1", render_mode="rgb_array")

    with RecordVideo(ParallelEnv([make] * 4), tmp_path) as env:
        env.reset(seed=1)
        for _ in range(3):
            env.step([0, 1, 0, 1])
    frames = read(env.paths[0])
    assert frames[0].shape == (800, 1200, 3)
    assert len(frames) == 4
