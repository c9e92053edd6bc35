"""Recommends a mode for given envs; used by ``para_mode="auto"``."""

from __future__ import annotations

import multiprocessing
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from parallelenv.autotune import measure
from parallelenv.autotune.costs import Candidate, EnvMeasurements, Resources, candidates, simplest_of_fastest
from parallelenv.contract import arguments, env_specs
from parallelenv.contract.batch import Array
from parallelenv.contract.cpu_cores import usable_cores
from parallelenv.contract.env_specs import EnvFactory
from parallelenv.contract.error_text import count, duration, one_line
from parallelenv.contract.spaces import Spaces
from parallelenv.errors import UnpicklableError

_SAFE = "dummy"  # correct for every env; at most num_cores times slower than the fastest


@dataclass(frozen=True, slots=True)
class Recommendation:
    """A recommended mode and the reason. ``str()`` gives one line.

    Attributes:
        mode: The word for ``para_mode``.
        num_cpus: Number of workers.
        options: Options of the mode's backend.
        reason: The reason, in one line.
        step_cost: Seconds per step of one env; ``None`` if no env could be tried.
        state_nbytes: Bytes of a state; ``None`` likewise.
        releases_gil: Whether threads can step the envs in parallel; ``None`` likewise, and if steps
            are too short to tell.
    """

    mode: str
    num_cpus: int
    options: dict[str, Any] = field(default_factory=dict)
    reason: str = ""
    step_cost: float | None = None
    state_nbytes: int | None = None
    releases_gil: bool | None = None

    @property
    def arguments(self) -> dict[str, Any]:
        """The keyword arguments: ``ParallelEnv(envs, **recommend(envs).arguments)``."""
        return {"para_mode": self.mode, "num_cpus": self.num_cpus, **self.options}

    @property
    def label(self) -> str:
        """Mode and options, in short form."""
        return ", ".join([self.mode, *self.options])

    def __str__(self) -> str:
        written = ", ".join(f"{name}={value!r}" for name, value in self.arguments.items())
        return f"{written}: {self.reason}"


def recommend(envs: Sequence[Any], *, num_cpus: int | None = None, spaces: Spaces | None = None) -> Recommendation:
    """Try envs for a moment and return the mode that is estimated to step them fastest.

    One additional env is made in this process, stepped for some 0.2 s with random actions (three times if a step takes
    longer) and closed; if the list has different env fns, up to three. Live instances are copied and the copies tried
    in a separate process; the instances are not touched.

    Args:
        envs: See `ParallelEnv`.
        num_cpus: Number of workers if more than one is useful. By default the number with the shortest
            estimated time: up to the usable cores, more if the envs mostly wait.
        spaces: See `ParallelEnv`.

    Returns:
        Mode, number of workers and options, with the reason. ``"dummy"`` if no env can be tried; never
        a Ray mode.

    Raises:
        ArgumentError: If ``num_cpus`` or ``spaces`` has an invalid value.
        InvalidEnvError: If an item of ``envs`` is not an env, or appears twice.
    """
    num_cpus = arguments.check_counts(num_cpus, 0)
    return choose(env_specs.make_factories(envs), num_cpus, arguments.check_spaces(spaces))


def choose(
    env_factories: Sequence[EnvFactory],
    num_cpus: int | None,
    spaces: Spaces | None = None,
    seed: int | None = None,
    shared: Mapping[str, Array] | None = None,
) -> Recommendation:
    """Return the result of `recommend`, for envs that may ask for a seed and shared arrays when they are made."""
    has_instances = any(factory.is_live for factory in env_factories)
    if has_instances and (obstacle := _obstacle(env_factories)):
        return _unknown(f"Instances are not stepped for a trial, and copies of them are not to be had: {obstacle}")
    try:
        figures = measure.measure(env_factories, spaces, seed, shared)
    except Exception as error:  # noqa: BLE001 (envs raise anything; whoever uses them will see it)
        return _unknown(f"No env could be tried: {one_line(error)}")
    cores = usable_cores()
    resources = Resources(len(env_factories), min(cores, num_cpus or cores), num_cpus)
    best, obstacle = _best(figures, resources, env_factories)
    reason = _reason(best, figures, resources, obstacle)
    if has_instances:
        reason += " Workers get copies of the instances." if best.leaves else " Copies of the instances were tried."
    return Recommendation(
        best.mode,
        best.workers,
        best.options,
        reason,
        figures.step_cost,
        figures.state_nbytes,
        figures.releases_gil,
    )


def _unknown(why: str) -> Recommendation:
    return Recommendation(_SAFE, 1, reason=f"{why}. Without figures the plain loop is the safe choice.")


def _best(figures: EnvMeasurements, resources: Resources, env_factories: Sequence[EnvFactory]) -> tuple[Candidate, str]:
    """Return the best candidate; and, if a better one was not possible, why."""
    best = simplest_of_fastest(candidates(figures, resources))
    if best.leaves and (obstacle := _obstacle(env_factories)):
        return simplest_of_fastest(candidates(figures, replace(resources, may_leave=False))), obstacle
    return best, ""


def _obstacle(env_factories: Sequence[EnvFactory]) -> str:
    """Return why envs cannot be stepped in other processes; empty if they can."""
    if multiprocessing.current_process().daemon:
        return "this process is a daemonic one of multiprocessing, which may not start processes"
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the actual transfer warns of what gets lost
            env_specs.pack_factories(env_factories)
    except UnpicklableError as error:
        return f"they do not pickle ({one_line(error.__cause__ or error)})"
    return ""


def _reason(best: Candidate, figures: EnvMeasurements, resources: Resources, obstacle: str) -> str:
    parts = [_describe(figures), _compare(best, figures, resources)]
    if obstacle:
        parts.append(f"Other processes are out of the question: {obstacle}.")
    if best.caller_steps:
        parts.append("The caller steps a share of the envs itself, which are not isolated from it.")
    return " ".join(parts)


def _describe(figures: EnvMeasurements) -> str:
    waits = ", mostly waiting," if figures.waits else ""
    lock = {None: "", True: " and releases the GIL", False: " and holds the GIL"}[figures.releases_gil]
    return f"A step takes {duration(figures.step_cost)}{waits}{lock}; a state has {figures.state_nbytes} bytes."


def _compare(best: Candidate, figures: EnvMeasurements, resources: Resources) -> str:
    envs, cores = count(resources.num_envs, "env"), count(resources.cores, "core")
    if best.workers == 1:
        return f"With {envs} on {cores} no mode open to them is clearly faster than a plain loop."
    alone = candidates(figures, resources)[0].seconds
    times = f"{alone / best.seconds:.1f} times as fast as a plain loop"
    return f"{best.workers} workers are estimated to be {times}, with {envs} on {cores}."
