"""Episode statistics: those of the wrapper, and those that a `ParallelEnv` keeps itself."""

from __future__ import annotations

from decimal import Decimal
from fractions import Fraction
from functools import partial
from typing import Any

import numpy as np
import pytest
from conftest import MakeEnv
from fragile import GO_ON, RAISE, Fragile
from gymnasium.wrappers import RecordEpisodeStatistics as AroundOne
from interrupting import Moments, at_many_moments, interrupt_at
from modes import ORACLE

from parallelenv import ParallelEnv
from parallelenv.engine import episode_stats
from parallelenv.engine.episode_stats import EpisodeStats, EpisodeSummary
from parallelenv.errors import ArgumentError, EnvContractError, ResetNeededError
from parallelenv.testing.contract import DONE_POLICIES
from parallelenv.testing.envs import Counter
from parallelenv.wrappers import RecordEpisodeStatistics
from wrappers.envs import Told, play


def stay(states: Any) -> list[int]:
    return [1] * len(states)


def summary_of(env: ParallelEnv) -> Any:
    """Return what the display of a `ParallelEnv` shows."""
    return env.engine.table.stats.summary()


# ---------------------------------------------------------------- of the wrapper


def around_one(*arguments: Any) -> Any:
    return AroundOne(Told(*arguments))


def episodes_of(results: list[Any]) -> list[Any]:
    """Return env id, return and length of the episodes that have ended."""
    ended = []
    for result in results:
        if hasattr(result, "env_ids"):
            infos = [row[3] for row in result] if isinstance(result, list) else result.infos
            for env_id, info in zip(result.env_ids.tolist(), infos, strict=True):
                if "episode" in info:
                    ended.append((env_id, info["episode"]["r"], info["episode"]["l"]))
    return ended


