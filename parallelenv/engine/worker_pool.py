"""Splits operations into commands, sends the commands to the workers of one `ParallelEnv`, and gathers the replies.

This module finds and replaces workers that fail, die or hang; `recovery` decides when they are replaced.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from parallelenv.contract.arguments import share
from parallelenv.contract.batch import Batch, InfoForm, InfoForms, Layout, form_of, items_at
from parallelenv.contract.cpu_cores import usable_cores
from parallelenv.contract.env_specs import EnvFactory, refuse_live, refuse_shared
from parallelenv.contract.error_text import list_ids, name_envs
from parallelenv.contract.failures import NO_FAILURES, Failure, with_env_ids
from parallelenv.contract.interrupts import DeferSignals, Ignore, signal_behind
from parallelenv.contract.protocol import (
    Backend,
    Channel,
    Command,
    Death,
    EnvFacts,
    Extra,
    HostDied,
    Printed,
    RepeatedStep,
    Reply,
    UnreadableError,
    WorkerSpec,
)
from parallelenv.contract.spaces import Info, Spaces, common_space
from parallelenv.contract.worker_info import ProcessInfo, running_hosts
from parallelenv.engine.done_policies import DonePolicy
from parallelenv.engine.groups import Groups
from parallelenv.engine.tickets import Ticket
from parallelenv.engine.worker_output import show_printed
from parallelenv.errors import ArgumentError, ClosedError, UnpicklableError, WorkerDiedError, WorkerTimeoutError

if TYPE_CHECKING:
    from parallelenv.engine.step_plan import StepPlan


_NUM_ALIKE = 3
"""A form gets columns after this many steps in a row whose infos had the same form as those of the previous step."""
_NUM_MISSES = 16
"""A form is given up after this many steps in a row in which most infos did not fit its columns."""
_NUM_TRIES = 64
"""Learning stops after this many steps whose infos cannot be in columns.

