"""Options of `subproc` that are refused, and systems on which it is."""

from __future__ import annotations

import sys
from typing import Any

import pytest

from parallelenv import ParallelEnv
from parallelenv.errors import ArgumentError

NEEDS_SERVER = r"preload=\['wave'\] needs start_method='forkserver', on Linux with /proc.*Leave out preload\."


@pytest.mark.parametrize(
    ("options", "message"),
    [
        *[
            ({name: value}, f"{name}={value!r} must be True or False")
            for name in ("caller_steps", "eventfd")
            for value in (1, None, "yes")
        ],
        ({"start_method": "spwan"}, r"start_method='spwan' is not available here; .* Did you mean 'spawn'\?"),
        ({"preload": "wave"}, r"preload='wave' must be a list of names of modules"),
        ({"preload": ["wave"], "start_method": "spawn"}, NEEDS_SERVER),
        ({"preload": ["wave"], "start_method": "fork"}, NEEDS_SERVER),
        ({"preload": ["no_such"]}, r"preload: no_such cannot be imported \(ModuleNotFoundError: No module named"),
    ],
)
def test_invalid_options_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        ParallelEnv(["CartPole-v1"], "subproc", **options)


def test_systems_without_it_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("parallelenv.backends.subproc.HAS_BELL", False)
    with pytest.raises(ArgumentError, match=r"eventfd=True needs Linux on an x86-64 processor\. Leave it out"):
        ParallelEnv(["CartPole-v1"], "subproc", eventfd=True)
    monkeypatch.setattr(sys, "platform", "win32")
    with pytest.raises(ArgumentError, match="'subproc' needs Linux or macOS.*Use 'thread'"):
        ParallelEnv(["CartPole-v1"], "subproc")
