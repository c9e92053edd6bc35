"""Ray actors on the caller's machine, reached like worker processes: over a socket, with shared memory.

Ray places the actors, gives them their resources and ends them. Only what is sent at every step goes past it.
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
from parallelenv.backends._pipe import PipeChannel
from parallelenv.backends._ray_cluster import SHUT_DOWN, Session
from parallelenv.contract.interrupts import DeferSigint
from parallelenv.contract.protocol import Death
from parallelenv.worker.worker_log import WorkerLog

_PARTING = 1.0
"""Seconds that Ray gets to end an actor."""
_PATIENCE = 10.0
"""Seconds that an actor, which has said that it is near, gets to come in."""
_GLANCE = 50
"""Milliseconds between looks at whether an actor that was called has failed instead of coming."""
_CREDENTIALS = struct.Struct("3i")  # process, user, group


class ActorHandle:
    """A Ray actor that is a host, with as much of a `multiprocessing.Process` as a channel needs.

    Args:
        handle: Of the actor.
        session: In which it was started.
        lifeline: What the actor can hold on to, if it is near.
    """

    exitcode = None  # Ray does not tell
    comes_in = False
    """Whether it has come through a `LocalListener`."""
    is_ended = False
    """Whether Ray was told to end it."""

    def __init__(self, handle: Any, session: Session, lifeline: ParentDeathPipe | None) -> None:
        self.handle = handle
        self.session = session
        self.pid = 0
        self.is_near = False
        self._lifeline = lifeline
        self._serving: Any = None

    def meet(self, pid: int, has_hold: bool) -> None:
        """Take note of how the actor has introduced itself."""
        self.pid, self.is_near = pid, has_hold
        if self._lifeline is not None:
            self._lifeline.keep(is_held=has_hold)

    def call_in(self, path: str) -> None:
        """Ask the actor to come to a door and to serve there until it is closed."""
        self._serving = self.handle.serve.remote(path)

    def has_served(self) -> bool:
        """Whether it does not serve at a door, or not any more."""
        return self._serving is None or self._await_service(0.0)

    def is_alive(self) -> bool:
        """Whether its process has not ended. Asks the system, which takes 1 us and Ray 100."""
        try:
            os.kill(self.pid, 0)
        except OSError:
            return False
        return True

    def join(self, timeout: float | None = None) -> None:
        """Wait until it has served."""
        self._await_service(_PARTING if timeout is None else timeout)

    def terminate(self) -> None:
        """Let Ray end it, and do not wait for that."""
        import ray

        self.is_ended = True
        if self.session.lasts:
            ray.kill(self.handle)

    def close(self) -> None:
        """Let it go, when it has gone: else Ray would print that an actor died, and not by its own doing."""
        if self._lifeline is not None:
            self._lifeline.cut_when_free(_PARTING)

    def last_word(self) -> str:
        """Return what is known of its end, empty if nothing."""
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
        branches: As in `Branching`.
    """

    process: ActorHandle
    branches: tuple[tuple[int, ...], ...] = ()

    def cause_of_death(self) -> Death:
        said = self.process.last_word()
        found = super().cause_of_death()
        return Death(found.pid, None, said, found.last_lines)

    def end_process(self) -> None:
        self.process.terminate()


def first_line(error: BaseException) -> str:
    """Return the first line of an error that is not empty."""
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)


class LocalListener:
    """A socket where actors come in, in a folder that only the user can enter; a context manager."""

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
        """Let actors in.

        Returns:
            The socket of each that came. Who could not, as in a container with folders of its own, is left out.
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
        """Let somebody in who is at the door, if it is one of those that are expected."""
        with DeferSigint():
            guest, _ = self._socket.accept()
            pid = _CREDENTIALS.unpack(guest.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))[0]
            if pid in expected:
                expected[pid].comes_in = True
                admitted[expected.pop(pid)] = Connection(guest.detach())
            guest.close()


def hand_over_log(connection: Connection, pid: int) -> WorkerLog | None:
    """Make a log and give the process at the other end its descriptor."""
    with DeferSigint():
        log = WorkerLog.create()
        if log is not None:
            reduction.send_handle(connection, log.fileno, pid)
        return log


def go_in(path: str) -> tuple[Connection, WorkerLog]:
    """Come to a door, as an actor; return the socket and the log.

    Raises:
        OSError: If the door cannot be reached.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as guest:
        guest.connect(path)
        connection = Connection(guest.detach())
    return connection, WorkerLog(reduction.recv_handle(connection))
