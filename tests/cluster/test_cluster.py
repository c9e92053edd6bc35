"""The Ray modes in clusters of two and three nodes.

``direct=False`` is how actors on other machines are reached; here all nodes are on this one.
"""

from __future__ import annotations

import os
import signal
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from fragile import WAIT, Fragile, when_begun
from modes import ON_RAY, ORACLE, RAY, RAY_POOLS
from scripts import environment, run

from parallelenv import ParallelEnv
from parallelenv.errors import WorkerDiedError
from parallelenv.testing.contract import assert_same

pytestmark = pytest.mark.cluster
modes = pytest.mark.parametrize("mode", ON_RAY)
# Clusters are joined, and actors placed, by the code of `ray`, which the other mode inherits.
in_ray = pytest.mark.parametrize("mode", [RAY, pytest.param(RAY_POOLS, marks=pytest.mark.long)])
# Without Ray's calls they are reached like workers of `subproc`, which tests/backends/test_ray.py covers.
ways = pytest.mark.parametrize("direct", [pytest.param(True, marks=pytest.mark.long), False])

NUM_ENVS = 8


class Settled(Fragile):
    """Reports its node. Its states and the lengths of its episodes are random."""

    observation_space = gym.spaces.Box(-np.inf, np.inf, (3,), np.float64)

    def step(self, action: Any) -> Any:
        state, *_ = super().step(action)
        ends = bool(self.np_random.random() < 0.05)
        return state, float(self.steps), ends, False, {"number": self.number} if self.steps % 3 == 0 else {}

    def _state(self) -> Any:
        return np.array([self.number, self.steps, self.np_random.random()])

    def share(self) -> dict[str, Any]:
        import ray

        assigned: dict[str, Any] = ray.get_runtime_context().get_assigned_resources()  # type: ignore[no-untyped-call]
        return {
            **{name: amount for name, amount in assigned.items() if "_group_" not in name},
            "FLAG": os.environ.get("FLAG"),
        }

    def place(self) -> tuple[str | None, int]:
        return os.environ.get("NODE"), os.getpid()


def fill(mode: str) -> dict[str, Any]:
    """Options with which there is one actor on each of two nodes, and no room for another."""
    return {"num_cpus": 2, "ray_options": {"num_cpus": 2}} if mode == RAY else {"num_cpus": 4}


def settled(folder: Path | None = None) -> list[Any]:
    return [partial(Settled, number, str(folder or "")) for number in range(NUM_ENVS)]


def places(env: ParallelEnv) -> list[str]:
    return [node for node, _ in env.customized_method("place")]


@ways
def test_each_node_has_one_actor_with_its_own_workers(nodes: Any, direct: bool) -> None:
    with ParallelEnv(settled(), RAY_POOLS, num_cpus=4, direct=direct) as env:
        assert places(env) in (["a"] * 4 + ["b"] * 4, ["b"] * 4 + ["a"] * 4)
        pids = [pid for _, pid in env.customized_method("place")]
        assert len(set(pids)) == 4
        assert env.num_workers == 4
        assert f"{2 if direct else 0} of 2 actors reached directly" in repr(env)
    with ParallelEnv(settled(), RAY_POOLS, num_cpus=4, hosts_per_node=2, direct=direct) as env:
        assert sorted(places(env)) == ["a"] * 4 + ["b"] * 4
    nodes.add("c", 1)
    with ParallelEnv(settled(), RAY_POOLS, num_cpus=3, direct=direct) as env:
        assert set(places(env)) == {"a", "b", "c"}


def test_nodes_get_envs_and_workers_in_proportion_to_their_cores(nodes: Any) -> None:
    nodes.add("big", 6)
    envs = [partial(Settled, number) for number in range(10)]
    with ParallelEnv(envs, RAY_POOLS) as env:
        assert Counter(places(env)) == {"big": 6, "a": 2, "b": 2}
        assert len({pid for _, pid in env.customized_method("place")}) == 10
    with ParallelEnv(envs, RAY_POOLS, num_cpus=5, hosts_per_node=2) as env:
        assert Counter(places(env))["big"] >= 4
        assert len({pid for _, pid in env.customized_method("place")}) == 5


def test_actor_with_a_fraction_of_a_core_is_replaced(nodes: Any) -> None:
    with ParallelEnv(settled(), RAY, num_cpus=8) as env:
        assert [share["CPU"] for share in env.customized_method("share")] == [0.5] * 8
        os.kill(env.customized_method("place", id=3)[0][1], signal.SIGKILL)
        with pytest.raises(WorkerDiedError):
            env.customized_method("place", id=3)
        assert env.restart(3) == (3,)
        assert env.customized_method("share", id=3)[0]["CPU"] == 0.5


JOINING = """
import ray, sys
from parallelenv import ParallelEnv
with ParallelEnv(["CartPole-v1"] * 4, sys.argv[1], num_cpus=4) as env:
    env.reset()
    print(ray.available_resources().get("CPU", 0))
print(ray.is_initialized())
"""


