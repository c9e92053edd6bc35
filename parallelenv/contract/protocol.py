"""The contract between `ParallelEnv` and its backends.

A *worker* steps envs: it is the caller's own thread, another thread, a process or a Ray actor. A *host* is the object
in a worker that owns its envs and executes commands on them. A *channel* is the caller's access to one host.

The life of a host is as follows. It is launched with a `WorkerSpec`, replies to a ``build`` command with the `EnvFacts`
of its envs, and is attached to the `Batch`. Then it executes commands in the order in which they were sent, and sends
one `Reply` to each.
"""

from __future__ import annotations

import math
import signal
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol

from parallelenv.contract.copying import deep_copy, deep_copy_but_graph
from parallelenv.contract.cpu_cores import usable_cores
from parallelenv.contract.worker_info import UNKNOWN_PROCESS, ProcessInfo
from parallelenv.errors import ArgumentError

if TYPE_CHECKING:
    from parallelenv.contract.batch import Array, Batch, Layout, Rows
    from parallelenv.contract.env_specs import EnvFactory
    from parallelenv.contract.failures import Failure
    from parallelenv.contract.spaces import Info, Space, State


class HostDied(Exception):  # noqa: N818 (a message from channel to pool, never seen by users)
    """Raised by a channel whose host has died."""


class UnreadableError(Exception):
    """Raised for a command or a reply that was pickled but cannot be unpickled; users never see it."""

    def __init__(self, number: int, reason: str) -> None:
        super().__init__(reason)
        self.number, self.reason = number, reason


@dataclass(slots=True)
class Command:
    """A request to one host to perform one operation on some of its envs.

    The operations are methods of `parallelenv.worker.host.Host`.
    """

    number: int  #: Unique within the pool; the reply has the same number.
    operation: str  #: Name of the operation, such as ``"step"``.
    env_ids: tuple[int, ...]  #: The envs, in the order requested.
    each: Sequence[Any] | None = None  #: One argument per env, or ``None`` if the operation takes none.
    common: Any = None  #: A further argument, the same for every env.
    autoreset: bool = False  #: Whether a step also resets each env whose episode it ends.
    begins: tuple[int, ...] = ()  #: Envs that a step resets instead of stepping them.
    #: Whether a step resets the envs for which the latest step set a flag in the batch; ``begins`` is then ignored.
    begins_ended: bool = False
    rows: Rows | None = None  #: Action rows of the envs, filled in by a channel whose host does not share the batch.
    #: Maximum number of commands to which the host has not replied when this one is sent; set by `Channel.pack`.
    most_pending: float = math.inf

    @property
    def reads_actions(self) -> bool:
        """True if the host reads the actions from the batch."""
        return self.operation == "step" and self.each is None

    @property
    def is_plain_step(self) -> bool:
        """True if the command is a step, its actions are in the batch, and ``begins`` is empty."""
        return self.reads_actions and not self.begins

    @property
    def writes_rows(self) -> bool:
        """True if the host writes its results to rows of the batch."""
        return self.operation in ("step", "reset") or (self.operation == "rollout" and self.common is not None)


ManageRequest = Literal["save", "load", "loose_leaves", "set_info_forms", "start_trace", "stop_trace"]
"""Names of methods of `parallelenv.worker.host.Host` that a ``manage`` command, which steps no env, can call."""


class Lookup(NamedTuple):
    """Says what the operation ``get`` returns for each env."""

    #: Name of an attribute, or several names joined by dots; ``None`` if the arguments give each env its own name.
    key: str | None = None
    #: ``"value"``: a one-tuple of the attribute's value, or nothing if the attribute is absent. ``"required"``: the
    #: value, or an `AbsentAttributeError`. ``"exists"``: a bool. ``"hint"``: a hint at the name that the user may have
    #: meant. ``"wrapper"``: a bool that says whether the env has a wrapper of the class that its argument names.
    how: str = "value"


class MethodCall(NamedTuple):
    """The name of a method and its arguments, for the operation ``call``."""

    name: str  #: Name of the method, or several names joined by dots.
    positional: tuple[object, ...] = ()  #: Positional arguments.
    named: Mapping[str, object] = {}  #: Keyword arguments.
    #: Whether to return an attribute that is not a method, instead of raising an error.
    or_attribute: bool = False


