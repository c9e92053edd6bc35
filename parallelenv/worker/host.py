"""The code that owns envs and executes commands on them, the same in every mode."""

from __future__ import annotations

import copy
import dataclasses
import functools
import operator
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, MutableSequence, Sequence
from itertools import compress
from types import MappingProxyType
from typing import Any, NoReturn

from parallelenv.contract.batch import Batch
from parallelenv.contract.copying import Broadcast, deep_copy, deep_copy_but_graph
from parallelenv.contract.env_specs import is_env
from parallelenv.contract.error_text import show
from parallelenv.contract.failures import Failure
from parallelenv.contract.info_columns import InfoForms
from parallelenv.contract.interrupts import DeferSigint
from parallelenv.contract.protocol import (
    EXHAUSTED,
    Command,
    EnvFacts,
    Extra,
    Lookup,
    MethodCall,
    Remark,
    Reply,
    WorkerSpec,
)
from parallelenv.contract.rollout_data import RolloutRequest
from parallelenv.contract.spaces import Action, Env, Info, Space, State
from parallelenv.contract.worker_info import WorkerInfo, call_for, calls_envs, this_process
from parallelenv.errors import EnvContractError, EnvInterruptedError, ExhaustedError, InvalidEnvError
from parallelenv.worker.env_adapter import (
    EnvStep,
    Resettable,
    adapt,
    draws_by_mode,
    get_attribute,
    get_existing,
    get_method,
    layers,
    near_name,
    set_attribute,
)
from parallelenv.worker.env_state import EnvGenerators, load_env, put_back, save_env
from parallelenv.worker.rollout_recorder import HostRollout
from parallelenv.worker.row_writer import RowWriter
from parallelenv.worker.tracer import HostTracer, begin_tracing, end_tracing

Values = dict[int, Any]
"""Results that are not in the batch, by env id."""
Run = Callable[[Values], None]
"""Runs the rest of a command, and writes the results to the dict, by env id."""
Columns = tuple[Sequence[Any], ...]
"""What a command needs of each of its envs."""
Reset = tuple[float, float, int]
"""Begin and end of a reset within a step, and the env's id."""

_DRAWING = threading.RLock()
"""Held while an env renders: if two threads draw with pygame at the same time, one in six frames is wrong."""
_LONGEST_DRAWING = 10.0
"""Seconds after which a rendering thread counts as hung, and the others no longer wait for it."""


class PreparedStep:
    """A step of the same envs again and again, with what a host looks up only once.

    Args:
        command: The command. Its number is set anew for each step.
        run: Executes the rest of it, once it has begun.
        writer: The rows of the batch.
        everyone: All envs of the host.

    Attributes:
        command: As given.
        run: As given.
        reply: The reply to it.
        rows: Index of the envs' rows.
        numbers: The rows, one by one.
        cells: Slices of ``writer.line``.
        indices: 1 to the number of envs.
        pick: Returns the envs' items of a list with one for each env of the host; ``None``: all are wanted.
    """

    __slots__ = ("cells", "command", "indices", "numbers", "pick", "reply", "rows", "run")

    def __init__(self, command: Command, run: Run, writer: RowWriter, everyone: tuple[int, ...]) -> None:
        self.command = command
        self.run = run
        self.reply = Reply(command.number)
        self.rows = writer.rows(command.env_ids)
        self.numbers = [env_id - writer.first for env_id in command.env_ids]
        self.cells = writer.cells(self.numbers)
        self.indices = range(1, len(self.numbers) + 1)
        places = [env_id - everyone[0] for env_id in command.env_ids]
        self.pick: Any = None
        if command.env_ids != everyone:
            self.pick = operator.itemgetter(*places if len(places) > 1 else [slice(places[0], places[0] + 1)])


