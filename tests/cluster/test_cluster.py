"""The Ray modes in clusters of two and three nodes.

``direct=False`` is how actors on other machines are reached; here all nodes are on this one.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest

from parallelenv import ParallelEnv
from parallelenv.backends import ray_cluster
from parallelenv.errors import SchedulingError, WorkerDiedError

pytestmark = pytest.mark.cluster
modes = pytest.mark.parametrize("mode", ["ray", "ray-subproc"])
ways = pytest.mark.parametrize("direct", [True, False])

NUM_ENVS = 8
WAIT = 1


class Settled(gym.Env[Any, Any]):
    """Tells on which node it is, and waits in a step if its action says so. State: its number, steps, a draw."""

    observation_space = gym.spaces.Box(-np.inf, np.inf, (3,), np.float64)
    action_space = gym.spaces.Discrete(2)

    def __init__(self, number: int, folder: str = "") -> None:
        self.number = number
        self.folder = folder
        self.steps = 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        super().reset(seed=seed)
        self.steps = 0
        return self._state(), {}

    def step(self, action: Any) -> Any:
        if action == WAIT:
            Path(self.folder, f"began-{self.number}").touch()
            time.sleep(60.0)
        self.steps += 1
        ends = bool(self.np_random.random() < 0.05)
        return self._state(), float(self.steps), ends, False, {"number": self.number} if self.steps % 3 == 0 else {}

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
    return {"num_cpus": 2, "ray_options": {"num_cpus": 2}} if mode == "ray" else {"num_cpus": 4}


def settled(folder: Path | None = None) -> list[Any]:
    return [partial(Settled, number, str(folder or "")) for number in range(NUM_ENVS)]


def places(env: ParallelEnv) -> list[str]:
    return [node for node, _ in env.customized_method("place")]


@contextmanager
def once_begun(folder: Path, env_id: int, act: Callable[[], None]) -> Iterator[None]:
    """Do something as soon as an env waits in its step."""

    def watch() -> None:
        deadline = time.monotonic() + 30
        while not Path(folder, f"began-{env_id}").exists() and time.monotonic() < deadline:
            time.sleep(0.005)
        act()

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield
    finally:
        thread.join()


@ways
def test_there_is_an_actor_on_each_node_with_workers_of_its_own(nodes: Any, direct: bool) -> None:
    with ParallelEnv(settled(), "ray-subproc", num_cpus=4, direct=direct) as env:
        assert places(env) in (["a"] * 4 + ["b"] * 4, ["b"] * 4 + ["a"] * 4)
        pids = [pid for _, pid in env.customized_method("place")]
        assert len(set(pids)) == 4
        assert env.num_hosts == 4
        assert f"{2 if direct else 0} of 2 actors reached directly" in repr(env)
    nodes.add("c", 1)
    with ParallelEnv(settled(), "ray-subproc", num_cpus=3, direct=direct) as env:
        assert set(places(env)) == {"a", "b", "c"}


def test_actors_are_spread_where_there_are_several_on_a_node(nodes: Any) -> None:
    with ParallelEnv(settled(), "ray-subproc", num_cpus=4, hosts_per_node=2) as env:
        assert sorted(places(env)) == ["a"] * 4 + ["b"] * 4


@modes
@ways
def test_answers_are_those_of_dummy(nodes: Any, mode: str, direct: bool) -> None:
    def play(word: str, **options: Any) -> list[Any]:
        with ParallelEnv(settled(), word, asynchronous="restart", **options) as env:
            answers: list[Any] = [env.reset(seed=3)]
            for _ in range(40):
                states, rewards, dones, infos = env.step(np.zeros(NUM_ENVS, int))
                answers += [states, rewards, dones, [str(info) for info in infos]]
            return answers

    for ours, expected in zip(play(mode, num_cpus=4, direct=direct), play("dummy"), strict=True):
        np.testing.assert_array_equal(ours, expected)


@modes
@ways
def test_a_node_that_is_lost_in_a_step_is_a_dead_worker(nodes: Any, mode: str, direct: bool, tmp_path: Path) -> None:
    options = {"asynchronous": "continue", "direct": direct, **fill(mode)}
    with ParallelEnv(settled(tmp_path), mode, **options) as env:
        env.reset(seed=3)
        nodes_of = places(env)
        victim = nodes_of[0]
        lost = tuple(env_id for env_id, node in enumerate(nodes_of) if node == victim)
        rest = [env_id for env_id in range(NUM_ENVS) if env_id not in lost]
        assert lost
        assert rest
        with once_begun(tmp_path, 0, lambda: nodes.remove(victim)), pytest.raises(WorkerDiedError) as caught:
            env.step([WAIT, *[0] * (NUM_ENVS - 1)])
        partial_result: Any = getattr(caught.value, "partial")  # noqa: B009 (no exception declares it)
        assert caught.value.env_ids == lost
        assert partial_result.env_ids.tolist() == rest
        assert env.step([0] * len(rest), rest).states[:, 1].tolist() == [2] * len(rest)
        nodes.add("late", 2)
        assert env.restart(lost) == lost
        env.reset(lost)
        assert set(places(env)) == {nodes_of[rest[0]], "late"}
        assert env.step([0] * NUM_ENVS).states[:, 1].tolist() == [1 if env_id in lost else 3 for env_id in range(8)]


@modes
def test_a_node_that_is_lost_is_dealt_with_by_restarts(nodes: Any, mode: str, tmp_path: Path) -> None:
    options = {"asynchronous": "restart", "on_failure": "restart", "direct": False, **fill(mode)}
    with ParallelEnv(settled(tmp_path), mode, **options) as env:
        env.reset(seed=3)
        nodes_of = places(env)
        lost = [node == nodes_of[0] for node in nodes_of]
        nodes.add("late", 2)
        with once_begun(tmp_path, 0, lambda: nodes.remove(nodes_of[0])):
            result = env.step([WAIT, *[0] * (NUM_ENVS - 1)])
        assert result.truncated.tolist() == lost
        assert all(isinstance(info["failure"], WorkerDiedError) for info in result.infos[lost])
        assert env.step([0] * NUM_ENVS).states[:, 1].tolist() == [1 if one else 2 for one in lost]


@modes
def test_what_no_node_has_is_an_error(nodes: Any, mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_cluster, "START_TIMEOUT", 2.0)
    with pytest.raises(SchedulingError, match=r"flux=1.*the cluster has 0.*ray_options"):
        ParallelEnv(settled(), mode, num_cpus=2, ray_options={"resources": {"flux": 1}})
    with ParallelEnv(settled(), mode, num_cpus=4) as env:  # and it holds nothing
        assert env.reset().shape == (NUM_ENVS, 3)


def test_what_is_asked_for_reaches_the_actors(nodes: Any) -> None:
    nodes.add("rich", 2, num_gpus=1, resources={"flux": 2})
    options = {"resources": {"flux": 1}, "memory": 2**20, "runtime_env": {"env_vars": {"FLAG": "up"}}}
    with ParallelEnv(settled(), "ray", num_cpus=2, num_gpus=1, ray_options=options) as env:
        assert set(places(env)) == {"rich"}
        shares = env.customized_method("share")
        assert all(share == {"CPU": 1, "GPU": 0.5, "flux": 1, "memory": 2**20, "FLAG": "up"} for share in shares)


@modes
def test_the_user_may_say_where_actors_are(nodes: Any, mode: str) -> None:
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    names = {node["NodeID"]: node["Resources"] for node in ray.nodes()}  # type: ignore[no-untyped-call]
    target = next(node for node, found in names.items() if found.get("CPU"))
    options = {
        "scheduling_strategy": NodeAffinitySchedulingStrategy(target, soft=False),
        "num_cpus": 0.5,
    }
    with ParallelEnv(settled(), mode, num_cpus=2, ray_options=options) as env:
        assert len(set(places(env))) == 1
