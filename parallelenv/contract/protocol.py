"""The contract between `ParallelEnv` and its backends.

A backend decides where hosts live, where the memory of the batch lies, and how the caller is
told of an answer. Ids, policies, seeds, errors and alignment are written once, outside, so
that no two backends can disagree about them.

The life of a host: it is launched with a `WorkerSpec`, answers a ``build`` command with the
`EnvFacts` of its envs, is attached to the `Batch`, and then executes commands in the order in
which they were sent, one `Reply` each.
"""

from __future__ import annotations

import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from parallelenv.contract.process_info import UNKNOWN_PROCESS, ProcessInfo

if TYPE_CHECKING:
    from parallelenv.contract.batch import Array, Batch, Layout, Rows
    from parallelenv.contract.env_specs import EnvFactory
    from parallelenv.contract.failures import Failure


class HostDied(Exception):  # noqa: N818 (a message from channel to pool, never seen by users)
    """Raised by a channel whose host is gone."""


class UnreadableError(Exception):
    """Raised for a command or a reply that was pickled but does not unpickle; never seen by users.

    Attributes:
        number: Number of the command.
        reason: What unpickling said.
    """

    def __init__(self, number: int, reason: str) -> None:
        super().__init__(reason)
        self.number = number
        self.reason = reason


NOTED = 1 << 62
"""The numbers from here on are of commands that a host is to note, if it is watched. They cost no message a byte."""


@dataclass(slots=True)
class Command:
    """One request to one host: the same operation on some of its envs.

    Attributes:
        number: Unique within the pool; the reply carries it. Of a command that a watched host is to note it is `NOTED`
            or more.
        name: Operation of `backends.host.Host`.
        env_ids: The envs, in the order asked.
        each: One argument per env, or ``None`` if the operation takes none.
        common: What the operation needs besides, the same for every env. For ``step`` it says who begins an episode:
            ``True``: whoever ends in this step, ``False``: nobody, a tuple of env ids: these do, instead of being
            stepped.
        rows: Action rows of ``env_ids``, filled in by a channel whose host does not share
            the caller's batch.
    """

    number: int
    name: str
    env_ids: tuple[int, ...]
    each: Sequence[Any] | None = None
    common: Any = None
    rows: Rows | None = None

    @property
    def reads_actions(self) -> bool:
        """Whether the host takes the actions from the batch."""
        return self.name == "step" and self.each is None

    @property
    def writes_rows(self) -> bool:
        """Whether the host answers by writing rows of the batch."""
        return self.name in ("step", "reset", "rollout")


@dataclass(slots=True)
class Reply:
    """A host's answer to one command.

    Attributes:
        number: The command's number.
        values: What the operation returned, by env id; envs with nothing to say are left
            out, so that a plain step costs no pickling.
        failures: What went wrong, by env id.
        rows: Result rows of the command's env ids, from hosts that do not share the
            caller's batch.
        output: What the host's envs printed where the caller does not see it, and each `Remark`.
    """

    number: int
    values: dict[int, Any] = field(default_factory=dict)
    failures: dict[int, Failure] = field(default_factory=dict)
    rows: Rows | None = None
    output: Sequence[Printed] = ()


class Printed(NamedTuple):
    """A piece of text that was printed in a worker.

    Attributes:
        env_ids: The env that printed it; all envs of the worker if it is not known which.
        text: The text.
    """

    env_ids: tuple[int, ...]
    text: str


class Remark(Printed):
    """What the caller is to be warned of, rather than a text that was printed."""


class Extra(NamedTuple):
    """What a step or reset of one env answers beyond its rows in the batch.

    Attributes:
        info: The env's info, ``None`` if it is empty.
        loose: Leaves of its state that are not in the batch, in order.
        reward: A one-tuple of its reward if that is no number.
        ended_loose: Like ``loose``, of the last state of an episode that ended in this step and
            was followed by a reset.
        reset_info: The info of that reset, ``None`` if it is empty.
        is_exhausted: ``True`` if that reset, or the one that this answers, has found no further episode. The row of
            the env then still has its last state. ``None`` otherwise.
        ended_state: A one-tuple of that last state, where the rows do not keep it as it was given and
            `Layout.keeps_types` says that it is to stay so.
    """

    info: dict[str, Any] | None = None
    loose: list[Any] | None = None
    reward: tuple[Any] | None = None
    ended_loose: list[Any] | None = None
    reset_info: dict[str, Any] | None = None
    is_exhausted: bool | None = None
    ended_state: tuple[Any] | None = None


