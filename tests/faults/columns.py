"""The modes and start methods in which every fault is provoked."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from modes import ON_RAY, ORACLE, PROCESSES, RAY, RAY_POOLS, THREADS

from faults.envs import NUM_ENVS, actions, faulty
from parallelenv import ParallelEnv


@dataclass(frozen=True)
class Column:
    """One way to run envs."""

    mode: str
    start_method: str | None = None

    @property
    def name(self) -> str:
        return f"{self.mode}/{self.start_method}" if self.start_method else self.mode

    @property
    def needs_ray(self) -> bool:
        return self.mode in ON_RAY

    @property
    def shutdown(self) -> float:
        """Seconds that the mode needs to shut down with the interpreter: Ray took 1.6."""
        return 2.5 if self.needs_ray else 0.0

    def startup(self, what: str) -> float:
        """Seconds that Ray needs to start a replacement: an empty actor took 1.7 to 2.7 on a busy machine."""
        has_actor = {"": False, "worker": self.mode == RAY, "pool": self.needs_ray}[what]
        return 2.0 if has_actor else 0.0

    def make(self, folder: Path, env_fns: list[Any] | None = None, **options: Any) -> ParallelEnv:
        """Return envs in two workers."""
        if self.start_method:
            options["start_method"] = self.start_method
        return ParallelEnv(env_fns or faulty(folder), self.mode, **{"num_cpus": 2, **options})


COLUMNS = (
    Column(ORACLE),
    Column(THREADS),
    Column(PROCESSES, "forkserver"),
    Column(PROCESSES, "spawn"),
    Column(PROCESSES, "fork"),
    Column(RAY),
    Column(RAY_POOLS),
)


def step_all(env: ParallelEnv) -> float:
    """Step every env and return the time at which all had replied."""
    result = env.step(actions())
    moment = time.monotonic()
    assert result.env_ids.tolist() == list(range(NUM_ENVS))
    assert result.states[:, 0].tolist() == list(range(NUM_ENVS))
    assert not result.dones.any()
    return moment


def begin_all(env: ParallelEnv) -> float:
    """Reset and step every env, and return the time at which all had replied."""
    assert env.reset().tolist() == [[number, 0] for number in range(NUM_ENVS)]
    moment = step_all(env)
    assert env.get_env_attr("steps") == [1] * NUM_ENVS
    return moment