@in_ray
def test_close_does_not_shut_down_a_cluster_joined_by_ray_address(nodes: Any, mode: str) -> None:
    out, err, _ = run(JOINING, mode, env=environment(RAY_ADDRESS=nodes.cluster.address))
    assert out.splitlines()[-2:] == ["0", "False"], err


def four_settled(first: int) -> Any:
    return gym.vector.SyncVectorEnv([partial(Settled, number, "") for number in range(first, first + 4)])


@modes
@ways
@pytest.mark.parametrize(
    ("envs", "options"),
    [(settled(), lambda mode: {"num_cpus": 4}), ([partial(four_settled, 0), partial(four_settled, 4)], fill)],
    ids=["envs", "vector envs"],
)
def test_results_equal_those_of_dummy_mode(nodes: Any, envs: Any, options: Any, mode: str, direct: bool) -> None:
    def play(word: str, **options: Any) -> list[Any]:
        with ParallelEnv(envs, word, asynchronous="restart", **options) as env:
            assert word == ORACLE or set(places(env)) == {"a", "b"}
            answers: list[Any] = [env.reset(seed=3)]
            for _ in range(40):
                answers += env.step(np.zeros(NUM_ENVS, int))
            return answers

    assert_same(play(ORACLE), play(mode, direct=direct, **options(mode)))


@modes
@ways
def test_node_lost_during_a_step_raises_worker_died_error(nodes: Any, mode: str, direct: bool, tmp_path: Path) -> None:
    options = {"asynchronous": "continue", "direct": direct, **fill(mode)}
    with ParallelEnv(settled(tmp_path), mode, **options) as env:
        env.reset(seed=3)
        nodes_of = places(env)
        lost = tuple(env_id for env_id, node in enumerate(nodes_of) if node == nodes_of[0])
        rest = [env_id for env_id in range(NUM_ENVS) if env_id not in lost]
        assert rest
        actions = [WAIT if env_id in lost else 0 for env_id in range(NUM_ENVS)]
        errors = WorkerDiedError if mode == RAY else ExceptionGroup  # of one worker, or of two
        with when_begun(tmp_path, 0, lambda: nodes.remove(nodes_of[0])), pytest.raises(errors) as caught:
            env.step(actions)
        error: Any = caught.value
        assert all(isinstance(one, WorkerDiedError) for one in getattr(error, "exceptions", [error]))
        assert error.env_ids == lost
        assert error.partial.env_ids.tolist() == rest
        assert env.step([0] * len(rest), rest).states[:, 1].tolist() == [2] * len(rest)
        nodes.add("late", 2)
        assert env.restart(lost) == lost
        env.reset(lost)
        assert set(places(env)) == {nodes_of[rest[0]], "late"}
        assert env.step([0] * NUM_ENVS).states[:, 1].tolist() == [1 if env_id in lost else 3 for env_id in range(8)]


@modes
def test_on_failure_restart_replaces_envs_of_a_lost_node(nodes: Any, mode: str, tmp_path: Path) -> None:
    options = {"asynchronous": "restart", "on_failure": "restart", "direct": False, **fill(mode)}
    with ParallelEnv(settled(tmp_path), mode, **options) as env:
        env.reset(seed=3)
        nodes_of = places(env)
        lost = [node == nodes_of[0] for node in nodes_of]
        nodes.add("late", 2)
        with when_begun(tmp_path, 0, lambda: nodes.remove(nodes_of[0])):
            result = env.step([WAIT if one else 0 for one in lost])
        assert result.truncated.tolist() == lost
        assert all(isinstance(info["failure"], WorkerDiedError) for info in result.infos[lost])
        assert env.step([0] * NUM_ENVS).states[:, 1].tolist() == [1 if one else 2 for one in lost]


def test_actors_get_the_requested_resources(nodes: Any) -> None:
    nodes.add("rich", 2, num_gpus=1, resources={"flux": 2})
    options = {"resources": {"flux": 1}, "memory": 2**20, "runtime_env": {"env_vars": {"FLAG": "up"}}}
    with ParallelEnv(settled(), RAY, num_cpus=2, num_gpus=1, ray_options=options) as env:
        assert set(places(env)) == {"rich"}
        shares = env.customized_method("share")
        assert all(share == {"CPU": 1, "GPU": 0.5, "flux": 1, "memory": 2**20, "FLAG": "up"} for share in shares)


@modes
def test_scheduling_strategy_of_the_user_places_the_actors(nodes: Any, mode: str) -> None:
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    target = next(node["NodeID"] for node in ray.nodes() if node["Resources"].get("CPU"))  # type: ignore[no-untyped-call]
    options = {"scheduling_strategy": NodeAffinitySchedulingStrategy(target, soft=False), "num_cpus": 0.5}
    with ParallelEnv(settled(), mode, num_cpus=2, ray_options=options) as env:
        assert len(set(places(env))) == 1
