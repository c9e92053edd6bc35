"""What the envs themselves are asked: attributes, methods, frames."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from parallelenv import arguments
from parallelenv.arguments import MISSING
from parallelenv.guard import exclusive
from parallelenv.known import Known
from parallelenv.tiles import tile_frames


class Calls(Known):
    """The part of a `ParallelEnv` that reaches into its envs."""

    @exclusive
    def get_env_attr(self, key: str, id: Any = None, default: Any = None) -> list[Any]:
        """Return an attribute of each env, looked up through wrappers down to the env.

        Args:
            key: Name; ``"a.b"`` reaches into the object ``a``. It is never evaluated.
            id: Which envs.
            default: What an env without this attribute answers.

        Returns:
            Copies, one per env, in the order of ``id``.

        Raises:
            ArgumentError: If the key is no plain name.
            UnpicklableError: If a value cannot be copied from its worker.
        """
        env_ids = self._ids(id)
        arguments.check_name("key", key)
        values = self._pool.ask("get", env_ids, None, key).values
        return [values[env_id][0] if env_id in values else default for env_id in env_ids]

    @exclusive
    def set_env_attr(
        self, key: str, value: Any = MISSING, id: Any = None, *, values: Sequence[Any] | None = None
    ) -> None:
        """Set an attribute of each env, on the wrapper that has it, else on the innermost env.

        Args:
            key: Name, as in `get_env_attr`.
            value: The same for every env.
            id: Which envs.
            values: Instead of ``value``: one per env, in the order of ``id``.

        Raises:
            ArgumentError: If the key is no plain name, both or neither of ``value`` and
                ``values`` are given, or ``values`` has the wrong length.
            UnpicklableError: If a value cannot be copied to its worker; nothing was set.
        """
        env_ids = self._ids(id)
        arguments.check_name("key", key)
        self._pool.ask("set", env_ids, arguments.spread_values(value, values, env_ids), key)

    @exclusive
    def customized_method(self, env_method: str, data: Any = None, id: Any = None) -> list[Any]:
        """Call a method of each env and return what it returned.

        Args:
            env_method: Name, looked up through wrappers; ``"a.b"`` calls ``b`` of the object ``a``.
            data: Keyword arguments: a dict for all, or a list with one dict per env. A list or
                dict is copied, so that no two envs share an argument.
            id: Which envs.

        Returns:
            Copies, one per env, in the order of ``id``.

        Raises:
            ArgumentError: If the name is no plain name or ``data`` does not fit; nothing was called.
            AbsentMethodError: If an env has no such method; the others were called.
            BaseException: What a method raised; ``error.partial`` maps the others' ids to their returns.
        """
        env_ids = self._ids(id)
        arguments.check_name("env_method", env_method)
        values = self._pool.ask("call", env_ids, arguments.spread_data(data, env_ids), env_method).values
        return [values.get(env_id) for env_id in env_ids]

    @exclusive
    def render(self, id: Any = None, tile: bool = False) -> Any:
        """Return what each env's ``render()`` returns.

        Args:
            id: Which envs.
            tile: Join RGB frames, whose sizes may differ, to one picture.

        Returns:
            A list in the order of ``id``, or ``(height, width, 3)`` uint8.

        Raises:
            ArgumentError: If what is to be tiled is no uint8 array: RGB, grey, or RGB with alpha, which is left out.
        """
        env_ids = self._ids(id)
        values = self._pool.ask("render", env_ids).values
        frames = [values.get(env_id) for env_id in env_ids]
        return tile_frames(frames, env_ids) if tile else frames
