"""Episode statistics equal those of a plain loop, for every way of stepping."""

from __future__ import annotations

import itertools
from decimal import Decimal
from typing import Any

import numpy as np
import pytest
from conftest import MakeEnv
from gymnasium.spaces import Box, Discrete
from interrupting import interrupt_at
from modes import here_and_in_processes

from parallelenv import ParallelEnv, Rollout
from parallelenv.contract.batch import Batch, Layout
from parallelenv.contract.spaces import object_array
from parallelenv.engine.episode_stats import LATEST, EpisodeStats, OpenEpisodes
from parallelenv.testing.envs import Counter
from parallelenv.wrappers import RecordEpisodeStatistics


class Plain:
    """A plain implementation of the same statistics."""

    def __init__(self, num_envs: int) -> None:
        self.returns: list[float | None] = [None] * num_envs
        self.lengths = [0] * num_envs
        self.ended: list[tuple[float, int]] = []
        self.steps = 0

    def begin(self, row: int) -> None:
        self.returns[row], self.lengths[row] = 0.0, 0

    def step(self, row: int, reward: float, ends: bool, goes_on: bool) -> None:
        self.steps += 1
        have = self.returns[row]
        if have is None:
            if ends and goes_on:
                self.begin(row)
            return
        self.returns[row] = have + reward
        self.lengths[row] += 1
        if ends:
            self.ended.append((have + reward, self.lengths[row]))
            self.returns[row] = None
            if goes_on:
                self.begin(row)


class Noting:
    """An `EpisodeStats`, and a batch to write results into."""

    def __init__(self, num_envs: int) -> None:
        self.score = EpisodeStats(num_envs)
        self.batch = Batch.private(Layout(Box(-1, 1, (3,)), Discrete(2), 0, num_envs, False))

    def note(self, rewards: Any, ended: Any, rows: Any = None) -> None:
        self.batch.rewards[:] = rewards
        self.batch.flags[:] = True  # envs that are not stepped keep their values
        self.batch.flags[slice(None) if rows is None else rows] = np.column_stack([ended, np.zeros_like(ended)])
        self.score.note(self.batch.outcome(), rows)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("num_envs", [1, 3, 300])
def test_sums_equal_those_of_a_plain_loop(num_envs: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    noting, plain, goes_on = Noting(num_envs), Plain(num_envs), False
    score = noting.score
    for _ in range(3000 if num_envs < 10 else 200):
        kind = rng.choice(["all", "some", "begin", "follow", "look"], p=[0.6, 0.15, 0.2, 0.02, 0.03])
        if kind == "follow":
            goes_on = bool(rng.integers(2))
            score.follow(goes_on)
        elif kind == "begin":
            rows = rng.permutation(num_envs)[: rng.integers(1, num_envs + 1)].tolist()
            score.begin(rows)
            for row in rows:
                plain.begin(row)
        elif kind == "look":
            look_and_compare(score, plain)
        else:
            rewards = rng.integers(-5, 6, num_envs).astype(float)
            rows = np.arange(num_envs) if kind == "all" else np.sort(rng.permutation(num_envs)[: num_envs // 2 + 1])
            ended = rng.random(len(rows)) < 0.2
            noting.note(rewards, ended, None if kind == "all" else rows.tolist())
            for row, ends in zip(rows.tolist(), ended.tolist(), strict=True):
                plain.step(row, rewards[row], ends, goes_on)
    look_and_compare(score, plain)
    assert plain.ended


def look_and_compare(score: EpisodeStats, plain: Plain) -> None:
    standing = score.look()
    assert (standing.num_steps, standing.num_episodes) == (plain.steps, len(plain.ended))
    if plain.ended:
        latest = plain.ended[-LATEST:]
        assert standing.mean_return == pytest.approx(np.mean([one for one, _ in latest]))
        assert standing.mean_length == pytest.approx(np.mean([length for _, length in latest]))


def test_infinite_rewards_cause_no_warning_and_affect_only_their_episode() -> None:
    noting = Noting(1)
    score = noting.score
    score.follow(True)
    score.begin([0])
    for reward, ends in [(np.inf, False), (-np.inf, True), (1.0, False), (2.0, True)]:
        noting.note([reward], [ends])
    standing = score.look()
    assert (standing.num_episodes, standing.mean_return, standing.mean_length) == (2, None, 2.0)
    assert score.look() == standing


# ---------------------------------------------------------------- through a ParallelEnv


def summary_of(env: ParallelEnv) -> Any:
    return env.engine.table.score.look()


def expected(statistics: Any) -> tuple[int, float, float]:
    return len(statistics.returns), float(np.mean(statistics.returns)), float(np.mean(statistics.lengths))


@pytest.mark.parametrize("done_policy", [None, "idle", "restart", "continue"])
@pytest.mark.parametrize("align", ["item", "batch"])
def test_episode_stats_equal_those_of_record_episode_statistics(
    make_env: MakeEnv, done_policy: Any, align: Any
) -> None:
    env = RecordEpisodeStatistics(
        make_env([lambda number=number: Counter(number, 2 + number) for number in range(3)], asynchronous=done_policy)
    )
    returns: list[float] = []
    lengths: list[int] = []
    env.reset(seed=0)
    for step in range(30):
        if done_policy != "restart" and step % 5 == 4:
            env.reset([0, 1, 2] if done_policy is None else [1, 2])
        for info in (
            [info for _, _, _, info in env.step([1] * 3, align="batch")]
            if align == "batch"
            else env.step([1] * 3).infos.tolist()
        ):
            if "episode" in info:
                returns.append(info["episode"]["r"])
                lengths.append(info["episode"]["l"])
    standing = summary_of(env.unwrapped)
    assert len(returns) > 3
    if done_policy is None:  # the wrapper also reports episodes cut off by the end of another
        assert standing.num_episodes <= len(returns)
    else:
        assert standing.num_episodes == len(returns)
        assert standing.mean_return == pytest.approx(np.mean(returns))
        assert standing.mean_length == pytest.approx(np.mean(lengths))


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
        noting = Noting(2)
        for _ in range(3):
            noting.note([1.0, 1.0], [False, False])
        outcome = interrupt_at(number, noting.score.settle, ("parallelenv/engine/episode_stats.py",))
        assert noting.score.look().num_steps == 6
        if not outcome.line:
            break
        assert outcome.is_raised
    assert number > 1
