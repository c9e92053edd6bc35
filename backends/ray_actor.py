"""Envs in long-lived Ray actors, several in each, anywhere in a cluster.

One message per actor and step: the actions of its envs one way, their result rows the other.
The envs themselves travel once, when the actor starts.
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Sequence
from typing import Any

from parallelenv.backends.codec import decode, decode_command, decode_reply, encode, encode_command, encode_reply
from parallelenv.backends.host import Host
from parallelenv.backends.lifeline import Address, Lifeline, take_hold
from parallelenv.backends.log import Log, redirect_streams
from parallelenv.backends.ray_cluster import Cluster, missing_resources
from parallelenv.backends.wire import Message
from parallelenv.backends.worker import PackedRecipe, die_with_caller, prepare_worker
from parallelenv.batch import Batch, Layout
from parallelenv.errors import ArgumentError, SchedulingError
from parallelenv.protocol import Channel, Command, Death, HostDied, HostRecipe, Plan, Printed, Reply
from parallelenv.recipes import registered_by_user

START_TIMEOUT = 10.0
"""Seconds after which an actor that could not be placed is an error, if resources are lacking."""


_SLICE = 0.1
_PARTING = 1.0
"""Seconds that Ray gets to end an actor."""


class RayHost:
    """A host as a Ray actor. Its batch is its own; rows travel with commands and replies.

    Args:
        message: A `PackedRecipe`, encoded.
        caller: Where to learn of the end of the caller, sooner than from Ray, which takes 1.4 to 2.6 s.
    """

    def __init__(self, message: Message, caller: Address | None) -> None:
        self._lifeline = take_hold(caller)
        if self._lifeline is not None:
            die_with_caller(self._lifeline)
        self._packed: PackedRecipe = decode(message)
        prepare_worker(self._packed)
        self._host = self._make_host(self._packed.unpack())
        self._log = Log.create()
        if self._log is not None:
            # Python's own output alone: what C code prints goes to Ray's log files.
            redirect_streams(self._log, lambda: self._host.current, (self._log.fileno, self._log.fileno))
        self._batch: Batch | None = None

    def _make_host(self, recipe: HostRecipe) -> Any:
        return Host(recipe)

    def _make_batch(self, layout: Layout) -> Batch:
        batch = Batch.private(layout)
        self._host.attach(batch)
        return batch

    def introduce(self) -> tuple[int, bool]:
        """Return the id of the actor's process, and whether it has hold of the caller's lifeline."""
        return os.getpid(), self._lifeline is not None

    def attach(self, message: Message) -> None:
        """Make the batch of this host's envs."""
        self._batch = self._make_batch(decode(message))

    def execute(self, message: Message) -> Message:
        """Execute a command and return the reply."""
        command: Command = decode_command(message, self._packed.env_ids)
        if command.rows is not None and self._batch is not None:
            self._batch.put_actions(command.env_ids, command.rows)
            command.rows = None
        reply: Reply = self._host.execute(command)
        if command.writes_rows and self._batch is not None:
            reply.rows = self._batch.take_results(command.env_ids)
        if self._log is not None:
            reply.output = [*reply.output, *self._log.take(self._packed.env_ids, is_idle=True)]
        return encode_reply(reply)

    def close(self) -> None:
        """Close the envs."""
        self._host.close()


class RayChannel:
    """Calls to one actor, answered in the order in which they were made."""

    in_caller = False

    def __init__(self, actor: Any, recipe: HostRecipe, lifeline: Lifeline | None) -> None:
        self.actor = actor
        self._lifeline = lifeline
        self.recipe = recipe
        self.answers: deque[Any] = deque()
        self.pid: int | None = None
        self._batch: Batch | None = None
        self._death = Death()

    def meet(self, pid: int, has_hold: bool) -> None:
        """Take note of how the actor has introduced itself."""
        self.pid = pid
        if self._lifeline is not None:
            self._lifeline.keep(is_held=has_hold)

    def pack(self, command: Command) -> Message:  # noqa: D102 (see Channel)
        if command.reads_actions and self._batch is not None:
            command.rows = self._batch.take_actions(command.env_ids)
        # Never the short form without rows: the actor's batch is not the caller's.
        return encode_command(command, everyone=())

    def send(self, packed: Message) -> None:  # noqa: D102 (see Channel)
        self.answers.append(self.actor.execute.remote(packed))

    def receive(self) -> Reply:  # noqa: D102 (see Channel)
        import ray

        try:
            message = ray.get(self.answers[0])
        except ray.exceptions.RayActorError as error:
            self._death = Death(self.pid, None, f"Ray says: {_first_line(error)}")
            raise HostDied from error
        finally:
            self.answers.popleft()
        return decode_reply(_writable(message))

    def attach(self, batch: Batch) -> None:  # noqa: D102 (see Channel)
        self._batch = batch
        self.actor.attach.remote(encode(batch.layout.part(self.recipe.env_ids)))

    def cause_of_death(self) -> Death:  # noqa: D102 (see Channel)
        return self._death

    def kill(self) -> None:  # noqa: D102 (see Channel)
        self.begin_to_kill()
        if self._lifeline is not None:  # not at once: Ray would print that an actor died, if it was not Ray's doing
            self._lifeline.cut_when_free(_PARTING)

    def begin_to_kill(self) -> None:
        """Let Ray end the actor, and do not wait for it."""
        import ray

        self.answers.clear()
        ray.kill(self.actor)


