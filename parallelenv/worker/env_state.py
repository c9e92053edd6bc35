"""Saves and restores the state of an env, and gives each env its own state of the global random generators.

The *global generators* are the process-wide generators of ``random``, ``numpy.random`` and torch. With
``seed_globals=True``, each env has its own state of these generators. The states are swapped at the start and end of
each command to a host, which takes 60 us in all, and between envs, which takes 15 us.
"""

from __future__ import annotations

import contextlib
import io
import itertools
import pickle
import random
from collections.abc import Callable, Iterator
from typing import Any

import cloudpickle
import numpy as np
from gymnasium.utils import EzPickle

from parallelenv.contract.attributes import look_up
from parallelenv.contract.copying import Pickler, Unpickler, loads
from parallelenv.contract.env_specs import is_vector_env, layers
from parallelenv.contract.interrupts import DeferSignals, Ignore, signal_behind
from parallelenv.contract.spaces import Env
from parallelenv.contract.tensors import imported_torch
from parallelenv.errors import EnvContractError


def _dump_state(value: object, env: Env) -> bytes:
    """Pickle a part of an env's state; replace references to the env and its wrappers with their indices in `layers`.

    A wrapper may, for example, keep a method of the env, or a function that uses the env. After `_load_state`, they
    refer to the env that the state is loaded into, not to a copy of the env that was saved.
    """
    file = io.BytesIO()
    indices = {id(layer): index for index, layer in enumerate(layers(env))}
    pickler = Pickler(file, protocol=pickle.HIGHEST_PROTOCOL)
    pickler.persistent_id = lambda part: indices.get(id(part))
    pickler.dump(value)
    return file.getvalue()


def _load_state(pickled: bytes, env: Env) -> Any:
    """Return the value that `_dump_state` pickled, for another env with the same layers."""
    unpickler: Any = Unpickler(io.BytesIO(pickled))
    unpickler.persistent_load = list(layers(env)).__getitem__
    return unpickler.load()


