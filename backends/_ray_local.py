"""Ray actors on the caller's machine, reached like worker processes: over a socket, with shared memory.

Ray places the actors, gives them their resources and ends them. Only the messages of every step bypass it.
"""

from __future__ import annotations

import os
import select
import socket
import struct
import tempfile
import time
from collections.abc import Sequence
from multiprocessing import reduction
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from parallelenv.backends._parent_death import ParentDeathPipe
from parallelenv.backends._pipe import BellChannel, PipeChannel
from parallelenv.backends._ray_cluster import SHUT_DOWN, Session
from parallelenv.contract.interrupts import DeferSigint
from parallelenv.contract.protocol import Death
from parallelenv.worker.worker_log import WorkerLog

_PARTING = 1.0
"""Seconds for Ray to end an actor."""
_PATIENCE = 10.0
"""Seconds for an actor on this machine to connect."""
_GLANCE = 50
"""Milliseconds between checks whether an actor has failed instead of connecting."""
_CREDENTIALS = struct.Struct("3i")  # process, user, group


class ActorHandle:
    """A Ray actor with a host, with the part of `multiprocessing.Process` that a channel needs.

    Args:
        handle: Ray's handle of the actor.
        session: The connection to Ray in which it was started.
        lifeline: The pipe by which the actor detects the caller's death, if it runs on this machine.
    """

    exitcode = None  # Ray does not report it
    comes_in = False
    """Whether it has connected to a `LocalListener`."""
    is_ended = False
    """Whether Ray was called to end it."""

    def __init__(self, handle: Any, session: Session, lifeline: ParentDeathPipe | None) -> None:
        self.handle = handle
        self.session = session
        self.pid = 0
        self.is_near = False
        self._lifeline = lifeline
        self._serving: Any = None

    def meet(self, pid: int, has_hold: bool) -> None:
        """Record the actor's introduction."""
        self.pid, self.is_near = pid, has_hold
        if self._lifeline is not None:
            self._lifeline.keep(is_held=has_hold)

    def call_in(self, path: str) -> None:
        """Call the actor to connect to a socket and serve there until it is closed."""
        self._serving = self.handle.serve.remote(path)

    def has_served(self) -> bool:
        """Whether it does not serve a socket, or no longer does."""
        return self._serving is None or self._await_service(0.0)

    def is_alive(self) -> bool:
        """Whether its process has not ended. Asks the system, which takes 1 us; Ray takes 100."""
        try:
            os.kill(self.pid, 0)
        except OSError:
            return False
        return True

    def join(self, timeout: float | None = None) -> None:
        """Wait until it has stopped serving."""
        self._await_service(_PARTING if timeout is None else timeout)

    def terminate(self) -> None:
        """Make Ray end it, without waiting."""
        import ray

        self.is_ended = True
        if self.session.lasts:
            ray.kill(self.handle)

    def close(self) -> None:
        """Close its lifeline, after it has ended: otherwise Ray would print that an actor died unexpectedly."""
        if self._lifeline is not None:
            self._lifeline.cut_when_free(_PARTING)

    def last_word(self) -> str:
        """Return what is known of its death, empty if nothing."""
        import ray

        if not self.session.lasts:
            return SHUT_DOWN
        try:
            ray.get(self._serving, timeout=_PARTING)
        except ray.exceptions.GetTimeoutError:
            return ""
        except ray.exceptions.RayError as error:
            return f"Ray says: {first_line(error)}"
        return ""

    def _await_service(self, timeout: float) -> bool:
        import ray

        if self._serving is None or not self.session.lasts:
            return True
        return bool(ray.wait([self._serving], timeout=timeout)[0])


class LocalChannel(PipeChannel):
    """A socket to a host in an actor on this machine.

    Attributes:
        branches: Env ids of each worker, see `Branching`.
    """

    process: ActorHandle
    branches: tuple[tuple[int, ...], ...] = ()

    def cause_of_death(self) -> Death:
        said = self.process.last_word()
        found = super().cause_of_death()
        return Death(found.pid, None, said, found.last_lines)

    def end_process(self) -> None:
        self.process.terminate()


class LocalBellChannel(BellChannel, LocalChannel):
    """The same, to an actor that the bell wakes."""


def first_line(error: BaseException) -> str:
    """Return the first non-empty line of an error."""
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)


class LocalListener:
    """A socket to which actors connect, in a folder that only the user can enter; a context manager."""

    def __enter__(self) -> LocalListener:
        self._folder = tempfile.TemporaryDirectory(prefix="parallelenv-")
        self.path = str(Path(self._folder.name, "door"))
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.bind(self.path)
        self._socket.listen(128)
        return self

    def __exit__(self, *error: object) -> None:
        self._socket.close()
        self._folder.cleanup()

    def admit(self, actors: Sequence[ActorHandle]) -> dict[ActorHandle, Connection]:
        """Wait for actors to connect.

        Returns:
            The socket of each that connected. Actors that cannot, such as in a container with its own folders, are left
            out.
        """
        for actor in actors:
            actor.call_in(self.path)
        expected = {actor.pid: actor for actor in actors}
        admitted: dict[ActorHandle, Connection] = {}
        deadline = time.monotonic() + _PATIENCE
        poll = select.poll()
        poll.register(self._socket, select.POLLIN)
        while expected and time.monotonic() < deadline:
            if poll.poll(_GLANCE):
                self._admit_one(expected, admitted)
            else:
                expected = {pid: actor for pid, actor in expected.items() if not actor.has_served()}
        return admitted

    def _admit_one(self, expected: dict[int, ActorHandle], admitted: dict[ActorHandle, Connection]) -> None:
        """Accept a connection, if it is from an expected actor."""
        with DeferSigint():
            guest, _ = self._socket.accept()
            pid = _CREDENTIALS.unpack(guest.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))[0]
            if pid in expected:
                expected[pid].comes_in = True
                admitted[expected.pop(pid)] = Connection(guest.detach())
            guest.close()


def hand_over_log(connection: Connection, pid: int) -> WorkerLog | None:
    """Make a log and send its descriptor to the process at the other end."""
    with DeferSigint():
        log = WorkerLog.create()
        if log is not None:
            reduction.send_handle(connection, log.fileno, pid)
        return log


def connect_to_caller(path: str) -> tuple[Connection, WorkerLog]:
    """Connect an actor to the caller's socket; return the connection and the log.

    Raises:
        OSError: If the socket cannot be reached.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as guest:
        guest.connect(path)
        connection = Connection(guest.detach())
    return connection, WorkerLog(reduction.recv_handle(connection))
