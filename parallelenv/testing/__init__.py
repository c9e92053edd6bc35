"""The contract of a backend as a test suite: what any mode, ours or a third party's, must pass.

A third party's tests need no more than this::

    from parallelenv.testing import BackendContract

    class TestMyBackend(BackendContract):
        para_mode = MyBackend  # or a word that an entry point adds
        backend_options = {"address": "..."}  # if it has options

The mode ``dummy`` is the oracle: same seeds and actions give the same answers, bit for bit. The
envs need two workers at the same time; they write files into ``tmp_path``. Needs pytest.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from parallelenv.testing.contract import BackendContract

__all__ = ["BackendContract"]


def __getattr__(name: str) -> Any:
    """Import the suite when it is asked for: workers import the envs from here, and need no pytest (0.15 s)."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from parallelenv.testing.contract import BackendContract

    return BackendContract
