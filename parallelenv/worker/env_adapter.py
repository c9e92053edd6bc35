"""Gives all envs the same interface, whether they follow Gymnasium's API or an older one."""

from __future__ import annotations

import contextlib
import inspect
import threading
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

import gymnasium
from gymnasium.spaces import Dict, Tuple

from parallelenv.contract.attributes import ABSENT, defines, look_up
from parallelenv.contract.env_specs import is_env, layers
from parallelenv.contract.error_text import near_attribute, show
from parallelenv.contract.spaces import Action, Env, Info, Space, State, Structure
from parallelenv.errors import AbsentAttributeError, EnvContractError

EnvStep = tuple[State, Any, bool, bool, Info]
_DRAWING = threading.RLock()
"""A lock that is held while an env renders: if two threads draw with pygame at once, one in six frames is wrong."""


class Resettable:
    """Resets and steps an env, whether it follows Gymnasium's API or an older one.

    As in older APIs, an env's ``step`` may return ``(state, reward, done, info)``, its ``reset`` may return only the
    state, and its ``reset`` may lack the arguments ``seed`` and ``options``.

    Attributes:
        oddity: Two clauses for a warning about a `gymnasium.Env` that behaves as in an older API: what it does, and the
            consequence. Empty for all other envs.
    """

    def __init__(self, env: Env) -> None:
        self.env = env
        self.oddity: tuple[str, str] | tuple[()] = ()
        names, takes_any = _parameters(env.reset)
        lacking = [] if takes_any else [name for name in ("seed", "options") if name not in names]
        is_gymnasium = isinstance(env, gymnasium.Env)
        self._takes_seed, self._takes_options = "seed" not in lacking, "options" not in lacking
        self._is_old = bool(lacking) or not is_gymnasium
        self.step: Callable[[Action], EnvStep] = self._old_step if self._is_old else env.step
        # ``seed`` and ``options`` are passed as None only if ``reset`` names them: wrappers pass on whatever they get.
        named = () if self._is_old else sorted({"seed", "options"} & names)
        self._not_given: Info = dict.fromkeys(named)
        self._has_given_info = False  # whether the latest reset returned (state, info), whose state is not such a pair
        if lacking and is_gymnasium:
            seeding = "" if self._takes_seed else ", and a seed goes to seed(), or to np_random"
            self.oddity = f"its reset() takes no {' and no '.join(lacking)}", f"It is reset without{seeding}"

    def reset(self, seed: int | None, options: Info | None, space: Space | None = None) -> tuple[State, Info]:
        """Reset the env; return the first state and the info, which is empty if the env returns only the state.

        If the env may return the state alone, ``space``, the observation space of all envs, or else the env's own
        decides whether a tuple of two whose second item is a dict is ``(state, info)`` or only a state.
        """
        arguments = {**self._not_given}
        if seed is not None:
            if self._takes_seed:
                arguments["seed"] = seed
            elif callable(look_up(self.env, "seed")):
                self.env.seed(seed)
            elif isinstance(self.env, gymnasium.Env):
                gymnasium.Env.reset(self.env.unwrapped, seed=seed)  # sets np_random and does nothing else
        if options is not None and self._takes_options:
            arguments["options"] = options
        elif options:
            raise EnvContractError(
                f"reset() of {type(self.env).__name__} takes no options, but options={show(options)} were given."
            )
        return self._state_and_info(self.env.reset(**arguments), space)

    def _state_and_info(self, result: Any, space: Space | None) -> tuple[State, Info]:
        if _is_pair(result):
            if not self._is_old:
                return result  # type: ignore[no-any-return]
            has_info = not _is_state(result, look_up(self.env, "observation_space", None) if space is None else space)
            self._has_given_info = has_info and not _is_pair(result[0])
            return result if has_info else (result, {})
        self._has_given_info = False
        if not self._is_old:
            if isinstance(result, tuple) and len(result) == 2 and result[1] is None:
                return result[0], {}
            if isinstance(result, tuple) and not isinstance(look_up(self.env, "observation_space", None), Tuple):
                raise EnvContractError(
                    f"reset() of {type(self.env).__name__} returned a tuple of {len(result)}; a gymnasium.Env returns "
                    "(state, info), where info is a dict."
                )
            self.oddity = "its reset() returned the state alone, not (state, info)", "The info is taken to be empty"
        return result, {}

    def five(self, result: Any) -> EnvStep:
        """Return a result of `step` as five items.

        If it has four, also replace `step`, so that later steps return five.
        """
        if isinstance(result, tuple) and len(result) == 4:
            self.step = self._old_step
            self.oddity = (
                "its step() returned four items, not (state, reward, terminated, truncated, info)",
                "Its done counts as truncated if info['TimeLimit.truncated'] is true, else as terminated",
            )
            return _split(result)
        if isinstance(result, tuple) and len(result) == 5:  # a named tuple
            return result
        size = f" of {len(result)}" if hasattr(result, "__len__") else ""
        raise EnvContractError(
            f"step() returned a {type(result).__name__}{size}; a gymnasium.Env returns (state, reward, terminated, "
            "truncated, info). Four items, (state, reward, done, info), are also accepted."
        )

    def _old_step(self, action: Action) -> EnvStep:
        result = _split(self.env.step(action))
        if self._has_given_info and isinstance(result, tuple) and result and _is_pair(result[0]):
            raise EnvContractError(
                f"step() returned the state {show(result[0])}, a tuple of two whose second item is a dict, but such a "
                "tuple from reset() is taken to be (state, info). Return (state, {}) from reset(), or declare "
                "observation_space."
            )
        return result


