"""Stacked wrappers give the same results in every mode."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import MakeEnv

from parallelenv import ParallelEnv
from parallelenv.results import difference
from parallelenv.testing.contract import DONE_POLICIES, Actions, five_env_fns
from parallelenv.testing.envs import Counter
from parallelenv.wrappers import CheckFinite, NormalizeRewards, NormalizeStates, RecordEpisodeStatistics, StackStates


def play(inner: ParallelEnv, folder: Path) -> list[Any]:
    """Return the results of every kind of call, and the saved state of the wrappers."""
    env = CheckFinite(NormalizeRewards(NormalizeStates(StackStates(RecordEpisodeStatistics(inner), 3))))
    draw = Actions(inner, 1).draw
    log: list[Any] = [env.reset(seed=4)]
    for turn in range(12):
        env_ids = [(turn + place) % 5 for place in range(3)]
        answers: list[Any] = [env.step(draw(range(5)), align=("item", "batch")[turn % 2])]
        if env.has_done() and turn % 3 == 2:
            answers += [env.reset(np.flatnonzero(env.done), seed=turn)]
        env.step_async(draw(env_ids), env_ids)  # not recv(): sums of another order differ in their last bits
        answers += [env.step_wait()]
        log += [[without_durations(answer) for answer in answers], env.done]
    env.state_statistics.save(folder / "states.npz")
    log += [env.state_statistics.count, env.reward_statistics.count, (folder / "states.npz").stat().st_size > 0]
    env.step_async(draw(range(5)))
    return [*log, without_durations(env.step_wait()), env.get_env_attr("count")]


def without_durations(answer: Any) -> Any:
    """Return a result without the durations of episodes."""
    if hasattr(answer, "env_ids"):
        for info in [row[3] for row in answer] if isinstance(answer, list) else answer.infos:
            info.get("episode", {}).pop("t", None)
    return answer


@pytest.mark.parametrize("done_policy", DONE_POLICIES)
def test_stacked_wrappers_give_the_same_results_in_every_mode(
    make_env: MakeEnv, done_policy: Any, tmp_path: Path
) -> None:
    with ParallelEnv(five_env_fns(Counter), asynchronous=done_policy) as oracle:
        expected = play(oracle, tmp_path)
    found = play(make_env(five_env_fns(Counter), asynchronous=done_policy, num_cpus=2), tmp_path)
    assert difference(expected, found) is None, difference(expected, found)
