"""Steps per second on many nodes: a model whose costs are measured here, checked on a few nodes, drawn to a thousand.

Usage: python -m benchmarks.scale [--out DIR]

The nodes are all on this machine, so the envs sleep instead of computing, and every message is one of Ray's own calls,
as to another machine. Nothing here tells of a network.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import numpy as np
import psutil

from benchmarks import machine, scale_report
from benchmarks.envs import NAPPER, STILL, EnvKind
from benchmarks.model import Costs, Load
from benchmarks.processes import ROOT
from benchmarks.scale_report import Check, Ways
from parallelenv import ParallelEnv
from tests.cluster.nodes import Nodes

_GRID = ((1, 1), (1, 64), (2, 16), (4, 1), (4, 64), (8, 16))
"""Numbers of actors, and of envs in each, in which the costs are measured."""
_ROUNDS = 200
_WARM_UP = 30
_ROLLOUTS = 9
_MESSAGES = {1: 3, 200: 5}
"""By the length of a rollout, in steps, how many messages each actor gets: the policy, chunks, the end."""
_NODES = (1, 2, 3)
_ENVS = (1, 8)
_NAPS = (1e-3, 3e-3, 10e-3)
_CHECK = 1.0
"""Seconds for which a pool is timed in a check, and of a rollout, of which there are three or four."""
_LISTEN = 0.3
"""Seconds for which the quiet of the machine is looked at before a check."""


def main() -> None:
    """Measure, check, and write what came of it."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.scale", description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks", help="folder of SCALE.md and scale.png")
    folder = parser.parse_args().out
    about = machine.describe()
    with _nodes():
        ways = measure_costs()
        checks = [check for nodes in _NODES for envs in _ENVS for check in _check(nodes, envs, ways)]
    folder.mkdir(parents=True, exist_ok=True)
    scale_report.write(folder, about, ways, checks)
    print(f"written: {os.path.relpath(folder)}/SCALE.md, scale.png")


@contextlib.contextmanager
def _nodes() -> Iterator[None]:
    """Have a cluster of nodes with one core each."""
    import ray

    with contextlib.closing(Nodes()) as nodes:
        for number in range(max(_NODES)):
            nodes.add(f"node-{number}", 1)
        ray.init(address=nodes.cluster.address, logging_level=logging.ERROR, log_to_driver=False)
        yield


@contextlib.contextmanager
def _pool(kind: EnvKind, actors: int, envs: int, **ray_options: Any) -> Iterator[ParallelEnv]:
    """Open actors that are reached by Ray's calls."""
    pool = ParallelEnv(
        kind.env_fns(actors * envs), "ray", "restart", num_cpus=actors, direct=False, ray_options=ray_options
    )
    with pool as env:
        env.reset(seed=0)
        yield env


class Timing(NamedTuple):
    """Medians of what a round of a pool took, in seconds.

    Attributes:
        actors: Of the pool.
        envs: In each.
        send: CPU time of the caller's thread for the messages.
        receive: Likewise, for the answers.
        background: CPU time of all other threads of the caller.
        wall: From the first message to the last answer.
    """

    actors: int
    envs: int
    send: float
    receive: float
    background: float
    wall: float


class Rolled(NamedTuple):
    """Medians of what a rollout of a pool took, in seconds.

    Attributes:
        actors: Of the pool.
        envs: In each.
        length: Of the rollout, in steps.
        cpu: CPU time of the caller's thread.
        wall: Wall time.
    """

    actors: int
    envs: int
    length: int
    cpu: float
    wall: float


def measure_costs() -> Ways:
    """Return the costs of both ways.

    The driver's are CPU time of the thread that calls `ParallelEnv`: on a real cluster nobody else has its core, but
    here the actors do.
    """
    timings: list[Timing] = []
    rollouts: list[Rolled] = []
    for actors, envs in _GRID:
        with _pool(STILL, actors, envs, num_cpus=0) as env:
            timings.append(Timing(actors, envs, *_time_rounds(env)))
            rollouts += [Rolled(actors, envs, length, *_time_rollouts(env, length)) for length in _MESSAGES]
        print(f"{actors} actors, {envs} envs in each: a round takes {1e3 * timings[-1].wall:.2f} ms", flush=True)
    stepping = _costs_of_stepping(timings)
    return Ways(stepping, _costs_of_rollouts(stepping, rollouts))


def _time_rounds(env: ParallelEnv) -> list[float]:
    """Return the numbers of a `Timing`."""
    actions = np.zeros(len(env), np.int64)
    found = []
    for _ in range(_WARM_UP + _ROUNDS):
        before = time.thread_time(), time.process_time(), time.perf_counter()
        env.send(actions)
        middle = time.thread_time()
        env.recv(min_envs=len(env))
        cpu, all_threads, wall = np.subtract((time.thread_time(), time.process_time(), time.perf_counter()), before)
        send = middle - before[0]
        found.append((send, cpu - send, all_threads - cpu, wall))
    return [float(number) for number in np.median(found[_WARM_UP:], axis=0)]


