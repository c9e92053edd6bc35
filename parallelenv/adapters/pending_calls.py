"""Errors for ``..._async()`` and ``..._wait()`` calls in the wrong order."""

from __future__ import annotations

from parallelenv.errors import NoPendingCallError, PendingCallError


def step_under_way() -> PendingCallError:
    """Return the error for a step begun while another one is in flight."""
    return PendingCallError(
        "A step is under way whose result was not received (begun, interrupted, or late). Get it with step_wait(), or "
        "drop it with reset().",
        "step",
    )


def nothing_begun(name: str) -> NoPendingCallError:
    """Return the error for a wait without a call. ``name`` is ``"step"``, ``"reset"`` or ``"call"``."""
    return NoPendingCallError(f"{name}_wait() was called, but {name}_async() was not.", name)
