"""Stand-ins for envs in a trial: a pool has as many as there are envs, but one real env per worker."""

from __future__ import annotations

import contextlib
import threading
import time
from dataclasses import dataclass
from typing import Any

import gymnasium
from gymnasium.envs.registration import EnvSpec

from parallelenv.contract.env_specs import EnvFactory
from parallelenv.contract.spaces import Action, Info, State
from parallelenv.errors import EnvContractError, ExhaustedError
from parallelenv.worker.env_adapter import Resettable, adapt

_QUICK_BUILD = 0.01
"""Builds faster than this (in seconds) may have returned an existing env."""


class NotNewError(Exception):
    """An env fn returns the same env each time: ``lambda: env``."""


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
    the time to build all of it. The first stand-in builds the env, and with ``must_be_new`` raises `NotNewError` for
    one that existed before, as it may be the user's.
    """

    def __init__(self, trial: str, factory: EnvFactory, must_be_new: bool = False) -> None:
        self._key = trial, factory.env_id, threading.get_ident()
        shared = _SHARED.get(self._key)
        if shared is None:
            begin = time.perf_counter()
            env = factory.build()
            is_quick = time.perf_counter() - begin < _QUICK_BUILD
            if must_be_new and is_quick and not isinstance(factory.source, (EnvSpec, type)):
                try:
                    other = factory.build()
                except BaseException:
                    _close(env)  # it is new: an env fn that returns an old one does not fail
                    raise
                if other is env:
                    raise NotNewError
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
