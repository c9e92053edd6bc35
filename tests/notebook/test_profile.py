"""Profiles: recorded steps and times, in every mode, and the advice."""

from __future__ import annotations

import dataclasses
import gc
import json
import os
import signal
import time
import weakref
import xml.etree.ElementTree
from collections import Counter as Count
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import MakeEnv
from fragile import EXIT, GO_ON, RAISE, WAIT, fragile, when_begun
from modes import IN_WORKERS, PROCESSES, THREADS, in_modes

from parallelenv import ParallelEnv
from parallelenv.contract.error_text import duration
from parallelenv.contract.worker_info import ProcessInfo, this_process
from parallelenv.errors import ArgumentError, ClosedError, EnvBusyError, UsageError, WorkerDiedError
from parallelenv.notebook.profile import Profile, Recording, summarise
from parallelenv.testing.envs import Counter, Sleeper
from parallelenv.worker.tracer import WorkerRecord


def sleepers(make_env: MakeEnv, number: int = 4, **kwargs: Any) -> ParallelEnv:
    env = make_env([lambda index=index: Sleeper(index, 3) for index in range(number)], num_cpus=2, **kwargs)
    env.reset(seed=0)
    return env


def turns_of(profile: Profile) -> Count[tuple[int, str]]:
    """Return how often each env was stepped and reset."""
    return Count(
        (env_id, worker.operations[span])
        for worker in profile.recording.workers
        for env_id, span in zip(worker.owners.tolist(), worker.span_of.tolist(), strict=True)
    )


# ---------------------------------------------------------------- recordings


def test_profile_has_every_step_and_reset_also_if_sent_or_failed(make_env: MakeEnv) -> None:
    env = make_env(fragile(Path()), num_cpus=2, asynchronous="continue")
    env.reset(seed=0)
    with env.profile() as profile:
        for _ in range(5):
            env.step([GO_ON] * 4)
        env.reset([1, 2])
        env.step([GO_ON, GO_ON], [3, 1])
        env.send([GO_ON] * 4)
        env.recv(4)
        with pytest.raises(ZeroDivisionError):
            env.step([GO_ON, RAISE, GO_ON, GO_ON])
    assert turns_of(profile) == {
        **{(env_id, "step"): 7 + (env_id in (1, 3)) for env_id in range(4)},
        **{(env_id, "reset"): 1 for env_id in (1, 2)},
    }
    recording = profile.recording
    assert sorted(env_id for worker in recording.workers for env_id in worker.env_ids) == [0, 1, 2, 3]
    assert recording.missing == ()
    assert len(recording.calls) == 10
    for worker in recording.workers:
        assert (np.diff(worker.turns) > 0).all()
        starts, stops = worker.spans[worker.span_of].T
        assert (recording.begin <= starts).all()
        assert (starts <= worker.turns[:, 0]).all()
        assert (worker.turns[:, 1] <= stops + 1e-9).all()
        assert (stops <= recording.end).all()
    env.step([GO_ON] * 4)  # after the recording


def test_resets_within_steps_are_recorded_with_them(make_env: MakeEnv) -> None:
    env = make_env([lambda: Counter(0, 1)] * 4, num_cpus=2, asynchronous="restart")
    env.reset(seed=0)
    with env.profile() as profile:
        for _ in range(10):
            env.step([1] * 4)
        env.rollout(lambda states: [1] * len(states), 5, progress=False)
    assert turns_of(profile) == {(env_id, "step"): 10 + 5 for env_id in range(4)}
    for worker in profile.recording.workers:
        begins, ends, owners = worker.resets.T
        assert Count(owners) == dict.fromkeys(worker.env_ids, 10 + 5)
        steps = worker.spans[worker.of_operation("step")]
        span = np.searchsorted(steps[:, 0], begins, side="right") - 1
        assert (begins < ends).all()
        assert (ends <= steps[span, 1]).all()


def test_profile_times_match_durations_of_env_steps_and_of_the_policy(make_env: MakeEnv) -> None:
    def think(states: Any) -> list[int]:
        time.sleep(0.02)
        return [1] * len(states)

    env = sleepers(make_env, 2, asynchronous="restart")
    with env.profile() as profile:
        for _ in range(4):
            env.step([1, 5])
            time.sleep(0.03)
    found = profile.summary()
    quick, slow = found.envs
    assert 0.01 <= quick.mean < 0.05 <= slow.mean <= slow.longest < 1
    assert (found.slowest, quick.steps, slow.steps) == (slow, 4, 4)
    assert found.caller_share + found.transport_share + found.env_share == pytest.approx(1)
    assert 0.12 / found.seconds <= found.caller_share < 0.9
    assert found.env_share >= 0.2 / found.seconds
    assert (found.straggler_loss > 0.1) == (len(found.workers) == 2)
    assert list(found.busy) == sorted(found.busy)
    with env.profile() as profile:
        env.rollout(think, 4, progress=False)
    rolled = profile.summary()
    assert rolled.policy_share * rolled.seconds >= 0.08 * 0.9
    assert "policy" in repr(rolled)


