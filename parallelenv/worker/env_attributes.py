"""Attributes of an env, looked up through its wrappers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from parallelenv.contract.env_specs import is_env
from parallelenv.contract.error_text import near_attribute
from parallelenv.errors import AbsentAttributeError

_ABSENT = object()


def layers(env: Any) -> Iterator[Any]:
    """Yield an env's wrappers from the outermost inwards, then the env itself."""
    seen: set[int] = set()
    while id(env) not in seen:
        seen.add(id(env))
        yield env
        inner = getattr(env, "env", None)
        if inner is None or not is_env(inner):
            return
        env = inner


def owners(env: Any) -> list[Any]:
    """Return the objects that may have an attribute: the layers of an env, and the parts of a `TaskEnv`."""
    found = list(layers(env))
    return [*found, *_parts(found[-1])]


def _parts(base: Any) -> list[Any]:
    """Return the further objects in which an env looks up attributes that it lacks."""
    of_base = getattr(type(base), "attribute_owners", None)
    return [] if of_base is None else [part for part in of_base(base) if part is not None]


def get_attribute(env: Any, key: str) -> tuple[Any] | None:
    """Return the attribute in a one-tuple, or ``None`` if it does not exist.

    Args:
        env: The outermost layer.
        key: A name, or several joined by dots; only the first is looked up in every layer, and then by the env's own
            ``get_env_attr``, for envs that keep their state in parts.
    """
    first, *rest = key.split(".")
    value = getattr(env, first, _ABSENT)
    if value is _ABSENT:
        found = (getattr(owner, first, _ABSENT) for owner in owners(env))
        value = next((value for value in found if value is not _ABSENT), _ABSENT)
    if value is _ABSENT and (ask := _own_method(env, "get_env_attr")):
        try:
            answer = ask(first)
        except AttributeError:
            answer = None
        value = _ABSENT if answer is None else answer  # such envs return None for an absent attribute
    for name in rest:
        value = getattr(value, name, _ABSENT)
    return None if value is _ABSENT else (value,)


def get_existing(env: Any, key: str) -> Any:
    """Return the attribute.

    Raises:
        AbsentAttributeError: If there is no such attribute.
    """
    found = get_attribute(env, key)
    if found is None:
        raise AbsentAttributeError(_absent(env, "attribute", key))
    return found[0]


def set_attribute(env: Any, key: str, value: Any) -> bool:
    """Set an attribute on the layer that has it, or on the task or sampler that has it, else on the innermost layer.

    If none has it, the env's own ``set_env_attr`` sets it, if there is one.

    Returns:
        Whether it is a new one, as far as is known.

    Raises:
        AttributeError: If an object on a dotted path is absent.
        BaseException: What the env's own ``set_env_attr`` raised.
    """
    *way, name = key.split(".")
    if way:
        found = get_attribute(env, ".".join(way))
        if found is None:
            raise AttributeError(f"{key!r} cannot be set: the env has no attribute {'.'.join(way)!r}.")
        is_new = not hasattr(found[0], name)
        setattr(found[0], name, value)
        return is_new
    owner = next((owner for owner in owners(env) if hasattr(owner, name)), None)
    if owner is None and (set_through := _own_method(env, "set_env_attr")):
        set_through(name, value)
        return False
    setattr(list(layers(env))[-1] if owner is None else owner, name, value)
    return owner is None


def get_method(env: Any, key: str) -> Any:
    """Return a method of an env.

    Raises:
        AbsentAttributeError: If there is none of that name, or it is not callable.
    """
    found = get_attribute(env, key)
    if found is None:
        raise AbsentAttributeError(_absent(env, "method", key))
    if not callable(found[0]):
        raise AbsentAttributeError(
            f"{key!r} of {type(list(layers(env))[-1]).__name__} is {type(found[0]).__name__}, no method. Read it with "
            f"get_env_attr({key!r})."
        )
    return found[0]


def _own_method(env: Any, name: str) -> Callable[..., Any] | None:
    """Return a method of the innermost layer by which the env looks up its attributes itself."""
    method = getattr(list(layers(env))[-1], name, None)
    return method if callable(method) else None


def near_name(env: Any, key: str) -> str:
    """Return a hint at what an absent name may have meant: a sentence after a space, or an empty string."""
    way, _, name = key.rpartition(".")
    if not way:
        return near_attribute(name, *owners(env))
    found = get_attribute(env, way)
    return near_name(env, way) if found is None else near_attribute(name, *found)


def _absent(env: Any, kind: str, key: str) -> str:
    base = list(layers(env))[-1]
    parts = _parts(base)  # of a `TaskEnv`; the text is the same whether it has a task now or not
    inside = f" Nor has its sampler, {type(parts[-1]).__name__}, or its task." if parts else ""
    hint = near_name(env, key)
    return f"{type(base).__name__} has no {kind} {key!r}, and no wrapper around it has.{inside}{hint}"
