"""Ray itself: joined if it runs, else started without output; it then stays for later pools until this process ends."""

from __future__ import annotations

import logging
import os
import random
import signal
import sys
import threading
import warnings
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

from parallelenv.contract.error_text import show
from parallelenv.contract.interrupts import DeferSigint
from parallelenv.errors import ArgumentError, WorkerStartError

ActorOptions = dict[str, Any]
"""See ``actor.options(...)`` of Ray."""
SHUT_DOWN = "Ray was shut down after this ParallelEnv was made. Make a new one."
START_TIMEOUT = 10.0
"""Seconds after which an actor that was not placed is an error, if resources are lacking."""
LONGEST_START = 60.0
"""Seconds after which it is an error in any case, unless a ``runtime_env`` must be set up, which takes time."""
_SETTLING = 3.0
"""Seconds that Ray has to finish making a placement group before it is removed.

Removing a group while it is being made may lose its cores for good (seen with Ray 2.60; its issue 64693): after one of
60 groups that were removed at once a core was missing, after none of 61 that were waited for.
"""


class Session:
    """The present connection of this process to Ray.

    Requests for objects of an earlier connection would make Ray start again, which is not wanted.
    """

    def __init__(self) -> None:
        self._ids = _connection()

    @property
    def lasts(self) -> bool:
        """Whether this connection still exists: the user may have shut Ray down. Takes 12 us."""
        return _connection() == self._ids


def _connection() -> tuple[str, str] | None:
    """Return an id of the connection to Ray, ``None`` if there is none."""
    import ray

    if not ray.is_initialized():
        return None
    context: Any = ray.get_runtime_context()
    return context.get_job_id(), context.get_node_id()


class ConnectionSettings(NamedTuple):
    """How Ray was connected.

    Attributes:
        starts_cluster: Whether a cluster was started.
        variables: Environment variables that Ray has set.
        arguments: Arguments of ``ray.init``.
    """

    starts_cluster: bool
    variables: dict[str, str]
    arguments: dict[str, Any]


class Cluster:
    """A pool's membership in the Ray cluster of this process.

    Attributes:
        num_cpus: Cores of the cluster.
        session: The connection at the time of joining.
    """

    _lock: ClassVar[threading.Lock] = threading.Lock()
    _session: ClassVar[Session | None] = None
    _members: ClassVar[int] = 0
    _begun: ClassVar[ConnectionSettings | None] = None
    """How this class has connected to Ray; ``None`` if the user has connected."""

    def __init__(self, num_cpus: int, session: Session) -> None:
        self.num_cpus = num_cpus
        self.session = session
        self._is_member = True

    @classmethod
    def join(cls, arguments: dict[str, Any]) -> Cluster:
        """Join the running cluster, or start one.

        A connection of an earlier pool that is no longer used is ended first if it was made with other arguments.

        Args:
            arguments: For ``ray.init``; they override the defaults here.

        Raises:
            ArgumentError: If Ray rejects them.
        """
        with cls._lock:
            old = cls._begun
            if old is not None and not cls._members and old.arguments != arguments:
                with DeferSigint():  # a partly shut down Ray could not be started again
                    cls._end(old)
            begun = _begin_if_needed(arguments)
            if begun is not None or cls._session is None or not cls._session.lasts:
                cls._begun, cls._session, cls._members = begun, Session(), 0
            cls._members += 1
            session = cls._session
        return cls(max(1, int(resources("cluster_resources").get("CPU", 1))), session)

    @property
    def is_own(self) -> bool:
        """Whether the cluster was started here."""
        return self._begun is not None and self._begun.starts_cluster

    def leave(self) -> None:
        """End the membership. Safe to call twice."""
        cls = type(self)
        with cls._lock, DeferSigint():
            if self._is_member and self.session is cls._session:
                cls._members -= 1
                begun = cls._begun
                if not cls._members and begun is not None and not begun.starts_cluster:
                    cls._end(begun)  # disconnect from others' clusters; one started here stays for the next pool
            self._is_member = False

    @classmethod
    def _end(cls, begun: ConnectionSettings) -> None:
        import ray

        session, cls._session, cls._begun = cls._session, None, None
        if session is not None and session.lasts:  # else the user has shut it down
            ray.shutdown()
            _take_away(begun.variables)


def _begin_if_needed(arguments: dict[str, Any]) -> ConnectionSettings | None:
    """Connect to Ray unless the user has."""
    before = set(os.environ)  # importing Ray changes it
    _import_quietly()
    import ray

    if ray.is_initialized():
        return None
    try:
        _init_quietly(arguments)
    except Exception as error:  # Ray also checks by assertions
        _take_away({name: os.environ[name] for name in set(os.environ) - before})
        if not arguments:
            raise WorkerStartError(
                f"Ray could not be started or joined ({type(error).__name__}: {error}). On a busy machine, try again. "
                "To see what Ray prints, call ray.init() yourself first."
            ) from error
        raise ArgumentError(
            f"ray_init={show(arguments)} is not what Ray accepts ({type(error).__name__}: {error}). To start another "
            "Ray "
            "beside one that runs on this machine, add 'address': 'local'."
        ) from error
    variables = {name: os.environ[name] for name in set(os.environ) - before}
    return ConnectionSettings(_has_started_head(), variables, dict(arguments))


def _import_quietly() -> None:
    """Import Ray without its two warnings, by tqdm and by its log, that a notebook has no ipywidgets."""
    if "ray" in sys.modules:
        return
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import tqdm.auto  # noqa: F401 (Ray imports it, and it warns where ipywidgets is absent)
    log = logging.getLogger("ray.widgets.util")
    level = log.level
    log.setLevel(logging.ERROR)
    try:
        import ray  # noqa: F401 (for what it says at that)
    finally:
        log.setLevel(level)