NOTHING = Extra()
EXHAUSTED = {"exhausted": True}
"""The info of a reset that has found no further episode, and of an env that rests since then."""


@dataclass(frozen=True, slots=True)
class WorkerSettings:
    """What every host is told about its surroundings.

    Attributes:
        silence_warnings: Whether a worker process ignores warnings.
        threads: Upper bound on BLAS and OpenMP threads of a worker process.
        seed_globals: Whether each env has its own state of the generators that a process shares.
    """

    silence_warnings: bool
    threads: int
    seed_globals: bool = False


@dataclass(frozen=True, slots=True)
class PoolPosition:
    """Where a host stands among all that a `ParallelEnv` has.

    Attributes:
        first_worker: Number of its first worker, or of the only one.
        num_workers: Number of workers of all hosts.
        num_envs: Number of envs of all hosts.
        seed: What env 0 is seeded with before its first reset, env 1 with one more, and so on; ``None``: nothing.
    """

    first_worker: int = 0
    num_workers: int = 1
    num_envs: int = 0
    seed: int | None = None


@dataclass(frozen=True, slots=True)
class WorkerSpec:
    """All that is needed to start one host, now or again after it died.

    Attributes:
        env_ids: The envs it owns: consecutive ids.
        envs: How to make each of them.
        num_cpus: Cores that are this host's share.
        settings: What every host is told.
        place: Where it stands among all hosts.
        shared: Read-only arrays for all envs, as `Sharing.share` has made them; empty if there are none.
    """

    env_ids: tuple[int, ...]
    envs: tuple[EnvFactory, ...]
    num_cpus: int
    settings: WorkerSettings
    place: PoolPosition = PoolPosition()
    shared: Mapping[str, Array] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Placement:
    """How a backend wants envs placed.

    Attributes:
        cpus: Cores that each host may use; there are as many hosts as numbers. Envs are dealt out in proportion.
    """

    cpus: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class EnvFacts:
    """What the caller must know of an env that lives elsewhere.

    Attributes:
        observation_space: ``None`` if the env declares none.
        action_space: ``None`` if the env declares none.
        metadata: The env's ``metadata``.
        render_mode: The env's ``render_mode``.
        seat: Where it lives.
        instance: What tells it from other objects there: its `id`.
        has_steps: Whether it has ``reset`` and ``step``; if not it is there for calls and attributes alone.
    """

    observation_space: Any
    action_space: Any
    metadata: dict[str, Any]
    render_mode: str | None
    seat: ProcessInfo = UNKNOWN_PROCESS
    instance: int = 0
    has_steps: bool = True


@dataclass(frozen=True, slots=True)
class Death:
    """What is known of the end of a host.

    Attributes:
        pid: Process id, if known.
        exitcode: Exit code, negative for a signal, if known.
        detail: What else was learnt, one sentence or empty.
        last_lines: The last that it printed, a line each, or empty.
    """

    pid: int | None = None
    exitcode: int | None = None
    detail: str = ""
    last_lines: str = ""

    def __str__(self) -> str:
        """Say what happened and the likely cause, one or two sentences."""
        if self.exitcode is None and self.detail:
            return self.detail
        return f"{_describe_exit(self.exitcode)} {self.detail}".strip()


def _describe_exit(exitcode: int | None) -> str:
    if exitcode is None:
        return "How it ended is not known."
    if exitcode >= 0:
        return f"It ended with exit code {exitcode}; most likely an env, or a library that it uses, ended the process."
    try:
        name = signal.Signals(-exitcode).name
    except ValueError:
        name = f"signal {-exitcode}"
    causes = {
        "SIGKILL": "; often the system's out-of-memory killer, or kill -9",
        "SIGSEGV": "; a crash in compiled code that an env uses",
        "SIGABRT": "; compiled code that an env uses gave up",
        "SIGTERM": "; somebody asked it to end",
    }
    return f"It was killed by {name}{causes.get(name, '')}."


