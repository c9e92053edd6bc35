"""Tests of the contract suite: it must detect backends with one fault each, and accept a correct one."""

from __future__ import annotations

import contextlib
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
from parallelenv.testing import BackendContract, contract, envs
from parallelenv.worker.host import Host
from parallelenv.worker.row_writer import RowWriter


class Views(RowWriter):
    """Gives the envs views of the memory of the actions."""

    def actions(self, rows: Any) -> Any:
        leaves = [array[rows] for array in self.batch.actions]
        return list(map(self.batch.layout.actions.join, zip(*leaves, strict=True)))


class FaultyHost(Host):
    fault = ""

    def attach(self, batch: Batch) -> None:
        super().attach(batch)
        if self.fault == "gives views of actions":
            self.writer = Views(batch)

    def get(self, env_id: int, argument: Any, lookup: Lookup) -> Any:
        found = super().get(env_id, argument, lookup)
        return found or (None,) if self.fault == "hides defaults" else found

    def set(self, env_id: int, value: Any, key: str) -> None:
        if self.fault in ("sets on the outermost wrapper", "shares arguments"):
            setattr(self._env(env_id).env, key, value)  # not a copy
        else:
            super().set(env_id, value, key)


class Channel(CallerChannel):
    """A channel, and its host, with a fault; without one if the word is empty."""

    def __init__(self, spec: WorkerSpec, fault: str) -> None:
        super().__init__(spec)
        self.host = FaultyHost(spec, in_caller=True)
        self.fault = self.host.fault = fault
        self.is_built = False

    def attach(self, batch: Batch) -> None:
        super().attach(batch)
        self.is_built = True

    def pack(self, command: Command) -> Any:
        return command if self.fault == "shares arguments" else super().pack(command)

    def send(self, packed: Command) -> None:
        if self.fault == "sorts ids":
            packed.env_ids = tuple(sorted(packed.env_ids))
        if packed.operation == "reset" and self.fault == "resets twice":
            self.host.execute(replace(packed, number=-1))
        if packed.operation == "reset" and packed.each is not None:
            if self.fault == "gives all envs the seed of the first":
                packed.each = [(packed.each[0][0], options) for _, options in packed.each]
            if self.fault == "forgets options":
                packed.each = [(seed, None) for seed, _ in packed.each]
        super().send(packed)

    def advance(self) -> bool:
        if self.fault != "shares memory":
            return super().advance()
        if not self._replies and self._queue:
            self._replies.append(self.host.execute(*self._queue[0]))  # not detached
        return bool(self._replies)

    def receive(self) -> Reply:
        reply = super().receive()
        if self.fault == "forgets types":
            for env_id, failure in reply.failures.items():
                reply.failures[env_id] = Failure(RuntimeError(str(failure.exception)), env_id, failure.operation)
        if self.is_built and self.fault == "gives wrong numbers":
            reply.number -= 1
        if self.is_built and self.fault == "loses an info" and reply.values:
            del reply.values[min(reply.values)]
        return reply

    def kill(self) -> None:
        closed = [adapted.env for adapted in self.host._envs if adapted is not None]
        super().kill()
        if self.fault == "closes twice":
            for env in closed:
                with contextlib.suppress(RuntimeError):
                    env.close()


class Backend(DummyBackend):
    """A backend with two hosts and faulty channels."""

    fault: ClassVar[str] = ""
    is_closed = False

    def plan_workers(self, num_envs: int, num_cpus: int | None, num_gpus: float) -> Any:
        return ThreadBackend().plan_workers(num_envs, num_cpus, num_gpus)

    def launch(self, specs: Sequence[WorkerSpec]) -> Any:
        return [Channel(spec, self.fault) for spec in specs]

    def prepare_step(self, commands: Sequence[Any]) -> None:
        """Every step goes through the channels."""

    def close(self, channels: Sequence[Any], timeout: float) -> Sequence[Any]:
        if self.fault == "raises in close" and not self.is_closed:
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


class IgnoresTimeouts(ThreadBackend):
    def wait(self, channels: Sequence[Any], timeout: float | None, wanted: int = 1) -> Any:
        return super().wait(channels, None, wanted)


class TestBackend(BackendContract):
    """The contract accepts a correct backend."""

    para_mode = Backend


_RESULTS = "test_results_equal_those_of_the_oracle"
_CALLS = "test_calls_equal_those_of_the_oracle"


@pytest.mark.parametrize(
    ("fault", "catcher", "kind"),
    [
        ("forgets types", "test_failed_step_does_not_affect_other_envs", None),
        ("shares memory", _RESULTS, "dict"),
        ("gives wrong numbers", _RESULTS, "array"),
        ("gives all envs the seed of the first", _RESULTS, "tuple"),
        ("forgets options", _RESULTS, "array"),
        ("sorts ids", _RESULTS, "registered"),
        ("loses an info", _RESULTS, "mixed"),
        ("gives views of actions", _RESULTS, "sequence"),
        ("hides defaults", _CALLS, None),
        ("sets on the outermost wrapper", _CALLS, None),
        ("shares arguments", "test_values_kept_by_envs_are_independent_of_the_caller", None),
        ("resets twice", "test_calls_affect_only_the_envs_in_id", None),
        ("closes twice", "test_close_closes_each_env_once", None),
        ("raises in close", "test_close_closes_each_env_once", None),
        ("hurries", "test_uncopyable_argument_is_refused", None),
        ("ignores timeouts", "test_step_can_be_received_after_timeout", None),
        ("ignores timeouts", "test_late_result_is_never_returned_by_a_later_call", None),
    ],
)
def test_contract_detects_each_fault(
    fault: str, catcher: str, kind: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(envs, "GATE_PATIENCE", 1.0)  # a little longer than the timeouts that are ignored
    in_background: dict[str, Any] = {"hurries": Hurries, "ignores timeouts": IgnoresTimeouts}
    backend = in_background.get(fault, type("Faulty", (Backend,), {"fault": fault}))
    suite: Any = BackendContract()
    suite.para_mode = backend
    makers = {"make": contract._maker(backend, {}), "make_oracle": contract._maker(ORACLE, {})}
    given = {"kind": kind, "tmp_path": tmp_path, **{name: next(maker) for name, maker in makers.items()}}
    test = getattr(suite, catcher)
    try:
        with pytest.raises(Exception, match="."):
            test(**{name: given[name] for name in inspect.signature(test).parameters})
    finally:
        for maker in makers.values():
            next(maker, None)  # closes what it has made


def test_all_envs_of_a_test_are_closed_even_if_one_raises() -> None:
    maker = contract._maker(type("Faulty", (Backend,), {"fault": "raises in close"}), {})
    make = next(maker)
    made = [make(contract.KINDS["array"]()) for _ in range(2)]
    with pytest.raises(OSError, match="the pipe is closed already"):
        next(maker)
    assert [env.closed for env in made] == [True, True]
