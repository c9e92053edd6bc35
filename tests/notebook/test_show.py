"""Pictures and films: `render`, `show`, `play` and `record`, without a display."""

from __future__ import annotations

import base64
import io
import re
import sys
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import gymnasium as gym
import numpy as np
import pytest
from conftest import MakeEnv
from films import Lamp, counts, frames_of, lamps
from gymnasium.error import ResetNeeded
from modes import PROCESSES, here_and_in_processes
from PIL import Image, ImageSequence

from parallelenv import ParallelEnv
from parallelenv.errors import ArgumentError, EnvBusyError, MissingDependencyError, ResetNeededError, UsageError
from parallelenv.notebook import film as films
from parallelenv.notebook.film import encode_animation, has_ffmpeg
from parallelenv.notebook.show import Screen
from parallelenv.testing.envs import Old


class Dark(Lamp):
    render_mode = None


def stay(states: Any) -> list[int]:
    return [1] * len(states)


class Still(Old):
    """Of the old API, and without a render mode. It always returns the same frame."""

    def __init__(self, frame: Any) -> None:
        super().__init__()
        self.frame = frame

    def render(self) -> Any:
        return self.frame


def frame(height: int, width: int, value: int) -> np.ndarray[Any, Any]:
    return np.full((height, width, 3), value, np.uint8)


def tiled(*frames: Any, id: Any = None, labels: bool = False) -> Any:
    """Return the picture of envs with these frames."""
    with ParallelEnv([partial(Still, frame) for frame in frames]) as env:
        env.reset()
        return env.render(id, tile=True, labels=labels)


# ---------------------------------------------------------------- pictures


def test_frames_of_any_size_in_rgb_grey_or_with_alpha_are_tiled() -> None:
    transparent = np.full((1, 3, 4), 9, np.uint8)
    transparent[..., 3] = 0
    picture = tiled(frame(2, 3, 10), frame(4, 2, 20), np.full((1, 1), 30, np.uint8), transparent)
    assert picture.shape == (8, 6, 3)
    assert picture.dtype == np.uint8
    for shown, value in ((picture[:2, :3], 10), (picture[:4, 3:5], 20), (picture[4, 0], 30), (picture[4, 3:], 9)):
        assert (shown == value).all()
    assert picture[:4, 5].max() == picture[5:].max() == 0, "the rest is black"


def test_labelled_tiles_are_separated_by_a_grey_gap() -> None:
    picture = tiled(*[frame(64, 64, 10)] * 5, labels=True)
    assert picture.shape == (2 * 64 + 2, 3 * 64 + 2 * 2, 3)
    for gap in (picture[64:66], picture[:, 64:66], picture[:, 130:132], picture[66:, 132:]):  # there is no sixth env
        assert (gap == 128).all()
    assert (picture[30:64, 30:64] == 10).all()
    small = tiled(*[frame(8, 8, 10)] * 4, labels=True)
    assert np.unique(small).tolist() == [10, 128], "frames of few pixels have no room for ids"
    assert tiled(frame(2, 2, 1), id=[], labels=True).shape == tiled(frame(2, 2, 1), id=[]).shape == (0, 0, 3)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (None, "None (NoneType), not an RGB array, so it cannot be tiled. Make the envs with render_mode='rgb_array'."),
        (np.full((2, 2, 3), 0.5, np.float32), "of shape (2, 2, 3) and dtype float32, but only uint8 arrays"),
        (np.full((2, 2), 300, np.uint16), "of shape (2, 2) and dtype uint16, but only uint8 arrays"),
        (np.ones((2, 2, 9), np.uint8), "of shape (2, 2, 9) and dtype uint8, but only uint8 arrays"),
        (np.ones((2, 2, 1), np.uint8), "of shape (2, 2, 1) and dtype uint8, but only uint8 arrays"),
        (np.ones((2, 2, 3, 3), np.uint8), "of shape (2, 2, 3, 3) and dtype uint8, but only uint8 arrays"),
        (np.ones((0, 2, 3), np.uint8), "of shape (0, 2, 3) and dtype uint8, but only uint8 arrays"),
    ],
)
def test_tiling_anything_but_a_picture_is_refused(wrong: Any, message: str) -> None:
    with pytest.raises(ArgumentError, match=re.escape(f"The frame of env 2 is {message}")):
        tiled(frame(2, 2, 1), frame(2, 2, 1), wrong, id=[0, 2])


