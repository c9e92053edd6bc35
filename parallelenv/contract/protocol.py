"""The contract between `ParallelEnv` and its backends.

A *worker* steps envs: it is the caller's own thread, another thread, a process or a Ray actor. A *host* is the object
in a worker that owns its envs and executes commands on them. A *channel* is the caller's access to one host.

A backend decides where hosts run, where the memory of the batch is, and how the caller receives replies. Ids, done
policies, seeds, errors and alignment are written once, outside, so backends cannot disagree about them.

The life of a host: it is launched with a `WorkerSpec`, replies to a ``build`` command with the `EnvFacts` of its envs,
is attached to the `Batch`, and then executes commands in the order sent, one `Reply` each.
"""

from __future__ import annotations

import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol

from parallelenv.contract.worker_info import UNKNOWN_PROCESS, ProcessInfo

if TYPE_CHECKING:
    from parallelenv.contract.batch import Array, Batch, Layout, Rows
    from parallelenv.contract.env_specs import EnvFactory
    from parallelenv.contract.failures import Failure
    from parallelenv.contract.spaces import Info, Space, State


class HostDied(Exception):  # noqa: N818 (a message from channel to pool, never seen by users)
    """Raised by a channel whose host has died."""


class UnreadableError(Exception):
    """Raised for a command or a reply that was pickled but does not unpickle; never seen by users.

    It has the ``number`` of the command and the ``reason``, the message of the unpickling error.
    """

    def __init__(self, number: int, reason: str) -> None:
        super().__init__(reason)
        self.number, self.reason = number, reason


OPERATIONS = frozenset({"build", "reset", "step", "rollout", "get", "set", "call", "manage"})
"""The operations of a host."""


@dataclass(slots=True)
class Command:
    """One request to one host: the same operation on some of its envs.

    The operations are methods of `parallelenv.worker.host.Host`, where ``each`` and ``common`` are described.
    """

    number: int  #: Unique within the pool; the reply carries it.
    operation: str  #: One of `OPERATIONS`.
    env_ids: tuple[int, ...]  #: The envs, in the order requested.
    each: Sequence[Any] | None = None  #: One argument per env, or ``None`` if the operation takes none.
    common: Any = None  #: A further argument, the same for every env.
    autoreset: bool = False  #: Whether a step also resets each env whose episode it ends.
    begins: tuple[int, ...] = ()  #: Envs that a step resets instead of stepping them.
    begins_ended: bool = False  #: Whether these are those whose flags, of their latest step, are set in the batch.
    rows: Rows | None = None  #: Action rows of the envs, filled in by a channel whose host does not share the batch.

    @property
    def is_plain_step(self) -> bool:
        """Whether it is a step with the actions in the batch and no resets besides."""
        return self.operation == "step" and self.each is None and not self.begins

    @property
    def reads_actions(self) -> bool:
        """Whether the host reads the actions from the batch."""
        return self.operation == "step" and self.each is None

    @property
    def writes_rows(self) -> bool:
        """Whether the host writes its results to rows of the batch."""
        return self.operation in ("step", "reset") or (self.operation == "rollout" and self.common is not None)


ManageRequest = Literal["save", "load", "loose_leaves", "set_info_forms", "start_trace", "stop_trace"]
"""What a ``manage`` command does, which steps no env: methods of `parallelenv.worker.host.Host`."""


class Lookup(NamedTuple):
    """The kind of value that ``get`` returns for each env."""

    #: Name of an attribute, or several joined by dots; ``None`` if each env has its own among the arguments.
    key: str | None = None
    #: ``"value"``: a one-tuple of its value, or nothing if it is absent. ``"required"``: its value, or
    #: `AbsentAttributeError`. ``"exists"``: a bool. ``"hint"``: a hint at what an absent name may have meant.
    #: ``"wrapper"``: whether the env has a wrapper of the class in its argument.
    how: str = "value"


class MethodCall(NamedTuple):
    """A method with its arguments, for ``call``."""

    name: str  #: Name of the method, or several names joined by dots.
    positional: tuple[object, ...] = ()  #: Positional arguments.
    named: Mapping[str, object] = {}  #: Keyword arguments.
    or_attribute: bool = False  #: Whether another attribute of that name is returned as it is, instead of raising.


@dataclass(slots=True)
class Reply:
    """A host's reply to the command with this number."""

    number: int
    #: Results of the operation, by env id, without empty ones: a plain step pickles nothing.
    values: dict[int, Any] = field(default_factory=dict)
    failures: dict[int, Failure] = field(default_factory=dict)  #: The failures, by env id.
    rows: Rows | None = None  #: Result rows of the command's env ids, from hosts that do not share the batch.
    output: Sequence[Printed] = ()  #: Output of envs that the caller does not see, and each `Remark`.