def _is_pair(result: object) -> bool:
    return isinstance(result, tuple) and len(result) == 2 and isinstance(result[1], dict)


def _split(result: Any) -> EnvStep:
    if not isinstance(result, tuple) or len(result) != 4:
        return result
    state, reward, done, info = result
    return state, reward, *split_done(done, info), info


def _is_state(pair: tuple[Any, ...], space: Space | None) -> bool:
    """Return whether a tuple ``(x, dict)`` is a state of this space; otherwise, it is a state ``x`` and an info."""
    if not isinstance(space, Tuple) or len(space.spaces) != 2 or not isinstance(space.spaces[1], Dict):
        return False
    structure = Structure(space)
    return _has_parts(structure, pair) and not _has_parts(structure, pair[0])


def _has_parts(structure: Structure, value: object) -> bool:
    try:
        structure.split(value)  # `Space.contains` would warn of values that are not arrays, and takes longer
    except (LookupError, TypeError):
        return False
    return True


class CallsOnly(Resettable):
    """Wraps an object that lacks ``reset`` or ``step`` and supports only method calls and attributes."""

    def __init__(self, env: Env) -> None:
        self.env, self.oddity = env, ()
        self.step = self.reset = self._refuse  # type: ignore[method-assign,assignment]

    def _refuse(self, *_: object) -> NoReturn:
        raise AbsentAttributeError(f"{type(self.env).__name__} lacks reset() or step().")


def split_done(done: object, info: object) -> tuple[bool, bool]:
    """Return the flags ``terminated`` and ``truncated`` that correspond to the single flag ``done`` of older APIs."""
    is_cut = bool(done) and isinstance(info, dict) and bool(info.get("TimeLimit.truncated", False))
    return bool(done) and not is_cut, is_cut


def adapt(env: Env) -> Resettable:
    """Return the object through which a host uses an env."""
    return Resettable(env) if is_env(env) else CallsOnly(env)


def draws_by_mode(env: Env) -> bool:
    """Return whether an env renders with ``render(mode="rgb_array")``, as in older APIs, and has no ``render_mode``."""
    return look_up(env, "render_mode", None) is None and "mode" in _parameters(look_up(env, "render"))[0]


@contextlib.contextmanager
def alone_while_drawing() -> Iterator[None]:
    """Run the ``with`` block while no other thread draws."""
    is_alone = _DRAWING.acquire(timeout=10.0)  # a thread that holds the lock for longer counts as hung
    try:
        yield
    finally:
        if is_alone:
            _DRAWING.release()


