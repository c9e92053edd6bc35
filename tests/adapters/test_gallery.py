"""The trainings of the gallery that need torch learn."""

from __future__ import annotations

import pytest
from modes import PROCESSES
from scripts import load

from adapters.neighbours import require, seeded

pytestmark = pytest.mark.neighbours


def test_ppo_on_gymnasium_calls_learns() -> None:
    require("torch")
    with seeded(0):
        assert load("docs/examples/ppo.py").main(PROCESSES) > 150


def test_ppo_of_stable_baselines_learns() -> None:
    require("stable_baselines3")
    with seeded(0):
        assert load("docs/examples/sb3_ppo.py").main(PROCESSES) > 300
