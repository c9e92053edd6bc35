"""The expected state of one env, and one env's part of a result."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from parallelenv import StepBatch, StepResult


class ViolationError(Exception):
    """The library violated a promise."""


@dataclass(slots=True)
class Flight:
    """A step that was sent and not received.

    Attributes:
        token: Of its action.
        deed: Of its action.
        is_absent: Whether the env is left out, because it is done.
    """

    token: float
    deed: float
    is_absent: bool


@dataclass(slots=True)
class Account:
    """What the caller knows of one env.

    Attributes:
        birth: Number of its life; ``None`` before its first answer.
        episode: Number of the episode.
        step: Number of the latest step delivered.
        pid: Process that gave the latest answer.
        flight: Its step under way.
        is_new: Whether it was rebuilt since its latest answer.
        is_blurred: Whether episodes may have begun that nobody was told of, as the call was given up.
        needs_reset: Whether it has no episode.
        is_over: Whether its episode ended, and it is left out of steps.
        is_dead: Whether its worker is known to be dead.
        is_late: Whether it is known to take longer than the timeout.
        is_paused: Whether it is paused.
    """

    env_id: int
    birth: float | None = None
    episode: int = 0
    step: int = 0
    pid: int = 0
    flight: Flight | None = None
    is_new: bool = True
    is_blurred: bool = False
    needs_reset: bool = True
    is_over: bool = False
    is_dead: bool = False
    is_late: bool = False
    is_paused: bool = False

    @property
    def can_step(self) -> bool:
        """Whether a step would be accepted."""
        return not (self.flight or self.needs_reset or self.is_dead or self.is_late or self.is_paused)


@dataclass(slots=True)
class Row:
    """One env's part of a result."""

    env_id: int
    state: Any
    reward: Any
    done: Any
    info: dict[str, Any]
    terminated: Any
    truncated: Any


def rows_of(result: StepResult | StepBatch) -> Iterator[Row]:
    """Split a result of either alignment into rows."""
    items = result if isinstance(result, StepBatch) else zip(*result, strict=True)
    flags = zip(result.terminated.tolist(), result.truncated.tolist(), strict=True)
    for env_id, item, (terminated, truncated) in zip(result.env_ids.tolist(), items, flags, strict=True):
        state, reward, done, info = item
        yield Row(env_id, state, reward, done, info, terminated, truncated)


def demand(holds: bool, text: str, *details: Any) -> None:
    """Raise `ViolationError` unless something holds."""
    if not holds:
        raise ViolationError(" ".join([text, *map(str, details)]))
