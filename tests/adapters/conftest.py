"""Fixtures for the tests of adapters."""

from __future__ import annotations

from typing import Any

import pytest
from conftest import MakeEnv

from adapters.envs import Looped


@pytest.fixture
def make(make_env: MakeEnv) -> Any:
    """Make an adapter for Gymnasium, of three envs."""

    def made(env_fns: Any = (Looped,) * 3, autoreset_mode: Any = "NextStep", **kwargs: Any) -> Any:
        return make_env(list(env_fns), num_cpus=2, **kwargs).to_gymnasium(autoreset_mode)

    return made


@pytest.fixture(params=["a hundred", pytest.param("thousands", marks=[pytest.mark.neighbours, pytest.mark.long])])
def num_steps(request: pytest.FixtureRequest) -> int:
    """For how many steps an adapter is compared with the vector env that it replaces."""
    return 3000 if request.param == "thousands" else 100
