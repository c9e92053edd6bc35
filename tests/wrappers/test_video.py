"""Films of envs, read back."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import MakeEnv
from films import Lamp, counts, frames_of, lamps
from PIL import Image

from parallelenv import ParallelEnv
from parallelenv.errors import ArgumentError
from parallelenv.wrappers import RecordVideo


@pytest.mark.parametrize("video_format", ["webp", "gif", "png"])
def test_film_shows_each_step(video_format: str, make_env: MakeEnv, tmp_path: Path) -> None:
    env = RecordVideo(lamps(make_env, 0, 1), tmp_path / "films", video_length=4, video_format=video_format)
    env.reset()
    env.reset(id=[])  # adds no frame
    for _ in range(3):
        assert env.paths == []
        env.step([0, 0])
    assert env.paths == [tmp_path / "films" / f"parallelenv-step-0.{video_format}"]
    frames = frames_of(env.paths[0])
    assert [frame.shape for frame in frames] == [(16, 32, 3)] * 4
    assert counts(frames) == [0, 1, 2, 3]
    with Image.open(env.paths[0]) as film:
        film.seek(1)
        film.load()
        assert film.info["duration"] == 100
    env.step([0, 0])
    assert len(env.paths) == 1


def test_step_trigger_starts_films_and_close_ends_them(make_env: MakeEnv, tmp_path: Path) -> None:
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
    env.close(timeout=5.0)
    assert [path.name for path in env.paths] == ["lamp-step-0.webp", "lamp-step-3.webp"]
    assert len(frames_of(env.paths[1])) == 1
    assert asked == sorted(set(asked))
    env.close()


def test_film_of_some_envs_starts_after_their_reset(make_env: MakeEnv, tmp_path: Path) -> None:
    env = RecordVideo(lamps(make_env, 0, 1, 2), tmp_path, id=[2, 0], video_format="png")
    env.reset(0)
    env.step([0], id=0)
    assert env.save() is None
    env = RecordVideo(env.unwrapped, tmp_path, id=[2, 0], video_format="png")
    env.reset()
    env.step([0], id=0)
    env.close()
    first, second = frames_of(env.paths[0])
    assert first.shape == (24, 32, 3)
    assert (second[:8, 16:] == 20).all()
    assert (second[:24, :16] == 0).all()


def test_film_that_cannot_be_written_is_kept_and_leaves_no_file(
    make_env: MakeEnv, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    env = RecordVideo(lamps(make_env, 0, asynchronous="continue"), tmp_path, video_length=2)
    env.reset()
    with monkeypatch.context() as patch:
        patch.setattr(Image.Image, "save", lambda *args, **kwargs: 1 / 0)
        for call in (partial(env.step, [0]), env.reset, env.close):
            with pytest.raises(ZeroDivisionError) as caught:
                call()
            assert caught.value.__notes__ == ["The video of 2 frames is kept; call save() to try again."]
    assert env.closed
    assert list(tmp_path.iterdir()) == []
    path = env.save()
    assert path is not None
    assert counts(frames_of(path)) == [0, 1]
    env.close()
    assert env.paths == [path]


def test_film_does_not_overwrite_another(tmp_path: Path) -> None:
    with ParallelEnv([Lamp]) as env:
        films = [RecordVideo(env, tmp_path, video_length=length) for length in (1, 2)]
        for film in films:
            film.reset()
            film.step([0])
    assert [film.paths[0].stem for film in films] == ["parallelenv-step-0", "parallelenv-step-0-2"]
    assert [len(frames_of(film.paths[0])) for film in films] == [1, 2]


def test_invalid_frame_is_refused(tmp_path: Path) -> None:
    class Bleak(Lamp):
        def render(self) -> Any:
            return super().render() / 255

    with RecordVideo(ParallelEnv([Bleak]), tmp_path) as env:
        with pytest.raises(ArgumentError, match="frame of env 0 is of shape .* and dtype float64") as caught:
            env.reset(seed=1)
        assert caught.value.partial.shape == (1, 3)  # type: ignore[attr-defined]
        assert env.save() is None


@pytest.mark.parametrize("render_mode", [None, "human", "ansi", "rgb_array_list"])
def test_envs_with_other_render_modes_are_refused_first(render_mode: Any, tmp_path: Path) -> None:
    dark = Lamp(1)
    dark.render_mode = render_mode
    with ParallelEnv([Lamp(0), dark]) as env:
        with pytest.raises(ArgumentError, match=f"env 1 has render_mode={render_mode!r}.*render_mode='rgb_array'"):
            RecordVideo(env, tmp_path / "films")
        assert not (tmp_path / "films").exists()
        RecordVideo(env, tmp_path, id=0)


def test_invalid_arguments_are_refused(tmp_path: Path) -> None:
    with ParallelEnv([Lamp]) as env:
        formats = r"expected one of \('webp', 'gif', 'png', 'mp4'\)"
        cases: list[tuple[dict[str, Any], str]] = [
            ({"video_format": "avi"}, f"video_format='avi' is not known; {formats}"),
            ({"video_length": 0}, "video_length=0 must be an int"),
            ({"step_trigger": 5}, "step_trigger=5 cannot be called"),
            ({"fps": 0}, "fps=0 must be a number of frames"),
            ({"id": []}, r"id=\[\] names no envs"),
            ({"id": 3}, "names env 3"),
            ({"episode_trigger": bool}, "episode_trigger=.* is not an argument of RecordVideo. Give step_trigger"),
            ({"record_video_trigger": bool}, "record_video_trigger=.* is not an argument .* Give step_trigger"),
            ({"name_prefix": "../up"}, "name_prefix='../up' cannot start a file name.*without slashes"),
        ]
        for wrong, message in cases:
            with pytest.raises(ArgumentError, match=message):
                RecordVideo(env, tmp_path, **wrong)


def test_frames_of_different_sizes_are_padded_in_a_film(tmp_path: Path) -> None:
    class Turning(Lamp):
        def render(self) -> Any:
            return np.full((6, 4, 3), 90, np.uint8) if self.count else np.full((4, 6, 3), 50, np.uint8)

    with RecordVideo(ParallelEnv([Turning]), tmp_path, video_format="png") as env:
        env.reset()
        env.step([1])
    first, second = frames_of(env.paths[0])
    assert first.shape == second.shape == (6, 6, 3)
    assert (first[:4] == 50).all()
    assert not first[4:].any()
    assert (second[:, :4] == 90).all()
    assert not second[:, 4:].any()
