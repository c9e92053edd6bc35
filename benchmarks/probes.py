"""The measurements of a system. A probe opens the system, measures it, closes it, and returns numbers.

Probes run in the process of one system; `benchmarks.child` calls them.
"""

from __future__ import annotations

import gc
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from benchmarks.cases import Case
from benchmarks.disturbance import CpuTimes, Disturbance, Numbers
from benchmarks.envs import lean
from benchmarks.systems import Opened, System, start_ray

SEED = 0
_ROWS = 1000  # batches of actions made beforehand, used in turns
_WARM_UP = 0.2
"""Seconds. Processes that were just started may share a core for a while even if a different core is free."""
_GROWTH = (16, 64, 256, 1024, 4096)  # numbers of envs
_ROLLOUT = 200  # steps
_LEAK_STEPS = 1_000_000  # of single envs
_RAY_CALLS = 16_000
"""Calls of each actor before memory is measured. In a program with two Ray actors and no pool, the caller grew by 3.3
MB from the 4,700th to the 16,400th round of calls, and an actor grew by 1.7 MB. In the next 8,000 rounds, the caller
grew by 0.3 MB, and the actor did not grow."""
_REPORT = 2.0  # seconds in which Ray reports the use of its object store; usually it takes less than one second
_HELPERS = ("multiprocessing.forkserver", "multiprocessing.resource_tracker", "/ray/")  # parts of command lines
_MB = 1e6

Probe = Callable[[System, Case, float, Disturbance], Numbers]


@contextmanager
def opened(system: System, case: Case, num_envs: int, disturbance: Disturbance) -> Iterator[Opened]:
    """Open and reset a system. Close the system at the end of the block, even after an error.

    The CPU time of other programs is read before the system is closed. Later, the time of workers that have ended would
    count as that of other programs, unless some process has waited for them.
    """
    has_ray = system.uses_ray and sys.modules["ray"].is_initialized()
    before = CpuTimes.now()
    begin = time.perf_counter()
    running = system.opener(case.envs.env_fns(num_envs), case.options if system.kind == "ours" else {})
    try:
        running.reset(SEED)
        running.ready_s = time.perf_counter() - begin
        ready = CpuTimes.now()
        yield running
        disturbance.note(before, ready, CpuTimes.now())
    finally:
        running.close()
        gc.collect()  # so that the collection does not run while the next system is timed
        if system.uses_ray and not has_ray:
            sys.modules["ray"].shutdown()  # pools leave Ray running, and Ray always uses some CPU time


def throughput(system: System, case: Case, seconds: float, disturbance: Disturbance) -> Numbers:
    """Return the rate of env steps, and the time until the first states."""
    with opened(system, case, case.num_envs, disturbance) as running:
        numbers = {"ready_s": running.ready_s}
        if running.rate is not None:
            numbers["rate"] = running.rate(_actions(case, case.num_envs), _WARM_UP, seconds)
        else:
            numbers["rate"] = case.num_envs / _step_time(running, case, case.num_envs, seconds)
        if case.with_memory and system.kind == "ours":
            numbers |= _memory_per_worker()
    return numbers


def throughput_within_ray(system: System, case: Case, seconds: float, disturbance: Disturbance) -> Numbers:
    """Measure the same as `throughput`. If the system uses Ray, Ray is already running."""
    with _running_ray(system):
        return throughput(system, case, seconds, disturbance)


@contextmanager
def _running_ray(system: System) -> Iterator[None]:
    """Run Ray during the block if the system uses Ray."""
    if not system.uses_ray:
        yield
        return
    import ray

    start_ray()
    try:
        yield
    finally:
        ray.shutdown()


def rollout(system: System, case: Case, seconds: float, disturbance: Disturbance) -> Numbers:
    """Return the rate of env steps in rollouts of `_ROLLOUT` steps. If the system uses Ray, Ray is already running."""
    with _running_ray(system), opened(system, case, case.num_envs, disturbance) as running:

        def play(policy: Any) -> None:
            running.rollout(policy, _ROLLOUT)

        return {"rate": case.num_envs * _ROLLOUT / _repeat(play, [lean], seconds)}


