"""What several tests of adapters get."""

from __future__ import annotations

from typing import Any

import pytest
from conftest import MakeEnv, needs_ray

from adapters.envs import Looped


@pytest.fixture
def make(make_env: MakeEnv) -> Any:
    """Make an adapter for Gymnasium, of three envs."""

    def made(env_fns: Any = (Looped,) * 3, autoreset_mode: Any = "NextStep", **kwargs: Any) -> Any:
        return make_env(list(env_fns), num_cpus=2, **kwargs).to_gymnasium(autoreset_mode)

    return made


@pytest.fixture(params=["hundreds", pytest.param("thousands", marks=[pytest.mark.neighbours, pytest.mark.long])])
def num_steps(mode: str, request: pytest.FixtureRequest) -> int:
    """For how many steps an adapter is compared with what it stands for."""
    if request.param == "thousands":
        return 3000
    return 100 if needs_ray(mode) else 300
