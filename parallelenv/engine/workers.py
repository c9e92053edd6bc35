"""The hosts of a pool: how they are started, written to, heard, replaced and ended.

A host that failed, died or hung is dealt with in this file and nowhere else.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

from parallelenv.contract.batch import Batch, Layout
from parallelenv.contract.failures import Failure
from parallelenv.contract.interrupts import Shield
from parallelenv.contract.protocol import (
    Backend,
    Channel,
    Command,
    Death,
    HostDied,
    HostRecipe,
    Printed,
    Reply,
    UnreadableError,
)
from parallelenv.engine.tickets import Link, Part, Request
from parallelenv.engine.utilisation import Hours
from parallelenv.errors import ClosedError, UnpicklableError, WorkerDiedError

Listener = Callable[[Sequence[Printed]], None]
Announcement = Callable[[Request], None]
CLOSE_TIMEOUT = 3.0
"""Seconds that hosts get to close their envs before they are ended."""


class Hosts:
    """All hosts of a `Pool`.

    Args:
        backend: Where they live.
        recipes: One per host; its env ids follow those of the one before.
        listener: Told what envs print in workers, in the thread of the call that is running.

    Attributes:
        env_ids: All env ids, ascending.
        layout: What the batch holds.
        batch: The arrays that all hosts read and write.
        hours: For how long hosts have something to do.
    """

    layout: Layout
    batch: Batch

    def __init__(self, backend: Backend, recipes: Sequence[HostRecipe], listener: Listener) -> None:
        self.env_ids = tuple(env_id for recipe in recipes for env_id in recipe.env_ids)
        self._backend = backend
        self._listener = listener
        self._printed: list[Printed] = []
        self._first = self.env_ids[0]
        self._pid = os.getpid()
        self._shield = Shield()
        self.hours = Hours()
        self._rest: tuple[int, Sequence[Channel]] | None = None  # what is being closed, and in which thread
        self._lost: dict[int, WorkerDiedError] = {}  # envs whose worker is dead, also one behind a host of ours
        try:
            channels = backend.launch(recipes)
        except BaseException:
            self._close_at_once(())
            raise
        self._links = [Link(recipe, channel) for recipe, channel in zip(recipes, channels, strict=True)]
        self._link_of_channel = {link.channel: link for link in self._links}
        self._link_of_env = [link for link in self._links for _ in link.recipe.env_ids]
        self._whole = [(link, link.recipe.env_ids, self._positions(link)) for link in self._links]

    def adopt(self, batch: Batch) -> None:
        """Take a batch that is there and hand it to all hosts."""
        self.layout, self.batch = batch.layout, batch
        for link in self._links:
            link.channel.attach(batch)

    # ---------------------------------------------------------------- commands

    def _split(self, env_ids: Sequence[int]) -> Iterable[Part]:
        """Deal env ids out to their hosts: host, its ids, their positions in ``env_ids``."""
        if env_ids is self.env_ids or tuple(env_ids) == self.env_ids:
            return self._whole
        positions: dict[Link, list[int]] = {}
        for position, env_id in enumerate(env_ids):
            positions.setdefault(self._link(env_id), []).append(position)
        return [(link, tuple(env_ids[index] for index in found), found) for link, found in positions.items()]

    def _positions(self, link: Link) -> slice:
        return slice(link.recipe.env_ids[0] - self._first, link.recipe.env_ids[-1] - self._first + 1)

    def _link(self, env_id: int) -> Link:
        return self._link_of_env[env_id - self._first]

    def _dispatch(self, request: Request, packed: Sequence[tuple[Link, Command, Any]], announce: Announcement) -> None:
        """Send the commands of a request, all of them or, before ``announce`` was called with it, none."""
        with self._shield:
            announce(request)
            hours = self.hours
            if hours.left:
                hours.left -= 1
            else:
                asked = {link for link, _, _ in packed}
                hours.sent([link.shift for link in self._links if link.in_flight or link in asked])
            for link, command, message in packed:
                request.pending[command.number] = command.env_ids
                link.in_flight[command.number] = request
                if link.death is not None:  # it died of the command before, to another worker of its own
                    self._fail_waiting(link)
                    continue
                try:
                    link.channel.send(message)
                except HostDied:
                    self._bury(link)

    def give_up(self, request: Request, error: Exception) -> None:
        """Let the envs that have not answered a request fail, and whoever else waits for their hosts."""
        for link in self._links:
            if not request.pending.keys() & link.in_flight.keys():
                continue
            for number, waiting in link.in_flight.items():
                link.in_flight[number] = None
                if waiting is not None:
                    late = waiting.pending[number]
                    waiting.answer(number, {}, {env_id: Failure(error, env_id, "") for env_id in late})

    # ---------------------------------------------------------------- answers

    def pump(self, deadline: float | None) -> bool:
        """Wait for hosts to answer, and file what they say.

        Args:
            deadline: Moment of `time.monotonic` at which to stop waiting, or ``None``.

        Returns:
            Whether anything came before the deadline.

        Raises:
            ClosedError: If another thread has closed the pool.
        """
        self._refuse_closed()
        timeout = None if deadline is None else max(0.0, deadline - time.monotonic())
        ready = self._backend.wait([link.channel for link in self._links if link.in_flight], timeout)
        with self._shield:
            for channel in ready:
                self._receive(self._link_of_channel[channel])
        if self._printed:
            printed, self._printed = self._printed, []
            self._listener(printed)
        return bool(ready)

    def _refuse_closed(self) -> None:
        if not self._links:
            raise ClosedError("This ParallelEnv was closed while a call was waiting for its envs.")

    def _receive(self, link: Link) -> None:
        try:
            reply = link.channel.receive()
        except HostDied:
            self._bury(link)
            return
        except UnreadableError as error:
            reply = Reply(error.number, {}, self._not_read(link, error))
        if reply.output:
            self._printed += reply.output
        request = link.in_flight.pop(reply.number, None)
        if link.shift.since and not link.in_flight:
            self.hours.received(link.shift)
        if request is None:  # given up, or nothing but output
            return
        if reply.rows is not None:
            self.batch.put_results(request.pending[reply.number], reply.rows)
        if reply.failures:
            self._note_deaths(reply)
        request.answer(reply.number, reply.values, reply.failures)

    def _not_read(self, link: Link, error: UnreadableError) -> dict[int, Failure]:
        """Return what became of the envs of a command that was lost between the caller and a host, either way."""
        request = link.in_flight.get(error.number)
        env_ids = request.pending[error.number] if request is not None else ()
        cause = UnpicklableError(
            f"What was sent to a worker, or came back, can be pickled but not unpickled ({error.reason}). Give and "
            "return plain data."
        )
        return {env_id: Failure(cause, env_id, "the copying between processes") for env_id in env_ids}

    def workload(self) -> list[tuple[tuple[int, ...], float | None]]:
        """Return for each host that lives its env ids, and for what share of the time it had nothing to do.

        Another thread may be using the pool meanwhile.
        """
        living = [link for link in list(self._links) if link.death is None]
        return [(link.recipe.env_ids, self.hours.waiting(link.shift)) for link in living]

    @property
    def num_links(self) -> int:
        """Number of hosts that get a command each if all envs are asked for something."""
        return len(self._links)

    @property
    def under_way(self) -> set[int]:
        """Numbers of the commands that hosts have not answered yet."""
        return {number for link in self._links for number in link.in_flight}

    @property
    def is_held_up(self) -> bool:
        """Whether something that was interrupted in the caller's thread would go on there with the next wait."""
        return any(link.channel.in_caller and link.in_flight for link in self._links)

    @property
    def lost(self) -> list[int]:
        """Ids of envs whose worker is known to be dead, ascending."""
        return sorted(self._lost.copy())

    # ---------------------------------------------------------------- deaths

    def _note_deaths(self, reply: Reply) -> None:
        """Note which envs have lost the worker that they had behind a host of ours."""
        for env_id, failure in reply.failures.items():
            if failure.is_of_worker and isinstance(failure.exception, WorkerDiedError):
                self._lost[env_id] = failure.exception

    @property
    def has_dead(self) -> bool:
        """Whether any env is known to have lost its worker."""
        return bool(self._lost)

    def obituaries(self, env_ids: Sequence[int]) -> dict[int, Failure]:
        """Return, of these envs, those whose worker is known to be dead, each with the error that says so."""
        return {env_id: Failure(self._lost[env_id], env_id, "") for env_id in env_ids if env_id in self._lost}

    def refuse_dead(self, env_ids: Sequence[int]) -> None:
        """Raise `WorkerDiedError` if a worker of these envs is known to be dead."""
        lost = tuple(env_id for env_id in env_ids if env_id in self._lost) if self._lost else ()
        if lost:
            raise self._lost[lost[0]].about(lost)

    def _bury(self, link: Link) -> None:
        """Note that a host is dead and fail what it was asked for.

        Raises:
            ClosedError: If another thread has closed the pool: that one ends the hosts, and it alone.
        """
        self._refuse_closed()
        link.death = link.channel.cause_of_death()
        owned = link.recipe.env_ids
        self._lost.update(dict.fromkeys(owned, link.obituary(owned)))
        self._fail_waiting(link)
        link.channel.kill()

    def _fail_waiting(self, link: Link) -> None:
        """Fail what a dead host was asked for: nobody else would ever answer."""
        for number, request in sorted(link.in_flight.items()):
            if request is not None:
                env_ids = request.pending[number]
                error = link.obituary(env_ids)
                request.answer(number, {}, {env_id: Failure(error, env_id, "") for env_id in env_ids})
        link.in_flight.clear()

    # ---------------------------------------------------------------- replacing

    def _let_finish(self, links: Sequence[Link], timeout: float | None) -> None:
        """Wait until hosts have done what they were asked for, no longer than ``timeout`` seconds."""
        deadline = None if timeout is None else time.monotonic() + timeout
        while any(link.in_flight for link in links) and self.pump(deadline):
            pass

    def _replace(self, link: Link) -> None:
        """Start another host in the place of one that is dead or busy.

        Raises:
            WorkerStartError: If the system does not let it start. Its envs are then dead, and this can be tried again.
        """
        with self._shield:
            if link.death is None:
                link.channel.kill()
                link.death = Death(detail="It was busy, and replaced because an env of it had to be rebuilt.")
                self._lost.update(dict.fromkeys(link.recipe.env_ids, link.obituary(link.recipe.env_ids)))
            self._fail_waiting(link)
        (channel,) = self._backend.launch([link.recipe])
        with self._shield:
            if "batch" in vars(self):  # a pool behind a host gets its own after the first build
                channel.attach(self.batch)
            self._link_of_channel.pop(link.channel, None)
            link.channel = channel
            self._link_of_channel[channel] = link
            link.death = None

    # ---------------------------------------------------------------- the end

    def close(self, timeout: float = CLOSE_TIMEOUT) -> None:
        """End all hosts. Quiet, bounded in time, harmless when repeated or after a fork.

        Args:
            timeout: Seconds that hosts get to close their envs before they are ended.

        Raises:
            KeyboardInterrupt: When all have been ended, without further patience.
        """
        links = self._links
        if os.getpid() != self._pid:  # a forked child must not end its parent's workers
            return
        if not links:
            self._close_the_rest()
            return
        channels = [link.channel for link in links if not link.death]
        try:
            with Shield():  # one of its own: another thread may be using the pool
                self._links, self._rest = [], (threading.get_ident(), channels)
                vars(self).pop("batch", None)  # its memory goes now, not when the user lets go of the closed object
                for link in links:
                    link.recipe = replace(link.recipe, shared={})  # likewise
            printed = [*self._printed, *self._backend.close(channels, timeout)]
        except KeyboardInterrupt:
            self._close_at_once(channels)
            raise
        self._rest = None
        if printed:
            with contextlib.suppress(OSError, ValueError):  # the interpreter is ending, and nobody reads any more
                self._listener(printed)

    def _close_the_rest(self) -> None:
        """Go on where this thread was interrupted twice in closing. What another thread closes is left to that one."""
        rest = self._rest
        if rest is not None and rest[0] == threading.get_ident():
            self._close_at_once(rest[1])

    def _close_at_once(self, channels: Sequence[Channel]) -> None:
        """End hosts without patience, whatever interrupts it."""
        while True:
            with contextlib.suppress(KeyboardInterrupt):
                self._backend.close(channels, 0.0)
                self._rest = None
                return
