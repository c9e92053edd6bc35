"""Spaces of the envs as adapters need them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal

import gymnasium
from gymnasium.spaces.utils import is_space_dtype_shape_equiv
from gymnasium.vector.utils import batch_differing_spaces, batch_space

from parallelenv.contract import migration_hints
from parallelenv.errors import ArgumentError, SpacesError

if TYPE_CHECKING:
    from parallelenv.env import ParallelEnv

ObservationMode = Literal["same", "different"] | tuple[gymnasium.Space[Any], gymnasium.Space[Any]]


def declared_spaces(name: str, env: ParallelEnv) -> list[gymnasium.Space[Any]]:
    """Return each env's space. ``name`` is ``"observation_space"`` or ``"action_space"``.

    Raises:
        SpacesError: If an env does not declare one.
    """
    spaces = [getattr(facts, name) for facts in env.engine.pool.facts]
    for env_id, space in enumerate(spaces):
        if space is None:
            raise SpacesError(
                f"env {env_id} declares no {name}, which a vector env needs. Set it on the env, or "
                f"{migration_hints.GIVE_SPACES}."
            )
    return spaces


def check_alike(name: str, spaces: Sequence[gymnasium.Space[Any]], way_out: str = "Make them equal.") -> None:
    """Check that the spaces of all envs are equal.

    Raises:
        SpacesError: If they differ.
    """
    for env_id, space in enumerate(spaces):
        if space != spaces[0]:
            raise SpacesError(f"The {name} of env {env_id} is {space}, but that of env 0 is {spaces[0]}. {way_out}")


def vector_spaces(env: ParallelEnv, mode: ObservationMode) -> tuple[gymnasium.Space[Any], gymnasium.Space[Any]]:
    """Return the batched and the single observation space of a vector env.

    Raises:
        ArgumentError: If the mode is unknown.
        SpacesError: If the envs' spaces do not fit it.
    """
    spaces = declared_spaces("observation_space", env)
    if mode == "same":
        check_alike("observation_space", spaces, "If their bounds alone differ, give observation_mode='different'.")
        return batch_space(spaces[0], len(spaces)), spaces[0]
    if mode == "different":
        _check_shapes(spaces, spaces[0])
        return batch_differing_spaces(spaces), spaces[0]
    if isinstance(mode, tuple) and len(mode) == 2 and all(isinstance(space, gymnasium.Space) for space in mode):
        _check_shapes(spaces, mode[1])
        _check_batched(mode[0], mode[1], len(spaces))
        return mode
    raise ArgumentError(
        f"observation_mode={mode!r} is not known; expected 'same', 'different', or a tuple of the batched and the "
        "single observation space."
    )


def _check_shapes(spaces: Sequence[gymnasium.Space[Any]], single: gymnasium.Space[Any]) -> None:
    for env_id, space in enumerate(spaces):
        if not is_space_dtype_shape_equiv(space, single):
            raise SpacesError(
                f"The observation_space of env {env_id} is {space}, of other shapes or dtypes than {single}. No vector "
                "env can batch them; step the ParallelEnv itself."
            )


def _check_batched(batched: gymnasium.Space[Any], single: gymnasium.Space[Any], num_envs: int) -> None:
    expected = batch_space(single, num_envs)
    if not isinstance(batched, type(expected)) or not is_space_dtype_shape_equiv(batched, expected):
        raise SpacesError(
            f"The batched observation space given is {batched}, but observations of {num_envs} envs in {single} have "
            f"the shapes and dtypes of {expected}. Give one that has these."
        )
