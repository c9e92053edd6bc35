"""The base classes of wrappers: they have every attribute and method of `ParallelEnv`, and hooks for its results.

The functions at the end split batched states and results, and join them again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn, Self, TypeAlias

import numpy as np

from parallelenv.contract import spaces
from parallelenv.contract.arguments import (
    Ids,
    Options,
    Seeds,
    absent_attribute,
    check_align,
    check_flags,
    parse_ids,
    unsettable_attribute,
)
from parallelenv.contract.batch import Array
from parallelenv.contract.copying import deep_copy
from parallelenv.contract.error_text import FOREIGN_SETTINGS, GIVE_SPACES, show
from parallelenv.contract.failures import put
from parallelenv.contract.spaces import State, Structure, batched, describe_value, object_array, pick_rows
from parallelenv.contract.tracebacks import ShortTracebacks
from parallelenv.engine.assemble import Align, as_number
from parallelenv.engine.env_table import Phase, SavedState, WrappedState
from parallelenv.errors import ArgumentError, EnvContractError, UsageError
from parallelenv.notebook.repr import mime_bundle
from parallelenv.results import StepBatch, StepResult, refuse_pair

if TYPE_CHECKING:
    from parallelenv.env import ParallelEnv


Wrappable: TypeAlias = "ParallelEnv | ParallelWrapper"
_BYPASSING = {
    *("rollout", "send_reset", "arecv", "stream", "run_episodes", "play", "record", "get_state", "send_action"),
    *("to_gymnasium", "to_sb3", "to_tianshou"),
}
"""Methods that step the wrapped envs directly, or whose results arrive too late for wrappers to process."""


def space_of(env: object) -> Space:
    """Return the observation space that all envs share, or ``None`` if they share none.

    Raise an `ArgumentError` if ``env`` cannot be wrapped.
    """
    if isinstance(env, type) or not hasattr(env, "customized_method"):
        raise ArgumentError(
            f"env={show(env)} is not a ParallelEnv or a wrapper of one. Wrap single envs where you make them."
        )
    return env.single_observation_space  # type: ignore[attr-defined, no-any-return]


def shared_structure(env: object, problem: str) -> Structure:
    """Return the structure of the observation space that all envs share.

    If they share none, raise an `ArgumentError`. ``problem`` completes "their states ..." in the error message: for
    example, "cannot be stacked".
    """
    structure = Structure(space_of(env))
    if structure.space is None:
        raise ArgumentError(
            f"The envs share no observation space, so their states {problem}. If they declare none, {GIVE_SPACES}."
        )
    return structure


class ParallelWrapper(ShortTracebacks):
    """Base class of wrappers, with all attributes and methods of the wrapped `ParallelEnv`.

    Override methods, or the hooks `on_reset`, `on_step` and `on_send`. Each result passes through the hooks once, as a
    batch. This holds for any method that returns results (`reset`, `step`, `recv`, `step_wait`), any number of envs and
    any ``align``. If an env fails, the results of the other envs in ``error.partial`` also pass through the hooks.

    If `on_reset` or `on_step` raises an exception, it reaches the caller with two more attributes: ``partial`` is the
    result that the hook received, and ``wrapper`` is this wrapper. The wrappers around this one never see that result,
    so all envs in the result need a reset.

    Methods that would bypass wrappers raise `UsageError`: `rollout`, `stream`, `run_episodes`, `play`, `record`,
    `send_reset`, `arecv`, `get_state`, `send_action`, `to_gymnasium`, `to_sb3`, `to_tianshou`. Wrap the
    individual envs, or call these methods on `unwrapped`. In the second case, reset the envs before you use the wrapper
    again, because it has not seen the steps in between.

    Args:
        env: A `ParallelEnv`, or another wrapper.

    Attributes:
        env: The wrapped `ParallelEnv` or wrapper.
    """

    is_frozen: bool | None = None
    """Whether this wrapper's own statistics are frozen; ``None`` if the wrapper has no statistics."""
    _saved: tuple[str, ...] = ()
    """Attributes that `save_state` saves."""

    def __init__(self, env: Wrappable) -> None:
        space_of(env)  # refuses anything else
        self.env = env

    # ---------------------------------------------------------------- hooks

    def on_send(self, action: object, id: Ids) -> None:
        """Check actions of `step`, `send` or `step_async` before they are sent; raise an error to refuse them."""

    def on_reset(self, states: States, env_ids: tuple[int, ...]) -> States:
        """Return the states that a reset should return.

        Args:
            states: The first states of the envs in ``env_ids``, batched.
            env_ids: Ids of the envs, in the order of the states. Exhausted envs are left out. There may be no ids.
        """
        return states

    def on_step(self, result: StepResult) -> StepResult:
        """Return the result that a step should return.

        Args:
            result: The result that the wrapped object returned, without the rows of idle envs. It may have no rows at
                all. You may change its infos.
        """
        return result

    # ---------------------------------------------------------------- calls

    def reset(self, id: Ids = None, *, seed: Seeds = None, options: Options = None) -> States:
        """Start new episodes. See `ParallelEnv.reset`."""
        env_ids = self.chosen(id)
        self._refuse_handed_over()
        structure = Structure(self.single_observation_space)
        is_batch = structure.is_single and structure.space is not None  # otherwise, the states may be a pair
        refuse_pair(len(env_ids) if is_batch else None)
        try:
            states = self.env.reset(id, seed=seed, options=options)
        except BaseException as error:
            partial = getattr(error, "partial", None)  # `None`: no env was reset
            if partial is not None and not hasattr(error, "wrapper"):
                begun = tuple(env_id for env_id in env_ids if self.have_begun((env_id,)))
                put(error, "partial", self._see_reset(partial, begun))
            raise
        return self._see_reset(states, env_ids)

    def step(self, action: object, id: Ids = None, align: Align = "item") -> Any:
        """Step envs. See `ParallelEnv.step`."""
        self._before(action, id)
        return self._seen(align, self.env.step, action, id)

    def send(self, action: object, id: Ids = None) -> None:
        """Start a step. See `ParallelEnv.send`."""
        self._before(action, id)
        self.env.send(action, id)

    def step_async(self, action: object, id: Ids = None) -> None:
        """Start a step. See `ParallelEnv.step_async`."""
        self._before(action, id)
        self.env.step_async(action, id)

    def recv(
        self, min_envs: int = 1, max_envs: int | None = None, timeout: float | None = None, align: Align = "item"
    ) -> Any:
        """Return results of steps in flight. See `ParallelEnv.recv`."""
        return self._seen(align, self.env.recv, min_envs, max_envs, timeout)

    def step_wait(self, timeout: float | None = None, align: Align = "item") -> Any:
        """Return the results of the step in flight. See `ParallelEnv.step_wait`."""
        return self._seen(align, self.env.step_wait, timeout)

    def next_task(self, id: Ids = None, **kwargs: object) -> States:
        """Start the next tasks by calling `reset`. See `TaskPool.next_task`.

        Raises:
            AttributeError: If the wrapped object is not a `TaskPool`.
        """
        if not hasattr(self.unwrapped, "next_task"):
            raise AttributeError(f"{self!r} has no next_task(); a ParallelEnv made by from_samplers() has.")
        return self.reset(id, options=kwargs or None)

    def close(self, timeout: float | None = None) -> None:
        """Close the `ParallelEnv`. See `ParallelEnv.close`."""
        if timeout is None:  # a user's own wrapper may take no timeout
            self.env.close()
        else:
            self.env.close(timeout)

    def _before(self, action: object, id: Ids) -> None:
        self._refuse_handed_over()
        self.on_send(action, id)

    def _refuse_handed_over(self) -> None:
        adapter = self.unwrapped.engine.adapter
        if adapter is not None:
            raise UsageError(
                f"The ParallelEnv in {type(self).__name__} was handed over by {adapter} and follows its rules, which "
                "this wrapper does not know. Make another ParallelEnv from the same list of env fns."
            )

    def _see_reset(self, states: States, env_ids: tuple[int, ...]) -> States:
        try:
            return self._without_exhausted(self.on_reset, states, env_ids)
        except BaseException as error:
            self._require_reset(error, states, env_ids)
            raise

    def _without_exhausted(
        self, look: Callable[[States, tuple[int, ...]], States], states: States, env_ids: tuple[int, ...]
    ) -> States:
        """Return the states that ``look`` returns for the envs that are not exhausted, and ``None`` for the others."""
        living = np.flatnonzero(~self.exhausted[list(env_ids)]).tolist()
        if len(living) == len(env_ids):
            return look(states, env_ids)
        batch = batch_of(self.env.single_observation_space, [states[row] for row in living])
        seen = look(batch, tuple(env_ids[row] for row in living))
        return states if seen is batch else scattered(seen, self.single_observation_space, living, len(env_ids))

    def _seen(self, align: Align, call: Callable[..., Any], *args: object) -> StepResult | StepBatch:
        """Make a call and return its result, processed by `on_step` and in the form that ``align`` selects."""
        check_align(align)
        if type(self).on_step is ParallelWrapper.on_step:
            return call(*args, align=align)  # type: ignore[no-any-return]
        try:
            result = call(*args)
        except BaseException as error:
            partial = getattr(error, "partial", None)
            if isinstance(partial, StepResult) and not hasattr(error, "wrapper"):
                put(error, "partial", self._see_step(partial, align))
            raise
        return self._see_step(result, align)

    def _see_step(self, result: StepResult, align: Align) -> StepResult | StepBatch:
        try:
            space = self.single_observation_space
            seen = apply_to_stepped(result, self.on_step, self.env.single_observation_space, space)
            return aligned(seen, align, space)
        except BaseException as error:
            self._require_reset(error, result, result.env_ids.tolist())
            raise

    def _require_reset(self, error: BaseException, partial: States | StepResult, env_ids: Sequence[int]) -> None:
        """Set ``partial`` and ``wrapper`` on an error raised in this wrapper, and mark the envs as needing a reset."""
        put(error, "partial", partial)
        put(error, "wrapper", self)
        table = self.unwrapped.engine.table
        table.require_reset(table.without_exhausted(env_ids))

    # ---------------------------------------------------------------- facts for hooks

    def chosen(self, id: Ids) -> tuple[int, ...]:
        """Return the env ids that an ``id`` argument selects."""
        return tuple(np.flatnonzero(~self.paused).tolist()) if id is None else parse_ids(id, len(self))

    @property
    def restarts(self) -> bool:
        """True if an env whose episode ends starts the next episode in the same step."""
        return self.unwrapped.engine.done_policy.autoreset

    def have_begun(self, env_ids: Sequence[int]) -> bool:
        """Return whether none of these envs needs a reset."""
        phase = self.unwrapped.engine.table.phase
        return all(phase(env_id) is not Phase.NEEDS_RESET for env_id in env_ids)

    # ---------------------------------------------------------------- statistics and saved states

    @property
    def frozen(self) -> bool:
        """True if the statistics of all `NormalizeStates` and `NormalizeRewards` from this wrapper inwards are frozen.

        You can set this attribute at any time. The new value applies to all of these wrappers.

        Raises:
            ArgumentError: If it is set to anything other than a bool.
            AbsentAttributeError: If there is no wrapper with statistics.
        """
        return all(layer.is_frozen for layer in self._with_statistics())

    @frozen.setter
    def frozen(self, frozen: bool) -> None:
        check_flags(frozen=frozen)
        for layer in self._with_statistics():
            layer.is_frozen = bool(frozen)

    def _with_statistics(self) -> list[ParallelWrapper]:
        found: list[ParallelWrapper] = []
        layer: Wrappable = self
        while isinstance(layer, ParallelWrapper):
            found += [layer] if layer.is_frozen is not None else []
            layer = layer.env
        if not found:
            raise absent_attribute(self, "frozen")
        return found

    def save_state(self) -> SavedState | WrappedState:
        """Return the state of the wrappers and of the envs. See `ParallelEnv.save_state`."""
        state, memory = self.env.save_state(), self.remembered()
        return WrappedState(type(self).__qualname__, deep_copy(memory), state) if memory else state

    def load_state(self, state: Any) -> tuple[int, ...]:
        """Restore a state. See `ParallelEnv.load_state`.

        If an env fails while it is being restored, the wrappers keep their current state, which no longer fits the
        envs. In that case, reset all envs.

        Raises:
            ArgumentError: If the state was saved through different wrappers, or for the reasons given in
                `ParallelEnv.load_state`. In that case, nothing is changed.
        """
        expected = _form(self.remembered())
        if not expected:
            return self.env.load_state(state)
        name = type(self).__qualname__
        found = state.wrapper if isinstance(state, WrappedState) else f"no wrapper (it is a {type(state).__name__})"
        if found != name:
            raise ArgumentError(
                f"The state is of {found}, but {name} has state of its own. Load it through the same "
                "wrappers, in the same order, through which it was saved."
            )
        form = _form(state.memory)
        if form != expected:
            raise ArgumentError(
                f"The saved state of {name} has the form {form}, but here it is {expected}. Make the wrapper with the "
                "same arguments, around as many envs."
            )
        lost = self.env.load_state(state.state)
        self.remember(deep_copy(state.memory))
        return lost

    def remembered(self) -> dict[str, object]:
        """Return the part of this wrapper's own state that `save_state` must save; by default, an empty dict."""
        return {name: getattr(self, name) for name in self._saved}

    def remember(self, memory: dict[str, Any]) -> None:
        """Restore what `remembered` returned. Statistics that several wrappers share are restored for all of them."""
        for name, value in memory.items():
            if hasattr(value, "leaves"):
                getattr(self, name).leaves = value.leaves
            elif name != "settings":
                setattr(self, name, value)

    # ---------------------------------------------------------------- everything else

    @property
    def unwrapped(self) -> ParallelEnv:
        """The `ParallelEnv` without any wrapper."""
        return self.env.unwrapped

    def _refuse(self, call: str, *args: object, **kwargs: object) -> NoReturn:
        raise UsageError(
            f"{call}() would bypass {type(self).__name__}. Wrap the single envs instead, or the other library's "
            f"object; env.unwrapped.{call}() runs without this wrapper: if it steps envs, reset them afterwards."
        )

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the wrapped object.

        For a method that would bypass this wrapper, return a function that raises `UsageError`.
        """
        if name in _BYPASSING:
            return partial(self._refuse, name)
        if name.startswith("_") or name == "env":
            raise AttributeError(f"{type(self).__name__} has no attribute {name!r}.")
        return getattr(self.env, name)

    if not TYPE_CHECKING:  # a type checker would otherwise accept any name

        def __setattr__(self, name: str, value: object) -> None:
            """Set an attribute of this wrapper. Reads of unknown attributes go to the wrapped object; writes do not.

            Raises:
                AbsentAttributeError: If another library has a setting of this name, which would have no effect here.
            """
            if name in FOREIGN_SETTINGS and not hasattr(type(self), name):
                raise unsettable_attribute(self, name, is_argument=False)
            object.__setattr__(self, name, value)

    def __len__(self) -> int:
        return len(self.env)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<{type(self).__name__} around {self.env!r}>"

    def _repr_mimebundle_(self, include: object = None, exclude: object = None) -> dict[str, str]:
        return mime_bundle(self)


def _form(value: object) -> object:
    """Return the shapes and the ``"settings"`` in the state of a wrapper.

    A state can be loaded only into a wrapper for which these are the same.
    """
    if isinstance(value, dict):
        return {name: part if name == "settings" else _form(part) for name, part in value.items()}
    if isinstance(value, list):
        return [_form(part) for part in value]
    return getattr(value, "shapes", getattr(value, "shape", None))


class StateWrapper(ParallelWrapper):
    """Base class of wrappers that change states. Override `process`, which receives all states of a result at once.

    Args:
        env: A `ParallelEnv`, or another wrapper.
        observation_space: Space of one env's processed state; ``None`` means that processing does not change the space.
    """

    def __init__(self, env: Wrappable, observation_space: Space = None) -> None:
        super().__init__(env)
        self.single_observation_space: Space = env.single_observation_space
        self.observation_spaces = env.observation_spaces
        if observation_space is not None:
            self.single_observation_space = observation_space
            self.observation_spaces = [deep_copy(observation_space) for _ in range(len(env))]
        self.observation_space = batched(self.single_observation_space, len(env))

    def process(self, states: States) -> States:
        """Return processed states.

        This method receives the states of each result of `reset`, `step`, `recv` and `step_wait`. Envs that have no
        state are left out; if no env has one, this method is not called. If envs ended an episode and started the next
        one in the same step, this method is called a second time, with the states in ``info["ended_state"]``.

        Args:
            states: Batched as `ParallelEnv.step` returns them, for any number of envs.

        Returns:
            An array whose first axis is the env axis, or a dict or tuple of such arrays.

        Raises:
            UsageError: If a subclass does not override this method.
            BaseException: Any exception that your `process` raises. Its attribute ``partial`` is the unprocessed
                result. See `ParallelWrapper`.
        """
        raise UsageError(f"{type(self).__name__} lacks process(states). Define it; it returns the processed states.")

    def on_reset(self, states: States, env_ids: tuple[int, ...]) -> States:
        """Return the processed first states."""
        return self._processed(states, len(env_ids))

    def on_step(self, result: StepResult) -> StepResult:
        """Return the result with processed states, including the last states of ended episodes.

        Raises:
            ArgumentError: If `process` returns something other than a batch of states that fit the observation space.
        """
        states = self._processed(result.states, len(result.dones))
        infos = [info for info in result.infos[result.dones] if info.get("ended_state") is not None]
        if infos and self.restarts:
            ended = batch_of(self.env.single_observation_space, [info["ended_state"] for info in infos])
            ended = self._processed(ended, len(infos))
            for info, state in zip(infos, unstacked(ended, self.single_observation_space, len(infos)), strict=True):
                info["ended_state"] = state
        return changed(result, states=states)

    def get_observations(self, id: Ids = None) -> States:
        """Return the current observations of tasks, processed. See `TaskPool.get_observations`."""
        env: Any = self.env
        return self._without_exhausted(
            lambda states, env_ids: self._processed(states, len(env_ids)), env.get_observations(id), self.chosen(id)
        )

    def _processed(self, states: States, num_states: int) -> States:
        if not num_states:
            return batch_of(self.single_observation_space, ())
        processed = self.process(states)
        check_states(self.single_observation_space, processed, num_states)
        return processed


States: TypeAlias = State
"""States of several envs, batched as `ParallelEnv` returns them."""
Space: TypeAlias = "spaces.Space | None"


def apply_to_stepped(
    result: StepResult, hook: Callable[[StepResult], StepResult], space: Space, new_space: Space
) -> StepResult:
    """Return a result in which the hook has processed the rows of stepped envs. Rows of idle envs are not changed.

    ``space`` is the space of the states in ``result``; ``new_space`` is the space of the states that the hook returns.
    """
    states, rewards = result.states, result.rewards
    if not isinstance(states, np.ndarray) or states.dtype != object or rewards.dtype != object:
        return hook(result)
    pairs = enumerate(zip(states, rewards, strict=True))
    rows = [row for row, (state, reward) in pairs if state is not None or reward is not None]
    if len(rows) == len(states):
        return hook(result)
    parts = [part.copy() for part in (rewards, result.dones, result.infos, result.terminated, result.truncated)]
    others = result.env_ids, result.restarted
    given = StepResult(batch_of(space, states[rows].tolist()), *(part[rows] for part in (*parts, *others)))
    seen = hook(given)
    if seen.states is not given.states:
        states = scattered(seen.states, new_space, rows, len(states))
    for part, values in zip(parts, (*seen[1:], seen.terminated, seen.truncated), strict=True):
        part[rows] = values
    rewards, dones, infos, terminated, truncated = parts
    return StepResult(states, rewards, dones, infos, terminated, truncated, *others)


def changed(result: StepResult, *, states: States = None, rewards: Array | None = None) -> StepResult:
    """Return a copy of ``result`` whose states or rewards are replaced; all other parts are kept."""
    return StepResult(
        result.states if states is None else states,
        result.rewards if rewards is None else rewards,
        *(result.dones, result.infos, result.terminated, result.truncated, result.env_ids, result.restarted),
    )


def numeric_rewards(result: StepResult) -> Array:
    """Return the rewards as a float64 array; raise an `EnvContractError` if a reward is not a number."""
    if result.rewards.dtype != object:
        return result.rewards  # type: ignore[no-any-return]
    numbers = [as_number(reward) for reward in result.rewards]
    if None in numbers:
        row = numbers.index(None)
        env_id = int(result.env_ids[row])
        raise EnvContractError(
            f"Rewards must be numbers here; the reward of env {env_id} is {describe_value(result.rewards[row])}. "
            "Return a number from its step().",
            (env_id,),
        )
    return np.array(numbers, dtype=np.float64)


def batch_of(space: Space, states: Sequence[object]) -> States:
    """Join single states into a batch."""
    structure = Structure(space)
    columns = zip(*map(structure.split_state, states), strict=True) if states else [()] * len(structure.leaves)
    return structure.join([structure.stack(leaf, column) for leaf, column in enumerate(columns)])


def unstacked(states: States, space: Space, count: int) -> list[State]:
    """Split a batch of ``count`` states into a list of single states.

    Rows of arrays are copied, because a `ParallelEnv` with ``copy=False`` overwrites its arrays in the next step.
    """
    if isinstance(states, np.ndarray) and states.dtype == object:
        return list(states)
    structure = Structure(space)  # tells a batch of tuples from a tuple of batches
    leaves = structure.split(states)
    return [structure.join([_copied(pick_rows(leaf, row)) for leaf in leaves]) for row in range(count)]


def _copied(value: State) -> State:
    if isinstance(value, dict):
        return {key: _copied(part) for key, part in value.items()}
    return value.copy() if isinstance(value, np.ndarray) else value


def scattered(states: States, space: Space, rows: Sequence[int], count: int) -> Array:
    """Return a ``(count,)`` object array with the batch's states at the indices ``rows`` and ``None`` elsewhere."""
    found: list[object] = [None] * count
    for row, state in zip(rows, unstacked(states, space, len(rows)), strict=True):
        found[row] = state
    return object_array(found)


