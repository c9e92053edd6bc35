"""Tests of resets in flight, of pauses in between, and of policies that act for the envs that are ready."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter as Tally
from functools import partial
from typing import Any

import numpy as np
import pytest

from parallelenv.errors import EnvBusyError, NothingInFlightError, ResetNeededError
from parallelenv.rollouts.stream import CLOSE, RESET, TERMINATED
from parallelenv.testing.base import Contract, Make
from parallelenv.testing.envs import Counter
from parallelenv.testing.odd_envs import FailingEnv, Sleeper, TroubleError
from parallelenv.testing.scenario import (
    DONE_POLICIES,
    KINDS,
    LENGTHS,
    NUM_ENVS,
    Actions,
    assert_same,
    drain,
    five_env_fns,
)

ONES = [1] * NUM_ENVS
done_policies = pytest.mark.parametrize("done_policy", DONE_POLICIES)


class AsyncContract(Contract):
    """Requests sent now and received later, mixed with plain steps."""

    # ---------------------------------------------------------------- resets in flight

    @pytest.mark.parametrize("kind", ["array", "dict", "mixed"])
    @done_policies
    def test_send_reset_results_are_received(self, kind: str, done_policy: Any, make: Make, make_oracle: Make) -> None:
        """First state, reward 0, not done, and the info of the reset; then everything as after a reset."""
        env, oracle = make(KINDS[kind](), done_policy), make_oracle(KINDS[kind](), done_policy)
        options = [None if number == 1 else {"try": number} for number in range(NUM_ENVS)]  # `Old` has none
        first, actions = oracle.reset(seed=5, options=options), Actions(oracle, 1).draw(range(NUM_ENVS))
        env.send_reset(seed=5, options=options)
        landed = drain(env)
        for env_id, said in enumerate(oracle.reset_infos):
            expected = (0.0, False, {**said, "reset": True}, False, False)
            assert_same(expected, landed[env_id][1:], f"env {env_id} ")
        assert_same(oracle.reset_infos, env.reset_infos)
        assert_same(list(map(_row(first), range(NUM_ENVS))), [landed[env_id][0] for env_id in range(NUM_ENVS)])
        for _ in range(4):
            assert_same(oracle.step(actions).rewards, env.step(actions).rewards)

    @done_policies
    def test_steps_and_resets_can_be_in_flight_together(self, done_policy: Any, make: Make, make_oracle: Make) -> None:
        """Each request delays only its own env, and a reset env is at its first state."""
        env, oracle = make(five_env_fns(Counter), done_policy), make_oracle(five_env_fns(Counter), done_policy)
        for one in (env, oracle):
            one.reset(seed=1)
            one.step(ONES)
        expected = oracle.step([2, 2, 2], [4, 0, 2])
        env.send([2, 2, 2], [4, 0, 2])
        env.send_reset([3, 1], seed=9)
        landed = drain(env, max_envs=2)
        for row, env_id in enumerate([4, 0, 2]):
            assert_same(expected.states[row], landed[env_id][0])
            assert landed[env_id][2] == expected.dones[row]
            assert not landed[env_id][3].get("reset") or done_policy == "restart"
        again = oracle.reset([3, 1], seed=9)
        assert_same([again[0], again[1]], [landed[3][0], landed[1][0]])
        assert landed[3][1:3] == (0.0, False)
        assert_same(oracle.step(ONES, align="batch"), env.step(ONES, align="batch"))

    def test_send_reset_drops_step_in_flight(self, make: Make) -> None:
        """Only the step of the same env, which is busy until the reset is received."""
        env = make(five_env_fns(Counter))
        env.reset()
        env.send(ONES)
        env.send_reset([1, 3])
        with pytest.raises(EnvBusyError, match=r"envs \[1, 3\]|reset that was sent"):
            env.step([1, 1], [1, 3])
        landed = drain(env)
        assert [landed[number][0][1] for number in range(NUM_ENVS)] == [1, 0, 1, 0, 1]
        assert env.step(ONES).states[:, 1].tolist() == [2, 1, 2, 1, 2]

    def test_reset_replaces_send_reset_in_flight(self, make: Make) -> None:
        """Only the later reset counts, and it has only one result."""
        env = make(five_env_fns(Counter))
        env.send_reset(seed=1)
        states = env.reset([0, 2], seed=7)
        landed = drain(env)
        assert sorted(landed) == [1, 3, 4]
        assert_same(make(five_env_fns(Counter)).reset(seed=7)[[0, 2]], states)

    def test_send_reset_uses_seeds_set_beforehand_once(self, make: Make, make_oracle: Make) -> None:
        """The next reset of each env uses them, also one in flight."""
        env, oracle = make(five_env_fns(Counter)), make_oracle(five_env_fns(Counter))
        for one in (env, oracle):
            one.seed(11)
        first = oracle.reset()
        env.send_reset()
        landed = drain(env)
        assert_same(list(first), [landed[env_id][0] for env_id in range(NUM_ENVS)])
        assert_same(oracle.reset(), env.reset())

    def test_failed_reset_is_raised_only_once(self, make: Make) -> None:
        """The others are in ``error.partial``, as after any failure; the failed env needs a reset."""
        env = make([lambda number=number: FailingEnv(number, "reset" if number == 1 else "") for number in range(3)])
        env.send_reset([0, 1])
        with pytest.raises(TroubleError, match="reset of 1") as caught:
            env.recv(min_envs=2)
        assert caught.value.partial.env_ids.tolist() == [0]  # type: ignore[attr-defined]
        with pytest.raises(NothingInFlightError):
            env.recv()
        with pytest.raises(ResetNeededError, match=r"\[1\]"):
            env.step([1, 1], [0, 1])
        assert env.step([1], [0]).states[0, 1] == 1

    # ---------------------------------------------------------------- pauses

    @done_policies
    def test_pause_lets_requests_in_flight_finish(self, done_policy: Any, make: Make, make_oracle: Make) -> None:
        """They are received; then the paused envs are left out until they are resumed."""
        env, oracle = make(five_env_fns(Counter), done_policy), make_oracle(five_env_fns(Counter), done_policy)
        for one in (env, oracle):
            one.reset(seed=2)
            one.step(ONES)
        expected = oracle.step([3, 3], [1, 4])
        env.send([3, 3], [1, 4])
        env.send_reset(0, seed=8)
        env.pause([0, 1])
        assert (env.num_unpaused, env.paused.tolist()) == (3, [True, True, False, False, False])
        landed = drain(env)
        assert sorted(landed) == [0, 1, 4]
        for row, env_id in enumerate([1, 4]):
            assert_same(expected.states[row], landed[env_id][0])
        with pytest.raises(EnvBusyError, match=r"\[1\]"):
            env.send([1], 1)
        oracle.reset(0, seed=8)
        assert_same(oracle.step([1] * 3, [2, 3, 4], align="batch"), env.step([1] * 3, align="batch"))
        env.resume(1)
        assert env.num_unpaused == 4
        env.resume()
        assert_same(oracle.step(ONES, align="batch"), env.step(ONES, align="batch"))

    def test_all_envs_can_be_paused(self, make: Make) -> None:
        """Calls without ``id`` then step, send and reset nothing."""
        env = make(five_env_fns(Counter))
        env.reset()
        env.pause(slice(None))
        assert env.num_unpaused == 0
        assert len(env.step([]).env_ids) == len(env.reset()) == 0
        env.send([])
        env.send_reset()
        with pytest.raises(NothingInFlightError):
            env.recv()
        env.resume([4])
        assert env.step([1]).env_ids.tolist() == [4]

    # ---------------------------------------------------------------- fairness and streams

    def test_no_env_starves(self, make: Make) -> None:
        """An env that gets a new action at once does not keep others from being received."""
        env = make(five_env_fns(Counter), "restart", num_cpus=NUM_ENVS)
        env.reset()
        env.send(ONES)
        counts = np.zeros(NUM_ENVS, np.int64)
        while counts.min() < 3 and counts.sum() < 5000:  # the OS decides which workers get a core
            (env_id,) = env.recv(1, 1).env_ids
            counts[env_id] += 1
            env.send([1], env_id)
        assert counts.min() >= 3, counts

    @done_policies
    def test_stream_steps_envs_as_they_become_ready(self, done_policy: Any, make: Make, make_oracle: Make) -> None:
        """The sequence of each env is the same in every mode; the number of steps is as requested."""
        kinds = [
            partial(Counter, number, 99 if done_policy is None else length) for number, length in enumerate(LENGTHS)
        ]
        played = [_streamed(one(kinds, done_policy)) for one in (make_oracle, make)]
        for env_id in range(NUM_ENVS):
            expected, found = played[0][env_id], played[1][env_id]
            shared = min(len(expected), len(found))
            assert_same(expected[:shared], found[:shared], f"env {env_id} ")
        total = sum(map(len, played[1].values()))
        assert total == (sum(LENGTHS) if done_policy == "idle" else 60)

    def test_stream_can_be_continued_after_break(self, make: Make) -> None:
        """Nothing in flight is lost, and the loop body may pause, resume and reset."""
        env = make([partial(Counter, number, 99) for number in range(NUM_ENVS)], "restart")
        env.send_reset(seed=1)
        for env_ids, _ in env.stream(_repeat, 7):
            sent = min(len(env_ids), 7)
            break
        env.pause(2)
        for turn, _ in enumerate(env.stream(_repeat, 12)):
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

    # ---------------------------------------------------------------- one at a time

    @done_policies
    def test_get_state_and_send_action_drive_one_env_at_a_time(self, done_policy: Any, make: Make) -> None:
        """Until every env is closed: after two episodes or, with automatic restarts, after ten steps."""
        env = make(five_env_fns(Counter), done_policy)
        env.send_reset()
        ends: Tally[int] = Tally()
        steps: Tally[int] = Tally()
        for _ in range(40 * NUM_ENVS):  # many more than needed
            if not env.num_unpaused:
                break
            found = env.get_state()
            assert found is not None
            state, env_id = found
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

    def test_get_state_timeout_returns_none_and_loses_no_result(self, make: Make) -> None:
        """If the caller itself does the work, there is no timeout."""
        env = make(five_env_fns(Sleeper), timeout=60)
        env.send_reset(3)
        assert env.get_state() is not None
        env.send_action(60, 3)
        found = env.get_state(timeout=0.01) or env.get_state(timeout=30)
        assert found is not None
        assert found[0][:2].tolist() == [3, 1]

    # ---------------------------------------------------------------- asyncio

    def test_arecv_can_be_awaited_and_cancelled(self, make: Make) -> None:
        """Other tasks run meanwhile, and cancelling one loses no result."""
        env = make(five_env_fns(Sleeper), num_cpus=NUM_ENVS)
        env.send_reset()

        async def play() -> list[int]:
            received: list[int] = (await env.arecv(NUM_ENVS)).env_ids.tolist()
            env.send([0, 0, 0, 30, 0])
            waiting = asyncio.ensure_future(env.arecv(NUM_ENVS))
            await asyncio.sleep(0)
            waiting.cancel()
            with contextlib.suppress(asyncio.CancelledError):  # already finished if the caller does the work
                received += (await waiting).env_ids.tolist()
            while len(received) < 2 * NUM_ENVS:
                received += (await env.arecv(max_envs=1)).env_ids.tolist()
            with pytest.raises(NothingInFlightError):
                await env.arecv()
            return received

        assert sorted(asyncio.run(play())) == sorted(2 * list(range(NUM_ENVS)))

    # ---------------------------------------------------------------- whole episodes

    @done_policies
    def test_run_episodes_gives_the_same_episodes_in_every_mode(
        self, done_policy: Any, make: Make, make_oracle: Make
    ) -> None:
        """Each env plays its share of the episodes; then it needs a reset."""
        played: list[Any] = []
        for one in (make_oracle(five_env_fns(Counter), done_policy), make(five_env_fns(Counter), done_policy)):
            one.reset(seed=4)
            one.pause(3)
            found = one.run_episodes(_repeat, 9, seed=6, progress=False)
            played.append([vars(found), one.done, one.reset_infos])
            with pytest.raises(ResetNeededError, match=r"\[0, 1, 2, 4\]"):
                one.step([1] * 4)
            one.reset()
            one.step([1] * 4)
        assert_same(played[0], played[1])
        assert found.env_ids.tolist() == [0, 0, 0, 1, 1, 2, 2, 4, 4]
        assert found.lengths.tolist() == [LENGTHS[env_id] for env_id in found.env_ids]


def _row(states: Any) -> Any:
    """Return a function that picks one env's state from a batch of arrays, dicts of arrays, or objects."""

    def pick(env_id: int) -> Any:
        if not isinstance(states, dict):
            return states[env_id]
        return {key: _row(part)(env_id) for key, part in states.items()}

    return pick


def _repeat(states: Any) -> Any:
    """Use the step count in the state as action."""
    return (states[:, 1] % 5).astype(np.int64)


def _streamed(env: Any) -> dict[int, list[Any]]:
    """Return each env's results of its steps."""
    env.send_reset(seed=3)
    steps: dict[int, list[Any]] = {env_id: [] for env_id in range(NUM_ENVS)}
    for env_ids, result in env.stream(_repeat, 60, max_envs=3):
        assert env_ids is result.env_ids
        for row, env_id in enumerate(env_ids.tolist()):
            if result.dones[row] or not result.infos[row].get("reset"):
                steps[env_id].append((result.states[row], result.rewards[row], bool(result.dones[row])))
    return steps
