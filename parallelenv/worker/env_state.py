"""The state of one env as bytes: from its own methods, or all of it if pickle can keep it."""

from __future__ import annotations

from typing import Any

import cloudpickle
from gymnasium.utils import EzPickle

from parallelenv.contract.copying import loads
from parallelenv.contract.env_specs import pickles
from parallelenv.errors import EnvContractError
from parallelenv.worker.env_attributes import layers

_WHOLE, _SAID = "whole", "said"


def save_env(env: Any, generators: Any = None) -> bytes | None:
    """Return the state of an env and of its own global generators, pickled; ``None`` if it cannot be saved.

    If an env has ``get_state()`` and ``set_state(state)``, these are used; its random generator and the state of its
    wrappers, such as the steps that a time limit has counted, are saved as well. Any other env is pickled, unless
    pickle would keep only its constructor's arguments (Gymnasium's `EzPickle`) or fails.
    """
    *wrappers, base = layers(env)
    if callable(getattr(base, "get_state", None)) and callable(getattr(base, "set_state", None)):
        said = base.get_state(), getattr(base, "_np_random", None), [_knowledge(wrapper) for wrapper in wrappers]
        return cloudpickle.dumps((_SAID, said, generators))  # type: ignore[no-any-return]
    if any(_is_forgetful(layer) for layer in (*wrappers, base)):
        return None
    try:
        return cloudpickle.dumps((_WHOLE, env, generators))  # type: ignore[no-any-return]
    except Exception:  # noqa: BLE001 (pickling runs user code; the caller is told that there is no state)
        return None


def load_env(env: Any, saved: bytes, takes_generators: bool = False) -> tuple[Any, Any]:
    """Restore a state; return the env, or the one that replaces it, and the state of its generators.

    Raises:
        EnvContractError: If the state is of an env that was wrapped differently, or had global generators of its own.
    """
    kind, content, *generators = loads(saved)
    own_generators = generators[0] if generators else None  # older saved states have none
    if own_generators is not None and not takes_generators:
        raise EnvContractError(
            "The state was saved with seed_globals=True, and has that of the env's own generators. Make the "
            "ParallelEnv with seed_globals=True, too."
        )
    if kind == _WHOLE:
        return content, own_generators
    state, generator, knowledge = content
    *wrappers, base = layers(env)
    if [type(layer).__qualname__ for layer in wrappers] != [name for name, _ in knowledge]:
        raise EnvContractError(
            f"The state is of an env inside {[name for name, _ in knowledge]}, but this one is inside "
            f"{[type(layer).__qualname__ for layer in wrappers]}. Make the envs as those that were saved."
        )
    base.set_state(state)
    if generator is not None:
        base._np_random = generator
    for layer, (_, known) in zip(wrappers, knowledge, strict=True):
        vars(layer).update(known)
    return env, own_generators


def _knowledge(wrapper: Any) -> tuple[str, dict[str, Any]]:
    """Return a wrapper's name and its attributes that can be pickled, without the env."""
    return type(wrapper).__qualname__, {
        name: value for name, value in vars(wrapper).items() if name != "env" and pickles(value)
    }


def _is_forgetful(layer: Any) -> bool:
    """Whether pickle would rebuild an object from its constructor's arguments."""
    return isinstance(layer, EzPickle) and type(layer).__getstate__ is EzPickle.__getstate__