def growth(system: System, case: Case, seconds: float, disturbance: Disturbance) -> Numbers:
    """Return the exponent with which the time of a step grows with the number of envs; 1 means proportional growth."""
    times = []
    for num_envs in _GROWTH:
        with opened(system, case, num_envs, disturbance) as running:
            times.append(_step_time(running, case, num_envs, seconds / len(_GROWTH)))
    slope = np.polyfit(np.log(_GROWTH), np.log(times), 1)[0]
    return {"slope": float(slope)}


def calls(system: System, case: Case, seconds: float, disturbance: Disturbance) -> Numbers:
    """Return the rates per second of calling a method of every env, and of reading an attribute of every env."""
    numbers = {}
    with opened(system, case, case.num_envs, disturbance) as running:
        if running.method is not None:
            numbers["methods"] = 1 / _repeat(running.method, ["total"], seconds / 2)
        if running.attribute is not None:
            numbers["attributes"] = 1 / _repeat(running.attribute, ["seconds"], seconds / 2)
    return numbers


def stragglers(system: System, case: Case, seconds: float, disturbance: Disturbance) -> Numbers:
    """Return the rate of transitions if every step waits for all envs, the rate with `recv`, and the ratio of both."""
    with opened(system, case, case.num_envs, disturbance) as running:
        by_step = case.num_envs / _step_time(running, case, case.num_envs, seconds / 2)
        by_recv = _first_come_rate(running.env, case, seconds / 2)
    return {"step_rate": by_step, "recv_rate": by_recv, "gain": by_recv / by_step}


def start_up(system: System, case: Case, seconds: float, disturbance: Disturbance) -> Numbers:
    """Return the time until the first states, for the first and for the second pool of an interpreter."""
    times = []
    for _ in range(2):
        with opened(system, case, case.num_envs, disturbance) as running:
            times.append(running.ready_s)
    return {"cold_s": times[0], "warm_s": times[1]}


def idle(system: System, case: Case, seconds: float, disturbance: Disturbance) -> Numbers:
    """Return the CPU use of an idle pool, in % of a core."""
    with opened(system, case, case.num_envs, disturbance) as running:
        _step_time(running, case, case.num_envs, 0.2)
        time.sleep(0.5)  # until all workers have stopped spinning
        before, begin = _cpu_seconds(), time.perf_counter()
        time.sleep(seconds)
        used, wall = _cpu_seconds() - before, time.perf_counter() - begin
    return {"cpu_percent": 100 * used / wall}


