"""Backends with one fault each, and the contract suite over them. Run by `test_contract_catches`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np

from parallelenv.backends._in_process import CallerChannel
from parallelenv.backends.dummy import DummyBackend
from parallelenv.backends.thread import ThreadBackend, ThreadChannel
from parallelenv.contract.batch import Batch, Layout
from parallelenv.contract.failures import Failure
from parallelenv.contract.protocol import Command, Lookup, Reply, WorkerSpec
from parallelenv.testing import BackendContract
from parallelenv.worker.host import Host
from parallelenv.worker.row_writer import RowWriter

# -------------------------------------------------------------------- faults


class Channel(CallerChannel):
    """A correct channel, with hooks for faults."""

    host_class: ClassVar[type[Host]] = Host

    def __init__(self, spec: WorkerSpec) -> None:
        super().__init__(spec)
        self._host = self.host_class(spec, in_caller=True)
        self.spec = spec
        self.batch: Any = None

    def attach(self, batch: Batch) -> None:
        super().attach(batch)
        self.batch = batch

    def send(self, packed: Command) -> None:
        super().send(self.alter_command(packed))

    def receive(self) -> Reply:
        return self.alter_reply(super().receive())

    def alter_command(self, command: Command) -> Command:
        return command

    def alter_reply(self, reply: Reply) -> Reply:
        return reply


class DropsFailures(Channel):
    def alter_reply(self, reply: Reply) -> Reply:
        reply.failures.clear()
        return reply


class ForgetsTypes(Channel):
    def alter_reply(self, reply: Reply) -> Reply:
        for env_id, failure in reply.failures.items():
            reply.failures[env_id] = Failure(RuntimeError(str(failure.exception)), env_id, failure.operation)
        return reply


class BlamesTheFirst(Channel):
    """Reports a failure for the first env of a command, whichever failed."""

    def send(self, packed: Command) -> None:
        self.latest = packed
        super().send(packed)

    def alter_reply(self, reply: Reply) -> Reply:
        for failure in list(reply.failures.values()):
            reply.failures = {self.latest.env_ids[0]: failure}
        return reply


class MixesRows(Channel):
    def alter_reply(self, reply: Reply) -> Reply:
        if self.batch is not None:
            self.batch.rewards[:] = self.batch.rewards[::-1].copy()
        return reply


class SharesMemory(Channel):
    def advance(self) -> bool:
        while self._queue:
            self._replies.append(self._host.execute(self._queue.popleft()))  # not detached
        return bool(self._replies)


class SharesArguments(Channel):
    def pack(self, command: Command) -> Command:
        return command

    class _Host(Host):
        def set(self, env_id: int, value: Any, key: str) -> None:
            setattr(self._env(env_id).env, key, value)

    host_class = _Host


class AnswersLate(Channel):
    """Gives each command the values of the one before it of the same name."""

    def __init__(self, spec: WorkerSpec) -> None:
        super().__init__(spec)
        self.names: list[str] = []
        self.earlier: dict[str, Reply] = {}

    def send(self, packed: Command) -> None:
        self.names.append(packed.operation)
        super().send(packed)

    def alter_reply(self, reply: Reply) -> Reply:
        name = self.names.pop(0)
        earlier, self.earlier[name] = self.earlier.get(name, reply), reply
        return Reply(reply.number, earlier.values, earlier.failures)


class WrongNumbers(Channel):
    """Numbers the envs wrongly after they are built."""

    def alter_reply(self, reply: Reply) -> Reply:
        if self.batch is not None:
            reply.number -= 1
        return reply


class NeverCloses(Channel):
    def kill(self) -> None:
        self._queue.clear()


class ClosesTwice(Channel):
    def kill(self) -> None:
        envs = [adapted.env for adapted in self._host._envs if adapted is not None]
        super().kill()
        for env in envs:
            env.close()


class ResetsTwice(Channel):
    def send(self, packed: Command) -> None:
        if packed.operation == "reset":
            self._host.execute(replace(packed, number=-1))
        super().send(packed)


class StepsEverybody(Channel):
    def alter_command(self, command: Command) -> Command:
        if command.reads_actions:
            command.env_ids = self.spec.env_ids
        return command


class ForgetsSeeds(Channel):
    """Gives all envs the seed of the first."""

    def alter_command(self, command: Command) -> Command:
        if command.operation == "reset" and command.each is not None:
            command.each = [(command.each[0][0], options) for _, options in command.each]
        return command


class ForgetsOptions(Channel):
    def alter_command(self, command: Command) -> Command:
        if command.operation == "reset" and command.each is not None:
            command.each = [(seed, None) for seed, _ in command.each]
        return command


class SortsIds(Channel):
    def alter_command(self, command: Command) -> Command:
        command.env_ids = tuple(sorted(command.env_ids))
        return command


class NeverRestarts(Channel):
    def alter_command(self, command: Command) -> Command:
        if command.operation == "step":
            command.autoreset = False
        return command


class LosesInfos(Channel):
    """Drops the info of the first env of every reply."""

    def alter_reply(self, reply: Reply) -> Reply:
        if self.batch is not None and reply.values:
            del reply.values[min(reply.values)]
        return reply


class GivesViewsOfActions(Channel):
    class _Writer(RowWriter):
        def actions(self, rows: Any) -> Any:
            leaves = [array[rows] for array in self.batch.actions]
            return list(map(self.batch.layout.actions.join, zip(*leaves, strict=True)))

    class _Host(Host):
        def attach(self, batch: Batch) -> None:
            super().attach(batch)
            self.writer = GivesViewsOfActions._Writer(batch)

    host_class = _Host


class HidesDefaults(Channel):
    """Returns ``None`` for absent attributes."""

    class _Host(Host):
        def get(self, env_id: int, argument: Any, lookup: Lookup) -> Any:
            return super().get(env_id, argument, lookup) or (None,)

    host_class = _Host


class OnlyOutermost(Channel):
    """Sets attributes on the outermost wrapper."""

    class _Host(Host):
        def set(self, env_id: int, value: Any, key: str) -> None:
            setattr(self._env(env_id).env, key, value)

    host_class = _Host


class Backend(DummyBackend):
    """A correct backend with two hosts and faulty channels."""

    channel_class: ClassVar[type[Channel]] = Channel

    def plan_workers(self, num_envs: int, num_cpus: int | None, num_gpus: float) -> Any:
        return ThreadBackend().plan_workers(num_envs, num_cpus, num_gpus)

    def launch(self, specs: Sequence[WorkerSpec]) -> Any:
        return [self.channel_class(spec) for spec in specs]

    def prepare_step(self, commands: Sequence[Any]) -> None:
        """Every step goes through the channels."""


class WrongTypes(Backend):
    def allocate(self, layout: Layout) -> Batch:
        batch = super().allocate(layout)
        batch.rewards = np.zeros(layout.num_envs, np.float32)
        return batch


class ClosesLoudly(Backend):
    def close(self, channels: Sequence[Any], timeout: float) -> Sequence[Any]:
        super().close(channels, timeout)
        raise OSError("the pipe is closed already")


class HurriesChannel(ThreadChannel):
    def pack(self, command: Command) -> Command:
        super().pack(command)
        super().send(command)
        return command

    def send(self, packed: Command) -> None:
        pass


class Hurries(ThreadBackend):
    """Sends to the first host before the message to the second is packed."""

    channel_class = HurriesChannel


# -------------------------------------------------------------------- the suite over them


def _contract(fault: type[Any]) -> type[BackendContract]:
    """Return a test class over a faulty backend, or over a backend whose channels are faulty."""
    backend = type(fault.__name__, (Backend,), {"channel_class": fault}) if issubclass(fault, Channel) else fault
    return type(f"Test{fault.__name__}", (BackendContract,), {"para_mode": backend})


_RESULTS = "test_results_equal_those_of_the_oracle"
_CALLS = "test_calls_equal_those_of_the_oracle"
CATCHERS: dict[type[Any], str] = {
    DropsFailures: "test_failed_step_does_not_affect_other_envs",
    ForgetsTypes: "test_failed_step_does_not_affect_other_envs",
    BlamesTheFirst: "test_failed_step_does_not_affect_other_envs",
    MixesRows: f"{_RESULTS}[array]",
    SharesMemory: f"{_RESULTS}[dict]",
    SharesArguments: "test_values_kept_by_envs_are_independent_of_the_caller",
    AnswersLate: _CALLS,
    WrongNumbers: f"{_RESULTS}[array]",
    NeverCloses: "test_close_closes_each_env_once",
    ClosesTwice: "test_close_closes_each_env_once",
    ResetsTwice: "test_calls_affect_only_the_envs_in_id",
    StepsEverybody: "test_calls_affect_only_the_envs_in_id",
    ForgetsSeeds: f"{_RESULTS}[tuple]",
    ForgetsOptions: f"{_RESULTS}[array]",
    SortsIds: f"{_RESULTS}[registered]",
    NeverRestarts: f"{_RESULTS}[text]",
    LosesInfos: f"{_RESULTS}[mixed]",
    GivesViewsOfActions: f"{_RESULTS}[sequence]",
    HidesDefaults: _CALLS,
    OnlyOutermost: _CALLS,
    WrongTypes: f"{_RESULTS}[array]",
    ClosesLoudly: "test_close_closes_each_env_once",
    Hurries: "test_uncopyable_argument_is_refused",
}
"""The test that must catch each fault; others may catch it as well."""

FAULTS: list[type[Any]] = [Backend, *CATCHERS]
globals().update({f"Test{fault.__name__}": _contract(fault) for fault in FAULTS})