class Printed(NamedTuple):
    """A text that was printed in a worker."""

    env_ids: tuple[int, ...]  #: The envs of which one printed it.
    text: str  #: The text.


class Remark(Printed):
    """A text that is issued as a warning in the caller's process instead of being printed."""


class NoEffect(Remark):
    """A warning that an argument of the user has no effect."""


class Extra(NamedTuple):
    """Values that a step or reset of one env returns beyond its rows in the batch; ``None`` for those it lacks."""

    info: Info | None = None  #: The env's info.
    loose: list[object] | None = None  #: Leaves of its state that are not in the batch, in order.
    reward: tuple[object] | None = None  #: A one-tuple of its reward if that is not a number.
    ended_loose: list[Any] | None = None  #: Like ``loose``, of the last state of an episode if the env was also reset.
    reset_info: Info | None = None  #: The info of that reset.
    #: ``True`` if that reset, or the reset that this is the result of, found no further episode. The env's row then
    #: still holds its last state.
    is_exhausted: bool | None = None
    #: A one-tuple of that last state, if the rows change its type and `Layout.keeps_types` is set.
    ended_state: tuple[State] | None = None


NOTHING = Extra()
EXHAUSTED = {"exhausted": True}
"""The info of a reset that found no further episode, and of an env that has been idle since."""


@dataclass(frozen=True, slots=True)
class WorkerSpec:
    """The data needed to start one host, the first time or again after it died."""

    env_ids: tuple[int, ...]  #: Its envs: consecutive ids.
    envs: tuple[EnvFactory, ...]  #: A factory for each of them.
    silence_warnings: bool = True  #: Whether a worker process ignores warnings.
    threads: int = 1  #: Upper bound on BLAS and OpenMP threads of a worker process.
    seed_globals: bool = False  #: Whether each env has its own state of the generators that a process shares.
    worker_id: int = 0  #: Index of this worker, from 0.
    num_workers: int = 1  #: Number of workers.
    num_envs: int = 0  #: Number of envs of all hosts.
    seed: int | None = None  #: Seed of env 0 before its first reset; env i gets ``seed + i``. ``None``: no seed.
    #: Read-only arrays for all envs, as returned by `Sharing.share`; empty if there are none.
    shared: Mapping[str, Array] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class GroupFacts:
    """Properties of a vector env, whose sub-envs have an env id each."""

    num_envs: int  #: Number of its sub-envs.
    name: str  #: Its class, for messages.
    autoreset: str  #: When it starts the next episode of a sub-env: ``"NextStep"``, ``"SameStep"``, ``"Disabled"``.
    is_assumed: bool = False  #: Whether that is assumed, because its metadata does not contain it.
    steps_some: bool = False  #: Whether it can step some of its sub-envs and not others.
    resets_some: bool = False  #: Whether it can reset some of its sub-envs.
    steps_ended: bool = False  #: Whether it takes a step of sub-envs whose episode has ended, which does not count.
    seeds_each: bool = False  #: Whether it takes a seed for each sub-env, and not one for all.

    def does_for_some(self, operation: str) -> bool:
        """Return whether it can execute an operation on only some of its sub-envs."""
        return (
            self.resets_some if operation == "reset" else operation == "step" and (self.steps_some or self.steps_ended)
        )


@dataclass(frozen=True, slots=True)
class EnvFacts:
    """The facts that the caller needs about an env that runs elsewhere."""

    observation_space: Space | None  #: ``None`` if the env declares none.
    action_space: Space | None  #: ``None`` if the env declares none.
    metadata: Info  #: The env's ``metadata``.
    render_mode: str | None  #: The env's ``render_mode``.
    process: ProcessInfo = UNKNOWN_PROCESS  #: The process that it runs in.
    instance: int = 0  #: Its `id` there, to tell it from other objects.
    has_steps: bool = True  #: Whether it has ``reset`` and ``step``; if not, it serves only calls and attributes.
    group: GroupFacts | None = None  #: Its properties as a vector env; ``None`` if it is a single env.


@dataclass(frozen=True, slots=True)
class Death:
    """The known facts about the death of a host."""

    pid: int | None = None  #: Process id, if known.
    exitcode: int | None = None  #: Exit code, negative for a signal, if known.
    detail: str = ""  #: Other known facts, one sentence or empty.
    last_lines: str = ""  #: The last lines that it printed, or empty.

    def __str__(self) -> str:
        """Return what happened and the likely cause, one or two sentences."""
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
    """How the caller reaches one host, wherever it runs."""

    in_caller: bool  #: Whether the host runs in the caller's thread, and only while the caller waits for it.

    def pack(self, command: Command) -> Any:
        """Return a command in the form that is sent; send nothing yet.

        A call packs the commands of all hosts before it sends the first, so that an argument that cannot be copied
        (`UnpicklableError`) affects no host.
        """

    def send(self, packed: Any) -> None:
        """Send a packed command and return at once; raise `HostDied` if the host has died without executing it."""

    def receive(self) -> Reply:
        """Return the next reply; raise `HostDied` if the host has died and none is left.

        It is called only after `Backend.wait` returned this channel.
        """

    def attach(self, batch: Batch) -> None:
        """Give the host the batch that has the rows of later commands."""

    def cause_of_death(self) -> Death:
        """Return the known facts about the death of a host for which `HostDied` was raised."""

    def kill(self) -> None:
        """End the host at once, whatever it is doing, and release its resources."""


