"""Recommends a mode for given envs; used by ``para_mode="auto"``."""

from __future__ import annotations

import functools
import multiprocessing
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from parallelenv.autotune.trial import Candidate, Trial, TrialResult
from parallelenv.contract import arguments, env_specs
from parallelenv.contract.batch import Array
from parallelenv.contract.cpu_cores import usable_cores
from parallelenv.contract.env_specs import EnvFactory
from parallelenv.contract.error_text import count, duration, number, one_line
from parallelenv.contract.spaces import Spaces
from parallelenv.errors import UnpicklableError


@dataclass(frozen=True, slots=True)
class Recommendation:
    """A recommended mode and the reason. ``str()`` gives one line.

    Attributes:
        mode: The word for ``para_mode``.
        num_cpus: Number of workers.
        options: Options of the mode's backend.
        reason: The reason, in one line.
        step_cost: Seconds per step of one env in ``"dummy"``; ``None`` if no env could be tried.
        releases_gil: Whether threads stepped the envs clearly faster than a loop; ``None`` if threads were not tried.
    """

    mode: str
    num_cpus: int
    options: dict[str, Any] = field(default_factory=dict)
    reason: str = ""
    step_cost: float | None = None
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


def recommend(
    envs: Sequence[Any], *, num_cpus: int | None = None, spaces: Spaces | None = None, caller_busy: bool = False
) -> Recommendation:
    """Try the modes on envs for a moment and return the fastest, or a simpler one that is about as fast.

    Each mode that could be faster than the best so far is stepped with random actions for some tenths of a second, with
    one real env per worker (one of each kind if the list has different env fns, up to three), which all env ids of the
    worker share. They are closed afterwards. Live instances are copied and the copies tried in separate processes; the
    instances are not touched. If a step takes longer than 0.05 s, or making and resetting an env longer than 1 s, only
    ``"dummy"`` is tried, with one env, and the mode is estimated from its figures.

    Args:
        envs: See `ParallelEnv`.
        num_cpus: Number of workers if more than one is useful. By default the fastest of several numbers: up to the
            usable cores, more if the envs mostly wait.
        spaces: See `ParallelEnv`.
        caller_busy: Whether your process computes while envs step, such as a policy on the CPU that acts for one half
            of the envs while the other half is stepped (`ParallelEnv.send`, `ParallelEnv.recv`). The trial then does
            so too, and tries one worker less than there are cores as well.

    Returns:
        Mode, number of workers and options, with the reason. ``"dummy"`` if no env can be tried; never
        a Ray mode.

    Raises:
        ArgumentError: If ``num_cpus``, ``spaces`` or ``caller_busy`` has an invalid value.
        InvalidEnvError: If an item of ``envs`` is not an env, or appears twice.
    """
    num_cpus = arguments.check_counts(num_cpus, 0)
    return choose(env_specs.make_factories(envs), num_cpus, arguments.check_spaces(spaces), caller_busy=caller_busy)


def choose(
    env_factories: Sequence[EnvFactory],
    num_cpus: int | None,
    spaces: Spaces | None = None,
    seed: int | None = None,
    shared: Mapping[str, Array] | None = None,
    caller_busy: bool = False,
) -> Recommendation:
    """Return the result of `recommend`, for envs that may ask for a seed and shared arrays when they are made."""
    arguments.check_flags(caller_busy=caller_busy)
    find_obstacle = functools.cache(functools.partial(_find_obstacle, env_factories))
    has_instances = any(factory.is_live for factory in env_factories)
    if has_instances and (obstacle := find_obstacle()):
        return _unknown(f"Instances are not stepped for a trial, and copies of them are not to be had: {obstacle}")
    cores = min(usable_cores(), num_cpus or usable_cores())
    env_options = {"spaces": spaces, "seed": seed, "shared": shared or {}}
    try:
        found = Trial(env_factories, cores, num_cpus, caller_busy, env_options, find_obstacle).run()
    except Exception as error:  # noqa: BLE001 (envs raise anything; it is raised again where they are used)
        return _unknown(f"No env could be tried: {one_line(error)}")
    best = found.best
    reason = _describe(found, len(env_factories), caller_busy)
    if has_instances:
        reason += " Workers get copies of the instances." if best.mode == "subproc" else " Copies of them were tried."
    threads = [one.speedup for one in found.tried if one.mode == "thread"]
    releases_gil = max(threads) > 4 / 3 if threads else None
    return Recommendation(best.mode, best.workers, best.options, reason, found.step_cost, releases_gil)


def _unknown(why: str) -> Recommendation:
    # Correct for every env, and at most as many times slower than the fastest as there are cores.
    return Recommendation("dummy", 1, reason=f"{why}. Without figures the plain loop is the safe choice.")


def _find_obstacle(env_factories: Sequence[EnvFactory]) -> str:
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


def _describe(found: TrialResult, num_envs: int, caller_busy: bool) -> str:
    """Return what was measured, in one line."""

    def name(one: Candidate) -> str:
        parts = [*one.options, count(one.workers, "worker")]
        return "dummy" if one.mode == "dummy" else f"{one.mode} with {' and '.join(parts)}"

    def rate(one: Candidate) -> str:
        return number(float(f"{num_envs * one.speedup / found.loop:.3g}"))

    best = found.best
    others = sorted((one for one in found.tried if one is not best), key=lambda one: -one.speedup)
    rates = [f"{rate(one)} in {name(one)}" for one in [best, *others] if one.was_tried]
    rates[0] = rates[0].replace(" in ", " steps/s in ")
    parts = [
        f"A step takes {duration(found.step_cost)}{', mostly waiting' if found.waits else ''}.",
        f"{count(num_envs, 'env')} made {', '.join(rates)}{', with the caller busy' if caller_busy else ''}.",
    ]
    if not best.was_tried:
        parts.append(f"{rate(best)} are possible in {name(best)}: not tried, as these envs take long.")
    elif len(rates) == 1:
        parts.append("No other mode open to them can be clearly faster.")
    for mode, why in found.failed.items():
        parts.append(f"{'Threads' if mode == 'thread' else 'Other processes'} are out of the question: {why}.")
    if best.options:
        parts.append("The caller steps a share of the envs itself, which are not isolated from it.")
    return " ".join(parts)
