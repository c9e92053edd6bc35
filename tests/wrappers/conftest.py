"""Wrappers run in the caller: one mode of either kind is enough."""

from __future__ import annotations

import pytest
from conftest import require_mode
from modes import ORACLE, PROCESSES


@pytest.fixture(params=[ORACLE, PROCESSES])
def mode(request: pytest.FixtureRequest) -> str:
    return require_mode(request.param, request)
