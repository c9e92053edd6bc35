"""What an adapter wants of the envs' spaces."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import gymnasium

from parallelenv.errors import SpacesError

if TYPE_CHECKING:
    from parallelenv.handover import Adaptable


def declared_spaces(name: str, env: Adaptable) -> list[gymnasium.Space[Any]]:
    """Return one space of each env. ``name``: ``"observation_space"`` or ``"action_space"``.

    Raises:
        SpacesError: If an env declares none.
    """
    spaces = [getattr(facts, name) for facts in env._pool.facts]
    for env_id, space in enumerate(spaces):
        if space is None:
            raise SpacesError(f"env {env_id} declares no {name}, which a vector env needs. Set it on the env.")
    return spaces


def check_alike(name: str, spaces: Sequence[gymnasium.Space[Any]], way_out: str = "Make them equal.") -> None:
    """Refuse spaces of envs that differ.

    Raises:
        SpacesError: If there are such.
    """
    for env_id, space in enumerate(spaces):
        if space != spaces[0]:
            raise SpacesError(f"The {name} of env {env_id} is {space}, but that of env 0 is {spaces[0]}. {way_out}")