def _attributes(layer: object) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the attributes of a wrapper: those in its ``__dict__``, and those in slots."""
    found: Any = object.__getstate__(layer)  # without a class's own `__getstate__`
    own, in_slots = found if isinstance(found, tuple) else (found, None)
    return dict(own or {}), dict(in_slots or {})


def _set_attributes(layer: object, own: dict[str, Any], in_slots: dict[str, Any], left: set[str]) -> None:
    """Set the attributes of a wrapper, and delete all others except those in ``left``, which could not be saved."""
    now, in_slots_now = _attributes(layer)
    for name in now.keys() - own.keys() - left:
        del vars(layer)[name]
    if own:  # if all attributes are in slots, there is no `__dict__`
        vars(layer).update(own)
    for name in in_slots_now.keys() - in_slots.keys() - left:
        object.__delattr__(layer, name)
    for name, value in in_slots.items():
        object.__setattr__(layer, name, value)


def save_env(env: Env, generators: Any, seed: int | None) -> bytes | None:
    """Return the state of an env, ``generators`` and ``seed`` as one pickle, or ``None`` if the env cannot be saved."""
    *wrappers, base = layers(env)
    if callable(look_up(base, "get_state")) and callable(look_up(base, "set_state")):
        of_wrappers = []  # for each wrapper, its attributes, and the names of those that cannot be pickled
        for wrapper in wrappers:
            both, left = _attributes(wrapper), set[str]()
            for attributes in both:
                for name, value in list(attributes.items()):
                    with Ignore(Exception):
                        _load_state(_dump_state(value, env), env)
                        continue
                    left.add(name)
                    del attributes[name]
            of_wrappers.append((*both, left))
        generator = getattr(base, "_np_random", None), getattr(base, "_np_random_seed", None)
        state = _dump_state((base.get_state(), generator, of_wrappers), env)
        names = [type(wrapper).__qualname__ for wrapper in wrappers]
        return cloudpickle.dumps((False, (names, state), generators, seed))  # type: ignore[no-any-return]
    sub_envs = getattr(base, "envs", ()) if is_vector_env(env) else ()
    every_layer = (*wrappers, base, *(layer for sub_env in sub_envs for layer in layers(sub_env)))
    if any(getattr(type(layer), "__getstate__", None) is EzPickle.__getstate__ for layer in every_layer):
        return None  # pickle would keep only the constructor's arguments
    try:
        return cloudpickle.dumps((True, env, generators, seed))  # type: ignore[no-any-return]
    except Exception as error:  # pickling runs user code; the caller then reports that there is no state
        if signal_behind(error) is not None:
            raise
        return None


def load_env(env: Env, saved: bytes, takes_generators: bool) -> tuple[Any, Any, int | None]:
    """Restore a state that `save_env` returned.

    Returns:
        The env, which is a new object if the whole env was pickled, the saved state of the global generators, and the
        saved seed.
    """
    is_whole, content, generators, seed = loads(saved)
    if generators is not None and not takes_generators:
        raise EnvContractError(
            "The state was saved with seed_globals=True, and includes that of the env's own generators. Make the "
            "ParallelEnv with seed_globals=True."
        )
    if is_whole:
        name, saved_name = (type(getattr(one, "unwrapped", one)).__qualname__ for one in (env, content))
        if name != saved_name:
            raise EnvContractError(
                f"The state is of a {saved_name}, but this env is a {name}. Make the same envs as when it was saved."
            )
        names, saved_names = map(_wrapper_names, (env, content))
    else:
        saved_names, pickled = content
        *wrappers, base = layers(env)
        names = [type(layer).__qualname__ for layer in wrappers]
    if names != saved_names:
        raise EnvContractError(
            f"The state is of an env inside {saved_names}, but this one is inside {names}. Use the same "
            "wrappers as when it was saved."
        )
    if is_whole:
        return content, generators, seed
    state, (np_random, np_random_seed), of_wrappers = _load_state(pickled, env)
    base.set_state(state)
    if np_random is not None:
        # Without its seed, Gymnasium would replace the generator.
        base._np_random, base._np_random_seed = np_random, np_random_seed
    for layer, saved_attributes in zip(wrappers, of_wrappers, strict=True):
        _set_attributes(layer, *saved_attributes)
    return env, generators, seed


def _wrapper_names(env: Env) -> list[str]:
    inner = getattr(env, "unwrapped", env)  # an env without wrappers may also have an attribute ``env``
    return [type(layer).__qualname__ for layer in itertools.takewhile(lambda layer: layer is not inner, layers(env))]


_Bits = np.random.MT19937
_state: Any = _Bits.state
_numpys: Any = np.random  # its stubs lack two documented functions


class _OwnBits(_Bits):
    """The bit generator of ``numpy.random`` while an env runs.

    Replacing the bit generator of ``numpy.random`` takes 0.3 us. However, normally distributed numbers are drawn in
    pairs, and the second number of a pair is stored only in the full state of ``numpy.random``. Reading this state
    takes 40 us, and so does writing it. Most of the state consists of the 624 words of the bit generator. Therefore,
    `state` omits them while ``is_brief`` is true.
    """

    is_brief = False

    @property
    def state(self) -> Any:
        return {"bit_generator": "MT19937", "state": {}} if self.is_brief else _state.__get__(self)

    @state.setter
    def state(self, value: Any) -> None:
        if not self.is_brief:
            _state.__set__(self, value)


class EnvGenerators:
    """One env's own state of the global random generators.

    `run` is called only within `put_back`, and the other methods are called only during `run`.
    """

    def __init__(self, seed: int | None) -> None:
        self._seed = random.SystemRandom().getrandbits(32) if seed is None else seed
        self._python: Any = None  # state of `random`; None before the first `run`
        self._bits: Any = None  # bit generator of `numpy.random`
        self._normal: Any = None  # the rest of the state of `numpy.random`
        self._torch: Any = None  # state of torch's generator; None until torch is imported

    def run(self, call: Callable[..., Any], *arguments: Any) -> Any:
        """Call a function while the global generators have this env's state."""
        if self._python is None:
            _numpys.set_bit_generator(_OwnBits())
            self.seed(self._seed)
        else:
            random.setstate(self._python)
            _numpys.set_bit_generator(self._bits)
            if self._normal["has_gauss"]:
                _within(self._bits, np.random.set_state, self._normal)
        torch = _torch()
        if torch is not None and self._torch is None:
            torch.manual_seed(self._seed % 2**64)
        elif torch is not None:
            torch.set_state(self._torch)
        try:
            return call(*arguments)
        finally:
            self._python = random.getstate()
            self._bits = _numpys.get_bit_generator()  # an env may have set a different one
            self._normal = _within(self._bits, np.random.get_state, False)
            self._torch = None if torch is None else torch.get_state()

    def seed(self, seed: int) -> None:
        """Seed all global generators."""
        self._seed = seed
        random.seed(seed)
        words = [seed >> shift & 0xFFFFFFFF for shift in range(0, seed.bit_length(), 32)]
        np.random.seed(seed if seed < 2**32 else words)
        torch = _torch()
        if torch is not None:
            torch.manual_seed(seed % 2**64)

    def save(self) -> Any:
        """Return the seed and the states of the global generators, in a form that can be pickled."""
        return self._seed, *global_states()

    def load(self, saved: Any) -> None:
        """Restore the seed and the states that `save` returned."""
        self._seed, *states = saved
        set_global_states(*states)


@contextlib.contextmanager
def put_back() -> Iterator[None]:
    """At the end of the block, put the global random generators back into the state that they had at its start."""
    bits, (of_python, of_numpy, of_torch) = _numpys.get_bit_generator(), global_states()
    torch = _torch()
    try:
        yield
    finally:
        with DeferSignals():
            random.setstate(of_python)
            _numpys.set_bit_generator(bits)
            if of_numpy["has_gauss"]:
                np.random.set_state(of_numpy)
            if torch is not None:
                torch.set_state(of_torch)


def global_states() -> tuple[Any, Any, Any]:
    """Return the states of the global generators; the state of torch's is ``None`` if torch is not imported."""
    torch = _torch()
    return random.getstate(), np.random.get_state(legacy=False), None if torch is None else torch.get_state()


def set_global_states(of_python: Any, of_numpy: Any, of_torch: Any) -> None:
    """Restore the states that `global_states` returned."""
    random.setstate(of_python)
    np.random.set_state(of_numpy)
    torch = _torch()
    if torch is not None and of_torch is not None:
        torch.set_state(of_torch)


def _within(bits: Any, call: Callable[[Any], Any], argument: Any) -> Any:
    if type(bits) is not _OwnBits:
        return call(argument)
    bits.is_brief = True
    try:
        return call(argument)
    finally:
        bits.is_brief = False


def _torch() -> Any:
    return getattr(imported_torch(), "default_generator", None)
