"""The state of one env as bytes, and its own random generators.

The process-wide generators of ``random``, ``numpy.random`` and torch can be separate for each env. Their states are
exchanged at the start and end of each command to a host, which takes 50 us, and between envs, which takes 15 us.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterator
from typing import Any

import cloudpickle
import numpy as np
from gymnasium.utils import EzPickle

from parallelenv.contract.copying import loads, pickles
from parallelenv.contract.interrupts import DeferSigint
from parallelenv.contract.spaces import Env
from parallelenv.contract.tensors import imported_torch
from parallelenv.errors import EnvContractError
from parallelenv.worker.env_adapter import layers

_WHOLE, _BY_METHODS = "whole", "said"
"""How an env was saved. Saved states contain these words."""


def save_env(env: Env, generators: Any = None) -> bytes | None:
    """Return the state of an env and of its own global generators, pickled; ``None`` if it cannot be saved.

    If an env has ``get_state()`` and ``set_state(state)``, these are used; its random generator and the state of its
    wrappers, such as the steps that a time limit has counted, are saved as well. Any other env is pickled, unless
    pickle would keep only its constructor's arguments (Gymnasium's `EzPickle`) or fails.
    """
    *wrappers, base = layers(env)
    if callable(getattr(base, "get_state", None)) and callable(getattr(base, "set_state", None)):
        of_wrappers = []  # each wrapper's name, and those of its attributes that can be pickled
        for wrapper in wrappers:
            attributes = {name: value for name, value in vars(wrapper).items() if name != "env" and pickles(value)}
            of_wrappers.append((type(wrapper).__qualname__, attributes))
        content = base.get_state(), getattr(base, "_np_random", None), of_wrappers
        return cloudpickle.dumps((_BY_METHODS, content, generators))  # type: ignore[no-any-return]
    if any(getattr(type(layer), "__getstate__", None) is EzPickle.__getstate__ for layer in (*wrappers, base)):
        return None  # only the constructor's arguments
    try:
        return cloudpickle.dumps((_WHOLE, env, generators))  # type: ignore[no-any-return]
    except Exception:  # noqa: BLE001 (pickling runs user code; the caller then reports that there is no state)
        return None


def load_env(env: Env, saved: bytes, takes_generators: bool) -> tuple[Any, Any]:
    """Restore a state; return the env, or the env that replaces it, and the state of its generators.

    Raises:
        EnvContractError: If the saved env was wrapped differently, or had its own global generators.
    """
    kind, content, *others = loads(saved)
    generators = others[0] if others else None  # older saved states have no state of generators
    if generators is not None and not takes_generators:
        raise EnvContractError(
            "The state was saved with seed_globals=True, and includes that of the env's own generators. Make the "
            "ParallelEnv with seed_globals=True."
        )
    if kind == _WHOLE:
        return content, generators
    state, np_random, of_wrappers = content
    *wrappers, base = layers(env)
    names, saved_names = [type(layer).__qualname__ for layer in wrappers], [name for name, _ in of_wrappers]
    if names != saved_names:
        raise EnvContractError(
            f"The state is of an env inside {saved_names}, but this one is inside {names}. Use the same "
            "wrappers as when it was saved."
        )
    base.set_state(state)
    if np_random is not None:
        base._np_random = np_random
    for layer, (_, attributes) in zip(wrappers, of_wrappers, strict=True):
        vars(layer).update(attributes)
    return env, generators


_Bits = np.random.MT19937
_state: Any = _Bits.state
_numpys: Any = np.random  # its stubs lack two documented functions


class _OwnBits(_Bits):
    """The bit generator of ``numpy.random`` during an env's call.

    Exchanging the bit generator takes 0.3 us, but loses the second of two normal numbers that are drawn at a time,
    because only the state contains it. Reading and writing the full state takes 40 us each, so its 624 words can be
    left out.
    """

    is_brief = False

    @property
    def state(self) -> Any:
        """The state as in `numpy.random.MT19937`, but without the words if ``is_brief``."""
        return {"bit_generator": "MT19937", "state": {}} if self.is_brief else _state.__get__(self)

    @state.setter
    def state(self, value: Any) -> None:
        if not self.is_brief:
            _state.__set__(self, value)


class EnvGenerators:
    """The state of one env's generators, initially derived from the env's seed or from a seed of the system."""

    def __init__(self, seed: int | None) -> None:
        self._seed = random.SystemRandom().getrandbits(32) if seed is None else seed
        self._python: Any = None  # state of `random`'s; None before the first call
        self._bits: Any = None  # `numpy.random`'s bit generator
        self._normal: Any = None  # the rest of the state of `numpy.random`
        self._torch: Any = None  # state of torch's; None until it is imported

    def run(self, call: Callable[..., Any], *arguments: Any) -> Any:
        """Call a function with these generators instead of the process's own, within `put_back`."""
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
        """During `run`, seed the generators like ``random.seed``, ``numpy.random.seed`` and torch's generator."""
        self._seed = seed
        random.seed(seed)
        words = [seed >> shift & 0xFFFFFFFF for shift in range(0, seed.bit_length(), 32)]
        np.random.seed(seed if seed < 2**32 else words)
        torch = _torch()
        if torch is not None:
            torch.manual_seed(seed % 2**64)

    def save(self) -> Any:
        """During `run`, return the state of the generators. It can be pickled."""
        return self._seed, *_global_states()

    def load(self, saved: Any) -> None:
        """During `run`, restore a state."""
        self._seed, of_python, of_numpy, of_torch = saved
        random.setstate(of_python)
        np.random.set_state(of_numpy)
        torch = _torch()
        if torch is not None and of_torch is not None:
            torch.set_state(of_torch)


@contextlib.contextmanager
def put_back() -> Iterator[None]:
    """At the end of the block, restore the process's own state of the generators."""
    bits, (of_python, of_numpy, of_torch) = _numpys.get_bit_generator(), _global_states()
    torch = _torch()
    try:
        yield
    finally:
        with DeferSigint():
            random.setstate(of_python)
            _numpys.set_bit_generator(bits)
            if of_numpy["has_gauss"]:
                np.random.set_state(of_numpy)
            if torch is not None:
                torch.set_state(of_torch)


def _global_states() -> tuple[Any, Any, Any]:
    """Return the states of the generators of ``random``, ``numpy.random`` and, if it is imported, torch."""
    torch = _torch()
    return random.getstate(), np.random.get_state(legacy=False), None if torch is None else torch.get_state()


def _within(bits: Any, call: Callable[[Any], Any], argument: Any) -> Any:
    """Read or write a state; without its words if ``bits`` is an `_OwnBits`."""
    if type(bits) is not _OwnBits:
        return call(argument)
    bits.is_brief = True
    try:
        return call(argument)
    finally:
        bits.is_brief = False


def _torch() -> Any:
    """Return torch's generator for the CPU if torch is imported."""
    return getattr(imported_torch(), "default_generator", None)
