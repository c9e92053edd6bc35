"""How fast a cluster steps envs: what the driver, the way to the nodes and the nodes take, put together.

The driver sends a message to each node, one after the other; a node steps its envs, on one core, as soon as it has its
message; the driver takes the answers as they come, again one after the other. Then the next round begins. Ray's own
threads in the driver work beside that, on another core.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass, replace

CHUNK = 0.2
"""Seconds that a chunk of a rollout should take."""
_MOST_NODES = 100_000


@dataclass(frozen=True, slots=True)
class Costs:
    """What a round costs beside the envs' own steps; everything in seconds.

    Attributes:
        fixed: Of the driver, per round.
        send: Of the driver, per message to a node.
        receive: Of the driver, per answer.
        per_env: Of the driver, per env and step: its row of the actions and of the answer.
        latency: Of the way to a node and back, and of the node for a message without steps.
        background: Of Ray's threads in the driver, per message and its answer.
        host_per_step: Of the node, per step of all its envs.
        host_per_env: Of the node, per env and step.
    """

    fixed: float
    send: float
    receive: float
    per_env: float
    latency: float
    background: float = 0.0
    host_per_step: float = 0.0
    host_per_env: float = 0.0


@dataclass(frozen=True, slots=True)
class Load:
    """What is stepped.

    Attributes:
        nodes: Number of nodes, of one core each.
        envs: Number of envs on each node.
        step: Seconds of a step of one env.
        steps: Steps that a message asks each env for; 1, but for rollouts.
    """

    nodes: int
    envs: int
    step: float
    steps: int = 1


def node_seconds(costs: Costs, load: Load) -> float:
    """Return the time from a message sent until its answer could be taken."""
    return costs.latency + load.steps * host_seconds(costs, load)


def host_seconds(costs: Costs, load: Load) -> float:
    """Return the time that a node needs for a step of all its envs."""
    return costs.host_per_step + load.envs * (costs.host_per_env + load.step)


def answer_seconds(costs: Costs, load: Load) -> float:
    """Return the time that the driver needs for the answer of one node."""
    return costs.receive + load.envs * load.steps * costs.per_env


def round_seconds(costs: Costs, load: Load) -> float:
    """Return the time from the first message of a round to the end of its last answer."""
    node, answer = node_seconds(costs, load), answer_seconds(costs, load)
    return costs.fixed + max(
        load.nodes * costs.send + node + answer,  # the answer of the last node is what is waited for
        costs.send + node + load.nodes * answer,  # from the first answer on the driver is busy
        load.nodes * (costs.send + answer),  # it always is
        load.nodes * costs.background,  # Ray's threads are
    )


def rate(costs: Costs, load: Load) -> float:
    """Return env steps per second."""
    return load.nodes * load.envs * load.steps / round_seconds(costs, load)


def ideal_rate(load: Load) -> float:
    """Return env steps per second if nothing but the envs took time."""
    return load.nodes / load.step


def driver_limit(costs: Costs, load: Load) -> float:
    """Return the env steps per second that no number of nodes exceeds."""
    return load.envs * load.steps / max(costs.send + answer_seconds(costs, load), costs.background)


def enough_nodes(costs: Costs, load: Load) -> int:
    """Return with how many nodes a round takes twice as long as its nodes do: from here on the driver is the limit."""
    limit = 2 * node_seconds(costs, load)
    return bisect_right(
        range(1, _MOST_NODES + 1), limit, key=lambda nodes: round_seconds(costs, replace(load, nodes=nodes))
    )


def chunk_steps(costs: Costs, load: Load) -> int:
    """Return how many steps a chunk of a long rollout has, at least 1: as many as a node makes in `CHUNK`."""
    return max(1, int(CHUNK / host_seconds(costs, load)))


def in_chunks(costs: Costs, load: Load) -> Load:
    """Return the load of a round of a long rollout."""
    return replace(load, steps=chunk_steps(costs, load))