def _has_started_head() -> bool:
    """Whether Ray was started by this process, not only connected. Ray has no public API for this."""
    import ray

    return bool(getattr(getattr(ray._private.worker, "_global_node", None), "head", True))


def _init_quietly(arguments: dict[str, Any]) -> None:
    """Start Ray without a dashboard and log lines, and restore signal handlers and `random`.

    Ray draws ports from `random`: a seeded trainer would draw other numbers than in other modes.
    """
    import ray

    in_main = threading.current_thread() is threading.main_thread()
    handler = signal.getsignal(signal.SIGTERM)
    drawn = random.getstate()
    try:
        ray.init(**{"include_dashboard": False, "logging_level": logging.ERROR, **arguments})
    finally:
        random.setstate(drawn)
        if in_main and handler is not None:
            signal.signal(signal.SIGTERM, handler)


def _take_away(variables: dict[str, str]) -> None:
    """Remove environment variables that were not changed since."""
    for name, value in variables.items():
        if os.environ.get(name) == value:
            del os.environ[name]


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


@dataclass
class FreeResources:
    """A placement group.

    Attributes:
        group: Ray's handle.
        session: The connection in which it was requested.
        is_made: Whether it is known to have been made.
    """

    group: Any
    session: Session
    is_made: bool = False

    def give_back(self) -> None:
        """Release it, if its Ray still runs."""
        from ray.util import remove_placement_group

        if not self.session.lasts:
            return
        if not self.is_made and _scheduling_state(self.group) != "INFEASIBLE":
            self.group.wait(_SETTLING)
        remove_placement_group(self.group)


class Reservation:
    """Room for all actors, or for none: a placement group with a bundle for each.

    Ray keeps such a group until the program ends, even if nothing refers to it: a group that Ctrl-C has cut off from
    its pool would hold its cores for good. So the group is removed with this object.

    Args:
        options: Options of each actor, by a number that identifies it.
        strategy: ``"PACK"``, on few nodes, or ``"SPREAD"``, evenly over all.
        session: The connection in which the actors are started.
    """

    def __init__(self, options: Mapping[int, ActorOptions], strategy: str, session: Session) -> None:
        from ray.util import placement_group

        self._options = list(options.values())
        self._seats = list(options)
        bundles = [_bundle_of(one) for one in self._options]
        with DeferSigint():
            self._room = FreeResources(placement_group(bundles, strategy=strategy), session)
            self._end = weakref.finalize(self, self._room.give_back)
            self._end.atexit = False  # Ray removes it then

    @classmethod
    def make(cls, options: Mapping[int, ActorOptions], strategy: str, session: Session) -> Reservation | None:
        """Return a new one; ``None`` if the actors need no resources, or the user places them."""
        is_needed = all("scheduling_strategy" not in one and _bundle_of(one) for one in options.values())
        return cls(options, strategy, session) if is_needed else None

    def strategy_of(self, seat: int) -> Any:
        """Return the scheduling strategy that puts an actor into its bundle."""
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        return PlacementGroupSchedulingStrategy(self._room.group, self._seats.index(seat))

    def await_room(self) -> None:
        """Wait until there is room for all actors, also after a node was lost.

        Raises:
            WorkerStartError: If there is none within `START_TIMEOUT` seconds.
        """
        if self._room.group.wait(START_TIMEOUT):
            self._room.is_made = True
            return
        wanted = " or ".join(dict.fromkeys(_name_bundle(one) for one in self._options))
        lacking = missing_resources(self._options, "available_resources") or "there is no room for all of them at once."
        raise WorkerStartError(
            f"{len(self._seats)} Ray actors with {wanted} each were asked for, and found no place within "
            f"{START_TIMEOUT:.0f} s: {lacking} Ask for less (num_cpus, num_gpus, ray_options), or close what holds the "
            "resources. With ray_options={'num_cpus': 0} no cores are reserved."
        )

    def give_back(self) -> None:
        """Release the room, if its Ray still runs. The actors in it end."""
        with DeferSigint():
            self._end()


def _scheduling_state(group: Any) -> str | None:
    from ray.util import placement_group_table

    state: str | None = placement_group_table(group).get("stats", {}).get("scheduling_state")
    return state


def _bundle_of(options: ActorOptions) -> dict[str, float]:
    named = {"CPU": options.get("num_cpus"), "GPU": options.get("num_gpus")}
    named |= {name: options.get(name) for name in ("memory", "object_store_memory")}
    if options.get("accelerator_type"):
        named[f"accelerator_type:{options['accelerator_type']}"] = 0.001  # as Ray does it
    return {name: amount for name, amount in {**named, **(options.get("resources") or {})}.items() if amount}


def _name_bundle(options: ActorOptions) -> str:
    return ", ".join(f"{name}={amount:g}" for name, amount in _bundle_of(options).items())


def missing_resources(options: Sequence[ActorOptions], kind: str) -> str:
    """Return which resources are too few for an actor with any of these options; empty if none are.

    Args:
        options: Options of the actors.
        kind: ``"cluster_resources"``, all of the cluster, or ``"available_resources"``, the free ones.
    """
    total, free, found = resources("cluster_resources"), resources("available_resources"), resources(kind)
    lacking = {
        f"{amount:g} {name} (the cluster has {total.get(name, 0):g}, of which {free.get(name, 0):g} free)": None
        for one in options
        for name, amount in _bundle_of(one).items()
        if amount > found.get(name, 0)
    }
    return f"one needs {', '.join(lacking)}." if lacking else ""