def test_policy_that_acts_in_this_process_counts_as_your_code(make_env: MakeEnv) -> None:
    thought = 0.0

    def think(states: Any) -> list[int]:
        nonlocal thought
        time.sleep(0.01)
        thought += 0.01
        return [1] * len(states)

    env = make_env([lambda: Counter(0, 4)] * 4, num_cpus=2, asynchronous="restart")
    for run in (lambda: env.run_episodes(think, 8, progress=False), lambda: list(env.stream(think, 32, min_envs=4))):
        env.reset()
        thought = 0.0
        with env.profile() as profile:
            run()
        found = profile.summary()
        assert found.caller_share * found.seconds > 0.8 * thought
        assert "your own code takes" in found.advice


def test_profile_records_steps_of_an_adapter_and_their_resets(make_env: MakeEnv) -> None:
    env = make_env([lambda: Counter(0, 2)] * 2)
    vector_env = env.to_gymnasium("NextStep")
    vector_env.reset(seed=0)
    with env.profile() as profile:
        for _ in range(3):
            vector_env.step(np.array([1, 1]))
    assert turns_of(profile)[0, "step"] == 3
    assert sum(len(worker.resets) for worker in profile.recording.workers) == 2


# ---------------------------------------------------------------- failures


@in_modes(PROCESSES)
def test_profile_omits_workers_that_died(make_env: MakeEnv) -> None:
    env = make_env(fragile(Path()), num_cpus=2)
    env.reset(seed=0)
    with pytest.raises(WorkerDiedError), env.profile() as profile:  # which keeps its recording
        env.step([GO_ON, GO_ON, GO_ON, EXIT])
    assert profile.recording.missing == (2, 3)
    assert turns_of(profile) == {(0, "step"): 1, (1, "step"): 1}
    assert "not recorded: envs [2, 3]" in repr(profile.summary())
    with env.profile() as profile:  # of the live workers
        env.step([GO_ON] * 2, [0, 1])
    assert turns_of(profile) == {(0, "step"): 1, (1, "step"): 1}
    with env.profile() as profile:
        env.close()
    assert profile.recording.missing == (2, 3)
    assert "the work of the workers of envs [2, 3] is not completely known" in profile.summary().advice
    with pytest.raises(ClosedError, match=r"profile\(\) was called on a closed"):
        env.profile().__enter__()


@pytest.mark.parametrize("end", ["close", "close_all", "to_gymnasium"])
def test_profile_has_what_was_recorded_before_the_env_was_closed(end: str, make_env: MakeEnv) -> None:
    env = sleepers(make_env, asynchronous="continue")
    with env.profile() as profile:
        for _ in range(3):
            env.step([1] * 4)
        if end == "to_gymnasium":
            env.to_gymnasium().close()
        else:
            getattr(env, end)()
        env.close()
        time.sleep(0.02)
    assert profile.recording.missing == ()
    assert turns_of(profile) == {(env_id, "step"): 3 for env_id in range(4)}
    assert profile.summary().env_share > 0
    assert profile.recording.calls[-1, 1] <= profile.recording.end


@in_modes(*IN_WORKERS)
def test_close_within_a_profile_does_not_wait_for_busy_workers(make_env: MakeEnv, tmp_path: Path) -> None:
    env = make_env(fragile(tmp_path), num_cpus=2)
    env.reset(seed=0)
    begin = time.monotonic()
    with env.profile() as profile:
        with when_begun(tmp_path, 3, lambda: None):
            env.send([GO_ON, GO_ON, GO_ON, WAIT])
        env.close(0.1)
    assert time.monotonic() - begin < 10.0
    assert set(profile.recording.missing) <= {2, 3}


@in_modes(PROCESSES)
def test_profile_that_cannot_begin_records_nothing(make_env: MakeEnv) -> None:
    env = make_env(fragile(Path()), num_cpus=2)
    os.kill(env.engine.pool.processes[0].pid, signal.SIGKILL)
    with pytest.raises(WorkerDiedError), env.profile():
        pass
    assert env.engine.pool.ask("manage", [2, 3], None, "stop_trace").values == {}


