"""The results of steps, batched or as one tuple per env, and a comparison of nested values."""

from __future__ import annotations

import contextlib
import dis
import inspect
import pickle
import struct
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from opcode import opmap
from operator import itemgetter
from typing import Any

import cloudpickle
import numpy as np

from parallelenv.contract.batch import Array
from parallelenv.contract.interrupts import Ignore
from parallelenv.contract.spaces import State
from parallelenv.errors import ArgumentError

_CACHE = opmap["CACHE"]
_UNPACK_PAIR = bytes((opmap["UNPACK_SEQUENCE"], 2))
_PARTS_OF_CALLS = ("CACHE", "PRECALL", "KW_NAMES")


class StepResult(tuple[State, Any, Any, Any]):
    """The tuple ``states, rewards, dones, infos`` of a step of ``k`` envs.

    Gymnasium's ``step`` returns five items; here `terminated` and `truncated` are attributes. The vector env that
    `ParallelEnv.to_gymnasium` returns has a ``step`` with Gymnasium's five items.

    Attributes:
        states: Batched as in Gymnasium, with one row per env; an object array if the state of an env is ``None``.
        rewards: ``(k,)`` float64; an object array if some rewards are not numbers.
        dones: ``(k,)`` bool: True for envs whose episode was terminated or truncated.
        infos: ``(k,)`` object array of dicts.
        terminated: ``(k,)`` bool.
        truncated: ``(k,)`` bool.
        env_ids: ``(k,)`` int64: the env id of each row.
        restarted: ``(k,)`` bool: True for envs that failed in this step and were restarted (``on_failure="restart"``).
            The reward in such a row is not from the env.
    """

    _flags: Array
    _env_ids: Array

    def __new__(
        cls,
        states: State,
        rewards: Array,
        dones: Array,
        infos: Array,
        terminated: Array,
        truncated: Array,
        env_ids: Array,
        restarted: Array | None = None,
    ) -> StepResult:
        """Return a tuple of the first four arguments, with the others as attributes."""
        self = tuple.__new__(cls, (states, rewards, dones, infos))
        vars(self).update(terminated=terminated, truncated=truncated, env_ids=env_ids)
        if restarted is not None:
            self.restarted = restarted
        return self

    @classmethod
    def of(cls, states: State, rewards: Array, dones: Array, infos: Array, flags: Array, env_ids: Array) -> StepResult:
        """Return a result that creates each attribute when the attribute is first read.

        If no attribute is read, this saves 0.9 us. The array ``flags``, ``(k, 2)`` bool, has the columns ``terminated``
        and ``truncated``. The attributes are copied from ``flags`` and ``env_ids`` when they are first read; until
        then, these two arrays must not change.
        """
        self = tuple.__new__(cls, (states, rewards, dones, infos))
        self._flags, self._env_ids = flags, env_ids
        return self

    @cached_property
    def terminated(self) -> Array:
        """``(k,)`` bool: True for envs whose episode was terminated."""
        return self._flags[:, 0].copy()

    @cached_property
    def truncated(self) -> Array:
        """``(k,)`` bool: True for envs whose episode was truncated."""
        return self._flags[:, 1].copy()

    @cached_property
    def env_ids(self) -> Array:
        """``(k,)`` int64: the env id of each row."""
        return self._env_ids.copy()

    @cached_property
    def restarted(self) -> Array:
        """``(k,)`` bool: True for envs that failed in this step and were restarted."""
        return np.zeros(len(self.env_ids), dtype=bool)

    def __getnewargs__(self) -> tuple[Any, ...]:
        return (*self, self.terminated, self.truncated, self.env_ids, self.restarted)

    states: State = property(itemgetter(0))
    rewards: Any = property(itemgetter(1))
    dones: Any = property(itemgetter(2))
    infos: Any = property(itemgetter(3))


class StepBatch(list[tuple[State, Any, Any, Any]]):
    """A list with one tuple ``(state, reward, done, info)`` for each of ``k`` envs, in the order of ``env_ids``.

    Attributes:
        terminated: ``(k,)`` bool.
        truncated: ``(k,)`` bool.
        env_ids: ``(k,)`` int64.
        restarted: ``(k,)`` bool. See `StepResult`.
    """

    def __init__(
        self,
        items: Sequence[Any],
        *,
        terminated: Array,
        truncated: Array,
        env_ids: Array,
        restarted: Array | None = None,
    ) -> None:
        super().__init__(items)
        self.terminated = terminated
        self.truncated = truncated
        self.env_ids = env_ids
        self.restarted: Array = np.zeros(len(env_ids), dtype=bool) if restarted is None else restarted


