"""The table of cases: their envs, their systems, and the targets of this package."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from benchmarks.envs import (
    CARTPOLE,
    HALF_CHEETAH,
    HIGHWAY,
    KILOBYTE,
    LUNAR_LANDER,
    MINIGRID,
    PONG,
    SLEEPER,
    STILL,
    TEXTS,
    EnvKind,
    timed,
)
from benchmarks.systems import BARE, BY_NAME, IN_PROCESS_PEER, OURS, PROCESS_PEER, SIDE_BY_SIDE, SYSTEMS, System

LIMIT = "limit"  # the rate of as many bare loops as there are usable cores, which no system can exceed

# The meaning and the format of each number.
UNITS: dict[str, tuple[str, str]] = {
    "rate": ("env steps/s", ",.0f"),
    "ready_s": ("s until the first states", ".2f"),
    "pss_mb": ("MB of PSS per worker", ",.0f"),
    "uss_mb": ("MB of USS per worker", ",.0f"),
    "rss_mb": ("MB of RSS per worker", ",.0f"),
    "cold_s": ("s, first pool of an interpreter", ".2f"),
    "warm_s": ("s, a later pool", ".2f"),
    "methods": ("method calls/s", ",.0f"),
    "attributes": ("attribute reads/s", ",.0f"),
    "step_rate": ("transitions/s by step", ",.0f"),
    "recv_rate": ("transitions/s by send and recv", ",.0f"),
    "gain": ("x as many transitions/s by send and recv", ".2f"),
    "cpu_percent": ("% of one core", ".2f"),
    "slope": ("log-log slope of step time against envs", ".3f"),
    "pss_growth_mb": ("MB more PSS, caller and workers", ".2f"),
    "rss_growth_mb": ("MB more RSS, caller and workers", ".2f"),
    "fd_growth": ("more file descriptors", ".0f"),
    "store_growth_mb": ("MB more in Ray's object store", ".2f"),
    "env_steps": ("env steps", ",.0f"),
    "others_percent": ("% of a core used by other programs", ".1f"),
}


@dataclass(frozen=True, slots=True)
class Target:
    """A target of one system in one case.

    Attributes:
        system: Name of the system.
        relation: ``">="``, ``"<="`` or ``">"``.
        bound: The number to reach.
        against: The reference by which the number is divided: a system's name, ``LIMIT``, or a kind of peer, which
            means the fastest peer of that kind in the same round. If empty, the bound is in the metric's own unit.
        metric: The number to compare.
        worst: Whether the worst round counts instead of the median of all rounds.
    """

    system: str
    relation: str
    bound: float
    against: str = ""
    metric: str = "rate"
    worst: bool = False


@dataclass(frozen=True, slots=True)
class Case:
    """A measurement, and the systems that take part.

    Attributes:
        name: Name of the case for ``--only`` and in ``limits.toml``.
        envs: The kind of envs.
        num_envs: Number of envs.
        systems: Names of the systems that take part.
        targets: The targets.
        probe: How the case is measured: a name in ``benchmarks.probes.PROBES``.
        rounds: Number of rounds of the bare loop and `ParallelEnv`.
        peer_rounds: Number of rounds of the other systems, most of which start one process per env. Ratios to these
            systems use only these rounds.
        seconds: Seconds for which a system is timed in each round.
        options: Keyword arguments of `ParallelEnv`.
        curve: Panel of the picture that shows the case: ``"cost"``, ``"envs"`` or ``"real"``; empty if none does.
        is_fresh: Whether each round has its own interpreter.
        with_memory: Whether the memory of the workers is measured.
        may_refuse: Whether a failure means that the system does not accept such envs.
    """

    name: str
    envs: EnvKind
    num_envs: int
    systems: tuple[str, ...]
    targets: tuple[Target, ...] = ()
    probe: str = "throughput"
    rounds: int = 5
    peer_rounds: int = 3
    seconds: float = 0.6
    options: dict[str, Any] = field(default_factory=dict)
    curve: str = ""
    is_fresh: bool = False
    with_memory: bool = False
    may_refuse: bool = False

    def rounds_of(self, system: System) -> int:
        """Return the number of rounds, from the first one, in which a system takes part."""
        if system.uses_ray:  # a peer's workers import torch one by one: 45 to 90 s for 16 workers on 2 cores
            return min(2, self.rounds) if system.kind == OURS else 1
        return self.rounds if system.name in (*ALONE, SIDE_BY_SIDE) else self.peer_rounds


def _names(*kinds: str, with_ray: bool = False) -> tuple[str, ...]:
    return tuple(system.name for system in SYSTEMS if system.kind in kinds and (with_ray or not system.uses_ray))


ALONE = ("bare", "dummy", "thread", "subproc", "caller-steps")  # no process per env, no Ray: quick to open
EVERYONE = (*ALONE, *_names(IN_PROCESS_PEER, PROCESS_PEER))
GROUPS = ("envpool", "envpool-dummy", "numpy", "numpy-subproc")  # vector envs, all of CartPoles
EVERYONE_AND_RAY = tuple(name for name in BY_NAME if name not in (SIDE_BY_SIDE, "ray-calls", *GROUPS))
# The peers in this list start one process per env, and so take part only up to the number of processes that a machine
# can run. Other peers take part only in cases of 16 envs.
CURVE = ("bare", "dummy", "thread", "subproc", "caller-steps", "gym-async", "sb3-subproc", "ts-subproc", "ts-shmem")


def above(system: str, bound: float, against: str, metric: str = "rate") -> Target:
    """Return the target that a system's number is at least ``bound`` times the number of ``against``."""
    return Target(system, ">=", bound, against, metric)