A form that is given up counts as `_NUM_MISSES` such steps.
"""


class InfoLearner:
    """Decides which form of infos is stored in columns of the batch."""

    def __init__(self) -> None:
        self.form: InfoForm = ()
        self._candidate: InfoForm = ()
        self._num_alike = 0
        self._num_misses = 0
        self._tries = _NUM_TRIES
        self._generation = -1

    def learn(self, infos: Sequence[Info], num_envs: int, generation: int, num_steps: int) -> bool:
        """Learn from those infos of one step that are not in columns.

        Args:
            infos: The infos that are not in columns. They are ignored unless there are more than ``num_envs / 2`` of
                them.
            num_envs: Number of envs that were stepped.
            generation: The `Pool.generation`. If it has changed, hosts may be new and not know the form.
            num_steps: The approximate number of steps since the last call. All infos of the steps between the two calls
                were empty or in columns.

        Returns:
            Whether the form must be sent to the hosts.
        """
        is_told = not self.form or generation == self._generation
        if not infos and is_told:
            return False
        if 2 * len(infos) <= num_envs and is_told:
            self._num_misses = 0
            return False
        if self.form and is_told:
            self._num_misses = self._num_misses + 1 if num_steps < _NUM_ALIKE else 1
            if self._num_misses < _NUM_MISSES:
                return False
            self.form, self._num_alike, self._num_misses = (), 0, 0
            self._tries -= _NUM_MISSES
            return True
        if self.form:
            self._generation = generation
            return True
        if self._tries <= 0:
            return False
        form = form_of(infos[0]) or ()
        self._num_alike = self._num_alike + 1 if form and form == self._candidate else 0
        self._candidate = form
        self._tries -= not form
        if self._num_alike < _NUM_ALIKE:
            return False
        self.form, self._generation = form, generation
        return True


@dataclass(eq=False)
class WorkerHandle:
    """The pool's record of one host.

    Attributes:
        env_ids: Ids of the host's envs. They are the ids in the spec, unless there are vector envs, whose sizes are
            known only after they are built.
        pending: Tickets of the host's pending commands, by command number. The ticket of a command that was given up is
            replaced by ``None``, and its late reply is dropped.
    """

    spec: WorkerSpec
    channel: Channel
    pending: dict[int, Ticket | None] = field(default_factory=dict)
    death: Death | None = None
    has_built: bool = False

    def __post_init__(self) -> None:
        self.env_ids = self.spec.env_ids

    def is_stuck_for(self, env_ids: Sequence[int]) -> bool:
        """Return whether this worker must be replaced before its envs among ``env_ids`` can be rebuilt.

        Do not ask this of a host in the caller's thread, which is never busy when the caller makes a call.
        """
        return self.death is not None or any(
            ticket is None or not set(env_ids).isdisjoint(ticket.pending[number])
            for number, ticket in self.pending.items()
        )

    def death_error(self, *, others_live: bool) -> WorkerDiedError:
        """Return the error for calls that need the envs of this worker, which is dead."""
        death = self.death or Death()
        owned = list_ids(self.env_ids)
        worker = f"The worker of {name_envs(self.env_ids)} (process {death.pid or 'unknown'})"
        if self.has_built:
            others = "All other envs continue. " if others_live else ""
            way_out = f"Rebuild with restart({owned}), or leave out with pause({owned})."
            message = f"{worker} is dead. {death} {others}{way_out}"
        else:
            message = (
                f"{worker} died while its envs were made. {death} Make one of them alone, in this process, to see why."
            )
        if death.last_lines:
            message += f"\nIts last output:\n{death.last_lines}"
        return WorkerDiedError(message, self.env_ids, death.pid, death.exitcode)


Shard = tuple[WorkerHandle, tuple[int, ...], Any]
"""A host, ids of some of its envs, and their positions among all envs of the call, as a slice or a list."""


def spread(factories: Sequence[EnvFactory], num_workers: int, spec: WorkerSpec) -> list[WorkerSpec]:
    """Assign envs to workers as evenly as possible, and return one spec per worker.

    Each worker has consecutive env ids.
    """
    spec = replace(spec, num_workers=num_workers, num_envs=len(factories))
    size, num_larger = divmod(len(factories), num_workers)
    left, specs = iter(factories), []
    for worker_id in range(num_workers):
        envs = tuple(itertools.islice(left, size + (worker_id < num_larger)))
        env_ids = tuple(env.env_id for env in envs)
        specs.append(replace(spec, env_ids=env_ids, envs=envs, worker_id=worker_id))
    return specs


CLOSE_TIMEOUT = 3.0
"""Seconds that hosts have to close their envs before the hosts are ended."""
_IDLE_REPLY_TIME = 1.0
"""Seconds within which hosts without a pending command certainly reply."""
_MOST_SHARDS = 256
"""Maximum number of kept splits of env ids over workers. They are kept because splitting 8 envs takes 7 us."""


class Pool:
    """Executes operations on envs, wherever they live.

    Attributes:
        facts: Facts about each env from its first build, in env id order.
        processes: The process in which each env lives now, by env id.
        timeout: Seconds that a call may take if its caller gives no other limit; ``None`` means no limit. Building
            envs is never limited.
        is_settled: Becomes False when an operation other than a step is sent, and True again when `wait` returns and no
            command is pending. It stays False if the caller never waits for the operation, or is interrupted while it
            waits.
        generation: Changes when the batch is replaced, and when a worker is replaced or dies.
        planned: The step plan whose step is in flight and has no ticket yet; ``None`` if there is none.
        dead: The errors, by env id, of envs whose worker is dead, or was replaced by one that has not built the env
            yet.
        waits_by: The call, as text for messages, with which a user of an adapter continues to wait for a step; ``None``
            stands for `ParallelEnv.recv`.
        wakers: Functions that wake tasks waiting in event loops; called when replies arrive.
    """

    facts: list[EnvFacts]
    processes: dict[int, ProcessInfo]
    layout: Layout
    batch: Batch

    def __init__(
        self,
        backend: Backend,
        factories: Sequence[EnvFactory],
        *,
        num_cpus: int | None = None,
        num_gpus: float = 0,
        listener: Callable[[Sequence[Printed]], None] = show_printed,
        spec: WorkerSpec,
    ) -> None:
        self._has_spaces = False  # if False, every env is asked for its own spaces
        self.timeout: float | None = None
        self.number = 1
        self._infos, self._reset_infos = InfoLearner(), InfoLearner()
        self._learned_at = 0  # value of `number` when `learn_infos` was last called
        self.generation = 0
        self.is_settled = True
        self.planned: StepPlan | None = None
        self.processes = {}
        self.groups = Groups(())
        self.is_traced = False
        self.waits_by: str | None = None
        num_workers = backend.plan_workers(len(factories), num_cpus, num_gpus)
        if spec.seed_globals and backend.uses_live_envs and num_workers > 1:
            raise ArgumentError(
                "seed_globals=True gives each env its own state of the generators of random, numpy.random and torch, "
                f"which all threads of a process share, so {num_workers} threads cannot step envs at the same time. "
                "Give num_cpus=1, or para_mode='subproc'."
            )
        threads = max(1, usable_cores() // num_workers)
        spec = replace(spec, threads=threads, shared=share(backend, spec.shared) if spec.shared else {})
        specs = spread(factories, num_workers, spec)
        self.env_ids = tuple(factory.env_id for factory in factories)
        self.backend = backend
        # No call per step for a backend that queues nothing.
        self._flush = None if type(backend).flush is Backend.flush else backend.flush
        self._listener = listener
        self._printed: list[Printed] = []
        self._pid = os.getpid()
        self.shield = DeferSignals()
        self.wakers: set[Callable[[], None]] = set()
        self.dead: dict[int, WorkerDiedError] = {}
        channels = backend.launch(specs)
        self._workers = [WorkerHandle(spec, channel) for spec, channel in zip(specs, channels, strict=True)]
        self._worker_of_channel = {worker.channel: worker for worker in self._workers}
        self._number_envs()

    def _number_envs(self) -> None:
        self._worker_of_env = [worker for worker in self._workers for _ in worker.env_ids]
        self._shards: dict[tuple[int, ...], list[Shard]] = {}  # of calls on some of the envs, by env ids
        self._whole: list[Shard] = []
        for worker in self._workers:
            ids = worker.env_ids
            self._whole.append((worker, ids, slice(ids[0], ids[-1] + 1)))

    def build(self, done_policy: DonePolicy, spaces: Spaces | None = None) -> None:
        """Build all envs, and allocate a batch with the arrays that the done policy needs."""
        try:
            self._has_spaces = spaces is not None
            facts = self.ask("build", self.env_ids, common=self._has_spaces).values
            refuse_shared(facts)
            of_items = [facts[item] for item in self.env_ids]
            if spaces is not None:
                of_items = [replace(one, observation_space=spaces[0], action_space=spaces[1]) for one in of_items]
            observation_space = common_space(one.observation_space for one in of_items)
            action_space = common_space(one.action_space for one in of_items)
            sizes = [0 if one.group is None else one.group.num_envs for one in of_items]
            self.facts = [one for one, size in zip(of_items, sizes, strict=True) for _ in range(size or 1)]
            if any(sizes):
                self.groups = Groups(one.group for one in of_items)
                self.env_ids = tuple(range(len(self.facts)))
            self.groups.refuse_policy(done_policy)
            spaces_and_rows = observation_space, action_space, 0, len(self.facts), done_policy.autoreset
            group_sizes = tuple(sizes) if any(sizes) else ()
            self.attach(Layout(*spaces_and_rows, has_infos=True, group_sizes=group_sizes))
        except BaseException as error:
            self.close(CLOSE_TIMEOUT if signal_behind(error) is None else 0.0)
            raise
        for worker in self._workers:
            worker.has_built = True
        self.processes.update({env_id: one.process for env_id, one in enumerate(self.facts)})

    @property
    def num_workers(self) -> int:
        """Number of workers: processes, threads or actors that step envs."""
        return len(self._workers)

    @property
    def lone_host(self) -> Any:
        """The only host, if it runs in this thread and can be called without messages. ``None`` otherwise."""
        channel: Any = self._workers[0].channel
        return getattr(channel, "host", None) if len(self._workers) == 1 and channel.in_caller else None

    def envs_here(self) -> tuple[Any, ...] | None:
        """Return the envs themselves, in env id order, if they live in this process; ``None`` otherwise."""
        hosts: list[Any] = [getattr(worker.channel, "host", None) for worker in self._workers]
        return None if None in hosts else tuple(env for host in hosts for env in host.envs)

    def is_called_by_env(self) -> bool:
        """Return whether code that a host of this pool is running in this thread makes the current call.

        This can be an env, the copying of its result, or the policy of a rollout.
        """
        hosts = (getattr(worker.channel, "host", None) for worker in list(self._workers))
        own = [host for host in hosts if host is not None]  # none if all hosts are in other processes
        return bool(own) and any(host in own for host in running_hosts())

    # ---------------------------------------------------------------- commands

    def ask(
        self,
        operation: str,
        env_ids: Sequence[int],
        each: Sequence[Any] | None = None,
        common: Any = None,
        *,
        announce: Callable[[Ticket], None] = lambda _: None,
        raises: bool = True,
    ) -> Ticket:
        """Execute an operation of `Host` on envs, wait until it is done, and return its ticket.

        ``each`` has one argument per env; ``common`` is the same for every env. See `submit` for ``announce``. With
        ``raises=False``, failures of envs are not raised, but left in the ticket.

        Raises:
            WorkerTimeoutError: If not all hosts replied within the pool's timeout; later replies are dropped.
        """
        ticket = self.submit(operation, env_ids, each, common, announce=announce)
        self.wait(ticket, self.timeout)
        if raises:
            ticket.raise_failures()
        return ticket

    def submit(
        self,
        operation: str,
        env_ids: Sequence[int],
        each: Sequence[Any] | None = None,
        common: Any = None,
        *,
        autoreset: bool = False,
        begins: Sequence[int] = (),
        announce: Callable[[Ticket], None] = lambda _: None,
        failed: Mapping[int, Failure] = NO_FAILURES,
    ) -> Ticket:
        """Send an operation to the hosts and return without waiting. See `ask` and `Command` for the other arguments.

        ``announce`` is called with the ticket just before the first command is sent, when this method can no longer
        raise any of the errors below. ``failed`` has the failures of envs to which nothing can be sent; these failures
        take the place of replies.

        Raises:
            WorkerDiedError: If a worker of the envs is known to be dead and the operation is not ``build``; nothing has
                been sent.
            UnpicklableError: If an argument cannot be copied; nothing has been sent.
            WorkerTimeoutError: If a command can be sent only after its host has replied to earlier ones, because it is
                large or they are many, and the host is late; nothing has been sent.
        """
        self.enter_planned()
        self.groups.refuse_cut(operation, env_ids, each, common)
        ticket = Ticket(operation, tuple(env_ids), each)
        if operation != "step":
            self.is_settled = False
        if failed:
            ticket.failures.update(failed)
            positions = [position for position, env_id in enumerate(env_ids) if env_id not in failed]
            env_ids = items_at(env_ids, positions)
            each = None if each is None else items_at(each, positions)
        if self.dead and operation != "build":
            self.refuse_dead(env_ids)
        packed, lacks_room = [], False
        for worker, part, positions in self._split(env_ids):
            arguments = None if each is None else items_at(each, positions)
            to_begin = tuple(env_id for env_id in part if env_id in begins) if begins else ()
            command = Command(self.number, operation, part, arguments, common, autoreset, to_begin)
            self.number += 1
            packed.append((worker, command, worker.channel.pack(command)))
            lacks_room |= len(worker.pending) > command.most_pending
        if lacks_room:  # wait now, because Ctrl-C could not interrupt a wait in the block below
            self._await_replies({worker: command.most_pending for worker, command, _ in packed})
            ticket.failures = {**self.death_failures(ticket.sent_to), **ticket.failures}
            packed = [one for one in packed if one[0].death is None]
        with self.shield:  # sends all commands, or none if interrupted before `announce` is called
            for _, command, _ in packed:
                ticket.pending[command.number] = command.env_ids
            announce(ticket)
            self._send(ticket, packed)
        return ticket

    def _send(self, ticket: Ticket, packed: Sequence[tuple[WorkerHandle, Command, Any]]) -> None:
        num_sent = 0
        try:
            for worker, command, message in packed:
                worker.pending[command.number] = ticket
                try:
                    worker.channel.send(message)
                except HostDied:
                    self._mark_dead(worker)
                num_sent += 1
            if self._flush is not None:
                self._flush()
        except Exception as error:  # for example, there was no memory for a copy of the message
            for worker, command, _ in packed[num_sent:]:
                worker.pending.pop(command.number, None)
                failures = {env_id: Failure(error, env_id, ticket.operation) for env_id in command.env_ids}
                ticket.record_reply(command.number, {}, failures)
            raise

    def prepare_step(
        self, env_ids: Sequence[int], *, autoreset: bool, begins_ended: bool
    ) -> tuple[RepeatedStep, list[tuple[WorkerHandle, tuple[int, ...]]]] | None:
        """Prepare a step that will be repeated, and return it with the worker and the envs of each command.

        The pool must be idle. The result is ``None`` if the backend has no quick way to repeat the step.
        """
        self.groups.refuse_cut("step", env_ids)
        # Envs in the caller's thread come last, so that the caller steps them while the workers step the other envs.
        split = sorted(self._split(env_ids), key=lambda shard: shard[0].channel.in_caller)
        shards = [(worker, part) for worker, part, _ in split]
        commands = [
            (worker.channel, Command(0, "step", part, autoreset=autoreset, begins_ended=begins_ended))
            for worker, part in shards
        ]
        repeated = self.backend.prepare_step(commands)
        return None if repeated is None else (repeated, shards)

    def learn_infos(self, values: Mapping[int, Extra], num_envs: int) -> None:
        """Make hosts write infos to columns of the batch if the infos of successive steps have the same form.

        ``values`` are the `Ticket.values` of the latest step, which was a step of ``num_envs`` envs. All results whose
        infos are in the columns must already have been returned to the user, because this method may empty the columns.
        Hosts and caller must agree on the form, so Ctrl-C is delayed until the hosts, which are idle, have replied.
        """
        num_steps = (self.number - self._learned_at) // len(self._workers)
        self._learned_at = self.number
        if self.batch.infos is None:
            return
        steps = [extra.info for extra in values.values() if extra.info]
        resets = [extra.reset_info for extra in values.values() if extra.reset_info and not extra.is_exhausted]
        with DeferSignals(), contextlib.suppress(WorkerTimeoutError):  # a late host gets the form before the next step
            has_changed = self._infos.learn(steps, num_envs, self.generation, num_steps)
            if self._reset_infos.learn(resets, 0, self.generation, 1) or has_changed:
                forms = InfoForms(self._infos.form, self._reset_infos.form)
                self.batch.info_columns, self.batch.reset_columns = forms.columns(self.batch)
                firsts = [env_ids[0] for env_ids in self.living if env_ids[0] not in self.dead]
                self.wait(self.submit("manage", firsts, [forms] * len(firsts), "set_info_forms"), _IDLE_REPLY_TIME)

    def enter_planned(self) -> None:
        """If a planned step is still in flight because its call was interrupted, give the step a ticket."""
        if self.planned is not None and self.planned.is_recorded:  # the interrupt came while its result was returned
            self.planned = None
        elif self.planned is not None:
            self.planned.enter()

    def _split(self, env_ids: Sequence[int]) -> Iterable[Shard]:
        if env_ids is self.env_ids or tuple(env_ids) == self.env_ids:
            return self._whole
        known = self._shards.get(env_ids) if type(env_ids) is tuple else None
        if known is not None:
            return known
        positions: dict[WorkerHandle, list[int]] = {}
        for position, env_id in enumerate(env_ids):
            positions.setdefault(self._worker_of_env[env_id], []).append(position)
        shards: list[Shard] = []
        for worker, found in positions.items():
            part, owned = tuple(env_ids[index] for index in found), worker.env_ids
            # For all envs of a worker, always use the same tuple, because a step with that tuple needs no pickle.
            shards.append((worker, owned if part == owned else part, found))
        if len(self._shards) == _MOST_SHARDS:
            self._shards.clear()
        if type(env_ids) is tuple:
            self._shards[env_ids] = shards
        return shards

    # ---------------------------------------------------------------- replies

    def wait(self, ticket: Ticket, timeout: float | None, start: float | None = None) -> None:
        """Wait until all hosts have replied to a call."""
        deadline = None if timeout is None else (time.monotonic() if start is None else start) + timeout
        while ticket.pending:
            if not self.pump(deadline, len(ticket.pending)):
                raise self.late(ticket.pending_ids, timeout, ticket.operation)
        if not self.is_settled:
            self.is_settled = not any(worker.pending for worker in self._workers)

    def wait_or_give_up(self, ticket: Ticket, start: float | None = None) -> bool:
        """Wait for the replies to a call, but no longer than the pool's timeout. Late envs then count as failed."""
        try:
            self.wait(ticket, self.timeout, start)
        except WorkerTimeoutError as late:
            self.give_up(ticket, late)
            return False
        return True

    def give_up(self, ticket: Ticket, error: Exception) -> None:
        """Give up the pending commands of a call and all other pending commands of the hosts concerned.

        The envs of these commands fail with ``error``.
        """
        for worker in self._workers:
            if not ticket.pending.keys() & worker.pending.keys():
                continue
            for number, waiting in worker.pending.items():
                if waiting is not None:
                    late = waiting.pending[number]
                    with self.shield:  # otherwise, after an interrupt, the call would never be complete
                        worker.pending[number] = None
                        waiting.record_reply(number, {}, {env_id: Failure(error, env_id, "") for env_id in late})

    def drop(self, env_ids: Sequence[int]) -> None:
        """Leave out these envs of steps and resets that were interrupted in the caller's thread.

        Other hosts execute each command that they were sent, and so do those in the caller's thread if no call has
        waited for the command: otherwise, a later reset without a seed would differ between the modes.
        """
        for worker in self._workers:
            if worker.pending and worker.channel.in_caller:
                awaited = {number for number, ticket in worker.pending.items() if ticket is None or ticket.is_awaited}
                channel: Any = worker.channel
                channel.drop(env_ids, awaited)

    def ways_to_wait(self, num_envs: int) -> str:
        """Return the text of the call with which the user can continue to wait for the steps of ``num_envs`` envs."""
        return self.waits_by or f"recv(min_envs={num_envs})"

    def late(self, env_ids: Sequence[int], timeout: float | None, call: str) -> WorkerTimeoutError:
        """Return the error that names the late envs and says what the user can do.

        ``call`` is the name of the method that the user called, if there is specific advice for that method, or else
        the name of the operation that did not finish in time. ``"idle"``: an earlier call did not.
        """
        ids = tuple(sorted(env_ids))
        wait_on = self.ways_to_wait(len(ids)) if call == "step" else f"{call}()"
        waiting = f"Continue to wait with {wait_on}, give a longer timeout, or rebuild with restart({list_ids(ids)})."
        ways = {
            **dict.fromkeys(("step", "reset_wait", "call_wait"), waiting),
            "rollout": f"The steps since the last chunk are lost: start again with reset({list_ids(ids)}), after "
            f"restart({list_ids(ids)}) if the env hangs, and with a longer timeout if it is only slow.",
            "run_episodes": "All envs that played need a reset. Play again with a longer timeout, after "
            f"restart({list_ids(ids)}) if the env hangs.",
        }
        other = f"Give a longer timeout, or rebuild with restart({list_ids(ids)})."
        ways["idle"] = f"They are still busy with an earlier call, so nothing was sent. {other}"
        way_out = ways.get(call, other)
        return WorkerTimeoutError(f"{name_envs(ids)} did not answer within {timeout} s. {way_out}", ids)

    def pump(self, deadline: float | None, wanted: int = 1, workers: Iterable[WorkerHandle] | None = None) -> bool:
        """Wait for replies from hosts (``None``: all), at most until a deadline, and record the replies.

        ``deadline`` is a time on the clock of `time.monotonic`; see `Backend.wait` for ``wanted``.

        Returns:
            Whether any reply or output arrived before the deadline.
        """
        self.enter_planned()
        self._refuse_closed()
        timeout = None if deadline is None else max(0.0, deadline - time.monotonic())
        waited = [worker.channel for worker in workers or self._workers if worker.pending]
        ready = self.backend.wait(waited, timeout, wanted)
        with self.shield:
            has_answer = False
            for channel in ready:
                has_answer |= self._receive(self._worker_of_channel[channel])
        if ready and self.wakers:
            for wake in tuple(self.wakers):
                wake()
        if self._printed:
            printed, self._printed = self._printed, []
            self._listener(printed)
        # Without an answer, there was only output, or a late reply that no call waits for. An env that prints all the
        # time must not outlast the deadline.
        return has_answer or (bool(ready) and (deadline is None or time.monotonic() < deadline))

    def _refuse_closed(self) -> None:
        if not self._workers:
            raise ClosedError("This ParallelEnv was closed while a call was waiting for its envs.")

    def _receive(self, worker: WorkerHandle) -> bool:
        """Record a reply or output of a host; return whether a call got a reply, or its worker died."""
        try:
            reply = worker.channel.receive()
        except HostDied:
            self._mark_dead(worker)
            return True
        except UnreadableError as error:  # the command or the reply could not be unpickled
            unread = worker.pending.get(error.number)
            env_ids = () if unread is None else unread.pending[error.number]
            cause = UnpicklableError(
                f"Data sent to or from a worker can be pickled but not unpickled ({error.reason}). Give and return "
                "plain data."
            )
            failures = {env_id: Failure(cause, env_id, "the copying between processes") for env_id in env_ids}
            reply = Reply(error.number, {}, failures)
        if reply.output:
            items, env_ids = worker.spec.env_ids, worker.env_ids
            for one in reply.output:  # output of a whole worker has the ids of its items
                is_of_items = one.env_ids == items and len(items) < len(env_ids)
                self._printed.append(one._replace(env_ids=env_ids) if is_of_items else one)
        ticket = worker.pending.pop(reply.number, None)
        if ticket is None:  # the command was given up, or there is only output
            return False
        if reply.rows is not None:
            self.batch.put_results(ticket.pending[reply.number], reply.rows)
        if reply.failures and ticket.operation in ("step", "reset"):
            self.groups.spread(reply.failures, ticket.pending[reply.number])
        ticket.record_reply(reply.number, reply.values, reply.failures)
        # Drop the failures. A host in this process keeps its latest reply, and an exception in the reply would keep the
        # frames through which it is raised, including the user's call and its variables.
        reply.failures.clear()
        return True

    @property
    def living(self) -> list[tuple[int, ...]]:
        """Env ids of each living worker."""
        return [worker.env_ids for worker in list(self._workers) if worker.death is None]

    @property
    def is_idle(self) -> bool:
        """True if no worker is known to be dead and none has a pending command."""
        return not self.dead and not any(worker.pending for worker in self._workers)

    @property
    def is_held_up(self) -> bool:
        """True if a command that runs in the caller's thread was interrupted and will resume at the next wait."""
        return any(worker.channel.in_caller and worker.pending for worker in self._workers)

    @property
    def dead_env_ids(self) -> list[int]:
        """Ids of envs whose worker is known to be dead, ascending. Any thread may read this property."""
        return sorted(self.dead.copy())

    # ---------------------------------------------------------------- dead workers

    def death_failures(self, env_ids: Sequence[int]) -> dict[int, Failure]:
        """Return, by env id, the failures of the given envs whose worker is known to be dead."""
        return {env_id: Failure(self.dead[env_id], env_id, "") for env_id in env_ids if env_id in self.dead}

    def refuse_dead(self, env_ids: Sequence[int]) -> None:
        """Raise `WorkerDiedError` if a worker of these envs is known to be dead."""
        dead = tuple(env_id for env_id in env_ids if env_id in self.dead) if self.dead else ()
        if dead:
            raise with_env_ids(self.dead[dead[0]], dead)

    def _mark_dead(self, worker: WorkerHandle, death: Death | None = None) -> None:
        self._refuse_closed()
        self.generation += 1
        worker.death = death or worker.channel.cause_of_death()
        earlier = [one for one in self._workers if one.death and one is not worker]
        error = worker.death_error(others_live=not earlier and len(self._workers) > 1)
        self.dead.update(dict.fromkeys(worker.env_ids, error))
        for one in earlier:  # the message, which a worker's envs share, may say that all other envs continue
            self.dead[one.env_ids[0]].args = one.death_error(others_live=False).args
        for number, ticket in sorted(worker.pending.items()):
            if ticket is not None:
                ticket.record_reply(number, {}, self.death_failures(ticket.pending[number]))
        worker.pending.clear()
        worker.channel.kill()

    # ---------------------------------------------------------------- rebuilding envs

    def rebuild(self, env_ids: Sequence[int], announce: Callable[[Sequence[int]], None] = lambda _: None) -> Ticket:
        """Build envs anew from their factories, and return the finished ticket, which covers all envs that were built.

        A host that is dead, was given up, or is busy with one of these envs is replaced, and all its envs are built
        anew. A host with pending commands only for other envs may finish these commands; if that takes longer than the
        pool's timeout, the host is replaced as well.

        Args:
            env_ids: The envs.
            announce: Called with the ids of all envs to build, just before the first command is sent. At that time,
                `death_failures` still reports the envs of dead workers.

        Raises:
            InvalidEnvError: If an env that was given as a live instance lives in this process, and therefore cannot be
                built again. Nothing has been changed.
        """
        self.enter_planned()
        env_ids = self.groups.complete(env_ids)
        self._refuse_live(env_ids)
        workers = dict.fromkeys(map(self._worker_of_env.__getitem__, env_ids))
        others = [worker for worker in workers if not worker.channel.in_caller]
        # First read the replies that have arrived: those hosts are not busy any more.
        self._let_finish(dict.fromkeys(others, 0), 0.0)
        self._let_finish(dict.fromkeys((one for one in others if not one.is_stuck_for(env_ids)), 0), self.timeout)
        broken = [worker for worker in workers if worker.death or (worker.pending and worker in others)]
        # These include the envs of a worker whose replacement was interrupted before the envs were built.
        lost = (one for worker in workers for one in worker.env_ids if worker in broken or one in self.dead)
        rebuilt = self.groups.complete([*env_ids, *lost])
        self._refuse_live(rebuilt)
        for worker in broken:
            self._replace(worker)

        def note(_: Ticket) -> None:
            announce(tuple(rebuilt))
            for env_id in rebuilt:
                self.dead.pop(env_id, None)

        ticket = self.submit("build", rebuilt, self.groups.facts(rebuilt), self._has_spaces, announce=note)
        self.wait(ticket, None)
        self.processes.update({env_id: one.process for env_id, one in ticket.values.items()})
        replaced = [env_id for worker in broken for env_id in worker.env_ids if env_id not in self.dead]
        if self.is_traced and replaced:  # new hosts record what their envs do, like the others
            self.wait(self.submit("manage", replaced, None, "start_trace"), None)
        return ticket

    def _refuse_live(self, env_ids: Sequence[int]) -> None:
        if self.backend.uses_live_envs:
            factories = [factory for worker in self._workers for factory in worker.spec.envs]
            refuse_live(factories[self.groups.item(env_id)] for env_id in env_ids)

    def _let_finish(self, most_pending: Mapping[WorkerHandle, float], timeout: float | None) -> list[WorkerHandle]:
        """Wait until each of these hosts has at most so many pending commands.

        Return the hosts that have more after ``timeout`` seconds.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        while busy := [worker for worker, most in most_pending.items() if len(worker.pending) > most]:
            if not self.pump(deadline, workers=busy):
                break
        return busy

    def _await_replies(self, most_pending: Mapping[WorkerHandle, float]) -> None:
        """Call `_let_finish` with the pool's timeout; raise a `WorkerTimeoutError` if any hosts are late."""
        if busy := self._let_finish(most_pending, self.timeout):
            raise self.late([env_id for worker in busy for env_id in worker.env_ids], self.timeout, "idle")

    def _replace(self, worker: WorkerHandle) -> None:
        """Start a new host in place of one that is dead or busy.

        If the new host cannot be started, the worker counts as dead, and this method can be called again.
        """
        self.generation += 1
        if worker.death is None:
            death = Death(detail="It was busy, and was replaced because one of its envs had to be rebuilt.")
            with self.shield:
                self._mark_dead(worker, death)
        (channel,) = self.backend.launch([worker.spec])
        with self.shield:
            channel.attach(self.batch)
            self._worker_of_channel.pop(worker.channel, None)
            worker.channel = channel
            self._worker_of_channel[channel] = worker
            worker.death = None

    # ---------------------------------------------------------------- the batch

    def attach(self, layout: Layout) -> None:
        """Allocate a batch with this layout, and give all hosts, which must be idle, access to it.

        All states in an earlier batch are lost. An interrupt is delayed: a host that still had the earlier batch would
        write its results where the caller does not read them.
        """
        batch = self.backend.allocate(layout)
        with self.shield:
            for worker in self._workers:
                worker.env_ids = layout.ids_of(worker.spec.env_ids)
                if worker.death is None:  # the replacement of a dead worker gets the batch in `_replace`
                    worker.channel.attach(batch)
            self.layout, self.batch = layout, batch
            self.generation += 1
            self._number_envs()

    def await_idle(self) -> None:
        """Wait until no host has a pending command.

        Raises:
            WorkerTimeoutError: If hosts do not finish their pending commands within the pool's timeout.
        """
        self.enter_planned()
        self._await_replies(dict.fromkeys(self._workers, 0))

    # ---------------------------------------------------------------- closing

    def close(self, timeout: float = CLOSE_TIMEOUT) -> None:
        """End all hosts, giving them ``timeout`` seconds to close their envs. May be called repeatedly.

        Raises:
            BaseException: If a signal handler raises an exception, such as the `KeyboardInterrupt` of Ctrl-C. All
                remaining hosts are then ended at once, before the exception is raised.
        """
        workers = self._workers
        if not workers or os.getpid() != self._pid:  # a forked child must not end its parent's workers
            return
        channels = [worker.channel for worker in workers if not worker.death]
        try:
            with DeferSignals():  # not `self.shield`: another thread may be using the pool
                self._workers = []
                vars(self).pop("batch", None)  # free the memory now, not with this object
                self.planned = None  # likewise: a plan refers to the batch
                for worker in workers:
                    worker.spec = replace(worker.spec, shared={})  # likewise
            printed = [*self._printed, *self.backend.close(channels, timeout)]
        except BaseException:
            while True:
                try:
                    self.backend.close(channels, 0.0)
                    break
                except BaseException as again:
                    if signal_behind(again) is None:
                        raise
            raise
        if printed:
            with Ignore(OSError, ValueError):  # the interpreter is exiting, and the output is closed
                self._listener(printed)
