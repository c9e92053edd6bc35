"""Fixtures for the tests of adapters."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from conftest import MakeEnv

from adapters.envs import Looped
from adapters.neighbours import require
from parallelenv import ParallelEnv

Adapter = Callable[[ParallelEnv], Any]
OF_SB3 = pytest.param("sb3", marks=pytest.mark.neighbours)


@pytest.fixture
def make(make_env: MakeEnv) -> Any:
    """Make an adapter for Gymnasium, of three envs."""

    def made(env_fns: Any = (Looped,) * 3, autoreset_mode: Any = "NextStep", **kwargs: Any) -> Any:
        return make_env(list(env_fns), num_cpus=2, **kwargs).to_gymnasium(autoreset_mode)

    return made


@pytest.fixture(params=["gymnasium", "tianshou", OF_SB3])
def adapted(request: pytest.FixtureRequest) -> Adapter:
    """Each adapter in turn."""
    if request.param == "sb3":
        require("stable_baselines3.common.vec_env")
    adapter: Adapter = getattr(ParallelEnv, f"to_{request.param}")
    return adapter


@pytest.fixture(params=["a hundred", pytest.param("thousands", marks=[pytest.mark.neighbours, pytest.mark.long])])
def num_steps(request: pytest.FixtureRequest) -> int:
    """For how many steps an adapter is compared with the vector env that it replaces."""
    return 3000 if request.param == "thousands" else 100