def aligned(result: StepResult, align: Align, space: Space) -> StepResult | StepBatch:
    """Return ``result`` unchanged if ``align`` is ``"item"``, otherwise converted to a `StepBatch`.

    ``space`` is the space of the states in ``result``.
    """
    if align == "item":
        return result
    rows = unstacked(result.states, space, len(result.env_ids))
    items = list(zip(rows, result.rewards.tolist(), result.dones.tolist(), result.infos.tolist(), strict=True))
    flags = {name: getattr(result, name) for name in ("terminated", "truncated", "env_ids", "restarted")}
    return StepBatch(items, **flags)


def check_states(space: Space, states: States, num_states: int) -> None:
    """Raise an `ArgumentError` unless ``states`` is a batch of the given size; shapes and dtypes are not checked."""
    structure = Structure(space)
    try:
        leaves = structure.split(states)
    except (LookupError, TypeError):
        fault = f"found {describe_value(states)}"
    else:
        wrong = [index for index, leaf in enumerate(leaves) if not _has_rows(leaf, num_states, space is None)]
        if not wrong:
            return
        where, found = structure.describe(wrong[0]), describe_value(leaves[wrong[0]])
        fault = f"states{where} must have a row for each of {num_states} envs; found {found}"
    raise ArgumentError(
        f"A wrapper returned states that do not match its observation_space, {space}: {fault}. Give StateWrapper the "
        "space of the states that process() returns."
    )


def _has_rows(values: Any, num_rows: int, may_be_dict: bool) -> bool:
    if isinstance(values, dict):
        return may_be_dict and all(_has_rows(part, num_rows, True) for part in values.values())
    is_single = isinstance(values, (str, bytes)) or not hasattr(values, "__len__") or getattr(values, "ndim", 1) == 0
    return not is_single and len(values) == num_rows
