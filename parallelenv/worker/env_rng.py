"""The generators that a whole process shares, ``random``'s, ``numpy.random``'s and torch's, separate for each env.

They are exchanged at the beginning and end of each command to a host, in 50 us, and from env to env, in 15 us.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from parallelenv.contract.interrupts import DeferSigint
from parallelenv.contract.spaces import tensors

_Bits = np.random.MT19937
_state: Any = _Bits.state
_numpys: Any = np.random  # its stubs lack two documented functions


class _OwnBits(_Bits):
    """The bit generator of ``numpy.random`` while it is an env's turn.

    Exchanging it takes 0.3 us, but loses the second of two normal numbers that are drawn at a time, which is only in
    the state. Reading and writing the full state takes 40 us each, so its 624 words can be left out.
    """

    is_brief = False

    @property
    def state(self) -> Any:
        """See `numpy.random.MT19937`; without the words if ``is_brief``."""
        return {"bit_generator": "MT19937", "state": {}} if self.is_brief else _state.__get__(self)

    @state.setter
    def state(self, value: Any) -> None:
        if not self.is_brief:
            _state.__set__(self, value)


class EnvGenerators:
    """The state of the generators of one env.

    Args:
        seed: The env's seed, until it is reset with one; ``None``: a seed from the system.
    """

    def __init__(self, seed: int | None) -> None:
        self._seed = random.SystemRandom().getrandbits(32) if seed is None else seed
        self._plain: Any = None  # of `random`; None before the first call
        self._bits: Any = None
        self._normal: Any = None
        self._tensor: Any = None  # of torch; None until it is imported

    def run(self, call: Callable[..., Any], *arguments: Any) -> Any:
        """Call a function with them instead of the process's own, within `put_back`."""
        if self._plain is None:
            _numpys.set_bit_generator(_OwnBits())
            self.seed(self._seed)
        else:
            random.setstate(self._plain)
            _numpys.set_bit_generator(self._bits)
            if self._normal["has_gauss"]:
                _within(self._bits, np.random.set_state, self._normal)
        torch = _torch()
        if torch is not None and self._tensor is None:
            torch.manual_seed(self._seed % 2**64)
        elif torch is not None:
            torch.set_state(self._tensor)
        try:
            return call(*arguments)
        finally:
            self._plain = random.getstate()
            self._bits = _numpys.get_bit_generator()  # an env may have set another one
            self._normal = _within(self._bits, np.random.get_state, False)
            self._tensor = None if torch is None else torch.get_state()

    def seed(self, seed: int) -> None:
        """Seed them, during `run`, like ``random.seed``, ``numpy.random.seed`` and torch's generator."""
        self._seed = seed
        random.seed(seed)
        words = [seed >> shift & 0xFFFFFFFF for shift in range(0, seed.bit_length(), 32)]
        np.random.seed(seed if seed < 2**32 else words)
        torch = _torch()
        if torch is not None:
            torch.manual_seed(seed % 2**64)

    def save(self) -> Any:
        """Return their state, during `run`. It can be pickled."""
        torch = _torch()
        tensor = None if torch is None else torch.get_state()
        return self._seed, random.getstate(), np.random.get_state(legacy=False), tensor

    def load(self, saved: Any) -> None:
        """Restore a state, during `run`."""
        self._seed, plain, numpys, tensor = saved
        random.setstate(plain)
        np.random.set_state(numpys)
        torch = _torch()
        if torch is not None and tensor is not None:
            torch.set_state(tensor)


@contextlib.contextmanager
def put_back() -> Iterator[None]:
    """Restore the process's own state of the generators at the end."""
    torch = _torch()
    plain, bits, numpys = random.getstate(), _numpys.get_bit_generator(), np.random.get_state(legacy=False)
    tensor = None if torch is None else torch.get_state()
    try:
        yield
    finally:
        with DeferSigint():
            random.setstate(plain)
            _numpys.set_bit_generator(bits)
            if numpys["has_gauss"]:
                np.random.set_state(numpys)
            if torch is not None:
                torch.set_state(tensor)


def _within(bits: Any, call: Callable[[Any], Any], argument: Any) -> Any:
    """Read or write a state, without its words if it is an `_OwnBits`."""
    if type(bits) is not _OwnBits:
        return call(argument)
    bits.is_brief = True
    try:
        return call(argument)
    finally:
        bits.is_brief = False


def _torch() -> Any:
    """Return torch's generator for the CPU if torch is imported."""
    return getattr(tensors(), "default_generator", None)
