"""A ticket: one call in flight, with its operation, its envs and the replies so far."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from parallelenv.contract.failures import Failure, raise_failures
from parallelenv.contract.protocol import Extra

if TYPE_CHECKING:
    from parallelenv.engine.env_table import EnvTable


class Ticket:
    """One call on some envs, split into one command for each of their workers.

    Attributes:
        sent_to: The envs to which commands are sent, and those that failed before anything could be sent to them.
        each: One argument for each env in ``sent_to``; ``None`` if there are no arguments.
        env_ids: The envs in the result, in the order of the result; those that are not in ``sent_to`` are done or
            exhausted. Initially ``sent_to``.
        pending: For each command that has no reply yet, the ids of its envs, by the command's number.
        values: Results, by env id; envs with an empty result are left out.
        is_awaited: Whether the call that sent the ticket also waits for it. If another call finds it in flight, that
            call was interrupted.
        table: The table that records each reply, because results are received separately; otherwise ``None``.
        left_out: Those of ``env_ids`` that are not in ``sent_to``.
    """

    __slots__ = (
        *("each", "env_ids", "failures", "is_awaited", "left_out", "operation"),
        *("pending", "sent_to", "table", "values"),
    )

    def __init__(self, operation: str, sent_to: Sequence[int], each: Sequence[Any] | None = None) -> None:
        self.operation = operation
        self.sent_to = self.env_ids = sent_to
        self.each: Any = each
        self.pending: dict[int, tuple[int, ...]] = {}
        self.values: dict[int, Any] = {}
        self.failures: dict[int, Failure] = {}
        self.is_awaited = False
        self.table: EnvTable | None = None
        self.left_out: Set[int] = frozenset()

    def record_reply(self, number: int, values: Mapping[int, Any], failures: Mapping[int, Failure]) -> None:
        """Record the reply to the command with this number."""
        env_ids = self.pending.pop(number)
        if values:
            self.values.update(values)
        if failures:
            self.failures.update(failures)
        if self.table is not None:
            self.table.record_arrival(self, env_ids)

    def raise_failures(self, partial: Any = None) -> None:
        """Raise the failures, if there are any.

        ``partial`` becomes the error's attribute of that name. By default, it has the values of the envs that did not
        fail, by env id.
        """
        if not self.failures:
            return
        if partial is None:
            partial = {env_id: self.values.get(env_id) for env_id in self.sent_to if env_id not in self.failures}
        raise_failures([self.failures[env_id] for env_id in sorted(self.failures)], partial)

    def listed(self) -> list[Any]:
        """Return the results in the order of ``sent_to``, or raise the failures if there are any."""
        self.raise_failures()
        return [self.values.get(env_id) for env_id in self.sent_to]

    @property
    def answered(self) -> list[int]:
        """Ids of the envs in the result that have no pending reply, in the order of the result."""
        pending = set(self.pending_ids)
        return [env_id for env_id in self.env_ids if env_id not in pending]

    @property
    def pending_ids(self) -> tuple[int, ...]:
        """Ids of envs that have not replied yet."""
        return tuple(itertools.chain.from_iterable(self.pending.values()))


@dataclass(slots=True)
class Outcome:
    """Results of env steps, or of resets made instead of steps, before they are converted for the user."""

    env_ids: Sequence[int]  #: The envs, in the order of the result.
    stepped: Sequence[int]  #: The envs that were stepped; the others are absent, because they are done or exhausted.
    extras: Mapping[int, Extra]  #: Values that are not in the batch, by env id.
    failures: Mapping[int, Failure]  #: Failures, by env id.
    restarted: Collection[int] = ()  #: Envs of ``stepped`` that were restarted; their states are first states.
    resets: Sequence[int] = ()  #: Envs of ``stepped`` that were reset, not stepped; their states are first states.

    @classmethod
    def of(cls, env_ids: Sequence[int], tickets: Mapping[int, Ticket]) -> Outcome:
        """Return the outcome of envs whose replies have arrived, in the order of ``env_ids``."""
        ticket = tickets[env_ids[0]] if env_ids else None
        if ticket is not None and ticket.operation == "step" and all(tickets[one] is ticket for one in env_ids):
            if ticket.env_ids is env_ids:
                return cls(env_ids, ticket.sent_to, ticket.values, ticket.failures)
            if not (ticket.values or ticket.failures) and len(ticket.sent_to) == len(ticket.env_ids):
                return cls(env_ids, env_ids, {}, {})
        of_each = [(env_id, tickets[env_id]) for env_id in env_ids]
        return cls(
            env_ids,
            [env_id for env_id, one in of_each if env_id not in one.left_out],
            {env_id: one.values[env_id] for env_id, one in of_each if env_id in one.values},
            {env_id: one.failures[env_id] for env_id, one in of_each if env_id in one.failures},
            resets=[env_id for env_id, one in of_each if one.operation == "reset"],
        )

    @property
    def exhausted(self) -> list[int]:
        """Ids of the envs that were reset in this step but have no further episode."""
        return [env_id for env_id, extra in self.extras.items() if extra.is_exhausted]

    def without_failures(self) -> Outcome:
        """Return this outcome without the envs that failed."""
        kept: dict[str, Any] = {
            name: [env_id for env_id in getattr(self, name) if env_id not in self.failures]
            for name in ("env_ids", "stepped", "resets")
        }
        return replace(self, **kept)

    def with_resting(self, resting: Collection[int]) -> Outcome:
        """Return this outcome without the results of the envs in ``resting``.

        The ids of these envs stay in ``env_ids``.
        """
        stepped = [env_id for env_id in self.stepped if env_id not in resting]
        resets = [env_id for env_id in self.resets if env_id not in resting]
        extras = {env_id: extra for env_id, extra in self.extras.items() if env_id not in resting}
        return replace(self, stepped=stepped, resets=resets, extras=extras)
