"""Packages that an adapter is compared with, if they are installed."""

from __future__ import annotations

import os
from typing import Any

import pytest


def require(module: str) -> Any:
    """Return a module of the extra `neighbours`; skip the test where it is missing, unless that is forbidden."""
    reason = f"{module} is missing: pip install 'parallelenv[neighbours]'"
    try:
        return pytest.importorskip(module, reason=reason)
    except pytest.skip.Exception:
        if os.environ.get("PARALLELENV_REQUIRE_NEIGHBOURS") == "1":
            pytest.fail(reason)
        raise
