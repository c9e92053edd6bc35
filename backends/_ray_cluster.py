"""The connection to Ray: joins a running cluster, or starts one, without output, that runs until this process ends."""

from __future__ import annotations

import heapq
import logging
import os
import random
import signal
import sys
import threading
import warnings
import weakref
from collections.abc import Sequence
from typing import Any, ClassVar

from parallelenv.contract.error_text import show
from parallelenv.contract.interrupts import DeferSigint
from parallelenv.errors import ArgumentError, WorkerStartError

ActorOptions = dict[str, Any]
"""Options as in Ray's ``actor.options(...)``."""
SHUT_DOWN = "Ray was shut down after this ParallelEnv was made. Make a new one."
START_TIMEOUT = 10.0
"""Seconds after which an actor that was not placed is an error, if resources are lacking."""
LONGEST_START = 60.0
"""Seconds after which an actor that has not started is an error, unless Ray must set up a ``runtime_env`` first."""
_SETTLING = 3.0
"""Seconds that Ray has to finish making a placement group before it is removed.

Removing a group while it is being made may lose its cores for good (seen with Ray 2.60; its issue 64693). Of
60 groups that were removed at once, one lost a core; of 61 groups that were waited for, none did.
"""


class Cluster:
    """One connection of this process to Ray, which all pools share.

    Requests for objects of an earlier connection would make Ray start again, which is not wanted: see `is_connected`.

    Attributes:
        is_own: Whether this process started the cluster and did not only join it.
    """

    _lock: ClassVar[threading.Lock] = threading.Lock()
    _present: ClassVar[Cluster | None] = None

    def __init__(self, arguments: dict[str, Any]) -> None:
        before = set(os.environ)  # importing Ray also changes it
        if "ray" not in sys.modules:
            # Without its two warnings, by tqdm and by its log, that a notebook has no ipywidgets.
            log = logging.getLogger("ray.widgets.util")
            level = log.level
            log.setLevel(logging.ERROR)
            try:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    import tqdm.auto  # noqa: F401 (Ray imports it, and it warns where ipywidgets is absent)
                import ray  # while its log is off
            finally:
                log.setLevel(level)
        import ray

        self._is_users = ray.is_initialized()
        try:
            if not self._is_users:
                _connect(arguments)
        finally:
            # Variables that Ray has set.
            self._variables = {name: value for name, value in os.environ.items() if name not in before}
            if not ray.is_initialized():
                self._take_away_variables()
        self._arguments = dict(arguments)
        # Whether this process started the head node, not only connected to it. Ray has no public API for this.
        has_head = bool(getattr(getattr(ray._private.worker, "_global_node", None), "head", True))
        self.is_own = not self._is_users and has_head
        self._ids = _connection_ids()
        self._num_members = 0

    @property
    def is_connected(self) -> bool:
        """True if this connection still exists: the user may have shut Ray down. The check takes 12 us."""
        return _connection_ids() == self._ids

    @property
    def num_cpus(self) -> int:
        """Cores of the cluster."""
        return max(1, int(resources("cluster_resources").get("CPU", 1)))

    @classmethod
    def join(cls, arguments: dict[str, Any]) -> Cluster:
        """Join the running cluster, or start one with these arguments of ``ray.init``.

        A connection that no pool uses any more is ended first, if this process made it with different arguments.

        Raises:
            ArgumentError: If Ray rejects the arguments.
            WorkerStartError: If Ray cannot be started.
        """
        with cls._lock:
            present = cls._present
            if present is not None and not present._num_members and present._arguments != arguments:
                present._end()
            if cls._present is None or not cls._present.is_connected:
                cls._present = cls(arguments)
            cls._present._num_members += 1
            return cls._present

    def leave(self) -> None:
        """End a membership. The last member disconnects from a joined cluster; one that was started here stays."""
        with self._lock, DeferSigint():
            self._num_members -= 1
            if not self._num_members and not self.is_own:
                self._end()

    def _end(self) -> None:
        import ray

        if self is Cluster._present and not self._is_users and self.is_connected:
            with DeferSigint():  # a partly shut down Ray could not be started again
                ray.shutdown()
                self._take_away_variables()
                Cluster._present = None

    def _take_away_variables(self) -> None:
        """Remove Ray's environment variables that were not changed since."""
        for name, value in self._variables.items():
            if os.environ.get(name) == value:
                del os.environ[name]


def _connection_ids() -> tuple[str, str] | None:
    """Return the ids of the connection to Ray, ``None`` if there is none."""
    import ray

    if not ray.is_initialized():
        return None
    context: Any = ray.get_runtime_context()
    return context.get_job_id(), context.get_node_id()


