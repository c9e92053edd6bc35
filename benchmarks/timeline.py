"""Shows where the time of one step goes, as the caller sees it.

Usage: python -m benchmarks.timeline [subproc | caller-steps | dummy] [NUM_ENVS]

A time stamp is taken at each entry and exit of the functions in ``_STAMPED``; each stamp takes 0.1 us. The output is
the median time of each stamp in the steps that took the most frequent path, in microseconds since the call of `step`.
"""

from __future__ import annotations

import sys
import time
from collections import defaultdict
from typing import Any

import numpy as np

from benchmarks.envs import CARTPOLE
from parallelenv import ParallelEnv
from parallelenv.backends._bell import Bell, BellStep
from parallelenv.backends._in_process import CallerStep
from parallelenv.engine.assemble import Assembler
from parallelenv.engine.engine import Engine
from parallelenv.engine.step_plan import StepPlan
from parallelenv.worker.host import Host

_STEPS = 4000
_MODES: dict[str, tuple[str, dict[str, Any]]] = {
    "dummy": ("dummy", {}),
    "subproc": ("subproc", {}),
    "caller-steps": ("subproc", {"caller_steps": True}),
}
_STAMPED = (
    (StepPlan, "step"),
    (BellStep, "send"),
    (Bell, "ring"),
    (BellStep, "wait"),
    (CallerStep, "wait"),
    (Host, "step"),
    (StepPlan, "_result"),
    (Assembler, "infos"),
    # The general path, for steps that are not planned.
    (Engine, "submit_step"),
    (Engine, "collect_step"),
)

_stamps: list[tuple[str, float]] = []


def _stamp(kind: Any, name: str) -> None:
    """Make a method record the times of its entry and exit."""
    method = getattr(kind, name)

    def stamped(*arguments: Any, **keywords: Any) -> Any:
        _stamps.append((f"> {kind.__name__}.{name}", time.perf_counter()))
        answer = method(*arguments, **keywords)
        _stamps.append((f"< {kind.__name__}.{name}", time.perf_counter()))
        return answer

    setattr(kind, name, stamped)


def _record(env: ParallelEnv, num_envs: int) -> dict[tuple[str, ...], list[list[float]]]:
    """Return the times of all stamps of each step, by the path that the step took."""
    actions = CARTPOLE.draw_actions(_STEPS, num_envs)
    found = defaultdict(list)
    for row in actions:
        _stamps.clear()
        begin = time.perf_counter()
        env.step(row)
        _stamps.append(("end", time.perf_counter()))
        found[tuple(name for name, _ in _stamps)].append([1e6 * (moment - begin) for _, moment in _stamps])
    return found


def main(system: str = "subproc", num_envs: str = "16") -> None:
    """Print the timeline of a step."""
    mode, options = _MODES[system]
    for kind, name in _STAMPED:
        _stamp(kind, name)
    with ParallelEnv(CARTPOLE.env_fns(int(num_envs)), mode, "restart", **options) as env:
        env.reset(seed=0)
        found = _record(env, int(num_envs))
    way = max(found, key=lambda names: len(found[names]))
    print(f"{system}, {num_envs} CartPoles: the path of {len(found[way])} of {_STEPS} steps")
    before = 0.0
    for name, moment in zip(way, np.median(found[way], axis=0), strict=True):
        print(f"{moment:8.1f}  +{moment - before:6.1f}  {name}")
        before = moment


if __name__ == "__main__":
    main(*sys.argv[1:3])