@dataclass(slots=True)
class Reply:
    """A host's reply to the command that has the same number."""

    number: int
    #: Results of the operation, by env id. Empty results are left out, so a plain step pickles nothing.
    values: dict[int, Any] = field(default_factory=dict)
    failures: dict[int, Failure] = field(default_factory=dict)  #: The failures, by env id.
    rows: Rows | None = None  #: Result rows of the command's env ids, from hosts that do not share the batch.
    output: Sequence[Printed] = ()  #: Env output that the caller would not see otherwise, and each `Remark`.


class Printed(NamedTuple):
    """Text that was printed in a worker."""

    env_ids: tuple[int, ...]  #: The envs, one of which printed the text.
    text: str  #: The text.


class Remark(Printed):
    """Text that is issued as a warning in the caller's process instead of being printed."""


class NoEffect(Remark):
    """A warning that one of the user's arguments has no effect."""


class Extra(NamedTuple):
    """What a step or reset of one env returns in addition to the env's row in the batch; ``None`` for absent values."""

    info: Info | None = None  #: The env's info.
    loose: list[object] | None = None  #: Leaves of its state that are not in the batch, in order.
    reward: tuple[object] | None = None  #: A one-tuple of its reward, if the reward is not a number.
    #: Like ``loose``, for the last state of an episode, if the step that ended the episode also reset the env.
    ended_loose: list[Any] | None = None
    reset_info: Info | None = None  #: The info of the reset within the step.
    #: ``True`` if a reset, which may be the one within the step, found no further episode. The env's row then still
    #: holds the env's last state.
    is_exhausted: bool | None = None
    #: A one-tuple of the ended episode's last state, if a row would change its type and `Layout.keeps_types` is set.
    ended_state: tuple[State] | None = None

    def copied(self) -> Extra:
        """Return a copy that shares nothing with the original, except the graphs of states."""
        info, loose, reward, ended_loose, reset_info, is_exhausted, ended_state = self
        # Absent states are left out, because `deep_copy_but_graph` takes 0.2 us even for ``None``.
        return Extra(
            deep_copy(info),
            loose and deep_copy_but_graph(loose),
            deep_copy(reward),
            ended_loose and deep_copy_but_graph(ended_loose),
            deep_copy(reset_info),
            is_exhausted,
            ended_state and deep_copy_but_graph(ended_state),
        )


NOTHING = Extra()
EXHAUSTED = {"exhausted": True}
"""The info of a reset that found no further episode, and of every later step of that env."""


@dataclass(frozen=True, slots=True)
class WorkerSpec:
    """The data needed to start one host, or to restart it after it has died."""

    env_ids: tuple[int, ...]  #: Ids of the host's envs, which are consecutive.
    envs: tuple[EnvFactory, ...]  #: One factory per env.
    silence_warnings: bool = True  #: Whether a worker process ignores warnings.
    threads: int = 1  #: Upper bound on BLAS and OpenMP threads of a worker process.
    seed_globals: bool = False  #: Whether each env has its own state of the process-wide random generators.
    worker_id: int = 0  #: Index of this worker, from 0.
    num_workers: int = 1  #: Number of workers.
    num_envs: int = 0  #: Number of envs of all hosts together.
    seed: int | None = None  #: Seed of env 0 before its first reset; env i gets ``seed + i``. ``None``: no seed.
    #: Read-only arrays for all envs, as returned by `Backend.share`; empty if there are none.
    shared: Mapping[str, Array] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class GroupFacts:
    """Properties of a vector env. Each of its sub-envs has its own env id."""

    num_envs: int  #: Number of its sub-envs.
    name: str  #: Its class, for messages.
    autoreset: str  #: Its autoreset mode: ``"NextStep"``, ``"SameStep"`` or ``"Disabled"``.
    is_assumed: bool = False  #: Whether the autoreset mode is assumed, because the metadata does not contain it.
    steps_some: bool = False  #: Whether it can step some of its sub-envs and not others.
    resets_some: bool = False  #: Whether it can reset some of its sub-envs.
    steps_ended: bool = False  #: Whether sub-envs whose episode has ended may be stepped; such a step does not count.
    seeds_each: bool = False  #: Whether it accepts a seed for each sub-env, instead of one seed for all.

    def does_for_some(self, operation: str) -> bool:
        """Return whether the vector env can execute an operation on only some of its sub-envs."""
        return (
            self.resets_some if operation == "reset" else operation == "step" and (self.steps_some or self.steps_ended)
        )


