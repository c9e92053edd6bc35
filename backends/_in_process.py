"""Code shared by hosts in the caller's own process, where replies are copied as between processes."""

from __future__ import annotations

from collections import deque

from parallelenv.contract.batch import Batch
from parallelenv.contract.copying import cannot_be_given, cannot_travel, deep_copy, deep_copy_but_graph
from parallelenv.contract.failures import Failure
from parallelenv.contract.interrupts import DeferSigint
from parallelenv.contract.protocol import Command, Death, EnvFacts, Extra, RepeatedStep, Reply, WorkerSpec
from parallelenv.worker.host import Host
from parallelenv.worker.running_command import RunningCommand

_STATES = frozenset({"loose", "ended_loose", "ended_state"})
"""The fields of an `Extra` that may carry gradients."""


class InProcessChannel:
    """A `Channel` to a host in this process, with copies of arguments and replies."""

    in_caller = False

    def __init__(self, host: Host) -> None:
        self._host = host
        self._replies: deque[Reply] = deque()

    @property
    def host(self) -> Host:
        """The host, which gives a caller access to the envs themselves."""
        return self._host

    def pack(self, command: Command) -> Command:
        return command if command.each is None else copy_arguments(command)

    def advance(self) -> bool:
        """Do the work that is possible without waiting; return whether there is a reply."""
        return bool(self._replies)

    def receive(self) -> Reply:
        return self._replies.popleft()

    def attach(self, batch: Batch) -> None:
        self._host.attach(batch)

    def cause_of_death(self) -> Death:
        return Death()


class CallerChannel(InProcessChannel):
    """A queue of commands to a host in the caller's own thread. The host works when the caller waits."""

    in_caller = True

    def __init__(self, spec: WorkerSpec) -> None:
        super().__init__(Host(spec, in_caller=True))
        self._queue: deque[Command] = deque()

    def send(self, packed: Command) -> None:
        self._queue.append(packed)

    def advance(self) -> bool:
        """Execute the oldest command, unless there is a reply already; return whether there is one.

        After an interrupt the command stays in the queue and continues with the next env.
        """
        if not self._replies and self._queue:
            reply = self._host.execute(self._queue[0])
            self._replies.append(copy_values(reply) if reply.values else reply)
        return bool(self._replies)

    def receive(self) -> Reply:
        """Return the reply and forget its command, both in a section that Ctrl-C does not interrupt.

        A command that stayed in the queue would be executed again, once a planned step had passed the queue by.
        """
        self._queue.popleft()
        return super().receive()

    def kill(self) -> None:
        self._queue.clear()
        self._host.close()
        with DeferSigint():  # an interrupt in a `__del__` would be lost
            self._host.detach()  # frees its memory now, not when the user drops the closed object


class CallerStep:
    """A `RepeatedStep` of a host in the caller's thread."""

    def __init__(self, channel: CallerChannel, prepared: RunningCommand) -> None:
        self._channel = channel
        self._prepared = prepared
        self._repeat = channel.host.repeat

    @classmethod
    def of(cls, channel: CallerChannel, command: Command) -> CallerStep | None:
        """Return the step of a command, or ``None`` if the host cannot prepare it."""
        prepared = channel.host.prepare(command)
        return None if prepared is None else cls(channel, prepared)

    def send(self, number: int) -> None:
        self._prepared.command.number = number

    def wait(self, timeout: float) -> bool:
        """Step the envs, because they run in the caller's thread. See `RepeatedStep`."""
        # Through a generator, whose frame does not refer to its caller once it has yielded: the traceback of a failure
        # would keep the caller's `ParallelEnv` alive, see `Host.execute`.
        (reply,) = (self._repeat(prepared) for prepared in (self._prepared,))
        return not (reply.values or reply.failures or reply.output)

    def leave_to_channels(self, number: int) -> None:
        """See `RepeatedStep`. The host knows by the command's number how far it is."""
        self._prepared.command.number = number
        self._channel.send(self._prepared.command)


class JointStep:
    """A `RepeatedStep` of workers and of the caller's own envs, which step while the workers step.

    The caller's command has the number after those of the workers, whose number is ``num_workers``.
    """

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
    """Replace a command's arguments by copies, which later changes by the user do not affect.

    Raises:
        UnpicklableError: If an argument cannot be copied, as between processes.
    """
    copies = []
    copied = deep_copy_but_graph if command.operation == "step" else deep_copy
    for env_id, argument in zip(command.env_ids, command.each or (), strict=True):
        try:
            copies.append(copied(argument))
        except Exception as error:
            raise cannot_be_given(command.operation, env_id, argument, error) from error
    command.each = copies
    return command


def copy_values(reply: Reply) -> Reply:
    """Replace a reply's values by copies, which later changes by the envs do not affect.

    A value that cannot be copied becomes a failure of its env, as between processes.
    """
    for env_id, value in list(reply.values.items()):
        try:
            if type(value) is Extra:
                copies = {
                    name: deep_copy_but_graph(part) if name in _STATES else deep_copy(part)
                    for name, part in zip(Extra._fields, value, strict=True)
                    if part is not None
                }
                reply.values[env_id] = Extra(**copies)
            elif type(value) is not EnvFacts:
                reply.values[env_id] = deep_copy(value)
        except Exception as error:  # noqa: BLE001 (copying runs user code, which may raise anything)
            del reply.values[env_id]
            reply.failures[env_id] = Failure(cannot_travel(value, error), env_id, "the copying of its result")
    return reply