def below(system: str, metric: str, bound: float, worst: bool = False) -> Target:
    """Return the target that a system's number is at most ``bound``, in the metric's own unit."""
    return Target(system, "<=", bound, metric=metric, worst=worst)


CARTPOLES = (
    Case("cartpole-1", CARTPOLE, 1, CURVE, (above("dummy", 0.50, BARE),), curve="envs", peer_rounds=2),
    Case("cartpole-4", CARTPOLE, 4, CURVE, curve="envs", rounds=3, peer_rounds=2),
    Case(
        "cartpole-16",
        CARTPOLE,
        16,
        EVERYONE,
        (
            above("dummy", 0.92, BARE),
            Target("dummy", ">", 1.0, IN_PROCESS_PEER),
            above("subproc", 8, PROCESS_PEER),
            above("subproc", 1.1, BARE),
            above("caller-steps", 1.35, BARE),
            above("caller-steps", 15, PROCESS_PEER),
        ),
        rounds=9,
        peer_rounds=4,
        seconds=0.7,
        curve="envs",
    ),
    Case(
        "cartpole-64",
        CARTPOLE,
        64,
        CURVE,
        (above("subproc", 20, PROCESS_PEER), above("subproc", 1.4, BARE), above("caller-steps", 1.5, BARE)),
        rounds=7,
        curve="envs",
    ),
    Case(
        "cartpole-256",
        CARTPOLE,
        256,
        CURVE,
        (above("caller-steps", 1.6, BARE), above("caller-steps", 40, PROCESS_PEER)),
        rounds=7,
        peer_rounds=2,
        curve="envs",
    ),
    Case(
        "cartpole-1024",
        CARTPOLE,
        1024,
        ALONE,
        (above("subproc", 1.4, BARE), below("subproc", "ready_s", 3, worst=True), below("subproc", "pss_mb", 120)),
        rounds=7,
        curve="envs",
        with_memory=True,
    ),
    Case("cartpole-4096", CARTPOLE, 4096, ALONE, rounds=3, curve="envs"),
    Case(
        "cartpole-10000",
        CARTPOLE,
        10_000,
        ALONE,
        (
            Target("subproc", ">", 0),
            above("subproc", 1.3, BARE),
            below("subproc", "ready_s", 15, worst=True),
        ),
        rounds=4,
        curve="envs",
    ),
)

