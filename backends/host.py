"""The code that owns envs and executes commands on them. The same in every mode."""

from __future__ import annotations

import contextlib
import copy
import itertools
from typing import Any, NoReturn

import numpy as np

from parallelenv.backends.adapt import Resettable, adapt
from parallelenv.backends.lookup import get_attribute, get_method, set_attribute
from parallelenv.batch import Array, Batch
from parallelenv.errors import EnvContractError, EnvInterruptedError, InvalidEnvError
from parallelenv.failures import Failure
from parallelenv.ownership import own
from parallelenv.protocol import Command, EnvFacts, Extra, HostRecipe, Reply
from parallelenv.spaces import as_array, describe_value, fits

_FLAGS = frozenset({bool, np.bool_})
_NUMBERS = frozenset({float, bool, np.float64, np.float32, np.int64, np.int32, np.bool_})


class Host:
    """Owns a group of envs and executes commands on them, in order.

    Each public method below `execute` is an operation: it takes an env id, what the command
    has for that env, and the command's common arguments; it returns the env's value, or
    ``None`` if there is nothing to say.

    Args:
        recipe: What to own.
        in_caller: Whether it runs in the caller's main thread, where Ctrl-C arrives.
    """

    def __init__(self, recipe: HostRecipe, *, in_caller: bool = False) -> None:
        self.in_caller = in_caller
        self.doing = ""
        self._recipe = recipe
        self._first = recipe.env_ids[0]
        self._envs: list[Resettable | None] = [None] * len(recipe.env_ids)
        self._steps: list[Any] = [_not_built] * len(recipe.env_ids)
        self._spaces: list[Any] = []
        self._batch: Batch

    def attach(self, batch: Batch) -> None:
        """Take the batch whose rows its envs write."""
        self._batch = batch
        self._offset = batch.layout.first
        structure = batch.layout.states
        self._plain_state: Any = batch.states[0] if structure.is_single else None
        self._plain_shape = None if self._plain_state is None else self._plain_state.shape[1:]
        self._plain_dtype = None if self._plain_state is None else self._plain_state.dtype
        # Reading a number out of an array gives a new object, a row of more would be a view.
        is_number = len(batch.actions) == 1 and batch.layout.actions.is_single and batch.actions[0].ndim == 1
        self._plain_actions = batch.actions[0] if is_number else None

    def execute(self, command: Command) -> Reply:
        """Execute a command on each of its envs; an exception concerns its env alone."""
        return Execution(self, command).run()

    def close(self) -> None:
        """Close all envs."""
        for env in self._envs:
            _close(env)

    # ---------------------------------------------------------------- operations

    def build(self, env_id: int, argument: Any, common: Any) -> EnvFacts:
        """Make an env, after closing the one that it replaces."""
        slot = env_id - self._first
        recipe = self._recipe.envs[slot]
        old, self._envs[slot] = self._envs[slot], None
        self._steps[slot] = _not_built
        _close(old)
        env = recipe.build()
        self._envs[slot] = adapted = adapt(env)
        self._steps[slot] = adapted.step
        return EnvFacts(
            self._shared_space(getattr(env, "observation_space", None)),
            self._shared_space(getattr(env, "action_space", None)),
            dict(getattr(env, "metadata", None) or {}),
            getattr(env, "render_mode", None),
        )

    def reset(self, env_id: int, each: tuple[int | None, dict[str, Any] | None], common: Any) -> Extra | None:
        """Begin an episode."""
        seed, options = each
        state, info = self._env(env_id).reset(seed, own(options))
        loose = self._store_state(env_id - self._offset, state)
        return Extra(info or None, loose) if info or loose else None

    def step(self, env_id: int, action: Any, autoreset: bool) -> Extra | None:
        """Step an env, and begin its next episode if it ended and that is wanted."""
        row = env_id - self._offset
        actions = self._plain_actions  # most spaces are one array of numbers
        action = self._read_action(row, action) if actions is None else actions[row]
        result = self._steps[env_id - self._first](action)
        if type(result) is not tuple or len(result) != 5:
            raise EnvContractError(_not_five(result))
        state, reward, terminated, truncated, info = result
        loose = self._store_state(row, state)
        batch = self._batch  # not before the step: a host given up meanwhile writes elsewhere
        loose_reward = None
        if type(reward) in _NUMBERS:
            batch.rewards[row] = reward
        else:
            loose_reward = self._store_reward(row, reward)
        batch.terminated[row] = terminated if type(terminated) in _FLAGS else _as_flag(terminated)
        batch.truncated[row] = truncated if type(truncated) in _FLAGS else _as_flag(truncated)
        if autoreset and (terminated or truncated):
            return self._next_episode(env_id, info, loose, loose_reward)
        return _extra(info, loose, loose_reward) if info or loose or loose_reward else None

    def get(self, env_id: int, argument: Any, key: str) -> tuple[Any] | None:
        """Return an attribute in a one-tuple; nothing if it is absent."""
        return get_attribute(self._env(env_id).env, key)

    def set(self, env_id: int, value: Any, key: str) -> None:
        """Set an attribute. Each env gets a copy of its own."""
        set_attribute(self._env(env_id).env, key, own(value))

    def call(self, env_id: int, arguments: dict[str, Any], method: str) -> Any:
        """Call a method with keyword arguments, copied for this env."""
        self.doing = f"{method}()"
        return get_method(self._env(env_id).env, method)(**own(arguments))

    def render(self, env_id: int, argument: Any, common: Any) -> Any:
        """Render an env."""
        return self._env(env_id).env.render()

    # ---------------------------------------------------------------- parts of a step

    def _env(self, env_id: int) -> Resettable:
        env = self._envs[env_id - self._first]
        if env is None:
            _not_built()
        return env

    def _read_action(self, row: int, loose: Any) -> Any:
        if not self._batch.actions:
            return own(loose)
        leaves = [array[row] for array in self._batch.actions]
        # A row is a view of memory that the next step overwrites, and the env may keep it.
        owned = [leaf.copy() if isinstance(leaf, np.ndarray) else leaf for leaf in leaves]
        return self._batch.layout.actions.join(owned)

    def _next_episode(
        self, env_id: int, info: dict[str, Any], loose: list[Any] | None, reward: tuple[Any] | None
    ) -> Extra | None:
        row = env_id - self._offset
        for array, ended in zip(self._batch.states, self._batch.ended_states, strict=True):
            if array is not None and ended is not None:
                ended[row] = array[row]
        # Copied before the reset: an env may reuse the buffers that it returned.
        info, ended_loose, reward = own(info), own(loose), own(reward)
        self.doing = "reset"
        state, reset_info = self._env(env_id).reset(None, None)
        loose = self._store_state(row, state)
        self.doing = "step"
        if info or loose or reward or reset_info:
            return _extra(info, loose, reward, ended_loose, reset_info or None)
        return None

    def _store_state(self, row: int, state: Any) -> list[Any] | None:
        """Write a state into the batch and return its loose leaves, if it has any."""
        if type(state) is np.ndarray and state.dtype == self._plain_dtype and state.shape == self._plain_shape:
            self._plain_state[row] = state
            return None
        try:
            leaves = self._batch.layout.states.split(state)
        except (LookupError, TypeError) as error:
            raise EnvContractError(
                f"The state returned lacks a part of {self._batch.layout.observation_space}: "
                f"{type(error).__name__}: {error}."
            ) from None
        loose = []
        for index, (array, leaf) in enumerate(zip(self._batch.states, leaves, strict=True)):
            if array is None:
                self._check_loose(index, leaf)
                loose.append(leaf)
            else:
                self._store_leaf(index, array, row, leaf)
        return loose or None

    def _check_loose(self, index: int, value: Any) -> None:
        """Refuse a value that would not fit beside those of other envs."""
        space = self._batch.layout.states.leaves[index]
        if space is None or space.shape is None or space.dtype is None:
            return
        if not fits(value, space.shape, np.dtype(space.dtype)):
            raise EnvContractError(f"the state is {describe_value(value)}, but the observation space says {space}.")

    def _store_leaf(self, index: int, array: Array, row: int, value: Any) -> None:
        if not fits(value, array.shape[1:], array.dtype):
            structure = self._batch.layout.states
            raise EnvContractError(
                f"state{structure.describe(index)} is {describe_value(value)}, but the observation space says "
                f"{structure.leaves[index]}. Declare the space that the env really has."
            )
        array[row] = as_array(value)

    def _store_reward(self, row: int, reward: Any) -> tuple[Any] | None:
        """Write a reward of an unusual type; return it in a one-tuple if it is no number."""
        shape = getattr(reward, "shape", None)
        if shape is not None and all(length == 1 for length in shape) and hasattr(reward, "item"):
            reward = reward.item()
        if isinstance(reward, (float, int, np.number, np.bool_)):
            with contextlib.suppress(OverflowError):  # an int beyond what a float holds stays what it is
                self._batch.rewards[row] = reward
                return None
        self._batch.rewards[row] = np.nan
        return (reward,)

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
        self._reply = Reply(command.number)
        each = itertools.repeat(None) if command.each is None else command.each
        self._rest = iter(zip(command.env_ids, each, strict=False))

    def run(self) -> Reply:
        """Execute what is left of the command and return its reply."""
        host, reply, common, values = self._host, self._reply, self._command.common, self._reply.values
        operation = getattr(host, self._command.name)
        while True:
            host.doing = self._command.name
            try:
                for env_id, argument in self._rest:
                    value = operation(env_id, argument, common)
                    if value is not None:
                        values[env_id] = value
            except BaseException as error:
                reply.failures[env_id] = self._failure(error, env_id)
                if isinstance(error, KeyboardInterrupt) and host.in_caller:
                    raise
            else:
                return reply

    def _failure(self, error: BaseException, env_id: int) -> Failure:
        if isinstance(error, KeyboardInterrupt) and self._host.in_caller:
            interrupted = EnvInterruptedError(
                f"env {env_id} was interrupted in the middle of {self._host.doing}; its state is uncertain. "
                f"Call reset({env_id})."
            )
            return Failure(interrupted, env_id, f"interrupted {self._host.doing}")
        return Failure(error, env_id, self._host.doing)


def _extra(info: Any, *others: Any) -> Extra:
    if not isinstance(info, dict) and info is not None:
        raise EnvContractError(f"step() returned the info {info!r}; an info is a dict.")
    return Extra(info or None, *others)


def _as_flag(value: Any) -> bool:
    """Return a flag of an unusual type: an int, or an array or tensor of one element."""
    if value is None or isinstance(value, str) or np.size(value) != 1:
        raise EnvContractError(f"terminated and truncated are bools; step() returned {describe_value(value)}.")
    return bool(value)


def _not_five(result: Any) -> str:
    size = f" of {len(result)}" if hasattr(result, "__len__") else ""
    return (
        f"step() returned a {type(result).__name__}{size}; a gymnasium.Env returns "
        "(state, reward, terminated, truncated, info). An object that is no gymnasium.Env may return four items."
    )


def _not_built(*_: Any) -> NoReturn:
    raise InvalidEnvError("This env could not be rebuilt. Try restart() again.")


def _close(env: Resettable | None) -> None:
    """Close an env that is not used any more, whatever it raises: it is gone either way."""
    close = getattr(env.env, "close", None) if env is not None else None
    if callable(close):
        with contextlib.suppress(BaseException):
            close()
