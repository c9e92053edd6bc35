"""The model with which the scaling benchmark extrapolates measurements to many nodes."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parent.parent))  # last: the package that is installed comes before the checkout's

from benchmarks.model import (
    CHUNK,
    Costs,
    Load,
    chunk_steps,
    driver_limit,
    enough_nodes,
    host_seconds,
    ideal_rate,
    in_chunks,
    rate,
    round_seconds,
)
from parallelenv.rollouts import rollout

COSTS = Costs(fixed=1e-4, send=2e-4, receive=3e-4, per_env=1e-6, latency=1e-3, host_per_step=5e-5, host_per_env=2e-6)
LOAD = Load(nodes=1, envs=16, step=1e-3)
FREE = Costs(0, 0, 0, 0, 0)


def on(nodes: int) -> Load:
    return replace(LOAD, nodes=nodes)


def test_round_with_one_node_is_the_sum_of_all_costs() -> None:
    assert round_seconds(COSTS, LOAD) == pytest.approx(
        1e-4 + 2e-4 + 1e-3 + 5e-5 + 16 * (2e-6 + 1e-3) + 3e-4 + 16 * 1e-6
    )


def test_rate_without_costs_equals_the_rate_of_the_envs() -> None:
    assert rate(FREE, on(1000)) == pytest.approx(ideal_rate(on(1000))) == pytest.approx(1e6)


def test_rate_grows_with_nodes_up_to_the_driver_limit() -> None:
    rates = [rate(COSTS, on(nodes)) for nodes in range(1, 2000)]
    assert rates == sorted(rates)
    assert rates[-1] < driver_limit(COSTS, LOAD)
    assert rates[-1] == pytest.approx(driver_limit(COSTS, LOAD), rel=0.01)


def test_enough_nodes_is_where_the_round_is_twice_the_node_time() -> None:
    # 0.1 ms, 0.2 ms for the first message, 17.082 ms on the nodes, and 0.316 ms for each answer
    assert enough_nodes(COSTS, LOAD) == int((2 * 17.082 - 0.1 - 0.2 - 17.082) / 0.316)


def test_replies_wait_while_the_driver_is_busy() -> None:
    costs = replace(FREE, receive=1.0, latency=10.0)
    assert round_seconds(costs, Load(4, 1, 0.0)) == 14
    costs = replace(FREE, send=1.0, latency=10.0)
    assert round_seconds(costs, Load(4, 1, 0.0)) == 14


def test_chunk_duration_equals_that_of_the_package() -> None:
    assert CHUNK == rollout.CHUNK
    steps = chunk_steps(COSTS, LOAD)
    assert steps * host_seconds(COSTS, LOAD) <= CHUNK
    assert (steps + 1) * host_seconds(COSTS, LOAD) > CHUNK


def test_chunk_length_does_not_depend_on_number_of_messages() -> None:
    assert chunk_steps(COSTS, on(1000)) == chunk_steps(COSTS, on(1)) > 1


@pytest.mark.parametrize("nodes", [1, 10, 100, 1000])
def test_rollout_rate_is_between_step_rate_and_ideal_rate(nodes: int) -> None:
    assert rate(COSTS, on(nodes)) < rate(COSTS, in_chunks(COSTS, on(nodes))) < ideal_rate(on(nodes))
