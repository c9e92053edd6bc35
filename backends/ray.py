"""The mode ``ray``: long-lived Ray actors, which may be anywhere in a cluster, step several envs each.

Actors on the caller's machine are reached like workers of ``subproc``. An actor on another machine gets one message per
step, with the actions for its envs, and returns one message, with the results. The envs themselves are sent only once,
when an actor starts.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from parallelenv.backends import _ray_cluster
from parallelenv.backends._bell import HAS_BELL
from parallelenv.backends._channel_group import ChannelGroup
from parallelenv.backends._pipe import PipeChannel
from parallelenv.backends._ray_actors import (
    ActorHandle,
    RayActor,
    RayChannel,
    RayHost,
    admit,
    close_and_wait,
    has_died,
    listening,
    machine,
    wait_for_calls,
)
from parallelenv.backends._ray_cluster import (
    SHUT_DOWN,
    ActorOptions,
    Cluster,
    Reservation,
    bundle_of,
    missing_resources,
    resources,
)
from parallelenv.backends._shared_memory import SharedMemory
from parallelenv.contract.arguments import check_flags
from parallelenv.contract.batch import Array, Batch, Layout
from parallelenv.contract.codec import encode
from parallelenv.contract.error_text import count, show
from parallelenv.contract.interrupts import DeferSignals
from parallelenv.contract.packed_worker_spec import PackageVersion, PackedSpec, package_version
from parallelenv.contract.protocol import Backend, Channel, Command, Printed, RepeatedStep, WorkerSpec
from parallelenv.errors import ArgumentError, WorkerStartError
from parallelenv.progress import announce_if_slow

_LONGEST_WAIT = 0.1
"""Maximum duration in seconds of one call of ``ray.wait``: Python handles Ctrl-C only between two such calls."""
_SHORT_WAIT = 2e-3
"""Maximum duration in seconds of one wait for remote actors while the caller also waits for actors on this machine."""


class StartedWorker(NamedTuple):
    """A worker that an actor has started."""

    env_ids: tuple[int, ...]
    host_number: int  #: See `RelayedMessage`.
    pid: int


@dataclass(eq=False)
class _ActorSlot:
    """The place of one actor in the pool. After the actor's death, a new actor takes the same place."""

    num_workers: int
    env_ids: list[tuple[int, ...]] = field(default_factory=list)  #: Env ids of each worker; empty before `launch`.
    actor: ActorHandle | None = None  #: The latest actor; ``None`` before the first one is started.


