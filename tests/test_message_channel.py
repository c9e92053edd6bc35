"""A channel that sends messages, and its host, without a process between them."""

from __future__ import annotations

import math
import os
from collections import deque
from collections.abc import Iterator
from typing import Any

import pytest

from parallelenv.contract.codec import Message, StepSubset
from parallelenv.contract.env_specs import make_factories
from parallelenv.contract.message_channel import MessageChannel
from parallelenv.contract.packed_worker_spec import PackedSpec
from parallelenv.contract.protocol import Command, Death, HostDied, WorkerSpec
from parallelenv.testing.envs import Counter
from parallelenv.worker.host import Host
from parallelenv.worker.worker_loop import MessageHost

LARGE = b"x" * 100_000


class Direct(MessageChannel):
    """Its host replies when the reply is read."""

    def __init__(self) -> None:
        (packed,) = PackedSpec.pack([WorkerSpec((0,), make_factories([Counter]))])
        super().__init__(packed.env_ids)
        self.host = MessageHost(Host(packed.unpack({})), packed)
        self.sent: deque[Message] = deque()
        self.is_gone = False

    def send_message(self, message: Message) -> None:
        if self.is_gone:
            raise BrokenPipeError
        self.sent.append(Message.from_bytes(message.to_bytes()))

    def receive_message(self) -> Message:
        if self.is_gone:
            raise EOFError
        while (reply := self.host.execute(self.sent.popleft())) is None:
            pass
        return Message.from_bytes(reply.to_bytes())

    def cause_of_death(self) -> Death:
        return Death()

    def kill(self) -> None:
        self.host.host.close()

    def ask(self, number: int, name: str, argument: Any = None, common: Any = None) -> None:
        self.send(self.pack(Command(number, name, self.env_ids, [argument], common)))


@pytest.fixture
def channel(monkeypatch: pytest.MonkeyPatch) -> Iterator[Direct]:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # by the user, so that the host limits no threads here
    channel = Direct()
    channel.ask(1, "build", common=False)
    assert channel.receive().number == 1
    yield channel
    channel.kill()


@pytest.mark.parametrize(("safe_bytes", "num_read"), [(MessageChannel.safe_bytes, 2), (math.inf, 0)])
def test_replies_are_read_before_a_large_command_is_sent(channel: Direct, safe_bytes: float, num_read: int) -> None:
    channel.safe_bytes = safe_bytes
    channel.ask(2, "set", 5, "extra")
    channel.ask(3, "set", LARGE[:100], "extra")
    channel.ask(4, "set", LARGE, "extra")
    assert len(channel.inbox) == num_read
    assert [channel.receive().number for _ in range(3)] == [2, 3, 4]


def test_replies_read_before_the_death_are_returned(channel: Direct) -> None:
    channel.ask(2, "set", 5, "extra")
    channel.ask(3, "set", LARGE, "extra")
    channel.is_gone = True
    assert channel.receive().number == 2
    with pytest.raises(HostDied):
        channel.receive()
    with pytest.raises(HostDied):
        channel.ask(4, "set", 5, "extra")
    channel.notify("nothing")  # the next command reports the death


def test_subset_announced_twice_keeps_the_numbers_of_the_others(channel: Direct) -> None:
    for number, env_ids in [(1, (0,)), (2, (4, 5)), (2, (4, 5)), (3, (6,))]:  # the second one was interrupted
        channel.notify(StepSubset(number, env_ids))
    channel.ask(2, "set", 5, "extra")
    assert channel.receive().number == 2  # so everything before it was read
    assert channel.host.subsets[1:] == [(0,), (4, 5), (6,)]


def test_spec_has_the_environment_of_the_caller(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PARALLELENV_SEEN", "yes")
    (packed,) = PackedSpec.pack([WorkerSpec((0,), make_factories([Counter]))])
    assert packed.environment == dict(os.environ)
