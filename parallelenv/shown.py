"""What a `ParallelEnv` shows, in a notebook most of all."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from gymnasium.error import ResetNeeded

from parallelenv.contract.arguments import check_positive
from parallelenv.contract.batch import Array
from parallelenv.contract.failures import add_note, put
from parallelenv.contract.messages import list_ids, show
from parallelenv.engine.guard import exclusive
from parallelenv.engine.tickets import name_envs
from parallelenv.errors import ArgumentError, ConcurrentUseError, ParallelEnvError, ResetNeededError
from parallelenv.notebook.animation import (
    check_format,
    check_fps,
    check_size,
    encode_animation,
    format_of,
    has_ffmpeg,
    playing_fps,
)
from parallelenv.notebook.film import Film
from parallelenv.notebook.recorder import Recorder, ask_to_watch, ask_what_was_seen
from parallelenv.notebook.repr import describe
from parallelenv.notebook.screen import Pace, Screen, refuse_no_notebook
from parallelenv.rollouts.evaluation import Evaluation, perform
from parallelenv.rollouts.length import Goal, progress_bar
from parallelenv.traffic import Traffic

_MOMENT = 1e-3
"""Seconds after which it is looked again whether another thread's call is over."""


class Shown(Traffic):
    """The part of a `ParallelEnv` that is there to be looked at."""

    def __init__(self) -> None:
        super().__init__()
        self._screen = Screen()
        self._sampling: Any = None  # while this is recorded

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, str]:
        """Return what a notebook shows of this object, as text and as HTML.

        No worker is asked or waited for: it is the same, only older, of one that is busy, broken or closed.
        """
        return describe(self)

    @exclusive
    def show(self, id: Any = None, *, width: int = 800) -> None:
        """Show what the envs look like now, below the notebook cell. Another call in the same cell replaces it.

        The frames of several envs are tiled, with a gap between them and the env id on each.

        Args:
            id: Which envs. Make them with ``render_mode="rgb_array"``; their frames may differ in size.
            width: Pixels; a picture that is wider is made smaller.

        Raises:
            NotebookNeededError: If this is no notebook.
            MissingDependencyError: If Pillow is not installed.
            ArgumentError: If an env has another ``render_mode`` or cannot draw; nothing was drawn. As
                `ParallelEnv.render` with ``tile=True``.
            ResetNeededError: If an env needs a reset before it can draw.
        """
        refuse_no_notebook("show")
        check_format("png")
        env_ids = self._seen_ids(id)
        check_positive("width", width)
        if any(self._pool.facts[env_id].render_mode != "rgb_array" for env_id in env_ids):
            self._refuse_dark(env_ids)
        self._screen.show(self._sight(env_ids, width))

    @exclusive
    def play(
        self,
        policy: Callable[..., Any],
        steps: int,
        *,
        id: Any = None,
        seed: Any = None,
        fps: float | None = None,
        width: int = 800,
        progress: bool = True,
    ) -> Evaluation:
        """Let a policy act while you look on, below the notebook cell.

        The envs begin with a reset, and need one afterwards. Whoever ends begins anew, whatever ``asynchronous`` says.
        Stop the cell when you have seen enough.

        Args:
            policy: As in `ParallelEnv.run_episodes`.
            steps: So many steps each env makes.
            id: Which envs.
            seed: Of the first reset, as in `ParallelEnv.reset`.
            fps: Frames a second at most; ``None``: what the first env's ``metadata["render_fps"]`` says, else 30.
            width: As in `show`.
            progress: As in `ParallelEnv.rollout`.

        Returns:
            An `Evaluation` of the episodes that have ended.

        Raises:
            NotebookNeededError, MissingDependencyError: As `show`.
            ArgumentError: If an argument does not fit, or an env has another ``render_mode`` or cannot draw; nothing
                was reset.
            EnvBusyError, EnvPausedError: As `ParallelEnv.step`.
            BaseException: What an env or the policy raised; ``error.partial`` has the episodes so far.
        """
        refuse_no_notebook("play")
        check_format("png")
        env_ids, fps = self._cast(id, steps, fps, width)
        pace, screen = Pace(fps), Screen()

        def see(picture: Array) -> None:
            pace.wait()
            screen.show(picture)

        with progress_bar(Goal.of(steps, None), bool(progress), "play") as advance:
            return self._perform(policy, steps, env_ids, seed, see, width, advance)

    @exclusive
    def record(
        self,
        policy: Callable[..., Any],
        steps: int,
        path: str | Path | None = None,
        *,
        id: Any = None,
        seed: Any = None,
        fps: float | None = None,
        width: int = 640,
        progress: bool = True,
    ) -> Film:
        """Let a policy act, and return a film of it, which a notebook plays. It needs no screen.

        The envs begin with a reset, and need one afterwards. Whoever ends begins anew, whatever ``asynchronous`` says.
        All frames are in memory until the last step: at the usual width some 0.8 MB each. `RecordVideo` films what
        your own loop does.

        Args:
            policy: As in `ParallelEnv.run_episodes`.
            steps: So many steps each env makes; the film has one frame more.
            path: Where to write it, too: ``.webp``, ``.gif``, ``.png`` (animated), or ``.mp4``, for which
                imageio-ffmpeg has to be installed. ``None``: nowhere; then it is an MP4 if that can be, else a WebP.
            id: Which envs.
            seed: Of the first reset, as in `ParallelEnv.reset`.
            fps: Frames a second; ``None``: as in `play`. At most 50 of a GIF and 90 of a WebP or PNG: what has more,
                browsers play at 10.
            width: Pixels; frames that are wider are made smaller.
            progress: As in `ParallelEnv.rollout`.

        Raises:
            MissingDependencyError: If Pillow is not installed, or for an MP4 imageio-ffmpeg.
            ArgumentError: If an argument does not fit, or an env has another ``render_mode`` or cannot draw; nothing
                was reset. If a picture is too large for the format.
            OSError: If the folder does not exist or nothing may be written there, before anything was reset; or if the
                film cannot be written: ``error.partial`` is the film.
            EnvBusyError, EnvPausedError: As `ParallelEnv.step`.
            BaseException: What an env or the policy raised; ``error.partial`` has the episodes so far.
        """
        video_format = _check_path(path)
        env_ids, fps = self._cast(id, steps, fps, width)
        frames: list[Array] = []
        with progress_bar(Goal.of(steps, None), bool(progress), "record") as advance:

            def see(picture: Array) -> None:
                check_size(picture, video_format)
                frames.append(picture)

            episodes = self._perform(policy, steps, env_ids, seed, see, width, advance)
        data = encode_animation(frames, video_format, fps)
        film = Film(data, video_format, None, len(frames), playing_fps(fps, video_format), episodes)
        if path is not None:
            try:
                film.save(path)
            except OSError as error:
                put(error, "partial", film)  # it is made, and can be saved elsewhere
                raise
        return film

    # ---------------------------------------------------------------- time

    def profile(self) -> Recorder:
        """Return a context manager that records where the time goes: ``with env.profile() as p``.

        When the block has ended, ``p.summary()`` is a table with advice, ``p.plot()`` a timeline that a notebook shows,
        and ``p.save("trace.json")`` writes a trace for Perfetto or Chrome. It is recorded when each env was stepped or
        reset, and when the caller was in a call. Where that would take more than 2 % of the time, as with steps of less
        than some 0.5 ms, only some steps are recorded, and stand for the others: `Summary.sampled` says how many. The
        first ones all are. A worker that dies takes along what it has noted; of the one that is built anew it is
        recorded what that does.

        Raises:
            EnvBusyError: On entry, if this is recorded already.
            WorkerTimeoutError: On entry, if a worker is still busy after the pool's own timeout.
        """
        return Recorder(self)

    @exclusive
    def _watch(self) -> Any:
        """Let workers begin to note what they do."""
        return ask_to_watch(self)

    @exclusive
    def _ask_what_was_seen(self, timeout: float, goes_on: bool) -> Any:
        return ask_what_was_seen(self, timeout, goes_on)

    def _unwatch(self, timeout: float, goes_on: bool) -> Any:
        """Let workers note no more, after the call of another thread; return what each has noted that can tell."""
        self._sampling, self._pool.is_watched = None, False
        deadline = time.monotonic() + timeout
        while True:
            left = max(0.0, deadline - time.monotonic())
            try:
                return self._ask_what_was_seen(left, goes_on)
            except ConcurrentUseError:
                if not left:
                    return []
                time.sleep(_MOMENT)
            except ParallelEnvError:  # closed meanwhile, say
                return []

    def _seen_ids(self, id: Any) -> tuple[int, ...]:
        env_ids = self._ids(id)
        if not env_ids:
            raise ArgumentError("There are no envs to look at: id is empty, or all are paused.")
        return env_ids

    def _sight(self, env_ids: Sequence[int], width: int) -> Array:
        """Return a picture of envs as they are now, at most ``width`` pixels wide.

        Raises:
            BaseException: As `ParallelEnv.render`, one for all envs if they need a reset.
        """
        try:
            return self._picture(env_ids, width)
        except Exception as caught:
            error = self._clearer(caught, env_ids)
            if error is caught:
                raise
        try:
            raise error  # not where the other one was caught, which says no more, but at length
        finally:
            del error  # it leads here

    def _clearer(self, error: Exception, env_ids: Sequence[int]) -> BaseException:
        """Return what to raise where envs could not be seen: if some have no episode, that is said."""
        episodes = set(self._stepper.episodes.without())
        fresh = [env_id for env_id in env_ids if env_id in episodes]
        is_of_drawing = isinstance(error, ArgumentError) or not isinstance(error, ParallelEnvError)
        if not fresh or not is_of_drawing:
            return error
        call = "reset()" if len(fresh) == self.num_envs else f"reset({list_ids(fresh)})"
        said = f"{name_envs(fresh)} {'has' if len(fresh) == 1 else 'have'} no episode yet. Call {call} before show()."
        if isinstance(error, ResetNeeded | ArgumentError):  # the latter for ``None``, say, instead of a frame
            return ResetNeededError(said)
        add_note(error, said)
        return error

    def _cast(self, id: Any, steps: Any, fps: Any, width: Any) -> tuple[tuple[int, ...], float]:
        """Return who is to be seen and how many frames a second, when all arguments fit."""
        env_ids = self._seen_ids(id)
        check_positive("steps", steps)
        check_positive("width", width)
        fps = check_fps(fps, self._pool.facts[env_ids[0]].metadata)
        self._refuse_dark(env_ids)
        return env_ids, fps

    def _perform(
        self,
        policy: Callable[..., Any],
        steps: int,
        env_ids: Sequence[int],
        seed: Any,
        see: Callable[[Array], None],
        width: int,
        advance: Callable[[int], Any],
    ) -> Evaluation:
        """Let a policy act for so many steps; call ``see`` with each picture, and ``advance`` after each step."""
        left = steps

        def look() -> bool:
            nonlocal left
            see(self._picture(env_ids, width))
            advance(int(left < steps))
            left -= 1
            return left >= 0

        each = self._beginnings(env_ids, seed, None)
        return perform(self._stepper, policy, env_ids, each, self._forget_seeds, look)


def _check_path(path: Any) -> str:
    """Return the format of a film that is to be written there, before there is one.

    Raises:
        ArgumentError: If it is no path of a film.
        MissingDependencyError: If it cannot be written.
        OSError: If there is no such folder, or nothing may be written there.
    """
    if path is None:
        video_format = "mp4" if has_ffmpeg() else "webp"
        check_format(video_format)
        return video_format
    if not isinstance(path, (str, os.PathLike)) or "\0" in str(path):
        raise ArgumentError(f"path={show(path)} is no path of a file.")
    video_format, target = format_of(path), Path(path)
    if not target.parent.is_dir():
        raise FileNotFoundError(f"path={str(path)!r}: the folder {str(target.parent)!r} does not exist.")
    if target.is_dir():
        raise IsADirectoryError(f"path={str(path)!r} is a folder. Give the name of a file in it.")
    if not os.access(target if target.exists() else target.parent, os.W_OK):
        raise PermissionError(f"path={str(path)!r} cannot be written: there is no permission to.")
    return video_format
