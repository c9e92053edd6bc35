"""What adapters say of calls in two halves, ``..._async()`` and ``..._wait()``, that come in the wrong order."""

from __future__ import annotations

from parallelenv.errors import NoPendingCallError, PendingCallError


def step_under_way() -> PendingCallError:
    """Return the error for a step that comes before the last one was received."""
    return PendingCallError(
        "A step is under way whose result was not received (begun, interrupted, or late). Get it with step_wait(), or "
        "drop it with reset().",
        "step",
    )


def nothing_begun(name: str) -> NoPendingCallError:
    """Return the error for a wait without a beginning. ``name``: ``"step"``, ``"reset"`` or ``"call"``."""
    return NoPendingCallError(f"{name}_wait() was called, but {name}_async() was not.", name)
