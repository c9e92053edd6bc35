"""Packages with which an adapter is compared, if they are installed, and pairs that must return the same results."""

from __future__ import annotations

import copy
import os
from collections.abc import Iterator
from contextlib import contextmanager
from operator import attrgetter
from typing import Any

import numpy as np
import pytest

from parallelenv.results import difference


def require(module: str) -> Any:
    """Return a module of the extra `neighbours`; skip the test if it is missing, unless that is forbidden.

    Environment variables that its import sets are restored: with EnvPool's ``MPLBACKEND`` kernels would show no plots.
    """
    before = dict(os.environ)
    reason = f"{module} is missing: pip install 'parallelenv[neighbours]'"
    try:
        return pytest.importorskip(module, reason=reason)
    except pytest.skip.Exception:
        if os.environ.get("PARALLELENV_REQUIRE_NEIGHBOURS") == "1":
            pytest.fail(reason)
        raise
    finally:
        os.environ.clear()
        os.environ.update(before)


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Seed the global random number generators, and restore them afterwards.

    In the block torch computes in one thread: for networks this small a second one gains nothing, and it took ten
    times as long when other processes needed the cores.
    """
    torch = require("torch")
    drawn, num_threads = np.random.get_state(), torch.get_num_threads()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        np.random.seed(seed)
        torch.set_num_threads(1)
        try:
            yield
        finally:
            torch.set_num_threads(num_threads)
            np.random.set_state(drawn)


class Twins:
    """An adapter, or a wrapper around it, and the same of the vector env that it replaces.

    Each method is called on both, with arguments of its own, since some wrappers write into them.
    """

    def __init__(self, ours: Any, theirs: Any) -> None:
        self.ours = ours
        self.theirs = theirs

    def __getattr__(self, name: str) -> Any:
        def both(*args: Any, **kwargs: Any) -> Any:
            given = copy.deepcopy((args, kwargs))
            ours, theirs = getattr(self.ours, name)(*args, **kwargs), getattr(self.theirs, name)(*given[0], **given[1])
            compare(comparable(ours), comparable(theirs))
            return ours

        return both

    def same(self, *names: str) -> None:
        """Fail if an attribute differs."""
        for name in names:
            compare(*map(attrgetter(name), (self.ours, self.theirs)))


def compare(ours: Any, theirs: Any) -> None:
    assert difference(ours, theirs) is None, difference(ours, theirs)


def comparable(answer: Any) -> Any:
    """Return a result without the durations of episodes, which differ in every run, and with plain dicts."""
    if not isinstance(answer, tuple):
        return dict(answer) if isinstance(answer, dict) else answer
    infos = answer[-1] if isinstance(answer[-1], list) else [answer[-1]]
    for info in infos:
        if isinstance(info, dict):
            info.get("episode", {}).pop("t", None)
    return tuple(dict(part) if isinstance(part, dict) else part for part in answer)
