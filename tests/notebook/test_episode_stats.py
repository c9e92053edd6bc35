"""Episode statistics equal those of a plain loop, for every way of stepping."""

from __future__ import annotations

import itertools
from decimal import Decimal
from typing import Any

import numpy as np
import pytest
from conftest import MakeEnv
from interrupting import interrupt_at
from modes import here_and_in_processes

from parallelenv import ParallelEnv, Rollout
from parallelenv.contract.spaces import object_array
from parallelenv.engine.episode_stats import LATEST, OpenEpisodes
from parallelenv.testing.envs import Counter
from parallelenv.wrappers import RecordEpisodeStatistics


def summary_of(env: ParallelEnv) -> Any:
    return env.engine.table.stats.summary()


@pytest.mark.parametrize("done_policy", [None, "idle", "restart", "continue"])
@pytest.mark.parametrize("align", ["item", "batch"])
def test_episode_stats_equal_those_of_record_episode_statistics(
    make_env: MakeEnv, done_policy: Any, align: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("parallelenv.engine.episode_stats._ROOM", 1)  # so that sums are made now and then
    env = RecordEpisodeStatistics(
        make_env([lambda number=number: Counter(number, 2 + number) for number in range(3)], asynchronous=done_policy)
    )
    returns: list[float] = []
    lengths: list[int] = []
    result: Any
    env.reset(seed=0)
    for step in range(100):
        if done_policy != "restart" and step % 5 == 4:
            env.reset([0, 1, 2] if done_policy is None else [1, 2])
        for env_ids in ([0, 1, 2], [step % 3]):
            result = env.step([1] * len(env_ids), env_ids, align)
            for info in [info for *_, info in result] if align == "batch" else result.infos:
                if "episode" in info:
                    returns.append(info["episode"]["r"])
                    lengths.append(info["episode"]["l"])
    standing = summary_of(env.unwrapped)
    assert len(returns) > 3
    if done_policy is None:  # the wrapper also reports episodes cut off by the end of another
        assert standing.num_episodes <= len(returns)
    else:
        assert standing.num_episodes == len(returns)
        assert done_policy != "restart" or len(returns) > LATEST
        assert standing.mean_return == pytest.approx(np.mean(returns[-LATEST:]))
        assert standing.mean_length == pytest.approx(np.mean(lengths[-LATEST:]))


def test_rollout_counts_the_same_as_steps(make_env: MakeEnv) -> None:
    fns = [lambda number=number: Counter(number, 3 + number) for number in range(3)]
    env = make_env(fns, asynchronous="restart")
    env.reset(seed=0)
    for _ in range(40):
        env.step([1] * 3)
    stepped = summary_of(env)
    env.close()  # a cluster may not have resources for both
    env = make_env(fns, asynchronous="restart")
    env.reset(seed=0)
    for num_steps in (7, 1, 32):
        env.rollout(lambda states: [1] * len(states), num_steps, progress=False)
    rolled = summary_of(env)
    assert rolled.num_episodes == stepped.num_episodes > 20
    assert rolled.num_steps == stepped.num_steps == 120
    assert rolled.mean_return == pytest.approx(stepped.mean_return)
    assert rolled.mean_length == pytest.approx(stepped.mean_length)


@pytest.mark.parametrize("done_policy", [None, "idle", "restart", "continue"])
def test_run_episodes_counts_each_episode_once(make_env: MakeEnv, done_policy: Any) -> None:
    env = make_env([lambda: Counter(0, 3)] * 2, asynchronous=done_policy)
    found = env.run_episodes(lambda states: [1] * len(states), 7, seed=0, progress=False)
    standing = summary_of(env)
    assert (standing.num_episodes, standing.mean_length) == (7, 3)
    assert standing.mean_return == pytest.approx(found.returns.mean())
    env.reset()
    for _ in range(3):
        env.step([1, 1])
    assert summary_of(env).num_episodes == 9


@here_and_in_processes
@pytest.mark.parametrize("autoreset_mode", ["NextStep", "SameStep"])
def test_steps_through_an_adapter_are_counted(make_env: MakeEnv, autoreset_mode: str) -> None:
    env = make_env([lambda: Counter(0, 3), lambda: Counter(1, 4)])
    vector_env = env.to_gymnasium(autoreset_mode)
    vector_env.reset(seed=0)
    rewards = np.array([vector_env.step(np.array([1, 1]))[1] for _ in range(20)])
    standing = summary_of(env)
    lengths = [3, 4]
    periods = [length + (autoreset_mode == "NextStep") for length in lengths]
    returns = []
    for row, (length, period) in enumerate(zip(lengths, periods, strict=True)):
        returns += [rewards[begin : begin + length, row].sum() for begin in range(0, 20 - length + 1, period)]
    assert standing.num_episodes == len(returns)
    assert standing.mean_return == pytest.approx(np.mean(returns))


def test_episode_without_a_recorded_start_is_not_counted(make_env: MakeEnv) -> None:
    env = make_env([lambda: Counter(0, 3)], asynchronous="restart")
    env.reset(seed=0)
    env.step([1])
    state = env.save_state()
    env.load_state(state)
    for _ in range(5):
        env.step([1])
    standing = summary_of(env)
    assert (standing.num_episodes, standing.mean_length) == (1, 3)


class Failing(Counter):
    """Rewards each step with 1, and raises in the third step of its second episode."""

    def step(self, action: Any) -> Any:
        if self.episode == 2 and self.count == 2:
            raise RuntimeError("third step of the second episode")
        state, _, *rest = super().step(action)
        return state, 1.0, *rest


@here_and_in_processes
def test_failed_step_counts_everywhere_as_the_last_of_its_episode(make_env: MakeEnv) -> None:
    def fresh() -> ParallelEnv:
        return make_env([lambda: Failing(0, 4)], asynchronous="restart", on_failure="restart")

    lengths, returns = [4, 3, 4], [4, 2, 4]  # the second episode ends with its failure
    wrapped = RecordEpisodeStatistics(fresh())
    wrapped.reset()
    for _ in range(4 + 3 + 4):
        wrapped.step([1])
    assert list(wrapped.length_queue) == lengths
    assert summary_of(wrapped.unwrapped).mean_length == pytest.approx(np.mean(lengths))
    assert list(wrapped.return_queue) == returns
    assert summary_of(wrapped.unwrapped).mean_return == pytest.approx(np.mean(returns))
    found = fresh().run_episodes(lambda states: [1], 3, progress=False)
    assert found.lengths.tolist() == [4, 3, 3]  # the rebuilt env was reset once more
    assert found.returns.tolist() == [4, 2, 2]
    env = fresh()
    env.reset()
    rollout: Rollout = env.rollout(lambda states: [1], 4 + 3, progress=False)
    assert rollout.episode_lengths.tolist() == lengths[:2]
    assert rollout.episode_returns.tolist() == returns[:2]
    assert summary_of(env).mean_length == pytest.approx(np.mean(lengths[:2]))


def one_step(running: OpenEpisodes, reward: Any, *, ends: bool) -> Any:
    return running.add_steps(
        np.arange(1),
        object_array([reward]).reshape(1, 1),
        np.array([[ends]]),
        None,
        np.zeros((0, 2), int),
        goes_on=True,
    )


def test_rewards_of_any_type_are_summed_and_are_copies() -> None:
    running = OpenEpisodes(1)
    first: Any
    for first, second in [(Decimal("0.1"), Decimal("0.2")), (np.ones(2), np.ones(2)), (1.5, np.float32(2))]:
        one_step(running, first, ends=False)
        (total,) = one_step(running, second, ends=True).returns
        assert np.array_equal(total, first + second)
    reward = np.zeros(2)
    (total,) = one_step(running, reward, ends=True).returns
    reward += 1
    assert np.array_equal(total, [0, 0])


def test_interrupt_during_summation_counts_no_step_twice() -> None:
    for number in itertools.count(1):
        with ParallelEnv([Counter] * 2, asynchronous="restart") as env:
            env.reset()
            for _ in range(3):
                env.step([1, 1])
            stats = env.engine.table.stats
            outcome = interrupt_at(number, stats.sum_up, ("parallelenv/engine/episode_stats.py",))
            assert summary_of(env).num_steps == 6
        if not outcome.line:
            break
        assert outcome.is_raised
    assert number > 1


class Paid(Counter):
    """Gives these rewards, in episodes of two steps."""

    rewards = (np.inf, -np.inf, 1.0, 2.0)

    def step(self, action: int) -> Any:
        state, *_ = super().step(action)
        return state, self.rewards[2 * self.episode - 3 + self.count], self.count == 2, False, {}


def test_infinite_rewards_cause_no_warning_and_affect_only_their_episode() -> None:
    with ParallelEnv([Paid], asynchronous="restart") as env:
        env.reset()
        for _ in range(4):
            env.step([1])
        standing = summary_of(env)
    assert (standing.num_episodes, standing.mean_return, standing.mean_length) == (2, None, 2.0)
