"""The meaning of calls: order, seeds, done policies, pauses, streams. The contract suite compares modes."""

from __future__ import annotations

import copy
from collections import Counter as Tally
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import pytest
from conftest import MakeEnv
from gymnasium.spaces import Box, Dict, Tuple
from modes import here_and_in_processes
from wrappers.envs import Reporting

from parallelenv import CLOSE, RESET, TERMINATED, ParallelEnv, get_worker_info
from parallelenv.errors import NothingInFlightError, WorkerTimeoutError
from parallelenv.testing.contract import DONE_POLICIES, LENGTHS, NUM_ENVS, assert_same, drain, five_env_fns, items
from parallelenv.testing.envs import Counter, InfoEnv, Old, Sheet, Sleeper

pytestmark = here_and_in_processes
done_policies = pytest.mark.parametrize("done_policy", DONE_POLICIES)
ONES = [1] * NUM_ENVS
ABSENT: Any = (None, None, True, {})


def counters(make_env: MakeEnv, done_policy: Any = None) -> ParallelEnv:
    return make_env(five_env_fns(Counter), asynchronous=done_policy, num_cpus=2)


def expected_states(seeds: dict[int, int], steps: int = 0) -> Any:
    """Return the states of `Counter` envs stepped without the package, given their seeds."""
    states = []
    for number, seed in seeds.items():
        env = Counter(number, LENGTHS[number])
        state, _ = env.reset(seed=seed)
        for _ in range(steps):
            state = env.step(1)[0]
        states.append(state.copy())
    return np.stack(states)


def repeat(states: Any) -> Any:
    """Use the step count in the state as action."""
    return (states[:, 1] % 5).astype(np.int64)


# ---------------------------------------------------------------- ids, actions, results


def test_rows_are_in_order_of_id(make_env: MakeEnv) -> None:
    forms: list[tuple[Any, list[int]]] = [
        (None, [0, 1, 2, 3, 4]),
        (3, [3]),
        (np.int64(2), [2]),
        ([4, 0], [4, 0]),
        ((1, 2, 3), [1, 2, 3]),
        (np.array([2, 0, 4]), [2, 0, 4]),
        (slice(1, None, 2), [1, 3]),
        (slice(None, None, -1), [4, 3, 2, 1, 0]),
        (np.array([False, True, True, False, True]), [1, 2, 4]),
        ([], []),
    ]
    env = counters(make_env, "continue")
    env.reset()
    for form, env_ids in forms:
        result = env.step([1] * len(env_ids), form)
        assert result.env_ids.tolist() == result.states[:, 0].tolist() == env_ids, form
        assert [state[0] for state, *_ in env.step([1] * len(env_ids), form, align="batch")] == env_ids, form
        assert env.reset(form)[:, 0].tolist() == env_ids, form


def test_results_have_the_documented_types(make_env: MakeEnv) -> None:
    env = make_env(five_env_fns(Sheet), num_cpus=2)
    states = env.reset(seed=1)
    result = env.step(env.action_space.sample())  # type: ignore[union-attr]
    for found in (states, result.states):
        types = (found["image"].dtype, found["inner"]["bits"].dtype, found["inner"]["level"].dtype)
        assert types == (np.uint8, np.int8, np.int64)
        assert found["image"].shape == (NUM_ENVS, 2, 3)
        assert all(type(word) is str for word in found["word"])
    arrays = (result.rewards, result.dones, result.terminated, result.truncated, result.env_ids, result.infos)
    assert [array.dtype for array in arrays] == [np.float64, bool, bool, bool, np.int64, object]
    assert all(type(info) is dict for info in result.infos)


class Given:
    """An env without spaces that returns the state that it was made with."""

    def __init__(self, state: Any) -> None:
        self.state = state

    def reset(self) -> Any:
        return self.state

    def step(self, action: Any) -> Any:
        return self.state, 0.0, False, {}