@dataclass(frozen=True, slots=True)
class EnvFacts:
    """The facts that the caller needs about an env, which may run in another process."""

    observation_space: Space | None  #: ``None`` if the env declares none.
    action_space: Space | None  #: ``None`` if the env declares none.
    metadata: Info  #: The env's ``metadata``.
    render_mode: str | None  #: The env's ``render_mode``.
    process: ProcessInfo = UNKNOWN_PROCESS  #: The process in which the env runs.
    instance: int = 0  #: The `id`, in that process, of the object inside all wrappers, to distinguish it from others.
    has_steps: bool = True  #: Whether it has ``reset`` and ``step``; otherwise it only supports calls and attributes.
    group: GroupFacts | None = None  #: The properties of a vector env; ``None`` for a single env.


@dataclass(frozen=True, slots=True)
class Death:
    """The known facts about the death of a host."""

    pid: int | None = None  #: Process id, if known.
    exitcode: int | None = None  #: Exit code, negative for a signal, if known.
    detail: str = ""  #: Other known facts: one sentence, or empty.
    last_lines: str = ""  #: The last lines that the host printed, or empty.

    def __str__(self) -> str:
        """Return what happened and the likely cause, in one or two sentences."""
        if self.exitcode is None:
            return self.detail or "How it exited is not known."
        if self.exitcode >= 0:
            what = f"Its exit code is {self.exitcode}; most likely an env, or a library that it uses, ended the"
            return f"{what} process. {self.detail}".strip()
        number = -self.exitcode
        name = signal.Signals(number).name if number in set(signal.Signals) else f"signal {number}"
        cause = {
            "SIGKILL": "; often the system's out-of-memory killer, or kill -9",
            "SIGSEGV": "; a crash in compiled code that an env uses",
            "SIGABRT": "; compiled code that an env uses aborted",
            "SIGTERM": "; a request to terminate",
        }.get(name, "")
        return f"It was killed by {name}{cause}. {self.detail}".strip()


class Channel(Protocol):
    """The caller's access to one host, wherever the host runs."""

    #: Whether the host runs in the caller's thread, and only while the caller waits for it. If so, the channel has the
    #: method `parallelenv.backends._in_process.CallerChannel.drop`.
    in_caller: bool

    def pack(self, command: Command) -> Any:
        """Return a command in the form in which `send` takes it.

        The commands for all hosts are packed before the first one is sent, so if an argument cannot be copied
        (`UnpicklableError`), no host is affected. If `send` could block because the host is busy, this method sets
        `Command.most_pending`.
        """

    def send(self, packed: Any) -> None:
        """Send a packed command and return at once; raise `HostDied` if this fails because the host has died."""

    def receive(self) -> Reply:
        """Return the next reply; raise `HostDied` if the host has died and no reply is left.

        This method is called only after `Backend.wait` has returned this channel.
        """

    def attach(self, batch: Batch) -> None:
        """Give the host the batch whose rows later commands read and write."""

    def cause_of_death(self) -> Death:
        """Return the known facts about the death of a host for which `HostDied` was raised."""

    def kill(self) -> None:
        """End the host at once, whatever it is doing, and release its resources."""


class RepeatedStep(Protocol):
    """A plain step that a backend has prepared. The step can be repeated many times with the same envs.

    The hosts have no other pending command when `send` is called. Ctrl-C may interrupt `send` and `wait` at any point.
    """

    def send(self, number: int) -> None:
        """Make the hosts step.

        The command for the first host gets the number ``number``; the commands for the other hosts get the numbers that
        follow it.
        """

    def wait(self, timeout: float) -> bool:
        """Wait until all hosts have stepped, but no longer than ``timeout`` seconds.

        Return ``True`` if all hosts have stepped and have nothing to report; in that case, they send no replies. If the
        result is ``False``, the caller calls `leave_to_channels` next.
        """

    def leave_to_channels(self, number: int) -> None:
        """Let the channels receive the replies to the step ``number`` like the replies to any other command.

        Ctrl-C does not interrupt this method. The method must ensure that each host steps exactly once, even if Ctrl-C
        interrupted `send` or `wait`.
        """


