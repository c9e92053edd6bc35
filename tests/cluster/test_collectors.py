"""Collectors on a cluster of two nodes: each fetches weights once and sends steps back, and a node dies."""

from __future__ import annotations

import os
import time
from functools import partial
from typing import Any

import numpy as np
import pytest
from modes import ORACLE, RAY
from test_rollout import Count

from parallelenv import Collector, CollectorSet, ParallelEnv

pytestmark = pytest.mark.cluster
ways = pytest.mark.parametrize("direct", [pytest.param(True, marks=pytest.mark.long), False])
SIZE = 200_000  # float64 of weights: more than Ray sends with a call


class Steady(Count):
    """Its state has a random number."""

    def __init__(self) -> None:
        super().__init__(0, 50)

    def _state(self) -> Any:
        return np.array([self.count, self.np_random.random()])


class InfoEnv:
    """Reports its node in extras."""

    def __init__(self) -> None:
        self.weights = np.zeros(SIZE)

    def set_weights(self, weights: Any) -> None:
        self.weights = weights

    def __call__(self, states: Any) -> Any:
        node = "ab".find(os.environ.get("NODE", ""))
        actions = np.full(len(states), int(self.weights[-1]))
        return actions, None, {"node": np.full(len(states), node)}


make_envs = partial(ParallelEnv, [Steady] * 2, ORACLE, "restart")


def on_both(direct: bool, num_workers: int = 2, **options: Any) -> CollectorSet:
    """Make collectors with one per node, or two per node if there are four."""
    resources = {"num_cpus": 4 // num_workers}
    arguments = {"num_steps": 60, "para_mode": RAY, "seed": 1, "direct": direct, **options}
    return CollectorSet.create(num_workers, InfoEnv, make_envs, worker_resources=resources, **arguments)


@pytest.fixture
def puts(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Record the sizes of arrays put into Ray's object store, for all hosts."""
    found: list[int] = []
    ray = pytest.importorskip("ray")
    real = ray.put

    def count(value: Any) -> Any:
        if isinstance(value, np.ndarray):
            found.append(value.nbytes)
        return real(value)

    monkeypatch.setattr(ray, "put", count)
    return found


@ways
def test_data_of_two_nodes_equal_those_of_one_process(nodes: Any, direct: bool) -> None:
    with (
        on_both(direct) as collectors,
        Collector(InfoEnv, partial(ParallelEnv, [Steady] * 4, ORACLE, "restart"), num_steps=60, seed=1) as single,
    ):
        for _ in range(2):
            (found, info), (expected, _) = collectors.collect(), single.collect()
            assert found.states.tolist() == expected.states.tolist()
            assert sorted(found.extras["node"][0].tolist()) == [0, 0, 1, 1]
            assert info["num_samples"] == 240


def test_weights_are_put_into_the_object_store_once(nodes: Any, puts: list[int]) -> None:
    with on_both(direct=False, num_workers=4) as collectors:
        weights = np.zeros(SIZE)
        for value in (1, 2):
            weights[-1] = value
            collectors.set_weights(weights)
            data, info = collectors.collect()
            assert (data.actions == value).all()
            assert info["version"].tolist() == [value] * 4
    assert len(puts) == 2
    assert min(puts) > SIZE * 8


@pytest.mark.long
@pytest.mark.parametrize("direct", [True, False])
def test_collector_of_a_lost_node_is_restarted_on_another_node(nodes: Any, direct: bool) -> None:
    with on_both(direct) as collectors:
        weights = np.full(SIZE, 3.0)
        collectors.set_weights(weights)
        data, _ = collectors.collect()
        lost_node = "ab"[int(data.extras["node"][0, 2])]
        nodes.add("c", 2)
        nodes.remove(lost_node)
        lost, deadline = 0, time.monotonic() + 60
        while not collectors.num_replaced and time.monotonic() < deadline:
            data, info = collectors.collect()
            lost += info["lost_samples"]
        assert collectors.num_replaced == 1
        assert lost <= 120
        data, info = collectors.collect()
        assert data.valid.all()
        assert (data.actions == 3).all()
        assert set(data.extras["node"][0, :2].tolist()) != set(data.extras["node"][0, 2:].tolist())