class Host:
    """Owns a group of envs and executes commands on them, in order.

    The operations are `build`, `reset`, `step`, `rollout`, `get`, `set`, `call` and `state`. Most of them take an env
    id, the command's argument for that env, and the command's common argument; they return the env's value, or ``None``
    if there is none. Only `step` and `rollout` run for all envs of a command at once: calls and look-ups per env would
    cost a step a tenth of its speed, and a policy is called for all envs together.

    Args:
        spec: The envs, and their settings.
        in_caller: Whether it runs in the caller's main thread, which receives Ctrl-C.

    Attributes:
        everyone: Ids of its envs, ascending.
        doing: What it is doing now, for messages.
        index: Number of envs of the present command that have begun.
        tracer: Records when its envs do what, while it is traced.
        resets: Record of resets, during a step that is traced.
        writer: The rows that its envs write now; other rows once the host was abandoned.
        remarks: Warnings to send with the next reply; only for the first env with something unusual.
    """

    def __init__(self, spec: WorkerSpec, *, in_caller: bool = False) -> None:
        self.in_caller = in_caller
        self.writer: RowWriter
        self.doing = ""
        self.index = 0
        self.tracer: HostTracer | None = None
        self.resets: MutableSequence[Reset] | None = None
        self.remarks: list[Remark] = []
        self._has_remarked = False
        self._spec = spec
        self.everyone = spec.env_ids
        self._first = spec.env_ids[0]
        self._envs: list[Resettable | None] = [None] * len(spec.env_ids)
        self._steps: list[Any] = [_not_built] * len(spec.env_ids)
        self._spaces: list[Space] = []
        self._rollout: HostRollout | None = None
        self._seeds: dict[int, int] = {}  # of the latest seeded reset of each env
        self._generators: dict[int, EnvGenerators] | None = {} if spec.seed_globals else None
        self._command: Command | None = None  # the present or the latest one
        self._number = 0  # its number
        self._run: Run
        self._columns: Columns
        self._clock: Iterator[bool] | None = None  # notes when each env begins, while the command is recorded
        self._reply: Reply

    @property
    def envs(self) -> list[Env]:
        """Its envs as they were made, in env id order."""
        return [self._env(env_id).env for env_id in self.everyone]

    def attach(self, batch: Batch) -> None:
        """Use this batch: its envs write their results to its rows."""
        self.writer = writer = RowWriter(batch)
        # The items that a step of all envs walks over, made once.
        rows = writer.rows(self.everyone)
        self._whole = rows, range(rows.start, rows.stop), writer.cells(rows)

    def detach(self) -> None:
        """Release the batch. No command may follow; one that is executed in another thread ends."""
        self._columns = ((),)  # they have views of its rows
        for name in ("writer", "_whole"):
            vars(self).pop(name, None)

    def execute(self, command: Command) -> Reply:
        """Execute a command on each of its envs; an exception in one env does not affect the others.

        After an interrupt of the caller's own thread, the same command again continues with the next env.
        """
        if command.number != self._number:
            self._begin_command(command)
        return call_for(self, self._finish(command).__next__)

    def prepare(self, command: Command) -> PreparedStep | None:
        """Return a plain step command in a form for `repeat`, until another batch is attached; ``None`` if it has none.

        Envs with generators of their own have none.
        """
        if self._generators is not None:
            return None
        run = functools.partial(self.step, command.autoreset)
        return PreparedStep(command, run, self.writer, self.everyone)

    @calls_envs
    def repeat(self, prepared: PreparedStep) -> Reply:
        """Execute a prepared step like `execute`, with fewer calls: in a worker these cost 10 us per step.

        After an interrupt, or a failure of an env, `execute` continues with the next env.

        Returns:
            The reply, which the next step with the same ``prepared`` overwrites if it is empty.
        """
        command, reply, writer = prepared.command, prepared.reply, self.writer
        if self.tracer is not None:
            return self.execute(command)
        if reply.values or reply.failures or reply.output:
            reply = prepared.reply = Reply(command.number)
        reply.number = command.number
        steps = self._steps if prepared.pick is None else prepared.pick(self._steps)
        if command.begins_ended and (ended := writer.ended(prepared.numbers)):
            steps = self._with_resets(steps, command.env_ids, ended)
        writer.clear_flags(prepared.rows)
        columns = prepared.numbers, prepared.cells, steps, writer.actions(prepared.rows)
        self._run, self._clock = prepared.run, None
        self._columns, self._reply, self.index, self.doing = columns, reply, 0, "step"
        self._command = command
        self._number = command.number  # last, see `_begin_command`
        try:
            self.step(command.autoreset, reply.values, zip(prepared.indices, *columns, strict=True))
        except BaseException as error:  # noqa: BLE001 (told to the user as a failure of its env)
            self._note_failure(error, reply)
            return self.execute(command)
        if self.remarks:
            reply.output, self.remarks = self.remarks, []
        return reply

    def _begin_command(self, command: Command) -> None:
        """Prepare a command and make it the present one."""
        run: Run
        if command.operation == "step":
            run, columns = functools.partial(self.step, command.autoreset), self._columns_of_step(command)
        elif command.operation == "rollout":
            run, columns = self.rollout, ([command],)
        else:
            run = functools.partial(self._operate, getattr(self, command.operation), command.common)
            columns = command.env_ids, [None] * len(command.env_ids) if command.each is None else command.each
        if self._generators is not None and command.operation != "rollout":
            run = put_back()(run)
        self._clock = None
        if self.tracer is not None:
            run, self._clock = self.tracer.traced(self, command, run)
        self._run, self._columns, self._reply, self.index = run, columns, Reply(command.number, {}, {}), 0
        self._command = command
        self._number = command.number  # last: an interrupt before this line repeats the preparation

    def _finish(self, command: Command, *, is_inner: bool = False) -> Iterator[Reply]:
        """Execute the rest of the present command and yield its reply.

        A generator, because its frame does not keep a reference to its caller: otherwise the traceback of a failure
        that was not fetched would keep the caller's `ParallelEnv` alive.
        """
        reply = self._reply
        while True:
            self.doing = command.operation
            try:
                self._run(reply.values)
            except BaseException as error:  # noqa: BLE001 (told to the user as a failure of its env)
                self._note_failure(error, reply)
            else:
                if self.remarks and not is_inner:  # the reply to a step within a rollout is not sent
                    reply.output, self.remarks = self.remarks, []
                yield reply

    def _note_failure(self, error: BaseException, reply: Reply) -> None:
        """Record an env's failure, or that it has no further episode; raise an interrupt again."""
        env_id = self.current
        if env_id is None:
            raise error
        if isinstance(error, ExhaustedError) and self.doing == "reset":
            reply.values[env_id] = self.rest(env_id)
            return
        if not (isinstance(error, KeyboardInterrupt) and self.in_caller):
            reply.failures[env_id] = Failure(error, env_id, self.doing)
            return
        interrupted = EnvInterruptedError(
            f"env {env_id} was interrupted in the middle of {self.doing}; its state is uncertain. Call reset({env_id})."
        )
        reply.failures[env_id] = Failure(interrupted, env_id, f"interrupted {self.doing}")
        raise error

    def _walk(self) -> Iterator[Any]:
        """Return an iterator over the envs that have not begun: ``index`` once they have, and their columns."""
        index, columns = self.index, self._columns
        if index:  # an env has failed or was interrupted
            columns = tuple(column[index:] for column in columns)
        walk = zip(range(index + 1, index + 1 + len(columns[0])), *columns, strict=True)
        return walk if self._clock is None else compress(walk, self._clock)

    def _operate(self, operation: Callable[..., Any], common: Any, values: Values) -> None:
        """Run an operation for one env after the other."""
        for index, env_id, argument in self._walk():
            self.index = index
            if self._generators is not None and operation == self.build:
                seed = self._spec.seed
                self._generators[env_id] = EnvGenerators(None if seed is None else seed + env_id)
                self._spec.envs[env_id - self._first].prepare()
            value = self._with_own(env_id, operation)(env_id, argument, common)
            if value is not None:
                values[env_id] = value

    def _with_own(self, env_id: int, call: Callable[..., Any]) -> Callable[..., Any]:
        """Return a call that runs with an env's own global generators, if envs have their own."""
        return call if self._generators is None else functools.partial(self._generators[env_id].run, call)

    def describe(self, env_id: int) -> WorkerInfo:
        """Return an env's `WorkerInfo`."""
        spec = self._spec
        seed = self._seeds.get(env_id, None if spec.seed is None else spec.seed + env_id)
        shared = MappingProxyType(spec.shared)
        return WorkerInfo(env_id, spec.num_envs, spec.worker_id, spec.num_workers, seed, shared)

    @property
    def current(self) -> int | None:
        """The env that the latest command has reached or stopped at; ``None`` before its first, and between envs."""
        index, command = self.index, self._command
        return None if command is None or not index else command.env_ids[index - 1]

    def close(self) -> None:
        """Close all envs.

        Raises:
            KeyboardInterrupt: Only in the caller's thread. The remaining envs are then not closed, like those of a
                killed worker: a user who interrupts `close` does not want to wait for them.
        """

        def close_all() -> None:
            envs, self._envs = self._envs, [None] * len(self._envs)
            self._command, self.index = Command(0, "close", self.everyone), 0
            for index, env in enumerate(envs):
                self.index = index + 1
                self._close_env(env)

        try:
            call_for(self, close_all)
        finally:
            with DeferSigint():  # an interrupt in a `__del__` would be lost
                self._spec = dataclasses.replace(self._spec, shared={})  # frees their memory now

    def _close_env(self, env: Resettable | None) -> None:
        """Close an env that is no longer used, and ignore what it raises."""
        close = getattr(env.env, "close", None) if env is not None else None
        try:
            if callable(close):
                close()
        except BaseException as error:  # an env that cannot close must not keep the others from it
            if isinstance(error, KeyboardInterrupt) and self.in_caller:  # else the env itself raised it
                raise

    # ---------------------------------------------------------------- steps

    def _columns_of_step(self, command: Command) -> Columns:
        """Return row, slice of ``writer.line``, ``step`` and action of each env, for `step`."""
        writer, steps = self.writer, self._steps
        numbers: Sequence[int]
        rows, numbers, cells = self._whole
        if command.env_ids is not self.everyone and command.env_ids != self.everyone:
            numbers = [env_id - writer.first for env_id in command.env_ids]
            rows, cells = numbers, writer.cells(numbers)
            steps = [steps[env_id - self._first] for env_id in command.env_ids]
        begins = {*command.begins, *(writer.ended(numbers) if command.begins_ended else ())}
        if begins:
            steps = self._with_resets(steps, command.env_ids, begins)
        writer.clear_flags(rows)
        actions: Sequence[Any]
        if command.each is None:
            actions = writer.actions(rows)
        else:  # copied one by one as they are stepped, because copying runs user code
            actions, steps = command.each, [functools.partial(_step_with_copy, step) for step in steps]
        return numbers, cells, steps, actions

    def _with_resets(self, steps: Sequence[Any], env_ids: Sequence[int], begins: Collection[int]) -> list[Any]:
        """Replace the steps of envs that are to begin an episode by resets, which return what a step would."""

        def reset_instead(env_id: int, action: Action) -> EnvStep:
            state, info = self._reset_within_step(env_id)
            self.doing = "step"
            return state, 0.0, False, False, info

        return [
            functools.partial(reset_instead, env_id) if env_id in begins else step
            for env_id, step in zip(env_ids, steps, strict=True)
        ]

    def _reset_within_step(self, env_id: int) -> tuple[State, Info]:
        """Begin an episode; record when, if the step is traced."""
        self.doing = "reset"
        env = self._envs[env_id - self._first]
        if self.resets is None and self._generators is None and env is not None:
            result = env.reset(None, None)  # as `_begin` does, with one call less
            if env.oddity:
                self._remark(env_id)
            return result
        begin = time.perf_counter()
        try:
            return self._with_own(env_id, self._begin)(env_id, None, None)  # type: ignore[no-any-return]
        finally:
            if self.resets is not None:
                self.resets.append((begin, time.perf_counter(), env_id))

    def _begin(self, env_id: int, seed: int | None, options: Info | None) -> tuple[State, Info]:
        """Reset an env, with its own global generators if it has them."""
        env = self._env(env_id)
        if self._generators is not None and seed is not None:
            self._generators[env_id].seed(seed)
        result = env.reset(seed, options)
        if env.oddity:
            self._remark(env_id)
        return result

    def _five(self, env_id: int, result: Any) -> Any:
        """Return a step's result as five items; from now on the env's ``step`` itself returns five."""
        env = self._env(env_id)
        five = env.five(result)
        self._steps[env_id - self._first] = self._with_own(env_id, env.step)
        self._remark(env_id)
        return five

    def _remark(self, env_id: int) -> None:
        """Queue one warning, at most, that an env behaves like those of the old gym."""
        env = self._env(env_id)
        if env.oddity and not self._has_remarked:
            self._has_remarked = True
            what, meaning = env.oddity
            text = f"env {env_id}, {type(env.env).__name__}, is a gymnasium.Env, but {what}. {meaning}."
            self.remarks.append(Remark((env_id,), text))

    def step(self, autoreset: bool, values: Values, walk: Iterable[Any] | None = None) -> None:
        """Step envs, and begin the next episode of those that ended if ``autoreset``.

        The overhead here is paid per env and step: 0.5 us, where CartPole takes 9 us.

        Args:
            autoreset: As said.
            values: See `Reply`.
            walk: The envs, with their columns; ``None``: those of the command that have not begun.
        """
        for index, row, cell, step, action in self._walk() if walk is None else walk:
            self.index = index
            result = step(action)
            writer = self.writer  # read after the step: an abandoned host writes elsewhere
            if type(result) is not tuple or len(result) != 5:
                result = self._five(row + writer.first, result)
            state, reward, terminated, truncated, info = result
            loose = loose_reward = None
            try:
                writer.line[cell] = state
            except (TypeError, ValueError):  # not a vector, or not of the declared shape and dtype
                loose = writer.store_state(row, state)
            if type(reward) is float:
                writer.rewards[row] = reward
            else:
                loose_reward = writer.store_reward(row, reward)
            if terminated is not False or truncated is not False:
                writer.store_flags(row, terminated, truncated)
                goes_on = autoreset and (terminated or truncated)
                self._end(row, cell, (info, loose, loose_reward), state, goes_on, values)
            elif info or loose or loose_reward:
                infos = writer.infos
                if infos is None or loose or loose_reward or not infos.write(row, info):
                    values[row + writer.first] = _extra(info, loose, loose_reward)

    def _end(
        self, row: int, cell: slice, said: tuple[Any, Any, Any], state: State, goes_on: bool, values: Values
    ) -> None:
        """Record the last step of an episode, and begin the next one if requested.

        Args:
            row: The env's row.
            cell: The row's slice of ``writer.line``.
            said: Info, loose leaves of the state and loose reward, of that step.
            state: State of that step.
            goes_on: Whether to begin the next episode.
            values: Results that do not fit into the rows, by env id; written here.
        """
        writer = self.writer
        info, loose, loose_reward = said
        ended_loose = reset_info = is_exhausted = ended_state = None
        info = writer.store_info(row, info)
        if goes_on:
            if info or loose or loose_reward:  # copied before the reset: an env may reuse the buffers that it returned
                info, loose, loose_reward = deep_copy(info), deep_copy_but_graph(loose), deep_copy(loose_reward)
            writer.keep_ended(row)
            ended_state = writer.as_given(state) if writer.keeps_types else None
            ended_loose = loose
            try:
                state, reset_info = self._reset_within_step(row + writer.first)
                loose = None
                try:
                    writer.line[cell] = state
                except (TypeError, ValueError):  # as in `step`
                    loose = writer.store_state(row, state)
                reset_info = writer.store_reset_info(row, reset_info)
            except ExhaustedError:
                reset_info, is_exhausted = EXHAUSTED, True
            self.doing = "step"
        if reset_info or info or loose or loose_reward or ended_state or ended_loose:
            said = info, loose, loose_reward
            values[row + writer.first] = _extra(*said, ended_loose, reset_info or None, is_exhausted, ended_state)

    def rest(self, env_id: int) -> Extra:
        """Return the result of an env whose reset found no further episode: it is done and keeps its last state."""
        writer = self.writer
        row = env_id - writer.first
        writer.rewards[row] = 0.0
        writer.store_flags(row, False, True)
        return Extra(EXHAUSTED, writer.latest_loose(row), is_exhausted=True)

    # ---------------------------------------------------------------- rollouts

    def rollout(self, values: Values) -> None:
        """Make a chunk of a rollout; with ``None`` as common argument drop its policy.

        The common argument is a `RolloutRequest`, that of each env how many episodes it may still end. The chunk is the
        value of the first env, since its arrays have a column for every env. After an interrupt nothing is made: the
        result is no longer wanted.
        """
        columns, self._columns = self._columns, ([],)
        for command in columns[0]:
            order: RolloutRequest | None = command.common
            if order is None:
                self._rollout = None
                return
            if self._rollout is None or self._rollout.number != order.rollout:
                self._rollout = HostRollout(order.rollout, order.policy)
            values[command.env_ids[0]] = self._rollout.play(self, command)

    def run_step(self, env_ids: tuple[int, ...], each: Sequence[Any] | None, autoreset: bool) -> Reply:
        """Step envs within a rollout as a step command would. Afterwards no env is current, since the policy runs."""
        outer = self._command, self._run, self._columns, self._clock, self._reply, self._number
        writer = self.writer
        columns = writer.infos, writer.reset_infos
        writer.infos = writer.reset_infos = None  # a rollout keeps those of all its steps
        command = Command(0, "step", env_ids, each, autoreset=autoreset)
        try:
            self._begin_command(command)
            return next(self._finish(command, is_inner=True))
        finally:
            writer.infos, writer.reset_infos = columns
            self.index = 0
            self._command, self._run, self._columns, self._clock, self._reply, self._number = outer

    # ---------------------------------------------------------------- operations

    def build(self, env_id: int, argument: object, has_spaces: bool | None) -> EnvFacts:
        """Make an env, after closing the one that it replaces; read its spaces unless ``has_spaces``."""
        slot = env_id - self._first
        spec = self._spec.envs[slot]
        old, self._envs[slot] = self._envs[slot], None
        self._steps[slot] = _not_built
        self._seeds.pop(env_id, None)
        self._close_env(old)
        env = spec.build()
        self._adopt(env_id, env)
        self._remark(env_id)
        return EnvFacts(
            None if has_spaces else self._shared_space(getattr(env, "observation_space", None)),
            None if has_spaces else self._shared_space(getattr(env, "action_space", None)),
            dict(getattr(env, "metadata", None) or {}),
            "rgb_array" if draws_by_mode(env) else getattr(env, "render_mode", None),
            this_process(),
            id(env),
            is_env(env),
        )

    def reset(self, env_id: int, each: tuple[int | None, Info | None], common: object) -> Extra | None:
        """Begin an episode."""
        seed, options = each
        if seed is not None:
            self._seeds[env_id] = seed
        state, info = self._begin(env_id, seed, deep_copy(options))
        loose = self.writer.store_state(env_id - self.writer.first, state)
        return Extra(info or None, loose) if info or loose else None

    def get(self, env_id: int, argument: Any, lookup: Lookup) -> Any:
        """Look up an attribute, or ask for it, see `Lookup`; ``argument`` is a name or a class, if each has its own."""
        env = self._env(env_id).env
        if lookup.how == "wrapper":
            return any(isinstance(layer, argument) for layer in layers(env))
        key = argument if lookup.key is None else lookup.key
        if lookup.how == "required":
            return get_existing(env, key)
        if lookup.how == "hint":
            return near_name(env, key)
        found = get_attribute(env, key)
        return found is not None if lookup.how == "exists" else found

    def set(self, env_id: int, value: Any, key: str) -> bool | None:
        """Set an attribute to a copy of the value; return whether it is a new one."""
        return set_attribute(self._env(env_id).env, key, deep_copy(value)) or None

    def call(self, env_id: int, call: MethodCall | None, common: MethodCall | Broadcast | None) -> Any:
        """Call a method with copies of the arguments: of ``call``, else of ``common``, the same for every env."""
        if isinstance(common, Broadcast):
            name, positional = common.call()
            call = MethodCall(name, positional)
        else:
            call = MethodCall(*deep_copy(tuple(call))) if call is not None else common or MethodCall("")
        env, name = self._env(env_id).env, call.name
        self.doing = name + "()"
        found = (get_existing if call.or_attribute else get_method)(env, name)
        if not callable(found):
            return found
        named = call.named
        if name == "render" and not (call.positional or named) and draws_by_mode(env):
            named = {"mode": "rgb_array"}
        bound = functools.partial(found, *call.positional, **named)
        return _draw(bound) if name == "render" else bound()

    def state(self, env_id: int, saved: bytes | None, what: str | InfoForms) -> Any:
        """Return or replace what the host knows of an env.

        ``what`` are forms of infos that are written to columns from now on, for all envs; or ``"save"``: the env's
        state, pickled, or ``None`` if it cannot be saved; ``"load"``: continue from such a state; ``"leaves"``: the
        leaves of its latest state that are not in the batch; ``"trace"``: begin to record when each env does what, and
        return the clock's id and its time, for the first env; ``"record"``: stop recording, and return the record, for
        the first env.
        """
        if isinstance(what, tuple):
            self.writer.set_info_forms(what, self.everyone)
            return None
        if what == "leaves":
            loose = self.writer.loose.get(env_id - self.writer.first)
            return Extra(None, loose) if loose else None
        if what == "trace":
            return begin_tracing(self) if env_id == self.everyone[0] else None
        if what == "record":
            return end_tracing(self) if env_id == self.everyone[0] else None
        old = self._env(env_id)
        own = None if self._generators is None else self._generators[env_id]
        if what == "save":
            return save_env(old.env, None if own is None else own.save())
        env, generators = load_env(old.env, saved or b"", own is not None)
        if generators is not None and own is not None:
            own.load(generators)
        if env is not old.env:
            self._adopt(env_id, env)
            self._close_env(old)
        return None

    def _adopt(self, env_id: int, env: Env) -> None:
        """Use an env that was made or loaded."""
        slot = env_id - self._first
        self._envs[slot] = adapted = adapt(env)
        self._steps[slot] = self._with_own(env_id, adapted.step)

    def _env(self, env_id: int) -> Resettable:
        return self._envs[env_id - self._first] or _not_built()

    def _shared_space(self, space: Space | None) -> Space | None:
        """Return a copy of a space, the same object for all envs whose spaces are equal.

        The caller then gets few spaces however many envs there are: pickle sends an object only once, but equal objects
        each time.
        """
        known = next((other for other in self._spaces if other is not None and other == space), None)
        if known is None and space is not None:
            known = copy.deepcopy(space)
            self._spaces.append(known)
        return known


def _draw(render: Callable[[], Any]) -> Any:
    """Render; only one env renders at a time in this process."""
    is_alone = _DRAWING.acquire(timeout=_LONGEST_DRAWING)
    try:
        return render()
    finally:
        if is_alone:
            _DRAWING.release()


def _step_with_copy(step: Callable[[Any], Any], action: Action) -> Any:
    return step(deep_copy_but_graph(action))


def _extra(info: Any, *others: Any) -> Extra:
    if not isinstance(info, dict) and info is not None:
        raise EnvContractError(f"step() returned the info {show(info)}; an info is a dict.")
    return Extra(info or None, *others)


def _not_built(*_: object) -> NoReturn:
    raise InvalidEnvError("This env could not be rebuilt. Try restart() again.")