@pytest.mark.parametrize(
    ("states", "dtype"),
    [
        ((1, 0.5), float),
        ((np.float32(0.1), np.int16(3)), np.float32),
        ((np.uint8(200), np.int8(-1)), np.int16),
        ((np.uint64(7), -1), float),
        ((np.nan, 1), float),
        ((2**53 + 1, 0.5), object),
        ((np.uint64(2**64 - 1), np.int64(-1)), object),
        ((np.array([2**62 + 1]), np.array([0.5])), object),
        ((np.str_("1"), 1), object),
        ((np.ma.masked_array([1, 2], [True, False]), np.array([3, 4])), object),
    ],
    ids=repr,
)
def test_states_without_a_space_keep_their_values(make_env: MakeEnv, states: Any, dtype: Any) -> None:
    env = make_env([partial(Given, state) for state in states], asynchronous="continue", num_cpus=1)
    found = env.reset()
    rollout = env.rollout(lambda states: [0] * len(states), 2)
    for row in (found, env.step([0, 0]).states, *rollout.states):
        assert row.dtype == dtype
        for one, other in zip(row, states, strict=True):
            np.testing.assert_array_equal(np.ma.getmaskarray(one), np.ma.getmaskarray(other))
            np.testing.assert_array_equal(one, other)


class Five(NamedTuple):
    """What a step returns."""

    state: Any
    reward: Any
    terminated: Any
    truncated: Any
    info: Any


class Named(Counter):
    def step(self, action: Any) -> Any:
        return Five(*super().step(action))


def test_step_of_an_env_may_return_a_named_tuple(make_env: MakeEnv) -> None:
    envs = [make_env([kind] * 2, asynchronous="restart") for kind in (Counter, Named)]
    for env in envs:
        env.reset(seed=1)
    for _ in range(9):
        expected, found = (items(env.step([1, 2])) for env in envs)
        assert_same(expected, found)


@pytest.mark.parametrize(("space", "state"), [(Dict(), {}), (Tuple(()), ()), (Dict(inner=Dict()), {"inner": {}})])
def test_states_may_have_no_parts(make_env: MakeEnv, space: Any, state: Any) -> None:
    class Blind(Counter):
        observation_space = space

        def _state(self) -> Any:
            return state

    env = make_env([Blind] * 3, asynchronous="restart", num_cpus=1)
    assert env.reset() == state
    for _ in range(5):
        assert env.step([1] * 3).states == state
        batch = env.step([1, 2], [2, 0], align="batch")
        assert [(found, reward is not None) for found, reward, *_ in batch] == [(state, True)] * 2
    assert env.rollout(lambda states: [1] * 3, 4).states == state


def test_dtypes_of_states_may_have_another_byte_order(make_env: MakeEnv) -> None:
    dtype = np.dtype(np.float32).newbyteorder()

    class Swapped(Counter):
        observation_space = Box(-1e6, 1e6, (3,), dtype)

    swapped, env = (make_env([partial(kind, length=2)] * 2, asynchronous="restart") for kind in (Swapped, Counter))
    assert swapped.reset(seed=1).dtype == dtype
    env.reset(seed=1)
    for _ in range(4):
        found, expected = swapped.step([1, 2]), env.step([1, 2])
        assert found.states.dtype == dtype
        assert found.states.tolist() == expected.states.tolist()
        for one, other in zip(found.infos, expected.infos, strict=True):
            assert np.array_equal(one.get("ended_state", 0), other.get("ended_state", 0))


def test_each_env_has_its_own_spaces(make_env: MakeEnv) -> None:
    alone: Any = [copy.deepcopy(Counter.action_space) for _ in range(NUM_ENVS)]
    ours: Any = counters(make_env).action_spaces
    for spaces in (alone, ours):
        for number, space in enumerate(spaces):
            space.seed(number)
    expected, found = ([[space.sample() for _ in range(9)] for space in spaces] for spaces in (alone, ours))
    assert_same(expected, found)


# ---------------------------------------------------------------- seeds and options


def test_each_env_has_its_own_seed_and_seeds_set_beforehand_are_used_once(make_env: MakeEnv) -> None:
    env = counters(make_env)
    assert_same(expected_states({number: 7 + number for number in range(NUM_ENVS)}), env.reset(seed=7))
    assert_same(expected_states({3: 10, 1: 8}), env.reset([3, 1], seed=7))
    assert_same(expected_states({2: 40, 0: 50}), env.reset([2, 0], seed=[40, 50]))
    env.seed(7)
    first = env.reset([4, 2])
    env.send_reset([3, 0])
    landed = drain(env)
    rest = env.reset()
    assert_same(expected_states({4: 11, 2: 9}), first)
    assert_same(expected_states({0: 7, 3: 10}), np.stack([landed[0][0], landed[3][0]]))
    assert_same(expected_states({1: 8}), rest[[1]])
    assert rest[4, 2] != first[0, 2]


