"""Pictures of all envs, and films of them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from parallelenv.animation import check_format, check_fps, save_animation
from parallelenv.arguments import check_positive
from parallelenv.batch import Array
from parallelenv.errors import ArgumentError
from parallelenv.ids import parse_ids
from parallelenv.results import StepResult
from parallelenv.wrappers.seeing import AnswerWrapper

_FPS = 30.0
"""Frames a second of envs that do not say it."""


class RecordVideo(AnswerWrapper):
    """Makes films of the envs, all in one picture, with Pillow alone.

    A film has a frame for each `reset`, `step` and `recv`: what the envs look like after it, so an env that began its
    next episode within a step shows how that begins. A frame waits for envs that are in the middle of a step. Frames
    are kept in memory until the film is full, or `close` or `save` ends it.

    Args:
        env: As in `ParallelWrapper`. Make its envs with ``render_mode="rgb_array"``.
        video_folder: Where films go, as ``<name_prefix>-step-<first step>.<video_format>``. It is made if need be.
        step_trigger: Called with the number of steps and receives made so far, before each: whether a film begins.
            ``None``: at once, and never again.
        video_length: Frames of a film.
        name_prefix: Of file names.
        fps: Frames a second; ``None``: what the envs' ``metadata["render_fps"]`` says, else 30.
        video_format: ``"webp"``, ``"gif"`` or ``"png"``.
        id: Which envs; ``None``: all.

    Attributes:
        paths: Of films that are written, oldest first.

    Raises:
        ArgumentError: If an argument does not fit.
        MissingDependencyError: If Pillow is not installed, or made without the format.
    """

    def __init__(
        self,
        env: Any,
        video_folder: str | Path,
        step_trigger: Callable[[int], bool] | None = None,
        video_length: int = 200,
        *,
        name_prefix: str = "parallelenv",
        fps: float | None = None,
        video_format: str = "webp",
        id: Any = None,
    ) -> None:
        super().__init__(env)
        check_positive("video_length", video_length)
        check_format(video_format)
        if step_trigger is not None and not callable(step_trigger):
            raise ArgumentError(
                f"step_trigger={step_trigger!r} cannot be called. Give a function of the step's number."
            )
        self._env_ids = parse_ids(slice(None) if id is None else id, len(env))
        if not self._env_ids:
            raise ArgumentError(f"id={id!r} names no envs, so there is nothing to film. Leave it out for all.")
        self._folder = Path(video_folder)
        self._folder.mkdir(parents=True, exist_ok=True)
        self._trigger = step_trigger or (lambda step: step == 0)
        self._length, self._prefix, self._format = video_length, name_prefix, video_format
        self._fps = check_fps(self._own_fps() if fps is None else fps)
        self._steps = 0
        self._asked = -1
        self._first = 0
        self._frames: list[Array] | None = None
        self.paths: list[Path] = []

    def _own_fps(self) -> float:
        said = self.get_env_attr("metadata", self._env_ids[:1], {})
        return float((said[0] or {}).get("render_fps") or _FPS) if said else _FPS

    def began(self, states: Any, env_ids: tuple[int, ...]) -> Any:
        """Take a frame after a reset."""
        self._begin_if_wanted()
        self._take(states)
        return states

    def answered(self, result: StepResult) -> StepResult:
        """Take a frame after a step."""
        self._begin_if_wanted()
        self._steps += 1
        self._take(result)
        return result

    def _begin_if_wanted(self) -> None:
        if self._frames is None and self._asked < self._steps:
            self._asked = self._steps
            if self._trigger(self._steps):
                self._frames, self._first = [], self._steps

    def _take(self, answer: Any) -> None:
        """Take a frame, unless one of the envs has no episode yet: it may have nothing to show.

        Raises:
            BaseException: What goes wrong with it; ``error.partial`` is the answer, so that it is not lost.
        """
        if self._frames is None or not self.have_begun(self._env_ids):
            return
        try:
            self._frames.append(self.env.render(self._env_ids, tile=True))
            if len(self._frames) >= self._length:
                self.save()
        except BaseException as error:
            object.__setattr__(error, "partial", answer)
            raise

    def save(self) -> Path | None:
        """End the film that is being made, and return where it was written; ``None`` if there is none.

        Raises:
            OSError: If it cannot be written.
        """
        frames, self._frames = self._frames, None
        if not frames:
            return None
        path = self._folder / f"{self._prefix}-step-{self._first}.{self._format}"
        save_animation(path, frames, self._fps)
        self.paths.append(path)
        return path

    def close(self) -> None:
        """Write the film that is being made, and close the `ParallelEnv`.

        Raises:
            OSError: If it cannot be written; everything is closed all the same.
        """
        try:
            self.save()
        finally:
            super().close()
