"""What the envs themselves are asked: attributes, methods, frames."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from parallelenv.contract import arguments
from parallelenv.contract.arguments import MISSING
from parallelenv.contract.batch import Array
from parallelenv.contract.tracebacks import warn_user
from parallelenv.engine.guard import exclusive
from parallelenv.errors import AbsentAttributeWarning, ArgumentError
from parallelenv.known import Known
from parallelenv.notebook.tiles import refuse_dark, tile_frames


class Calls(Known):
    """The part of a `ParallelEnv` that reaches into its envs."""

    def __init__(self) -> None:
        super().__init__()
        self._hints: dict[str, str] = {}  # by name of an absent attribute

    @exclusive
    def get_env_attr(self, key: str, id: Any = None, default: Any = MISSING) -> list[Any]:
        """Return an attribute of each env, looked up through wrappers down to the env.

        Where nothing is found, an env that has a method ``get_env_attr(key)`` of its own is asked: its answer counts,
        unless it is ``None`` or an `AttributeError`.

        Args:
            key: Name; ``"a.b"`` reaches into the object ``a``. It is never evaluated.
            id: Which envs.
            default: What an env without this attribute answers: ``None`` if not given.

        Returns:
            Copies, one per env, in the order of ``id``.

        Raises:
            ArgumentError: If the key is no plain name.
            UnpicklableError: If a value cannot be copied from its worker.

        Warns:
            AbsentAttributeWarning: If no env has the attribute, one has another of a similar name, and no default was
                given.
        """
        env_ids = self._ids(id)
        arguments.check_name("key", key)
        values = self._pool.ask("get", env_ids, None, key).values
        if default is MISSING:
            default = None
            if not values and env_ids and (hint := self._hint(key, env_ids[0])):
                message = f"No env has an attribute {key!r}: all answer None.{hint}"
                warn_user(f"{message} If you expect that, give default=None.", AbsentAttributeWarning)
        return [values[env_id][0] if env_id in values else default for env_id in env_ids]

    @exclusive
    def set_env_attr(
        self, key: str, value: Any = MISSING, id: Any = None, *, values: Sequence[Any] | None = None
    ) -> None:
        """Set an attribute of each env, on the wrapper that has it, else on the innermost env.

        Where none has it, an env that has a method ``set_env_attr(key, value)`` of its own sets it by that.

        Args:
            key: Name, as in `get_env_attr`.
            value: The same for every env. A list or tuple has one item per env, in the order of ``id``, as ``values``.
            id: Which envs.
            values: Instead of ``value``: one per env, in the order of ``id``. ``[value] * n`` sets a list on all.

        Raises:
            ArgumentError: If the key is no plain name, both or neither of ``value`` and ``values`` are given, a list
                has the wrong length, or ``value`` is an array or tensor with as many rows as there are envs asked,
                which could mean either.
            UnpicklableError: If a value cannot be copied to its worker; nothing was set.

        Warns:
            AbsentAttributeWarning: If the attribute is new to all of the envs, and they have one of a similar name.
        """
        env_ids = self._ids(id)
        arguments.check_name("key", key)
        is_new = self._pool.ask("set", env_ids, arguments.spread_values(value, values, env_ids), key).values
        if env_ids and len(is_new) == len(env_ids) and (hint := self._hint(key, env_ids[0])):
            message = f"{key!r} was set as a new attribute: no env had one of this name.{hint}"
            warn_user(message, AbsentAttributeWarning)

    def _hint(self, key: str, env_id: int) -> str:
        """Return a hint at what an attribute that an env does not have may have been meant to be.

        The env is asked once per name: to look for similar names takes a millisecond.
        """
        if key not in self._hints:
            self._hints[key] = self._pool.try_asking("hint", (env_id,), None, key).values.get(env_id, "")
        return self._hints[key]

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
    def call(self, function_names: str | Sequence[str], function_args_list: Any = None, id: Any = None) -> list[Any]:
        """Call a method of each env, not necessarily the same one, and return what it returned.

        Args:
            function_names: A name for all, or a list with one per env, each as in `customized_method`.
            function_args_list: A list with one item per env: a list or tuple of positional arguments, a dict of keyword
                arguments, or ``None``. Arguments are copied.
            id: Which envs.

        Returns:
            Copies, one per env, in the order of ``id``.

        Raises:
            ArgumentError: If a name is none, or there are not as many as envs; nothing was called.
            AbsentMethodError: If an env has no such method; the others were called.
            BaseException: What a method raised; ``error.partial`` maps the others' ids to their returns.
        """
        env_ids = self._ids(id)
        names = arguments.spread_names("function_names", function_names, env_ids)
        given = arguments.spread_arguments(function_args_list, env_ids)
        return self._ask_each("invoke", env_ids, [(name, *one) for name, one in zip(names, given, strict=True)])

    @exclusive
    def attr(self, names: str | Sequence[str], id: Any = None) -> list[Any]:
        """Return an attribute of each env, not necessarily the same one, that it must have.

        Args:
            names: A name for all, or a list with one per env, each as in `get_env_attr`.
            id: Which envs.

        Returns:
            Copies, one per env, in the order of ``id``.

        Raises:
            ArgumentError: If a name is none, or there are not as many as envs; nothing was asked.
            AbsentAttributeError: If an env has no such attribute; ``error.partial`` maps the others' ids to theirs.
        """
        env_ids = self._ids(id)
        return self._ask_each("read", env_ids, arguments.spread_names("names", names, env_ids))

    @exclusive
    def command(self, name: str, data: Any = None, id: Any = None) -> list[Any]:
        """Give a command to envs that have a method ``command(name, data)``, and return what that returned.

        Args:
            name: Any text that the envs understand.
            data: The same for each env; each gets a copy.
            id: Which envs.

        Returns:
            Copies, one per env, in the order of ``id``.

        Raises:
            ArgumentError: If ``name`` is no text; nothing was called.
            AbsentMethodError: If an env takes no commands; the others did.
            BaseException: What an env raised; ``error.partial`` maps the others' ids to their returns.
        """
        env_ids = self._ids(id)
        if not isinstance(name, str):
            raise ArgumentError(f"name={name!r} is no name of a command. Give a text that the envs understand.")
        return self._ask_each("invoke", env_ids, [("command", (name, data), {})] * len(env_ids))

    def _ask_each(self, operation: str, env_ids: Sequence[int], each: Sequence[Any]) -> list[Any]:
        values = self._pool.ask(operation, env_ids, each).values
        return [values.get(env_id) for env_id in env_ids]

    @exclusive
    def render(self, id: Any = None, tile: bool = False, labels: bool = False) -> Any:
        """Return what each env's ``render()`` returns.

        Args:
            id: Which envs.
            tile: Join RGB frames, whose sizes may differ, to one picture, in a grid without gaps.
            labels: With ``tile``, leave a gap between frames and draw the env id on each, as `show` does. Needs Pillow.

        Returns:
            A list in the order of ``id``, or ``(height, width, 3)`` uint8.

        Raises:
            ArgumentError: If what is to be tiled is no uint8 array: RGB, grey, or RGB with alpha, which is left out. If
                ``labels`` is given without ``tile``.
            MissingDependencyError: If ``labels`` is given and Pillow is not installed.
        """
        env_ids = self._ids(id)
        if labels and not tile:
            raise ArgumentError("labels=True draws env ids on the tiles of one picture. Add tile=True.")
        return self._picture(env_ids, labels=labels) if tile else self._frames(env_ids)

    def _frames(self, env_ids: Sequence[int]) -> list[Any]:
        values = self._pool.ask("render", env_ids).values
        return [values.get(env_id) for env_id in env_ids]

    def _picture(self, env_ids: Sequence[int], width: int | None = None, labels: bool = True) -> Array:
        """Return the frames of envs as one picture. ``width`` and ``labels``: as in `tile_frames`."""
        return tile_frames(self._frames(env_ids), env_ids, width, labels)

    def _refuse_dark(self, env_ids: Sequence[int]) -> None:
        """Refuse envs that answer no single picture."""
        env_ids = [env_id for env_id in env_ids if self._pool.facts[env_id].render_mode != "rgb_array"]
        modes = self._pool.ask("get", env_ids, None, "render_mode").values
        unsaid = [env_id for env_id in env_ids if env_id not in modes]
        can_draw = self._pool.ask("has", unsaid, None, "render").values if unsaid else {}
        refuse_dark(env_ids, [modes.get(env_id, ("rgb_array",))[0] for env_id in env_ids])
        for env_id in unsaid:
            if not can_draw.get(env_id):
                raise ArgumentError(
                    f"env {env_id} has no method render(), so there is nothing to see. Give it one that returns a "
                    "uint8 array (height, width, 3), or leave it out with id."
                )
