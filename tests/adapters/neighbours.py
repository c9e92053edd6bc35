"""Packages with which an adapter is compared, if they are installed."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest


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
