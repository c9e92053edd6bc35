"""Plays a fixed sequence of calls and records every result, to compare two modes."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import gymnasium
import numpy as np
from gymnasium.vector.utils import concatenate, create_empty_array

from parallelenv.contract.env_specs import EnvFn
from parallelenv.contract.spaces import Action
from parallelenv.engine.assemble import Align
from parallelenv.env import ParallelEnv
from parallelenv.errors import NothingInFlightError
from parallelenv.results import StepBatch, StepResult, difference
from parallelenv.testing import envs as zoo

NUM_ENVS = 5
DONE_POLICIES = (None, "idle", "restart", "continue")
LENGTHS = (4, 7, 3, 6, 4)  # two end at the same time


def five_env_fns(kind: Callable[..., object], *arguments: object) -> list[EnvFn]:
    """Return five env fns of one kind, with episodes of different lengths."""
    return [partial(kind, number, *arguments, length=length) for number, length in enumerate(LENGTHS)]


_CLASSES: dict[str, Callable[..., object]] = {
    "array": zoo.Counter,
    "dict": zoo.Sheet,
    "tuple": zoo.Pair,
    "text": zoo.Words,
    "sequence": zoo.Chain,
    "graph": zoo.Net,
    "old": zoo.Old,
    "ragged": zoo.Ragged,
    "tensor": zoo.Tensors,
}
_MIXED = ("array", "old", "text", "dict", "ragged")
KINDS: dict[str, Callable[[], list[Any]]] = {
    **{name: partial(five_env_fns, kind) for name, kind in _CLASSES.items()},
    "mixed": lambda: [five_env_fns(_CLASSES[kind])[number] for number, kind in enumerate(_MIXED)],
    "instances": lambda: [zoo.Wrapped(env_fn()) for env_fn in five_env_fns(zoo.Counter)],
    "registered": lambda: ["CartPole-v1"] * NUM_ENVS,
}
"""Lists of envs, by their special feature."""

_ID_FORMS: Sequence[Any] = (
    None,
    3,
    [4, 0],
    None,
    (1, 2, 3),
    np.array([2, 0, 4]),
    np.int64(2),
    slice(1, None, 2),
    None,
    np.array([False, True, True, False, True]),
    slice(None, None, -1),
    [],
    None,
)
"""Every form of ``id``, in an order in which all envs make progress."""


class Actions:
    """Deterministic actions for any envs."""

    def __init__(self, env: ParallelEnv, seed: int) -> None:
        self._spaces = [copy.deepcopy(space) for space in env.action_spaces]
        self._common = env.single_action_space
        self._chance = np.random.default_rng(seed)
        for space in self._spaces:
            if space is not None:
                space.seed(int(self._chance.integers(1000)))

    def draw(self, env_ids: Sequence[int], *, batched: bool = False) -> Action:
        """Return one action per env, as a list, or batched as Gymnasium does if they share a space."""
        spaces = [self._spaces[env_id] for env_id in env_ids]
        drawn = [float(self._chance.normal()) if space is None else space.sample() for space in spaces]
        space = self._common
        if batched and drawn and space is not None and not isinstance(space, gymnasium.spaces.Text):
            empty: Any = create_empty_array(space, len(drawn))
            return concatenate(space, drawn, empty)
        return drawn


class AnswerRecord:
    """The results of calls, and copies made at once.

    With ``overwrites``, every third result is written into, as its owner may. Later results must not show it.
    """

    def __init__(self, *, overwrites: bool = False) -> None:
        self._overwrites = overwrites
        self._kept: dict[str, object] = {}
        self._copies: dict[str, object] = {}

    def add(self, call: str, answer: object) -> None:
        """Add the result of a call."""
        label, answer = f"{len(self._copies)}: {call}", items(answer)
        self._copies[label] = copy.deepcopy(answer)
        if self._overwrites and len(self._copies) % 3 == 0:
            _overwrite(answer)
        else:
            self._kept[label] = answer

    def check_unchanged(self, context: str = "") -> None:
        """Fail if a result has changed since it was returned."""
        copies = {label: self._copies[label] for label in self._kept}
        assert_same(copies, self._kept, f"{context}an answer given earlier, ")

    def assert_equals(self, expected: AnswerRecord, context: str = "") -> None:
        """Fail if the results differ from those expected."""
        assert_same(expected._copies, self._copies, f"{context}answer ")


def _overwrite(value: object) -> None:
    """Write into every part of a result."""
    if isinstance(value, np.ndarray) and value.dtype != object:
        value.fill(value.dtype.type(1))
    elif isinstance(value, (dict, list, tuple, np.ndarray)):
        for child in list(value.values()) if isinstance(value, dict) else value:
            _overwrite(child)
    if isinstance(value, dict):
        value["overwritten"] = True
    if isinstance(value, list):
        value.append("overwritten")


def items(answer: object) -> object:
    """Return a result with all its fields as plain values."""
    if not isinstance(answer, (StepResult, StepBatch)):
        return answer
    names = ("states", "rewards", "dones", "infos") if isinstance(answer, StepResult) else ()
    parts = dict(zip(names, answer, strict=True)) if names else {"batch": list(answer)}
    return {**parts, **{name: getattr(answer, name) for name in ("terminated", "truncated", "env_ids")}}


def assert_same(expected: object, found: object, where: str = "") -> None:
    """Fail unless two values are equal bit for bit, and say where they first differ."""
    first = difference(expected, found, where)
    if first is not None:
        raise AssertionError(f"{first} (expected against found)")


def play(env: ParallelEnv, seed: int = 3, *, overwrites: bool = False) -> AnswerRecord:
    """Play the sequence and return the results."""
    record = AnswerRecord(overwrites=overwrites)
    actions = Actions(env, seed)
    record.add("spaces", [*env.observation_spaces, *env.action_spaces])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Gymnasium's own envs warn about steps after their end
        record.add("reset", env.reset(seed=seed))
        record.add("reset_infos", env.reset_infos)
        for turn, form in enumerate(_ID_FORMS):
            selected: Any = slice(None) if form is None else list(form) if isinstance(form, tuple) else form
            env_ids = np.atleast_1d(np.arange(NUM_ENVS)[selected]).tolist()
            action = actions.draw(env_ids, batched=turn % 3 == 1)
            align: Align = "item" if turn % 2 else "batch"
            record.add(f"step, id={form}, {align=}", env.step(action, form, align))
            record.add("done", [env.done, env.has_done(), env.all_done()])
            if turn % 5 == 4:
                over = np.flatnonzero(env.done)[::-1].tolist()
                record.add(f"reset, id={over}", env.reset(over, seed=[turn + env_id for env_id in over]))
                record.add("reset_infos", [env.reset_infos, env.done])
        _send_and_receive(env, record, actions)
    record.add("number", env.get_env_attr("number", default="absent"))
    return record


def _send_and_receive(env: ParallelEnv, record: AnswerRecord, actions: Actions) -> None:
    """Steps and resets in flight together; a reset drops what the same env has in flight."""
    options = [None if space is None else {"level": 3} for space in env.observation_spaces]  # `Old` takes none
    env.send_reset(seed=[5, None, 7, 8, 9], options=options)
    record.add("sent reset", drain(env))
    record.add("reset_infos", env.reset_infos)
    for ids in ([1, 3], [4, 0, 2]):
        env.send(actions.draw(ids), ids)
    env.send_reset([3, 0], seed=9)
    record.add("reset", env.reset([4], seed=6))
    record.add("send and recv", drain(env, max_envs=2))
    record.add("step", env.step(actions.draw(range(NUM_ENVS))))


def drain(env: ParallelEnv, **arguments: Any) -> dict[int, Any]:
    """Receive until nothing is in flight; return state, reward, flags and info by env id."""
    landed: dict[int, Any] = {}
    while True:
        try:
            batch = env.recv(align="batch", **arguments)
        except NothingInFlightError:
            return landed
        for row, env_id in enumerate(batch.env_ids.tolist()):
            landed[env_id] = (*batch[row], bool(batch.terminated[row]), bool(batch.truncated[row]))
