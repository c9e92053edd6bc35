"""The error of an adapter whose package is not installed."""

from __future__ import annotations

import sys
from typing import Any

import pytest

from parallelenv import ParallelEnv
from parallelenv.errors import MissingDependencyError


class _Nowhere:
    """An import hook that hides Stable-Baselines3."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> None:
        if name.split(".", maxsplit=1)[0] == "stable_baselines3":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


def test_error_names_the_missing_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "parallelenv.adapters.sb3", raising=False)
    monkeypatch.setattr(sys, "meta_path", [_Nowhere(), *sys.meta_path])
    for name in [name for name in sys.modules if name.split(".")[0] == "stable_baselines3"]:
        monkeypatch.delitem(sys.modules, name)
    with ParallelEnv(["CartPole-v1"]) as env:
        with pytest.raises(MissingDependencyError, match="pip install stable-baselines3"):
            env.to_sb3()
        env.reset(seed=1)  # still usable
        env.step([0])