VECTOR_ENVS = (
    Case("envpool-256", CARTPOLE, 256, GROUPS[:2], (above("envpool-dummy", 0.9, "envpool"),), rounds=7, peer_rounds=7),
    Case("numpy-1024", CARTPOLE, 1024, GROUPS[2:], (above("numpy-subproc", 1.5, "numpy"),), rounds=7, peer_rounds=7),
)

STEP_COSTS = (
    Case("cost-1us", timed(1e-6, "1 us CPU"), 16, CURVE, curve="cost", rounds=3, peer_rounds=2),
    Case("cost-10us", timed(1e-5, "10 us CPU"), 16, CURVE, curve="cost", rounds=3, peer_rounds=2),
    Case(
        "cost-100us",
        timed(1e-4, "100 us CPU"),
        16,
        EVERYONE,
        (above("subproc", 0.92, LIMIT), above("caller-steps", 0.95, LIMIT)),
        rounds=7,
        curve="cost",
    ),
    Case(
        "cost-1ms",
        timed(1e-3, "1 ms CPU"),
        16,
        EVERYONE_AND_RAY,
        (above("subproc", 0.95, LIMIT), above("caller-steps", 0.96, LIMIT)),
        rounds=9,
        seconds=0.8,
        curve="cost",
    ),
    Case("cost-10ms", timed(1e-2, "10 ms CPU"), 16, CURVE, curve="cost", rounds=3, peer_rounds=2, seconds=1.0),
    Case("cost-100ms", timed(1e-1, "100 ms CPU"), 16, CURVE, curve="cost", rounds=2, peer_rounds=1, seconds=2.0),
)

FORMS = (
    Case(
        "pixels-84x84x4",
        timed(3e-4, "300 us CPU, 84x84x4 uint8", shape=(84, 84, 4), dtype="uint8"),
        16,
        EVERYONE,
        (above("subproc", 0.90, LIMIT),),
        rounds=7,
    ),
    Case(
        "pixels-210x160x3",
        timed(3e-4, "300 us CPU, 210x160x3 uint8", shape=(210, 160, 3), dtype="uint8"),
        16,
        EVERYONE,
        (above("subproc", 0.85, LIMIT),),
        rounds=7,
    ),
    Case(
        "infos",
        timed(2e-5, "20 us CPU, info of two keys every step", with_info=True),
        16,
        EVERYONE,
        (above("subproc", 5, "sb3-subproc"),),
    ),
    Case("texts", TEXTS, 16, EVERYONE, (above("subproc", 3, PROCESS_PEER),), may_refuse=True),
)

# These systems are also compared with bare loops that run at the same time. Each of these loops is slower than a loop
# that runs alone, because they share caches and memory.
_REAL = (
    *("bare", SIDE_BY_SIDE, "dummy", "thread", "subproc", "caller-steps"),
    *("gym-async", "gym-async-capped", "sb3-subproc", "ts-shmem", "torchrl"),
)
REAL = (
    Case(
        "half-cheetah",
        HALF_CHEETAH,
        16,
        _REAL,
        (above("subproc", 1.3, BARE), above("caller-steps", 1.6, BARE)),
        rounds=7,
        curve="real",
    ),
    Case("pong", PONG, 16, _REAL, (above("subproc", 0.92, SIDE_BY_SIDE),), rounds=7, seconds=0.8, curve="real"),
    Case("lunar-lander", LUNAR_LANDER, 16, _REAL, curve="real"),
    # Two peers are added because shared memory, with which most peers exchange data, cannot hold the text.
    Case("minigrid", MINIGRID, 16, (*_REAL, "gym-pipe", "ts-subproc"), may_refuse=True, curve="real"),
    Case("highway", HIGHWAY, 16, _REAL, rounds=3, peer_rounds=2, seconds=2, curve="real"),
)

