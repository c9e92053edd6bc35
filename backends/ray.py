"""Envs in long-lived Ray actors, several in each, anywhere in a cluster.

One message per actor and step: the actions of its envs one way, their result rows the other. The envs themselves are
sent once, when the actor starts.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from parallelenv.backends import _ray_cluster
from parallelenv.backends._cpu_balancer import CpuBalancer
from parallelenv.backends._eventfd_bell import HAS_BELL
from parallelenv.backends._pipe import PipeChannel, Switchboard
from parallelenv.backends._ray_actors import (
    ActorHandle,
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
from parallelenv.contract.protocol import Channel, Command, Placement, Printed, RepeatedStep, WorkerSpec
from parallelenv.errors import ArgumentError, WorkerStartError
from parallelenv.progress import announce_if_slow

_SLICE = 0.1
"""Seconds per wait: an interrupt is handled between two waits, not during one."""
_MOMENT = 2e-3
"""Seconds per wait for remote actors while the caller also waits for actors on this machine."""


class RayBackend:
    """One actor per core of the cluster, several envs each.

    Args:
        ray_init: Arguments of ``ray.init``, used if Ray is not running.
        ray_options: Options of the actors, as for ``actor.options(...)``.
        direct: Whether actors on this machine are reached over a socket and shared memory, like workers of ``subproc``,
            instead of by Ray's calls. Ray still places and ends them.
    """

    uses_live_envs = False
    host_class: type[RayHost] = RayHost
    """The class of the actors: a `RayHost` or a class with the same methods."""
    host_arguments: tuple[object, ...] = ()
    """Arguments of that class, before those of a `RayHost`."""
    strategy = "PACK"
    """How a placement group distributes actors over nodes."""
    has_bell = True
    """Whether actors on this machine can be woken by a bell, since they execute one command after the other."""

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
        self._gpus_per_host = 0.0
        self._cores_per_worker = 0.0
        self._goes_direct = direct
        self._switchboard = Switchboard(CpuBalancer(caller_steps=False))
        self._started: list[ActorHandle] = []
        self._reservation: Reservation | None = None
        self._seats: list[tuple[int, ...]] = []  # env ids of the actor in each place of the reservation
        self._shared: object = {}  # arrays, or Ray's reference to them

    def plan(self, num_envs: int, num_cpus: int | None, num_gpus: float) -> Placement:  # noqa: D102 (see Backend)
        with announce_if_slow("Waiting for Ray to start ..."):
            self._cluster = cluster = Cluster.join(self._init)
        num_cores = cluster.num_cpus
        plan = self.place(num_envs, num_cpus or num_cores)
        self._gpus_per_host = num_gpus / len(plan.cpus)
        # In a cluster that was started here there are no other users, so no cores are reserved: otherwise a cell that
        # makes a `ParallelEnv` could not run twice, while the first still has the cores.
        self._cores_per_worker = 0.0 if cluster.is_own else min(1.0, num_cores / sum(plan.cpus))
        return plan

    @property
    def placement(self) -> str:
        """How many of the living actors are reached directly, not by Ray's calls."""
        living = [actor for actor in self._started if not actor.is_ended]
        return f"{sum(actor.is_direct for actor in living)} of {len(living)} actors reached directly"

    def place(self, num_envs: int, num_cpus: int) -> Placement:
        """Return how many actors to start for this number of envs and cores."""
        return Placement((1,) * min(num_cpus, num_envs))

    def branches_of(self, spec: WorkerSpec) -> tuple[tuple[int, ...], ...]:
        """Return the env ids of each worker of an actor on this machine."""
        return ()

    def share(self, arrays: Mapping[str, Array]) -> Mapping[str, Array]:
        """Put arrays into Ray's object store, once; hosts read them there. Each node has its own copy."""
        import ray

        self._shared = ray.put({name: np.array(array, order="C", subok=False) for name, array in arrays.items()})
        return {}

    def launch(self, specs: Sequence[WorkerSpec]) -> list[Channel]:  # noqa: D102 (see Backend)
        import ray

        name = self._options.get("name")
        if name and len(specs) > 1:
            raise ArgumentError(f"ray_options has the name {name!r}, which {len(specs)} actors cannot share. Drop it.")
        caller = PackageVersion(package_version().version, "")  # the folder may differ by node or `working_dir`
        # Plain tuples: an actor can read them without importing this package.
        packed = [tuple(encode(spec)) for spec in PackedSpec.pack(specs, caller, environment={}, shared=())]
        options: list[ActorOptions] = []
        for spec in specs:
            share = self._cores_per_worker * spec.num_cpus
            # Ray accepts whole numbers of cores, or fractions below 1.
            cores = int(share) if share >= 1 else int(share * 1e4) / 1e4
            options.append({"num_cpus": cores, "num_gpus": self._gpus_per_host, "max_restarts": 0, **self._options})
        try:
            kinds = [ray.remote(**one)(self.host_class) for one in options]
        except (TypeError, ValueError) as error:
            raise ArgumentError(f"ray_options={show(self._options)} are not what Ray accepts: {error}.") from error
        self._started = [actor for actor in self._started if not actor.is_ended]
        with announce_if_slow(f"Waiting for Ray to start {count(len(specs), 'worker')} ..."):
            try:
                return self._launch(kinds, packed, specs, options)
            except WorkerStartError:  # Ray had not noticed that a node was lost; now it has
                return self._launch(kinds, packed, specs, options)

    def _launch(
        self,
        kinds: Sequence[Any],
        packed: Sequence[tuple[object, ...]],
        specs: Sequence[WorkerSpec],
        options: Sequence[ActorOptions],
    ) -> list[Channel]:
        cluster = self._cluster
        if cluster is None or not cluster.lasts:
            raise WorkerStartError(SHUT_DOWN)
        if self._reservation is None:
            self._seats = [spec.env_ids for spec in specs]  # all; later launches replace one
            # Not if the actors need no resources, or the user places them.
            if all("scheduling_strategy" not in one and bundle_of(one) for one in options):
                self._reservation = Reservation(options, self.strategy, cluster)
        if self._reservation is not None:
            self._reservation.await_room()
        before = len(self._started)
        with listening(len(specs)) as listener:
            address = None if listener is None else (listener.getsockname(), machine())
            try:
                for kind, message, spec in zip(kinds, packed, specs, strict=True):
                    room = self._reservation
                    place = {} if room is None else room.place(self._seats.index(spec.env_ids))
                    handle = kind.options(**place).remote(*self.host_arguments, message, address, self._shared)
                    self._started.append(ActorHandle(handle, cluster))
                actors = self._started[before:]
                self._await_start(actors, options)
                if listener is not None:
                    admit(listener, [actor for actor in actors if actor.is_near])
                return self._reach(actors, specs)
            except BaseException:
                for actor in self._started[before:]:
                    actor.terminate()
                self._switchboard.end({spec.env_ids for spec in specs})
                raise

    def _reach(self, actors: Sequence[ActorHandle], specs: Sequence[WorkerSpec]) -> list[Channel]:
        """Return the channels to actors: by socket to those on this machine, by Ray's calls to the others."""
        if HAS_BELL and self.has_bell and self._goes_direct and any(actor.is_near for actor in actors):
            self._switchboard.use_bell(len(specs))  # of the first launch, which has all hosts
        channels: list[Channel] = []
        for actor, spec in zip(actors, specs, strict=True):
            if not (actor.is_near and self._goes_direct):
                channels.append(RayChannel(actor, spec.env_ids))
                continue
            with DeferSigint():
                channel = self._switchboard.connect(actor, *actor.serve(), spec.env_ids)
                channel.branches = self.branches_of(spec)
                channels.append(channel)
                channel.connect_bell()
        return channels

    def _await_start(self, actors: Sequence[ActorHandle], options: Sequence[ActorOptions]) -> None:
        """Wait until all actors have introduced themselves; `WorkerStartError` if one cannot, or takes too long."""
        import ray

        calls = [actor.handle.introduce.remote() for actor in actors]
        begin = time.monotonic()
        while waiting := ray.wait(calls, num_returns=len(calls), timeout=_ray_cluster.START_TIMEOUT)[1]:
            lacking = missing_resources(options, "cluster_resources")
            if lacking:
                raise WorkerStartError(
                    f"{len(waiting)} of {len(calls)} Ray actors found no place: {lacking} Change ray_options."
                )
            # Else they are slow to start or wait for others to end; the user has chosen where they run.
            waited = time.monotonic() - begin
            if waited >= _ray_cluster.LONGEST_START and "runtime_env" not in self._options:
                raise WorkerStartError(
                    f"{len(waiting)} of {len(calls)} Ray actors have not started within {waited:.0f} s, though the "
                    f"cluster has the resources. No node may fit ray_options={show(self._options)}, or others hold it."
                )
        for actor, call in zip(actors, calls, strict=True):
            try:
                actor.pid, actor.is_near = ray.get(call)
            except ray.exceptions.RayError as error:
                raise WorkerStartError(f"A Ray actor did not start. Ray says: {error}") from error

    def allocate(self, layout: Layout) -> Batch:  # noqa: D102 (see Backend)
        if not self._switchboard.channels:
            self._goes_direct = False  # later actors could not share this memory
            return Batch.private(layout)
        memory = SharedMemory.create(layout.nbytes)
        return Batch(layout, memory.map, owner=memory)

    def wait(self, channels: Sequence[Any], timeout: float | None, wanted: int = 1) -> Sequence[Any]:  # noqa: D102 (see Backend)
        far = [channel for channel in channels if isinstance(channel, RayChannel)]
        if not far:
            return self._switchboard.wait(channels, timeout, wanted)
        if not far[0].actor.cluster.lasts:
            return far
        near = [channel for channel in channels if isinstance(channel, PipeChannel)]
        deadline = None if timeout is None else time.monotonic() + timeout
        ready: list[Any] = []
        while not ready:
            left = _SLICE if deadline is None else min(_SLICE, max(0.0, deadline - time.monotonic()))
            # Nothing waits for both: so wait for remote actors in short intervals.
            ready += wait_for_calls(far, min(left, _MOMENT) if near else left)
            if near:
                ready += self._switchboard.wait(near, 0.0, 1)
            if left <= 0:
                break
        return ready

    def prepare_step(self, commands: Sequence[tuple[Any, Command]]) -> RepeatedStep | None:
        """See `Backend`: a step of actors on this machine."""
        is_near = all(isinstance(channel, PipeChannel) for channel, _ in commands)
        return self._switchboard.prepare_step(commands) if is_near else None

    def flush(self) -> None:
        """See `SubprocBackend.flush`."""
        self._switchboard.flush()

    def fileno(self) -> int | None:
        """Return a descriptor, see `Backend`, if no actor is reached by Ray's calls, which have none."""
        if any(not (actor.is_direct or actor.is_ended) for actor in self._started):
            return None
        return self._switchboard.fileno()

    def close(self, channels: Sequence[Channel], timeout: float) -> Sequence[Printed]:  # noqa: D102 (see Backend)
        self._switchboard.hang_up()
        deadline = time.monotonic() + timeout
        far = [channel for channel in channels if isinstance(channel, RayChannel) and channel.actor.cluster.lasts]
        printed = close_and_wait(far, timeout) if far else []
        printed += self._switchboard.close(max(0.0, deadline - time.monotonic()))
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
