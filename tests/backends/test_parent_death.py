"""The connections of an actor on the caller's machine; its lifeline shows it the caller's death."""

from __future__ import annotations

import os
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection
from typing import Any

import pytest

from parallelenv.backends import _ray_actors
from parallelenv.backends._ray_actors import ActorHandle, admit, connect_to_caller, listening, machine
from parallelenv.errors import WorkerStartError

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="elsewhere there is none")


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with listening(1) as opened:
        assert opened is not None
        yield opened


def connect(listener: socket.socket) -> tuple[ActorHandle, list[Connection]]:
    """Return the handle of an actor, which is this process, and its ends of the connections."""
    handle: Any = None
    actor = ActorHandle(handle, handle)
    actor.pid = os.getpid()
    ends = connect_to_caller((listener.getsockname(), machine()))
    admit(listener, [actor])
    return actor, ends


def is_closed(end: Connection, patience: float = 0.0) -> bool:
    return bool(select.select([end], [], [], patience)[0])


def test_forked_child_does_not_keep_the_connection_open(
    listener: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_ray_actors, "_END_TIMEOUT", 0.01)
    actor, (end, _) = connect(listener)
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        os.close(writing)
        os.read(reading, 1)  # keep running
        os._exit(0)
    actor.close()
    assert is_closed(end, 10.0)
    os.close(writing)
    os.waitpid(child, 0)
    os.close(reading)


def test_close_waits_until_other_end_closes_or_timeout(
    listener: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_ray_actors, "_END_TIMEOUT", 60.0)
    actor, ends = connect(listener)
    for end in ends:
        end.close()
    actor.close()
    monkeypatch.setattr(_ray_actors, "_END_TIMEOUT", 0.01)
    other, (end, _) = connect(listener)
    other.close()
    assert is_closed(end)


def test_other_processes_are_not_admitted(listener: socket.socket) -> None:
    child = os.fork()
    if not child:
        ends = connect_to_caller((listener.getsockname(), machine()))
        os._exit(len(ends))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 2
    actor, ends = connect(listener)
    ends[1].send("mine")
    assert actor.commands.recv() == "mine"
    ends[0].close()
    actor.close()


def test_connecting_to_a_caller_that_stopped_listening_raises() -> None:
    with listening(1) as listener:
        assert listener is not None
        address = listener.getsockname(), machine()
        first, _ = connect_to_caller(address)
    assert is_closed(first)  # it was never admitted
    with pytest.raises(FileNotFoundError):
        connect_to_caller(address)


def test_actors_on_another_machine_do_not_connect(listener: socket.socket) -> None:
    assert connect_to_caller(None) == []
    assert connect_to_caller((listener.getsockname(), "elsewhere")) == []


def test_wait_for_the_connections_of_an_actor_can_be_interrupted(listener: socket.socket) -> None:
    handle: Any = None
    actor = ActorHandle(handle, handle)
    interrupting = threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT))
    interrupting.start()
    begin = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        admit(listener, [actor])
    interrupting.join()
    assert time.monotonic() - begin < 5.0


def test_actor_that_does_not_connect_raises(listener: socket.socket, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_ray_actors, "_CONNECT_TIMEOUT", 0.01)
    handle: Any = None
    with pytest.raises(WorkerStartError, match="A Ray actor has not connected to the caller within 0 s"):
        admit(listener, [ActorHandle(handle, handle)])
