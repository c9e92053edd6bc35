"""How fast one open `ParallelEnv` steps beside another: the measurement of `recommend` and ``parallelenv compare``.

Machines are noisy, so two are stepped in turns, in several short rounds: a slow moment then affects both. The ratio is
taken per round, then the median over the rounds. `StandIn` keeps a trial small: its pools have as many of them as there
are envs, but one real env per worker.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import mean, median
from typing import Any

import gymnasium
from gymnasium.envs.registration import EnvSpec
from gymnasium.spaces import Space, Tuple

from parallelenv.contract.env_specs import EnvFactory, is_vector_env
from parallelenv.contract.spaces import Action, Info, State
from parallelenv.env import ParallelEnv
from parallelenv.errors import EnvContractError, ExhaustedError, InvalidEnvError
from parallelenv.worker.env_adapter import Resettable, adapt

CLOSE_ENOUGH = 1.05
"""A mode is chosen over a simpler one only if it is faster by more than this factor."""
ROUNDS = 5


def is_clearly_faster(ratio: float, than: float) -> bool:
    """Whether a mode is preferred to a simpler one; both speeds are relative to the same loop."""
    return ratio > CLOSE_ENOUGH * than


class TimedEnv:
    """An open `ParallelEnv` whose steps are timed in short turns.

    Args:
        env: Must have been reset.
        actions: Repeated if need be.
        turn: Seconds of a turn, at least one step.
        busy: Seconds for which the caller computes during a step.
        scale: Factor for each time: how long a step of all envs takes if ``env`` has only some of them.
    """

    def __init__(
        self, env: ParallelEnv, actions: Sequence[object], turn: float, busy: float = 0.0, scale: float = 1.0
    ) -> None:
        self.env = env
        self.times: deque[float] = deque(maxlen=ROUNDS)
        self._actions = itertools.cycle(actions)
        self._busy = busy
        self._scale = scale
        self._count = 0
        self._step()  # may include one-time work
        # The number of steps per turn is settled here: steps may take different times, and a turn that ends with a long
        # one would count it too often. Meanwhile the system finds a core for each worker.
        end = time.perf_counter() + turn
        while not self._count or time.perf_counter() < end:
            self._step()
            self._count += 1

    @property
    def seconds(self) -> float:
        """How long a step takes: the median of the latest turns."""
        return median(self.times)

    def time(self) -> None:
        """Step for a turn, and note how long a step takes."""
        if self._count > 1:
            self._step()  # wakes workers that have slept since the last turn, which takes 60 us
        begin = time.perf_counter()
        for _ in range(self._count):
            self._step()
        self.times.append((time.perf_counter() - begin) / self._count * self._scale)

    def mean(self) -> float:
        """Return how long a step takes on average over `ROUNDS` turns, for envs whose times are of chance."""
        for _ in range(ROUNDS):
            self.time()
        return mean(self.times)

    def speedup(self, loop: TimedEnv) -> float:
        """Return how many times as fast this is as another, stepped in turns for `ROUNDS` rounds."""
        ratios: list[float] = []
        for turn in range(ROUNDS):
            for each in (self, loop) if turn % 2 else (loop, self):
                each.time()
            ratios.append(loop.times[-1] / self.times[-1])
        return median(ratios)

    def _step(self) -> None:
        if not self._busy:
            self.env.step(next(self._actions))
            return
        self.env.step_async(next(self._actions))
        end = time.thread_time() + self._busy
        while time.thread_time() < end:
            pass
        self.env.step_wait()


def random_actions(env: ParallelEnv, number: int, seed: int = 0) -> list[object]:
    """Return random actions for all envs; raise `EnvContractError` if one declares no action space."""
    space = env.action_space
    spaces = [space for space in env.action_spaces if space is not None]
    if len(spaces) < len(env):
        raise EnvContractError("it declares no action space to draw random actions from")
    whole: Space[object] = Tuple(spaces) if space is None else space
    whole.seed(seed)
    samples = [whole.sample() for _ in range(number)]
    return [list(sample) for sample in samples] if space is None else samples  # type: ignore[call-overload]


_QUICK_BUILD = 0.01
"""Builds faster than this (in seconds) may have returned an existing env."""
NOT_NEW = "An env fn returns the same env each time, which may be in use."


@dataclass(slots=True)
class _SharedEnv:
    """The real env of some stand-ins."""

    env: Resettable
    first: tuple[State, Info] | None = None  # state and info, once it was reset
    num_users: int = 0  # open stand-ins


_SHARED: dict[tuple[str, int, int], _SharedEnv] = {}
"""By trial, env id of the factory, and thread: each worker has its own."""


class StandIn(gymnasium.Env[State, Action]):
    """Takes the place of an env. All stand-ins of a trial, factory and thread step one real env in turns.

    The pools of a trial then make as many calls and exchange as many messages as the real one, without its memory and
    the time to build all of it. The first stand-in builds the env, and with ``must_be_new`` raises `InvalidEnvError`
    for one that existed before, as it may be the user's.
    """

    def __init__(self, trial: str, factory: EnvFactory, must_be_new: bool = False) -> None:
        self._key = trial, factory.env_id, threading.get_ident()
        shared = _SHARED.get(self._key)
        if shared is None:
            begin = time.perf_counter()
            env = factory.build()
            if is_vector_env(env):
                _close(env)
                raise InvalidEnvError(
                    "Vector envs step many envs at once, which a trial of single ones does not show. For one of them "
                    "take para_mode='dummy', for several 'subproc'"
                )
            is_quick = time.perf_counter() - begin < _QUICK_BUILD
            if must_be_new and is_quick and not isinstance(factory.source, (EnvSpec, type)):
                try:
                    other = factory.build()
                except BaseException:
                    _close(env)  # it is new: an env fn that returns an old one does not fail
                    raise
                if other is env:
                    raise InvalidEnvError(NOT_NEW)
                _close(other)
            shared = _SharedEnv(adapt(env))
        self._shared = shared
        self._has_begun = False
        self.step: Any = self._shared.env.step  # itself: one call more is 2 % of a CartPole
        _SHARED[self._key] = self._shared
        self._shared.num_users += 1

    @property
    def observation_space(self) -> Any:  # type: ignore[override]  # nothing sets it
        """The env's, which is not asked for it if the user gave one."""
        return self._shared.env.env.observation_space

    @property
    def action_space(self) -> Any:  # type: ignore[override]
        """Likewise."""
        return self._shared.env.env.action_space

    def reset(self, *, seed: int | None = None, options: Info | None = None) -> tuple[State, Info]:
        """Reset the env, but when a pool begins only the first time: resets may take long.

        Raises:
            EnvContractError: If there is no further episode.
        """
        try:
            if self._has_begun:
                return self._shared.env.reset(seed, options)
            self._has_begun = True
            if self._shared.first is None:
                self._shared.first = self._shared.env.reset(seed, options)
            return self._shared.first
        except ExhaustedError as error:
            raise EnvContractError(f"it has too few episodes for a trial ({error})") from error

    def close(self) -> None:
        """Close the env with the last of its stand-ins."""
        self._shared.num_users -= 1
        if not self._shared.num_users:
            _SHARED.pop(self._key, None)
            _close(self._shared.env.env)


def _close(env: object) -> None:
    with contextlib.suppress(Exception):  # as in a host: errors in closing are ignored
        if callable(close := getattr(env, "close", None)):
            close()
