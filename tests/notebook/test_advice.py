"""The advice of a profile, for made-up recordings of one second with given shares of envs and messages."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
import pytest

from parallelenv.contract.worker_info import ProcessInfo, this_process
from parallelenv.notebook.profile import summarise
from parallelenv.notebook.timeline import Recording
from parallelenv.worker.tracer import WorkerRecord

AWAY = ProcessInfo(this_process().pid + 1, this_process().machine)
ROLLOUT, MANY_STEPS, MORE_ENVS = "more steps in each rollout", "rollout(), which makes many steps", "more envs in each"
FEWER, CALLER, DUMMY = "fewer workers (num_cpus)", "caller_steps=True", "para_mode='dummy'"
WAYS = {ROLLOUT, MANY_STEPS, MORE_ENVS, FEWER, CALLER, DUMMY}


def worker(number: int, process: ProcessInfo, operations: Sequence[str], seconds: float) -> WorkerRecord:
    """Return a worker whose operations all start at once and end with the last one."""
    spans = np.tile([0.0, seconds], (len(operations), 1))
    count = len(operations)
    owners, resets = np.full(count, number), np.zeros((0, 3))
    return WorkerRecord(
        (number,), process, "", 0.0, 1.0, False, operations, spans, spans, owners, np.arange(count), resets
    )


def advice(
    seats: Sequence[ProcessInfo], transport: float, operations: Sequence[str] = ("step",), waits: float = 0.0
) -> str:
    workers = [
        worker(number, process, operations, 1 - transport - waits * 2 * (number > 0))
        for number, process in enumerate(seats)
    ]
    return summarise(Recording(0.0, 1.0, False, np.array([[0.0, 1.0]]), workers, ())).advice


@pytest.mark.parametrize(
    ("seats", "transport", "ways"),
    [
        ([this_process()], 0.49, {MANY_STEPS, MORE_ENVS}),
        ([this_process(), this_process()], 0.49, {MANY_STEPS, MORE_ENVS, FEWER}),
        ([AWAY, AWAY], 0.49, {MANY_STEPS, MORE_ENVS, FEWER, CALLER}),
        ([this_process(), AWAY], 0.49, {MANY_STEPS, MORE_ENVS, FEWER}),  # with caller_steps
        ([AWAY, AWAY], 0.83, {MANY_STEPS, MORE_ENVS, FEWER, CALLER, DUMMY}),
        ([AWAY], 0.83, {MANY_STEPS, MORE_ENVS, DUMMY}),
        ([this_process()], 0.83, {MANY_STEPS, MORE_ENVS}),
    ],
)
def test_advice_on_transport_time_suggests_suitable_remedies(
    seats: list[ProcessInfo], transport: float, ways: set[str]
) -> None:
    said = advice(seats, transport)
    assert f"take {transport:.0%} of the time" in said
    assert {way for way in WAYS if way in said} == ways


@pytest.mark.parametrize(("seats", "ways"), [([AWAY, AWAY], {ROLLOUT, FEWER}), ([this_process()], {ROLLOUT})])
def test_advice_on_transport_time_in_rollouts_suggests_other_remedies(seats: list[ProcessInfo], ways: set[str]) -> None:
    said = advice(seats, 0.3, ("step", "rollout"))
    assert "messages and joining rollouts take 30% of the time" in said
    assert {way for way in WAYS if way in said} == ways


@pytest.mark.parametrize(("cores", "expected"), [(1, "only faster"), (4, "there are 4 cores; try para_mode='subproc'")])
def test_advice_on_busy_envs_names_idle_cores(cores: int, expected: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("parallelenv.notebook.profile.usable_cores", lambda: cores)
    envs = worker(0, this_process(), ["step", "step"], 0.9)
    envs = dataclasses.replace(envs, env_ids=(0, 1), owners=np.array([0, 1]))
    assert expected in summarise(Recording(0.0, 1.0, False, np.array([[0.0, 1.0]]), [envs], ())).advice
    assert "only faster" in advice([AWAY, AWAY], 0.19)  # messages take little


def test_advice_names_the_callers_own_code() -> None:
    workers = [worker(0, AWAY, ["step"], 0.3)]
    said = summarise(Recording(0.0, 1.0, False, np.array([[0.0, 0.4]]), workers, ())).advice
    assert "your own code takes 60% of the time" in said


def test_advice_does_not_suggest_send_if_envs_are_stepped_separately() -> None:
    workers = [worker(0, AWAY, ["step"] * 5, 1.0), worker(1, AWAY, ["step"], 0.5)]
    said = summarise(Recording(0.0, 1.0, False, np.array([[0.0, 1.0]]), workers, ())).advice
    assert "do not wait for each other; workers are idle for 25% of it" in said


def test_advice_without_steps_or_records() -> None:
    assert "no env was stepped" in advice([AWAY], 0.5, ["reset"])
    said = summarise(Recording(0.0, 1.0, False, np.zeros((0, 2)), [], (0, 1))).advice
    assert "the work of the workers of envs [0, 1] is not completely known" in said


def test_advice_names_the_greater_loss() -> None:
    assert "workers wait for the slowest of them 25% of the time" in advice([AWAY, AWAY], 0.24, waits=0.25)
    assert "messages and building results take 30%" in advice([AWAY, AWAY], 0.3, waits=0.25)
