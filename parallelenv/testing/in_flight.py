"""Tests of steps in flight: send, recv, pause, and late results."""

from __future__ import annotations

import os
import signal
import threading
from typing import Any

import numpy as np
import pytest

from parallelenv.errors import (
    EnvBusyError,
    EnvInterruptedError,
    NothingInFlightError,
    WorkerTimeoutError,
)
from parallelenv.testing.base import Contract, Make
from parallelenv.testing.envs import Counter, Ragged
from parallelenv.testing.odd_envs import Interrupter, Sleeper
from parallelenv.testing.scenario import NUM_ENVS, assert_same, drain, five_env_fns

ONES = [1] * NUM_ENVS


class InFlightContract(Contract):
    """Steps that were sent and not yet received."""

    def test_each_sent_step_is_received_once(self, make: Make, make_oracle: Make) -> None:
        """Each env's own result, in any order; then nothing is in flight."""
        env, oracle = make(five_env_fns(Counter)), make_oracle(five_env_fns(Counter))
        env.reset(seed=1)
        oracle.reset(seed=1)
        env.send([4, 3], [2, 0])
        env.send([2], 3)
        received: list[int] = []
        for _ in range(3):
            result = env.recv(min_envs=1, max_envs=1)
            received += result.env_ids.tolist()
            expected = oracle.step([{2: 4, 0: 3, 3: 2}[received[-1]]], received[-1])
            assert_same(expected.states, result.states)
            assert_same(expected.rewards, result.rewards)
        assert sorted(received) == [0, 2, 3]
        with pytest.raises(NothingInFlightError):
            env.recv()

    def test_recv_respects_min_envs_and_max_envs(self, make: Make) -> None:
        """At least and at most the given numbers, if enough steps are in flight."""
        env = make(five_env_fns(Counter))
        env.reset()
        env.send(ONES)
        assert 3 <= len(env.recv(min_envs=3, max_envs=4).env_ids) <= 4
        rest = env.recv(min_envs=9)
        assert 1 <= len(rest.env_ids) <= 2

    def test_step_of_busy_env_is_refused(self, make: Make) -> None:
        """Until its step was received; nothing is stepped meanwhile, and other envs are not affected."""
        env = make(five_env_fns(Counter))
        env.reset()
        env.send([1, 1], [1, 2])
        with pytest.raises(EnvBusyError, match=r"\[1, 2\]"):
            env.step(ONES)
        with pytest.raises(EnvBusyError, match=r"\[2\]"):
            env.send([1, 1], [2, 3])
        assert env.step([1, 1], [3, 0]).states[:, :2].tolist() == [[3, 1], [0, 1]]
        assert sorted(drain(env)) == [1, 2]
        assert env.get_env_attr("count") == [1, 1, 1, 1, 0]

    def test_other_calls_are_possible_while_steps_are_in_flight(self, make: Make) -> None:
        """They see the env after its step, and results are not mixed up."""
        env = make(five_env_fns(Sleeper))
        env.reset()
        env.send([10, 0, 0, 0, 10])
        assert env.customized_method("nap", {"sleep": 0.0, "answer": "a"}, [4, 3]) == ["a4", "a3"]
        assert env.get_env_attr("count", [0, 2, 4]) == [1, 1, 1]
        assert {env_id: landed[0][0] for env_id, landed in drain(env).items()} == {0: 0, 1: 1, 2: 2, 3: 3, 4: 4}

    def test_reset_drops_steps_in_flight(self, make: Make) -> None:
        """Only those of the envs that are reset."""
        env = make(five_env_fns(Counter))
        env.reset()
        env.send(ONES)
        assert env.reset([0, 3])[:, 1].tolist() == [0, 0]
        assert sorted(drain(env)) == [1, 2, 4]
        assert env.step(ONES).states[:, 1].tolist() == [1, 2, 2, 1, 2]

    def test_large_messages_do_not_block_each_other(self, make: Make) -> None:
        """Two commands in flight to one worker, larger than a pipe's buffer, with results as large."""
        env = make(five_env_fns(Ragged), num_cpus=1)
        env.reset(seed=1)
        large = [np.full(50_000, float(number)) for number in range(NUM_ENVS)]
        for number in range(NUM_ENVS):
            env.send([large[number]], number)
        landed = drain(env)
        for number in range(NUM_ENVS):
            assert_same(large[number], landed[number][3]["action"])

    def test_absent_envs_are_received_immediately(self, make: Make) -> None:
        """Nothing is sent to ended envs, and they are received as absent."""
        env = make(five_env_fns(Counter), "idle")
        env.reset()
        for _ in range(3):
            env.step(ONES)
        env.send([1, 1, 1], [3, 2, 0])
        landed = drain(env)
        assert landed[2] == (None, None, True, {}, True, False)
        assert [landed[number][0][:2].tolist() for number in (0, 3)] == [[0, 4], [3, 4]]
        env.send([1, 1], [0, 2])
        assert env.recv(min_envs=2).rewards.tolist() == [None, None]

    def test_calls_without_id_skip_paused_envs(self, make: Make) -> None:
        """By calls without ``id``; stepping them by ``id`` is an error. Env ids do not shift."""
        env = make(five_env_fns(Counter))
        env.reset()
        env.pause([0, 3])
        assert env.step([1, 1, 1]).env_ids.tolist() == [1, 2, 4]
        with pytest.raises(EnvBusyError, match="3"):
            env.step([1, 1], [3, 4])
        assert env.get_env_attr("count") == [1, 1, 1]
        assert env.get_env_attr("count", [0, 3]) == [0, 0]
        env.resume(3)
        assert env.step([1] * 4).states[:, :2].tolist() == [[1, 2], [2, 2], [3, 1], [4, 2]]
        env.resume()
        assert env.step(ONES).env_ids.tolist() == [0, 1, 2, 3, 4]

    def test_step_can_be_received_after_timeout(self, make: Make) -> None:
        """A timeout loses nothing."""
        env = make(five_env_fns(Sleeper))
        env.reset()
        env.send([0, 60, 0, 0, 0])
        landed: dict[int, Any] = {}
        late: tuple[int, ...] = (1,)
        try:
            while len(landed) < NUM_ENVS:
                batch = env.recv(timeout=0.1, align="batch")
                landed.update(zip(batch.env_ids.tolist(), batch, strict=True))
        except WorkerTimeoutError as error:
            late = error.env_ids
            landed.update(drain(env, min_envs=NUM_ENVS, timeout=30))
        assert 1 in late
        assert [landed[number][0][:2].tolist() for number in range(NUM_ENVS)] == [[n, 1] for n in range(NUM_ENVS)]
        assert env.step([0] * NUM_ENVS).states[:, 1].tolist() == [2] * NUM_ENVS

    def test_late_result_is_never_returned_by_a_later_call(self, make: Make) -> None:
        """The late result is dropped when it arrives."""
        env = make(five_env_fns(Sleeper), timeout=0.8)
        naps = [{"sleep": 1.2 if number == 1 else 0.0, "answer": "late"} for number in range(NUM_ENVS)]
        late: tuple[int, ...] = (1,)
        try:
            assert env.customized_method("nap", naps) == [f"late{number}" for number in range(NUM_ENVS)]
        except WorkerTimeoutError as error:
            late = error.env_ids
        assert 1 in late
        for _ in range(20):
            try:
                answers = env.customized_method("nap", {"sleep": 0.0, "answer": "new"})
            except WorkerTimeoutError:
                continue
            assert answers == [f"new{number}" for number in range(NUM_ENVS)]
            return
        raise AssertionError("An env that was late for 0.4 s did not come back within 16 s.")

    @pytest.mark.skipif(not hasattr(signal, "pthread_kill"), reason="no signals between processes here")
    def test_envs_are_usable_after_an_interrupt(self, make: Make, make_oracle: Make) -> None:
        """``step()`` reports the step in flight, ``recv()`` returns it, ``reset()`` drops it."""
        if threading.current_thread() is not threading.main_thread():
            pytest.skip("interrupts come to the main thread only")
        env, oracle = make(five_env_fns(Interrupter)), make_oracle(five_env_fns(Interrupter))
        env.reset()
        with pytest.raises(KeyboardInterrupt):
            env.step([0, os.getpid(), 0, 0, 0])
        with pytest.raises(EnvBusyError, match=r"recv\(min_envs="):
            env.step([0] * NUM_ENVS)
        expected = list(range(NUM_ENVS))
        try:
            received = list(drain(env, min_envs=NUM_ENVS))
        except EnvInterruptedError as error:  # the caller itself was stepping the env
            received = error.partial.env_ids.tolist()  # type: ignore[attr-defined]
            expected.remove(1)
        assert sorted(received) == expected
        assert_same(oracle.reset(seed=2), env.reset(seed=2))
        assert_same(oracle.step([0] * NUM_ENVS).rewards, env.step([0] * NUM_ENVS).rewards)
