"""Envs in long-lived Ray actors, several in each, anywhere in a cluster.

One message per actor and step: the actions of its envs one way, their result rows the other. The envs themselves are
sent once, when the actor starts.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from parallelenv.backends import _ray_cluster
from parallelenv.backends._cpu_balancer import CpuBalancer
from parallelenv.backends._eventfd_bell import HAS_BELL
from parallelenv.backends._parent_death import ParentDeathPipe
from parallelenv.backends._pipe import Switchboard
from parallelenv.backends._ray_calls import RayChannel, close_and_wait, look
from parallelenv.backends._ray_cluster import SHUT_DOWN, ActorOptions, Cluster, Reservation, missing_resources
from parallelenv.backends._ray_host import RayHost
from parallelenv.backends._ray_local import ActorHandle, LocalBellChannel, LocalChannel, LocalListener, hand_over_log
from parallelenv.backends._shared_memory import SharedMemory
from parallelenv.contract.arguments import check_flags
from parallelenv.contract.batch import Array, Batch, Layout
from parallelenv.contract.codec import Message, encode
from parallelenv.contract.error_text import count, show
from parallelenv.contract.interrupts import DeferSigint
from parallelenv.contract.packed_worker_spec import PackageVersion, PackedSpec, package_version
from parallelenv.contract.progress import announce_if_slow
from parallelenv.contract.protocol import Channel, Command, Placement, Printed, RepeatedStep, WorkerSpec
from parallelenv.errors import ArgumentError, WorkerStartError

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
    host_class: type[Any] = RayHost
    """The class of the actors: a `RayHost` or a class with the same methods."""
    host_arguments: tuple[Any, ...] = ()
    """Arguments of that class, before those of a `RayHost`."""
    _cluster: Cluster
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
        self._gpus_per_host = 0.0
        self._cores_per_worker = 0.0
        self._goes_direct = direct
        self._switchboard = Switchboard(CpuBalancer(caller_steps=False))
        self._started: list[ActorHandle] = []
        self._reservation: Reservation | None = None
        self._shared: Any = {}  # arrays, or Ray's reference to them

    def plan(self, num_envs: int, num_cpus: int | None, num_gpus: float) -> Placement:  # noqa: D102 (see Backend)
        with announce_if_slow("Waiting for Ray to start ..."):
            self._cluster = Cluster.join(self._init)
        plan = self.place(num_envs, num_cpus or self._cluster.num_cpus)
        self._gpus_per_host = num_gpus / len(plan.cpus)
        # In a cluster that was started here there are no other users, so no cores are reserved: otherwise a cell that
        # makes a `ParallelEnv` could not run twice, while the first still has the cores.
        is_shared = not self._cluster.is_own
        self._cores_per_worker = min(1.0, self._cluster.num_cpus / sum(plan.cpus)) if is_shared else 0.0
        return plan

    @property
    def placement(self) -> str:
        """How many of the living actors are reached directly, not by Ray's calls."""
        living = [actor for actor in self._started if not actor.is_ended]
        return f"{sum(actor.comes_in for actor in living)} of {len(living)} actors reached directly"

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
        packed = [encode(spec) for spec in PackedSpec.pack(specs, caller, environment={}, shared=())]
        options = [self._options_of(spec) for spec in specs]
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
        packed: Sequence[Message],
        specs: Sequence[WorkerSpec],
        options: Sequence[ActorOptions],
    ) -> list[Channel]:
        session = self._cluster.session
        if not session.lasts:
            raise WorkerStartError(SHUT_DOWN)
        places = self._find_places(specs, options)
        before = len(self._started)
        try:
            for kind, message, place in zip(kinds, packed, places, strict=True):
                lifeline = ParentDeathPipe.create()
                # Plain tuples: an actor can read them without importing this package.
                address = None if lifeline is None else tuple(lifeline.address)
                handle = kind.options(**place).remote(*self.host_arguments, tuple(message), address, self._shared)
                self._started.append(ActorHandle(handle, session, lifeline))
            actors = self._started[before:]
            self._await_start(actors, options)
            return self._reach(actors, specs)
        except BaseException:
            for actor in self._started[before:]:
                actor.terminate()
            self._switchboard.end({spec.env_ids for spec in specs})
            raise

    def _find_places(self, specs: Sequence[WorkerSpec], options: Sequence[ActorOptions]) -> list[ActorOptions]:
        """Return further options for each of the actors, which select its place.

        Args:
            specs: The actors' specs: all of them, or later one that is to be replaced.
            options: Options of each actor.

        Raises:
            WorkerStartError: If there is no room for them.
        """
        seats = [spec.env_ids[0] for spec in specs]
        if self._reservation is None:
            wanted = dict(zip(seats, options, strict=True))
            self._reservation = Reservation.make(wanted, self.strategy, self._cluster.session)
        if self._reservation is None:
            return [{} for _ in seats]
        self._reservation.await_room()
        return [{"scheduling_strategy": self._reservation.strategy_of(seat)} for seat in seats]

    def _reach(self, actors: Sequence[ActorHandle], specs: Sequence[WorkerSpec]) -> list[Channel]:
        """Return the channels to actors: by socket to those on this machine, by Ray's calls to the others."""
        near = [actor for actor in actors if actor.is_near and self._goes_direct]
        sockets = {}
        if near:
            with LocalListener() as doorway:
                sockets = doorway.admit(near)
            if HAS_BELL and self.has_bell and self._switchboard.bell is None:
                self._switchboard.make_bell(len(specs))  # of the first launch, which has all hosts
        channels: list[Channel] = []
        for actor, spec in zip(actors, specs, strict=True):
            if actor not in sockets:
                channels.append(RayChannel(actor, spec.env_ids))
                continue
            with DeferSigint():
                log = hand_over_log(sockets[actor], actor.pid)
                local = self._make_local(actor, sockets[actor], log, self._switchboard.poller, spec.env_ids)
                local.branches = self.branches_of(spec)
                self._switchboard.add(local)
                channels.append(local)
                if isinstance(local, LocalBellChannel):
                    with contextlib.suppress(OSError):  # if it has died, its first command reports it
                        local.connect_bell()
        return channels

    def _make_local(self, *arguments: Any) -> LocalChannel:
        """Return a channel to an actor on this machine, which is woken by the bell if there is one."""
        bell = self._switchboard.bell
        return LocalChannel(*arguments) if bell is None else LocalBellChannel(bell, *arguments)

    def _options_of(self, spec: WorkerSpec) -> ActorOptions:
        """Return the options of an actor: a core for each of its workers, or a proportional share."""
        share = self._cores_per_worker * spec.num_cpus
        # Ray accepts whole numbers of cores, or fractions below 1.
        cores = int(share) if share >= 1 else int(share * 1e4) / 1e4
        return {"num_cpus": cores, "num_gpus": self._gpus_per_host, "max_restarts": 0, **self._options}

    def _await_start(self, actors: Sequence[ActorHandle], options: Sequence[ActorOptions]) -> None:
        import ray

        calls = [actor.handle.introduce.remote() for actor in actors]
        deadline = time.monotonic() + _ray_cluster.START_TIMEOUT
        waiting = calls
        while waiting:
            _, waiting = ray.wait(waiting, num_returns=len(waiting), timeout=max(0.1, deadline - time.monotonic()))
            if waiting and time.monotonic() >= deadline:
                self._give_up_waiting(len(waiting), options, time.monotonic() - deadline + _ray_cluster.START_TIMEOUT)
        for actor, call in zip(actors, calls, strict=True):
            try:
                actor.meet(*ray.get(call))
            except ray.exceptions.RayError as error:
                raise WorkerStartError(f"A Ray actor did not start. Ray says: {error}") from error

    def _give_up_waiting(self, num_waiting: int, options: Sequence[ActorOptions], waited: float) -> None:
        """Raise if actors cannot start for lack of resources, or have not started for too long."""
        lacking = missing_resources(options, "cluster_resources")
        if lacking:
            raise WorkerStartError(
                f"{num_waiting} of {len(options)} Ray actors found no place: {lacking} Change ray_options."
            )
        # Else they are slow to start or wait for others to end; the user has chosen where they run.
        if waited >= _ray_cluster.LONGEST_START and "runtime_env" not in self._options:
            raise WorkerStartError(
                f"{num_waiting} of {len(options)} Ray actors have not started within {waited:.0f} s, though the "
                f"cluster has the resources. No node may fit ray_options={show(self._options)}, or others hold it."
            )

    def allocate(self, layout: Layout) -> Batch:  # noqa: D102 (see Backend)
        if not self._switchboard.channels:
            self._goes_direct = False  # later actors could not share this memory
            return Batch.private(layout)
        memory = SharedMemory.create(layout.nbytes)
        return Batch(layout, memory.map, owner=memory)

    def wait(self, channels: Sequence[Any], timeout: float | None, wanted: int = 1) -> Sequence[Any]:  # noqa: D102 (see Backend)
        near = [channel for channel in channels if isinstance(channel, LocalChannel)]
        if len(near) == len(channels):
            return self._switchboard.wait(near, timeout, wanted)
        far = {channel.answers[0]: channel for channel in channels if isinstance(channel, RayChannel)}
        if not self._cluster.session.lasts:
            return list(far.values())
        deadline = None if timeout is None else time.monotonic() + timeout
        ready: list[Any] = []
        while not ready:
            left = _left(deadline)
            # Nothing waits for both: so wait for remote actors in short intervals.
            ready = look(far, min(left, _MOMENT) if near else left)
            if near:
                ready += self._switchboard.wait(near, 0.0, 1)
            if left <= 0:
                break
        return ready

    def prepare_step(self, commands: Sequence[tuple[Any, Command]]) -> RepeatedStep | None:
        """See `Backend`: a step of actors on this machine."""
        is_near = all(isinstance(channel, LocalChannel) for channel, _ in commands)
        return self._switchboard.prepare_step(commands) if is_near else None

    def flush(self) -> None:
        """See `SubprocBackend.flush`."""
        if self._switchboard.bell is not None:
            self._switchboard.bell.flush()

    def fileno(self) -> int | None:
        """Return a descriptor, see `Backend`, if no actor is reached by Ray's calls, which have none."""
        if any(not (actor.comes_in or actor.is_ended) for actor in self._started):
            return None
        return self._switchboard.poller.fileno()

    def close(self, channels: Sequence[Any], timeout: float) -> Sequence[Printed]:  # noqa: D102 (see Backend)
        if "_cluster" not in vars(self):  # Ray did not start
            return ()
        cluster = self._cluster
        self._switchboard.hang_up()
        deadline = time.monotonic() + timeout
        printed: list[Printed] = []
        if cluster.session.lasts:
            printed += close_and_wait([channel for channel in channels if isinstance(channel, RayChannel)], timeout)
        printed += self._switchboard.close(max(0.0, deadline - time.monotonic()))
        for actor in self._started:
            actor.terminate()
        for actor in self._started:
            actor.close()
        if self._reservation is not None:
            self._reservation.give_back()
        self._reservation = None
        self._shared = {}
        cluster.leave()
        return printed


def _left(deadline: float | None) -> float:
    return _SLICE if deadline is None else min(_SLICE, max(0.0, deadline - time.monotonic()))
