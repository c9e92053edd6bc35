"""What a step pays for being recorded, and for its episodes being counted.

Usage: python -m benchmarks.profile_cost [--quick]

Rounds with and without take turns in one process, in changing order, and their ratios are shown: medians, each with the
middle half of the rounds behind it. Wall time is what a user notices. CPU time is the caller's alone; of `dummy`, which
has nobody else, it is the better figure on a machine that others use too. A round that is recorded is in a block of its
own. Its first steps are all noted, quick or not; they are left out here.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import numpy as np

from benchmarks.envs import BLACKJACK, BRIEF, CARTPOLE, EnvKind, Timed
from parallelenv import ParallelEnv
from parallelenv.contract.batch import Batch
from parallelenv.contract.error_text import format_table
from parallelenv.engine.episode_stats import EpisodeStats
from parallelenv.worker.tracer import NUM_FIRST

_SECONDS = 0.15
"""That a round takes."""
_NUM_ROUNDS, _NUM_QUICK_ROUNDS = 60, 12
_IDLE = EnvKind("does nothing", Timed, {})
_SHORT = EnvKind("0.1 ms", Timed, {"seconds": 1e-4})
_CASES: tuple[tuple[EnvKind, int, str, dict[str, Any]], ...] = (
    (CARTPOLE, 1, "dummy", {}),
    (CARTPOLE, 16, "dummy", {}),
    (CARTPOLE, 16, "thread", {"num_cpus": 2}),
    (CARTPOLE, 16, "subproc", {"num_cpus": 2}),
    (CARTPOLE, 16, "subproc", {"num_cpus": 2, "caller_steps": True}),
    (_IDLE, 1, "dummy", {}),
    (_IDLE, 16, "dummy", {}),
    (BLACKJACK, 1, "dummy", {}),
    (BLACKJACK, 16, "dummy", {}),
    (BRIEF, 1, "dummy", {}),
    (BRIEF, 16, "dummy", {}),
    (_SHORT, 1, "dummy", {}),
    (_SHORT, 16, "dummy", {}),
    (_SHORT, 16, "subproc", {"num_cpus": 2}),
)
Around = Callable[[ParallelEnv], AbstractContextManager[Any]]


@dataclass(frozen=True, slots=True)
class Times:
    """What steps took.

    Attributes:
        wall: ``(num_rounds,)`` float64: seconds a step.
        cpu: Likewise, CPU time of this process.
        sampled: Of the last round, how much was noted.
    """

    wall: Any
    cpu: Any
    sampled: float = 1.0


@contextlib.contextmanager
def recorded(env: ParallelEnv) -> Iterator[Any]:
    """Record, and step until the first steps are over."""
    with env.profile() as profile:
        step(env, NUM_FIRST)
        yield profile


def step(env: ParallelEnv, num_steps: int) -> None:
    """Step all envs; actions are drawn before."""
    for row in np.random.default_rng(0).integers(0, 2, (num_steps, len(env))):
        env.step(row)


def measure(env: ParallelEnv, num_steps: int) -> tuple[float, float]:
    """Return wall and CPU time of a step."""
    rows = list(np.random.default_rng(0).integers(0, 2, (num_steps, len(env))))
    for row in rows[:32]:
        env.step(row)
    wall, cpu = time.perf_counter(), time.process_time()
    for row in rows:
        env.step(row)
    return (time.perf_counter() - wall) / num_steps, (time.process_time() - cpu) / num_steps


def compare(env: ParallelEnv, without: Around, around: Around, num_rounds: int) -> tuple[Times, Times]:
    """Return the times of rounds without and with something, that took turns."""
    env.reset(seed=0)
    num_steps = max(50, int(_SECONDS / measure(env, 100)[0]))
    found: tuple[list[Any], list[Any]] = [], []
    sampled = 1.0
    for number in range(num_rounds):
        for which in (number % 2, 1 - number % 2):
            with (without, around)[which](env) as entered:
                found[which].append(measure(env, num_steps))
            if hasattr(entered, "summary"):
                sampled = entered.summary().sampled
    off, on = (np.array(times).T for times in found)
    return Times(*off), Times(*on, sampled)


def ratios(off: Any, on: Any) -> str:
    """Return by how much longer steps took: the median, and the middle half."""
    quarter, middle, three = np.percentile(on / off - 1, (25, 50, 75))
    return f"{middle:+.1%} ({quarter:+.1%} .. {three:+.1%})"


def show_profile(num_rounds: int) -> None:
    """Print what recording costs."""
    rows = []
    for kind, num_envs, mode, options in _CASES:
        with ParallelEnv(kind.env_fns(num_envs), mode, "restart", **options) as env:
            off, on = compare(env, contextlib.nullcontext, recorded, num_rounds)
        name = mode + (", caller steps" if "caller_steps" in options else "")
        usual = f"{1e6 * np.median(off.wall):.1f}"
        shown = [ratios(off.wall, on.wall), ratios(off.cpu, on.cpu) if mode == "dummy" else ""]
        rows.append((f"{num_envs} x {kind.title}", name, usual, *shown, f"{on.sampled:.0%}"))
    columns = ("envs", "mode", "us a step", "recorded: wall", "CPU", "noted")
    print(format_table(columns, rows, left=("envs", "mode")))


class Silent(EpisodeStats):
    """Counts nothing."""

    def settle(self) -> None:
        self.log.clear()
        self._begun.clear()


@contextlib.contextmanager
def uncounted(env: ParallelEnv) -> Iterator[None]:
    """Count no episodes: steps are logged as a constant, and never summed up."""
    batch: Batch = env.engine.pool.batch
    episodes = env.engine.table
    before = batch.outcome, episodes.score
    batch.outcome, episodes.score = bytes, Silent(len(env))
    try:
        yield
    finally:
        batch.outcome, episodes.score = before


def show_counting(num_rounds: int) -> None:
    """Print what counting costs."""
    rows = []
    for num_envs in (1, 16, 256):
        with ParallelEnv(CARTPOLE.env_fns(num_envs), "dummy", "restart") as env:
            off, on = compare(env, uncounted, contextlib.nullcontext, num_rounds)
        usual = f"{1e6 * np.median(off.cpu):.1f}"
        rows.append((f"{num_envs} x {CARTPOLE.title}", usual, ratios(off.wall, on.wall), ratios(off.cpu, on.cpu)))
    print(format_table(("dummy", "us a step", "counted: wall", "CPU"), rows, left=("dummy",)))


def main(*arguments: str) -> None:
    """Print both tables."""
    num_rounds = _NUM_QUICK_ROUNDS if "--quick" in arguments else _NUM_ROUNDS
    show_profile(num_rounds)
    print()
    show_counting(num_rounds)


if __name__ == "__main__":
    main(*sys.argv[1:])