def test_seeds_set_beforehand_are_not_used_by_resets_within_a_step(make_env: MakeEnv) -> None:
    env = make_env(["CartPole-v1"] * 2, asynchronous="restart")
    expected = env.reset(seed=7)
    env.seed(7)
    while not env.all_done():
        restarted = env.step([1, 1]).states
    assert (restarted != expected).any(axis=1).all()
    assert_same(expected, env.reset())


def test_reset_options_are_passed_to_the_envs(make_env: MakeEnv) -> None:
    env = counters(make_env)
    env.reset(options={"level": 3})
    assert [info["options"] for info in env.reset_infos] == [{"level": 3}] * NUM_ENVS
    env.reset([2, 0], options=[{"level": 2}, None])
    assert [info["options"] for info in env.reset_infos] == [None, {"level": 3}, {"level": 2}] + [{"level": 3}] * 2
    env.send_reset([4, 1], options=[{"level": 1}, None])
    drain(env)
    assert [info["options"] for info in env.reset_infos] == [None, None, {"level": 2}, {"level": 3}, {"level": 1}]


# ---------------------------------------------------------------- done policies


@pytest.mark.parametrize("done_policy", [None, "idle"])
def test_envs_that_have_ended_are_absent_and_their_actions_ignored(done_policy: Any, make_env: MakeEnv) -> None:
    env = counters(make_env, done_policy)
    env.reset()
    for _ in range(3):
        last = env.step(ONES)
    assert last.dones.tolist() == [False, False, True, False, False]
    ended = [2] if done_policy == "idle" else list(range(NUM_ENVS))
    batch = env.step([1, 1, None, 1, 1], align="batch")
    result = env.step(ONES)
    for env_id in ended:
        assert batch[env_id] == ABSENT
        assert (result.states[env_id], result.rewards[env_id]) == (None, None)
    counts = env.get_env_attr("count")
    assert [env_id for env_id in range(NUM_ENVS) if counts[env_id] == 3] == ended
    env.send([1], [2])
    assert drain(env)[2] == (*ABSENT, True, False)


def test_done_policy_restart_resets_within_the_step(make_env: MakeEnv) -> None:
    env = counters(make_env, "restart")
    env.reset(seed=7)
    for _ in range(3):
        result = env.step(ONES)
    info = result.infos[2]
    assert_same(expected_states({2: 9}, steps=3)[0], info["ended_state"])
    assert result.states[2, 1] == 0
    assert result.dones.tolist() == [number == 2 for number in range(NUM_ENVS)]
    assert result.terminated[2]
    assert [info["reset"] for info in result.infos] == result.dones.tolist()
    assert (info["trace"], info["reset_info"]["trace"]) == ([0, 1, 2, 3], [0])
    assert env.step(ONES).states[2, 1] == 1
    assert env.done.tolist() == [True, False, False, False, True]


def test_done_policy_restart_copies_last_states_of_any_type(make_env: MakeEnv) -> None:
    env = make_env(five_env_fns(Old), asynchronous="restart", num_cpus=2)
    env.reset()
    for _ in range(3):
        result = env.step([0.5] * NUM_ENVS)
    assert (result.infos[2]["ended_state"][0], result.states[2][0]) == (3.5, 2)  # it has one state, which it overwrites


# ---------------------------------------------------------------- requests in flight, pauses


@pytest.mark.parametrize("done_policy", DONE_POLICIES)
def test_infos_with_the_librarys_own_keys_equal_those_of_the_oracle(done_policy: Any, make_env: MakeEnv) -> None:
    def play(env: ParallelEnv) -> list[Any]:
        found = [env.reset(), env.reset_infos]
        for step in range(24):
            if env.all_done() and done_policy != "restart":
                found += [env.reset(), env.reset_infos]
            found.append(items(env.step([step % 5 == 0, step > 12])))  # at first, infos that fit columns
        return found

    with ParallelEnv([Reporting] * 2, asynchronous=done_policy) as oracle:
        expected = play(oracle)
    assert_same(expected, play(make_env([Reporting] * 2, asynchronous=done_policy, num_cpus=2)))
    ends = [
        pair for step in expected if isinstance(step, dict) for pair in zip(step["dones"], step["infos"], strict=True)
    ]
    assert len(ends) == 48
    assert all(not info or info["reset"] == (done if done_policy == "restart" else 7) for done, info in ends)


