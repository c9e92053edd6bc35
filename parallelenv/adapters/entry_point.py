"""A vector entry point for registered envs."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import gymnasium
from gymnasium.envs.registration import EnvSpec
from gymnasium.vector import AutoresetMode

from parallelenv.adapters.gymnasium import GymnasiumVectorEnv
from parallelenv.contract import arguments
from parallelenv.contract.env_specs import make_factories
from parallelenv.contract.error_text import show
from parallelenv.contract.spaces import Env, describe_value
from parallelenv.env import ParallelEnv
from parallelenv.errors import ArgumentError, InvalidEnvError
from parallelenv.registry import ParaMode


def vector_entry_point(
    num_envs: int = 1,
    *,
    env: str | EnvSpec | Callable[..., Env],
    para_mode: ParaMode = "subproc",
    autoreset_mode: str | AutoresetMode = "NextStep",
    parallel_kwargs: dict[str, Any] | None = None,
    max_episode_steps: int | None = None,
    **make_kwargs: object,
) -> GymnasiumVectorEnv:
    """Return a vector env for `gymnasium.make_vec`, for an id registered with this function as its entry point.

    Register with ``gymnasium.register("FastPole-v0", vector_entry_point="parallelenv:vector_entry_point",
    kwargs={"env": "CartPole-v1"})``, then call ``gymnasium.make_vec("FastPole-v0", num_envs=8)``.

    Args:
        num_envs: Number of envs.
        env: A registered id, an `EnvSpec`, or a callable that makes an env.
        para_mode: See `ParallelEnv`.
        autoreset_mode: See `ParallelEnv.to_gymnasium`.
        parallel_kwargs: Further arguments of `ParallelEnv`.
        max_episode_steps: Steps after which an episode is truncated.
        **make_kwargs: Passed to ``gymnasium.make(env, ...)``, or to the callable.

    Raises:
        ArgumentError: If an argument has an invalid value.
        InvalidEnvError: If the id is not registered, or ``env`` is none of these.
    """
    arguments.check_positive("num_envs", num_envs)
    factory = make_factories([env])[0]
    if factory.is_live:
        raise InvalidEnvError(
            f"env is {describe_value(env)}, an env itself, and {num_envs} are to be made. Give what makes one: a "
            "registered id, an EnvSpec, or a callable."
        )
    if not isinstance(parallel_kwargs, dict | None):
        raise ArgumentError(
            f"parallel_kwargs={show(parallel_kwargs)} is no dict. Give arguments of ParallelEnv by name."
        )
    given = parallel_kwargs or {}
    ours = [name for name in ("envs", "para_mode") if name in given]
    if ours:
        raise ArgumentError(f"parallel_kwargs has {ours} in it. Give env= and para_mode= instead, beside it.")
    made = functools.partial(_make, factory.source, max_episode_steps, make_kwargs)
    pool = ParallelEnv([made] * num_envs, para_mode, **given)
    try:
        return pool.to_gymnasium(autoreset_mode)
    except BaseException:
        pool.close()
        raise


def _make(source: Any, max_episode_steps: int | None, make_kwargs: dict[str, object]) -> Env:
    if isinstance(source, EnvSpec):
        return gymnasium.make(source, max_episode_steps=max_episode_steps, **make_kwargs)  # type: ignore[arg-type]
    env = source(**make_kwargs)
    return env if max_episode_steps is None else gymnasium.wrappers.TimeLimit(env, max_episode_steps)
