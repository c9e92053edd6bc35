"""Only some of many fast steps are recorded, and represent the others."""

from __future__ import annotations

import gc
import json
import time
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import MakeEnv

from parallelenv import ParallelEnv
from parallelenv.contract.process_info import this_process
from parallelenv.errors import ConcurrentUseError, EnvBusyError
from parallelenv.notebook.profile import Profile
from parallelenv.notebook.profile_summary import summarise
from parallelenv.notebook.recorder import CallRecorder, Sampling
from parallelenv.notebook.recording import Recording, WorkerRecord, cover
from parallelenv.testing.envs import Counter
from parallelenv.worker.tracer import (
    ALLOWED,
    COST_OF_COMMAND,
    COST_OF_ENV,
    COST_OF_RESET,
    NUM_FIRST,
    WANTED,
    StepSkipping,
)

GAP = 5
IN_WINDOW = 8
NUM_WINDOWS = 3
WITH_GAPS = NUM_FIRST + NUM_WINDOWS * (GAP + 1 + IN_WINDOW)
"""So many steps have so many windows after the first. The one before a window is noted in vain."""


@pytest.fixture
def leave_out(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Return a function that sets how many steps are skipped after the recorded ones."""

    def force(number: int) -> None:
        monkeypatch.setattr(StepSkipping, "left_out", lambda *_: number)

    return force


def counters(make_env: MakeEnv, number: int = 4, **kwargs: Any) -> ParallelEnv:
    env = make_env([lambda: Counter(0, 1000)] * number, num_cpus=2, asynchronous="restart", **kwargs)
    env.reset(seed=0)
    return env


def noted_steps(profile: Profile) -> dict[int, int]:
    return {env.env_id: env.steps for env in profile.summary().envs}


# ---------------------------------------------------------------- skipped steps


def test_every_host_records_the_steps_chosen_by_the_caller(make_env: MakeEnv, leave_out: Callable[[int], None]) -> None:
    leave_out(GAP)
    env = counters(make_env)
    with env.profile() as profile:
        for _ in range(WITH_GAPS):
            env.step([1] * 4)
    assert noted_steps(profile) == dict.fromkeys(range(4), NUM_FIRST + NUM_WINDOWS * (1 + IN_WINDOW))
    recording = profile.recording
    assert len(recording.windows) == 1 + NUM_WINDOWS
    assert (np.diff(recording.windows.ravel()) > 0).all()
    for begin, end in recording.windows:
        inside = (recording.calls[:, 1] > begin) & (recording.calls[:, 0] < end)
        assert inside.sum() == (NUM_FIRST + 1 if begin == recording.begin else IN_WINDOW + (end < recording.end))
    found = profile.summary()
    assert 0 < found.sampled < 1
    assert found.caller_share + found.transport_share + found.env_share == pytest.approx(1)
    assert all(0 < share <= 1 for share in found.busy)
    noted = 4 * (NUM_FIRST + NUM_WINDOWS * (1 + IN_WINDOW))
    assert f"of the time and {noted} steps of envs" in repr(found)


def test_all_slow_steps_are_recorded(make_env: MakeEnv) -> None:
    env = counters(make_env, 2)
    with env.profile() as profile:
        for _ in range(NUM_FIRST + 20):
            env.step([1, 1])
            time.sleep(2e-3)
    assert profile.summary().sampled == 1
    assert "sampled" not in repr(profile.summary())
    assert noted_steps(profile) == {0: NUM_FIRST + 20, 1: NUM_FIRST + 20}


def test_most_fast_steps_are_skipped() -> None:
    with ParallelEnv([lambda: Counter(0, 1000)] * 2, asynchronous="restart") as env:
        env.reset(seed=0)
        with env.profile() as profile:
            for _ in range(3000):
                env.step([1, 1])
    assert profile.summary().sampled < 0.9
    assert noted_steps(profile)[1] < 2700


def test_step_skipping_keeps_the_recording_cost_at_its_target() -> None:
    thinning = StepSkipping()
    assert thinning.left_out(8, 1.01 * COST_OF_COMMAND / ALLOWED, 0, 0) == 0
    for num_envs, num_resets in ((0, 0), (4, 0), (4, 2)):
        cost = COST_OF_COMMAND + COST_OF_ENV * num_envs + COST_OF_RESET * num_resets
        seconds = 0.1 * cost / WANTED
        gaps = [thinning.left_out(8, seconds, num_envs, num_resets) for _ in range(60)]
        assert len(set(gaps)) > 3  # at irregular distances
        assert 8 * cost / ((8 + np.mean(gaps)) * seconds) == pytest.approx(WANTED, rel=0.02)


def test_host_skips_steps_within_a_rollout(leave_out: Callable[[int], None]) -> None:
    leave_out(4)
    num_steps = NUM_FIRST - 1 + 50  # the last of the first steps represents five, and so do nine others
    with ParallelEnv([lambda: Counter(0, 1000)] * 2, asynchronous="restart") as env:
        env.reset(seed=0)
        with env.profile() as profile:
            env.rollout(lambda states: [1] * len(states), num_steps, progress=False)
    (worker,) = profile.recording.workers
    is_step = np.array([name == "step" for name in worker.operations])
    assert is_step.sum() == NUM_FIRST - 1 + 10
    assert worker.stands_for[is_step].sum() == num_steps
    found = profile.summary()
    assert 0 < found.sampled < 1
    assert 0 < found.policy_share < 1


def test_sampling_window_waits_for_steps_sent_before(make_env: MakeEnv, leave_out: Callable[[int], None]) -> None:
    leave_out(GAP)
    env = counters(make_env)
    with env.profile() as profile:
        for _ in env.stream(lambda states: [1] * len(states), 600):
            pass
    found = profile.summary()
    assert len(profile.recording.windows) > 1
    assert found.caller_share + found.transport_share + found.env_share == pytest.approx(1)
    assert 0 < sum(noted_steps(profile).values()) < 600


def test_sampling_window_starts_only_without_unrecorded_steps_in_flight() -> None:
    with ParallelEnv([lambda: Sleepy(0, 1000)] * 2, "thread", "restart", num_cpus=2) as env:
        env.reset(seed=0)
        sampling = Sampling(env.engine)
        env.send([100], [0])
        assert len(list(sampling._clear_the_way())) == 8  # then it starts: the wait is limited
        env.recv()
        assert len(list(sampling._clear_the_way())) == 1


def num_resets(profile: Profile) -> int:
    return sum(len(worker.resets) for worker in profile.recording.workers)


def test_autoreset_is_recorded_with_its_step(make_env: MakeEnv, leave_out: Callable[[int], None]) -> None:
    leave_out(GAP)
    env = make_env([lambda: Counter(0, 1)] * 4, num_cpus=2, asynchronous="restart")
    env.reset(seed=0)
    with env.profile() as profile:
        for _ in range(WITH_GAPS):
            env.step([1] * 4)
    assert num_resets(profile) == 4 * (NUM_FIRST + NUM_WINDOWS * (1 + IN_WINDOW))
    for worker in profile.recording.workers:
        begins, ends, owners = worker.resets.T
        assert set(owners) == set(worker.env_ids)
        span = np.searchsorted(worker.spans[:, 0], begins, side="right") - 1
        assert (begins < ends).all()
        assert (ends <= worker.spans[span, 1]).all()


@pytest.mark.parametrize("mode", ["dummy", "subproc"], indirect=True)
def test_next_step_reset_is_recorded(make_env: MakeEnv, leave_out: Callable[[int], None]) -> None:
    leave_out(GAP)
    env = make_env([lambda: Counter(0, 1)] * 2, num_cpus=2)
    vector_env = env.to_gymnasium("NextStep")
    vector_env.reset(seed=0)
    with env.profile() as profile:
        for _ in range(WITH_GAPS):
            vector_env.step(np.array([1, 1]))
    steps = profile.summary().envs[0].steps
    assert NUM_FIRST < steps < WITH_GAPS
    assert num_resets(profile) == pytest.approx(steps, abs=2 * (1 + NUM_WINDOWS))  # every other one of two envs


def test_autoreset_within_a_rollout_is_recorded_with_its_step(leave_out: Callable[[int], None]) -> None:
    leave_out(4)
    with ParallelEnv([lambda: Counter(0, 1)] * 2, asynchronous="restart") as env:
        env.reset(seed=0)
        with env.profile() as profile:
            env.rollout(lambda states: [1] * len(states), NUM_FIRST - 1 + 50, progress=False)
    assert num_resets(profile) == 2 * (NUM_FIRST - 1 + 10)


def test_step_skipping_gets_the_number_of_resets_per_host(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    def note(_: StepSkipping, num_noted: int, seconds: float, *numbers: float) -> int:
        asked.append(numbers)
        return 0

    monkeypatch.setattr(StepSkipping, "left_out", note)
    for last, per_host in ((1, 2.0), (10**6, 0.0)):
        with ParallelEnv([lambda last=last: Counter(0, last)] * 4, "thread", "restart", 2) as env:
            env.reset(seed=0)
            with env.profile():
                for _ in range(NUM_FIRST + 1):
                    env.step([1] * 4)
                env.rollout(lambda states: [1] * len(states), NUM_FIRST + 1, progress=False)
        assert asked
        assert set(asked) == {(2, per_host)}
        asked.clear()


# ---------------------------------------------------------------- weights


class Sleepy(Counter):
    """Each step sleeps for as many milliseconds as its action, or longer on a busy machine."""

    slept = 0.0

    def step(self, action: int) -> Any:
        begin = time.perf_counter()
        time.sleep(1e-3 * action)
        self.slept += time.perf_counter() - begin
        return super().step(action)


@pytest.mark.parametrize("mode", ["dummy", "thread", "subproc"], indirect=True)
def test_sampled_profile_estimates_match_measured_times(make_env: MakeEnv, leave_out: Callable[[int], None]) -> None:
    leave_out(GAP)
    env = make_env([lambda: Sleepy(0, 1000)] * 2, num_cpus=2, asynchronous="restart")
    env.reset(seed=0)
    own = 0.0
    with env.profile() as profile:
        for number in range(WITH_GAPS):
            slow = number >= NUM_FIRST  # all skipped steps are slow
            env.step([4, 8] if slow else [0, 0])
            begin = time.perf_counter()
            time.sleep(8e-3 if slow else 0.0)
            own += time.perf_counter() - begin
    slept = env.get_env_attr("slept")
    found = profile.summary()
    together = sum(slept) if len(found.workers) == 1 else max(slept)
    # Near enough on a busy machine; unweighted, the shares of envs and caller would be nearly 0.
    assert found.env_share == pytest.approx(together / found.seconds, rel=0.5)
    assert found.caller_share == pytest.approx(own / found.seconds, rel=0.5)
    for env_time, seconds in zip(found.envs, slept, strict=True):
        assert env_time.mean == pytest.approx(seconds / WITH_GAPS, rel=0.5)


def made_up() -> Recording:
    """Return a recording of 10 seconds with two windows: a step of 0.2 s in the first, one of 0.5 s in the ninth."""
    spans = np.array([[0.1, 0.3], [8.25, 8.75]])
    worker = WorkerRecord(
        (0,),
        this_process(),
        ["step", "step"],
        spans,
        spans,
        np.zeros(2, np.int64),
        np.ones(2, bool),
        np.arange(2),
        np.ones(2, np.int64),
        np.zeros((0, 3)),
        is_full=False,
        since=0.0,
    )
    return Recording(0.0, 10.0, np.array([[0, 1], [8, 9.0]]), np.array([[0, 0.5], [8.0, 9.0]]), [worker], ())


def test_sampling_windows_are_weighted_by_the_time_they_represent() -> None:
    recording = made_up()
    assert recording.weights.tolist() == [1, 9]
    assert recording.window_of(np.array([-1, 0.5, 5, 8.5, 9.5])).tolist() == [0, 0, 0, 1, 1]
    found = summarise(recording)
    assert found.sampled == pytest.approx(0.2)
    assert found.env_share == pytest.approx(0.02 + 0.45)
    assert found.transport_share == pytest.approx(0.03 + 0.45)
    assert found.caller_share == pytest.approx(0.05)
    assert found.envs[0].mean == pytest.approx((0.2 + 9 * 0.5) / 10)
    assert found.envs[0].steps == 2
    assert found.envs[0].longest == pytest.approx(0.5)


def test_time_outside_of_windows_is_not_attributed_to_the_caller() -> None:
    recording = made_up()
    assert recording.outside(recording.calls).tolist() == [[0.5, 1.0]]
    assert recording.outside(np.zeros((0, 2))).tolist() == [[0, 1], [8, 9]]


def test_cover_sums_span_time_up_to_a_moment() -> None:
    spans = np.array([[1.0, 2.0], [4.0, 6.0]])
    assert cover(spans, np.array([0, 1.5, 3, 5, 9])).tolist() == [0, 0.5, 1, 2, 3]
    assert cover(np.zeros((0, 2)), np.array([[1.0, 2.0]])).tolist() == [[0, 0]]


# ---------------------------------------------------------------- calls


def test_refused_and_nested_calls_are_not_recorded(make_env: MakeEnv) -> None:
    env = counters(make_env)
    calls = env.engine.guard.tracer = CallRecorder()
    env.reset()
    assert len(calls) == 2  # begin and end; a reset makes calls of its own
    with ThreadPoolExecutor(1) as other:
        env.engine.guard.users[""] = (0, "step")
        with pytest.raises(ConcurrentUseError):
            other.submit(env.reset).result()
        env.engine.guard.users.clear()
    env.engine.guard.tracer = None
    assert len(calls) == 2


def test_call_that_a_window_cuts_is_recorded_up_to_its_end() -> None:
    calls = CallRecorder()
    begin = time.perf_counter()
    calls.open(begin, is_in_call=False)
    calls.begin()
    calls.end()
    calls.begin()
    calls.close(time.perf_counter())  # during the call
    spans = calls.spans(begin, time.perf_counter())
    assert len(spans) == 2
    assert (np.diff(spans.ravel()) > 0).all()
    assert calls.windows == [(begin, spans[-1, 1])]
    calls.close(time.perf_counter())  # no window is open
    assert len(calls.windows) == 1


def test_calls_are_clipped_to_the_sampling_window() -> None:
    calls = CallRecorder()
    calls.open(1.0, is_in_call=False)
    calls.close(2.0)
    for _ in range(3):  # not recorded; the last one continues when the window opens
        calls.end()
        calls.begin()
    opened = time.perf_counter()
    calls.open(opened, is_in_call=True)
    calls.end()
    ended = time.perf_counter()
    calls.close(ended)
    calls.begin()  # no window is open afterwards
    calls.end()
    spans = calls.spans(0.0, time.perf_counter())
    assert len(spans) == 1
    assert opened == spans[0, 0] < spans[0, 1] <= ended


def test_recorded_calls_fall_within_sampling_windows(make_env: MakeEnv, leave_out: Callable[[int], None]) -> None:
    leave_out(GAP)
    env = counters(make_env)
    with env.profile() as profile:
        for _ in range(WITH_GAPS - IN_WINDOW):  # it ends with a step outside of the windows
            env.step([1] * 4)
    recording = profile.recording
    begins, ends = recording.windows[recording.window_of(recording.calls[:, 0])].T
    assert (begins <= recording.calls[:, 0]).all()
    assert (recording.calls[:, 1] <= ends).all()


# ---------------------------------------------------------------- cleanup


@pytest.mark.parametrize("mode", ["dummy", "subproc"], indirect=True)
def test_nothing_is_recorded_in_a_gap_while_profiling_continues(
    make_env: MakeEnv, leave_out: Callable[[int], None]
) -> None:
    leave_out(10**6)
    env = counters(make_env)
    with env.profile() as profile:
        assert env.engine.guard.tracer is not None
        for _ in range(NUM_FIRST + 3):
            env.step([1] * 4)
        assert env.engine.guard.tracer is None
        assert not next(env.engine.pool._traced or iter([True]))
        with pytest.raises(EnvBusyError, match="is recorded already"):
            env.profile().__enter__()
    assert env.engine.pool._traced is None
    assert noted_steps(profile) == dict.fromkeys(range(4), NUM_FIRST)
    assert len(profile.recording.windows) == 1


def test_interrupt_in_step_skipping_ends_the_recording(make_env: MakeEnv, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: Any) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(StepSkipping, "left_out", interrupt)
    env = counters(make_env)
    with env.profile() as profile:
        for _ in range(NUM_FIRST):
            env.step([1] * 4)
        with pytest.raises(KeyboardInterrupt):
            env.step([1] * 4)
        for _ in range(10):
            assert not env.step([1] * 4).dones.any()
    assert noted_steps(profile) == dict.fromkeys(range(4), NUM_FIRST)
    assert len(profile.recording.windows) == 1
    assert profile.summary().sampled < 1
    env.step([1] * 4)


def test_unfinished_recording_does_not_keep_the_env_alive() -> None:
    env = ParallelEnv([Counter], asynchronous="restart")
    env.reset(seed=0)
    env.profile().__enter__()
    env.step([1])
    is_there = weakref.ref(env)
    del env
    gc.collect()
    assert is_there() is None


# ---------------------------------------------------------------- pictures


def test_timeline_and_trace_of_a_sampled_profile_have_gaps(leave_out: Callable[[int], None], tmp_path: Path) -> None:
    leave_out(200)
    with ParallelEnv([lambda: Counter(0, 1000)] * 8, asynchronous="restart") as env:
        env.reset(seed=0)
        with env.profile() as profile:
            for _ in range(2000):
                env.step([1] * 8)
    timeline = profile.plot()
    assert timeline.svg.count(">your program</text>") == 2
    assert ">waiting or not sampled</text>" in timeline.svg
    assert "env 7: step" in timeline.svg  # in detail, within a window
    events = json.loads(profile.save(tmp_path / "trace.json").read_text())["traceEvents"]
    noted = sum(event["dur"] for event in events if event.get("cat") in ("call", "caller"))
    windows = profile.recording.windows
    assert noted == pytest.approx(1e6 * (windows[:, 1] - windows[:, 0]).sum(), rel=0.01)
