"""The code that owns envs and executes commands on them. The same in every mode."""

from __future__ import annotations

import copy
import dataclasses
import functools
import operator
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from types import MappingProxyType
from typing import Any, NoReturn

from parallelenv.contract.batch import Batch
from parallelenv.contract.broadcast import Broadcast
from parallelenv.contract.copying import deep_copy, deep_copy_but_graph
from parallelenv.contract.env_specs import is_env
from parallelenv.contract.failures import Failure
from parallelenv.contract.interrupts import DeferSigint
from parallelenv.contract.messages import show
from parallelenv.contract.process_info import clock_id, this_process
from parallelenv.contract.protocol import EXHAUSTED, NOTED, Command, EnvFacts, Extra, Remark, Reply, WorkerSpec
from parallelenv.contract.rollout_data import RolloutRequest
from parallelenv.contract.worker_info import WorkerInfo, call_for
from parallelenv.errors import EnvContractError, EnvInterruptedError, ExhaustedError, InvalidEnvError
from parallelenv.worker.env_adapter import Resettable, adapt, draws_by_mode
from parallelenv.worker.env_attributes import get_attribute, get_existing, get_method, layers, near_name, set_attribute
from parallelenv.worker.env_rng import EnvGenerators, put_back
from parallelenv.worker.env_state import load_env, save_env
from parallelenv.worker.rollout_recorder import HostRollout
from parallelenv.worker.row_writer import RowWriter
from parallelenv.worker.tracer import HostTracer, begin_tracing, end_tracing

Walk = Callable[[Iterator[Any], Any, dict[int, Any]], None]
Turns = tuple[Iterator[int], Sequence[int]]
"""An iterator over something of each env that is walked over, in step with the walk; and the envs."""

Reset = tuple[float, float, int]
"""When a reset within a step began and ended, and the env's id."""

_DRAWING = threading.RLock()
"""Held while an env is rendered: of two threads that draw with pygame at the same time one in six frames is wrong."""
_LONGEST_DRAWING = 10.0
"""Seconds after which a thread that draws is taken to hang, and the others go on without waiting for it."""