# ---------------------------------------------------------------- films


@pytest.fixture
def as_webp(monkeypatch: pytest.MonkeyPatch) -> None:
    """Record films as on a machine without imageio-ffmpeg."""
    monkeypatch.setattr("parallelenv.notebook.show.has_ffmpeg", lambda: False)


@pytest.mark.usefixtures("as_webp")
@pytest.mark.parametrize("done_policy", [None, "restart"])
def test_film_shows_all_envs_after_each_step(make_env: MakeEnv, done_policy: Any) -> None:
    env = lamps(make_env, 0, 1, 2, asynchronous=done_policy, num_cpus=2)
    film = env.record(stay, 6, seed=0, progress=False)
    frames = frames_of(film.data)
    assert film.num_frames == len(frames) == 7
    assert (film.fps, film.path) == (10, None)
    assert frames[0].shape == (49, 33, 3)  # two columns and two rows, with a gap
    assert counts(frames) == [0, 1, 2, 3, 0, 1, 2]  # ended envs are reset
    assert film.episodes.lengths.tolist() == [4, 4, 4]
    with pytest.raises(Exception, match=r"reset"):
        env.step([1] * 3)


@pytest.mark.parametrize(
    ("video_format", "fps", "milliseconds"),
    [
        ("gif", 60, 20),
        ("gif", 25, 40),
        ("gif", 30, 30),
        ("gif", 1e9, 20),
        ("webp", 125, 11),
        ("webp", np.float32(50), 20),
        ("png", 1e9, 11),
        ("png", 0.02, 50_000),
    ],
)
def test_film_is_written_to_the_given_path(tmp_path: Path, video_format: str, fps: Any, milliseconds: int) -> None:
    path = tmp_path / f"film.{video_format}"
    with ParallelEnv([Lamp, Lamp]) as env:
        film = env.record(stay, 2, path, id=[1], fps=fps, progress=False)
    assert film.path == path
    assert len(frames_of(path)) == 3
    with Image.open(path) as written:
        written.seek(1)
        written.load()
        assert written.info["duration"] == milliseconds
    assert film.fps == pytest.approx(1000 / milliseconds)
    said = rf"<Film of 3 frames, {film.fps:g} a second, {video_format}, [\d,]+ bytes, .*film.{video_format}>"
    assert re.fullmatch(said, repr(film))
    assert film.save(tmp_path / f"again.{video_format}").read_bytes() == film.data
    with pytest.raises(ArgumentError, match=rf"must end in .{video_format}, the format of this film"):
        film.save(tmp_path / ("film.gif" if video_format != "gif" else "film.png"))


@pytest.mark.usefixtures("as_webp")
def test_html_of_a_film_is_self_contained(monkeypatch: pytest.MonkeyPatch) -> None:
    with ParallelEnv([Lamp]) as env:
        film = env.record(stay, 2, progress=False)
    found = film._repr_mimebundle_()
    assert found["text/plain"] == repr(film)
    data = re.fullmatch(r'<img [^>]*alt="&lt;Film [^"]*" src="data:image/webp;base64,([^"]+)">', found["text/html"])
    assert data is not None
    assert base64.b64decode(data[1]) == film.data
    monkeypatch.setattr(films, "_LARGEST", 10)
    assert film._repr_mimebundle_() == {"text/plain": f"{film!r} is too large to be played here."}


@pytest.mark.skipif(not has_ffmpeg(), reason="imageio-ffmpeg is not installed")
def test_html_of_an_mp4_film_has_video_controls(tmp_path: Path) -> None:
    with ParallelEnv([lambda: Lamp(2, 4)]) as env:  # 16 x 24, and an odd size
        film = env.record(stay, 4, progress=False)
        odd = env.record(stay, 4, tmp_path / "odd.mp4", width=15, progress=False)
    for one in (film, odd):
        assert one.video_format == "mp4"
        assert one.data[4:8] == b"ftyp"
        assert "<video controls" in one._repr_mimebundle_()["text/html"]


