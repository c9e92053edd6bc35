"""The code of a worker process: a host that receives its commands in messages."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from multiprocessing.connection import wait
from typing import Any

from threadpoolctl import threadpool_limits

from parallelenv.contract.batch import Array, Batch, Layout, frozen
from parallelenv.contract.codec import (
    BroadcastContent,
    Message,
    StepSubset,
    decode,
    decode_command,
    encode_not_read,
    encode_reply,
)
from parallelenv.contract.copying import Broadcast
from parallelenv.contract.env_specs import register_again
from parallelenv.contract.packed_worker_spec import PackedSpec
from parallelenv.contract.protocol import Command, Reply, UnreadableError
from parallelenv.worker.host import Host

if sys.platform != "win32":
    import fcntl

_THREAD_VARIABLES = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "BLIS_NUM_THREADS")
_LAUNCHER_PREFIXES = (
    "OMPI_",  # Open MPI
    "PMI_",  # MPICH, Intel MPI, Cray, Slurm
    "PMIX_",  # Open MPI from 4 on, Slurm
    "PRTE_",  # Open MPI's own runtime, from 5 on
    "HYDI_",  # Hydra, the launcher of MPICH and Intel MPI
    "MPI_LOCAL",  # also Hydra: MPI_LOCALRANKID, MPI_LOCALNRANKS
    "MV2_COMM_WORLD_",  # MVAPICH
    "PALS_",  # Cray
)


def serve(receive: Callable[[], Message], send: Callable[[Message], None], parent_pipe: int | None = None) -> None:
    """Run the host of a `MessageChannel` in this process, until the caller closes the connection or dies.

    The first message is the host's `PackedSpec`.

    Args:
        receive: Waits for the next message and returns it; raises `EOFError` or `OSError` if the other end is closed.
        send: Sends a message.
        parent_pipe: A descriptor that becomes readable when the caller dies. This process exits at that moment, even in
            the middle of a step. If ``None``, the process notices the death of the caller only when ``receive`` raises
            an error.
    """
    if parent_pipe is not None:
        die_with_caller(parent_pipe)
    try:
        packed: PackedSpec = decode(receive())
    except (EOFError, OSError):
        return
    prepare_worker(packed)  # an OSError here is not the end of the caller: it is shown
    host = MessageHost(Host(packed.unpack(frozen(packed.shared))), packed)
    with contextlib.suppress(EOFError, OSError):
        host.obey(receive, send)


class MessageHost:
    """A host together with the code that reads commands from messages and puts replies in messages."""

    def __init__(self, host: Host, packed: PackedSpec) -> None:
        self.host = host
        self.packed = packed
        self._batch: Batch | None = None  # None if the host shares the caller's batch
        self._limits: Any = None
        self.subsets = [packed.env_ids]  # by number, see `StepSubset`
        self.content: Array | None = None  # see `BroadcastContent`

    def obey(self, receive: Callable[[], Message], send: Callable[[Message], None]) -> None:
        """Execute commands until the connection is closed; then close the envs. See `serve` for the arguments.

        Raises:
            EOFError, OSError: When the connection is closed. The method always ends in this way.
        """
        try:
            while True:
                reply = self.execute(receive())
                if reply is not None:
                    send(reply)
        finally:
            self.host.close()

    def execute(self, message: Message) -> Message | None:
        """Execute the command in a message; return the reply, or ``None`` if the message contains no command."""
        command = self.decode(message)
        if not isinstance(command, Command):
            return command
        if command.rows is not None and self._batch is not None:
            self._batch.put_actions(command.env_ids, command.rows)
        reply: Reply = self.host.execute(command)
        if self._batch is not None and command.writes_rows:
            reply.rows = self._batch.take_results(command.env_ids)
        is_building = command.operation == "build" and self._limits is None
        if is_building and not any(name in os.environ for name in _THREAD_VARIABLES):  # otherwise the user has set them
            # Numerical libraries would start a thread per core in every worker. They can be limited only after they
            # have been loaded, so this is done after `build`.
            self._limits = threadpool_limits(self.packed.threads)
        return self.encode(reply)

    def decode(self, message: Message) -> Command | Message | None:
        """Return the command in a message, or a reply if the command cannot be read.

        If a message contains something other than a command, this method processes it and returns ``None``.
        """
        try:
            command = decode_command(message, self.subsets)
        except UnreadableError as error:
            return encode_not_read(error)
        if isinstance(command, Layout):
            self.attach(command)
            return None
        if isinstance(command, StepSubset):
            self.subsets[command.number :] = [command.env_ids]
            return None
        if isinstance(command, BroadcastContent):
            self.content = command.packed
            return None
        if self.content is not None and isinstance(command, Command) and isinstance(command.common, Broadcast):
            command.common.packed, self.content = self.content, None
        return command  # type: ignore[no-any-return]

    def encode(self, reply: Reply) -> Message:
        """Return a reply as a message."""
        return encode_reply(reply)

    def attach(self, layout: Layout) -> None:
        """Give the host a private batch with this layout. The rows of the batch are sent in messages."""
        self._batch = Batch.private(layout)
        self.use(self._batch)

    def use(self, batch: Batch) -> None:
        """Make the host use a batch."""
        self.host.attach(batch)
        self.subsets[0] = self.host.env_ids  # with vector envs, the ids are known only now


def prepare_worker(packed: PackedSpec) -> None:
    """Give a new worker process those settings of the caller that envs may depend on."""
    if packed.environment:  # not on Ray
        os.environ.clear()
        os.environ.update(packed.environment)
        sys.path[:] = dict.fromkeys([*packed.path, *sys.path])  # in the caller's order, so that modules are the same
    forget_launcher()
    sys.path.extend(folder for folder in packed.path if folder not in sys.path)
    if packed.silence_warnings:
        warnings.simplefilter("ignore")
    register_again(packed.registered)


def forget_launcher() -> None:
    """Remove the environment variables that mark this process as started by an MPI launcher.

    An MPI launcher may have started the caller, and a worker inherits the caller's variables. An env that imports
    `mpi4py` would then take the caller's place in the MPI job, and the job might hang or end. The caller's variables
    are never changed, because other threads may be reading them.
    """
    for name in [name for name in os.environ if name.startswith(_LAUNCHER_PREFIXES)]:
        del os.environ[name]


def die_with_caller(sentinel: int) -> None:
    """Make this process exit when the caller dies, whatever the env is doing.

    Args:
        sentinel: A descriptor that becomes readable when the caller dies, because only the caller has the other end.
    """
    end_with_caller(sentinel)  # the thread below cannot run while C code holds the GIL
    _start_watchdog(sentinel)


def end_with_caller(sentinel: int) -> bool:
    """Make the system kill this process when the caller dies. See `die_with_caller` for the argument.

    Return ``False`` if the system does not do so: only Linux can, and a sandbox may forbid it.
    """
    if sys.platform == "linux":
        with contextlib.suppress(OSError):
            fcntl.fcntl(sentinel, fcntl.F_SETOWN, os.getpid())
            fcntl.fcntl(sentinel, fcntl.F_SETSIG, signal.SIGKILL)
            fcntl.fcntl(sentinel, fcntl.F_SETFL, fcntl.fcntl(sentinel, fcntl.F_GETFL) | os.O_ASYNC)
            return True
    return False


@contextlib.contextmanager
def dying_with_caller(sentinel: int) -> Iterator[None]:
    """Make this process exit if the caller dies during the ``with`` block. See `die_with_caller` for the argument.

    A thread watches for that. It has ended when the block has, so that this process can be forked then.
    """
    stopped, stop = os.pipe()
    watchdog = _start_watchdog(sentinel, stopped)
    try:
        yield
    finally:
        os.write(stop, b"0")  # closing would not be enough: a process that the block has forked may have a copy
        watchdog.join()
        os.close(stopped)
        os.close(stop)


def _start_watchdog(sentinel: int, stopped: int | None = None) -> threading.Thread:
    """Start a thread that ends this process when ``sentinel`` becomes readable, unless ``stopped`` does so first."""

    def watch() -> None:
        if sentinel in wait([sentinel] if stopped is None else [sentinel, stopped]):
            os._exit(1)

    watchdog = threading.Thread(target=watch, name="parallelenv-watchdog", daemon=True)
    watchdog.start()
    return watchdog
