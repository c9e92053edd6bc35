"""Every mode passes the contract suite."""

from __future__ import annotations

import pytest
from conftest import needs_ray
from modes import PROCESSES, RAY, here_and_in_processes, in_modes

from parallelenv.engine.engine import Engine
from parallelenv.testing import BackendContract


class TestContract(BackendContract):
    @pytest.fixture(autouse=True)
    def _choose(self, mode: str) -> None:
        self.para_mode = mode
        self.starts_slowly = needs_ray(mode)


@in_modes(RAY)
class TestContractByRaysCalls(TestContract):
    """With Ray calls, as in a cluster whose actors are on other machines."""

    backend_options = {"direct": False}  # noqa: RUF012 (as a third party would write it)


@in_modes(PROCESSES)
class TestContractByPipes(TestContract):
    """Without a bell, as on systems that have none."""

    backend_options = {"eventfd": False}  # noqa: RUF012 (as a third party would write it)


@here_and_in_processes
class TestContractWithoutPlans(TestContract):
    """Every step takes the general way."""

    @pytest.fixture(autouse=True)
    def _switch_off(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(Engine, "plans_steps", False)
