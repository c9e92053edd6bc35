"""The complete backend of the documentation passes the whole contract suite."""

from __future__ import annotations

import pytest
from scripts import load

from parallelenv.testing import BackendContract
from parallelenv.testing.contract import Make

PipedBackend = load("docs/examples/piped_backend.py").PipedBackend


class TestPipedBackend(BackendContract):
    para_mode = PipedBackend
    starts_slowly = True

    @pytest.mark.parametrize("kind", ["mixed"])  # two interpreters start in each test: 1.4 s
    def test_results_equal_those_of_the_oracle(self, kind: str, make: Make, make_oracle: Make) -> None:
        """Its channel sends what `subproc` sends, which is tested with all kinds."""
        super().test_results_equal_those_of_the_oracle(kind, make, make_oracle)
