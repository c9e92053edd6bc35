"""Connects this process to Ray: joins a running cluster or starts a new one.

A cluster that this process has started runs until this process ends.
"""

from __future__ import annotations

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
from parallelenv.contract.interrupts import DeferSignals
from parallelenv.contract.packed_worker_spec import environment_variables
from parallelenv.contract.tracebacks import warn_user
from parallelenv.errors import ArgumentError, WorkerStartError

ActorOptions = dict[str, Any]  # the arguments of Ray's ``actor.options(...)``
SHUT_DOWN = "Ray was shut down after this ParallelEnv was made. Make a new one."
START_TIMEOUT = 10.0
"""Seconds after which an actor that Ray has not placed causes an error, if resources are missing."""
LONGEST_START = 60.0
"""Seconds after which an actor that has not started causes an error.

There is no such limit if Ray has to set up a ``runtime_env`` first.
"""
_SETTLING = 3.0
"""Seconds that Ray has to finish making a placement group before it is removed.

If a group is removed while Ray is making it, its cores may be lost permanently (seen with Ray 2.60; issue 64693 of
Ray). Of 60 groups that were removed without waiting, one lost a core; of 61 groups that were finished first, none did.
"""


class Cluster:
    """A connection of this process to Ray. All pools of the process share one connection.

    Check `is_connected` before you use an actor or object of a connection: if that connection has ended, using the
    actor or object would start Ray again.
    """

    # Reentrant, because the garbage collector may run at any moment, and close a pool that leaves the connection.
    _lock: ClassVar[threading.RLock] = threading.RLock()
    _present: ClassVar[Cluster | None] = None

    def __init__(self, arguments: dict[str, Any]) -> None:
        before = set(os.environ)  # recorded now, because the import of Ray already adds variables
        if "ray" not in sys.modules:
            # Hide two warnings that a notebook has no ipywidgets: one by tqdm, and one in Ray's log.
            log = logging.getLogger("ray.widgets.util")
            level = log.level
            log.setLevel(logging.ERROR)
            try:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    import tqdm.auto  # noqa: F401 (Ray imports it, and it warns if ipywidgets is absent)
                import ray  # while the log is off
            finally:
                log.setLevel(level)
        import ray

        self._is_users = ray.is_initialized()
        try:
            if not self._is_users:
                _connect(arguments)
        finally:
            # Environment variables that Ray has added.
            self._variables = {name: value for name, value in environment_variables().items() if name not in before}
            if not ray.is_initialized():
                self._take_away_variables()
        self._arguments = {} if self._is_users else dict(arguments)
        # True if this process has started the head node instead of connecting to it. Ray has no public API for this.
        has_head = bool(getattr(getattr(ray._private.worker, "_global_node", None), "head", True))
        self.is_own = not self._is_users and has_head
        self._ids = _connection_ids()
        self._num_members = 0

    @property
    def is_connected(self) -> bool:
        """True if this connection still exists; False if the user has shut Ray down. The check takes 12 us."""
        return _connection_ids() == self._ids

    @classmethod
    def join(cls, arguments: dict[str, Any]) -> Cluster:
        """Return the connection to Ray, and register the calling pool as one of its users.

        First, a connection that was made with different arguments is ended if no pool uses it any more. If there is now
        no connection, ``ray.init`` joins a running cluster or starts one. A warning says if ``arguments`` are not used.
        """
        with cls._lock:
            present = cls._present
            if present is not None and not present._num_members and present._arguments != arguments:
                present._end()
            if cls._present is None or not cls._present.is_connected:
                cls._present = cls(arguments)
            present = cls._present
            present._num_members += 1  # before code in which a pool may be collected, which could end the connection
        if arguments and arguments != present._arguments:
            way_out = "Call ray.shutdown()" if present._is_users else "Close every ParallelEnv that uses Ray"
            try:
                warn_user(
                    f"ray_init={show(arguments)} is not used, because this process is already connected to Ray. "
                    f"{way_out} first."
                )
            except BaseException:  # warnings are errors
                present.leave()
                raise
        return present

    def leave(self) -> None:
        # When no pool uses the connection any more, it ends, unless this process has started the cluster or the user
        # has made the connection.
        with self._lock, DeferSignals():
            self._num_members -= 1
            if not self._num_members and not self.is_own:
                self._end()

    def _end(self) -> None:
        import ray

        if self is Cluster._present and not self._is_users and self.is_connected:
            with DeferSignals():  # after an interrupted shutdown, Ray could not be started again
                ray.shutdown()
                self._take_away_variables()
                Cluster._present = None

    def _take_away_variables(self) -> None:
        for name, value in self._variables.items():
            if os.environ.get(name) == value:
                del os.environ[name]


