"""What an adapter says when the package that it is for is not there."""

from __future__ import annotations

import sys

import pytest

from parallelenv import ParallelEnv
from parallelenv.errors import MissingDependencyError


def test_a_package_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.startswith("stable_baselines3")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.delitem(sys.modules, "parallelenv.adapters.sb3", raising=False)
    monkeypatch.setitem(sys.modules, "stable_baselines3", None)
    with ParallelEnv(["CartPole-v1"]) as env:
        with pytest.raises(MissingDependencyError, match="pip install stable-baselines3"):
            env.to_sb3()
        env.reset(seed=1)  # it is as it was
        env.step([0])
