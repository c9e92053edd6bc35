"""Messages between a channel and its host. The contract sends large messages both ways at the same time."""

from __future__ import annotations

import pytest

from parallelenv.contract.codec import DONE, Message, StepSubset, encode
from parallelenv.contract.env_specs import make_factories
from parallelenv.contract.message_channel import MessageChannel
from parallelenv.contract.packed_worker_spec import PackedSpec
from parallelenv.contract.protocol import Command, Death, HostDied, WorkerSpec
from parallelenv.testing.envs import Counter
from parallelenv.worker.host import Host
from parallelenv.worker.worker_loop import MessageHost


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


def test_subset_announced_twice_keeps_the_numbers_of_the_others() -> None:
    (packed,) = PackedSpec.pack([WorkerSpec((0,), make_factories([Counter]))])
    host = MessageHost(Host(packed.unpack({})), packed)
    for number, env_ids in [(1, (0,)), (2, (4, 5)), (2, (4, 5)), (3, (6,))]:  # the second one was interrupted
        assert host.decode(encode(StepSubset(number, env_ids))) is None
    assert host.subsets[1:] == [(0,), (4, 5), (6,)]