class Backend(ABC):
    """Decides where hosts run, and waits for them. It does not interpret commands.

    Every backend derives from this class. The keyword-only arguments of its constructor are the options that
    ``ParallelEnv(...)`` accepts with this backend.
    """

    #: Whether all envs run in this process. If so, live instances are used and not copied, and actions with gradients
    #: reach envs with their graph.
    uses_live_envs: bool = False
    placement: str = ""  #: Text in ``repr`` that says how hosts are reached; may be empty.

    def plan_workers(self, num_envs: int, num_cpus: int | None, num_gpus: float) -> int:
        """Return how many workers to start for ``num_envs`` envs: at least 1 and at most ``num_envs``.

        The workers may use ``num_cpus`` cores; ``None`` means all usable ones. By default, there is one worker per
        core. Backends that reserve GPUs divide ``num_gpus`` among the workers.
        """
        return min(num_cpus or usable_cores(), num_envs)

    def share(self, arrays: Mapping[str, Array]) -> Mapping[str, Array]:
        """Copy arrays, which contain no Python objects, to memory that all hosts can read.

        This method is called between `plan_workers` and `launch`, if the user gives ``shared=``. By default, that is an
        error.

        Returns:
            The value for `WorkerSpec.shared`. `launch` gives it to the hosts as read-only arrays.
        """
        raise ArgumentError(
            f"shared={list(arrays)} was given, but {type(self).__name__} has no share(). Let the envs load what they "
            "need, or choose another mode."
        )

    @abstractmethod
    def launch(self, specs: Sequence[WorkerSpec]) -> list[Channel]:
        """Start one host per spec, all of them in parallel.

        If an env cannot be sent to its host, this method raises `UnpicklableError` before anything is started.
        """

    @abstractmethod
    def allocate(self, layout: Layout) -> Batch:
        """Return a new batch in memory that this backend's hosts can use."""

    @abstractmethod
    def wait(self, channels: Sequence[Channel], timeout: float | None, wanted: int = 1) -> Sequence[Channel]:
        """Wait until a host with a pending command has a reply or has died.

        Args:
            channels: The channels of hosts with a pending command; there is at least one.
            timeout: Seconds; ``None`` means no limit.
            wanted: Number of replies that the caller needs to continue. A backend may wait for this many, but it must
                stop waiting earlier if a host dies or prints something.

        Returns:
            The channels whose `Channel.receive` will not block; empty if the timeout has expired.
        """

    def prepare_step(self, commands: Sequence[tuple[Channel, Command]]) -> RepeatedStep | None:
        """Prepare a step that is likely to be repeated many times. Each command is a plain step of an idle host.

        Return ``None`` if the backend has no quicker way than to pack and send the commands each time.
        """
        return None

    def flush(self) -> None:  # noqa: B027 (most channels queue nothing)
        """Send what the channels have queued. The caller has passed all commands of a call to the channels."""

    def fileno(self) -> int | None:
        """Return a descriptor with which an event loop can wait for replies.

        The descriptor becomes readable when a host replies or dies, and stays readable until `wait` has returned that
        host's channel. The descriptor may also be readable when there is no reply. If there is no such descriptor, the
        result is ``None``, and the caller calls `wait` repeatedly.
        """
        return None

    @abstractmethod
    def close(self, channels: Sequence[Channel], timeout: float) -> Sequence[Printed]:
        """Close all envs and end all hosts: ask the hosts to exit, then terminate and finally kill those that remain.

        This method may be called repeatedly: after a `KeyboardInterrupt`, it is called again with a timeout of 0.

        Args:
            channels: The channels of all hosts that have been launched and not killed. Hosts that an interrupted
                `launch` has started are also ended.
            timeout: Seconds that the hosts have to exit before they are terminated.

        Returns:
            Env output that was in no reply and that the caller would otherwise not see.
        """
