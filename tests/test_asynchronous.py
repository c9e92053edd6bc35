"""Streams, evaluation, copies of one env and shared arrays: failures, order and memory."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import itertools
import pickle
from functools import partial
from pathlib import Path
from typing import Any, assert_type

import gymnasium as gym
import numpy as np
import pytest
from conftest import MakeEnv, require_mode
from fragile import EXIT, GO_ON, RAISE, fragile
from modes import LOCAL, MODES, ORACLE, PROCESSES, THREADS, in_modes

from parallelenv import TERMINATED, Evaluation, ParallelEnv, StateWrapper, get_worker_info, recommend
from parallelenv.backends.dummy import DummyBackend
from parallelenv.contract.protocol import Backend
from parallelenv.errors import (
    ActionError,
    ArgumentError,
    ClosedError,
    EnvBusyError,
    EnvContractError,
    NothingInFlightError,
    ResetNeededError,
    UnpicklableError,
    UsageError,
    WorkerDiedError,
    WorkerStartError,
    WorkerTimeoutError,
)
from parallelenv.results import StepBatch, StepResult
from parallelenv.testing.contract import assert_same, drain, five_env_fns
from parallelenv.testing.envs import Counter, InfoEnv, Ragged, Sleeper

in_workers = in_modes(THREADS, PROCESSES)
COUNTERS = [partial(Counter, number, 3 + number) for number in range(3)]


@pytest.fixture(params=[ORACLE, PROCESSES])
def mode(request: pytest.FixtureRequest) -> str:
    """The modes of a test that names none: messages are pickled in one of them."""
    return require_mode(request.param, request)


def ones(states: Any) -> Any:
    return np.ones(len(states), np.int64)


@pytest.fixture
def env(make_env: MakeEnv) -> ParallelEnv:
    """Three envs after a reset."""
    env = make_env(COUNTERS, asynchronous="restart", num_cpus=2)
    env.reset(seed=1)
    return env


def failing_at(turn: int) -> Any:
    """Return a policy that raises in its call of this number."""
    calls = itertools.count(1)

    def act(states: Any) -> Any:
        if next(calls) == turn:
            raise KeyError("lost")
        return ones(states)

    return act


def test_type_checker_infers_result_type_from_align(env: ParallelEnv) -> None:
    actions = np.ones(3, np.int64)
    assert_type(env.step(actions), StepResult)
    assert_type(env.step(actions, align="item"), StepResult)
    assert_type(env.step(actions, align="batch"), StepBatch)
    assert_type(env.step(actions, None, "batch"), StepBatch)
    env.send(actions)
    assert_type(env.recv(1, 1), StepResult)
    assert_type(env.recv(1, 1, align="batch"), StepBatch)
    assert_type(asyncio.run(env.arecv(1, 1, None, "batch")), StepBatch)
    env.step_async(actions)
    assert_type(env.step_wait(), StepResult)
    env.step_async(actions)
    assert type(assert_type(env.step_wait(align="batch"), StepBatch)) is StepBatch


# ---------------------------------------------------------------- refused arguments


def test_shared_is_refused_by_a_backend_without_share() -> None:
    class Plain(DummyBackend):
        share = Backend.share

    with ParallelEnv(COUNTERS, Plain):  # without shared arrays
        pass
    with pytest.raises(ArgumentError, match=r"shared=\['a'\] was given, but Plain has no share\(\)"):
        ParallelEnv(COUNTERS, Plain, shared={"a": np.zeros(2)})


@in_modes(*LOCAL)
def test_shared_arrays_that_exceed_memory_are_refused(make_env: MakeEnv) -> None:
    with pytest.raises(WorkerStartError, match=r"^shared= needs 9,007,199,254,740,992 bytes"):
        make_env(COUNTERS, shared={"a": np.broadcast_to(np.zeros(1), (1 << 50,))})


def test_state_wrapper_refuses_asynchronous_calls(make_env: MakeEnv) -> None:
    class Doubled(StateWrapper):
        def process(self, states: Any) -> Any:
            return states * 2

    wrapped = Doubled(make_env(COUNTERS, asynchronous="restart"))
    for call in ("send_reset", "arecv", "stream", "run_episodes", "get_state", "send_action"):
        with pytest.raises(UsageError, match=rf"{call}\(\) would bypass Doubled"):
            getattr(wrapped, call)(ones)


# ---------------------------------------------------------------- copies of one env


def test_replicate_accepts_instances_callables_ids_and_specs(mode: str) -> None:
    live = Counter(7)
    for env, number in ((live, 7), (Counter, 0), (partial(Counter, 4), 4)):
        with ParallelEnv.replicate(env, 3, mode, "idle") as copies:
            assert copies.get_env_attr("number") == [number] * 3
            copies.reset()
            assert len(copies.step([1, 1, 1]).env_ids) == 3
    assert live.count == 0
    for known in ("CartPole-v1", gym.spec("CartPole-v1")):
        with ParallelEnv.replicate(known, 2, mode, seed=3) as copies:
            assert_same(copies.reset(), copies.reset(seed=3))


def test_sentinel_states_and_actions_equal_their_string_forms(env: ParallelEnv) -> None:
    ended: Any = TERMINATED
    assert ended == "terminated"
    assert repr(ended) == "TERMINATED"
    env.send_action("reset", 1)
    found: Any = env.get_state()
    assert (found[0][1], found[1]) == (0, 1)
    env.send_action("close", 1)
    assert env.paused.tolist() == [False, True, False]


# ---------------------------------------------------------------- streams


def test_stream_loses_no_result_if_the_policy_raises(env: ParallelEnv) -> None:
    with pytest.raises(KeyError) as caught:
        list(env.stream(failing_at(2), min_envs=3))
    assert sorted(caught.value.partial.env_ids) == [0, 1, 2]  # type: ignore[attr-defined]
    assert env.step([1, 1, 1]).states[:, 1].tolist() == [2, 2, 2]
    with pytest.raises(ActionError) as refused:
        list(env.stream(lambda states: [0.5] * len(states)))
    assert not hasattr(refused.value, "partial")  # nothing was received before


def test_stream_refuses_the_tuple_that_policies_of_rollouts_return(env: ParallelEnv) -> None:
    with pytest.raises(ActionError, match=r"returned a tuple \(actions, None, extras\), as for rollout\(\)"):
        list(env.stream(lambda states: (ones(states), None, {})))


def test_stream_ends_when_the_env_is_closed(env: ParallelEnv) -> None:
    for turn, _ in enumerate(env.stream(ones)):
        if turn == 3:
            env.close()
    assert turn == 3


def test_views_stay_valid_during_the_loop_body_of_a_stream(make_env: MakeEnv) -> None:
    env = make_env(COUNTERS, asynchronous="restart", num_cpus=1, copy=False)
    env.reset(seed=1)
    for _, result in env.stream(ones, 12, min_envs=3):
        before = result.states.copy()
        env.get_env_attr("number")  # these envs have already stepped
        assert_same(before, result.states)


def test_stream_works_without_observation_spaces(make_env: MakeEnv) -> None:
    env = make_env(five_env_fns(Ragged), asynchronous="restart", num_cpus=2)
    env.send_reset(seed=1)
    steps = 0
    for _, result in env.stream(lambda states: [1.0] * len(states), 23, max_envs=2):
        steps += sum(not info["reset"] or bool(done) for info, done in zip(result.infos, result.dones, strict=True))
    assert steps == 23


def test_policy_of_a_stream_may_change_its_states(make_env: MakeEnv) -> None:
    env = make_env(five_env_fns(Ragged), asynchronous="restart", num_cpus=2)
    env.send_reset(seed=1)

    def act(states: Any) -> Any:
        for state in states:
            state[...] = -1
        return [1.0] * len(states)

    for _, result in env.stream(act, 10):
        assert not any(state.size and (state == -1).all() for state in result.states)


def test_stream_can_be_restarted_after_an_env_raised(make_env: MakeEnv, tmp_path: Path) -> None:
    env = make_env(fragile(tmp_path), asynchronous="restart", num_cpus=2)
    env.reset()
    with pytest.raises(ZeroDivisionError):
        list(env.stream(lambda states: np.where(states.sum(axis=1) == 5, RAISE, GO_ON), min_envs=4))
    assert get_worker_info() is None
    list(env.stream(lambda states: np.full(len(states), GO_ON), 8))
    with pytest.raises(NothingInFlightError):
        env.recv()


def test_errors_of_stream_name_the_method(env: ParallelEnv) -> None:
    state = env.save_state()
    env.load_state(state)
    with pytest.raises(ResetNeededError, match=r"latest states of envs \[0, 1, 2\] are not known"):
        list(env.stream(ones, 3))
    env.close()
    with pytest.raises(ClosedError, match=r"^stream\(\) was called"):
        list(env.stream(ones, 3))


def test_unpicklable_argument_error_names_the_method(env: ParallelEnv) -> None:
    with pytest.raises(UnpicklableError, match=r"^The argument of nap\(\) for env 1, .* Nothing was sent"):
        env.call("nap", [[], [(item for item in range(1))], []])


# ---------------------------------------------------------------- awaiting


class Cancelling(Counter):
    """Cancels the task in which it is stepped, as Ctrl-C does."""

    def step(self, action: int) -> Any:
        task: Any = asyncio.current_task()
        task.cancel()
        return super().step(action)


def test_cancelling_arecv_during_a_step_loses_no_result() -> None:
    async def play(env: ParallelEnv) -> None:
        env.send([1, 1])
        await env.arecv(2)

    with ParallelEnv([Cancelling] * 2, ORACLE) as env:
        env.reset()
        with pytest.raises(asyncio.CancelledError):
            asyncio.run(play(env))
        assert env.recv(2).states[:, 1].tolist() == [1, 1]


@in_modes(*LOCAL)
def test_arecv_yields_to_other_tasks_when_results_are_ready(make_env: MakeEnv) -> None:
    env = make_env([Counter])
    log: list[str] = []

    async def play() -> None:
        for _ in range(3):
            env.send_reset()
            await env.arecv()
            log.append("played")

    async def watch() -> None:
        task = asyncio.ensure_future(play())
        await asyncio.sleep(0)
        log.append("watched")
        await task

    asyncio.run(watch())
    assert log.index("watched") < 2


# ---------------------------------------------------------------- whole episodes


@in_workers
def test_evaluation_timeout_leaves_no_steps_in_flight(make_env: MakeEnv) -> None:
    env = make_env(five_env_fns(Sleeper), num_cpus=5, timeout=0.5)
    with pytest.raises(WorkerTimeoutError, match=r"env 2 did not .*envs that played need a reset\..*restart\(\[2\]\)"):
        env.run_episodes(lambda states: [0, 0, 200, 0, 0], 5, progress=False)
    with pytest.raises(NothingInFlightError):
        env.recv()


def test_run_episodes_does_not_affect_other_envs(env: ParallelEnv, make_env: MakeEnv) -> None:
    env.send([4], 2)
    with pytest.raises(EnvBusyError, match=r"\[2\]"):
        env.run_episodes(ones, 3)
    found = env.run_episodes(ones, 2, id=[1], progress=False)
    assert found.lengths.tolist() == [4, 4]
    env.seed(5)
    with pytest.raises(EnvBusyError):
        env.run_episodes(ones, 3)
    assert_same(make_env(COUNTERS).reset(seed=5)[:2], env.reset([0, 1]))  # the seeds are still there
    assert [entry[0][1] for entry in drain(env).values()] == [1]
    env.pause(1)
    with pytest.raises(EnvBusyError, match=r"\[1\]"):
        env.run_episodes(ones, 3, id=[0, 1])
    assert env.step([1], 2).states[0, 1] == 2
    env.resume()
    assert env.run_episodes(ones, 1, id=[1, 2], progress=False).env_ids.tolist() == [1]
    assert env.step([1], 2).states[0, 1] == 3  # was not reset


def test_failed_run_episodes_has_finished_episodes_in_partial(env: ParallelEnv) -> None:
    with pytest.raises(KeyError) as caught:
        env.run_episodes(failing_at(5), 6, seed=1, progress=False)
    found: Evaluation = caught.value.partial  # type: ignore[attr-defined]
    assert found.lengths.tolist() == [3, 4]
    assert found.env_ids.tolist() == [0, 1]
    env.reset()
    env.step([1, 1, 1])


def test_evaluation_has_flags_infos_returns_and_pickles(env: ParallelEnv) -> None:
    found = env.run_episodes(ones, 3, seed=1, progress=False)
    assert found.terminated.tolist() == [True, False, True]
    assert found.truncated.tolist() == [False, True, False]
    assert found.infos[0]["trace"][-1] == 3
    assert found.returns.dtype == np.float64
    assert len(found) == 3
    assert repr(found).startswith("<Evaluation of 3 episodes, return ")
    assert_same(vars(found), vars(pickle.loads(pickle.dumps(found))))


class Paid(Counter):
    """Returns given rewards."""

    def __init__(self, *rewards: Any) -> None:
        super().__init__(length=len(rewards))
        self.rewards = rewards

    def step(self, action: Any) -> Any:
        state, _, *rest = super().step(action)
        return state, self.rewards[self.count - 1], *rest


def test_rewards_are_summed_per_component_or_refused(make_env: MakeEnv) -> None:
    env = make_env(five_env_fns(Ragged))
    found = env.run_episodes(lambda states: [1.0] * len(states), 5, progress=False)
    assert [total.tolist() for total in found.returns] == [[0, 4], [7, 7], [6, 3], [18, 6], [16, 4]]
    assert repr(found) == "<Evaluation of 5 episodes>"
    env = make_env([partial(Paid, 1.0), partial(Paid, 2.0, {"a": 3})])
    message = r"env 1 returned the reward {'a': 3}, which cannot be added.*the sum of its rewards"
    with pytest.raises(EnvContractError, match=message) as caught:
        env.run_episodes(ones, 2, progress=False)
    assert caught.value.partial.returns.tolist() == [1.0]  # type: ignore[attr-defined]
    found = make_env([partial(Paid, 1j, 2.0)]).run_episodes(ones, 1, progress=False)
    assert found.returns.tolist() == [2 + 1j]
    assert repr(found) == "<Evaluation of 1 episode>"
    found = make_env([partial(Paid, 2**2000, 2**2000)]).run_episodes(ones, 1, progress=False)
    assert found.returns.tolist() == [2**2001]  # too large for a float


def test_recurrent_policy_gets_per_env_state_and_episode_starts(env: ParallelEnv) -> None:
    begun: list[int] = []

    def act(states: Any, rnn_state: Any, done: Any) -> Any:
        count = np.zeros(len(states)) if rnn_state is None else np.where(done, 0, rnn_state)
        assert count.tolist() == states[:, 1].tolist()  # the env also counts its steps
        begun.extend(states[done, 0].astype(int).tolist())
        return np.ones(len(states), np.int64), count + 1, None

    env.run_episodes(act, 7, seed=1, progress=False)
    assert sorted(begun) == [0, 0, 0, 1, 1, 2, 2]


@in_workers
def test_evaluation_reports_episodes_truncated_by_failures(make_env: MakeEnv, tmp_path: Path, mode: str) -> None:
    env = make_env(fragile(tmp_path)[:2], on_failure="restart", num_cpus=2)
    action = EXIT if mode == PROCESSES else RAISE

    def act(states: Any) -> Any:
        return [GO_ON, action if next(calls) % 4 == 2 else GO_ON][: len(states)]

    calls = iter(range(9))
    with pytest.raises(StopIteration) as caught:  # the other env never ends
        env.run_episodes(act, 4, progress=False)
    found: Evaluation = caught.value.partial  # type: ignore[attr-defined]
    assert found.env_ids.tolist() == [1, 1]
    assert found.truncated.all()
    kind = WorkerDiedError if mode == PROCESSES else ZeroDivisionError
    assert all(isinstance(info["failure"], kind) for info in found.infos)


# ---------------------------------------------------------------- worker info


class Nested(InfoEnv):
    """First steps its own envs."""

    def step(self, action: int) -> Any:
        with ParallelEnv([InfoEnv] * 2) as inner:
            inner.reset()
            inner.step([1, 1])
            self.inside = [told["step"][:2] for told in inner.get_env_attr("told")]
        return super().step(action)


def test_nested_envs_have_distinct_worker_infos(make_env: MakeEnv) -> None:
    env = make_env([Nested] * 3)
    env.reset()
    env.step([1, 1, 1])
    assert [told["step"][:2] for told in env.get_env_attr("told")] == [(0, 3), (1, 3), (2, 3)]
    assert env.get_env_attr("inside") == [[(0, 2), (1, 2)]] * 3


def test_env_tried_by_recommend_can_call_get_worker_info() -> None:
    assert "could be tried" not in recommend([InfoEnv] * 2).reason  # it needs the info in its constructor
    with ParallelEnv([InfoEnv] * 3, "auto", seed=3, shared={"ones": np.ones(4)}) as env:
        assert env.recommendation is not None
        assert "could be tried" not in env.recommendation.reason
        assert [told["made"][::4] for told in env.get_env_attr("told")] == [(0, 3), (1, 4), (2, 5)]
        assert env.customized_method("look")[2]["ones"].tolist() == [1] * 4
    assert get_worker_info() is None


class Meddling(Counter):
    """Tries to write into a shared array, and into the arrays behind it."""

    def unlock(self) -> float:
        info: Any = get_worker_info()
        part = info.shared["table"]
        while isinstance(part, np.ndarray):
            with contextlib.suppress(ValueError):
                part.flags.writeable = True
                part[:] = 9
            part = part.base
        return float(info.shared["table"].sum())


@pytest.mark.parametrize(
    ("mode", "options"), [*((mode, {}) for mode in MODES), (PROCESSES, {"caller_steps": True})], indirect=["mode"]
)
def test_envs_cannot_make_shared_arrays_writable(make_env: MakeEnv, options: dict[str, Any]) -> None:
    env = make_env([Meddling] * 2, num_cpus=2, shared={"table": np.ones(4)}, **options)
    assert env.customized_method("unlock") == [4.0] * 2


@pytest.mark.parametrize("caller_steps", [False, True])
def test_close_releases_shared_memory(caller_steps: bool) -> None:
    size = 1 << 22
    shared = {"large": np.ones(size, np.uint8)}
    env = ParallelEnv(COUNTERS, PROCESSES, num_cpus=2, shared=shared, caller_steps=caller_steps)
    env.reset()
    assert max(_mapped()) >= size
    env.close()
    gc.collect()
    assert not any(mapped >= size for mapped in _mapped())
    assert env.closed


def _mapped() -> list[int]:
    """Return the sizes of the shared memory that this process has mapped."""
    lines = Path("/proc/self/maps").read_text(encoding="ascii", errors="replace").splitlines()
    spans = [line.split()[0].split("-") for line in lines if "memfd:parallelenv" in line]
    return [int(end, 16) - int(begin, 16) for begin, end in spans]