def _time_rollouts(env: ParallelEnv, length: int) -> list[float]:
    """Return the numbers of a `Rolled`."""
    found = []
    for _ in range(_ROLLOUTS):
        begin, wall = time.thread_time(), time.perf_counter()
        env.rollout(rest, length)
        found.append((time.thread_time() - begin, time.perf_counter() - wall))
    return [float(number) for number in np.median(found, axis=0)]


def rest(states: Any) -> Any:
    """Return an action for each env: a policy of no cost."""
    return np.zeros(len(states), np.int64)


def _costs_of_stepping(timings: Sequence[Timing]) -> Costs:
    columns = [(1, timing.actors, timing.actors * timing.envs) for timing in timings]
    before, send, put = _fit(columns, [timing.send for timing in timings])
    after, receive, take = _fit(columns, [timing.receive for timing in timings])
    _, background, _ = _fit(columns, [timing.background for timing in timings])
    one, many = (timing for timing in timings if timing.actors == 1)
    host_per_env = max(0.0, (many.wall - one.wall) / (many.envs - one.envs) - put - take)
    latency = one.wall - before - send - after - receive - one.envs * (put + take + host_per_env)
    return Costs(before + after, send, receive, put + take, latency, background, host_per_env=host_per_env)


def _costs_of_rollouts(stepping: Costs, rollouts: Sequence[Rolled]) -> Costs:
    columns = [
        (_MESSAGES[one.length], _MESSAGES[one.length] * one.actors, one.actors * one.envs * one.length)
        for one in rollouts
    ]
    fixed, message, per_env = _fit(columns, [one.cpu for one in rollouts])
    length = max(_MESSAGES)
    one, many = (rolled for rolled in rollouts if rolled.actors == 1 and rolled.length == length)
    host_per_env = max(0.0, (many.wall - one.wall) / (many.envs - one.envs) / length - per_env)
    messages = _MESSAGES[length] * (fixed + message + stepping.latency)
    host_per_step = max(0.0, (one.wall - messages) / length - one.envs * (per_env + host_per_env))
    return replace(
        stepping,
        fixed=fixed,
        receive=max(0.0, message - stepping.send),
        per_env=per_env,
        host_per_step=host_per_step,
        host_per_env=host_per_env,
    )


def _fit(columns: Sequence[Sequence[float]], values: Sequence[float]) -> list[float]:
    """Return the factors with which the columns come nearest to the values, relative to each; none below 0."""
    weights = 1 / np.asarray(values)
    factors = np.linalg.lstsq(np.asarray(columns, float) * weights[:, None], np.ones(len(values)), rcond=None)[0]
    return [max(0.0, float(factor)) for factor in factors]


def _check(nodes: int, envs: int, ways: Ways) -> Iterator[Check]:
    """Measure a pool with one actor on each node, with steps of different cost."""
    with _pool(NAPPER, nodes, envs) as env:
        for nap in _NAPS:
            env.set_env_attr("seconds", nap)
            foreign = psutil.cpu_percent(_LISTEN) / 100 * (psutil.cpu_count() or 1)
            load = Load(nodes, envs, _true(nap))
            stepped, rolled = _stepping_rate(env), _rollout_rate(env, load)
            yield Check(load, nap, foreign, stepped, ways.by_step(load), rolled, ways.by_rollout(load))
            print(f"{nodes} nodes, {envs} envs each, {1e3 * nap:g} ms: {stepped:,.0f} and {rolled:,.0f}", flush=True)


def _true(nap: float) -> float:
    """Return how long a nap of so many seconds really takes."""
    return _typical(lambda: time.sleep(nap), 0.3)


def _stepping_rate(env: ParallelEnv) -> float:
    actions = np.zeros(len(env), np.int64)
    _typical(lambda: env.step(actions), _CHECK / 5)
    return len(env) / _typical(lambda: env.step(actions), _CHECK)


def _rollout_rate(env: ParallelEnv, load: Load) -> float:
    """Return the rate of rollouts in which chunks have their full length for most of the time."""
    length = max(10, int(_CHECK / (load.envs * load.step)))
    return len(env) * length / _typical(lambda: env.rollout(rest, length), 3 * _CHECK)


def _typical(call: Callable[[], Any], seconds: float) -> float:
    """Return the seconds that a call takes, in the median."""
    found, end = [], time.perf_counter() + seconds
    while time.perf_counter() < end:
        begin = time.perf_counter()
        call()
        found.append(time.perf_counter() - begin)
    return median(found)


if __name__ == "__main__":
    main()
