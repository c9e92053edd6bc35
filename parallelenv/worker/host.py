"""The code that owns envs and executes commands on them; it is the same in every mode.

A host uses four indices for an env. The *env id* is the env's index among all envs of the `ParallelEnv`. The *slot* is
the env's index in the host's lists. The *row* is the env's index in the arrays of the batch, which the host may share
with other hosts. The *cell* is the slice of `RowWriter.flat_states` that contains the env's state.

A vector env is one *item* of the user's list, but contains several envs, its *sub-envs*; each sub-env has an env id. An
env that is not part of a vector env is a *single env*. A *loose leaf* is a part of a state or an action that the
arrays of the batch cannot hold.

A host is *abandoned* if the caller stops waiting for the host's thread, which cannot be killed. The host then gets a
private batch, so that its envs no longer write to the caller's batch.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import operator
from collections.abc import Callable, Collection, Iterator, Sequence
from itertools import repeat
from time import perf_counter
from types import MappingProxyType
from typing import Any, NoReturn

from parallelenv.contract.attributes import look_up
from parallelenv.contract.batch import Batch, Index, InfoForms, Layout, items_at
from parallelenv.contract.copying import Broadcast, deep_copy, deep_copy_but_graph
from parallelenv.contract.env_specs import identity, is_env, is_vector_env
from parallelenv.contract.error_text import count, list_ids, name_envs, show
from parallelenv.contract.failures import Failure
from parallelenv.contract.interrupts import DeferSignals, signal_behind
from parallelenv.contract.protocol import (
    EXHAUSTED,
    Command,
    EnvFacts,
    Extra,
    GroupFacts,
    Lookup,
    ManageRequest,
    MethodCall,
    NoEffect,
    Remark,
    Reply,
    WorkerSpec,
)
from parallelenv.contract.rollout_data import RolloutRequest
from parallelenv.contract.spaces import Action, Env, Info, Space, State
from parallelenv.contract.worker_info import WorkerInfo, call_for, calls_envs, clock_id, this_process
from parallelenv.errors import EnvContractError, EnvInterruptedError, ExhaustedError, InvalidEnvError
from parallelenv.worker import env_adapter
from parallelenv.worker.env_adapter import EnvStep, Resettable
from parallelenv.worker.env_group import EnvGroup
from parallelenv.worker.env_state import EnvGenerators, load_env, put_back, save_env
from parallelenv.worker.rollout_recorder import HostRollout
from parallelenv.worker.row_writer import RowWriter, store_info
from parallelenv.worker.running_command import Columns, Run, RunningCommand, Share, StepEnvs
from parallelenv.worker.tracer import HostTracer, WorkerRecord

_NO_VECTOR = TypeError, ValueError, BufferError
"""Errors of writing a state to a memoryview. JAX raises `BufferError` for an array of bfloat16."""
Shares = tuple[list[Share], Index]
"""The parts of a command, and the rows of all envs of the command."""


class Host:
    """Owns some envs and executes commands on them, in order.

    The operations are `build`, `reset`, `step`, `rollout`, `get`, `set`, `call` and `manage`. Most of them are called
    once per env, with the env id, the command's argument for that env, and the command's common argument. They return
    the env's value for the reply, or ``None`` if there is no value.

    Only `step` and `rollout` are called once for all envs of a command. A separate call of `step` for each env would
    reduce the speed by a tenth. In a rollout, the policy is called for all envs together. If the host has vector envs,
    `EnvGroup` performs `reset`, `step`, `get`, `set` and `call` once per vector env.

    Args:
        in_caller: Whether the host runs in the caller's thread, where Ctrl-C and other signals interrupt it.

    Attributes:
        env_ids: Ids of the host's envs, ascending.
        running: The current command, or the latest one if the host is idle.
        tracer: Records what the envs do and when; ``None`` unless the host is traced.
        writer: Writes the envs' results to the batch. `attach` replaces it, for example when the host is abandoned.
    """

    def __init__(self, spec: WorkerSpec, *, in_caller: bool = False) -> None:
        self.in_caller = in_caller
        self.env_ids = spec.env_ids
        self.running = RunningCommand(Command(0, "", ()))
        self.tracer: HostTracer | None = None
        self.writer: RowWriter
        self._spec = spec
        self._first = spec.env_ids[0]  # id of the env in slot 0
        self._num_envs = spec.num_envs
        self._factories = list(spec.envs)  # by slot
        self._items = [range(slot, slot + 1) for slot in range(len(spec.envs))]  # by slot: all slots of the same item
        self._groups: set[int] = set()  # slots of envs that are part of vector envs
        self._is_numbered = False  # whether the number of envs in each vector env is known
        self._shared_out: tuple[tuple[int, ...], Shares] = (), ([], [])  # envs and result of the latest `_shares`
        self._envs: list[Any] = [None] * len(spec.env_ids)  # `Resettable` or `EnvGroup`, by slot
        self._steps: list[Any] = [_not_built] * len(spec.env_ids)
        self._found: tuple[tuple[int, ...], Any] = (), None  # envs and result of the latest `_find`
        self._spaces: list[Space] = []
        self._rollout: HostRollout | None = None
        self._seeds: dict[int, int | None] = {}  # by env id: the seed of the env's latest reset with a seed
        self._generators: dict[int, EnvGenerators] | None = {} if spec.seed_globals else None
        self._begins: tuple[int, Collection[int]] = 0, ()  # latest step with `begins_ended`: its number, envs to reset
        self._remarks: list[Remark] = []  # to send with the next reply
        self._remarked: set[type[Remark]] = set()  # the kinds of remarks that were sent

    @property
    def envs(self) -> list[Env]:
        """The host's envs as the user made them, in the order of the env ids."""
        return [self._env(env_id).env for env_id in self.env_ids]

    @property
    def current(self) -> int | None:
        """Id of the env that the current or latest command reached most recently.

        The value is ``None`` until the command reaches its first env, and while the policy of a rollout runs.
        """
        return next(iter(self.running.current_ids), None)

    def describe(self, env_id: int) -> WorkerInfo:
        """Return an env's `WorkerInfo`."""
        spec = self._spec
        seed = self._seeds.get(env_id, None if spec.seed is None else spec.seed + env_id)
        shared = MappingProxyType(spec.shared)
        return WorkerInfo(env_id, self._num_envs, spec.worker_id, spec.num_workers, seed, shared)

    def attach(self, batch: Batch) -> None:
        """Make the host's envs read their actions from this batch and write their results to it."""
        self.writer = RowWriter(batch)
        self._found = (), None
        self._shared_out = (), ([], [])
        if batch.layout.group_sizes and not self._is_numbered:
            self._number_envs(batch.layout)

    def _number_envs(self, layout: Layout) -> None:
        """Give every env an id and a slot, now that the layout says how many sub-envs each vector env has."""
        items = self._spec.env_ids
        slots: list[int] = []  # for each env, the previous slot of its item
        begin = 0
        self._items = []
        for slot, item in enumerate(items):
            size = layout.group_sizes[item]
            own = range(begin, begin + max(1, size))
            if size:
                self._groups.update(own)
            self._items += [own] * len(own)
            slots += [slot] * len(own)
            begin = own.stop
        self._is_numbered = True
        self.env_ids = layout.ids_of(items)
        self._first = self.env_ids[0]
        self._num_envs = sum(max(1, size) for size in layout.group_sizes)
        self._factories = [self._factories[slot] for slot in slots]
        self._envs = [self._envs[slot] for slot in slots]
        self._steps = [self._steps[slot] for slot in slots]
        if self._generators:
            old = [self._generators[item] for item in items]
            self._generators = {env_id: old[slot] for env_id, slot in zip(self.env_ids, slots, strict=True)}

    def detach(self) -> None:
        """Release the batch. This method is called after `close`."""
        vars(self).pop("writer", None)

    def close(self) -> None:
        """Close all envs. The host must not get another command afterwards.

        A command that another thread is still executing continues until it is complete or an env fails.

        Raises:
            BaseException: If a signal handler raises an exception, such as the `KeyboardInterrupt` of Ctrl-C, which is
                possible only in the caller's thread. The remaining envs are then not closed, because a user who
                interrupts `close` does not want to wait.
        """

        def close_all() -> None:
            envs, self._envs = self._envs, [None] * len(self._envs)
            self._steps = [_not_built] * len(envs)  # the bound methods would keep the envs alive
            self.running.columns = ((),)  # a thread that continues the command after a failure finds no env
            self.running = RunningCommand(Command(0, "close", self.env_ids))
            for self.running.num_started, env in enumerate(envs, 1):
                if self.running.num_started == 1 or env is not envs[self.running.num_started - 2]:
                    self._close_env(env)

        try:
            call_for(self, close_all)
        finally:
            with DeferSignals():  # an interrupt in a `__del__` would be lost
                self._spec = dataclasses.replace(self._spec, shared={})  # frees the memory of the shared arrays now

    # ---------------------------------------------------------------- commands

    def execute(self, command: Command, dropped: Collection[int] = ()) -> Reply:
        """Execute a command and return the reply. An exception in one env does not affect the other envs.

        If a signal interrupts a step, a reset or a build in the caller's thread, executing the same command again
        continues with the next env that is not in ``dropped``. Other commands are not continued, because the user's
        call has ended: executing such a command again only returns the reply, in which the remaining envs have failed
        as well.
        """
        running = self.running
        if command.operation == "rollout" and (dropped or command.number == running.number):
            return Reply(command.number)  # it was interrupted, and the caller does not want the result
        if command.number != running.number:
            running = self._start(command)
        running.dropped = dropped
        reply = call_for(self, self._run(running).__next__)
        if self._remarks:
            reply.output, self._remarks = self._remarks, []
        return reply

    def prepare(self, command: Command) -> RunningCommand | None:
        """Return a step command in a form that `repeat` can execute until a different batch is attached.

        The command must be a plain step (see `Command.is_plain_step`).
        """
        if self._generators is not None:
            return None
        found = self._shares(command) if self._groups else None
        if found is None:
            return RunningCommand(command, self.step, envs=self._find(command.env_ids))
        return RunningCommand(command, None, (found[0],), shares=found[0])

    @calls_envs
    def repeat(self, prepared: RunningCommand) -> Reply:
        """Execute a prepared step.

        This method makes fewer function calls than `execute`, which saves 10 us per step in a worker.

        After an interrupt or a failure of an env, `execute` continues with the next env.

        Returns:
            The reply. If it is empty, the next step with the same ``prepared`` reuses the object.
        """
        command, reply = prepared.command, prepared.reply
        if self.tracer is not None:
            return self.execute(command)
        if reply.values or reply.failures or reply.output:
            reply = prepared.reply = Reply(command.number)
        reply.number = command.number
        found = None if prepared.shares is None else self._shares(command)
        if found is None:
            prepared.columns = self._start_step(command, prepared.envs)
        else:
            prepared.run = functools.partial(self._run_shares, self._start_shares(command, *found))
        prepared.num_started = 0
        self.running = prepared
        prepared.number = command.number  # set last, see `RunningCommand`
        try:
            prepared.run(prepared, zip(prepared.counts, *prepared.columns, strict=True))
        except BaseException as error:  # noqa: BLE001 (reported as a failure of the current env)
            self._record_failure(error, prepared)
            return self.execute(command)
        if self._remarks:
            reply.output, self._remarks = self._remarks, []
        return reply

    def _start(self, command: Command) -> RunningCommand:
        run: Run
        columns: Columns = ((),)
        found = self._shares(command) if self._groups else None
        if found is not None:
            run, columns = functools.partial(self._run_shares, self._start_shares(command, *found)), (found[0],)
        elif command.operation == "step":
            run, columns = self.step, self._start_step(command, self._find(command.env_ids))
        elif command.operation == "rollout":
            run = self.rollout
        else:
            run = self._operate
            columns = command.env_ids, [None] * len(command.env_ids) if command.each is None else command.each
        if self._generators is not None and command.operation != "rollout":
            run = put_back()(run)
        if self.tracer is not None:
            run = self.tracer.traced(run)
        self.running = running = RunningCommand(command, run, columns, shares=None if found is None else found[0])
        return running

    def _shares(self, command: Command) -> Shares | None:
        """Return the parts of a command, each of which is for one single env or one vector env.

        The result is ``None`` for a rollout, because each of its steps is divided into parts separately, and for all
        ``manage`` requests except ``"save"`` and ``"load"``, because the others do not access the envs.
        """
        if command.operation == "rollout" or (command.operation == "manage" and command.common not in ("save", "load")):
            return None
        known_ids, known = self._shared_out  # read as one tuple, because two threads may use an abandoned host
        if command.env_ids == known_ids:
            return known
        positions: dict[range, list[int]] = {}
        for position, env_id in enumerate(command.env_ids):
            positions.setdefault(self._items[env_id - self._first], []).append(position)
        shares = []
        for slots, found in positions.items():
            found.sort(key=command.env_ids.__getitem__)
            env_ids = tuple(command.env_ids[position] for position in found)
            numbers = None if len(env_ids) == len(slots) else [one - self._first - slots.start for one in env_ids]
            rows = self.writer.batch.rows(env_ids)
            shares.append(Share(env_ids, found, numbers, rows, slots.start in self._groups))
        known = shares, self.writer.batch.rows(command.env_ids)
        self._shared_out = command.env_ids, known
        return known

    def _run(self, running: RunningCommand) -> Iterator[Reply]:
        """Execute the rest of the running command and yield the reply.

        This function is a generator because the frame of a generator does not keep a reference to the frame that called
        it. With an ordinary function, the traceback of a failure that the user has not fetched would keep the user's
        `ParallelEnv` alive.
        """
        while True:
            command = running.command
            running.doing = f"{command.common}_state" if command.operation == "manage" else command.operation
            try:
                running.run(running, running.remaining())
            except BaseException as error:  # noqa: BLE001 (reported as a failure of the current env)
                self._record_failure(error, running)
                if command.operation != "rollout":  # go on with the remaining envs
                    continue
            yield running.reply

    def _record_failure(self, error: BaseException, running: RunningCommand) -> None:
        reply, doing = running.reply, running.doing
        is_interrupt = self.in_caller and signal_behind(error) is not None
        if is_interrupt and not running.num_started:
            raise error
        # If no env has started, all of them fail: for example, there was no memory for the steps of a rollout.
        env_id, *others = running.current_ids or running.command.env_ids
        running.num_started = running.num_started or len(running.counts)
        if isinstance(error, ExhaustedError) and doing == "reset" and not others:  # the env keeps its state
            writer, row = self.writer, env_id - self.writer.first
            writer.rewards[row] = 0.0
            writer.store_flags(row, False, True)
            unknown = [None for array in writer.batch.states if array is None]  # loose leaves before the first state
            loose = writer.loose.get(row, unknown) or None
            reply.values[env_id] = Extra(EXHAUSTED, loose, is_exhausted=True)
        elif is_interrupt:
            state = "their states are" if others else "its state is"
            text = (
                f"{name_envs(running.current_ids)} {'were' if others else 'was'} interrupted in the middle of {doing}; "
                f"{state} uncertain. Call reset({list_ids(running.current_ids) if others else env_id})."
            )
            skipped: list[int] = []
            if running.command.operation not in ("step", "reset", "build"):
                for _, one, *_ in running.remaining():
                    skipped += one.env_ids if running.shares else (one,)
                running.num_started = len(running.counts)
            if skipped:
                text += f" There was no such call for {name_envs(skipped)}."
            interrupted = EnvInterruptedError(text)
            for one in (env_id, *others, *skipped):
                reply.failures[one] = Failure(interrupted, one, f"interrupted {doing}")
            raise error
        else:
            for one in (env_id, *others):
                reply.failures[one] = Failure(error, one, doing)

    def _operate(self, running: RunningCommand, walk: Iterator[Any]) -> None:
        name, common = running.command.operation, running.command.common
        operation = getattr(self, name)
        may_change_states = name in ("get", "set", "call") and self.writer.has_loose
        for running.num_started, env_id, argument in walk:
            if may_change_states:
                self.writer.own_loose(env_id - self.writer.first)
            if self._generators is not None and name == "build":
                seed = self._spec.seed
                generators = EnvGenerators(None if seed is None else seed + env_id)
                own = self._items[env_id - self._first]
                self._generators.update((self._first + slot, generators) for slot in own)
                self._factories[env_id - self._first].prepare()
            value = self._with_generators(env_id, operation)(env_id, argument, common)
            if value is not None:
                running.reply.values[env_id] = value

    def _start_shares(self, command: Command, shares: Sequence[Share], rows: Any) -> Collection[int]:
        """For a step, clear the flags in ``rows`` and return the ids of the envs to be reset instead of stepped.

        If `Command.begins_ended` is set, a vector env that has stepped since it was built decides on its own which of
        its sub-envs to reset.
        """
        if command.operation != "step":
            return ()
        begins: Collection[int] = command.begins
        if command.begins_ended and not all(
            share.is_group and getattr(self._envs[share.env_ids[0] - self._first], "has_stepped", False)
            for share in shares
        ):
            begins = self._begins_of(command)
        self.writer.start_step(rows)
        return begins

    def _run_shares(self, begins: Collection[int], running: RunningCommand, walk: Iterator[Any]) -> None:
        singles: list[tuple[int, Share]] = []  # consecutive single envs, which run together
        for number, share in walk:
            if not share.is_group:
                singles.append((number, share))
                if self.tracer is None:  # a traced host runs each env separately
                    continue
            if singles:
                self._run_singles(running, singles, begins)
                singles = []
            if share.is_group:
                running.num_started = number
                self._run_group(running, share, begins)
        if singles:
            self._run_singles(running, singles, begins)

    def _run_singles(
        self, running: RunningCommand, singles: Sequence[tuple[int, Share]], begins: Collection[int]
    ) -> None:
        command = running.command
        numbers, shares = zip(*singles, strict=True)
        env_ids = tuple(share.env_ids[0] for share in shares)
        each = None if command.each is None else [command.each[share.positions[0]] for share in shares]
        if command.operation == "step":
            one = dataclasses.replace(command, env_ids=env_ids, each=each, begins=tuple(begins), begins_ended=False)
            self.step(running, zip(numbers, *self._start_step(one, self._find(env_ids)), strict=True))
        else:
            self._operate(running, zip(numbers, env_ids, each or repeat(None), strict=each is not None))

    def _run_group(self, running: RunningCommand, share: Share, begins: Collection[int]) -> None:
        command, values, first = running.command, running.reply.values, share.env_ids[0]
        operation = command.operation
        each: Any = None if command.each is None else [command.each[position] for position in share.positions]
        if operation not in ("build", "manage"):
            if operation == "reset":
                seeds = {one: seed for one, (seed, _) in zip(share.env_ids, each, strict=True) if seed is not None}
                self._seeds.update(seeds)
                if self._generators is not None and seeds:  # the first seed is for the global generators
                    generators = self._generators[first]
                    generators.run(generators.seed, next(iter(seeds.values())))
            group: EnvGroup = self._env(first)
            if operation == "step" and not group.has_stepped and first in begins:  # rebuilt after the episodes ended
                run: Any = group.reset_instead
            else:
                run = group.run
            values.update(self._with_generators(first, run)(share, each, self, running))
            if group.oddity:
                self._remark(first)
        else:
            self._operate(running, iter([(running.num_started, first, None if each is None else each[0])]))
            if first in values:  # the value of the first sub-env is the state of the whole vector env
                others = values[first] if operation == "build" else b""
                values.update(dict.fromkeys(share.env_ids[1:], others))

    def _with_generators(self, env_id: int, call: Callable[..., Any]) -> Callable[..., Any]:
        return call if self._generators is None else functools.partial(self._generators[env_id].run, call)

    # ---------------------------------------------------------------- steps

    def _find(self, env_ids: tuple[int, ...]) -> StepEnvs:
        known_ids, found = self._found  # read as one tuple, because two threads may use an abandoned host
        if env_ids == known_ids:
            return found  # type: ignore[no-any-return]
        writer = self.writer
        offset = self._first - writer.first
        rows: Any = writer.batch.rows(env_ids)
        if isinstance(rows, slice):
            row_numbers: Sequence[int] = range(rows.start, rows.stop)
            slots: Sequence[Any] = [slice(rows.start - offset, rows.stop - offset)]
        else:
            row_numbers, slots = rows, [row - offset for row in rows]
        pick = None if env_ids == self.env_ids else operator.itemgetter(*slots)
        found = StepEnvs(rows, row_numbers, items_at(writer.cells, rows), pick)
        self._found = env_ids, found
        return found

    def _start_step(self, command: Command, envs: StepEnvs) -> Columns:
        """Clear the flags of a step's envs; return four columns: each env's row, cell, step function and action."""
        steps: Sequence[Any] = self._steps if envs.pick is None else envs.pick(self._steps)
        begins = self._begins_of(command) if command.begins_ended else command.begins
        if begins:
            steps = [
                functools.partial(self._reset_instead, env_id) if env_id in begins else step
                for env_id, step in zip(command.env_ids, steps, strict=True)
            ]
        self.writer.start_step(envs.rows)
        if command.each is None:
            actions = self.writer.actions(envs.rows)
        else:  # each action is copied just before its env steps, because copying runs user code
            actions = command.each
            steps = [lambda action, step=step: step(deep_copy_but_graph(action)) for step in steps]
        return envs.row_numbers, envs.cells, steps, actions

    def _begins_of(self, command: Command) -> Collection[int]:
        """Return the ids of the envs that a step with `Command.begins_ended` resets.

        The result is cached, because an interrupt may occur while the step starts. When the same step is started again,
        the flags in the batch may already be cleared.
        """
        if self._begins[0] != command.number:
            self._begins = command.number, self.writer.batch.ended(command.env_ids)
        return self._begins[1]

    def _reset_instead(self, env_id: int, action: Action) -> EnvStep:
        state, info = self._reset_within_step(env_id)
        self.running.doing = "step"
        return state, 0.0, False, False, info

    def _reset_within_step(self, env_id: int) -> tuple[State, Info]:
        self.running.doing = "reset"
        env: Resettable | None = self._envs[env_id - self._first]
        if self.tracer is None and self._generators is None and env is not None:
            result = env.reset(None, None, self.writer.space)  # as `_reset` does, with fewer calls
            if env.oddity:
                self._remark(env_id)
            return result
        begin = perf_counter()
        try:
            return self._with_generators(env_id, self._reset)(env_id, None, None)  # type: ignore[no-any-return]
        finally:
            if self.tracer is not None:
                self.tracer.resets.append((begin, perf_counter(), env_id))

    def _reset(self, env_id: int, seed: int | None, options: Info | None) -> tuple[State, Info]:
        env: Resettable = self._env(env_id)
        if self._generators is not None and seed is not None:
            self._generators[env_id].seed(seed)
        result = env.reset(seed, options, self.writer.space)
        if env.oddity:
            self._remark(env_id)
        return result

    def _remark(self, env_id: int) -> None:
        env = self._env(env_id)
        kind = NoEffect if isinstance(env, EnvGroup) else Remark
        if env.oddity and kind not in self._remarked:
            self._remarked.add(kind)
            what, meaning = env.oddity
            what = what if isinstance(env, EnvGroup) else f"is a gymnasium.Env, but {what}"
            self._remarks.append(kind((env_id,), f"env {env_id}, {type(env.env).__name__}, {what}. {meaning}."))

    def step(self, running: RunningCommand, walk: Iterator[Any]) -> None:
        """Step envs; if the command has ``autoreset``, also reset each env whose episode ends.

        The overhead of this method, per env and step, is 0.5 us; a step of CartPole takes 9 us.
        """
        autoreset, values = running.command.autoreset, running.reply.values
        for running.num_started, row, cell, step, action in walk:
            result = step(action)
            writer = self.writer  # read after the step, because an abandoned host has a different writer
            if type(result) is not tuple or len(result) != 5:  # from now on, `Resettable.step` returns five
                env_id = row + writer.first
                env: Resettable = self._env(env_id)
                result = env.five(result)
                self._steps[env_id - self._first] = self._with_generators(env_id, env.step)
                self._remark(env_id)
            state, reward, terminated, truncated, info = result
            loose = other_reward = None
            try:
                writer.flat_states[cell] = state
            except _NO_VECTOR:  # not a vector (`flat_states` is None), or not of the declared shape and dtype
                loose = writer.store_state(row, state)
            if type(reward) is float:
                writer.rewards[row] = reward
            else:
                other_reward = writer.store_reward(row, reward)
            if terminated is not False or truncated is not False:
                writer.store_flags(row, terminated, truncated)
                goes_on = autoreset and (terminated or truncated)
                self._end_episode(row, cell, state, info, loose, other_reward, goes_on, values)
            elif info or loose or other_reward:
                infos = writer.infos
                if infos is None or loose or other_reward or not infos.write(row, info):
                    values[row + writer.first] = _extra(info, loose, other_reward)

    def _end_episode(
        self,
        row: int,
        cell: slice,
        state: State,
        info: Any,
        loose: list[Any] | None,
        other_reward: tuple[Any] | None,
        goes_on: bool,
        values: dict[int, Any],
    ) -> None:
        """Record a step that may have ended the episode, because one of the step's flags is not the object ``False``.

        A flag such as ``numpy.False_`` does not end the episode.
        """
        writer = self.writer
        ended_loose = reset_info = is_exhausted = ended_state = None
        info = store_info(writer.infos, row, info)
        if goes_on:
            if info or loose or other_reward:
                info, loose, other_reward, *_ = self.running.copied(Extra(info, loose, other_reward))
            writer.keep_ended(row)
            ended_state = writer.as_given(state) if writer.keeps_types else None
            ended_loose = loose
            try:
                state, reset_info = self._reset_within_step(row + writer.first)
                writer, loose = self.writer, None  # read again, as in `step`
                try:
                    writer.flat_states[cell] = state
                except _NO_VECTOR:
                    loose = writer.store_state(row, state)
                reset_info = store_info(writer.reset_infos, row, reset_info)
            except ExhaustedError:
                reset_info, is_exhausted = EXHAUSTED, True
            self.running.doing = "step"
        if reset_info or info or loose or other_reward or ended_state or ended_loose:
            extra = _extra(info, loose, other_reward, ended_loose, reset_info, is_exhausted, ended_state)
            values[row + writer.first] = extra

    # ---------------------------------------------------------------- rollouts

    def rollout(self, running: RunningCommand, walk: object) -> None:
        """Make a chunk of a rollout. If the command's common argument is ``None``, drop the policy instead.

        Otherwise, the common argument is a `RolloutRequest`, and each env's argument is the number of episodes that the
        env may still finish, or ``None`` for any number. The reply contains the chunk, with the steps of all envs, as
        the value of the first env.
        """
        command = running.command
        request: RolloutRequest | None = command.common
        if request is None:
            self._rollout = None
            return
        if self._rollout is None or self._rollout.number != request.rollout:
            self._rollout = HostRollout(request.rollout, request.policy)
        running.reply.values[command.env_ids[0]] = self._rollout.play(self, command)

    @calls_envs  # if the policy runs in the caller, this method is called without `execute`
    def run_step(self, env_ids: tuple[int, ...], each: Sequence[Any] | None, autoreset: bool) -> Reply:
        """Step envs within a rollout, in the same way as a step command."""
        rollout, writer = self.running, self.writer
        columns = writer.infos, writer.reset_infos
        writer.infos = writer.reset_infos = None  # columns keep only the latest infos, but a rollout needs all
        try:
            return next(self._run(self._start(Command(0, "step", env_ids, each, autoreset=autoreset))))
        finally:
            writer.infos, writer.reset_infos = columns
            self.running = rollout  # no env is current while the policy runs

    # ---------------------------------------------------------------- operations on one env

    def build(self, env_id: int, expected: GroupFacts | None, has_spaces: bool | None) -> EnvFacts:
        """Make an env and return the facts about it.

        If ``has_spaces`` is true, the facts omit the spaces, because the caller has them. When a vector env is rebuilt,
        ``expected`` has the facts about it from its first build.
        """
        slots = self._items[env_id - self._first]
        old = self._envs[slots.start]
        for slot in slots:
            self._envs[slot], self._steps[slot] = None, _not_built
            self._seeds.pop(self._first + slot, None)
        self._close_env(old)
        env = self._factories[slots.start].build()
        try:
            adapted = _adapt(env)
            group = adapted.facts if isinstance(adapted, EnvGroup) else None
            if hasattr(self, "writer") and group != expected:  # with a writer, the env is rebuilt
                sizes = (0 if one is None else one.num_envs for one in (group, expected))
                found, before = (f"a vector env of {count(size, 'env')}" if size else "a single env" for size in sizes)
                change = f"as {found} instead of {before}"
                if found == before:
                    change = "as another vector env, or with another autoreset mode"
                raise InvalidEnvError(
                    f"{type(env).__name__} was rebuilt {change}. An env fn must make the same env each time."
                )
        except BaseException:
            self._close_env(env)
            raise
        self._adopt(env_id, adapted)
        self._remark(env_id)
        prefix = "" if group is None else "single_"
        return EnvFacts(
            None if has_spaces else self._shared_space(look_up(env, prefix + "observation_space", None)),
            None if has_spaces else self._shared_space(look_up(env, prefix + "action_space", None)),
            dict(look_up(env, "metadata", None) or {}),
            "rgb_array" if env_adapter.draws_by_mode(env) else look_up(env, "render_mode", None),
            this_process(),
            identity(env),
            is_env(env),
            group,
        )

    def _shared_space(self, space: Space | None) -> Space | None:
        """Return a copy of a space. Envs with equal spaces get the same object.

        This keeps the reply for many envs small: pickle writes the same object only once, but writes each of several
        equal objects.
        """
        known = next((other for other in self._spaces if other == space), None)
        if known is None and space is not None:
            known = copy.deepcopy(space)
            self._spaces = [*self._spaces, known][-2 * len(self._envs) :]  # of rebuilt envs, the latest
        return known

    def _adopt(self, env_id: int, adapted: Any) -> None:
        for slot in self._items[env_id - self._first]:
            self._envs[slot] = adapted
            self._steps[slot] = self._with_generators(env_id, adapted.step)

    def _env(self, env_id: int) -> Any:
        return self._envs[env_id - self._first] or _not_built()

    def _close_env(self, env: Any) -> None:
        """Close an env, a `Resettable` or an `EnvGroup`; do nothing with ``None``."""
        close = getattr(env.env if isinstance(env, Resettable) else env, "close", None)
        try:
            if callable(close):
                close()
        except BaseException as error:  # an env that cannot close must not prevent the others from closing
            if self.in_caller and signal_behind(error) is not None:  # otherwise the env itself raised it
                raise

    def reset(self, env_id: int, each: tuple[int | None, Info | None], common: object) -> Extra | None:
        """Reset an env."""
        seed, options = each
        if seed is not None:
            self._seeds[env_id] = seed
        state, info = self._reset(env_id, seed, deep_copy(options))
        loose = self.writer.store_state(env_id - self.writer.first, state)
        return Extra(info or None, loose) if info or loose else None

    def get(self, env_id: int, argument: Any, lookup: Lookup) -> Any:
        """Look up an attribute or a wrapper of an env, as ``lookup`` describes."""
        env = self._env(env_id).env
        if lookup.how == "wrapper":
            return any(isinstance(wrapper, argument) for wrapper in env_adapter.wrappers(env))
        key = argument if lookup.key is None else lookup.key
        self.running.doing = f"the lookup of {key!r}"
        if lookup.how == "required":
            return env_adapter.get_existing(env, key)
        if lookup.how == "hint":
            return env_adapter.near_name(env, key)
        if lookup.how == "exists":
            with contextlib.suppress(AttributeError):  # as `hasattr` and Stable-Baselines3's `has_attr`
                return env_adapter.get_attribute(env, key) is not None
            return False
        return env_adapter.get_attribute(env, key)

    def set(self, env_id: int, value: Any, key: str) -> bool | None:
        """Set an attribute to a copy of the value; return ``True`` if the attribute is new, otherwise ``None``."""
        self.running.doing = f"the setting of {key!r}"
        return env_adapter.set_attribute(self._env(env_id).env, key, deep_copy(value)) or None

    def call(self, env_id: int, call: MethodCall | None, common: Any) -> Any:
        """Call a method of an env. ``call`` or, if it is ``None``, ``common`` contains the method and its arguments."""
        if call is not None:
            call = MethodCall(*deep_copy(tuple(call)))
        else:
            call = MethodCall(*common.call()) if isinstance(common, Broadcast) else common
        env, name, named = self._env(env_id).env, call.name, call.named
        self.running.doing = name + "()"
        found = (env_adapter.get_existing if call.or_attribute else env_adapter.get_method)(env, name)
        if not callable(found):
            return found
        if name != "render":
            return found(*call.positional, **named)
        if not (call.positional or named) and env_adapter.draws_by_mode(env):
            named = {"mode": "rgb_array"}
        with env_adapter.alone_while_drawing():
            return found(*call.positional, **named)

    # ---------------------------------------------------------------- requests of `manage`

    def manage(self, env_id: int, argument: Any, request: ManageRequest) -> Any:
        """Call the method named ``request``. All possible names are listed in `ManageRequest`."""
        return getattr(self, request)(env_id, argument)

    def save(self, env_id: int, _: object) -> bytes | None:
        """Return the pickled state of an env, or ``None`` if the state cannot be saved."""
        own = None if self._generators is None else self._generators[env_id]
        return save_env(self._env(env_id).env, None if own is None else own.save(), self.describe(env_id).seed)

    def load(self, env_id: int, saved: bytes) -> None:
        """Restore a state that `save` returned."""
        old = self._env(env_id)
        own = None if self._generators is None else self._generators[env_id]
        env, generators, self._seeds[env_id] = load_env(old.env, saved, own is not None)
        if generators is not None and own is not None:
            own.load(generators)
        if env is not old.env:
            self._adopt(env_id, _adapt(env))
            self._close_env(old)
        if isinstance(group := self._env(env_id), EnvGroup):
            group.has_stepped = True  # the saved vector env knows which episodes have ended

    def loose_leaves(self, env_id: int, _: object) -> Extra | None:
        """Return the loose leaves of an env's latest state, if there are any."""
        loose = self.writer.loose.get(env_id - self.writer.first)
        return Extra(loose=loose) if loose else None

    def set_info_forms(self, env_id: int, forms: InfoForms) -> None:
        """From now on, for all envs of the host, write infos of these forms to columns of the batch."""
        self.writer.set_info_forms(forms, self.env_ids)

    def start_trace(self, env_id: int, _: object) -> tuple[str, float] | None:
        """Start recording what all envs do; return the id of the host's clock and the clock's current time."""
        if env_id != self.env_ids[0]:
            return None
        self.tracer = HostTracer()
        return clock_id(), perf_counter()

    def stop_trace(self, env_id: int, _: object) -> WorkerRecord | None:
        """Stop recording and return the record."""
        tracer, self.tracer = self.tracer, None
        return None if tracer is None else tracer.record(self.env_ids)


def _extra(info: Any, *others: Any) -> Extra:
    if not isinstance(info, dict) and info is not None:
        raise EnvContractError(f"step() returned the info {show(info)}; an info is a dict.")
    return Extra(info or None, *others)


def _adapt(env: Env) -> Resettable | EnvGroup:
    return EnvGroup(env) if is_vector_env(env) else env_adapter.adapt(env)


def _not_built(*_: object) -> NoReturn:
    raise InvalidEnvError("This env could not be rebuilt. Try restart() again.")
