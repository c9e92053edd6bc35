"""Assigns envs to workers, and records what the caller knows about each worker."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from parallelenv.contract.env_specs import EnvFactory
from parallelenv.contract.error_text import list_ids, name_envs
from parallelenv.contract.protocol import Channel, Death, WorkerSpec
from parallelenv.engine.tickets import Ticket
from parallelenv.errors import WorkerDiedError


@dataclass(eq=False)
class WorkerHandle:
    """The pool's record of one host.

    Attributes:
        env_ids: Ids of the host's envs. They are the ids in the spec, unless there are vector envs, whose sizes are
            known only after they are built.
        pending: Tickets of the host's pending commands, by command number. The ticket of a command that was given up is
            replaced by ``None``, and its late reply is dropped.
        death: Cause of the host's death; ``None`` while it lives.
        has_built: Whether the host's envs were ever made.
    """

    spec: WorkerSpec
    channel: Channel
    pending: dict[int, Ticket | None] = field(default_factory=dict)
    death: Death | None = None
    has_built: bool = False

    def __post_init__(self) -> None:
        self.env_ids = self.spec.env_ids

    def is_stuck_for(self, env_ids: Sequence[int]) -> bool:
        """Return whether this worker must be replaced before its envs among ``env_ids`` can be rebuilt.

        It must be replaced if it is dead, if one of its commands was given up, or if it is busy with one of these envs.
        A host in the caller's thread is replaced only if it is dead: a live one resumes its pending commands as soon as
        the caller waits for it.
        """
        if self.death is not None or self.channel.in_caller:
            return self.death is not None
        return any(
            ticket is None or not set(env_ids).isdisjoint(ticket.pending[number])
            for number, ticket in self.pending.items()
        )

    def death_error(self, *, others_live: bool) -> WorkerDiedError:
        """Return the error for calls that need the envs of this worker, which is dead.

        ``others_live`` says whether there are other workers and all of them are alive.
        """
        death = self.death or Death()
        owned = list_ids(self.env_ids)
        worker = f"The worker of {name_envs(self.env_ids)} (process {death.pid or 'unknown'})"
        if self.has_built:
            others = "All other envs continue. " if others_live else ""
            way_out = f"Rebuild with restart({owned}), or leave out with pause({owned})."
            message = f"{worker} is dead. {death} {others}{way_out}"
        else:
            message = (
                f"{worker} died while its envs were made. {death} Make one of them alone, in this process, to see why."
            )
        if death.last_lines:
            message += f"\nIts last output:\n{death.last_lines}"
        return WorkerDiedError(message, self.env_ids, death.pid, death.exitcode)


Shard = tuple[WorkerHandle, tuple[int, ...], Any]
"""A host, ids of some of its envs, and their positions among all envs of the call, as a slice or a list."""


def spread(factories: Sequence[EnvFactory], num_workers: int, spec: WorkerSpec) -> list[WorkerSpec]:
    """Assign envs to workers as evenly as possible, and return one spec per worker.

    Each worker has consecutive env ids. ``spec`` has the values that are the same for all workers.
    """
    spec = replace(spec, num_workers=num_workers, num_envs=len(factories))
    size, num_larger = divmod(len(factories), num_workers)
    left, specs = iter(factories), []
    for worker_id in range(num_workers):
        envs = tuple(itertools.islice(left, size + (worker_id < num_larger)))
        env_ids = tuple(env.env_id for env in envs)
        specs.append(replace(spec, env_ids=env_ids, envs=envs, worker_id=worker_id))
    return specs
