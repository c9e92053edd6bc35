"""Pictures and films of envs in notebooks: `ParallelEnv.show`, `play` and `record`."""

from __future__ import annotations

import io
import math
import os
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gymnasium.error import ResetNeeded

from parallelenv.contract.arguments import Ids, Seeds, check_positive
from parallelenv.contract.batch import Array
from parallelenv.contract.error_text import list_ids, name_envs, show
from parallelenv.contract.failures import add_note, put
from parallelenv.engine import cell_reruns
from parallelenv.engine.engine import Engine
from parallelenv.errors import ArgumentError, ParallelEnvError, ResetNeededError, UsageError
from parallelenv.notebook.film import (
    Film,
    check_format,
    check_fps,
    check_size,
    encode_animation,
    format_of,
    has_ffmpeg,
    picture_of,
    playing_fps,
    refuse_dark_envs,
)
from parallelenv.progress import kernel_of_notebook
from parallelenv.rollouts.evaluation import EpisodeRunner, Evaluation
from parallelenv.rollouts.rollout import RolloutLength, progress_bar

if TYPE_CHECKING:
    from parallelenv.env import ParallelEnv


class Screen:
    """Shows pictures in an output area below the running cell. Each run of a cell gets a new output area."""

    def __init__(self) -> None:
        self._run: cell_reruns.CellRun | None = None
        self._handle: Any = None

    def show(self, picture: Array) -> None:
        """Show a picture in place of the previous one."""
        from IPython.display import Image, display

        image = Image(encode_picture(picture), format="png")  # type: ignore[no-untyped-call]
        run = cell_reruns.current_run()
        if self._handle is None or run is None or run != self._run:
            self._run, self._handle = run, display(image, display_id=True)  # type: ignore[no-untyped-call]
        else:
            self._handle.update(image)


_screens: weakref.WeakKeyDictionary[Engine, Screen] = weakref.WeakKeyDictionary()
"""Output area of each `ParallelEnv`. Within one run of a cell, a new picture replaces the previous one."""


def encode_picture(picture: Array) -> bytes:
    """Return a picture, ``(height, width, 3)`` uint8, as PNG."""
    from PIL import Image

    file = io.BytesIO()
    # A picture of 400 x 600 pixels takes 4 ms; at the default level it would take 13 ms.
    Image.fromarray(picture).save(file, "png", compress_level=1)
    return file.getvalue()


def refuse_no_notebook(call: str) -> None:
    """Raise an error unless the code runs in a notebook. ``call`` is the name of the method that the user called."""
    if kernel_of_notebook() is None:
        raise UsageError(
            f"{call}() shows envs below a notebook cell, but this is not a notebook. Elsewhere render(tile=True) "
            "returns the picture, and record(policy, steps, path) makes a film."
        )


def show_envs(env: ParallelEnv, id: Ids, width: int) -> None:
    """Show the current frames of envs. See `ParallelEnv.show` for arguments and errors."""
    refuse_no_notebook("show")
    engine = env.engine
    env_ids = _visible_ids(engine, id, width)
    refuse_dark_envs(engine, env_ids)
    try:
        picture = picture_of(engine, env_ids, width)
    except Exception as error:
        without_episode = set(engine.table.needing_reset())
        fresh = [env_id for env_id in env_ids if env_id in without_episode]
        is_of_drawing = isinstance(error, ArgumentError) or not isinstance(error, ParallelEnvError)
        if fresh and is_of_drawing:
            call = "reset()" if len(fresh) == engine.num_envs else f"reset({list_ids(fresh)})"
            have = "has" if len(fresh) == 1 else "have"
            message = f"{name_envs(fresh)} {have} no episode yet. Call {call} before show()."
            if isinstance(error, ResetNeeded | ArgumentError):  # for example, if an env returned ``None``
                raise ResetNeededError(message) from None
            add_note(error, message)
        raise
    _screens.setdefault(engine, Screen()).show(picture)


def _visible_ids(engine: Engine, id: Ids, width: object) -> tuple[int, ...]:
    env_ids = engine.ids(id)
    if not env_ids:
        raise ArgumentError("There are no envs to show: id is empty, or all are paused.")
    check_positive("width", width)
    return env_ids


@dataclass(frozen=True, slots=True)
class Performance:
    """One run of a policy, shown live or filmed. See `ParallelEnv.play` and `record` for arguments and errors."""

    env: ParallelEnv
    policy: Callable[..., Any]
    steps: int
    id: Ids
    seed: Seeds
    fps: float | None
    width: int
    shows_progress: bool

    def play(self) -> Evaluation:
        """Run the policy and show the envs live."""
        refuse_no_notebook("play")
        screen, due = Screen(), 0.0

        def see(picture: Array, fps: float) -> None:
            nonlocal due
            now = time.monotonic()
            if now < due:
                time.sleep(due - now)
            due = max(now, due) + 1 / fps  # a late frame does not shorten later pauses
            screen.show(picture)

        return self._run("play", see)[0]

    def record(self, path: str | Path | None) -> Film:
        """Run the policy and return a film of the run. Unless ``path`` is ``None``, also save the film there."""
        if path is None:
            video_format = "mp4" if has_ffmpeg() else "webp"
            check_format(video_format)
        else:
            if not isinstance(path, (str, os.PathLike)) or "\0" in str(path):
                raise ArgumentError(f"path={show(path)} is not the path of a file.")
            video_format, target = format_of(path), Path(path)
            if not target.parent.is_dir():
                raise FileNotFoundError(f"path={str(path)!r}: the folder {str(target.parent)!r} does not exist.")
            if target.is_dir():
                raise IsADirectoryError(f"path={str(path)!r} is a folder. Give the name of a file in it.")
            if not os.access(target if target.exists() else target.parent, os.W_OK):
                raise PermissionError(f"path={str(path)!r} cannot be written: permission denied.")
        frames: list[Array] = []

        def see(picture: Array, fps: float) -> None:
            check_size(picture, video_format)
            frames.append(picture)

        episodes, fps = self._run("record", see)
        data = encode_animation(frames, video_format, fps)
        film = Film(data, video_format, len(frames), playing_fps(fps, video_format), episodes)
        if path is not None:
            try:
                film.save(path)
            except OSError as error:
                put(error, "partial", film)  # the film exists, and can be saved elsewhere
                raise
        return film

    def _run(self, name: str, see: Callable[[Array, float], None]) -> tuple[Evaluation, float]:
        engine = self.env.engine
        env_ids = _visible_ids(engine, self.id, self.width)
        check_positive("steps", self.steps)
        fps = check_fps(self.fps, engine.pool.facts[env_ids[0]].metadata)
        refuse_dark_envs(engine, env_ids)
        left = self.steps
        with progress_bar(RolloutLength.of(self.steps, None), self.shows_progress, name) as advance:

            def goes_on(engine: Engine) -> bool:
                nonlocal left
                see(picture_of(engine, env_ids, self.width), fps)
                advance(int(left < self.steps))
                left -= 1
                return left >= 0

            each = engine.reset_arguments(env_ids, self.seed, None)
            runner = EpisodeRunner(dict.fromkeys(env_ids, math.inf), goes_on=goes_on)
            return runner.play(engine, self.policy, each), fps
