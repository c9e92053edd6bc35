"""Nodes that tests share, and a check for leaks."""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from cluster.nodes import Nodes

SIGN = "PARALLELENV_TEST_CLUSTER"
"""Environment variable of all processes that descend from this one, also of those whose parents have exited."""


@pytest.fixture(scope="session")
def cluster() -> Iterator[Nodes]:
    """A cluster which this process has joined."""
    ray = pytest.importorskip("ray")
    with pytest.MonkeyPatch.context() as patch, contextlib.closing(Nodes()) as nodes:
        patch.setenv(SIGN, str(os.getpid()))
        nodes.renew()
        ray.init(address=nodes.cluster.address, logging_level=logging.ERROR, log_to_driver=False)
        yield nodes


@pytest.fixture
def nodes(cluster: Nodes) -> Nodes:
    """A cluster of two nodes with two cores each, none of them taken."""
    cluster.renew()
    return cluster


@pytest.fixture(autouse=True)
def no_leaks(cluster: Nodes) -> Iterator[None]:
    """Fail a test that leaks an actor, a worker, or memory. Ray's own processes are ignored."""
    yield
    deadline = time.monotonic() + 5.0
    while left := [*_processes(), *_memory()]:
        if time.monotonic() > deadline:
            pytest.fail(f"left behind: {left}")
        gc.collect()
        time.sleep(0.05)


def _processes() -> Iterator[str]:
    for process in psutil.process_iter(["cmdline", "environ", "pid"]):
        command = " ".join(process.info["cmdline"] or ())
        is_ours = (process.info["environ"] or {}).get(SIGN) == str(os.getpid())
        is_host = command.startswith(("ray::RayHost", "ray::RelayActor"))
        if is_ours and (is_host or "parallelenv.backends._pipe_host" in command):
            yield f"process {process.info['pid']} ({command[:80]})"


def _memory() -> Iterator[str]:
    for path in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):  # the one that lists them
            if "memfd:parallelenv" in str(path.readlink()):
                yield str(path.readlink())
