"""Ray itself: joined if it runs, else started quietly, and stopped only if started here."""

from __future__ import annotations

import logging
import os
import signal
import threading
from typing import Any, ClassVar

from parallelenv.errors import SchedulingError

START_TIMEOUT = 10.0
"""Seconds after which an actor that could not be placed is an error, if resources are lacking."""


class Cluster:
    """A share in the Ray cluster of this process. The last to leave stops what was started here."""

    _lock: ClassVar[threading.Lock] = threading.Lock()
    _members: ClassVar[int] = 0
    _started_here: ClassVar[bool] = False
    _environment: ClassVar[dict[str, str]] = {}

    def __init__(self, num_cpus: int) -> None:
        self.num_cpus = num_cpus
        self._is_member = True

    @classmethod
    def join(cls, arguments: dict[str, Any]) -> Cluster:
        """Join the running cluster, or start one.

        Args:
            arguments: For ``ray.init``, where they go before ours.
        """
        environment = dict(os.environ)  # to import Ray is enough to change it
        import ray

        with cls._lock:
            if not ray.is_initialized():
                cls._environment = environment
                _init_quietly(arguments)
                cls._started_here = True
                cls._members = 0
            cls._members += 1
        return cls(max(1, int(resources("cluster_resources").get("CPU", 1))))

    @property
    def is_own(self) -> bool:
        """Whether the cluster was started here."""
        return self._started_here

    def leave(self) -> None:
        """Give the share back. Safe to call twice."""
        import ray

        cls = type(self)
        with cls._lock:
            if not self._is_member:
                return
            self._is_member = False
            cls._members -= 1
            if cls._members or not cls._started_here:
                return
            cls._started_here = False
            ray.shutdown()
            for name in set(os.environ) - set(cls._environment):
                del os.environ[name]


def _init_quietly(arguments: dict[str, Any]) -> None:
    """Start Ray without a dashboard and without log lines, and leave signal handlers as found."""
    import ray

    in_main = threading.current_thread() is threading.main_thread()
    handler = signal.getsignal(signal.SIGTERM)
    try:
        ray.init(**{"include_dashboard": False, "logging_level": logging.ERROR, **arguments})
    finally:
        if in_main and handler is not None:
            signal.signal(signal.SIGTERM, handler)


def resources(kind: str) -> dict[str, float]:
    """Return ``ray.cluster_resources()`` or ``ray.available_resources()``, with a type."""
    import ray

    found: dict[str, float] = getattr(ray, kind)()
    return found


def num_nodes() -> int:
    """Return how many nodes of the cluster are alive and have cores."""
    import ray

    nodes: list[dict[str, Any]] = ray.nodes()  # type: ignore[no-untyped-call]
    return sum(1 for node in nodes if node["Alive"] and node["Resources"].get("CPU"))


def bundle_of(options: dict[str, Any]) -> dict[str, float]:
    """Return what an actor with these options takes from the cluster, as bundles of placement groups say it."""
    named = {"CPU": options.get("num_cpus"), "GPU": options.get("num_gpus"), "memory": options.get("memory")}
    return {name: amount for name, amount in {**named, **(options.get("resources") or {})}.items() if amount}


def missing_resources(options: dict[str, Any]) -> str:
    """Say what an actor with these options lacks; empty if it has all and is only slow to start."""
    total, free = resources("cluster_resources"), resources("available_resources")
    lacking = [
        f"{amount:g} {name} (the cluster has {total.get(name, 0):g}, of which {free.get(name, 0):g} free)"
        for name, amount in bundle_of(options).items()
        if amount > free.get(name, 0)
    ]
    return f"each needs {', '.join(lacking)}." if lacking else ""


def unschedulable(num_wanted: int, num_waiting: int, options: dict[str, Any], lacking: str) -> SchedulingError:
    """Return the error for actors that find no place.

    Args:
        num_wanted: Of actors.
        num_waiting: Those of them that found none.
        options: Of each.
        lacking: What is missing, a sentence.
    """
    wanted = ", ".join(f"{name}={amount:g}" for name, amount in bundle_of(options).items()) or "no resources"
    return SchedulingError(
        f"{num_wanted} Ray actors with {wanted} each were asked for, but {num_waiting} of them found no place within "
        f"{START_TIMEOUT:.0f} s: {lacking} Give a smaller num_cpus or num_gpus, close what holds the resources, or "
        "ask for less with ray_options={'num_cpus': 0}."
    )
