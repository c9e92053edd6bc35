"""A minute of the soak test, divided among the modes. `make soak` takes ten."""

from __future__ import annotations

import pytest
from conftest import require_mode
from modes import MODES

from .course import Course, format_tallies

_SECONDS = 60 / len(MODES)


@pytest.mark.long
@pytest.mark.timeout(300, method="thread")  # SIGALRM ends calls that hang
@pytest.mark.parametrize("mode", MODES)
def test_soak_finds_no_wrong_result_and_no_leak(mode: str, request: pytest.FixtureRequest) -> None:
    require_mode(mode, request)
    tally = Course(mode, seed=1).run(_SECONDS)
    print(format_tallies({mode: tally}))
    assert (tally["wrong"], tally["leaks"]) == (0, 0)
    assert tally["transitions"] > 0