def test_film_is_a_webp_if_the_program_ffmpeg_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    find = Mock(side_effect=RuntimeError("No ffmpeg exe could be found."))
    monkeypatch.setitem(sys.modules, "imageio_ffmpeg", Mock(__spec__=True, get_ffmpeg_exe=find, write_frames=find))
    with ParallelEnv([Lamp]) as env:
        assert env.record(stay, 1, progress=False).video_format == "webp"
        with pytest.raises(MissingDependencyError, match="imageio-ffmpeg and a program ffmpeg that it finds"):
            env.record(stay, 1, "film.mp4", progress=False)


def test_gif_of_a_picture_that_does_not_change_for_long_is_written() -> None:
    data = encode_animation([frame(8, 8, 128)] * 40, "gif", 0.02)
    with Image.open(io.BytesIO(data)) as film:
        assert sum(each.info["duration"] for each in ImageSequence.Iterator(film)) == 40 * 50_000


def test_record_checks_its_arguments_before_any_reset(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("os.access", lambda path, _: path != Path())  # root may write everywhere
    folder = tmp_path / "folder.gif"
    cases: list[tuple[dict[str, Any], type[Exception], str]] = [
        ({"steps": 0}, ArgumentError, "steps=0 must be an int"),
        ({"width": 0}, ArgumentError, "width=0 must be an int"),
        ({"fps": 0}, ArgumentError, r"fps=0 must be a number of frames per second, at least 0.02, for example fps=30."),
        ({"fps": 1e-9}, ArgumentError, "fps=1e-09 must be"),  # Pillow could not write it
        ({"fps": True}, ArgumentError, "fps=True must be"),
        ({"fps": float("nan")}, ArgumentError, "fps=nan must be"),
        ({"id": []}, ArgumentError, "no envs to show"),
        ({"path": tmp_path / "film.avi"}, ArgumentError, r"film.avi' must end in one of \('.webp'"),
        ({"path": 5}, ArgumentError, "path=5 is not the path of a file"),
        ({"path": ""}, ArgumentError, "path='' must end in"),
        ({"path": folder}, IsADirectoryError, "folder.gif' is a folder. Give the name of a file in it"),
        ({"path": "locked.gif"}, PermissionError, "locked.gif' cannot be written: permission denied"),
        ({"path": tmp_path / "none" / "film.gif"}, FileNotFoundError, "none' does not exist"),
        ({"policy": None}, ArgumentError, "policy"),
        ({"id": [3]}, ArgumentError, r"metadata\['render_fps'\]='fast' must be a number.*for example fps=30"),
        ({"id": [1]}, ArgumentError, r"env 1 has render_mode=None, so it returns no picture"),
        ({"id": [2, 0]}, ArgumentError, r"env 2 has no method render\(\), so it returns no picture"),
        ({"id": [4], "path": tmp_path / "tower.gif"}, ArgumentError, "2 x 65536 pixels is too large for gif"),
        ({"id": [4], "path": tmp_path / "tower.webp"}, ArgumentError, "large for webp, whose maximum is 16383 in each"),
    ]

    class Odd(Lamp):
        metadata = {"render_fps": "fast"}  # noqa: RUF012

    class Tower(Lamp):
        def render(self) -> Any:
            return np.zeros((65_536, 2, 3), np.uint8)

    folder.mkdir()
    if not has_ffmpeg():
        cases.append(({"path": "film.mp4"}, MissingDependencyError, "MP4 films need the package imageio-ffmpeg"))
    with ParallelEnv([Lamp, Dark, Old, Odd, Tower]) as env:
        env.reset(seed=0)
        env.step([1, 1, 1, 1, 1])
        for arguments, error, match in cases:
            with pytest.raises(error, match=match):
                env.record(**{"policy": stay, "steps": 1, "id": 0, "progress": False, **arguments})
        assert env.get_env_attr("count") == [1, 1, 1, 1, 0]  # the last was refused at its first frame
        assert env.record(stay, 1, id=3, fps=np.float64(20), progress=False).fps == 20
        env.pause([0])
        with pytest.raises(EnvBusyError):
            env.record(stay, 1, id=[0], progress=False)
    assert list(tmp_path.iterdir()) == [folder]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no /dev/full")
def test_film_is_in_partial_if_writing_fails(tmp_path: Path) -> None:
    (tmp_path / "full.gif").symlink_to("/dev/full")
    with ParallelEnv([Lamp]) as env, pytest.raises(OSError, match="No space left") as caught:
        env.record(stay, 2, tmp_path / "full.gif", progress=False)
    film = caught.value.partial  # type: ignore[attr-defined]
    assert (film.num_frames, film.path) == (3, None)
    assert len(frames_of(film.save(tmp_path / "film.gif"))) == 3


@pytest.mark.usefixtures("as_webp")
@pytest.mark.parametrize(
    ("package", "name", "arguments"),
    [
        ("pygame", "CartPole-v1", {}),
        ("Box2D", "LunarLander-v3", {}),
        ("ale_py", "ALE/Pong-v5", {}),
        ("mujoco", "Reacher-v5", {"width": 64, "height": 64}),
    ],
)
def test_real_envs_are_recorded_without_a_display(
    package: str, name: str, arguments: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = pytest.importorskip(package)
    if package == "ale_py":
        gym.register_envs(module)
    monkeypatch.setenv("MUJOCO_GL", "egl")
    monkeypatch.delenv("DISPLAY", raising=False)
    with ParallelEnv.make(name, 2, PROCESSES, num_cpus=2, render_mode="rgb_array", **arguments) as env:
        space = env.single_action_space
        assert space is not None
        space.seed(1)  # a step that leaves the picture as it was would not be a frame of its own
        film = env.record(lambda states: [space.sample() for _ in states], 3, seed=0, progress=False)
    frames = frames_of(film.data)
    assert len(frames) == 4
    assert frames[0].std() > 1


# ---------------------------------------------------------------- below a cell


@pytest.mark.parametrize(("call", "arguments"), [("show", ()), ("play", (stay, 1))])
def test_show_and_play_need_a_notebook(call: str, arguments: Any) -> None:
    with ParallelEnv([Lamp]) as env:
        env.reset()
        with pytest.raises(UsageError, match=rf"{call}\(\) shows envs below a notebook cell.*render\(tile"):
            getattr(env, call)(*arguments)


@pytest.fixture
def shown(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Pretend to be a notebook, and return the shown pictures."""
    pictures: list[Any] = []
    monkeypatch.setattr("parallelenv.notebook.show.refuse_no_notebook", lambda call: None)
    monkeypatch.setattr(Screen, "show", lambda self, picture: pictures.append(picture))
    return pictures


class Ordered(Lamp):
    """Before an episode, it raises or returns the given text instead of a picture."""

    def __init__(self, before: str = "raises") -> None:
        super().__init__(0, 4)
        self.before = before

    def reset(self, **kwargs: Any) -> Any:
        self.before = ""
        return super().reset(**kwargs)

    def render(self) -> Any:
        if self.before.startswith("raises"):
            raise ValueError(self.before)
        return self.before or super().render()


NONE_YET = "envs 0, 1, 2, 3 have no episode yet. Call reset() before show()."


@here_and_in_processes
@pytest.mark.parametrize("make", [lambda: gym.wrappers.OrderEnforcing(Lamp()), lambda: Ordered("no frame")])
def test_show_before_reset_raises_one_error(make: Any, make_env: MakeEnv, shown: list[Any]) -> None:
    env = make_env([make] * 4, num_cpus=2)
    with pytest.raises(ResetNeededError, match=f"^{re.escape(NONE_YET)}$"):
        env.show()
    env.reset([0, 2])
    with pytest.raises(ResetNeededError, match=r"^env 1 has no episode yet. Call reset\(\[1\]\) before show\(\).$"):
        env.show([0, 1])
    env.show([0, 2])
    assert len(shown) == 1


@here_and_in_processes
def test_error_of_an_env_keeps_its_type_and_gets_a_hint_before_the_reset(make_env: MakeEnv, shown: list[Any]) -> None:
    env = make_env([Ordered] * 4, num_cpus=2)
    with pytest.raises(ValueError, match="raises") as caught:
        env.show()
    assert "Raised by env 0 and 3 other envs in render" in caught.value.__notes__[0]
    assert caught.value.__notes__[1:] == [NONE_YET]
    env.reset()
    env.show()
    assert len(shown) == 1
    env.set_env_attr("before", values=["raises a", "raises b", "", ""])
    with pytest.raises(ExceptionGroup, match="2 envs failed") as group:  # their errors differ
        env.show()
    assert not getattr(group.value, "__notes__", None)
    with ParallelEnv([Lamp, Dark]) as env, pytest.raises(ArgumentError, match=r"env 1 has render_mode=None, so it ret"):
        env.show()


class Drawing:
    """Has neither ``reset()`` nor ``step()``."""

    def __init__(self, frame: Any) -> None:
        self.frame = frame

    def render(self) -> Any:
        if isinstance(self.frame, str):
            raise ResetNeeded("no data")
        return self.frame


@here_and_in_processes
def test_show_of_an_object_without_reset_raises_the_cause(make_env: MakeEnv, shown: list[Any]) -> None:
    env = make_env([partial(Drawing, None), partial(Drawing, "raises"), partial(Drawing, frame(2, 2, 1))], num_cpus=2)
    with pytest.raises(ArgumentError, match="The frame of env 0 is None"):
        env.show(0)
    with pytest.raises(ResetNeeded, match="no data") as caught:
        env.show(1)
    assert "before show()" not in "".join(caught.value.__notes__)
    env.show(2)
    assert len(shown) == 1


def test_frames_of_many_envs_are_scaled_down_and_tiled(shown: list[Any], tmp_path: Path) -> None:
    class Wide(Lamp):
        def render(self) -> Any:
            frame = np.zeros((40, 60 - 20 * self.number, 3), np.uint8)
            frame[:, : frame.shape[1] // 2] = 200
            return frame

    shapes = {1: (7, 7, 3), 30: (19, 27, 3), 200: (135, 199, 3), 800: (163, 243, 3)}
    with ParallelEnv([lambda number=number: Wide(number % 2) for number in range(16)]) as env:
        env.reset()
        assert env.render(tile=True).shape == (160, 240, 3)
        for width in shapes:
            env.show(width=width)
        film = env.record(stay, 1, tmp_path / "film.png", width=30, progress=False)
    assert [picture.shape for picture in shown] == list(shapes.values())
    row = [*[200] * 3, *[0] * 3, 128, *[200] * 2, *[0] * 2, *[0] * 2, 128]
    assert shown[1][:4, :14, 0].tolist() == [row] * 4
    assert frames_of(film.data)[0].shape == (19, 27, 3)


def test_shown_frames_are_labelled_with_env_ids(shown: list[Any]) -> None:
    with ParallelEnv([partial(Still, frame(100, 100, 90))] * 12) as env:
        env.reset()
        env.show([11, 4])
        env.show([4, 7])
        env.play(stay, 1, id=[4, 11], fps=1000)
        env.show(4)
        plain, labelled = env.render([4, 11], tile=True), env.render([4, 11], tile=True, labels=True)
        with pytest.raises(ArgumentError, match=r"labels=True draws env ids on the tiles.*Add tile=True"):
            env.render(labels=True)
    (eleven, four), (other_four, seven) = ((picture[:, :100], picture[:, -100:]) for picture in shown[:2])
    assert np.array_equal(four, other_four)
    assert not np.array_equal(four, seven)
    for tile in (eleven, four, seven):
        drawn = (tile != 90).any(axis=2)
        assert drawn[:20, :20].any()
        assert drawn.mean() < 0.05, "an id leaves the frame to be seen"
        assert tile.max() > 220, "white letters"
    assert [np.array_equal(picture, labelled) for picture in shown[2:-1]] == [True, True], "play shows the ids too"
    assert (shown[-1] == 90).all(), "a single frame needs no id"
    assert (plain == np.full((100, 200, 3), 90)).all()


def test_play_keeps_the_frame_rate(shown: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    now, slept, takes = 100.0, [], iter((0.0, 0.0, 0.04, 0.5, 0.0))

    def sleep(seconds: float) -> None:
        nonlocal now
        slept.append(round(seconds, 3))
        now += seconds

    def show(self: Screen, picture: Any) -> None:
        nonlocal now
        now += next(takes)

    monkeypatch.setattr("parallelenv.notebook.show.time.monotonic", lambda: now)
    monkeypatch.setattr("parallelenv.notebook.show.time.sleep", sleep)
    monkeypatch.setattr(Screen, "show", show)
    with ParallelEnv([Lamp]) as env:
        env.play(stay, 4, fps=10, progress=False)
    assert slept == [0.1, 0.1, 0.06]  # late frames do not shorten later pauses
