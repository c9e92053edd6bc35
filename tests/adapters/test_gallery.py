"""The trainings of the gallery that need torch learn."""

from __future__ import annotations

import pytest
from modes import PROCESSES
from scripts import load

from adapters.neighbours import require, seeded

pytestmark = pytest.mark.neighbours


@pytest.mark.parametrize(
    ("example", "package", "enough"), [("ppo", "torch", 150), ("sb3_ppo", "stable_baselines3", 300)]
)
def test_training_learns(example: str, package: str, enough: float) -> None:
    require(package)
    with seeded(0):
        assert load(f"docs/examples/{example}.py").main(PROCESSES) > enough