class Host:
    """Owns a group of envs and executes commands on them, in order.

    Each public method below `execute` is an operation: it takes an env id, what the command
    has for that env, and the command's common arguments; it returns the env's value, or
    ``None`` if there is nothing to say. Only `step` and `rollout` are done for all envs of a command at once:
    calls and look-ups per env would cost a step a tenth of its speed, and a policy is asked for all.

    Args:
        spec: What to own.
        in_caller: Whether it runs in the caller's main thread, where Ctrl-C arrives.

    Attributes:
        everyone: Ids of its envs, ascending.
        doing: What it is doing now, for messages.
        turns: Of the latest walk over envs.
        notes: When its envs do what, while it is watched.
        resets: Where resets are noted, while it makes a step that is.
        remarks: What the caller is to be warned of, with the next reply: of the first env alone that gives reason to.
    """

    def __init__(self, spec: WorkerSpec, *, in_caller: bool = False) -> None:
        self.in_caller = in_caller
        self.doing = ""
        self.turns: Turns = (iter(()), ())
        self.notes: HostTracer | None = None
        self.resets: list[Reset] | None = None
        self.remarks: list[Remark] = []
        self._has_remarked = False
        self._spec = spec
        self.everyone = spec.env_ids
        self._first = spec.env_ids[0]
        self._envs: list[Resettable | None] = [None] * len(spec.env_ids)
        self._steps: list[Any] = [_not_built] * len(spec.env_ids)
        self._spaces: list[Any] = []
        self._writer: RowWriter
        self._rollout: HostRollout | None = None
        self._seeds: dict[int, int] = {}  # of the latest reset of each env that had one
        self._generators: dict[int, EnvGenerators] | None = {} if spec.settings.seed_globals else None

    @property
    def envs(self) -> list[Any]:
        """Its envs as they were made, in env id order."""
        return [self._env(env_id).env for env_id in self.everyone]

    def attach(self, batch: Batch) -> None:
        """Take the batch whose rows its envs write."""
        self._writer = writer = RowWriter(batch)
        # What a step of all envs walks over, made once.
        rows = writer.rows(self.everyone)
        self._whole = rows, range(rows.start, rows.stop), writer.cells(rows)

    def execute(self, command: Command) -> Reply:
        """Execute a command on each of its envs; an exception concerns its env alone."""
        return Execution(self, command).run()

    def begin(self, command: Command) -> tuple[Walk, Iterator[Any], Turns]:
        """Return how to walk over the envs of a command, what to walk over, and what tells where the walk is."""
        if command.name == "step":
            walk: Walk = self._step_all if self._generators is None else self._putting_back(self._step_all)
            return walk, *self._ready_to_step(command)
        if command.name == "rollout":
            return self._roll_out, iter((command,)), (iter(()), ())
        operation = getattr(self, command.name)
        if self._generators is not None:
            operation = functools.partial(self._operate, operation)

        def walk_over(rest: Iterator[Any], common: Any, values: dict[int, Any]) -> None:
            for env_id, argument in rest:
                value = operation(env_id, argument, common)
                if value is not None:
                    values[env_id] = value

        each = [None] * len(command.env_ids) if command.each is None else command.each
        turns = iter(command.env_ids)
        walk = walk_over if self._generators is None else self._putting_back(walk_over)
        return walk, zip(turns, each, strict=True), (turns, command.env_ids)

    # ---------------------------------------------------------------- global generators

    def _putting_back(self, walk: Walk) -> Walk:
        """Return a walk over envs that each have global generators of their own."""

        def walk_and_put_back(rest: Iterator[Any], common: Any, values: dict[int, Any]) -> None:
            with put_back():
                walk(rest, common, values)

        return walk_and_put_back

    def _with_own(self, env_id: int, call: Callable[..., Any]) -> Callable[..., Any]:
        """Return what calls something with an env's own global generators, if envs have such."""
        return call if self._generators is None else functools.partial(self._generators[env_id].run, call)

    def _operate(self, operation: Callable[..., Any], env_id: int, argument: Any, common: Any) -> Any:
        """Execute an operation on an env with its own global generators."""
        if self._generators is not None and operation == self.build:
            seed = self._spec.place.seed
            self._generators[env_id] = EnvGenerators(None if seed is None else seed + env_id)
            self._spec.envs[env_id - self._first].prepare()
        return self._with_own(env_id, operation)(env_id, argument, common)

    def describe(self, env_id: int) -> WorkerInfo:
        """Return what an env may know of where it is."""
        spec = self._spec
        place = spec.place
        seed = None if place.seed is None else place.seed + env_id
        return WorkerInfo(
            env_id,
            place.num_envs,
            place.first_worker,
            place.num_workers,
            self._seeds.get(env_id, seed),
            MappingProxyType(spec.shared),
        )

    @property
    def writer(self) -> RowWriter:
        """The rows that its envs write now: others, once it was given up."""
        return self._writer

    @property
    def current(self) -> int | None:
        """The env at which the latest walk over envs is, or broke off; ``None`` if before the first.

        Found from what is left of the walk, so that walking costs nothing for it.
        """
        turns, env_ids = self.turns
        index = len(env_ids) - operator.length_hint(turns) - 1
        return env_ids[index] if index >= 0 else None

    def close(self) -> None:
        """Close all envs.

        Raises:
            KeyboardInterrupt: In the caller's thread alone. The envs that come later are then let go as they are, as
                those of a worker are that is ended: who interrupts a `close` will not wait for more of them.
        """
        try:
            call_for(self, self._close_all)
        finally:
            with DeferSigint():  # an interrupt in a `__del__` would be told to nobody
                self._spec = dataclasses.replace(self._spec, shared={})  # their memory goes now

    def _close_all(self) -> None:
        envs, self._envs = self._envs, [None] * len(self._envs)
        turns = iter(self.everyone)
        self.turns = turns, self.everyone
        for _, env in zip(turns, envs, strict=True):
            self._close_env(env)

    def _close_env(self, env: Resettable | None) -> None:
        """Close an env that is not used any more, whatever it raises: it is gone either way."""
        close = getattr(env.env, "close", None) if env is not None else None
        if not callable(close):
            return
        try:
            close()
        except KeyboardInterrupt:
            if self.in_caller:  # else it is the env that raises it
                raise
        except BaseException:  # noqa: BLE001 (an env that cannot close must not keep the others from it)
            pass

    # ---------------------------------------------------------------- steps

    def _ready_to_step(self, command: Command) -> tuple[Iterator[Any], Turns]:
        """Return what `_step_all` needs of each env: row, place of the state, ``step`` and action; and its turns."""
        writer, steps = self._writer, self._steps
        numbers: Sequence[int]
        rows, numbers, cells = self._whole
        if command.env_ids is not self.everyone and command.env_ids != self.everyone:
            numbers = [env_id - writer.first for env_id in command.env_ids]
            rows, cells = numbers, writer.cells(numbers)
            steps = [steps[env_id - self._first] for env_id in command.env_ids]
        if type(command.common) is tuple:
            steps = self._with_resets(steps, command)
        writer.clear_flags(rows)
        turns = iter(numbers)
        if command.each is None:
            return zip(turns, cells, steps, writer.actions(rows), strict=True), (turns, command.env_ids)
        # These are copied one by one, within the walk: to copy runs user code.
        steps = [functools.partial(_step_with_copy, step) for step in steps]
        return zip(turns, cells, steps, command.each, strict=True), (turns, command.env_ids)

    def _with_resets(self, steps: Sequence[Any], command: Command) -> list[Any]:
        """Put a reset in the place of the steps of envs that are to begin an episode."""
        begins = set(command.common)
        return [
            functools.partial(self._reset_instead, env_id) if env_id in begins else step
            for env_id, step in zip(command.env_ids, steps, strict=True)
        ]

    def _reset_instead(self, env_id: int, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """Begin an episode, and answer as a step would."""
        state, info = self._reset_within_step(env_id)
        self.doing = "step"
        return state, 0.0, False, False, info

    def _reset_within_step(self, env_id: int) -> tuple[Any, dict[str, Any]]:
        """Begin an episode, and note when if that is wanted."""
        self.doing = "reset"
        if self.resets is None:
            return self._with_own(env_id, self._begin)(env_id, None, None)  # type: ignore[no-any-return]
        begin = time.perf_counter()
        try:
            return self._with_own(env_id, self._begin)(env_id, None, None)  # type: ignore[no-any-return]
        finally:
            self.resets.append((begin, time.perf_counter(), env_id))

    def _begin(self, env_id: int, seed: int | None, options: dict[str, Any] | None) -> tuple[Any, dict[str, Any]]:
        """Reset an env, with its own global generators if it has such."""
        env = self._env(env_id)
        if self._generators is not None and seed is not None:
            self._generators[env_id].seed(seed)
        result = env.reset(seed, options)
        if env.oddity:
            self._remark(env_id)
        return result

    def _five(self, env_id: int, result: Any) -> Any:
        """Return what a step returned as five items; from now on the env's steps are made so."""
        env = self._env(env_id)
        five = env.five(result)
        self._steps[env_id - self._first] = self._with_own(env_id, env.step)
        self._remark(env_id)
        return five

    def _remark(self, env_id: int) -> None:
        """Let the caller warn that an env does as those of the old gym did, unless it was."""
        env = self._env(env_id)
        if env.oddity and not self._has_remarked:
            self._has_remarked = True
            what, meaning = env.oddity
            text = f"env {env_id}, {type(env.env).__name__}, is a gymnasium.Env, but {what}. {meaning}."
            self.remarks.append(Remark((env_id,), text))

    def _step_all(self, rest: Iterator[Any], autoreset: bool | tuple[int, ...], values: dict[int, Any]) -> None:
        """Step envs, and begin the next episode of those that end if that is wanted. ``autoreset``: see `Command`.

        What costs time here is paid for every env and step: 0.5 us, where CartPole takes 9 us.
        """
        for row, cell, step, action in rest:
            result = step(action)
            writer = self._writer  # not before the step: a host given up meanwhile writes elsewhere
            if type(result) is not tuple or len(result) != 5:
                result = self._five(row + writer.first, result)
            state, reward, terminated, truncated, info = result
            loose = loose_reward = None
            try:
                writer.line[cell] = state
            except (TypeError, ValueError):  # no vector, or not the one that is declared
                loose = writer.store_state(row, state)
            if type(reward) is float:
                writer.rewards[row] = reward
            else:
                loose_reward = writer.store_reward(row, reward)
            if terminated is not False or truncated is not False:
                writer.store_flags(row, terminated, truncated)
                goes_on = autoreset is True and (terminated or truncated)
                self._end(row, (info, loose, loose_reward), state, goes_on, values)
            elif info or loose or loose_reward:
                values[row + writer.first] = _extra(info, loose, loose_reward)

    def _end(self, row: int, said: tuple[Any, Any, Any], state: Any, goes_on: Any, values: dict[int, Any]) -> None:
        """Note what the last step of an episode said, and begin the next one if that is wanted.

        Args:
            row: Of the env.
            said: Info, loose leaves of the state and loose reward, of that step.
            state: Of that step.
            goes_on: Whether to begin the next episode.
            values: Where to note what does not fit into the rows.
        """
        writer = self._writer
        ended_loose = reset_info = is_exhausted = ended_state = None
        if goes_on:
            if any(said):  # copied before the reset: an env may reuse the buffers that it returned
                said = deep_copy(said[0]), deep_copy_but_graph(said[1]), deep_copy(said[2])
            writer.keep_ended(row)
            ended_state = writer.as_given(state)
            try:
                state, reset_info = self._reset_within_step(row + writer.first)
            except ExhaustedError:
                ended_loose, reset_info, is_exhausted = said[1], EXHAUSTED, True
            else:
                ended_loose, said = said[1], (said[0], writer.store_state(row, state), said[2])
            self.doing = "step"
        if reset_info or any(said) or ended_state:
            values[row + writer.first] = _extra(*said, ended_loose, reset_info or None, is_exhausted, ended_state)

    def rest(self, env_id: int) -> Extra:
        """Answer for an env whose reset has found no further episode: it is done, and its last state stays."""
        writer = self._writer
        row = env_id - writer.first
        writer.rewards[row] = 0.0
        writer.store_flags(row, False, True)
        return Extra(EXHAUSTED, writer.latest_loose(row), is_exhausted=True)

    # ---------------------------------------------------------------- rollouts

    def _roll_out(self, rest: Iterator[Command], common: RolloutRequest, values: dict[int, Any]) -> None:
        """Make a chunk of a rollout, unless it was interrupted before: then nobody waits for it any more.

        The chunk is the value of the first env, for it is made of arrays with a column per env.
        """
        for command in rest:
            if self._rollout is None or self._rollout.number != common.rollout:
                self._rollout = HostRollout(common.rollout, common.policy)
            values[command.env_ids[0]] = self._rollout.play(self, command)

    def run_step(self, env_ids: tuple[int, ...], each: Sequence[Any] | None, autoreset: bool) -> Reply:
        """Step envs within a rollout: as on a command of their own. Then it is no env's turn, but the policy's."""
        turns = self.turns
        reply = self.execute(Command(0, "step", env_ids, each, autoreset))
        self.turns = turns
        return reply

    def end_rollout(self, env_id: int, argument: Any, common: Any) -> None:
        """Let go of the policy."""
        self._rollout = None

    # ---------------------------------------------------------------- operations

    def build(self, env_id: int, argument: Any, has_spaces: bool | None) -> EnvFacts:
        """Make an env, after closing the one that it replaces; it is asked for its spaces unless these are given."""
        slot = env_id - self._first
        spec = self._spec.envs[slot]
        old, self._envs[slot] = self._envs[slot], None
        self._steps[slot] = _not_built
        self._seeds.pop(env_id, None)
        self._close_env(old)
        env = spec.build()
        self._envs[slot] = adapted = adapt(env)
        self._steps[slot] = self._with_own(env_id, adapted.step)
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

    def reset(self, env_id: int, each: tuple[int | None, dict[str, Any] | None], common: Any) -> Extra | None:
        """Begin an episode."""
        seed, options = each
        if seed is not None:
            self._seeds[env_id] = seed
        state, info = self._begin(env_id, seed, deep_copy(options))
        loose = self._writer.store_state(env_id - self._writer.first, state)
        return Extra(info or None, loose) if info or loose else None

    def look(self, env_id: int, argument: Any, common: Any) -> Extra | None:
        """Return what of an env's latest state is not in the batch."""
        loose = self._writer.loose.get(env_id - self._writer.first)
        return Extra(None, loose) if loose else None

    def get(self, env_id: int, argument: Any, key: str) -> tuple[Any] | None:
        """Return an attribute in a one-tuple; nothing if it is absent."""
        return get_attribute(self._env(env_id).env, key)

    def set(self, env_id: int, value: Any, key: str) -> bool | None:
        """Set an attribute. Each env gets a copy of its own. Say if it is a new one."""
        return set_attribute(self._env(env_id).env, key, deep_copy(value)) or None

    def hint(self, env_id: int, argument: Any, key: str) -> str:
        """Return a hint at what an absent attribute may have been meant to be."""
        return near_name(self._env(env_id).env, key)

    def call(self, env_id: int, arguments: dict[str, Any] | None, method: str) -> Any:
        """Call a method with keyword arguments, copied for this env."""
        self.doing = method + "()"
        bound = get_method(self._env(env_id).env, method)
        return bound(**deep_copy(arguments)) if arguments else bound()

    def use(self, env_id: int, arguments: tuple[tuple[Any, ...], dict[str, Any]], what: tuple[str, bool]) -> Any:
        """Return what a method returns for arguments, copied for this env; unless it must be one, any attribute."""
        name, must_be_method = what
        self.doing = name + "()"
        find = get_method if must_be_method else get_existing
        found = find(self._env(env_id).env, name)
        if not callable(found):
            return found
        positional, named = deep_copy(arguments)
        bound = functools.partial(found, *positional, **named)
        return _draw(bound) if name == "render" else bound()

    def invoke(self, env_id: int, argument: tuple[str, tuple[Any, ...], dict[str, Any]], common: Any) -> Any:
        """Return what a method returns for arguments; each env has a method of its own."""
        name, positional, named = argument
        return self.use(env_id, (positional, named), (name, True))

    def tell(self, env_id: int, argument: Any, common: Broadcast) -> Any:
        """Return what a method returns for arguments that are the same for every env, each with copies of its own."""
        name, positional = common.call()
        self.doing = name + "()"
        return get_method(self._env(env_id).env, name)(*positional)

    def read(self, env_id: int, name: str, common: Any) -> Any:
        """Return an attribute that the env must have; each env has one of its own."""
        return get_existing(self._env(env_id).env, name)

    def has(self, env_id: int, argument: Any, key: str) -> bool:
        """Say if there is such an attribute; it need not be one that can be copied."""
        return get_attribute(self._env(env_id).env, key) is not None

    def is_wrapped(self, env_id: int, wrapper_class: type, common: Any) -> bool:
        """Say if a wrapper of a class is around the env."""
        return any(isinstance(layer, wrapper_class) for layer in layers(self._env(env_id).env))

    def save(self, env_id: int, argument: Any, common: Any) -> bytes | None:
        """Return the state of an env, pickled; ``None`` if there is no way to get it."""
        return save_env(self._env(env_id).env, None if self._generators is None else self._generators[env_id].save())

    def load(self, env_id: int, saved: bytes, common: Any) -> None:
        """Bring an env into a state."""
        slot = env_id - self._first
        old = self._env(env_id)
        env, generators = load_env(old.env, saved, self._generators is not None)
        if generators is not None and self._generators is not None:
            self._generators[env_id].load(generators)
        if env is not old.env:
            self._envs[slot] = adapted = adapt(env)
            self._steps[slot] = self._with_own(env_id, adapted.step)
            self._close_env(old)

    def render(self, env_id: int, argument: Any, common: Any) -> Any:
        """Render an env, alone in this process."""
        env = self._env(env_id).env
        render = get_method(env, "render")
        return _draw(functools.partial(render, mode="rgb_array") if draws_by_mode(env) else render)

    def watch(self, env_id: int, argument: Any, common: Any) -> tuple[str, float] | None:
        """Begin to note when each env does what; return which clock that goes by, and its time."""
        if env_id != self.everyone[0]:
            return None
        begin_tracing(self)
        return clock_id(), time.perf_counter()

    def unwatch(self, env_id: int, argument: Any, common: Any) -> Any:
        """Return what was noted, and note no more."""
        return end_tracing(self) if env_id == self.everyone[0] else None

    def _env(self, env_id: int) -> Resettable:
        env = self._envs[env_id - self._first]
        if env is None:
            _not_built()
        return env

    def _shared_space(self, space: Any) -> Any:
        """Return a copy of a space, one and the same for all envs whose spaces are equal.

        The caller gets few spaces however many envs there are: pickle sends equal objects
        again and again, but the same object only once.
        """
        known = next((other for other in self._spaces if other is not None and other == space), None)
        if known is None and space is not None:
            known = copy.deepcopy(space)
            self._spaces.append(known)
        return known


class Execution:
    """One command under way on a host. After an interrupt, `run` goes on with the next env."""

    def __init__(self, host: Host, command: Command) -> None:
        self._host = host
        self._command = command
        self._reply = Reply(command.number, {}, {})
        self._walk, self._rest, self._turns = host.begin(command)
        if host.notes is not None and not 0 < command.number < NOTED:  # 0: a step within a rollout
            self._walk, self._rest = host.notes.noted(host, command, self._walk, self._rest)

    def run(self) -> Reply:
        """Execute what is left of the command and return its reply."""
        return call_for(self._host, self._running().__next__)

    def _running(self) -> Iterator[Reply]:
        """Execute what is left of the command and yield its reply.

        A generator, for its frame forgets who has called it: the traceback of a failure that nobody has
        fetched would keep the caller's `ParallelEnv` alive, when nothing else does.
        """
        host, reply = self._host, self._reply
        host.turns = self._turns  # not before: other commands may have been begun that are not executed yet
        while True:
            host.doing = self._command.name
            try:
                self._walk(self._rest, self._command.common, reply.values)
            except BaseException as error:  # noqa: BLE001 (told to the user as a failure of its env)
                self._note(error)
            else:
                if host.remarks and self._command.number:  # 0: a step within a rollout, whose reply goes nowhere
                    reply.output, host.remarks = host.remarks, []
                yield reply

    def _note(self, error: BaseException) -> None:
        """Note what went wrong in one env, or that it has no further episode; an interrupt is raised again."""
        env_id = self._host.current
        if env_id is None:
            raise error
        if isinstance(error, ExhaustedError) and self._host.doing == "reset":
            self._reply.values[env_id] = self._host.rest(env_id)
            return
        self._reply.failures[env_id] = self._failure(error, env_id)
        if isinstance(error, KeyboardInterrupt) and self._host.in_caller:
            raise error

    def _failure(self, error: BaseException, env_id: int) -> Failure:
        if isinstance(error, KeyboardInterrupt) and self._host.in_caller:
            interrupted = EnvInterruptedError(
                f"env {env_id} was interrupted in the middle of {self._host.doing}; its state is uncertain. "
                f"Call reset({env_id})."
            )
            return Failure(interrupted, env_id, f"interrupted {self._host.doing}")
        return Failure(error, env_id, self._host.doing)


def _draw(render: Callable[[], Any]) -> Any:
    """Render an env, alone in this process."""
    is_alone = _DRAWING.acquire(timeout=_LONGEST_DRAWING)
    try:
        return render()
    finally:
        if is_alone:
            _DRAWING.release()


def _step_with_copy(step: Callable[[Any], Any], action: Any) -> Any:
    return step(deep_copy_but_graph(action))


def _extra(info: Any, *others: Any) -> Extra:
    if not isinstance(info, dict) and info is not None:
        raise EnvContractError(f"step() returned the info {show(info)}; an info is a dict.")
    return Extra(info or None, *others)


def _not_built(*_: Any) -> NoReturn:
    raise InvalidEnvError("This env could not be rebuilt. Try restart() again.")
