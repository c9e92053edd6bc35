"""Modes of third parties: a class, or a name added by an entry point."""

from __future__ import annotations

from importlib.metadata import EntryPoint
from typing import Any, get_args

import pytest
from modes import MODES, THREADS

from parallelenv import ParallelEnv, registry
from parallelenv.backends.dummy import DummyBackend
from parallelenv.errors import ArgumentError


class Louder(DummyBackend):
    """A backend of a third party."""

    def __init__(self, *, volume: int = 1) -> None:
        self.volume = volume


def test_para_mode_type_lists_every_known_word() -> None:
    words, *_others = get_args(registry.ParaMode)
    assert get_args(words) == registry.known_words()


def test_backend_class_can_be_given_as_para_mode() -> None:
    with ParallelEnv(["CartPole-v1"] * 2, Louder, volume=3) as env:
        assert env.reset(seed=0).shape == (2, 4)
        assert "para_mode='Louder'" in repr(env)
    with pytest.raises(ArgumentError, match="volum=3 is not an option of para_mode='Louder'.*Did you mean 'volume'"):
        ParallelEnv(["CartPole-v1"], Louder, volum=3)


def test_class_that_is_not_a_backend_is_refused() -> None:
    class SubprocVecEnv: ...

    with pytest.raises(
        ArgumentError,
        match=r"is a class that lacks plan_workers\(\), .*not a protocol.Backend.*The equivalent here is .subproc.",
    ):
        ParallelEnv(["CartPole-v1"], SubprocVecEnv)  # type: ignore[arg-type]


def test_entry_point_adds_a_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    points = {registry.ENTRY_POINT_GROUP: [EntryPoint("louder", f"{__name__}:Louder", registry.ENTRY_POINT_GROUP)]}
    monkeypatch.setattr(registry, "entry_points", lambda group: points[group])
    assert registry.known_modes() == (*MODES, "louder")
    with ParallelEnv(["CartPole-v1"] * 2, "louder", volume=2) as env:
        assert env.reset(seed=0).shape == (2, 4)


def test_import_error_within_a_backend_is_raised_unchanged(monkeypatch: pytest.MonkeyPatch) -> None:
    def import_module(name: str) -> Any:
        raise ModuleNotFoundError("No module named 'something_else'", name="something_else")

    monkeypatch.setattr(registry, "import_module", import_module)
    with pytest.raises(ModuleNotFoundError, match="something_else"):
        registry.load_backend(THREADS)