class RepeatedStep(Protocol):
    """A plain step of the same envs, which a backend has prepared to send again and again.

    A `StepPlan` of the engine repeats it. Ours are `MessageStep`, a message to each host; `BellStep`, which wakes all
    worker processes at once; `CallerStep`, of a host in the caller's thread; and `JointStep`, of one of the first two
    and a `CallerStep`.

    Its hosts have no other pending command when `send` is called. An interrupt may come anywhere in these methods.
    """

    def send(self, number: int) -> None:
        """Let the hosts step. The command to the first has this number, to the next the next one, and so on."""

    def wait(self, timeout: float) -> bool:
        """Wait until all hosts have stepped, no longer than ``timeout`` seconds.

        It returns ``True`` if all have stepped and have nothing to report: no reply follows. If it returns ``False``,
        `leave_to_channels` is called.
        """

    def leave_to_channels(self, number: int) -> None:
        """Let the channels receive the hosts' replies to the step of this number, like those to any other command.

        It is called in a section that Ctrl-C does not interrupt, also if `send` or `wait` was interrupted anywhere. The
        hosts then step exactly once.
        """


class Backend(Protocol):
    """Places hosts and waits for them. It does not interpret commands.

    The keyword-only arguments of its constructor are its options in ``ParallelEnv(...)``. A backend may derive from
    this class, for the defaults.
    """

    #: Whether all envs run in this process: live instances are used themselves, not copied, and actions with gradients
    #: reach them with their graph.
    uses_live_envs: bool = False
    placement: str = ""  #: Text that ``repr`` shows about how hosts are reached; may be empty.

    def plan_workers(self, num_envs: int, num_cpus: int | None, num_gpus: float) -> int:
        """Return how many workers to start for ``num_envs`` envs, from 1 to that number.

        They may use ``num_cpus`` cores, ``None`` for all usable ones. Backends that reserve GPUs divide ``num_gpus``.
        """

    def launch(self, specs: Sequence[WorkerSpec]) -> list[Channel]:
        """Start one host per spec, all at the same time.

        If an env cannot be sent to its host, it raises `UnpicklableError` before anything is started.
        """

    def allocate(self, layout: Layout) -> Batch:
        """Return a new batch in memory of a kind that this backend's hosts can use."""

    def wait(self, channels: Sequence[Channel], timeout: float | None, wanted: int = 1) -> Sequence[Channel]:
        """Wait until a host with a pending command has a reply or has died.

        Args:
            channels: Those of such hosts, at least one.
            timeout: Seconds; ``None`` means no limit.
            wanted: Number of replies that the caller needs to continue. A backend that wakes for each of them at little
                cost may wait for that many; it must not keep waiting when a host has died or has printed something.

        Returns:
            The channels whose `Channel.receive` will not block; empty after ``timeout``.
        """

    def prepare_step(self, commands: Sequence[tuple[Channel, Command]]) -> RepeatedStep | None:
        """Prepare a step that is likely to be repeated many times: plain steps of hosts without a pending command.

        It returns ``None`` if there is no quicker way than to pack and send the commands each time.
        """
        return None

    def fileno(self) -> int | None:
        """Return a descriptor of the backend's by which an event loop can wait for replies.

        It becomes readable when a host replies or dies, and stays so until `wait` has returned that host's channel. It
        may be readable without a reply. ``None``: `wait` is called repeatedly.
        """
        return None

    def close(self, channels: Sequence[Channel], timeout: float) -> Sequence[Printed]:
        """Close all envs and end all hosts: ask, then terminate, then kill. It may be called again.

        It may raise `KeyboardInterrupt`; it is then called again with a timeout of 0.

        Args:
            channels: All that were launched and not killed; hosts of an interrupted `launch` are also ended.
            timeout: Seconds before hosts that have not exited are killed.

        Returns:
            Output of envs that the caller does not see and that no reply contained.
        """


class Sharing(Backend, Protocol):
    """A backend that can give all envs the same arrays. The other backends reject ``shared=``."""

    def share(self, arrays: Mapping[str, Array]) -> Mapping[str, Array]:
        """Copy arrays of plain dtypes to where all hosts can read them, between `plan_workers` and `launch`.

        Returns:
            The value for `WorkerSpec.shared`; `launch` gives it to the hosts as read-only arrays.
        """