@in_modes(*IN_WORKERS)
def test_profile_records_a_rebuilt_worker_from_its_restart(make_env: MakeEnv) -> None:
    env = make_env(fragile(Path()), num_cpus=2, asynchronous="restart", on_failure="restart")
    env.reset(seed=0)
    with env.profile() as profile:
        env.step([GO_ON] * 4)
        rebuilt = tuple(np.flatnonzero(env.step([GO_ON, GO_ON, EXIT, GO_ON]).truncated).tolist())
        assert {2, 3} <= set(rebuilt)
        for _ in range(5):
            env.step([GO_ON] * 4)
        env.restart([0])  # its worker is alive and continues to record
    recording = profile.recording
    assert (recording.missing, recording.rebuilt) == ((), rebuilt)
    turns = turns_of(profile)
    assert [turns[env_id, "step"] for env_id in range(4)] == [5 if env_id in rebuilt else 7 for env_id in range(4)]
    found = profile.summary()
    assert f"recorded only since their workers were rebuilt: envs {list(rebuilt)}" in repr(found)
    assert f"the work of the workers of envs {list(rebuilt)} is not completely known" in found.advice
    with env.profile() as profile:
        env.reset()
    assert profile.recording.rebuilt == ()


@in_modes(THREADS, PROCESSES)
def test_profile_omits_workers_that_are_still_busy(make_env: MakeEnv, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("parallelenv.notebook.profile.COLLECT_TIMEOUT", 0.2)
    env = sleepers(make_env, 2)
    with env.profile() as profile:
        env.send([0, 200], [0, 1])
    assert profile.recording.missing == (1,)
    assert turns_of(profile) == {(0, "step"): 1}
    assert len(env.recv(2).env_ids) == 2


@pytest.mark.parametrize("is_patient", [True, False])
def test_profile_waits_for_other_threads(is_patient: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    steps = {(env_id, "step"): 1 for env_id in range(4)}
    with ParallelEnv(fragile(tmp_path), asynchronous="restart") as env:
        env.reset(seed=0)
        recorder = env.profile()
        profile = recorder.__enter__()

        def leave() -> None:
            if is_patient:
                (tmp_path / "go").touch()  # the step, which looks for it every 10 ms, ends during the next line
            else:
                monkeypatch.setattr("parallelenv.notebook.profile.COLLECT_TIMEOUT", 0.05)
            recorder.__exit__(None, None, None)
            (tmp_path / "go").touch()

        with when_begun(tmp_path, 0, leave):
            env.step([WAIT, GO_ON, GO_ON, GO_ON])
        assert profile.recording.missing == (() if is_patient else (0, 1, 2, 3))
        assert turns_of(profile) == (steps if is_patient else {})
        if not is_patient:
            assert profile.recording.calls[-1, 1] == profile.recording.end  # of the call that has not ended
        with env.profile() as profile:
            env.step([GO_ON] * 4)
        assert turns_of(profile) == steps


class Interrupted(Counter):
    def step(self, action: int) -> Any:
        if action == 3:
            raise KeyboardInterrupt
        return super().step(action)


def test_interrupted_step_does_not_resume_at_the_end_of_the_block() -> None:
    first, second = Interrupted(), Interrupted()
    with ParallelEnv([first, second], asynchronous="restart") as env:
        env.reset(seed=0)
        with pytest.raises(KeyboardInterrupt), env.profile() as profile:
            env.step([3, 1])
        assert profile.recording.missing == (0, 1)
        assert second.count == 0
        with pytest.raises(Exception, match="interrupted"):
            env.recv(2)
        assert second.count == 1


def test_profile_under_way_has_no_summary_and_excludes_another() -> None:
    with ParallelEnv([Counter]) as env, env.profile() as profile:
        assert repr(profile) == "<Profile, still recording>"
        for ask in (profile.summary, profile.plot, lambda: profile.save("trace.json")):
            with pytest.raises(UsageError, match="call this after the block"):
                ask()
        with pytest.raises(EnvBusyError, match="is already being recorded"):
            env.profile().__enter__()


@pytest.mark.parametrize("limit", ["worker.tracer.MOST_TURNS", "notebook.profile.MOST_CALLS"])
def test_full_recording_keeps_the_latest_steps_or_calls(limit: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(f"parallelenv.{limit}", 9)
    with ParallelEnv([Counter, Counter], asynchronous="restart") as env:
        env.reset(seed=0)
        with env.profile() as profile:
            for _ in range(20):
                begin = time.perf_counter()
                env.step([1, 1])
    recording, summary = profile.recording, profile.summary()
    if limit.endswith("TURNS"):
        assert 1 <= turns_of(profile)[0, "step"] == turns_of(profile)[1, "step"] <= 3
    else:
        assert 2 <= len(recording.calls) <= 10
    assert recording.workers[0].spans[-1, 1] > begin
    assert recording.calls[-1, 1] > begin > recording.begin > begin - summary.seconds
    assert summary.is_cut
    assert sum(summary.busy) < 1
    assert "incomplete: only the latest" in repr(summary)


def test_unfinished_recording_does_not_keep_the_env_alive() -> None:
    env = ParallelEnv([Counter], asynchronous="restart")
    env.reset(seed=0)
    env.profile().__enter__()
    env.step([1])
    is_there = weakref.ref(env)
    del env
    gc.collect()
    assert is_there() is None


# ---------------------------------------------------------------- clocks of other machines


@pytest.mark.parametrize("is_rebuilt", [False, True])
def test_clock_of_another_machine_is_aligned(is_rebuilt: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    def move(clock: str, seconds: float) -> None:
        """Let the worker run on another machine from now on."""
        for module in ("tracer", "host"):
            monkeypatch.setattr(f"parallelenv.worker.{module}.clock_id", lambda: clock)
            monkeypatch.setattr(f"parallelenv.worker.{module}.perf_counter", lambda: time.perf_counter() + seconds)

    move("other", -979.5)
    with ParallelEnv([Counter]) as env:
        env.reset()
        with env.profile() as profile:
            if is_rebuilt:
                move("third", 1e5)
                env.restart()
                env.reset()
            begin = time.perf_counter()
            env.step([1])
            end = time.perf_counter()
    recording = profile.recording
    assert recording.workers[0].spans[-1].tolist() == pytest.approx([begin, end], abs=1)


# ---------------------------------------------------------------- timeline and trace


SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture(scope="module")
def recorded() -> Profile:
    with ParallelEnv([lambda index=index: Sleeper(index, 3) for index in range(4)], PROCESSES, "restart", 2) as env:
        env.reset(seed=0)
        with env.profile() as profile:
            for _ in range(6):
                env.step([0, 1, 0, 0])
            env.reset([0])
    return profile


def test_saved_trace_has_the_format_of_perfetto(recorded: Profile, tmp_path: Path) -> None:
    events = json.loads(recorded.save(tmp_path / "trace.json").read_text())["traceEvents"]
    names = {(event["name"], event["tid"]): event["args"] for event in events if event["ph"] == "M"}
    assert names["process_name", 1] == {"name": "ParallelEnv"}
    assert names["thread_name", 1] == {"name": "caller"}  # Perfetto would overlay thread 0 with another one
    for number, worker in enumerate(recorded.recording.workers, start=2):
        name = f"worker of envs {2 * number - 4}-{2 * number - 3} ({worker.process.pid})"
        assert names["thread_name", number] == {"name": name}
        assert names["thread_sort_index", number] == {"sort_index": number}
    spans = [event for event in events if event["ph"] == "X"]
    threads = {event["name"]: event["tid"] for event in spans}
    assert (threads["in a call"], threads["own code"], threads["env 0: step"], threads["env 3: step"]) == (1, 1, 2, 3)
    assert {"step", "reset"} <= threads.keys()
    length = 1e6 * (recorded.recording.end - recorded.recording.begin)
    for event in spans:
        assert set(event) == {"name", "cat", "ph", "pid", "tid", "ts", "dur"}
        assert -1 <= event["ts"] <= event["ts"] + event["dur"] <= length + 1
    for thread in threads.values():  # an event within another one ends before that
        open_until: list[float] = []
        for event in sorted((one for one in spans if one["tid"] == thread), key=lambda one: (one["ts"], -one["dur"])):
            while open_until and open_until[-1] <= event["ts"] + 0.01:
                open_until.pop()
            assert not open_until or event["ts"] + event["dur"] <= open_until[-1] + 0.01, event
            open_until.append(event["ts"] + event["dur"])
    for path in (tmp_path / "trace.txt", "trace\0.json"):
        with pytest.raises(ArgumentError, match=r"must be the name of a file that ends in .json"):
            recorded.save(path)


def test_timeline_of_all_or_a_part_is_a_self_contained_svg(recorded: Profile, tmp_path: Path) -> None:
    timeline = recorded.plot(path=tmp_path / "time.svg")
    root = xml.etree.ElementTree.fromstring((tmp_path / "time.svg").read_text())
    texts, titles = ([element.text or "" for element in root.iter(f"{SVG}{tag}")] for tag in ("text", "title"))
    assert {"your program", "your code", "waiting", "envs 0-1", "envs 2-3", "0 ms"} <= set(texts)
    assert sum(text.endswith(" ms") for text in texts) > 1  # how many and which: the recording's length
    assert sum(title.startswith("env 1: step") for title in titles) == 6
    assert any(title.startswith("env 0: reset") for title in titles)
    for rect in root.iter(f"{SVG}rect"):
        x, width = float(rect.attrib["x"]), float(rect.attrib["width"])
        assert 0 <= x <= x + width <= 901
    assert "http" not in timeline.svg.replace(SVG[1:-1], "")
    assert timeline._repr_mimebundle_()["text/html"] == timeline.svg
    assert 0 < recorded.plot(0.0, 0.02).svg.count("env 1: step") < 6
    for begin, end in [(0.2, 0.1), (-1.0, None), (1e6, None), ("a", None), (None, True), (float("nan"), None)]:
        with pytest.raises(ArgumentError, match="the recording goes from 0 to"):
            recorded.plot(begin, end)  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match=r"ends in .svg"):
        recorded.plot(path=tmp_path / "time.png")


def test_summary_indents_sub_shares_and_main_shares_add_up(recorded: Profile) -> None:
    lines = repr(recorded.summary()).splitlines()
    rows = {line[:12].rstrip(): float(line[12:].split("%")[0]) for line in lines[2:6]}
    assert list(rows) == ["your code", "transport", "workers", "  stragglers"]
    assert rows["your code"] + rows["transport"] + rows["workers"] == pytest.approx(100, abs=0.2)
    assert rows["  stragglers"] <= rows["workers"]


def test_durations_have_three_digits_and_a_suitable_unit() -> None:
    assert [duration(seconds) for seconds in (0.0, 5e-6, 123.4e-6, 999.7e-6)] == ["0 µs", "5 µs", "123 µs", "1 ms"]
    assert [duration(seconds) for seconds in (0.9999, 12.34, 86400.0)] == ["1 s", "12.3 s", "86,400 s"]


def test_timeline_of_a_long_recording_is_condensed() -> None:
    with ParallelEnv([Counter] * 8, asynchronous="restart") as env:
        env.reset(seed=0)
        with env.profile() as profile:
            for _ in range(2000):
                env.step([1] * 8)
    svg = profile.plot().svg
    assert len(svg) < 400_000
    assert svg.count(">your program</text>") == 2
    assert "works for " in svg
    assert "env 7: step" in svg


# ---------------------------------------------------------------- advice, for made-up recordings of one second


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


STEPS, IN_ROLLOUTS = ("step",), ("step", "rollout")


@pytest.mark.parametrize(
    ("seats", "transport", "operations", "ways"),
    [
        ([HERE], 0.49, STEPS, {MANY_STEPS, MORE_ENVS}),
        ([HERE, HERE], 0.49, STEPS, {MANY_STEPS, MORE_ENVS, FEWER}),
        ([AWAY, AWAY], 0.49, STEPS, {MANY_STEPS, MORE_ENVS, FEWER, CALLER}),
        ([HERE, AWAY], 0.49, STEPS, {MANY_STEPS, MORE_ENVS, FEWER}),  # with caller_steps
        ([AWAY, AWAY], 0.83, STEPS, {MANY_STEPS, MORE_ENVS, FEWER, CALLER, DUMMY}),
        ([AWAY], 0.83, STEPS, {MANY_STEPS, MORE_ENVS, DUMMY}),
        ([HERE], 0.83, STEPS, {MANY_STEPS, MORE_ENVS}),
        ([AWAY, AWAY], 0.3, IN_ROLLOUTS, {ROLLOUT, FEWER}),
        ([HERE], 0.3, IN_ROLLOUTS, {ROLLOUT}),
    ],
)
def test_advice_on_transport_time_suggests_suitable_remedies(
    seats: list[ProcessInfo], transport: float, operations: Sequence[str], ways: set[str]
) -> None:
    said = advice([worker(1 - transport, number, process, operations) for number, process in enumerate(seats)])
    cause = "joining rollouts" if "rollout" in operations else "building results"
    assert f"messages and {cause} take {transport:.0%} of the time" in said
    assert {way for way in WAYS if way in said} == ways


@pytest.mark.parametrize(
    ("workers", "calls", "said"),
    [
        (
            [worker(0.3)],
            0.4,
            "your own code takes 60% of the time, so faster envs would not help; use send() and recv() to",
        ),
        (
            [worker(0.3, process=HERE)],
            0.4,
            "use send() and recv() in para_mode='subproc' to let envs work in the meantime",
        ),
        ([worker(0.3, 0, HERE), worker(0.3, 1, HERE)], 0.4, "use send() and recv() to let envs work in the meantime"),
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
