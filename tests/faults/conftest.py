"""Rewrites the asserts of the cases, so that they explain failures."""

from __future__ import annotations

import pytest

for _module in ("caller", "columns", "context", "died", "ended", "raised", "surrounded"):
    pytest.register_assert_rewrite(f"faults.{_module}")
