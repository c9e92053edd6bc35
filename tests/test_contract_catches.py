"""Tests of the contract suite: it must detect backends with one fault each, and accept a correct one."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
from modes import ORACLE

from parallelenv.backends._in_process import CallerChannel
from parallelenv.backends.dummy import DummyBackend
from parallelenv.backends.thread import ThreadBackend, ThreadChannel
from parallelenv.contract.batch import Batch
from parallelenv.contract.failures import Failure
from parallelenv.contract.protocol import Command, Lookup, Reply, WorkerSpec
from parallelenv.testing import BackendContract, contract
from parallelenv.worker.host import Host
from parallelenv.worker.row_writer import RowWriter

# -------------------------------------------------------------------- faults


class Channel(CallerChannel):
    """A correct channel, with hooks for faults."""

    host_class: ClassVar[type[Host]] = Host

    def __init__(self, spec: WorkerSpec) -> None:
        super().__init__(spec)
        self.host = self.host_class(spec, in_caller=True)
        self.is_built = False

    def attach(self, batch: Batch) -> None:
        super().attach(batch)
        self.is_built = True

    def send(self, packed: Command) -> None:
        self.alter_command(packed)
        super().send(packed)

    def receive(self) -> Reply:
        reply = super().receive()
        self.alter_reply(reply)
        return reply

    def alter_command(self, command: Command) -> None: ...

    def alter_reply(self, reply: Reply) -> None: ...


class ForgetsTypes(Channel):
    def alter_reply(self, reply: Reply) -> None:
        for env_id, failure in reply.failures.items():
            reply.failures[env_id] = Failure(RuntimeError(str(failure.exception)), env_id, failure.operation)


class SharesMemory(Channel):
    def advance(self) -> bool:
        if not self._replies and self._queue:
            self._replies.append(self.host.execute(self._queue[0]))  # not detached
        return bool(self._replies)


class OnlyOutermost(Channel):
    """Sets attributes on the outermost wrapper, and does not copy their values."""

    class _Host(Host):
        def set(self, env_id: int, value: Any, key: str) -> None:
            setattr(self._env(env_id).env, key, value)

    host_class = _Host


class SharesArguments(OnlyOutermost):
    def pack(self, command: Command) -> Command:
        return command


class WrongNumbers(Channel):
    """Numbers the envs wrongly after they are built."""

    def alter_reply(self, reply: Reply) -> None:
        reply.number -= self.is_built


class ClosesTwice(Channel):
    def kill(self) -> None:
        envs = [adapted.env for adapted in self.host._envs if adapted is not None]
        super().kill()
        for env in envs:
            env.close()


class ResetsTwice(Channel):
    def alter_command(self, command: Command) -> None:
        if command.operation == "reset":
            self.host.execute(replace(command, number=-1))


class ForgetsSeeds(Channel):
    """Gives all envs the seed of the first."""

    def alter_command(self, command: Command) -> None:
        if command.operation == "reset" and command.each is not None:
            command.each = [(command.each[0][0], options) for _, options in command.each]


class ForgetsOptions(Channel):
    def alter_command(self, command: Command) -> None:
        if command.operation == "reset" and command.each is not None:
            command.each = [(seed, None) for seed, _ in command.each]


class SortsIds(Channel):
    def alter_command(self, command: Command) -> None:
        command.env_ids = tuple(sorted(command.env_ids))


class LosesInfos(Channel):
    """Drops the info of the first env of every reply."""

    def alter_reply(self, reply: Reply) -> None:
        if self.is_built and reply.values:
            del reply.values[min(reply.values)]


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


class Backend(DummyBackend):
    """A correct backend with two hosts and faulty channels."""

    channel_class: ClassVar[type[Channel]] = Channel

    def plan_workers(self, num_envs: int, num_cpus: int | None, num_gpus: float) -> Any:
        return ThreadBackend().plan_workers(num_envs, num_cpus, num_gpus)

    def launch(self, specs: Sequence[WorkerSpec]) -> Any:
        return [self.channel_class(spec) for spec in specs]

    def prepare_step(self, commands: Sequence[Any]) -> None:
        """Every step goes through the channels."""


class ClosesLoudly(Backend):
    is_closed = False

    def close(self, channels: Sequence[Any], timeout: float) -> Sequence[Any]:
        if not self.is_closed:
            self.is_closed = True
            raise OSError("the pipe is closed already")
        return super().close(channels, timeout)


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


class TestBackend(BackendContract):
    """The contract accepts a correct backend."""

    para_mode = Backend


def run(backend: type[Any], test: str, **given: Any) -> None:
    """Run a test of the contract over a backend."""
    suite = BackendContract()
    suite.para_mode = backend
    makers = {"make": contract._maker(backend, {}), "make_oracle": contract._maker(ORACLE, {})}
    given |= {name: next(maker) for name, maker in makers.items()}
    wanted = inspect.signature(getattr(suite, test)).parameters
    try:
        getattr(suite, test)(**{name: given[name] for name in wanted})
    finally:
        for maker in makers.values():
            next(maker, None)  # closes what it has made


_RESULTS = "test_results_equal_those_of_the_oracle"
_CALLS = "test_calls_equal_those_of_the_oracle"


@pytest.mark.parametrize(
    ("fault", "catcher", "kind"),
    [
        (ForgetsTypes, "test_failed_step_does_not_affect_other_envs", None),
        (SharesMemory, _RESULTS, "dict"),
        (WrongNumbers, _RESULTS, "array"),
        (ForgetsSeeds, _RESULTS, "tuple"),
        (ForgetsOptions, _RESULTS, "array"),
        (SortsIds, _RESULTS, "registered"),
        (LosesInfos, _RESULTS, "mixed"),
        (GivesViewsOfActions, _RESULTS, "sequence"),
        (HidesDefaults, _CALLS, None),
        (OnlyOutermost, _CALLS, None),
        (SharesArguments, "test_values_kept_by_envs_are_independent_of_the_caller", None),
        (ResetsTwice, "test_calls_affect_only_the_envs_in_id", None),
        (ClosesTwice, "test_close_closes_each_env_once", None),
        (ClosesLoudly, "test_close_closes_each_env_once", None),
        (Hurries, "test_uncopyable_argument_is_refused", None),
    ],
)
def test_contract_detects_each_faulty_backend(fault: type[Any], catcher: str, kind: str | None, tmp_path: Path) -> None:
    backend = type("Faulty", (Backend,), {"channel_class": fault}) if issubclass(fault, Channel) else fault
    with pytest.raises(Exception, match="."):
        run(backend, catcher, kind=kind, tmp_path=tmp_path)
