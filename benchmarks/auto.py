"""Compares `para_mode="auto"` with the modes that it chooses from, on the same envs and with the same actions.

The mode `auto` is opened first, and the opening is timed. Then the other modes are opened. The steps of all modes are
timed in turns, with the same number of steps in each mode, so that all modes have the same episodes and a slow moment
of the machine affects all modes. Compare the ratios, not the rates.

Usage: python -m benchmarks.auto [--only NAME...] [--rounds 9] [--seconds 0.3]
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import time
from contextlib import ExitStack
from dataclasses import dataclass
from statistics import median
from typing import Any

from benchmarks.envs import CARTPOLE, LUNAR_LANDER, SLEEPER, WHOLE_HIGHWAY, EnvKind, timed
from parallelenv import ParallelEnv
from parallelenv.contract.cpu_cores import usable_cores
from parallelenv.contract.error_text import format_table

AUTO = "auto"
CONTENDERS: dict[str, tuple[str, dict[str, Any]]] = {
    AUTO: (AUTO, {}),
    "dummy": ("dummy", {}),
    "thread": ("thread", {}),
    "subproc": ("subproc", {}),
    "caller_steps": ("subproc", {"caller_steps": True}),
}
ENOUGH = 0.9  # share of the best fixed mode's rate that `auto` must reach


@dataclass(frozen=True, slots=True)
class Case:
    """Envs to step.

    Attributes:
        name: Name of the case for ``--only``.
        kind: The kind of envs.
        num_envs: Number of envs.
        needs: Package without which the case is left out.
        most_rounds: Maximum number of rounds, for cases whose rounds take long.
    """

    name: str
    kind: EnvKind
    num_envs: int
    needs: str | None = None
    most_rounds: int = 100

    @property
    def title(self) -> str:
        """The name of the case in the table."""
        return f"{self.kind.title}, {self.num_envs} envs"


CASES = (
    Case("cartpole-2", CARTPOLE, 2),
    Case("cartpole", CARTPOLE, 16),
    Case("cartpole-64", CARTPOLE, 64),
    Case("lunar-lander", LUNAR_LANDER, 16, needs="Box2D"),
    Case("highway", WHOLE_HIGHWAY, 16, needs="highway_env", most_rounds=3),
    Case("100us", timed(100e-6, "100 us CPU"), 16),
    Case("1ms", timed(1e-3, "1 ms CPU"), 16),
    Case("sleep", SLEEPER, 16, most_rounds=5),
)


def main() -> int:
    """Measure the requested cases. Return the exit code: 1 if the choice of `auto` was too slow in any case."""
    options = _options()
    print(f"{usable_cores()} usable cores, {options.rounds} rounds in turns, medians; env steps/s")
    rows, is_enough = [], True
    for case in CASES:
        if options.only and case.name not in options.only:
            continue
        if case.needs and importlib.util.find_spec(case.needs) is None:
            print(f"{case.title}: left out, {case.needs} is not installed (it is in the extra 'bench')")
            continue
        load = _load()
        rates, opening, recommendation = _measure(case, min(options.rounds, case.most_rounds), options.seconds)
        ratio = _ratio(rates)
        is_enough = is_enough and ratio >= ENOUGH
        medians = (_rounded(median(rates[name])) for name in CONTENDERS)
        rows.append((case.title, *medians, f"{ratio:.2f}", f"{opening:.1f}"))
        print(f"{case.title} (load average {load}): {recommendation}", flush=True)
    print("\n" + format_table(("envs", *CONTENDERS, "auto/best", "opening s"), rows, left=("envs",)))
    return 0 if is_enough else 1


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.auto", description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", choices=[case.name for case in CASES], help="these cases")
    parser.add_argument("--rounds", type=int, default=9, help="number of times each is timed (default: %(default)s)")
    parser.add_argument("--seconds", type=float, default=0.3, help="seconds per timing, about (default: %(default)s)")
    return parser.parse_args()


def _rounded(rate: float) -> str:
    return f"{rate:,.0f}" if rate >= 100 else f"{rate:.3g}"


def _load() -> str:
    return f"{os.getloadavg()[0]:.2f}" if hasattr(os, "getloadavg") else "unknown"


def _measure(case: Case, rounds: int, seconds: float) -> tuple[dict[str, list[float]], float, Any]:
    """Return each contender's rates, one per round, the seconds to open `auto`, and the recommendation of `auto`."""
    actions = case.kind.draw_actions(256, case.num_envs)
    rates: dict[str, list[float]] = {name: [] for name in CONTENDERS}
    with ExitStack() as stack:
        envs, begin = {}, time.perf_counter()
        for name, (mode, options) in CONTENDERS.items():
            env = ParallelEnv(case.kind.env_fns(case.num_envs), mode, "restart", **options)
            envs[name] = stack.enter_context(env)
            if name == AUTO:
                opening = time.perf_counter() - begin
        count = _steps_in(seconds, envs["dummy"], actions)
        for turn in range(rounds):
            names = list(CONTENDERS) if turn % 2 else list(reversed(CONTENDERS))
            for name in names:
                rates[name].append(case.num_envs * _rate(envs[name], actions, count, seed=turn))
        return rates, opening, envs[AUTO].recommendation


def _steps_in(seconds: float, env: ParallelEnv, actions: Any) -> int:
    """Return the number of steps that take about ``seconds``."""
    return max(2, round(seconds * _rate(env, actions, 2, seed=0)))


def _rate(env: ParallelEnv, actions: Any, count: int, seed: int) -> float:
    """Return steps per second. In a round, all contenders start from the same first states."""
    env.reset(seed=1000 * seed)
    env.step(actions[0])  # not timed: wakes workers that slept in the meantime
    begin = time.perf_counter()
    for number in range(count):
        env.step(actions[number % len(actions)])
    return count / (time.perf_counter() - begin)


def _ratio(rates: dict[str, list[float]]) -> float:
    """Return the speed of `auto` relative to the fixed mode whose median rate was the highest.

    A ratio is taken within each round, because the machine may be shared; the result is the median of the ratios.
    """
    best = max((name for name in rates if name != AUTO), key=lambda name: median(rates[name]))
    return median(ours / theirs for ours, theirs in zip(rates[AUTO], rates[best], strict=True))


if __name__ == "__main__":
    raise SystemExit(main())
