"""The modes by their properties, so that no test outside `tests/backends` names one."""

from __future__ import annotations

import pytest

from parallelenv import registry

ORACLE = "dummy"
"""Steps the envs in the caller's thread; the results of every other mode must equal its own."""
THREADS = "thread"
"""Steps the envs in threads of the caller's process."""
PROCESSES = "subproc"
"""Steps the envs in worker processes. The only mode with ``caller_steps``, ``start_method`` and ``eventfd``."""
RAY = "ray"
"""Steps the envs in Ray actors."""
RAY_POOLS = "ray-subproc"
"""Steps the envs in worker processes, which belong to Ray actors."""

MODES = registry.known_modes()
IN_CALLER = (ORACLE, THREADS)
"""The envs live in the caller's process."""
ON_RAY = (RAY, RAY_POOLS)
IN_WORKERS = (PROCESSES, *ON_RAY)
"""The envs live in other processes."""
LOCAL = (*IN_CALLER, PROCESSES)
"""All that start within milliseconds."""
IN_BACKGROUND = (THREADS, *IN_WORKERS)
"""The envs are stepped while the caller does something else."""


def in_modes(*modes: str) -> pytest.MarkDecorator:
    """Return a mark that runs a test in these modes only, by the fixtures `mode`, `make_env` and `make_pool`."""
    return pytest.mark.parametrize("mode", modes, indirect=True)


here_and_in_processes = in_modes(ORACLE, PROCESSES)
"""For code that all modes share except for the pickling of messages: one mode of either kind is enough."""
