"""Modes of third parties: a class, or a name added by an entry point."""

from __future__ import annotations

from importlib.metadata import EntryPoint
from typing import get_args
from unittest.mock import Mock

import pytest
from modes import MODES, ORACLE, THREADS

from parallelenv import ParallelEnv, registry
from parallelenv.backends.dummy import DummyBackend
from parallelenv.errors import ArgumentError


class Louder(DummyBackend):
    """A backend of a third party."""

    def __init__(self, *, volume: int = 1) -> None:
        self.volume = volume


class SubprocVecEnv:
    """Has the methods of a backend that have no default."""

    launch, allocate, wait, close = (getattr(DummyBackend, name) for name in ("launch", "allocate", "wait", "close"))


def add_mode(monkeypatch: pytest.MonkeyPatch, word: str, target: str) -> None:
    points = {registry.ENTRY_POINT_GROUP: [EntryPoint(word, target, registry.ENTRY_POINT_GROUP)]}
    monkeypatch.setattr(registry, "entry_points", lambda group: points[group])


def test_para_mode_type_lists_every_known_word() -> None:
    words, *_others = get_args(registry.ParaMode)
    assert get_args(words) == registry.known_words()


def test_backend_of_another_package_is_a_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    add_mode(monkeypatch, "louder", f"{__name__}:Louder")
    assert registry.known_modes() == (*MODES, "louder")
    for mode, name in (Louder, "Louder"), ("louder", "louder"):
        with ParallelEnv(["CartPole-v1"] * 2, mode, volume=3) as env:
            assert env.reset(seed=0).shape == (2, 4)
            assert f"para_mode='{name}'" in repr(env)
        with pytest.raises(ArgumentError, match=f"volum=3 is not an option of para_mode='{name}'.* mean 'volume'"):
            ParallelEnv(["CartPole-v1"], mode, volum=3)


@pytest.mark.parametrize("target", ["SubprocVecEnv", "add_mode"])
def test_anything_that_is_not_a_backend_is_refused(monkeypatch: pytest.MonkeyPatch, target: str) -> None:
    reason = rf"is <(class|function) .*{target}.*, which does not derive from parallelenv\.contract\.protocol\.Backend"
    add_mode(monkeypatch, "louder", f"{__name__}:{target}")
    with pytest.raises(ArgumentError, match=f"para_mode='louder' {reason}"):
        ParallelEnv(["CartPole-v1"], "louder")
    if target == "SubprocVecEnv":
        with pytest.raises(ArgumentError, match=f"para_mode='{target}' {reason}.*The equivalent here is .subproc."):
            ParallelEnv(["CartPole-v1"], SubprocVecEnv)  # type: ignore[arg-type]


def test_built_in_mode_is_found_without_a_search_through_installed_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "entry_points", Mock(side_effect=AssertionError))
    ParallelEnv(["CartPole-v1"], ORACLE).close()


def test_import_error_within_a_backend_is_raised_unchanged(monkeypatch: pytest.MonkeyPatch) -> None:
    error = ModuleNotFoundError("No module named 'something_else'", name="something_else")
    monkeypatch.setattr(registry, "import_module", Mock(side_effect=error))
    with pytest.raises(ModuleNotFoundError, match="something_else"):
        registry.load_backend(THREADS)
