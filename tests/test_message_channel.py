"""A channel whose host has died. The contract sends large messages both ways at the same time."""

from __future__ import annotations

import pytest

from parallelenv.contract.codec import DONE, Message
from parallelenv.contract.message_channel import MessageChannel
from parallelenv.contract.protocol import Command, Death, HostDied


class Broken(MessageChannel):
    def send_message(self, message: Message) -> None:
        raise BrokenPipeError

    def receive_message(self) -> Message:
        raise EOFError

    def cause_of_death(self) -> Death:
        return Death()

    def kill(self) -> None: ...


def test_death_is_reported_after_the_replies_that_were_read_before() -> None:
    channel = Broken((0,))
    channel.inbox.append(Message(DONE, 2))
    channel.notify("nothing")  # the next command reports the death
    assert channel.receive().number == 2
    with pytest.raises(HostDied):
        channel.receive()
    with pytest.raises(HostDied):
        channel.send(channel.pack(Command(3, "set", (0,), [5], "extra")))
