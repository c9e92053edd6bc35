"""The contract of a backend in executable form: what any mode, ours or a third party's, must pass.

A third party's tests need no more than this::

    from parallelenv.testing import BackendContract

    class TestMyBackend(BackendContract):
        para_mode = MyBackend  # or a word that an entry point adds
        backend_options = {"address": "..."}  # if it has options

The mode ``dummy`` is the oracle: same seeds and actions give the same answers, bit for bit. The
envs need two workers at the same time; they write files into ``tmp_path``. Needs pytest.
"""

from __future__ import annotations

import pytest

_PARTS = ("base", "play", "steps", "flights", "calls", "faults")
pytest.register_assert_rewrite(*(f"parallelenv.testing.{part}" for part in _PARTS))  # before they are imported

from parallelenv.testing.calls import CallContract, OwnershipContract  # noqa: E402
from parallelenv.testing.faults import CloseContract, FaultContract  # noqa: E402
from parallelenv.testing.flights import FlightContract  # noqa: E402
from parallelenv.testing.steps import StepContract  # noqa: E402

__all__ = ["BackendContract"]


class BackendContract(StepContract, FlightContract, OwnershipContract, CallContract, FaultContract, CloseContract):
    """All of it. Subclass it with a name that pytest collects.

    Attributes:
        para_mode: What is tested: a word or a backend class.
        backend_options: Options given to it.
        starts_slowly: Whether starting workers takes so long that fewer combinations are tried.
    """