def leaks(system: System, case: Case, seconds: float, disturbance: Disturbance) -> Numbers:
    """Return the resources that a million env steps leave in use. A shorter run makes proportionally fewer steps.

    The results do not depend on other programs, so the CPU time of other programs is not measured.
    """
    rows = _actions(case, case.num_envs)
    share = min(1.0, seconds / case.seconds)
    batches = -(-int(_LEAK_STEPS * share) // case.num_envs)
    with _running_ray(system), opened(system, case, case.num_envs, Disturbance()) as running:
        if system.uses_ray:
            _fill_ray(running.env, int(_RAY_CALLS * share))
        _many(running.step, rows, max(200, batches // 5))  # fills caches and memory arenas
        before = _holdings()
        _many(running.step, rows, batches)
        after = _holdings()
    return {**{key: after[key] - before[key] for key in after}, "env_steps": batches * case.num_envs}


PROBES: dict[str, Probe] = {
    probe.__name__: probe
    for probe in (throughput, throughput_within_ray, rollout, growth, calls, stragglers, start_up, idle, leaks)
}


def _step_time(running: Opened, case: Case, num_envs: int, seconds: float) -> float:
    return _repeat(running.step, _actions(case, num_envs), seconds)


def _actions(case: Case, num_envs: int) -> list[Any]:
    rows = max(16, min(_ROWS, 1_000_000 // num_envs))
    return case.envs.draw_actions(rows, num_envs)


def _repeat(call: Callable[[Any], Any], arguments: list[Any], seconds: float) -> float:
    """Return the mean seconds that a call takes, after a warm-up."""
    _timed(call, arguments, _WARM_UP)
    return _timed(call, arguments, seconds)


def _timed(call: Callable[[Any], Any], arguments: list[Any], seconds: float) -> float:
    count, length = 0, len(arguments)
    begin = now = time.perf_counter()
    while count == 0 or now - begin < seconds:
        call(arguments[count % length])
        count += 1
        now = time.perf_counter()
    return (now - begin) / count


def _many(step: Callable[[Any], Any], rows: list[Any], count: int) -> None:
    for index in range(count):
        step(rows[index % len(rows)])


def _fill_ray(env: Any, calls: int) -> None:
    """Step one env of each actor until Ray's record of the latest calls is full."""
    env_ids = list(range(0, len(env), len(env) // env.num_workers))
    for _ in range(calls):
        env.step([0] * len(env_ids), env_ids)


def _first_come_rate(env: Any, case: Case, seconds: float) -> float:
    """Return transitions/s when each env gets its next action as soon as four are ready."""
    row = _actions(case, case.num_envs)[0]
    received = 0
    env.send(row)
    begin = now = time.perf_counter()
    while now - begin < seconds:
        ready = env.recv(min_envs=4).env_ids
        env.send(row[ready], id=ready)
        received += len(ready)
        now = time.perf_counter()
    env.recv(min_envs=case.num_envs)
    return received / (now - begin)


def _family() -> tuple[Any, list[Any], list[Any]]:
    """Return this process, its workers, and the helpers of multiprocessing and of Ray, which have no envs."""
    import psutil  # here, so that no worker of a peer has to import it

    caller = psutil.Process()
    family = caller.children(recursive=True)
    helpers = [process for process in family if _is_helper(process)]
    return caller, [process for process in family if process not in helpers], helpers


def _is_helper(process: Any) -> bool:
    """Return whether a process has no envs.

    A fork server has no envs, but the workers that it made have envs and the same command line. Our fork servers are
    known by id; those of others are children of this process, and their workers are not.
    """
    ours = sys.modules.get("parallelenv.backends._fork_server_client")
    if ours is not None and process.pid in {
        server.pid for server in (ours.SERVERS.root, *ours.SERVERS.servers) if server
    }:
        return True
    command = " ".join(process.cmdline())
    if command.startswith("ray::"):
        return not command.startswith("ray::Ray")  # as the names of our actors do
    return process.ppid() == os.getpid() and any(word in command for word in _HELPERS)


def _memory(process: Any) -> tuple[float, float, float]:
    """Return PSS, USS and RSS in MB. PSS exists only on Linux; elsewhere USS replaces it."""
    memory = process.memory_full_info()
    return getattr(memory, "pss", memory.uss) / _MB, memory.uss / _MB, memory.rss / _MB


def _memory_per_worker() -> Numbers:
    """Return the workers' mean memory. Empty if the envs are in this process."""
    _, workers, _ = _family()
    if not workers:
        return {}
    means = np.mean([_memory(worker) for worker in workers], axis=0)
    return dict(zip(("pss_mb", "uss_mb", "rss_mb"), map(float, means), strict=True))


def _holdings() -> Numbers:
    """Return the total memory and descriptors of the caller and its workers, and the use of Ray's object store."""
    gc.collect()
    caller, workers, _ = _family()
    memory = np.sum([_memory(process) for process in (caller, *workers)], axis=0)
    descriptors = sum(process.num_fds() for process in (caller, *workers))
    found = {"pss_growth_mb": float(memory[0]), "rss_growth_mb": float(memory[2]), "fd_growth": descriptors}
    return found | _object_store()


def _object_store() -> Numbers:
    """Return the use of Ray's object store. Empty if Ray is not running."""
    ray = sys.modules.get("ray")
    if ray is None or not ray.is_initialized():
        return {}
    time.sleep(_REPORT)
    total, free = (found().get("object_store_memory", 0) for found in (ray.cluster_resources, ray.available_resources))
    return {"store_growth_mb": (total - free) / _MB}


def _cpu_seconds() -> float:
    """Return the CPU time of the caller, its workers and their helpers."""
    caller, workers, helpers = _family()
    times = [process.cpu_times() for process in (caller, *workers, *helpers)]
    return sum(time.user + time.system for time in times)
