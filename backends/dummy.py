"""Every env in this process, stepped by the caller, one after the other.

The oracle: all other modes must answer as this one does. And the fastest where a step takes
less time than a message, some 10 us.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

from parallelenv.backends.host import Execution, Host
from parallelenv.backends.inprocess import detach, take_over
from parallelenv.batch import Batch, Layout
from parallelenv.protocol import Channel, Command, Death, HostRecipe, Plan, Reply


class DummyChannel:
    """A queue of commands to a host in this very thread."""

    def __init__(self, recipe: HostRecipe) -> None:
        self._host = Host(recipe, in_caller=True)
        self._queue: deque[Execution] = deque()
        self._replies: deque[Reply] = deque()

    def pack(self, command: Command) -> Command:  # noqa: D102 (see Channel)
        return take_over(command)

    def send(self, packed: Command) -> None:  # noqa: D102 (see Channel)
        self._queue.append(Execution(self._host, packed))

    def work(self) -> bool:
        """Execute the oldest command, unless there is a reply already; say if there is one.

        An interrupt leaves the command in the queue, to go on with the next env.
        """
        if not self._replies and self._queue:
            reply = detach(self._queue[0].run())
            self._queue.popleft()
            self._replies.append(reply)
        return bool(self._replies)

    def receive(self) -> Reply:  # noqa: D102 (see Channel)
        return self._replies.popleft()

    def attach(self, batch: Batch) -> None:  # noqa: D102 (see Channel)
        self._host.attach(batch)

    def cause_of_death(self) -> Death:  # noqa: D102 (see Channel)
        return Death()

    def kill(self) -> None:  # noqa: D102 (see Channel)
        self._queue.clear()
        self._host.close()


class DummyBackend:
    """One host, in the caller's thread, however many cores there are."""

    uses_live_envs = True

    def plan(self, num_envs: int, num_cpus: int | None, num_gpus: float) -> Plan:  # noqa: D102 (see Backend)
        return Plan(1)

    def launch(self, recipes: Sequence[HostRecipe]) -> list[Channel]:  # noqa: D102 (see Backend)
        return [DummyChannel(recipe) for recipe in recipes]

    def allocate(self, layout: Layout) -> Batch:  # noqa: D102 (see Backend)
        return Batch.private(layout)

    def wait(self, channels: Sequence[Any], timeout: float | None) -> Sequence[Any]:
        """Work instead of waiting; the time limit cannot be kept, nobody is there to look at it."""
        return [channel for channel in channels if channel.work()]

    def close(self, channels: Sequence[Channel], timeout: float) -> None:  # noqa: D102 (see Backend)
        for channel in channels:
            channel.kill()
