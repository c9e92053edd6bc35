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


@pytest.fixture
def actor() -> ActorHandle:
    """The handle of an actor, which is this process."""
    handle: Any = None
    actor = ActorHandle(handle, handle)
    actor.pid = os.getpid()
    return actor


def test_forked_child_does_not_keep_the_connection_open(
    actor: ActorHandle, listener: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_ray_actors, "_END_TIMEOUT", 0.01)
    lifeline, _ = connect_to_caller((listener.getsockname(), machine()))
    admit(listener, [actor])
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        os.close(writing)
        os.read(reading, 1)  # keep running
        os._exit(0)
    actor.close()
    assert select.select([lifeline], [], [], 10.0)[0]  # it is closed
    os.close(writing)
    os.waitpid(child, 0)
    os.close(reading)


def test_other_processes_are_not_admitted(actor: ActorHandle, listener: socket.socket) -> None:
    address = listener.getsockname(), machine()
    child = os.fork()
    if not child:
        os._exit(len(connect_to_caller(address)))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 2
    lifeline, commands = connect_to_caller(address)
    admit(listener, [actor])
    commands.send("mine")
    assert actor.commands.recv() == "mine"
    lifeline.close()
    actor.close()


def test_actors_on_another_machine_do_not_connect(listener: socket.socket) -> None:
    assert connect_to_caller(None) == []
    assert connect_to_caller((listener.getsockname(), "elsewhere")) == []


def test_wait_for_an_actor_that_does_not_connect_can_be_interrupted_and_ends(
    actor: ActorHandle, listener: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    interrupting = threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT))
    interrupting.start()
    begin = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        admit(listener, [actor])
    interrupting.join()
    assert time.monotonic() - begin < 5.0
    monkeypatch.setattr(_ray_actors, "_CONNECT_TIMEOUT", 0.01)
    with pytest.raises(WorkerStartError, match="A Ray actor has not connected to the caller within 0 s"):
        admit(listener, [actor])
