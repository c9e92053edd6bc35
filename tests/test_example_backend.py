"""The complete backend of the documentation passes the whole contract suite."""

from __future__ import annotations

import numpy as np
import pytest
from modes import ORACLE
from scripts import load

from parallelenv import ParallelEnv
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


def test_results_of_example_backend_equal_those_of_dummy_mode() -> None:
    answers = []
    for mode in (ORACLE, PipedBackend):
        with ParallelEnv(["CartPole-v1"] * 3, mode, "restart", num_cpus=2, shared={"table": np.arange(3)}) as env:
            answers.append([env.reset(seed=1), *(env.step([0, 1, step % 2]).states for step in range(60))])
    assert np.array_equal(np.array(answers[0]), np.array(answers[1]))
