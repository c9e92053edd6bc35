"""Calls a host's copy of a policy, checks the outputs, and keeps the recurrent state."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from parallelenv.contract.arguments import ActionReader, Policy
from parallelenv.contract.batch import Array, Batch, Layout
from parallelenv.contract.copying import deep_copy, pickle_roundtrip
from parallelenv.contract.rollout_data import ExtrasFormat, RecurrentState, check_rows, join_forms, map_leaves
from parallelenv.contract.spaces import Action, State
from parallelenv.contract.tensors import as_array
from parallelenv.errors import ActionError, ArgumentError, UnpicklableError

Extras = Mapping[str, Array]


class PolicyRunner:
    """A host's copy of a policy, with the policy's recurrent state for each env.

    The argument ``memory`` is the initial recurrent state, which may also contain rows for envs of other hosts. The
    attribute ``extras_formats`` contains formats that fit all extras so far; it is ``None`` before the first call.
    """

    def __init__(self, policy: Policy, memory: RecurrentState | None, layout: Layout) -> None:
        self._policy = policy
        self._reader = ActionReader(layout, "env, in the order of the states")
        # `_names` are those of the arguments ``rnn_state`` and ``done`` that the policy takes by name. If there are
        # none, `_num_positional` is the number of these two arguments that the policy takes by position.
        try:
            parameters: Mapping[str, inspect.Parameter] = inspect.signature(policy).parameters
            if any(one.kind in _OPEN for one in parameters.values()) and hasattr(policy, "forward"):
                parameters = inspect.signature(policy.forward).parameters  # a torch module's __call__ accepts anything
        except (TypeError, ValueError):  # a builtin without a signature
            parameters = {}
        required = [one for one in parameters.values() if one.kind in _POSITIONAL and one.default is one.empty]
        self._names = tuple(name for name in _NAMES if name in parameters)
        self._num_positional = 0 if self._names else max(0, min(len(required) - 1, 2))
        self.extras_formats: dict[str, ExtrasFormat] | None = None
        self._memory_ids, self._memory, new = memory or RecurrentState((), None)  # env ids, and their rows
        self._in_episode = set(self._memory_ids) - new  # envs whose rows belong to their current episode

    def act(self, env_ids: tuple[int, ...], states: State) -> tuple[Any, Extras]:
        """Call the policy with the states of these envs; return the actions and the extras."""
        arguments: list[Any] = []
        if self._names or self._num_positional:
            if self._memory is not None and env_ids != self._memory_ids:
                # Reorder the recurrent state. Envs without a recurrent state get an arbitrary row, masked by
                # ``done=True``.
                place = {env_id: row for row, env_id in enumerate(self._memory_ids)}
                rows = np.array([place.get(env_id, 0) for env_id in env_ids], dtype=np.int64)
                self._memory, self._memory_ids = map_leaves(self._memory, lambda leaf: leaf[rows]), env_ids
            arguments = [self._memory, np.array([env_id not in self._in_episode for env_id in env_ids])]
        named = {name: value for name, value in zip(_NAMES, arguments, strict=False) if name in self._names}
        answer = self._policy(states, *arguments[: self._num_positional], **named)
        if arguments:
            self._in_episode = set(env_ids)
        actions, memory, extras = _parts(answer)
        check_rows("In the policy's tuple (actions, rnn_state, extras) the rnn_state", memory, len(env_ids))
        arrays = {name: _read_extra(name, value, len(env_ids)) for name, value in (extras or {}).items()}
        found = {name: ExtrasFormat(array.shape[1:], array.dtype) for name, array in arrays.items()}
        known = found if self.extras_formats is None else self.extras_formats
        if found.keys() != known.keys():
            raise ArgumentError(
                f"The policy returned the extras {list(found)}, but earlier {list(known)}. They must be alike in "
                "every step, so that they can be stacked."
            )
        self.extras_formats = known if found == known else join_forms(known, found)
        self._memory, self._memory_ids = memory, env_ids
        return actions, arrays

    def write_actions(self, actions: Action, batch: Batch, env_ids: tuple[int, ...]) -> list[Any] | None:
        """Write actions to the batch rows of these envs.

        If the rows cannot hold the actions, return a list of copies instead.
        """
        try:
            loose = self._reader.write(batch, actions, env_ids, env_ids, None)
        except ActionError as error:
            what = f"The policy's result does not fit the states of {len(env_ids)} envs"
            raise ActionError(f"{what}: {error}") from None
        return None if loose is None else [deep_copy(action) for action in loose]

    @property
    def memory(self) -> RecurrentState | None:
        """A copy of the current recurrent state; ``None`` if the policy has none."""
        if self._memory is None or not (self._names or self._num_positional):
            return None
        rows = map_leaves(self._memory, functools.partial(_copy, "The policy's rnn_state"))
        return RecurrentState(self._memory_ids, rows)

    def forget(self, env_ids: Sequence[int]) -> None:
        """Record that the next call of the policy for these envs is the first in an episode."""
        self._in_episode.difference_update(env_ids)


def _parts(answer: Any) -> tuple[Any, Any, Mapping[str, Any] | None]:
    """Split a policy's answer into actions, recurrent state and extras.

    An answer that is not a tuple consists only of actions. Recurrent state and extras are then ``None``.

    Raises:
        ActionError: If the answer is a tuple, but not of the form ``(actions, rnn_state, extras)``.
    """
    if not isinstance(answer, tuple):
        return answer, None, None
    if len(answer) != 3 or not isinstance(answer[2], Mapping | None):
        last = f", the last of them a {type(answer[2]).__name__}" if len(answer) == 3 else ""
        raise ActionError(
            f"The policy returned a tuple of {len(answer)}{last}. A tuple must be (actions, rnn_state, extras), where "
            "extras are a dict or None. Give actions alone as an array or a list, and those of a Tuple space as "
            "(actions, None, None)."
        )
    return answer


def _read_extra(name: str, value: Any, num_envs: int) -> Array:
    """Return a copy of one of the policy's extras as an array. Raise an error unless it has one row per env."""
    if type(value) is np.ndarray and value.shape[:1] == (num_envs,) and not value.dtype.hasobject:
        return value.copy()  # the usual case, without further checks: saves 2 us
    what = f"The policy's extras[{name!r}]"
    if isinstance(value, Mapping):
        raise ArgumentError(
            f"{what} is a {type(value).__name__}, but extras are flat: a dict of arrays with one row per env. Give its "
            "parts as extras of their own."
        )
    try:
        array = as_array(value)
    except (TypeError, ValueError, RuntimeError) as error:  # ragged lists; tensors of dtypes that numpy lacks
        raise ArgumentError(f"{what} does not form an array ({error}). Give an array with one row per env.") from error
    check_rows(what, array, num_envs)
    copied: Array = _copy(what, array)
    return copied


def _copy(what: str, value: Any) -> Any:
    """Return a copy of an output of the policy.

    Raises:
        UnpicklableError: If the output cannot be pickled, even in modes that do not need to pickle the output.
    """
    try:
        return pickle_roundtrip(value)
    except Exception as error:  # pickling runs user code, which may raise anything
        raise UnpicklableError(
            f"{what} cannot be copied to the caller ({type(error).__name__}: {error}). Return plain data."
        ) from error


_NAMES = ("rnn_state", "done")
_OPEN = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
