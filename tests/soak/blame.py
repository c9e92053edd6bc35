"""The envs that an error names, and the kind of failure."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from parallelenv.errors import WorkerDiedError, WorkerTimeoutError

_NOTE = re.compile(r"Raised by env \d+(?: and \d+ others?)? in (.*), process \d+\.")


@dataclass(frozen=True, slots=True)
class Blame:
    """One error, without the group that it may have come in.

    Attributes:
        error: The error.
        env_ids: The envs that it names.
        operation: What they were doing; empty if it is not about something that an env did.
    """

    error: BaseException
    env_ids: tuple[int, ...]
    operation: str

    @property
    def is_of_death(self) -> bool:
        """Whether it reports a dead worker."""
        return isinstance(self.error, WorkerDiedError)

    @property
    def is_of_time(self) -> bool:
        """Whether it reports a timeout."""
        return isinstance(self.error, WorkerTimeoutError)

    @property
    def is_of_step(self) -> bool:
        """Whether an env raised in a step."""
        return self.operation == "step"

    @property
    def ends_episode(self) -> bool:
        """Whether the envs need a reset: one failed in the reset within a step, or was interrupted."""
        return self.operation not in ("", "step")


def blames(error: BaseException) -> Iterator[Blame]:
    """Split an error into its parts."""
    parts = error.exceptions if isinstance(error, BaseExceptionGroup) else (error,)
    failures: dict[int, BaseException] = getattr(error, "failures", {})
    for part in parts:
        env_ids = tuple(env_id for env_id, other in failures.items() if _is_like(other, part))
        if isinstance(part, WorkerDiedError | WorkerTimeoutError):
            yield Blame(part, part.env_ids, "")
        else:
            operations = _NOTE.findall(" ".join(getattr(part, "__notes__", [])))
            yield Blame(part, env_ids, operations[-1] if operations else "")


def _is_like(error: BaseException, other: BaseException) -> bool:
    return (type(error), str(error)) == (type(other), str(other))


def named(error: BaseException) -> list[int]:
    """Return all envs that an error names."""
    return [env_id for blame in blames(error) for env_id in blame.env_ids]