def _parameters(function: Any) -> tuple[set[str], bool]:
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # a builtin without a signature
        return set(), False
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)
    return {parameter.name for parameter in parameters}, takes_any


def wrappers(env: Env) -> list[Env]:
    """Return an env's wrappers, from the outermost inwards."""
    return list(layers(env))[:-1]


def _owners(env: Env) -> tuple[list[Env], list[Env]]:
    """Return the objects that may have an attribute: the layers of an env, and its parts if it is a `TaskEnv`."""
    found = list(layers(env))
    of_base = getattr(type(found[-1]), "attribute_owners", None)
    return found, [] if of_base is None else [part for part in of_base(found[-1]) if part is not None]


def get_attribute(env: Env, key: str) -> tuple[Any] | None:
    """Return the attribute in a one-tuple, or ``None`` if it does not exist."""
    first, *rest = key.split(".")
    value = look_up(env, first)
    if value is ABSENT:
        wrapped, parts = _owners(env)
        found = (look_up(owner, first) for owner in (*wrapped[1:], *parts))
        value = next((value for value in found if value is not ABSENT), ABSENT)
        if value is ABSENT and callable(ask := look_up(wrapped[-1], "get_env_attr")):
            try:
                answer = ask(first)
            except AttributeError as error:
                if error.name not in (None, first):  # not about the attribute, but a mistake inside
                    raise
                answer = None
            value = ABSENT if answer is None else answer  # such envs return None for an absent attribute
    for name in rest:
        value = ABSENT if value is ABSENT else look_up(value, name)
    return None if value is ABSENT else (value,)


def get_existing(env: Env, key: str, kind: str = "attribute") -> Any:
    """Return the attribute ``key`` of an env. ``kind`` is what the error message calls it, such as ``"method"``."""
    found = get_attribute(env, key)
    if found is None:
        wrapped, parts = _owners(env)  # parts of a `TaskEnv`; the text is the same with and without a current task
        inside = f" Neither has its sampler, {type(parts[-1]).__name__}, or its task." if parts else ""
        raise AbsentAttributeError(
            f"{type(wrapped[-1]).__name__} has no {kind} {key!r}, and no wrapper around it has.{inside}"
            f"{near_name(env, key)}"
        )
    return found[0]


def set_attribute(env: Env, key: str, value: Any) -> bool:
    """Set an attribute on the layer, task or sampler that already has it.

    The attribute is not read, because reading a property runs code of the env.

    Returns:
        ``True`` if the attribute is known to be new.
    """
    *way, name = key.split(".")
    if way:
        found = get_attribute(env, ".".join(way))
        if found is None:
            raise AttributeError(f"{key!r} cannot be set: the env has no attribute {'.'.join(way)!r}.")
        is_new = not defines(found[0], name) and look_up(found[0], name) is ABSENT
        setattr(found[0], name, value)
        return is_new
    wrapped, parts = _owners(env)
    owners = (*wrapped, *parts)
    # First those that define it: a wrapper may have a `__getattr__` that passes on what the env inside defines.
    owner = next((owner for owner in owners if defines(owner, name)), None)
    if owner is None:
        owner = next((owner for owner in owners if look_up(owner, name) is not ABSENT), None)
    if owner is None and callable(set_through := look_up(wrapped[-1], "set_env_attr")):
        set_through(name, value)
        return False
    setattr(wrapped[-1] if owner is None else owner, name, value)
    return owner is None


def get_method(env: Env, key: str) -> Any:
    """Return a method of an env."""
    found = get_existing(env, key, "method")
    if not callable(found):
        raise AbsentAttributeError(
            f"{key!r} of {type(list(layers(env))[-1]).__name__} is of type {type(found).__name__}, not a method. "
            f"Read it with get_env_attr({key!r})."
        )
    return found


def near_name(env: Env, key: str) -> str:
    """Return a hint that names a similar attribute, with a leading space, or an empty string if there is none."""
    way, _, name = key.rpartition(".")
    if not way:
        wrapped, parts = _owners(env)
        return near_attribute(name, *wrapped, *parts)
    found = get_attribute(env, way)
    return near_name(env, way) if found is None else near_attribute(name, *found)