class RayBackend:
    """One actor per core of the cluster, several envs each.

    Args:
        ray_init: Arguments of ``ray.init``, used if Ray is not running.
        ray_options: Options of the actors, as in ``actor.options(...)``.
    """

    uses_live_envs = False
    host_class: type[RayHost] = RayHost

    def __init__(self, *, ray_init: dict[str, Any] | None = None, ray_options: dict[str, Any] | None = None) -> None:
        self._init = dict(ray_init or {})
        self._options = dict(ray_options or {})
        self._cluster: Cluster | None = None
        self._gpus_per_host = 0.0
        self._started: list[RayChannel] = []

    def plan(self, num_envs: int, num_cpus: int | None, num_gpus: float) -> Plan:  # noqa: D102 (see Backend)
        self._cluster = Cluster.join(self._init)
        cores = num_cpus or self._cluster.num_cpus
        plan = self.place(num_envs, cores)
        self._gpus_per_host = num_gpus / plan.num_hosts
        return plan

    def place(self, num_envs: int, num_cpus: int) -> Plan:
        """Return how many actors to start for so many envs on so many cores."""
        return Plan(min(num_cpus, num_envs))

    def launch(self, recipes: Sequence[HostRecipe]) -> list[Channel]:  # noqa: D102 (see Backend)
        import ray

        registered = registered_by_user()
        packed = [encode(PackedRecipe.of(recipe, registered, environment={})) for recipe in recipes]
        options = self._resources(recipes)
        try:
            kind = ray.remote(**options)(self.host_class)
        except ValueError as error:
            raise ArgumentError(f"ray_options={self._options!r} are not what Ray accepts: {error}.") from error
        channels = []
        for message, recipe in zip(packed, recipes, strict=True):
            lifeline = Lifeline.create()
            actor = kind.remote(message, lifeline and lifeline.address)
            channels.append(RayChannel(actor, recipe, lifeline))
            self._started.append(channels[-1])
        try:
            self._await_start(channels, options)
        except BaseException:
            for channel in channels:
                channel.kill()
            raise
        return list(channels)

    def _resources(self, recipes: Sequence[HostRecipe]) -> dict[str, Any]:
        """Return the options of the actors: a core for each of their workers, or a fair share.

        In a cluster that was started here nobody else asks for cores, so none are reserved: else a
        cell that makes a `ParallelEnv` could not run twice, while the first still has the cores.
        """
        gpus = {"num_gpus": self._gpus_per_host, "max_restarts": 0}
        if self._cluster is not None and self._cluster.is_own:
            return {"num_cpus": 0, **gpus, **self._options}
        wanted = sum(recipe.num_cpus for recipe in recipes)
        available = self._cluster.num_cpus if self._cluster else wanted
        share = min(1.0, available / wanted) * recipes[0].num_cpus
        # A whole number or a fraction below 1 is what Ray takes for cores.
        cores = int(share) if share >= 1 else int(share * 1e4) / 1e4
        return {"num_cpus": cores, **gpus, **self._options}

    def _await_start(self, channels: Sequence[RayChannel], options: dict[str, Any]) -> None:
        import ray

        calls = [channel.actor.introduce.remote() for channel in channels]
        deadline = time.monotonic() + START_TIMEOUT
        waiting = calls
        while waiting:
            _, waiting = ray.wait(waiting, num_returns=len(waiting), timeout=max(0.1, deadline - time.monotonic()))
            lacking = missing_resources(options) if waiting and time.monotonic() >= deadline else ""
            if lacking:
                raise SchedulingError(
                    f"{len(channels)} Ray actors with {_describe(options)} each were asked for, but {len(waiting)} of "
                    f"them found no place within {START_TIMEOUT:.0f} s: {lacking} Give a smaller num_cpus or num_gpus, "
                    "close what holds the resources, or ask for less with ray_options={'num_cpus': 0}."
                )
        for channel, call in zip(channels, calls, strict=True):
            channel.meet(*ray.get(call))

    def allocate(self, layout: Layout) -> Batch:  # noqa: D102 (see Backend)
        return Batch.private(layout)

    def wait(self, channels: Sequence[Any], timeout: float | None) -> Sequence[Any]:  # noqa: D102 (see Backend)
        import ray

        first = {channel.answers[0]: channel for channel in channels}
        deadline = None if timeout is None else time.monotonic() + timeout
        ready: list[Any] = []
        while not ready and (deadline is None or time.monotonic() < deadline):
            # In slices: an interrupt is seen between two waits, not within one.
            ready, _ = ray.wait(list(first), num_returns=1, timeout=_left(deadline))
        if len(channels) > 1 and ready:  # whoever else is ready costs no further round of waiting
            ready, _ = ray.wait(list(first), num_returns=len(first), timeout=0)
        return [first[answer] for answer in ready]

    def close(self, channels: Sequence[Any], timeout: float) -> Sequence[Printed]:  # noqa: D102 (see Backend)
        import ray

        if ray.is_initialized():
            closing = [channel.actor.close.remote() for channel in channels]
            ray.wait(closing, num_returns=len(closing), timeout=timeout)
            for channel in self._started:
                channel.begin_to_kill()
            for channel in self._started:
                channel.kill()
        if self._cluster is not None:
            self._cluster.leave()
        return ()


def _left(deadline: float | None) -> float:
    return _SLICE if deadline is None else min(_SLICE, max(0.0, deadline - time.monotonic()))


def _writable(message: Any) -> Message:
    """Return a message whose buffers may be written: Ray's own are read-only."""
    tag, number, frames = message
    return Message(tag, number, [frame if index == 0 else bytearray(frame) for index, frame in enumerate(frames)])


def _first_line(error: BaseException) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)


def _describe(options: dict[str, Any]) -> str:
    wanted = {name: options[name] for name in ("num_cpus", "num_gpus", "memory", "resources") if options.get(name)}
    return ", ".join(f"{name}={value}" for name, value in wanted.items()) or "no resources"
