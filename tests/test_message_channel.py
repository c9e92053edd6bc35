"""Messages, and the channel and host that exchange them, without a process between them."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterator
from typing import Any

import pytest

from parallelenv.contract.codec import PRINTED, Message, StepSubset
from parallelenv.contract.env_specs import make_factories
from parallelenv.contract.message_channel import MessageChannel
from parallelenv.contract.packed_worker_spec import PackedSpec
from parallelenv.contract.protocol import (
    Command,
    Death,
    HostDied,
    Printed,
    UnreadableError,
    WorkerSpec,
)
from parallelenv.testing.envs import Counter
from parallelenv.worker.host import Host
from parallelenv.worker.worker_loop import MessageHost

LARGE = b"x" * 100_000


class Unreadable:
    def __reduce__(self) -> Any:
        return int, ("no number",)


class Direct(MessageChannel):
    """Its host replies when the reply is read."""

    def __init__(self) -> None:
        spec = WorkerSpec((0,), make_factories([Counter]))
        (packed,) = PackedSpec.pack([spec])
        super().__init__(packed.env_ids)
        self.host = MessageHost(Host(packed.unpack({})), packed)
        self.sent: deque[Message] = deque()
        self.num_read = 0
        self.is_gone = False

    def send_message(self, message: Message) -> None:
        if self.is_gone:
            raise BrokenPipeError
        self.sent.append(Message.from_bytes(message.to_bytes()))

    def receive_message(self) -> Message:
        if self.is_gone:
            raise EOFError
        self.num_read += 1
        while (reply := self.host.execute(self.sent.popleft())) is None:
            pass
        return Message.from_bytes(reply.to_bytes())._replace(tag=reply.tag | PRINTED)

    def take_output(self, *, is_idle: bool) -> list[Printed]:
        return [Printed(self.env_ids, "idle" if is_idle else "busy")]

    def cause_of_death(self) -> Death:
        return Death()

    def kill(self) -> None:
        self.host.host.close()

    def ask(self, number: int, name: str, argument: Any, common: Any = None) -> None:
        self.send(self.pack(Command(number, name, self.env_ids, [argument], common)))


@pytest.fixture
def channel(monkeypatch: pytest.MonkeyPatch) -> Iterator[Direct]:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # by the user, so that the host limits no threads here
    channel = Direct()
    channel.send(channel.pack(Command(1, "build", channel.env_ids, common=False)))
    assert channel.receive().number == 1
    yield channel
    channel.kill()


def test_replies_are_read_before_a_large_command_is_sent(channel: Direct) -> None:
    channel.ask(2, "set", 5, "extra")
    channel.ask(3, "set", LARGE[:100], "extra")
    assert not channel.inbox
    channel.ask(4, "set", LARGE, "extra")
    assert len(channel.inbox) == 2
    replies = [channel.receive() for _ in range(3)]
    assert [reply.number for reply in replies] == [2, 3, 4]
    assert [reply.output[0].text for reply in replies] == ["busy", "busy", "idle"]


def test_safe_bytes_of_the_transport_decide_what_is_read_first(channel: Direct) -> None:
    channel.safe_bytes = 1e9
    channel.ask(2, "set", 5, "extra")
    channel.ask(3, "set", LARGE, "extra")
    assert not channel.inbox


def test_unreadable_command_is_reported_by_receive(channel: Direct) -> None:
    channel.ask(2, "set", Unreadable(), "extra")
    channel.ask(3, "set", LARGE, "extra")  # reads that reply, and must not fail because of it
    with pytest.raises(UnreadableError, match="ValueError: invalid literal") as caught:
        channel.receive()
    assert caught.value.number == 2
    assert channel.receive().number == 3


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


def test_a_spec_has_the_callers_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PARALLELENV_SEEN", "yes")
    (packed,) = PackedSpec.pack([WorkerSpec((0,), make_factories([Counter]))])
    assert packed.environment == dict(os.environ)
