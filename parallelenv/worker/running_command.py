"""The command that a host executes, and how far it has got."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from parallelenv.contract.batch import Index
from parallelenv.contract.protocol import Command, Reply

Run = Callable[["RunningCommand", Iterator[Any]], None]
"""Executes a command for the envs of an iterator, `RunningCommand.remaining`, and counts them in ``num_started``."""
Columns = tuple[Sequence[Any], ...]
"""The data about each env that a command needs."""


@dataclass(frozen=True, slots=True)
class StepEnvs:
    """Where a step finds its envs, looked up once for all steps of the same envs."""

    rows: Index  #: Their rows: a slice if they are consecutive, or else a list.
    row_numbers: Sequence[int]  #: Their rows, one by one.
    cells: Sequence[slice]  #: The cells of these rows.
    #: Returns the items of these envs from a list with one item per env of the host; ``None`` if these are all envs.
    pick: operator.itemgetter[Any] | None


class Share(NamedTuple):
    """The part of a command that is for one env, or for one vector env."""

    env_ids: tuple[int, ...]  #: The envs, ascending.
    positions: list[int]  #: Their positions in the command.
    numbers: Sequence[int] | None  #: Which sub-envs of the vector env these are, ascending; ``None``: all.
    rows: Index  #: Their rows in the batch.
    is_group: bool  #: Whether the part is for a vector env.


class RunningCommand:
    """The command that a host executes or has executed last, or a step that is prepared to be executed many times.

    A failure of an env, or an interrupt in the caller's own thread, ends ``run`` before all envs have run. After a
    failure, the host runs the `remaining` envs at once; after an interrupt, it runs them when it gets the same command
    again.

    Args:
        command: The command. The number of a prepared step is set anew for each step.
        run: Executes the command.
        columns: The data about each env that ``run`` needs.
        envs: Where a prepared step finds its envs.
        shares: For a host with vector envs, the parts of the command that run one after another; ``None`` if single
            envs do.

    Attributes:
        counts: From 1 to the number of parts or envs that start one after another.
        number: Number of the command whose state this object is. It is set last, so the host starts the command anew if
            an interrupt came earlier.
        num_started: Number of envs that have started. The last of them is the current one.
        doing: The operation of the current env, for messages.
        reply: The reply so far.
    """

    __slots__ = ("columns", "command", "counts", "doing", "envs", "num_started", "number", "reply", "run", "shares")

    def __init__(
        self,
        command: Command,
        run: Any = None,
        columns: Columns = ((),),
        envs: StepEnvs | None = None,
        shares: Sequence[Share] | None = None,
    ) -> None:
        self.command = command
        self.run = run
        self.columns = columns
        self.envs: Any = envs
        self.num_started = 0
        self.doing = command.operation
        self.reply = Reply(command.number)
        self.shares = shares
        self.counts = range(1, 1 + len(command.env_ids if shares is None else shares))
        self.number = command.number

    @property
    def current_ids(self) -> tuple[int, ...]:
        """The env that has started last, or all envs of the vector env that has started last.

        Empty before the first env.
        """
        number = self.num_started  # read only once, because other threads call this as well
        if self.shares is not None:
            return self.shares[number - 1].env_ids if number else ()
        return self.command.env_ids[max(0, number - 1) : number]

    def remaining(self) -> Iterator[Any]:
        """Return an iterator over the envs that have not started.

        An item has the value of ``num_started`` once the env has started, and the env's columns.
        """
        number, columns = self.num_started, self.columns
        if number:
            columns = tuple(column[number:] for column in columns)
        return zip(range(number + 1, number + 1 + len(columns[0])), *columns, strict=True)
