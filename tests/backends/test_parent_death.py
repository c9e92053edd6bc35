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


def test_forked_child_does_not_keep_the_connection_open(
    listener: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_ray_actors, "_END_TIMEOUT", 0.01)
    handle: Any = None
    actor = ActorHandle(handle, handle)
    actor.pid = os.getpid()
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


def test_actors_on_another_machine_do_not_connect(listener: socket.socket) -> None:
    assert connect_to_caller(None) == []
    assert connect_to_caller((listener.getsockname(), "elsewhere")) == []


def test_wait_for_an_actor_that_does_not_connect_can_be_interrupted_and_ends(
    listener: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    handle: Any = None
    actor = ActorHandle(handle, handle)
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