def _connect(arguments: dict[str, Any]) -> None:
    """Start or join Ray without a dashboard and log lines, and restore signal handlers and `random`.

    Ray draws ports from `random`; without this, a seeded trainer would draw different numbers than in other modes.
    """
    import ray

    in_main = threading.current_thread() is threading.main_thread()
    handler = signal.getsignal(signal.SIGTERM)
    drawn = random.getstate()
    try:
        ray.init(**{"include_dashboard": False, "logging_level": logging.ERROR, **arguments})
    except Exception as error:  # Ray also checks by assertions
        what = f"({type(error).__name__}: {error})"
        if not arguments or "timed out during startup" in str(error):  # Ray has no class for it
            raise WorkerStartError(
                f"Ray could not be started or joined {what}. On a busy machine, try again. To see Ray's output, "
                "call ray.init() yourself first."
            ) from error
        raise ArgumentError(
            f"ray_init={show(arguments)} was rejected by Ray {what}. To start another Ray beside one that runs on this "
            "machine, add 'address': 'local'."
        ) from error
    finally:
        random.setstate(drawn)
        if in_main and handler is not None:
            signal.signal(signal.SIGTERM, handler)


def resources(kind: str) -> dict[str, float]:
    """Return ``ray.cluster_resources()`` or ``ray.available_resources()``, with a type."""
    import ray

    found: dict[str, float] = getattr(ray, kind)()
    return found


def cores_of_nodes() -> list[int]:
    """Return the number of cores of each node of the cluster that is alive and has any."""
    import ray

    nodes: list[dict[str, Any]] = ray.nodes()  # type: ignore[no-untyped-call]
    cores = [int(node["Resources"].get("CPU", 0)) for node in nodes if node["Alive"]]
    return [number for number in cores if number] or [1]


class Reservation:
    """A placement group that reserves the resources of all actors or of none. Each actor has a bundle.

    Ray keeps such a group until the program ends, even if nothing refers to it. A group that Ctrl-C has cut off from
    its pool would hold its cores permanently, so the group is removed together with this object.
    """

    def __init__(self, options: Sequence[ActorOptions], strategy: str, cluster: Cluster) -> None:
        from ray.util import placement_group

        self._options = options
        with DeferSigint():
            self._group = placement_group([bundle_of(one) for one in options], strategy=strategy)
            self.give_back = weakref.finalize(self, _release, self._group, cluster)
            self.give_back.atexit = False  # Ray removes it then

    def options_for(self, bundle: int) -> ActorOptions:
        """Return the option that puts an actor into the bundle with this index."""
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        return {"scheduling_strategy": PlacementGroupSchedulingStrategy(self._group, bundle)}

    def await_room(self) -> None:
        """Wait until there is room for all actors, even after a node was lost; otherwise raise `WorkerStartError`."""
        if self._group.wait(START_TIMEOUT):
            return
        bundles = [", ".join(f"{name}={amount:g}" for name, amount in bundle_of(one).items()) for one in self._options]
        wanted = " or ".join(dict.fromkeys(bundles))
        lacking = missing_resources(self._options, "available_resources") or "there is no room for all of them at once."
        raise WorkerStartError(
            f"{len(self._options)} Ray actors with {wanted} each could not be placed within {START_TIMEOUT:.0f} s: "
            f"{lacking} Request less (num_cpus, num_gpus, ray_options), or free resources that are in use. With "
            "ray_options={'num_cpus': 0} no cores are reserved."
        )


def _release(group: Any, cluster: Cluster) -> None:
    """Release the room, if its Ray still runs. The actors in it end."""
    from ray.util import remove_placement_group

    if cluster.is_connected:
        group.wait(_SETTLING)
        remove_placement_group(group)


def bundle_of(options: ActorOptions) -> dict[str, float]:
    """Return the resources that an actor needs."""
    named = {"CPU": options.get("num_cpus"), "GPU": options.get("num_gpus")}
    named |= {name: options.get(name) for name in ("memory", "object_store_memory")}
    if options.get("accelerator_type"):
        named[f"accelerator_type:{options['accelerator_type']}"] = 0.001  # as Ray does it
    return {name: amount for name, amount in {**named, **(options.get("resources") or {})}.items() if amount}


def missing_resources(options: Sequence[ActorOptions], kind: str) -> str:
    """Return which ``"cluster_resources"`` or free ``"available_resources"`` do not suffice for one of these actors."""
    total, free, found = resources("cluster_resources"), resources("available_resources"), resources(kind)
    lacking = {
        f"{amount:g} {name} (the cluster has {total.get(name, 0):g}, of which {free.get(name, 0):g} free)": None
        for one in options
        for name, amount in bundle_of(one).items()
        if amount > found.get(name, 0)
    }
    return f"one needs {', '.join(lacking)}." if lacking else ""


def apportion(total: int, weights: Sequence[int]) -> list[int]:
    """Split a number in proportion to weights: one each, then each further one where the load stays smallest."""
    shares = [1] * len(weights)
    loads = [(2 / weight, index) for index, weight in enumerate(weights)]  # load with one more
    heapq.heapify(loads)
    for _ in range(total - len(weights)):
        index = loads[0][1]
        shares[index] += 1
        heapq.heapreplace(loads, ((shares[index] + 1) / weights[index], index))
    return shares
