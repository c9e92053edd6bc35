"""A wrapper that records videos of several envs, shown in a grid."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Never

from parallelenv.contract.arguments import Ids, check_positive, parse_ids
from parallelenv.contract.batch import Array
from parallelenv.contract.error_text import hint_at, show
from parallelenv.errors import ArgumentError
from parallelenv.notebook.film import check_format, check_fps, check_size, encode_animation, refuse_dark_envs
from parallelenv.results import StepResult
from parallelenv.wrappers.base import ParallelWrapper, States, Wrappable


class RecordVideo(ParallelWrapper):
    """Records videos that show the envs in a grid. All formats except ``"mp4"`` need only Pillow.

    While a video is being recorded, each `reset`, `step` and `recv` adds one frame, which shows the envs after the
    call. To render them, the call waits for envs that are in the middle of a step. Frames stay in memory until the
    video is full, or `close` or `save` ends it; then the video is written. If writing fails, the video is kept for the
    next `save`.

    Args:
        env: A `ParallelEnv`, or another wrapper. Make its envs with ``render_mode="rgb_array"``.
        video_folder: Folder for videos, created if it does not exist. Files are named ``<name_prefix>-step-<first
            step>.<video_format>``. Existing files are kept: if the name is taken, ``-2``, ``-3`` and so on is added
            after ``<first step>``.
        step_trigger: Function that gets the number of `step` and `recv` calls so far. If it returns ``True``, a video
            starts. The function is not called while a video is being recorded. ``None`` records one video, from the
            start.
        video_length: Frames per video.
        name_prefix: Prefix of file names.
        fps: Frames per second; ``None`` means the envs' ``metadata["render_fps"]``, or 30 if they have none. GIF videos
            play at no more than 50, and WebP and PNG videos at no more than 90, because browsers slow faster animations
            down to 10.
        video_format: ``"webp"``, ``"gif"``, ``"png"`` or, with imageio-ffmpeg installed, ``"mp4"``.
        id: Envs to record; ``None`` means all.

    Attributes:
        paths: Paths of the written videos, oldest first.

    Raises:
        ArgumentError: If an argument is unknown or has an invalid value, or an env to record renders no pictures
            because of its ``render_mode``.
        MissingDependencyError: If the installed packages cannot write the format.
        OSError: If the folder cannot be created.
    """

    def __init__(
        self,
        env: Wrappable,
        video_folder: str | Path,
        step_trigger: Callable[[int], bool] | None = None,
        video_length: int = 200,
        *,
        name_prefix: str = "parallelenv",
        fps: float | None = None,
        video_format: str = "webp",
        id: Ids = None,
        **others: Never,
    ) -> None:
        unknown: Mapping[str, object] = others
        for name, value in unknown.items():
            raise ArgumentError(f"{name}={show(value)} is not an argument of RecordVideo.{hint_at(name)}")
        super().__init__(env)
        check_positive("video_length", video_length)
        check_format(video_format)
        if step_trigger is not None and not callable(step_trigger):
            raise ArgumentError(
                f"step_trigger={show(step_trigger)} cannot be called. Give a function of the step's number."
            )
        self._env_ids = parse_ids(slice(None) if id is None else id, len(env))
        if not self._env_ids:
            raise ArgumentError(f"id={show(id)} names no envs, so there is nothing to record. Omit it to record all.")
        if Path(name_prefix).name != name_prefix:
            raise ArgumentError(
                f"name_prefix={show(name_prefix)} cannot start a file name. Give a string without slashes; folders "
                "belong in video_folder."
            )
        refuse_dark_envs(self.unwrapped.engine, self._env_ids)
        self._folder = Path(video_folder)
        self._folder.mkdir(parents=True, exist_ok=True)
        self._trigger = step_trigger or (lambda step: step == 0)
        self._length, self._prefix, self._format = video_length, name_prefix, video_format
        self._fps = check_fps(fps, *self.get_env_attr("metadata", self._env_ids[:1]))
        self._steps, self._asked, self._first = 0, -1, 0
        self._frames: list[Array] | None = None
        self.paths: list[Path] = []

    def on_reset(self, states: States, env_ids: tuple[int, ...]) -> States:
        """Add a frame after a reset."""
        if env_ids:  # otherwise, the frame would be the same as the one before
            self._film()
        return states

    def on_step(self, result: StepResult) -> StepResult:
        """Add a frame after a step."""
        self._film()
        self._steps += 1
        return result

    def _film(self) -> None:
        """Start a video if there is none and the trigger returns True.

        Then add a frame to the current video, if any, unless one of the recorded envs needs a reset.
        """
        if self._frames is None and self._asked < self._steps:
            self._asked = self._steps
            if self._trigger(self._steps):
                self._frames, self._first = [], self._steps
        if self._frames is None or not self.have_begun(self._env_ids):
            return
        if len(self._frames) < self._length:  # otherwise the last write failed
            picture = self.env.render(self._env_ids, tile=True)
            check_size(picture, self._format)
            self._frames.append(picture)
        if len(self._frames) >= self._length:
            self.save()

    def save(self) -> Path | None:
        """End and write the current video. Return its path, or ``None`` if there is no video.

        Raises:
            OSError: If the video cannot be written. The video is kept; the next call to `save` or `close` tries again,
                and so does the next step if the video is full.
        """
        if not self._frames:
            self._frames = None
            return None
        path: Path | None = None
        try:
            path = self._new_path()
            path.write_bytes(encode_animation(self._frames, self._format, self._fps))
        except BaseException as error:
            if path is not None:
                path.unlink(missing_ok=True)
            error.add_note(f"The video of {len(self._frames)} frames is kept; call save() to try again.")
            raise
        self._frames = None
        self.paths.append(path)
        return path

    def _new_path(self) -> Path:
        """Create an empty file and return its path. No file is overwritten, even if other processes use the folder."""
        self._folder.mkdir(parents=True, exist_ok=True)
        for number in itertools.count(1):
            counted = f"-{number}" if number > 1 else ""
            path = self._folder / f"{self._prefix}-step-{self._first}{counted}.{self._format}"
            with contextlib.suppress(FileExistsError):
                path.touch(exist_ok=False)
                break
        return path

    def close(self, timeout: float | None = None) -> None:
        """Write the current video, and close the `ParallelEnv`. See `ParallelEnv.close` for ``timeout``.

        Raises:
            OSError: If the video cannot be written. The `ParallelEnv` is closed anyway, and you can call `save` to try
                again.
        """
        try:
            self.save()
        finally:
            super().close(timeout)
