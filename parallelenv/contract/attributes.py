"""Attributes of users' objects: an `AttributeError` inside a property does not mean that the attribute is absent.

`hasattr`, and `getattr` with a default, cannot tell the two apart, and `hasattr` runs the property. Use this module for
envs, wrappers, samplers, tasks and policies.
"""

from __future__ import annotations

import inspect
from typing import Any, Final

import gymnasium

ABSENT: Final = object()
_HIDDEN: object = vars(gymnasium.Wrapper).get("_np_random", ABSENT)
"""A property that always raises an `AttributeError`, to hide the generator of the env inside the wrapper."""


def look_up(owner: Any, name: str, default: Any = ABSENT) -> Any:
    """Return an attribute of an object, or ``default`` if the object does not have it.

    Raises:
        AttributeError: If it is raised by the code of a property, and not because the attribute is absent. If a wrapper
            passes the name on to an env that does not have it, the attribute is absent.
    """
    kind: Any = type(owner)
    is_defined = False
    try:
        try:
            return kind.__getattribute__(owner, name)  # `getattr` would replace a property's error by `__getattr__`'s
        except AttributeError:
            found = _defined(owner, name)
            is_slot = inspect.ismemberdescriptor(found) or inspect.isgetsetdescriptor(found)  # and nothing is in it
            is_defined = found is not ABSENT and not is_slot
            if is_defined or not hasattr(kind, "__getattr__"):
                raise
        return kind.__getattr__(owner, name)
    except AttributeError as error:
        inner: Any = error.obj
        is_passed_on = error.name == name and inner is not owner and hasattr(type(inner), "step")
        if not is_passed_on:
            if is_defined or error.name not in (None, name):  # an error about another name is a mistake inside
                raise
            return default
    return look_up(inner, name, default)


def defines(owner: object, name: str) -> bool:
    """Return whether an object or its class defines an attribute, without running any code of the object."""
    return _defined(owner, name) is not ABSENT


def _defined(owner: object, name: str) -> object:
    found = inspect.getattr_static(owner, name, ABSENT)
    return ABSENT if found is _HIDDEN else found