def test_calls_without_id_skip_paused_envs(make_env: MakeEnv) -> None:
    env = counters(make_env)
    env.reset()
    env.send([1, 1], [0, 1])
    env.pause([0, 3])
    assert (env.num_unpaused, env.paused.tolist()) == (3, [True, False, False, True, False])
    assert sorted(drain(env)) == [0, 1]  # results in flight are received
    assert env.get_env_attr("count") == [1, 0, 0]
    assert env.get_env_attr("count", [0, 3]) == [1, 0]
    env.pause(slice(None))
    assert len(env.step([]).env_ids) == len(env.reset()) == env.num_unpaused == 0
    env.send([])
    env.send_reset()
    with pytest.raises(NothingInFlightError):
        env.recv()


# ---------------------------------------------------------------- streams, one env at a time, whole episodes


@done_policies
def test_stream_steps_each_env_as_a_loop_would(done_policy: Any, make_env: MakeEnv) -> None:
    kinds = [partial(Counter, number, 99 if done_policy is None else length) for number, length in enumerate(LENGTHS)]
    env = make_env(kinds, asynchronous=done_policy, num_cpus=2)
    env.send_reset(seed=3)
    found: dict[int, list[Any]] = {env_id: [] for env_id in range(NUM_ENVS)}

    def act(states: Any, env_ids: Any) -> Any:
        assert states[:, 0].tolist() == env_ids.tolist()
        return repeat(states)

    for env_ids, result in env.stream(act, 60, max_envs=3):
        assert env_ids is result.env_ids
        for row, env_id in enumerate(env_ids.tolist()):
            if result.dones[row] or not result.infos[row].get("reset"):
                found[env_id].append((result.states[row], float(result.rewards[row]), bool(result.dones[row])))
    assert sum(map(len, found.values())) == (sum(LENGTHS) if done_policy == "idle" else 60)
    states = env.reset(seed=3)
    for turn in range(60):
        result = env.step(repeat(np.stack([np.zeros(3) if state is None else state for state in states])))
        states = result.states
        for env_id, steps in found.items():
            if turn < len(steps):
                assert_same(steps[turn], (states[env_id], float(result.rewards[env_id]), bool(result.dones[env_id])))


def test_stream_goes_on_if_the_caller_resets_envs_that_were_all_done(make_env: MakeEnv) -> None:
    env = make_env([partial(Counter, number, 3) for number in range(2)], asynchronous="idle", num_cpus=2)
    env.reset()
    turns = []
    for env_ids, _ in env.stream(repeat, 15, min_envs=2):
        turns.append(len(env_ids))
        if env.all_done():
            env.reset()
    assert turns == [2] * 7 + [1]
    env.reset()
    for _ in env.stream(repeat, min_envs=2):
        if env.all_done():
            env.run_episodes(repeat, 1, seed=3)  # afterwards, an env needs a reset


def test_stream_can_be_continued_after_break(make_env: MakeEnv) -> None:
    env = make_env([partial(Counter, number, 99) for number in range(NUM_ENVS)], asynchronous="restart", num_cpus=2)
    env.send_reset(seed=1)
    for env_ids, _ in env.stream(repeat, 7):
        sent = min(len(env_ids), 7)
        break
    env.pause(2)
    for turn, _ in enumerate(env.stream(repeat, 12)):
        if turn == 1:
            assert env.num_unpaused == NUM_ENVS - 1
            env.pause(3)
        elif turn == 3:
            env.resume()
    env.resume()
    with pytest.raises(NothingInFlightError):
        env.recv()
    assert sum(env.get_env_attr("count")) == sent + 12
    assert len(env.step(ONES).env_ids) == NUM_ENVS


