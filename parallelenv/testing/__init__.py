"""A test suite for backends. Every mode, built-in or third-party, must pass it.

The tests of a third-party backend need only this::

    from parallelenv.testing import BackendContract

    class TestMyBackend(BackendContract):
        para_mode = MyBackend  # or the name of its entry point
        backend_options = {"address": "..."}  # if it has options

The suite tests what a backend can break: the transport, order and copying of data; the handling of failures, worker
deaths, timeouts and interrupts; and `close`. The mode ``dummy`` is the reference: with the same seeds and actions, the
mode under test must return the same results, bit for bit. The suite needs pytest, and a backend that can run two
workers at the same time. Some envs of the suite write files into pytest's ``tmp_path``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from parallelenv.testing.contract import BackendContract

__all__ = ["BackendContract"]


def __getattr__(name: str) -> object:
    """Import the test suite when it is first accessed.

    Workers import the envs from this package, and would otherwise import pytest too, which takes 0.15 s.
    """
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import pytest

    pytest.register_assert_rewrite(f"{__name__}.contract")  # before that module is imported
    from parallelenv.testing.contract import BackendContract

    return BackendContract