class Channel(Protocol):
    """How the caller reaches one host, wherever it lives.

    Attributes:
        in_caller: Whether the host works in the caller's thread, while the caller waits for it, and not meanwhile.
    """

    in_caller: bool

    def pack(self, command: Command) -> Any:
        """Return a command in the form in which it travels; nothing is sent yet.

        A call packs for all hosts before it sends to the first, so that an argument that
        cannot be copied harms nobody.

        Raises:
            UnpicklableError: If an argument cannot be copied to the host.
        """
        ...

    def send(self, packed: Any) -> None:
        """Send a packed command and return at once.

        Raises:
            HostDied: If the host is gone; the command was not executed.
        """
        ...

    def receive(self) -> Reply:
        """Return the next reply. Called only after `Backend.wait` named this channel.

        Raises:
            HostDied: If the host is gone and has no reply left.
        """
        ...

    def attach(self, batch: Batch) -> None:
        """Hand the batch to the host. Later commands find their rows there."""
        ...

    def cause_of_death(self) -> Death:
        """Return what is known of the end of a host for which `HostDied` was raised."""
        ...

    def kill(self) -> None:
        """End the host at once, whatever it is doing, and release what it held."""
        ...


class Branching(Channel, Protocol):
    """A channel to a host with workers of its own, which it lets work side by side.

    Its replies come in any order: to a command as soon as all of its envs have answered. So a command to each
    worker keeps one that is slow from delaying the others.

    Attributes:
        branches: Env ids of each worker.
    """

    branches: tuple[tuple[int, ...], ...]


class Backend(Protocol):
    """Places hosts and waits for them. It gives no meaning to any command.

    The keyword-only arguments of its constructor are its options in ``ParallelEnv(...)``.

    Attributes:
        uses_live_envs: Whether all envs live in this process: instances given are used themselves, not as copies, and
            actions that carry gradients reach them with their graph.
        placement: What ``repr`` says on how hosts are reached; empty if there is nothing to say.
    """

    uses_live_envs: bool
    placement: str

    def plan(self, num_envs: int, num_cpus: int | None, num_gpus: float) -> Placement:
        """Return how many hosts to use for ``num_envs`` envs.

        Args:
            num_envs: Number of envs, at least 1.
            num_cpus: Cores the envs may use; ``None`` means all usable ones.
            num_gpus: GPUs to share out over the hosts, for backends that reserve them.
        """
        ...

    def launch(self, specs: Sequence[WorkerSpec]) -> list[Channel]:
        """Start one host per spec, all at once.

        Raises:
            UnpicklableError: If an env cannot move to its host; nothing was started.
        """
        ...

    def allocate(self, layout: Layout) -> Batch:
        """Return a new batch in memory that suits this backend's hosts."""
        ...

    def wait(self, channels: Sequence[Channel], timeout: float | None) -> Sequence[Channel]:
        """Wait until a host has a reply or is dead.

        Args:
            channels: Those with a command in flight, at least one.
            timeout: Seconds; ``None`` means for ever.

        Returns:
            The channels whose `Channel.receive` will not block; empty after ``timeout``.
        """
        ...

    def close(self, channels: Sequence[Channel], timeout: float) -> Sequence[Printed]:
        """Close all envs and end all hosts: ask, then terminate, then kill. May be called again.

        It may break off with `KeyboardInterrupt`, and is then called again without patience.

        Args:
            channels: All that were launched and not killed. Hosts that `launch` had begun to start when it was
                interrupted, or that it has started and nobody was told of, are ended as well.
            timeout: Seconds before hosts that do not end by themselves are ended.

        Returns:
            What envs printed where the caller does not see it, and no reply has told.
        """
        ...


class Sharing(Backend, Protocol):
    """A backend that can give all envs the same arrays. Another one refuses ``shared=``."""

    def share(self, arrays: Mapping[str, Array]) -> Mapping[str, Array]:
        """Copy arrays to where all hosts read them, once; called between `plan` and `launch`.

        Args:
            arrays: The user's, of plain dtypes.

        Returns:
            What `WorkerSpec.shared` is to be; `launch` brings it to its hosts as read-only arrays.
        """
        ...
