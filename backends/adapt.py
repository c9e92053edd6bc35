"""One interface for every kind of env: Gymnasium's own, and older ones."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, NoReturn

import gymnasium

from parallelenv.errors import AbsentMethodError, EnvContractError
from parallelenv.recipes import is_env
from parallelenv.texts import show

Stepped = tuple[Any, Any, bool, bool, dict[str, Any]]


class Resettable:
    """How a Gymnasium env is reset and stepped.

    Attributes:
        env: The env as the user made it.
        step: Its own ``step``: nothing of ours stands between.
    """

    def __init__(self, env: Any) -> None:
        self.env = env
        self.step: Callable[[Any], Stepped] = env.step

    def reset(self, seed: int | None, options: dict[str, Any] | None) -> tuple[Any, dict[str, Any]]:
        """Return the first state of a new episode and its info.

        Raises:
            EnvContractError: If the env returns something else.
        """
        result = self.env.reset(seed=seed, options=options)
        if not (isinstance(result, tuple) and len(result) == 2 and isinstance(result[1], dict)):
            raise EnvContractError(
                f"reset() of {type(self.env).__name__} returned {type(result).__name__}; a gymnasium.Env returns "
                "(state, info), info a dict."
            )
        return result


class Legacy(Resettable):
    """Objects that are no `gymnasium.Env` but have ``reset()`` and ``step(action)``.

    Their ``step`` may return ``(state, reward, done, info)``, their ``reset`` the bare state, and
    they may take seeds by ``seed(s)``.
    """

    def __init__(self, env: Any) -> None:
        super().__init__(env)
        self.step = self._step
        names = _parameters(env.reset)
        self._takes_seed = "seed" in names
        self._takes_options = "options" in names

    def reset(self, seed: int | None, options: dict[str, Any] | None) -> tuple[Any, dict[str, Any]]:
        """Return the first state of a new episode and its info, empty if the env gives none."""
        arguments: dict[str, Any] = {}
        if seed is not None:
            self._seed(seed, arguments)
        if options and not self._takes_options:
            raise EnvContractError(
                f"reset() of {type(self.env).__name__} takes no options; it was given {show(options)}."
            )
        if options is not None and self._takes_options:
            arguments["options"] = options
        result = self.env.reset(**arguments)
        if isinstance(result, tuple) and len(result) == 2 and isinstance(result[1], dict):
            return result
        return result, {}

    def _seed(self, seed: int, arguments: dict[str, Any]) -> None:
        if self._takes_seed:
            arguments["seed"] = seed
        elif callable(getattr(self.env, "seed", None)):
            self.env.seed(seed)

    def _step(self, action: Any) -> Stepped:
        result = self.env.step(action)
        if not isinstance(result, tuple) or len(result) != 4:
            return result
        state, reward, done, info = result
        return state, reward, *split_done(done, info), info


class ForCalls(Resettable):
    """Objects without ``reset`` and ``step``, for calls and attributes alone. The caller refuses their steps."""

    def __init__(self, env: Any) -> None:
        self.env = env
        self.step = self.reset = self._refuse  # type: ignore[method-assign,assignment]

    def _refuse(self, *_: Any) -> NoReturn:
        raise AbsentMethodError(f"{type(self.env).__name__} lacks reset() or step().")


def split_done(done: Any, info: Any) -> tuple[bool, bool]:
    """Return terminated and truncated for the single flag that there was in older times."""
    is_cut = bool(done) and isinstance(info, dict) and bool(info.get("TimeLimit.truncated", False))
    return bool(done) and not is_cut, is_cut


def adapt(env: Any) -> Resettable:
    """Return the interface through which a host uses an env."""
    if isinstance(env, gymnasium.Env):
        return Resettable(env)
    return Legacy(env) if is_env(env) else ForCalls(env)


def _parameters(function: Any) -> set[str]:
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # a builtin without a signature
        return set()
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return {"seed", "options"}
    return {parameter.name for parameter in parameters}
