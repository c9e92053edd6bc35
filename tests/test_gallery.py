"""The trainings of the gallery learn. Those that need torch are in tests/adapters/test_gallery.py."""

from __future__ import annotations

import pytest
from modes import ORACLE, PROCESSES, RAY, in_modes
from scripts import load


@in_modes(ORACLE, PROCESSES)
def test_evolution_strategy_solves_cartpole(mode: str) -> None:
    means = load("docs/examples/evolution_strategy.py").main(mode)
    assert means[0] < 100
    assert means[7] == pytest.approx(491, abs=0.5)  # the same in every mode


@in_modes(ORACLE, PROCESSES)
def test_successive_halving_finds_an_optimiser_that_finds_the_minimum(mode: str) -> None:
    assert load("docs/examples/optimisers.py").main(mode) < 1e-9


@pytest.mark.slow
def test_population_on_ray_learns(capsys: pytest.CaptureFixture[str]) -> None:
    assert load("docs/examples/population.py").main(RAY) > 150
    assert capsys.readouterr().out.startswith("round 0: best 31, median")