@done_policies
def test_get_state_and_send_action_drive_one_env_at_a_time(done_policy: Any, make_env: MakeEnv) -> None:
    """Until every env is closed: after two episodes or, with automatic restarts, after ten steps."""
    env = counters(make_env, done_policy)
    env.send_reset()
    ends: Tally[int] = Tally()
    steps: Tally[int] = Tally()
    while env.num_unpaused:
        state, env_id = env.get_state()  # type: ignore[misc]
        ends[env_id] += state is TERMINATED
        if ends[env_id] == 2 or steps[env_id] == 10:
            env.send_action(CLOSE, env_id)
        elif state is TERMINATED:
            env.send_action(RESET, env_id)
        else:
            assert state[0] == env_id
            steps[env_id] += 1
            env.send_action(1, env_id)
    with pytest.raises(NothingInFlightError):
        env.get_state()
    if done_policy == "restart":
        assert not ends.total()
    elif done_policy is not None:
        assert [steps[env_id] for env_id in range(NUM_ENVS)] == [min(2 * length, 10) for length in LENGTHS]


def test_get_state_timeout_loses_no_result(make_env: MakeEnv) -> None:
    env = make_env(five_env_fns(Sleeper), num_cpus=2, timeout=60)
    env.send_reset(3)
    assert env.get_state() is not None
    env.send_action(60, 3)
    found = env.get_state(timeout=0.01) or env.get_state(timeout=30)
    assert found is not None
    assert found[0][:2].tolist() == [3, 1]


def test_timeout_error_raised_by_an_env_is_not_a_timeout_of_the_call(make_env: MakeEnv) -> None:
    class Late(Counter):
        def step(self, action: Any) -> Any:
            raise WorkerTimeoutError("a ParallelEnv in this env is late", (7,))

    env = make_env([Late])
    env.send_reset()
    env.get_state()
    env.send_action(1, 0)
    for call in (lambda: env.get_state(timeout=30), lambda: env.run_episodes(repeat, 1)):
        with pytest.raises(WorkerTimeoutError, match="^a ParallelEnv in this env is late"):
            call()


# ---------------------------------------------------------------- worker info


def test_worker_info_has_the_seed_of_the_latest_reset(make_env: MakeEnv) -> None:
    env = make_env([InfoEnv] * NUM_ENVS, num_cpus=3)
    env.send_reset(seed=7)
    env.recv(NUM_ENVS)
    env.reset([0, 4])
    env.reset(2, seed=70)
    assert [one["asked"][4] for one in env.customized_method("ask")] == [7, 8, 72, 10, 11]
    env.restart([1])
    assert env.customized_method("ask", id=1)[0]["made"][4] is None


def test_policy_in_a_worker_gets_no_worker_info(make_env: MakeEnv) -> None:
    env = make_env([InfoEnv] * NUM_ENVS, asynchronous="restart", num_cpus=2)
    env.reset(seed=1)

    def act(states: Any) -> Any:
        return np.ones(len(states), np.int64), None, {"told": np.full(len(states), get_worker_info() is not None)}

    assert not env.rollout(act, 5, progress=False).extras["told"].any()
    assert [one["step"][0] for one in env.customized_method("ask")] == list(range(NUM_ENVS))


def test_replicated_envs_get_seeds_and_numbers_only_if_they_have_such_arguments(mode: str) -> None:
    class Given(InfoEnv):
        def __init__(self, seed: int = 1337, rank: int = -1, world_size: int = -1, **others: Any) -> None:
            super().__init__()
            self.given = (rank, world_size, seed, others)

    with ParallelEnv.replicate(partial(Given, rank=9), 3, mode, num_cpus=2, seed=5) as copies:
        assert copies.get_env_attr("given") == [(9, 3, 5, {}), (9, 3, 6, {}), (9, 3, 7, {})]
        copies.reset()
        asked = copies.customized_method("ask")
        assert [one["made"][0] for one in asked] == [0, 1, 2]
        assert [one["reset"][4] for one in asked] == [5, 6, 7]
    with ParallelEnv.replicate(Given, 2, mode) as copies:
        assert copies.get_env_attr("given") == [(0, 2, 1337, {}), (1, 2, 1337, {})]
    with ParallelEnv.replicate(partial(Given, seed=5), 1, mode, seed=1) as copies:
        assert copies.get_env_attr("given") == [(0, 1, 5, {})]
