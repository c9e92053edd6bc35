"""The whole suite as one class."""

from __future__ import annotations

import pytest

_PARTS = ("base", "scenario", "steps", "in_flight", "asynchronous", "worker_info", "calls", "faults")
pytest.register_assert_rewrite(*(f"parallelenv.testing.{part}" for part in _PARTS))  # must come before their import

from parallelenv.testing.asynchronous import AsyncContract  # noqa: E402
from parallelenv.testing.calls import CallContract, OwnershipContract  # noqa: E402
from parallelenv.testing.faults import CloseContract, FaultContract  # noqa: E402
from parallelenv.testing.in_flight import InFlightContract  # noqa: E402
from parallelenv.testing.steps import StepContract  # noqa: E402
from parallelenv.testing.worker_info import WorkerInfoContract  # noqa: E402


class BackendContract(
    StepContract,
    InFlightContract,
    AsyncContract,
    WorkerInfoContract,
    OwnershipContract,
    CallContract,
    FaultContract,
    CloseContract,
):
    """All requirements for a backend. Subclass it with a name that pytest collects.

    Attributes:
        para_mode: Mode under test: a word or a backend class.
        backend_options: Options passed to it.
        starts_slowly: Whether workers start slowly, so that fewer combinations are tested.
    """
