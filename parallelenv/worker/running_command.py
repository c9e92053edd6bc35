"""The command that a host is executing, and its progress."""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from parallelenv.contract.batch import Index
from parallelenv.contract.copying import cannot_travel
from parallelenv.contract.interrupts import signal_behind
from parallelenv.contract.protocol import Command, Extra, Reply

Run = Callable[["RunningCommand", Iterator[Any]], None]
"""A function that executes a command for the envs that an iterator yields, and counts them in ``num_started``."""
Columns = tuple[Sequence[Any], ...]
"""The data that a command needs: sequences with one item per env or, on a host with vector envs, per `Share`."""


@dataclass(frozen=True, slots=True)
class StepEnvs:
    """The rows, cells and slots of the envs that a step is for."""

    rows: Index  #: Rows of the envs: a slice if the rows are consecutive, otherwise a list.
    row_numbers: Sequence[int]  #: The same rows as a sequence of numbers.
    cells: Sequence[slice]
    #: Picks the items of these envs from a list with one item per slot; ``None`` if the step is for all envs.
    pick: operator.itemgetter[Any] | None


class Share(NamedTuple):
    """The part of a command that is for a single env or a vector env."""

    env_ids: tuple[int, ...]  #: Ids of the envs, ascending.
    positions: list[int]  #: Positions of these envs in the command.
    numbers: Sequence[int] | None  #: Numbers of these sub-envs in the vector env, ascending; ``None``: all sub-envs.
    rows: Index  #: Rows of these envs in the batch.
    is_group: bool  #: Whether the part is for a vector env.


class RunningCommand:
    """The current or latest command of a host, or a step that the host has prepared to execute many times.

    If an env fails, or a signal interrupts it in the caller's thread, ``run`` ends before the `remaining` envs have
    run. After a failure, the host runs them immediately. After an interrupt, it runs them when it gets the same command
    again.

    Args:
        command: The command. For a prepared step, ``command.number`` is changed before each execution.

    Attributes:
        number: Number of the command whose progress this object holds. It is set after all other attributes. If an
            interrupt comes before that, the host starts the command from the beginning when it gets the command again.
        num_started: How many shares or, without shares, how many envs have started. The last one that started is the
            current one.
        doing: The operation that the current env performs, for error messages.
        dropped: Ids of envs that `remaining` leaves out, because their results are no longer wanted. A vector env is
            left out only if all of its sub-envs are.
    """

    __slots__ = (
        "columns",
        "command",
        "counts",
        "doing",
        "dropped",
        "envs",
        "num_started",
        "number",
        "reply",
        "run",
        "shares",
    )

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
        self.dropped: Collection[int] = ()
        self.counts = range(1, 1 + len(command.env_ids if shares is None else shares))
        self.number = command.number

    @property
    def current_ids(self) -> tuple[int, ...]:
        """Id of the env that started last or, if it is a vector env, those of the sub-envs that the command is for."""
        number = self.num_started  # read only once, because another thread may change it
        if self.shares is not None:
            return self.shares[number - 1].env_ids if number else ()
        return self.command.env_ids[max(0, number - 1) : number]

    def copied(self, result: Extra) -> Extra:
        """Return a copy of a step's result, for a reset within the step: an env may reuse the objects that it returned.

        If the result cannot be copied, raise the same error as if it were copied after the step.
        """
        try:
            return result.copied()
        except BaseException as error:  # copying runs user code, which may raise anything
            if signal_behind(error) is not None:
                raise
            self.doing = "the copying of its result"
            raise cannot_travel(result, error) from error

    def remaining(self) -> Iterator[Any]:
        """Return an iterator over the envs or shares that have not started."""
        number, columns = self.num_started, self.columns
        if number:
            columns = tuple(column[number:] for column in columns)
        walk = zip(range(number + 1, number + 1 + len(columns[0])), *columns, strict=True)
        return filter(self._is_wanted, walk) if self.dropped else walk

    def _is_wanted(self, item: Sequence[Any]) -> bool:
        place = item[0] - 1
        env_ids = self.command.env_ids[place : place + 1] if self.shares is None else self.shares[place].env_ids
        return not set(env_ids).issubset(self.dropped)