@pytest.mark.parametrize("asynchronous", [None, "idle", "restart"])
def test_statistics_match_those_of_a_wrapper_around_each_env(
    asynchronous: Any, make_env: MakeEnv, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("parallelenv.engine.episode_stats._ROOM", 1)  # so that sums are made now and then
    monkeypatch.setattr("parallelenv.engine.episode_stats.LATEST", 3)
    rewards = [np.random.default_rng(length).random(length).tolist() for length in (3, 4, 6)]
    theirs = make_env([partial(around_one, one) for one in rewards], asynchronous=asynchronous)
    ours = RecordEpisodeStatistics(make_env([partial(Told, one) for one in rewards], asynchronous=asynchronous))
    expected, found = (episodes_of(play(env, [1, 2, 3])) for env in (theirs, ours))
    np.testing.assert_allclose(found, expected)
    returns = [total for _, total, _ in found]
    assert len(returns) == ours.episode_count == len(ours.length_queue) >= 3
    assert list(ours.return_queue) == returns
    standing = summary_of(ours.unwrapped)
    if asynchronous is None:  # the wrapper also reports episodes cut off by the end of another
        assert standing.num_episodes <= len(returns)
    else:
        assert standing.num_episodes == len(returns)
        assert standing.mean_return == pytest.approx(np.mean(list(ours.return_queue)[-3:]))
        assert standing.mean_length == pytest.approx(np.mean(list(ours.length_queue)[-3:]))


def test_done_policy_continue_reports_an_episode_once(make_env: MakeEnv) -> None:
    inner = make_env([partial(Counter, 0, 2)], asynchronous="continue")
    env = RecordEpisodeStatistics(inner, buffer_length=1, stats_key="told")
    for _ in range(2):
        env.reset()
        told: Any = [env.step([1]).infos[0].get("told") for _ in range(5)]
        assert [statistics is None for statistics in told] == [True, False, True, True, True]
        assert {name: type(value) for name, value in told[1].items()} == {"r": float, "l": int, "t": float}
        assert told[1]["l"] == 2
        assert 0 < told[1]["t"] == env.time_queue[0] < 60
    assert env.episode_count == summary_of(inner).num_episodes == 2
    assert len(env.return_queue) == 1


@pytest.mark.parametrize("asynchronous", ["idle", "restart", "continue"])
def test_wrapper_counts_a_failed_step_as_the_last_of_its_episode(asynchronous: Any, make_env: MakeEnv) -> None:
    env_fns = [partial(Fragile, number) for number in range(2)]
    env = RecordEpisodeStatistics(make_env(env_fns, asynchronous=asynchronous, on_failure="restart"))
    env.reset()
    for _ in range(2):
        env.step([GO_ON, GO_ON])
        told = env.step([GO_ON, RAISE]).infos
        assert "episode" not in told[0]
        assert (told[1]["episode"]["r"], told[1]["episode"]["l"]) == (1.0, 2)
        if asynchronous == "idle":
            env.reset(1)


def test_clashing_keys_and_invalid_arguments_are_refused(make_env: MakeEnv) -> None:
    env = RecordEpisodeStatistics(make_env([partial(around_one, [1.0])]))
    env.reset()
    with pytest.raises(
        EnvContractError, match=r"envs \[0\] already has the key 'episode'.*another stats_key"
    ) as caught:
        env.step([0])
    assert caught.value.partial.infos[0]["episode"]["l"] == 1  # type: ignore[attr-defined]
    with pytest.raises(ArgumentError, match="buffer_length=0 must be an int"):
        RecordEpisodeStatistics(env, 0)


@pytest.mark.parametrize("reward", ["x", 1j, np.complex128(1), 10**400, None, np.zeros(2)])
def test_rewards_that_are_not_numbers_are_refused(reward: Any, make_env: MakeEnv) -> None:
    env_fns = [partial(Told, [1.0] * 3), partial(Told, [1.0, reward, 1.0])]
    env = RecordEpisodeStatistics(make_env(env_fns, asynchronous="restart"))
    env.reset()
    env.step([0, 0])
    with pytest.raises(EnvContractError, match="must be numbers here; the reward of env 1 is"):
        env.step([0, 0], align="batch")
    with pytest.raises(ResetNeededError):
        env.step([0], id=[0])
    env.reset()
    env.step([0, 0])
    assert env.episode_count == 0


# ---------------------------------------------------------------- of a `ParallelEnv`


def test_rollouts_count_as_steps(make_env: MakeEnv) -> None:
    lengths = [3, 4, 5]
    env = make_env([partial(Told, [2.0] * length) for length in lengths], asynchronous="restart")
    env.reset()
    for num_steps in (7, 1, 32):
        env.rollout(stay, num_steps, progress=False)
    ended = [length for length in lengths for _ in range(40 // length)]
    mean = float(np.mean(ended))
    assert summary_of(env) == EpisodeSummary(3 * 40, len(ended), 2 * mean, mean)


@pytest.mark.parametrize("done_policy", DONE_POLICIES)
def test_run_episodes_counts_each_episode_once(make_env: MakeEnv, done_policy: Any) -> None:
    env = make_env([lambda: Counter(0, 3)] * 2, asynchronous=done_policy)
    found = env.run_episodes(stay, 7, seed=0, progress=False)
    standing = summary_of(env)
    assert (standing.num_episodes, standing.mean_length) == (7, 3)
    assert standing.mean_return == pytest.approx(found.returns.mean())
    env.reset()
    for _ in range(3):
        env.step([1, 1])
    assert summary_of(env).num_episodes == 9


@pytest.mark.parametrize(("autoreset_mode", "counts"), [("NextStep", (5, 4)), ("SameStep", (6, 5))])
def test_steps_through_an_adapter_are_counted(make_env: MakeEnv, autoreset_mode: Any, counts: tuple[int, int]) -> None:
    env = make_env([partial(Told, [2.0] * length) for length in (3, 4)])
    vector_env = env.to_gymnasium(autoreset_mode)
    vector_env.reset()
    for _ in range(20):
        vector_env.step(np.array([1, 1]))
    standing = summary_of(env)
    assert standing.num_episodes == sum(counts)
    assert standing.mean_return == pytest.approx(2 * np.average([3, 4], weights=counts))


def test_episode_without_a_recorded_start_is_not_counted(make_env: MakeEnv) -> None:
    env = make_env([lambda: Counter(0, 3)], asynchronous="restart")
    env.reset(seed=0)
    env.step([1])
    env.load_state(env.save_state())
    for _ in range(5):
        env.step([1])
    standing = summary_of(env)
    assert (standing.num_episodes, standing.mean_length) == (1, 3)


def test_failed_step_counts_everywhere_as_the_last_of_its_episode(make_env: MakeEnv) -> None:
    def fall_in_third_step(states: Any) -> Any:
        return np.where(states[:, 1] == 2, RAISE, GO_ON)

    env = make_env([partial(Fragile, 0)], asynchronous="restart", on_failure="restart")
    env.reset()
    for action in (GO_ON, GO_ON, RAISE):
        env.step([action])
    rollout = env.rollout(fall_in_third_step, 3, progress=False)
    assert (rollout.episode_lengths.tolist(), rollout.episode_returns.tolist()) == ([3], [2])
    found = env.run_episodes(fall_in_third_step, 2, progress=False)
    assert (found.lengths.tolist(), found.returns.tolist()) == ([3, 3], [2, 2])
    standing = summary_of(env)
    assert (standing.num_episodes, standing.mean_length, standing.mean_return) == (4, 3, 2)


@pytest.mark.parametrize(
    "rewards",
    [(Decimal("0.1"), Decimal("0.2")), (Fraction(5, 2), 2), (1.5, np.float32(2)), (np.ones(2), np.ones(2))],
    ids=repr,
)
def test_rewards_of_any_type_are_summed(rewards: Any, make_env: MakeEnv) -> None:
    env = make_env([partial(Told, rewards)], asynchronous="restart")
    (total,) = env.run_episodes(stay, 1, progress=False).returns
    assert np.array_equal(total, rewards[0] + rewards[1])
    if np.ndim(total):
        return  # the wrapper refuses it
    wrapped = RecordEpisodeStatistics(env)
    wrapped.reset()
    wrapped.step([1])
    assert wrapped.step([1]).infos[0]["episode"]["r"] == pytest.approx(float(total))


def test_returns_of_one_step_are_copies_of_rewards(make_env: MakeEnv) -> None:
    env = make_env([partial(Told, [np.zeros(2)])], asynchronous="restart")
    env.reset()
    rollout = env.rollout(stay, 1, progress=False)
    rollout.episode_returns[0] += 1
    assert rollout.rewards[0, 0].tolist() == [0, 0]


@at_many_moments
@pytest.mark.timeout(method="thread")
def test_interrupt_during_summation_counts_no_step_twice(moments: Moments) -> None:
    for number, interrupt in moments:
        with ParallelEnv([Counter] * 2, asynchronous="restart") as env:
            env.reset()
            for _ in range(3):
                env.step([1, 1])
            stats = env.engine.table.stats
            outcome = interrupt_at(number, stats.sum_up, ("parallelenv/engine/episode_stats.py",), interrupt)
            assert summary_of(env).num_steps == 6
        if not outcome.line:
            break
        assert outcome.is_raised
    assert number > 1


def test_infinite_rewards_cause_no_warning() -> None:
    with ParallelEnv([partial(Told, [np.inf, -np.inf])], asynchronous="restart") as env:
        env.reset()
        for _ in range(4):
            env.step([1])
        standing = summary_of(env)
    assert (standing.num_episodes, standing.mean_return, standing.mean_length) == (2, None, 2.0)


@pytest.mark.parametrize("goes_on", [True, False])
def test_steps_of_some_of_many_envs_count_as_if_each_were_kept_alone(
    goes_on: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    num_envs, rng = 130, np.random.default_rng(0)
    monkeypatch.setattr(episode_stats, "LATEST", 10**6)
    shares, alone = EpisodeStats(num_envs), EpisodeStats(num_envs)
    for one in (shares, alone):
        one.set_autoreset(goes_on)
        one.begin_episodes(slice(0, 100))
    for _ in range(600):
        order = rng.permutation(num_envs).tolist()
        kinds: list[Any] = [order[: rng.integers(1, 4)], slice(order[0], order[0] + 5), None]
        rows = kinds[rng.choice(3, p=[0.8, 0.15, 0.05])]
        resets = rows[1:] if type(rows) is list and rng.random() < 0.2 else []
        flags = rng.choice([False, False, True], (num_envs, 2))
        outcome = rng.integers(0, 9, num_envs).astype(float).tobytes() + flags.tobytes()
        begun = order[-2:] if rng.random() < 0.05 else []
        for one in (shares, alone):
            monkeypatch.setattr(episode_stats, "_MANY", num_envs if one is shares else 10**6)
            one.add_step(outcome, rows, resets)
            if begun:
                one.begin_episodes(begun)
    found = []
    for one in (shares, alone):
        one.sum_up()
        sums, running = one._sums, one._sums.running
        arrays = running.returns.tolist(), running.lengths.tolist(), running.are_whole.tolist()
        found.append((arrays, sums.num_steps, sums.num_episodes, sorted(sums.latest)))
    assert found[0] == found[1]
    assert found[0][2] > 100


def test_results_of_many_envs_received_one_by_one_share_an_entry() -> None:
    with ParallelEnv([Counter] * 200, ORACLE, "restart") as env:
        env.reset()
        env.send([1] * 200)
        for _ in range(200):
            env.recv(1, 1)
        assert len(env.engine.table.stats._log) == 1
        assert env.engine.table.stats.summary().num_steps == 200