def refuse_pair(num_states: int | None) -> None:
    """Raise an error if the result of ``reset`` is unpacked into states and infos, as in code written for Gymnasium.

    Python's own error would only say that there are too many values to unpack, and with two envs, Python would raise no
    error at all. Therefore, this function reads the bytecode of the code that calls ``reset``. This takes 0.8 us; the
    fastest reset takes 20 us. No error is raised unless the code is certain to unpack the result into a pair.

    Args:
        num_states: Number of items in the result; ``None`` if the result may itself be a pair, such as the batched
            states of a `Tuple` space.

    Raises:
        ArgumentError: If there are two variables but not two items, or if the name of the second variable
            contains "info".
    """
    user = inspect.currentframe()
    for _ in range(3):  # the frames of this function, of `reset`, and of the guard around `reset`
        user = user.f_back if user is not None else None
    if user is None:
        return
    code, place = user.f_code.co_code, user.f_lasti + 2
    while place < len(code) and code[place] == _CACHE:
        place += 2
    if code[place : place + 2] != _UNPACK_PAIR:
        return
    instructions = [one for one in dis.get_instructions(user.f_code) if one.opname not in _PARTS_OF_CALLS]
    index = next((index for index, one in enumerate(instructions) if one.offset == place), 0)
    if not _calls_reset(instructions[:index]):
        return
    if num_states not in (None, 2) or "info" in _second_target(instructions[index + 1 :]):
        raise ArgumentError(
            "reset() returns the states alone, not Gymnasium's pair, and nothing was reset: states = env.reset(). The "
            "infos are in env.reset_infos. The reset() of env.to_gymnasium() returns a pair."
        )


def _calls_reset(instructions: list[dis.Instruction]) -> bool:
    """Return whether the last instruction certainly calls the method ``reset``, not a function that calls it.

    ``list(map(ParallelEnv.reset, envs))``, for example, calls ``list``.
    """
    call = instructions.pop() if instructions else None
    if call is None or call.opname not in ("CALL", "CALL_KW"):
        return False
    num_arguments = (call.arg or 0) + (call.opname == "CALL_KW")  # the names of keywords are one more
    for one in reversed(instructions):
        if one.argval == "reset" and one.opname in ("LOAD_METHOD", "LOAD_ATTR", "LOAD_SUPER_ATTR"):
            return num_arguments == 0
        if num_arguments <= 0 or not one.opname.startswith("LOAD_"):
            return False
        num_arguments -= dis.stack_effect(one.opcode, one.arg)
    return False


def _second_target(instructions: list[dis.Instruction]) -> str:
    """Return the name of the second of two variables or attributes that are assigned; an empty string if unknown."""
    targets: list[str] = []
    for one in instructions:
        if one.opname == "STORE_FAST_STORE_FAST":
            targets += one.argval
        elif one.opname == "STORE_FAST_LOAD_FAST":
            targets.append(one.argval[0])
        elif one.opname in ("STORE_FAST", "STORE_NAME", "STORE_GLOBAL", "STORE_DEREF", "STORE_ATTR"):
            targets.append(one.argval)
        elif not one.opname.startswith("LOAD_"):
            break
        if len(targets) > 1:
            return targets[1]
    return ""


def difference(left: Any, right: Any, where: str = "") -> str | None:
    """Return a message that says where two nested values first differ; ``None`` if they are the same bit for bit.

    Types, dtypes and shapes must match. Two NaNs are the same if their bits are; 0.0 and -0.0 differ. Dicts, lists and
    tuples are compared item by item. Objects other than these containers, numbers, strings and arrays count as the same
    if they are equal or pickle to the same bytes. ``where`` is the name of the value in the message.
    """
    if type(left) is not type(right):
        return f"{where}: {_shown(left)} ({type(left).__name__}) against {_shown(right)} ({type(right).__name__})"
    keys: Iterable[object] = ()
    if isinstance(left, np.ndarray):
        if left.dtype != right.dtype or left.shape != right.shape:
            return f"{where}: {left.dtype}{left.shape} against {right.dtype}{right.shape}"
        if left.dtype != object and left.tobytes() == right.tobytes():
            return None
        keys = range(len(left)) if left.ndim else [()]
    elif isinstance(left, Mapping):
        if left.keys() != right.keys():
            return f"{where}: keys {sorted(map(str, left))} against {sorted(map(str, right))}"
        keys = left
    elif isinstance(left, (list, tuple)):
        if len(left) != len(right):
            return f"{where}: {len(left)} items against {len(right)}"
        keys = range(len(left))
    elif not _is_same(left, right):
        return f"{where}: {_shown(left)} against {_shown(right)}"
    found = (difference(left[key], right[key], where if key == () else f"{where}[{key!r}]") for key in keys)
    return next((text for text in found if text is not None), None)


def _is_same(left: Any, right: Any) -> bool:
    if isinstance(left, float):
        return struct.pack("d", left) == struct.pack("d", right)
    if isinstance(left, np.generic):
        return bool(left.dtype == right.dtype and left.tobytes() == right.tobytes())
    if hasattr(left, "__array__"):  # tensors of other libraries, whose == returns a tensor
        return difference(np.asarray(left), np.asarray(right)) is None
    with Ignore(Exception):  # an __eq__ that fails does not show that the values are equal
        if left == right:
            return True
    with contextlib.suppress(pickle.PicklingError, TypeError, AttributeError):  # for objects equal only to themselves
        return bool(cloudpickle.dumps(left) == cloudpickle.dumps(right))
    return False


def _shown(value: object) -> str:
    text = " ".join(repr(value).split())
    return text if len(text) <= 40 else f"{text[:37]}..."
