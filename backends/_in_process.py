"""Channels to hosts in the caller's own process. Like channels between processes, they deliver copies."""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Collection, Container, Iterable, Mapping

from parallelenv.contract.batch import Array, Batch, Layout, copied
from parallelenv.contract.copying import cannot_be_given, cannot_travel, deep_copy, deep_copy_but_graph
from parallelenv.contract.failures import Failure
from parallelenv.contract.interrupts import DeferSignals, signal_behind
from parallelenv.contract.protocol import Backend, Command, Death, EnvFacts, Extra, RepeatedStep, Reply, WorkerSpec
from parallelenv.contract.worker_info import call_for
from parallelenv.worker.host import Host
from parallelenv.worker.running_command import RunningCommand


class InProcessBackend(Backend):
    """The part that the backends whose envs are in the caller's process have in common."""

    uses_live_envs = True

    def share(self, arrays: Mapping[str, Array]) -> Mapping[str, Array]:
        return copied(arrays)

    def allocate(self, layout: Layout) -> Batch:
        return Batch.private(layout)


class InProcessChannel:
    """A `Channel` to a host in this process. Arguments and replies are copied."""

    in_caller = False

    def __init__(self, host: Host) -> None:
        self.host = host
        self._replies: deque[Reply] = deque()

    def pack(self, command: Command) -> Command:
        return command if command.each is None else copy_arguments(command)

    def execute(self, command: Command, dropped: Collection[int] = ()) -> Reply:
        """Execute a command and return the reply with copies of the values. Copying runs code of the envs as well."""
        reply = self.host.execute(command, dropped)
        return call_for(self.host, functools.partial(copy_values, reply)) if reply.values else reply

    def advance(self) -> bool:
        return bool(self._replies)

    def receive(self) -> Reply:
        return self._replies.popleft()

    def attach(self, batch: Batch) -> None:
        self.host.attach(batch)

    def cause_of_death(self) -> Death:
        return Death()


class CallerChannel(InProcessChannel):
    """A channel to a host in the caller's thread. Commands are queued, and the host executes them in `advance`."""

    in_caller = True

    def __init__(self, spec: WorkerSpec) -> None:
        super().__init__(Host(spec, in_caller=True))
        self._queue: deque[tuple[Command, set[int]]] = deque()  # with the envs that `drop` has left out

    def send(self, packed: Command) -> None:
        self._queue.append((packed, set()))

    def advance(self) -> bool:
        # If a signal interrupts a command, the command stays in the queue, and the next call of this method continues
        # it with the next env.
        if not self._replies and self._queue:
            self._replies.append(self.execute(*self._queue[0]))
        return bool(self._replies)

    def receive(self) -> Reply:
        # The engine calls this method in a section that signals do not interrupt. Otherwise, an interrupt could leave
        # the command in the queue, and the host could later execute it again.
        self._queue.popleft()
        return super().receive()

    def drop(self, env_ids: Iterable[int], numbers: Container[int]) -> None:
        """Leave out envs of commands whose results are no longer wanted.

        Only commands that step or reset envs are affected: the one that was interrupted, and those in ``numbers``.
        """
        for command, dropped in self._queue:
            if command.writes_rows and (command.number in numbers or command.number == self.host.running.number):
                dropped.update(env_ids)

    def kill(self) -> None:
        self._queue.clear()
        self.host.close()
        with DeferSignals():  # an interrupt in a `__del__` would be lost
            self.host.detach()  # frees the memory now, not only when the user deletes the closed ParallelEnv


class CallerStep:
    """A `RepeatedStep` of a host in the caller's thread. The envs step in `wait`."""

    def __init__(self, channel: CallerChannel, prepared: RunningCommand) -> None:
        self._channel = channel
        self._prepared = prepared
        self._repeat = channel.host.repeat

    @classmethod
    def of(cls, channel: CallerChannel, command: Command) -> CallerStep | None:
        prepared = channel.host.prepare(command)
        return None if prepared is None else cls(channel, prepared)

    def send(self, number: int) -> None:
        self._prepared.command.number = number

    def wait(self, timeout: float) -> bool:
        # The call is made in a generator, whose frame does not refer to its caller after it has yielded. Otherwise, the
        # traceback of a failure would keep the caller's `ParallelEnv` alive, see `Host.execute`.
        (reply,) = (self._repeat(prepared) for prepared in (self._prepared,))
        return not (reply.values or reply.failures or reply.output)

    def leave_to_channels(self, number: int) -> None:
        # If the host has already executed a part of the command, it recognizes the command by its number and continues
        # it.
        self._prepared.command.number = number
        self._channel.send(self._prepared.command)


class JointStep:
    """A `RepeatedStep` in which workers and a host in the caller's thread step at the same time."""

    def __init__(self, workers: RepeatedStep, callers: CallerStep, num_workers: int) -> None:
        self._workers, self._callers, self._num_workers = workers, callers, num_workers

    def send(self, number: int) -> None:
        self._workers.send(number)
        self._callers.send(number + self._num_workers)

    def wait(self, timeout: float) -> bool:
        return self._callers.wait(timeout) and self._workers.wait(timeout)

    def leave_to_channels(self, number: int) -> None:
        self._workers.leave_to_channels(number)
        self._callers.leave_to_channels(number + self._num_workers)


def copy_arguments(command: Command) -> Command:
    """Replace a command's arguments with copies, so that later changes by the user do not affect the command."""
    copies = []
    copied = deep_copy_but_graph if command.operation == "step" else deep_copy
    for env_id, argument in zip(command.env_ids, command.each or (), strict=True):
        try:
            copies.append(copied(argument))
        except Exception as error:
            if signal_behind(error) is not None:
                raise
            raise cannot_be_given(command.operation, env_id, argument, error) from error
    command.each = copies
    return command


def copy_values(reply: Reply) -> Reply:
    """Replace a reply's values with copies, so that later changes by the envs do not affect the reply.

    A value that cannot be copied is replaced by a failure of its env, just as modes with several processes replace a
    value that cannot be pickled.
    """
    for env_id, value in list(reply.values.items()):
        try:
            if type(value) is not EnvFacts:
                reply.values[env_id] = value.copied() if type(value) is Extra else deep_copy(value)
        except BaseException as error:  # copying runs user code, which may raise anything
            if signal_behind(error) is not None:
                raise
            del reply.values[env_id]
            reply.failures[env_id] = Failure(cannot_travel(value, error), env_id, "the copying of its result")
    return reply
