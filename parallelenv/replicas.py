"""Copies of one env that can be told apart."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import gymnasium
from gymnasium.envs.registration import EnvSpec

from parallelenv import recipes
from parallelenv.unpickling import loads

EnvFn = Callable[[], Any]


def replicate(env: Any, num_envs: int, seed: int | None) -> list[EnvFn]:
    """Return an env fn for each copy.

    Args:
        env: As in `ParallelEnv.replicate`.
        num_envs: So many.
        seed: As in `ParallelEnv.replicate`.

    Raises:
        InvalidEnvError: If it is no env.
        UnpicklableError: If it cannot be copied.
    """
    recipe = recipes.make_recipes([env])[0]
    if recipe.is_live:
        return [functools.partial(loads, recipes.pack([recipe])[0])] * num_envs
    if isinstance(recipe.source, EnvSpec):
        return [functools.partial(gymnasium.make, recipe.source)] * num_envs
    return [told(recipe.source, rank, num_envs, seed) for rank in range(num_envs)]


def told(env_fn: Callable[..., Any], rank: int, num_envs: int, seed: int | None) -> EnvFn:
    """Return an env fn that is told what it asks for by the names of its parameters."""
    known = {"rank": rank, "world_size": num_envs, "seed": None if seed is None else seed + rank}
    wanted = {name: value for name, value in known.items() if name in _asked(env_fn, keeps_default=value is None)}
    return functools.partial(env_fn, **wanted) if wanted else env_fn


def _asked(env_fn: Callable[..., Any], *, keeps_default: bool) -> set[str]:
    """Return the names that an env fn may be called with, and that nobody has bound yet."""
    try:
        parameters = inspect.signature(env_fn).parameters.values()
    except (TypeError, ValueError):  # a builtin without a signature
        return set()
    bound = env_fn.keywords if isinstance(env_fn, functools.partial) else {}
    return {
        one.name
        for one in parameters
        if one.kind in (one.POSITIONAL_OR_KEYWORD, one.KEYWORD_ONLY)
        and one.name not in bound
        and not (keeps_default and one.default is not one.empty)
    }
