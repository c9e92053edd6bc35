"""How the collectors of a set are started: as envs of a `ParallelEnv`."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import cloudpickle

from parallelenv import registry
from parallelenv.collect.checks import check_env_maker, check_policy_maker
from parallelenv.collect.packing import require_compression
from parallelenv.collect.seat import Seat
from parallelenv.collect.unsent import Unsent
from parallelenv.contract import arguments
from parallelenv.contract.messages import show
from parallelenv.env import ParallelEnv
from parallelenv.errors import ArgumentError, UnknownOptionError, UnpicklableError

_OURS = {"asynchronous", "copy", "envs", "on_failure", "spaces"}
"""Arguments of `ParallelEnv` that say how envs are, and not how they are run."""
_ENV_MAKERS = ("make_envs", "make_test_envs")


def check(
    num_workers: Any, num_steps: Any, start_steps: Any, fraction: Any, max_restarts: Any, compresses: Any
) -> None:
    """Refuse arguments of a `CollectorSet` that have no usable value.

    Raises:
        ArgumentError: If there is one.
        MissingDependencyError: If the package to compress with is not installed.
    """
    arguments.check_positive("num_workers", num_workers)
    arguments.check_positive("num_steps", num_steps)
    arguments.check_positive("start_steps", num_steps if start_steps is None else start_steps)
    arguments.check_positive("max_restarts", max_restarts)
    if not isinstance(fraction, int | float) or isinstance(fraction, bool) or not 0 < fraction <= 1:
        raise ArgumentError(f"fraction_samples={show(fraction)} must be a number above 0, and 1 at most.")
    arguments.check_flags(compress_data=compresses)
    if compresses:
        require_compression()


def start(
    num_workers: int,
    given: dict[str, Any],
    compresses: bool,
    unsent: Unsent,
    para_mode: Any,
    worker_resources: Any,
    options: dict[str, Any],
) -> ParallelEnv:
    """Return collectors as envs, each in a worker of its own where there are workers.

    Args:
        num_workers: How many.
        given: Arguments of each `Collector`.
        compresses: Whether they compress what they send.
        unsent: As in `Seat`.
        para_mode: As in `CollectorSet`.
        worker_resources: As in `CollectorSet`.
        options: Further arguments of the `ParallelEnv`.

    Raises:
        ArgumentError: If the mode or the resources cannot be had, an option is of envs, or a function given cannot be
            called.
        UnpicklableError: If such a function cannot move to the workers.
    """
    if isinstance(para_mode, str) and para_mode == registry.AUTO:
        raise ArgumentError(
            f"para_mode={para_mode!r} tries envs, and a collector is none. Name the mode: 'subproc', or 'ray'."
        )
    for name in _OURS.intersection(options):
        raise ArgumentError(
            f"{name}={show(options[name])} is nothing that a CollectorSet can be given: collectors are not what it "
            "means. "
            "Give it to the ParallelEnv in make_envs."
        )
    check_policy_maker(given["make_policy"])
    for name in _ENV_MAKERS:
        if name == "make_envs" or given[name] is not None:
            check_env_maker(given[name], name)
    given = {**given, "world_size": num_workers}
    seats = [functools.partial(Seat, {**given, "rank": rank}, compresses, unsent) for rank in range(num_workers)]
    options = {"num_cpus": num_workers, **options}
    try:
        return _with_resources(seats, para_mode, worker_resources, options)
    except UnpicklableError:
        _refuse_unpicklable(given)
        raise


def _refuse_unpicklable(given: dict[str, Any]) -> None:
    """Say which of the functions given cannot move to the workers."""
    for name in ("make_policy", *_ENV_MAKERS):
        try:
            cloudpickle.dumps(given[name])
        except Exception as error:  # pickling runs user code: anything may come
            raise UnpicklableError(
                f"{name}={show(given[name])} cannot move to the collectors' workers: it does not pickle "
                f"({type(error).__name__}: {error}). Let it make such things where it runs, or use "
                "para_mode='dummy' or 'thread'."
            ) from error


def _with_resources(seats: Sequence[Any], para_mode: Any, resources: Any, options: dict[str, Any]) -> ParallelEnv:
    if resources is None:
        return ParallelEnv(seats, para_mode, "continue", **options)
    if not isinstance(resources, dict) or "ray_options" in options:
        raise ArgumentError(
            f"worker_resources={show(resources)} must be a dict, as {{'num_cpus': 1}}, and instead of ray_options."
        )
    try:
        return ParallelEnv(seats, para_mode, "continue", ray_options=dict(resources), **options)
    except UnknownOptionError as error:
        if "ray_options" not in str(error):
            raise
        raise ArgumentError(
            f"worker_resources={show(resources)} cannot be kept with para_mode={para_mode!r}: only Ray gives its "
            "workers "
            "resources. Leave them out, or give para_mode='ray'."
        ) from error
