"""A pool of EnvPool on each of two nodes."""

from __future__ import annotations

import os
from functools import partial
from typing import Any

import numpy as np
import pytest
from adapters.neighbours import require
from modes import ON_RAY, ORACLE, RAY

from parallelenv import ParallelEnv

pytestmark = [
    pytest.mark.neighbours,
    pytest.mark.long,
    pytest.mark.filterwarnings("ignore:.*precision lowered by casting"),
]
envpool = require("envpool")


def poles(seed: int) -> Any:
    pool = envpool.make_gymnasium("CartPole-v1", num_envs=4, seed=seed, max_episode_steps=9)
    pool.call = lambda name: (os.environ.get("NODE"),) * 4
    return pool


@pytest.mark.parametrize("direct", [True, False])
@pytest.mark.parametrize("mode", ON_RAY)
def test_pool_on_each_node_equals_both_in_one_process(nodes: Any, mode: str, direct: bool) -> None:
    def play(word: str, **options: Any) -> list[Any]:
        with ParallelEnv([partial(poles, 3), partial(poles, 8)], word, "restart", **options) as env:
            results: list[Any] = [env.reset()]
            for _ in range(40):
                states, rewards, dones, infos = env.step(np.arange(8) % 2)
                results += [states, rewards, dones, [str(info) for info in infos]]
            assert word == ORACLE or set(env.customized_method("place")) == {"a", "b"}
            return results

    fill = {"num_cpus": 2, "ray_options": {"num_cpus": 2}} if mode == RAY else {"num_cpus": 4}
    for ours, expected in zip(play(mode, direct=direct, **fill), play(ORACLE), strict=True):
        np.testing.assert_array_equal(ours, expected)
