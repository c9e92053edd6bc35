"""Vector envs as items of the user's list: their sub-envs are as if they had been given one by one."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import partial
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.wrappers import Autoreset
from modes import ORACLE
from vector_envs import DISABLED, NEXT, SAME, Walk, Walks, synced

from parallelenv import ParallelEnv
from parallelenv.errors import InvalidEnvError
from parallelenv.testing.scenario import DONE_POLICIES, assert_same, drain, items

MakeEnv = Callable[..., ParallelEnv]

ALL = [(make, autoreset) for make in (synced, Walks) for autoreset in (NEXT, SAME, DISABLED)]
FIT = {
    None: [(synced, NEXT), (synced, DISABLED), (Walks, NEXT), (Walks, DISABLED)],
    "idle": [(Walks, DISABLED)],
    "restart": [(synced, NEXT), (synced, SAME), (synced, DISABLED), (Walks, SAME), (Walks, DISABLED)],
    "continue": [(synced, NEXT), (synced, DISABLED), (Walks, NEXT), (Walks, DISABLED)],
}
"""Vector envs that fit a done policy."""


def envs_of(policy: Any, *, apart: bool) -> tuple[list[Any], list[range], list[bool]]:
    """Return env fns of all vector envs that fit a done policy, with an env in between; which env ids each of them has,
    and whether it resets a part of them. ``apart``: the same envs one by one."""
    env_fns: list[Any] = []
    whole, resets_some = [], []
    begin = 0
    for number, (make, autoreset) in enumerate(FIT[policy]):
        lengths = [3 + number, 5, 4] if number % 2 else [6, 3 + number]
        resets_itself = policy == "continue" and autoreset == NEXT
        singles = [partial(Autoreset, Walk(length)) if resets_itself else partial(Walk, length) for length in lengths]
        env_fns += [*singles, partial(Walk, 5)] if apart else [partial(make, lengths, autoreset), partial(Walk, 5)]
        whole += [range(begin, begin + len(lengths)), range(begin + len(lengths), begin + len(lengths) + 1)]
        resets_some += [make is synced or autoreset == DISABLED, True]
        begin = whole[-1].stop
    return env_fns, whole, resets_some


@pytest.mark.parametrize("policy", DONE_POLICIES)
def test_results_equal_those_of_the_envs_one_by_one(policy: Any, make_env: MakeEnv) -> None:
    env_fns, whole, resets_some = envs_of(policy, apart=False)
    one = make_env(env_fns, asynchronous=policy, num_cpus=2)
    chance = np.random.default_rng(3)
    with ParallelEnv(envs_of(policy, apart=True)[0], ORACLE, policy) as other:
        other.engine.plans_steps = False

        def both(call: str, *arguments: Any, **keywords: Any) -> Any:
            found, expected = (items(getattr(env, call)(*arguments, **keywords)) for env in (one, other))
            label = f"{call} {arguments} {keywords} "
            assert_same(expected, found, label)
            assert_same(other.done, one.done, label + "done")
            assert_same(other.reset_infos, one.reset_infos, label + "reset_infos")
            return found

        assert len(one) == len(other)
        both("reset", seed=7)
        fixed = [  # `SyncVectorEnv` without autoreset refuses to step one that has ended
            env_ids for env_ids, (make, mode) in zip(whole[::2], FIT[policy], strict=True)
            if policy == "continue" and (make, mode) == (synced, DISABLED)
        ]
        for turn in range(60):
            actions = chance.integers(0, 2, len(one))
            if turn % 3 == 2 and turn > 20:
                chosen = chance.permutation(len(whole))[: 1 + turn % len(whole)]
                ids = [env_id for place in chosen for env_id in chance.permutation(whole[place]).tolist()]
                if turn % 2:
                    both("step", actions[ids], ids, align="batch")
                else:
                    for env in (one, other):
                        env.send(actions[ids], ids)
                    assert_same(drain(other), drain(one), "received ")
            else:
                both("step", actions, align="item" if turn < 12 or turn % 2 else "batch")
            over = [env_id for env_ids in fixed for env_id in env_ids if one.done[env_id]]
            if over:
                both("reset", over[::-1])
            if turn % 5 == 4 or (policy is None and one.all_done()):
                some = [place for place in range(len(whole)) if resets_some[place] or policy is None]
                parts = [env_id for place in some for env_id in whole[place] if policy is None or chance.random() < 0.3]
                seeds = None if policy is None or turn % 2 else [
                    int(chance.integers(99)) if len(whole[place]) == 1 or place % 2 == 0 and FIT[policy][place // 2][0] is synced else None
                    for place in some for env_id in whole[place] if env_id in parts
                ]
                both("reset", parts, seed=seeds, options={"begin": turn % 2})
            if turn == 30:
                both("reset", seed=turn)
        assert_same(other.engine.table.stats.summary(), one.engine.table.stats.summary(), "stats ")


@pytest.mark.parametrize("policy", DONE_POLICIES)
@pytest.mark.parametrize(("make", "autoreset"), ALL, ids=lambda one: getattr(one, "__name__", one))
def test_vector_envs_that_do_not_fit_the_done_policy_are_refused(make: Any, autoreset: str, policy: Any) -> None:
    if (make, autoreset) not in FIT[policy]:
        why = "begins the next episode within" if autoreset == SAME else "cannot (step without|begin an episode)"
        with pytest.raises(InvalidEnvError, match=rf"envs \[1, 2\] are one vector env.*{autoreset}.*{why}"):
            ParallelEnv([Walk, partial(make, (4, 5), autoreset)], ORACLE, policy)