def _connection_ids() -> tuple[str, str] | None:
    """Return the ids of Ray's current job and node, which identify the connection; ``None`` without a connection."""
    import ray

    if not ray.is_initialized():
        return None
    context: Any = ray.get_runtime_context()
    return context.get_job_id(), context.get_node_id()


def _connect(arguments: dict[str, Any]) -> None:
    """Start or join Ray without its dashboard and log lines, then restore the SIGTERM handler and the random state.

    Ray uses `random` to choose ports. If the state of `random` were not restored, a seeded training script would draw
    different numbers than in other modes.
    """
    import ray

    in_main = threading.current_thread() is threading.main_thread()
    handler = signal.getsignal(signal.SIGTERM)
    drawn = random.getstate()
    try:
        ray.init(**{"include_dashboard": False, "logging_level": logging.ERROR, **arguments})
    except Exception as error:  # of any type: Ray also checks arguments by assertions
        what = f"({type(error).__name__}: {error})"
        if not arguments or "timed out during startup" in str(error):  # Ray has no class for this error
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
    import ray

    found: dict[str, float] = getattr(ray, kind)()
    return found


def cores_of_nodes() -> list[int]:
    import ray

    nodes: list[dict[str, Any]] = ray.nodes()  # type: ignore[no-untyped-call]
    cores = [int(node["Resources"].get("CPU", 0)) for node in nodes if node["Alive"]]
    return [number for number in cores if number] or [1]


class Reservation:
    """A placement group of Ray, which reserves resources for all actors or for none. Each actor has one bundle.

    Ray keeps a placement group until the program ends, even if nothing refers to the group. If Ctrl-C made a pool lose
    its group, the cores of the group would stay reserved until then. Therefore, the group is removed when this object
    is garbage-collected.
    """

    def __init__(self, options: Sequence[ActorOptions], strategy: str, cluster: Cluster) -> None:
        from ray.util import placement_group

        self._options = options
        with DeferSignals():
            self._group = placement_group([bundle_of(one) for one in options], strategy=strategy)
            self.give_back = weakref.finalize(self, _release, self._group, cluster)
            self.give_back.atexit = False  # at exit, Ray itself removes the group

    def options_for(self, bundle: int) -> ActorOptions:
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        return {"scheduling_strategy": PlacementGroupSchedulingStrategy(self._group, bundle)}

    def await_room(self) -> None:
        """Wait until Ray has reserved the resources of all actors, or reserved them again after a node was lost."""
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
    """Remove a placement group, and thereby end the actors in it. Do nothing if the connection to Ray has ended."""
    from ray.util import remove_placement_group

    if cluster.is_connected:
        group.wait(_SETTLING)
        remove_placement_group(group)


def bundle_of(options: ActorOptions) -> dict[str, float]:
    """Return the amount of each resource that an actor with these options needs. The keys are Ray's resource names."""
    named = {"CPU": options.get("num_cpus"), "GPU": options.get("num_gpus")}
    named |= {name: options.get(name) for name in ("memory", "object_store_memory")}
    if options.get("accelerator_type"):
        named[f"accelerator_type:{options['accelerator_type']}"] = 0.001  # the amount that Ray requests
    return {name: amount for name, amount in {**named, **(options.get("resources") or {})}.items() if amount}


def missing_resources(options: Sequence[ActorOptions], kind: str) -> str:
    total, free, found = resources("cluster_resources"), resources("available_resources"), resources(kind)
    lacking = {
        f"{amount:g} {name} (the cluster has {total.get(name, 0):g}, {free.get(name, 0):g} of them free)": None
        for one in options
        for name, amount in bundle_of(one).items()
        if amount > found.get(name, 0)
    }
    return f"one needs {', '.join(lacking)}." if lacking else ""


def apportion(total: int, weights: Sequence[int]) -> list[int]:
    """Split ``total`` into one part for each weight, in proportion to the weights. Each part is at least 1."""
    shares = [1] * len(weights)
    for _ in range(total - len(weights)):
        index = min(range(len(weights)), key=lambda one: (shares[one] + 1) / weights[one])
        shares[index] += 1
    return shares