class RayBackend(Backend):
    """A backend that runs envs in Ray actors, by default with one actor per core of the cluster.

    Args:
        ray_init: Arguments of ``ray.init``, used if Ray is not running.
        ray_options: Options of the actors, as for ``actor.options(...)``.
        direct: Whether the caller reaches actors on its own machine over a socket and shared memory, like workers of
            ``subproc``, instead of through Ray calls. Ray still places and ends these actors.
    """

    actor_class: type[RayActor] = RayHost
    channel_class: type[RayChannel] = RayChannel
    actor_arguments: tuple[object, ...] = ()
    """Arguments of ``actor_class`` that follow the arguments of `RayActor`."""
    strategy = "PACK"

    def __init__(
        self,
        *,
        ray_init: dict[str, Any] | None = None,
        ray_options: dict[str, Any] | None = None,
        direct: bool = True,
    ) -> None:
        check_flags(direct=direct)
        self._init = dict(ray_init or {})
        self._options = dict(ray_options or {})
        self._cluster: Cluster | None = None
        self._gpus_per_actor = 0.0
        self._cores_per_worker = 0.0
        self._goes_direct = direct
        self._group = ChannelGroup()
        self._started: list[ActorHandle] = []
        self._reservation: Reservation | None = None
        self._slots: list[_ActorSlot] = []  # one per bundle of the reservation
        self._host_numbers = itertools.count()  # see `RelayedMessage`
        self._shared: object = {}  # Ray's reference to the shared arrays; an empty dict if there are none

    def plan_workers(self, num_envs: int, num_cpus: int | None, num_gpus: float) -> int:  # noqa: D102 (see Backend)
        with announce_if_slow("Waiting for Ray to start ..."):
            self._cluster = cluster = Cluster.join(self._init)
        num_cores = max(1, int(resources("cluster_resources").get("CPU", 1)))
        counts = self.distribute(min(num_cpus or num_cores, num_envs))
        self._slots = [_ActorSlot(count) for count in counts]
        self._gpus_per_actor = num_gpus / len(counts)
        # A cluster that this process started has no other users, so no cores are reserved. With reserved cores, a
        # notebook cell that makes a `ParallelEnv` could not run twice, because the first `ParallelEnv` still has the
        # cores.
        self._cores_per_worker = 0.0 if cluster.is_own else min(1.0, num_cores / sum(counts))
        return sum(counts)

    @property
    def placement(self) -> str:  # type: ignore[override]
        """Text that says how many of the living actors the caller reaches directly instead of through Ray calls."""
        living = [actor for actor in self._started if actor.is_alive()]
        return f"{sum(actor.is_direct for actor in living)} of {len(living)} actors reached directly"

    def distribute(self, num_workers: int) -> list[int]:
        """Return how many of the workers each actor gets."""
        return [1] * num_workers

    def share(self, arrays: Mapping[str, Array]) -> Mapping[str, Array]:
        """Put arrays into Ray's object store. Hosts read the arrays there; each node has one copy.

        The result is empty, because `launch` sends the hosts Ray's reference to the arrays instead of the arrays
        themselves.
        """
        import ray

        self._shared = ray.put({name: np.array(array, order="C", subok=False) for name, array in arrays.items()})
        return {}

    def launch(self, specs: Sequence[WorkerSpec]) -> list[Channel]:  # noqa: D102 (see Backend)
        name = self._options.get("name")
        if name and len(self._slots) > 1:
            what = f"ray_options has the name {name!r}, which {len(self._slots)} actors cannot share."
            raise ArgumentError(f"{what} Drop it.")
        if not self._slots[0].env_ids:  # the first launch, which starts all workers
            left = iter(specs)
            for slot in self._slots:
                slot.env_ids = [spec.env_ids for spec in itertools.islice(left, slot.num_workers)]
        caller = PackageVersion(package_version().version, "")  # without the folder, which may differ between nodes
        packed = {spec.env_ids: spec for spec in PackedSpec.pack(specs, caller, environment={}, shared=())}
        self._started = [actor for actor in self._started if not actor.is_terminated]
        with announce_if_slow(f"Waiting for Ray to start {count(len(specs), 'worker')} ..."):
            try:
                return self._launch(packed)
            except WorkerStartError as error:
                if not has_died(error.__cause__):
                    raise
                return self._launch(packed)  # maybe a node was lost, which Ray has noticed only now

    def _launch(self, packed: Mapping[tuple[int, ...], PackedSpec]) -> list[Channel]:
        cluster = self._cluster
        if cluster is None or not cluster.is_connected:
            raise WorkerStartError(SHUT_DOWN)
        slots = [slot for slot in self._slots if any(env_ids in packed for env_ids in slot.env_ids)]
        vacant = [slot for slot in slots if slot.actor is None or not slot.actor.is_alive()]
        for slot in vacant:
            # The pool may not have noticed yet that another actor is dead, and then still uses its connections.
            if slot.actor in self._started and all(env_ids in packed for env_ids in slot.env_ids):
                slot.actor.close()
                self._started.remove(slot.actor)
        before = len(self._started)
        try:
            self._start_actors(vacant, cluster)
            channels: list[Channel] = []
            for actor, workers in self._start_workers(slots, packed):
                if actor.is_near and self._goes_direct:  # on this machine, so it can be reached directly
                    if HAS_BELL:
                        self._group.use_bell(sum(slot.num_workers for slot in self._slots))
                    direct = self.connect(actor, workers)
                    for channel in direct:
                        channel.connect_bell()
                    channels += direct
                else:
                    channels += [
                        self.channel_class(actor, worker.host_number, worker.pid, worker.env_ids) for worker in workers
                    ]
            return channels
        except BaseException:
            for actor in self._started[before:]:
                actor.terminate()
            self._group.end(packed)
            raise

    def _start_actors(self, slots: Sequence[_ActorSlot], cluster: Cluster) -> None:
        """Start an actor for each of these slots, and wait until `RayActor.introduce` has returned in all of them."""
        import ray

        if not slots:
            return
        options: list[ActorOptions] = []
        for slot in slots:
            share = self._cores_per_worker * slot.num_workers
            # Ray accepts only whole numbers of cores and fractions below 1.
            cores = int(share) if share >= 1 else int(share * 1e4) / 1e4
            own = {"num_cpus": cores, "num_gpus": self._gpus_per_actor, "max_restarts": 0}
            options.append({**own, **self._options})
        try:
            kinds = [ray.remote(**one)(self.actor_class) for one in options]
        except (TypeError, ValueError) as error:
            raise ArgumentError(f"ray_options={show(self._options)} were rejected by Ray: {error}.") from error
        # No reservation if an actor needs no resources or if the user's options place the actors.
        wants_room = all("scheduling_strategy" not in one and bundle_of(one) for one in options)
        if self._reservation is None and wants_room and len(slots) == len(self._slots):
            self._reservation = Reservation(options, self.strategy, cluster)
        if self._reservation is not None:
            self._reservation.await_room()
        with listening(len(slots)) as listener:
            address = None if listener is None else (listener.getsockname(), machine())
            for kind, slot in zip(kinds, slots, strict=True):
                room = self._reservation
                placed = {} if room is None else room.options_for(self._slots.index(slot))
                handle = kind.options(**placed).remote(address, slot.num_workers, *self.actor_arguments)
                slot.actor = ActorHandle(handle, cluster)
                self._started.append(slot.actor)
            actors = [slot.actor for slot in slots if slot.actor is not None]
            self._await_start(actors, options)
            if listener is not None:
                admit(listener, [actor for actor in actors if actor.is_near])

    def _start_workers(
        self, slots: Sequence[_ActorSlot], packed: Mapping[tuple[int, ...], PackedSpec]
    ) -> list[tuple[ActorHandle, list[StartedWorker]]]:
        import ray

        starting = []
        for slot in slots:
            wanted = [packed[env_ids] for env_ids in slot.env_ids if env_ids in packed]
            numbers = [next(self._host_numbers) for _ in wanted]
            # A plain tuple, which Ray can unpickle in the actor without importing this package.
            message = tuple(encode(wanted))
            actor: Any = slot.actor
            starting.append((actor, wanted, numbers, actor.handle.start.remote(numbers, message, self._shared)))
        while ray.wait([call for *_, call in starting], num_returns=len(starting), timeout=_LONGEST_WAIT)[1]:
            pass  # no time limit, because importing the modules of envs may take long
        started = []
        for actor, wanted, numbers, call in starting:
            env_ids = [spec.env_ids for spec in wanted]
            started.append((actor, list(map(StartedWorker, env_ids, numbers, actor.get_started(call)))))
        return started

    def connect(self, actor: ActorHandle, workers: Sequence[StartedWorker]) -> list[PipeChannel]:
        """Return channels that reach the workers of an actor on this machine without Ray calls."""
        (worker,) = workers
        with DeferSignals():
            return [self._group.connect(actor, *actor.serve(), worker.env_ids)]

    def _await_start(self, actors: Sequence[ActorHandle], options: Sequence[ActorOptions]) -> None:
        import ray

        calls = [actor.handle.introduce.remote() for actor in actors]
        begin = time.monotonic()
        while waiting := ray.wait(calls, num_returns=len(calls), timeout=_ray_cluster.START_TIMEOUT)[1]:
            lacking = missing_resources(options, "cluster_resources")
            if lacking:
                raise WorkerStartError(
                    f"{len(waiting)} of {len(calls)} Ray actors could not be placed: {lacking} Change ray_options."
                )
            # The cluster has the resources, so the actors are slow to start or wait until other actors end.
            waited = time.monotonic() - begin
            if waited >= _ray_cluster.LONGEST_START and "runtime_env" not in self._options:
                raise WorkerStartError(
                    f"{len(waiting)} of {len(calls)} Ray actors have not started within {waited:.0f} s, though the "
                    f"cluster has the resources. Maybe no node fits ray_options={show(self._options)}, or the nodes "
                    "that fit are in use."
                )
        for actor, call in zip(actors, calls, strict=True):
            actor.pid, actor.is_near = actor.get_started(call)

    def allocate(self, layout: Layout) -> Batch:  # noqa: D102 (see Backend)
        if not self._group.channels:
            self._goes_direct = False  # actors that are started later could not share this private memory
            return Batch.private(layout)
        memory = SharedMemory.create(layout.nbytes)
        return Batch(layout, memory.map, owner=memory)

    def wait(self, channels: Sequence[Any], timeout: float | None, wanted: int = 1) -> Sequence[Any]:  # noqa: D102 (see Backend)
        far = [channel for channel in channels if isinstance(channel, RayChannel)]
        if not far:
            return self._group.wait(channels, timeout, wanted)
        if not far[0].actor.cluster.is_connected:
            return far
        near = [channel for channel in channels if isinstance(channel, PipeChannel)]
        deadline = None if timeout is None else time.monotonic() + timeout
        while True:
            left = _LONGEST_WAIT if deadline is None else min(_LONGEST_WAIT, max(0.0, deadline - time.monotonic()))
            if not any(channel.arrived for channel in far):
                # No call can wait for both kinds of actors, so wait for the remote ones in short intervals.
                wait_for_calls(far, min(left, _SHORT_WAIT) if near else left)
            ready: list[Any] = [channel for channel in far if channel.arrived]
            if near:
                ready += self._group.wait(near, 0.0, 1)
            if ready or left <= 0:
                return ready

    def prepare_step(self, commands: Sequence[tuple[Any, Command]]) -> RepeatedStep | None:
        """Prepare a step if the caller reaches all of its actors directly; return ``None`` otherwise. See `Backend`."""
        is_near = all(isinstance(channel, PipeChannel) for channel, _ in commands)
        return self._group.prepare_step(commands) if is_near else None

    def flush(self) -> None:
        """Send all queued messages to the actors."""
        for actor in self._started:
            actor.calls.flush()
        self._group.flush()

    def fileno(self) -> int | None:
        """Return the descriptor that `Backend.fileno` describes.

        The result is ``None`` if any living actor is reached through Ray calls, because Ray calls have no descriptor.
        """
        goes_far = any(not actor.is_terminated and not actor.is_direct for actor in self._started)
        return None if goes_far else self._group.fileno()

    def close(self, channels: Sequence[Channel], timeout: float) -> Sequence[Printed]:  # noqa: D102 (see Backend)
        self._group.hang_up()
        deadline = time.monotonic() + timeout
        far = {channel.actor for channel in channels if isinstance(channel, RayChannel)}
        living = [actor for actor in far if actor.cluster.is_connected and not actor.is_terminated]
        printed = close_and_wait(living, timeout) if living else []
        printed += self._group.close(max(0.0, deadline - time.monotonic()))
        for actor in self._started:
            actor.terminate()
        for actor in self._started:
            actor.close()
        with DeferSignals():
            if self._reservation is not None:
                self._reservation.give_back()
            if self._cluster is not None:
                self._cluster.leave()
            self._reservation, self._cluster, self._shared = None, None, {}
        return printed
