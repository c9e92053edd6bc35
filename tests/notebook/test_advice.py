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

HERE = this_process()
AWAY = ProcessInfo(HERE.pid + 1, HERE.machine)
ROLLOUT, MANY_STEPS, MORE_ENVS = "more steps in each rollout", "rollout(), which makes many steps", "more envs in each"
FEWER, CALLER, DUMMY = "fewer workers (num_cpus)", "caller_steps=True", "para_mode='dummy'"
WAYS = {ROLLOUT, MANY_STEPS, MORE_ENVS, FEWER, CALLER, DUMMY}


def worker(
    seconds: float, number: int = 0, process: ProcessInfo = AWAY, operations: Sequence[str] = ("step",)
) -> WorkerRecord:
    """Return a worker whose operations all start at once and end with the last one."""
    spans = np.tile([0.0, seconds], (len(operations), 1))
    count = len(operations)
    owners, resets = np.full(count, number), np.zeros((0, 3))
    return WorkerRecord(
        (number,), process, "", 0.0, 1.0, False, operations, spans, spans, owners, np.arange(count), resets
    )


def advice(workers: Sequence[WorkerRecord], calls: float = 1.0) -> str:
    """Return the advice if the calls took this share of the time."""
    return summarise(Recording(0.0, 1.0, False, np.array([[0.0, calls]]), workers, ())).advice


@pytest.mark.parametrize(
    ("seats", "transport", "ways"),
    [
        ([HERE], 0.49, {MANY_STEPS, MORE_ENVS}),
        ([HERE, HERE], 0.49, {MANY_STEPS, MORE_ENVS, FEWER}),
        ([AWAY, AWAY], 0.49, {MANY_STEPS, MORE_ENVS, FEWER, CALLER}),
        ([HERE, AWAY], 0.49, {MANY_STEPS, MORE_ENVS, FEWER}),  # with caller_steps
        ([AWAY, AWAY], 0.83, {MANY_STEPS, MORE_ENVS, FEWER, CALLER, DUMMY}),
        ([AWAY], 0.83, {MANY_STEPS, MORE_ENVS, DUMMY}),
        ([HERE], 0.83, {MANY_STEPS, MORE_ENVS}),
    ],
)
def test_advice_on_transport_time_suggests_suitable_remedies(
    seats: list[ProcessInfo], transport: float, ways: set[str]
) -> None:
    said = advice([worker(1 - transport, number, process) for number, process in enumerate(seats)])
    assert f"messages and building results take {transport:.0%} of the time" in said
    assert {way for way in WAYS if way in said} == ways


@pytest.mark.parametrize(("seats", "ways"), [([AWAY, AWAY], {ROLLOUT, FEWER}), ([HERE], {ROLLOUT})])
def test_advice_on_transport_time_in_rollouts_suggests_other_remedies(seats: list[ProcessInfo], ways: set[str]) -> None:
    said = advice([worker(0.7, number, process, ("step", "rollout")) for number, process in enumerate(seats)])
    assert "messages and joining rollouts take 30% of the time" in said
    assert {way for way in WAYS if way in said} == ways


@pytest.mark.parametrize(
    ("workers", "calls", "said"),
    [
        ([worker(0.3)], 0.4, "your own code takes 60% of the time"),
        ([worker(0.5, operations=["reset"])], 1.0, "no env was stepped"),
        ([worker(0.81, 0), worker(0.81, 1)], 1.0, "envs take 81% of the time; only faster envs"),
        ([worker(0.76, 0), worker(0.26, 1)], 1.0, "workers wait for the slowest of them 25% of the time (env 0 takes"),
        ([worker(0.7, 0), worker(0.2, 1)], 1.0, "messages and building results take 30%"),  # which is the greater loss
        (
            [worker(1.0, 0, operations=["step"] * 5), worker(0.5, 1)],
            1.0,
            "do not wait for each other; workers are idle for 25% of it",
        ),
    ],
)
def test_advice_names_the_greatest_loss(workers: list[WorkerRecord], calls: float, said: str) -> None:
    assert said in advice(workers, calls)


@pytest.mark.parametrize(("cores", "expected"), [(1, "only faster"), (4, "there are 4 cores; try para_mode='subproc'")])
def test_advice_on_busy_envs_names_idle_cores(cores: int, expected: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("parallelenv.notebook.profile.usable_cores", lambda: cores)
    envs = worker(0.9, operations=["step", "step"])
    assert expected in advice([dataclasses.replace(envs, env_ids=(0, 1), owners=np.array([0, 1]))])
