"""Envs in long-lived Ray actors, several in each, anywhere in a cluster.

Each step exchanges one message with each actor: the actions of its envs are sent one way, the result rows the other
way. The envs themselves are sent once, when the actor starts.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from parallelenv.backends import _ray_cluster
from parallelenv.backends._channel_group import ChannelGroup
from parallelenv.backends._cpu_balancer import CpuBalancer
from parallelenv.backends._eventfd_bell import HAS_BELL
from parallelenv.backends._pipe_channel import PipeChannel
from parallelenv.backends._ray_actors import (
    ActorCalls,
    ActorHandle,
    RayActor,
    RayChannel,
    RayHost,
    admit,
    close_and_wait,
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
)
from parallelenv.backends._shared_memory import SharedMemory
from parallelenv.contract.arguments import check_flags
from parallelenv.contract.batch import Array, Batch, Layout
from parallelenv.contract.codec import encode
from parallelenv.contract.error_text import count, show
from parallelenv.contract.interrupts import DeferSigint
from parallelenv.contract.packed_worker_spec import PackageVersion, PackedSpec, package_version
from parallelenv.contract.protocol import Channel, Command, Printed, RepeatedStep, WorkerSpec
from parallelenv.errors import ArgumentError, WorkerStartError
from parallelenv.progress import announce_if_slow

_LONGEST_WAIT = 0.1
"""Seconds per wait: an interrupt is handled between two waits, not during one."""
_SHORT_WAIT = 2e-3
"""Seconds per wait for remote actors while the caller also waits for actors on this machine."""


class StartedWorker(NamedTuple):
    """A worker that an actor has started."""

    env_ids: tuple[int, ...]
    host_number: int  #: See `RelayedMessage`.
    pid: int


@dataclass(eq=False)
class _ActorSlot:
    """One actor and, after its death, the one that replaces it."""

    num_workers: int
    env_ids: list[tuple[int, ...]] = field(default_factory=list)  #: Of each worker, once they are known.
    actor: ActorHandle | None = None  #: The latest one.


class RayBackend:
    """One actor per core of the cluster, with several envs in each.

    Args:
        ray_init: Arguments of ``ray.init``, used if Ray is not running.
        ray_options: Options of the actors, as for ``actor.options(...)``.
        direct: Whether actors on this machine are reached over a socket and shared memory, like workers of ``subproc``,
            instead of through Ray calls. Ray still places and ends them.
    """

    uses_live_envs = False
    actor_class: type[RayActor] = RayHost
    """The class of the actors. It has the methods of `RayHost`."""
    actor_arguments: tuple[object, ...] = ()
    """Arguments of that class, after those of a `RayActor`."""
    strategy = "PACK"
    """The strategy by which a placement group distributes actors over nodes."""

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
        self._group = ChannelGroup(CpuBalancer(caller_steps=False))
        self._started: list[ActorHandle] = []
        self._reservation: Reservation | None = None
        self._slots: list[_ActorSlot] = []  # one per bundle of the reservation
        self._host_numbers = itertools.count()  # see `RelayedMessage`
        self._relays: list[ActorCalls] = []  # of the actors that are reached through Ray calls
        self._shared: object = {}  # arrays, or Ray's reference to them

    def plan_workers(self, num_envs: int, num_cpus: int | None, num_gpus: float) -> int:  # noqa: D102 (see Backend)
        with announce_if_slow("Waiting for Ray to start ..."):
            self._cluster = cluster = Cluster.join(self._init)
        num_cores = cluster.num_cpus
        counts = self.distribute(min(num_cpus or num_cores, num_envs))
        self._slots = [_ActorSlot(count) for count in counts]
        self._gpus_per_actor = num_gpus / len(counts)
        # A cluster that was started here has no other users, so no cores are reserved: otherwise a cell that makes a
        # `ParallelEnv` could not run twice, while the first still has the cores.
        self._cores_per_worker = 0.0 if cluster.is_own else min(1.0, num_cores / sum(counts))
        return sum(counts)

    @property
    def placement(self) -> str:
        """Text with the number of living actors that are reached directly, not through Ray calls."""
        living = [actor for actor in self._started if not actor.is_terminated]
        return f"{sum(actor.is_direct for actor in living)} of {len(living)} actors reached directly"

    def distribute(self, num_workers: int) -> list[int]:
        """Return the number of workers of each actor."""
        return [1] * num_workers

    def share(self, arrays: Mapping[str, Array]) -> Mapping[str, Array]:
        """Put arrays into Ray's object store, once; hosts read them there. Each node has its own copy."""
        import ray

        self._shared = ray.put({name: np.array(array, order="C", subok=False) for name, array in arrays.items()})
        return {}

    def launch(self, specs: Sequence[WorkerSpec]) -> list[Channel]:  # noqa: D102 (see Backend)
        name = self._options.get("name")
        if name and len(self._slots) > 1:
            what = f"ray_options has the name {name!r}, which {len(self._slots)} actors cannot share."
            raise ArgumentError(f"{what} Drop it.")
        if not self._slots[0].env_ids:  # the first launch, of all workers
            left = iter(specs)
            for slot in self._slots:
                slot.env_ids = [spec.env_ids for spec in itertools.islice(left, slot.num_workers)]
        caller = PackageVersion(package_version().version, "")  # the folder may differ by node or `working_dir`
        packed = {spec.env_ids: spec for spec in PackedSpec.pack(specs, caller, environment={}, shared=())}
        self._started = [actor for actor in self._started if not actor.is_terminated]
        self._relays = [calls for calls in self._relays if not calls.actor.is_terminated]
        with announce_if_slow(f"Waiting for Ray to start {count(len(specs), 'worker')} ..."):
            try:
                return self._launch(packed)
            except WorkerStartError:  # Ray had not noticed that a node was lost; now it has
                return self._launch(packed)

    def _launch(self, packed: Mapping[tuple[int, ...], PackedSpec]) -> list[Channel]:
        """Start workers, in actors that have others already or in new ones."""
        cluster = self._cluster
        if cluster is None or not cluster.is_connected:
            raise WorkerStartError(SHUT_DOWN)
        slots = [slot for slot in self._slots if any(env_ids in packed for env_ids in slot.env_ids)]
        vacant = [slot for slot in slots if slot.actor is None or not slot.actor.is_alive()]
        before = len(self._started)
        try:
            self._start_actors(vacant, cluster)
            channels: list[Channel] = []
            for actor, workers in self._start_workers(slots, packed):
                if actor.is_near and self._goes_direct:  # past Ray, because it runs on this machine
                    if HAS_BELL:
                        self._group.use_bell(sum(slot.num_workers for slot in self._slots))
                    direct = self.connect(actor, workers)
                    for channel in direct:
                        channel.connect_bell()
                    channels += direct
                else:
                    if actor.calls not in self._relays:
                        self._relays.append(actor.calls)
                    channels += [self.relayed(actor, worker) for worker in workers]
            return channels
        except BaseException:
            for actor in self._started[before:]:
                actor.terminate()
            self._group.end(packed)
            raise

    def _start_actors(self, slots: Sequence[_ActorSlot], cluster: Cluster) -> None:
        """Start the actors of slots, and wait until they have introduced themselves."""
        import ray

        options: list[ActorOptions] = []
        for slot in slots:
            share = self._cores_per_worker * slot.num_workers
            # Ray accepts whole numbers of cores, or fractions below 1.
            cores = int(share) if share >= 1 else int(share * 1e4) / 1e4
            own = {"num_cpus": cores, "num_gpus": self._gpus_per_actor, "max_restarts": 0}
            options.append({**own, **self._options})
        try:
            kinds = [ray.remote(**one)(self.actor_class) for one in options]
        except (TypeError, ValueError) as error:
            raise ArgumentError(f"ray_options={show(self._options)} were rejected by Ray: {error}.") from error
        # Not if the actors need no resources, or the user places them.
        wants_room = all("scheduling_strategy" not in one and bundle_of(one) for one in options)
        if self._reservation is None and wants_room and len(slots) == len(self._slots):
            self._reservation = Reservation(options, self.strategy, cluster)
        if self._reservation is not None and slots:
            self._reservation.await_room()
        with listening(len(slots)) as listener:
            address = None if listener is None else (listener.getsockname(), machine())
            for kind, slot in zip(kinds, slots, strict=True):
                room = self._reservation
                placed = {} if room is None else room.options_for(self._slots.index(slot))
                handle = kind.options(**placed).remote(address, *self.actor_arguments)
                slot.actor = ActorHandle(handle, cluster)
                self._started.append(slot.actor)
            actors = [slot.actor for slot in slots if slot.actor is not None]
            self._await_start(actors, options)
            if listener is not None:
                admit(listener, [actor for actor in actors if actor.is_near])

    def _start_workers(
        self, slots: Sequence[_ActorSlot], packed: Mapping[tuple[int, ...], PackedSpec]
    ) -> list[tuple[ActorHandle, list[StartedWorker]]]:
        """Start the workers of slots that are wanted; return them by their actors."""
        import ray

        starting = []
        for slot in slots:
            wanted = [packed[env_ids] for env_ids in slot.env_ids if env_ids in packed]
            numbers = [next(self._host_numbers) for _ in wanted]
            # Plain tuples: an actor can read them without importing this package.
            message = tuple(encode(wanted))
            actor: Any = slot.actor
            starting.append((actor, wanted, numbers, actor.handle.start.remote(numbers, message, self._shared)))
        while ray.wait([call for *_, call in starting], num_returns=len(starting), timeout=_LONGEST_WAIT)[1]:
            pass  # importing the modules of envs takes time
        started = []
        for actor, wanted, numbers, call in starting:
            env_ids = [spec.env_ids for spec in wanted]
            started.append((actor, list(map(StartedWorker, env_ids, numbers, actor.get_started(call)))))
        return started

    def relayed(self, actor: ActorHandle, worker: StartedWorker) -> Channel:
        """Return a channel to a worker that is reached through Ray calls."""
        return RayChannel(actor, worker.host_number, worker.pid, worker.env_ids)

    def connect(self, actor: ActorHandle, workers: Sequence[StartedWorker]) -> list[PipeChannel]:
        """Return channels to workers of an actor on this machine."""
        (worker,) = workers
        with DeferSigint():
            return [self._group.connect(actor, *actor.serve(), worker.env_ids)]

    def _await_start(self, actors: Sequence[ActorHandle], options: Sequence[ActorOptions]) -> None:
        """Wait until all actors have introduced themselves; raise `WorkerStartError` if one fails or is late."""
        import ray

        calls = [actor.handle.introduce.remote() for actor in actors]
        begin = time.monotonic()
        while waiting := ray.wait(calls, num_returns=len(calls), timeout=_ray_cluster.START_TIMEOUT)[1]:
            lacking = missing_resources(options, "cluster_resources")
            if lacking:
                raise WorkerStartError(
                    f"{len(waiting)} of {len(calls)} Ray actors could not be placed: {lacking} Change ray_options."
                )
            # Otherwise actors are slow to start or wait for others to end; the user has chosen where they run.
            waited = time.monotonic() - begin
            if waited >= _ray_cluster.LONGEST_START and "runtime_env" not in self._options:
                raise WorkerStartError(
                    f"{len(waiting)} of {len(calls)} Ray actors have not started within {waited:.0f} s, though the "
                    f"cluster has the resources. Maybe no node fits ray_options={show(self._options)}, or it is in use."
                )
        for actor, call in zip(actors, calls, strict=True):
            actor.pid, actor.is_near = actor.get_started(call)

    def allocate(self, layout: Layout) -> Batch:  # noqa: D102 (see Backend)
        if not self._group.channels:
            self._goes_direct = False  # later actors could not share this memory
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
                # Nothing can wait for both, so wait for remote actors in short intervals.
                wait_for_calls(far, min(left, _SHORT_WAIT) if near else left)
            ready: list[Any] = [channel for channel in far if channel.arrived]
            if near:
                ready += self._group.wait(near, 0.0, 1)
            if ready or left <= 0:
                return ready

    def prepare_step(self, commands: Sequence[tuple[Any, Command]]) -> RepeatedStep | None:
        """See `Backend`: a step of actors on this machine."""
        is_near = all(isinstance(channel, PipeChannel) for channel, _ in commands)
        return self._group.prepare_step(commands) if is_near else None

    def flush(self) -> None:
        """See `SubprocBackend.flush`."""
        for calls in self._relays:
            calls.flush()
        self._group.flush()

    def fileno(self) -> int | None:
        """Return a descriptor (see `Backend`), unless an actor is reached through Ray calls, which have none."""
        return None if any(not one.actor.is_terminated for one in self._relays) else self._group.fileno()

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
        with DeferSigint():
            if self._reservation is not None:
                self._reservation.give_back()
            if self._cluster is not None:
                self._cluster.leave()
            self._reservation, self._cluster, self._shared = None, None, {}
        return printed