# Env steps/s of the class after which `ParallelEnv` is modelled, in the Ray mode of that class. The rate was measured
# once, on another machine.
_ORIGINAL = 96
RAY = (
    Case(
        "ray",
        CARTPOLE,
        16,
        ("bare", "subproc", "ray", "ray-subproc", "ray-calls", "ts-ray"),
        (
            above("ray-calls", 15, "ts-ray"),
            Target("ray-calls", ">=", 50 * _ORIGINAL),
            above("ray", 80, "ts-ray"),
            above("ray", 0.5, "subproc"),
            above("ray-subproc", 0.4, "subproc"),
            below("ray", "ready_s", 2, worst=True),
            below("ray-subproc", "ready_s", 2, worst=True),
        ),
        probe="throughput_within_ray",
        rounds=2,
    ),
    Case(
        "rollout",
        CARTPOLE,
        64,
        ("bare", "dummy", "thread", "subproc", "ray", "ray-subproc", "ray-calls"),
        # There is no target for `thread`, because the GIL lets only one CartPole step at a time.
        (above("subproc", 1.3, BARE), above("ray", 1.3, BARE), above("ray-subproc", 1.3, BARE)),
        probe="rollout",
        seconds=1,
    ),
    Case(
        "leaks-ray",
        # Each reply contains 128 envs, because Ray puts only replies above 100 kB into its object store.
        KILOBYTE,
        256,
        ("ray", "ray-calls"),
        # A leak increases both RSS and PSS. The target is for RSS, because PSS also grows when other processes that use
        # Ray's libraries end: by up to 0.8 MB in measurements.
        tuple(
            below(system, metric, bound)
            for system in ("ray", "ray-calls")
            for metric, bound in (("store_growth_mb", 0), ("rss_growth_mb", 1), ("fd_growth", 0))
        ),
        probe="leaks",
        rounds=1,
        seconds=30,
    ),
)

OTHERS = (
    Case(
        "stragglers",
        SLEEPER,
        16,
        ("subproc",),
        (Target("subproc", ">=", 2.5, metric="gain"),),
        probe="stragglers",
        rounds=3,
        seconds=4,
        options={"num_cpus": 16},
    ),
    Case(
        "calls",
        STILL,
        64,
        ("subproc", "gym-async", "sb3-subproc", "ts-subproc"),
        (above("subproc", 10, "sb3-subproc", "methods"), above("subproc", 10, "sb3-subproc", "attributes")),
        probe="calls",
        rounds=3,
        seconds=0.8,
        options={"num_cpus": 2},
    ),
    Case(
        "start-up",
        CARTPOLE,
        64,
        ("subproc", "gym-async"),
        (below("subproc", "cold_s", 1.5), below("subproc", "warm_s", 0.5)),
        probe="start_up",
        rounds=5,
        is_fresh=True,
    ),
    Case(
        "idle",
        CARTPOLE,
        16,
        ("subproc",),
        (below("subproc", "cpu_percent", 1),),
        probe="idle",
        rounds=1,
        seconds=10,
        options={"num_cpus": 2},
    ),
    Case("growth", CARTPOLE, 4096, ("subproc",), (below("subproc", "slope", 1.02),), probe="growth", seconds=2.5),
    Case(
        "leaks",
        CARTPOLE,
        64,
        ("subproc",),
        # A megabyte allows for the variation of the allocator. It is one byte per env step, less than any object takes.
        (below("subproc", "pss_growth_mb", 1), below("subproc", "fd_growth", 0)),
        probe="leaks",
        rounds=1,
        seconds=10,
    ),
)

CASES: tuple[Case, ...] = (*CARTPOLES, *VECTOR_ENVS, *STEP_COSTS, *FORMS, *REAL, *RAY, *OTHERS)
