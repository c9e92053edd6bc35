"""States of all kinds pass through a wrapper unchanged, also in partial results."""

from __future__ import annotations

from copy import deepcopy
from functools import partial
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from conftest import MakeEnv
from fragile import GO_ON, RAISE, Fragile
from gymnasium import spaces
from modes import ORACLE, PROCESSES, here_and_in_processes

from parallelenv import StateWrapper
from parallelenv.errors import ArgumentError, ResetNeededError
from parallelenv.results import difference
from parallelenv.testing.envs import Counter, Old, Pair, Ragged
from parallelenv.wrappers import AnswerWrapper, CheckFinite, StackStates

ONES = np.ones(2, np.int64)


class Same(StateWrapper):
    def process(self, states: Any) -> Any:
        return states


class Drawn(gym.Env[Any, Any]):
    """States are samples of a space."""

    action_space = spaces.Discrete(2)

    def __init__(self, space: gym.Space[Any], length: int) -> None:
        self.observation_space = deepcopy(space)  # each env has its own and seeds it
        self.length = length

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        super().reset(seed=seed)
        if seed is not None:
            self.observation_space.seed(seed)
        self.count = 0
        return self.observation_space.sample(), {}

    def step(self, action: Any) -> Any:
        self.count += 1
        return self.observation_space.sample(), 1.0, self.count == self.length, False, {}


SAMPLED = {
    "text": spaces.Text(4),
    "sequence": spaces.Sequence(spaces.Box(0, 1, (2,))),
    "stacked": spaces.Sequence(spaces.Box(0, 1, (2,)), stack=True),
    "graph": spaces.Graph(spaces.Box(0, 1, (2,)), spaces.Discrete(3)),
    "one of": spaces.OneOf([spaces.Discrete(2), spaces.Box(0, 1, (2,))]),
    "dict": spaces.Dict(a=spaces.Discrete(2), c=spaces.Dict(z=spaces.Text(1, min_length=1))),
    "tuple": spaces.Tuple([spaces.Graph(spaces.Box(0, 1, (2,)), None), spaces.Text(2), spaces.Box(0, 1, (2,))]),
}


KINDS: dict[str, Any] = {
    **{name: partial(Drawn, space) for name, space in SAMPLED.items()},
    "old": Old,
    "ragged": Ragged,
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("mode", "asynchronous"),
    [(ORACLE, None), (ORACLE, "idle"), (ORACLE, "restart"), (ORACLE, "continue"), (PROCESSES, "restart")],
    indirect=["mode"],
)
@pytest.mark.parametrize("copy", [True, False])
def test_states_of_every_kind_pass_unchanged(kind: str, asynchronous: Any, copy: bool, make_env: MakeEnv) -> None:
    env_fns = [partial(KINDS[kind], length=length) for length in (1, 2, 5)]
    plain, *wrapped = (make_env(env_fns, asynchronous=asynchronous, copy=copy) for _ in range(3))
    actions: Any = [0.5] * 3 if plain.action_space is None else [0] * 3
    for env in (Same(wrapped[0]), Same(CheckFinite(wrapped[1]))):
        assert difference(plain.reset(seed=1), env.reset(seed=1)) is None
        for align in ("item", "batch", "item", "item"):
            expected, found = plain.step(actions, align=align), env.step(actions, align=align)
            assert difference(list(expected), list(found)) is None


class Wrong(Same):
    """Returns a given object in its second call."""

    def __init__(self, env: Any, answer: Any) -> None:
        super().__init__(env)
        self.answer = answer
        self.calls = 0

    def process(self, states: Any) -> Any:
        self.calls += 1
        if self.calls != 2:
            return states
        if isinstance(self.answer, BaseException):
            raise self.answer
        return self.answer


@here_and_in_processes
@pytest.mark.parametrize("align", ["item", "batch"])
@pytest.mark.parametrize(
    ("answer", "found"),
    [
        (None, r"None \(NoneType\)"),
        (5.0, r"5\.0 \(float\)"),
        ("ab", r"'ab' \(str\)"),
        (np.array(1.0), r"of shape \(\) and dtype float64"),
        (np.zeros((1, 3)), r"of shape \(1, 3\) and dtype float64"),
        ({"a": np.zeros((2, 3))}, r"\{'a': .*\(dict\)"),
    ],
)
def test_process_result_that_is_not_a_batch_is_refused(answer: Any, found: str, align: Any, make_env: MakeEnv) -> None:
    env = Wrong(make_env([partial(Counter, number, 9) for number in range(2)]), answer)
    env.reset(seed=1)
    with pytest.raises(ArgumentError, match=f"must have a row for each of 2 envs; found {found}") as caught:
        env.step(ONES, align=align)
    error: Any = caught.value
    assert error.partial.states[1, 0] == 1.0


@here_and_in_processes
def test_process_result_of_wrong_tuple_length_is_refused(make_env: MakeEnv) -> None:
    env = Wrong(make_env([Pair] * 2), (np.zeros(2),))
    env.reset(seed=1)
    with pytest.raises(ArgumentError, match=r"do not match its observation_space.*found \("):
        env.step(env.action_space.sample())


class Outer(AnswerWrapper):
    """Records the results it has seen."""

    def __init__(self, env: Any) -> None:
        super().__init__(env)
        self.seen: list[tuple[int, ...]] = []

    def on_step(self, result: Any) -> Any:
        self.seen.append(tuple(result.env_ids.tolist()))
        return result


@here_and_in_processes
@pytest.mark.parametrize("align", ["item", "batch"])
def test_error_in_process_is_raised_unchanged_and_asks_for_a_reset(align: Any, make_env: MakeEnv) -> None:
    envs = make_env([partial(Counter, number, 9) for number in range(2)], asynchronous="restart")
    inner = Wrong(envs, ZeroDivisionError("mine"))
    env = Outer(StackStates(inner, 2))
    env.reset(seed=1)
    with pytest.raises(ZeroDivisionError, match="mine") as caught:
        env.step([1], id=[1], align=align)
    error: Any = caught.value
    assert error.wrapper is inner
    assert error.partial.states[:, 1].tolist() == [1]  # as the env gave it
    assert env.seen == []
    assert env.step([1], id=[0]).states[0, :, 1].tolist() == [0, 1]
    for call in (env.step, env.send, env.step_async):
        with pytest.raises(ResetNeededError, match=r"env 1 has no running episode"):
            call(ONES)
    env.reset(1)
    assert env.step(ONES).states[:, :, 1].tolist() == [[1, 2], [0, 1]]


@here_and_in_processes
def test_error_in_process_of_a_first_state_asks_for_another_reset(make_env: MakeEnv) -> None:
    env = Wrong(make_env([Counter] * 2), ZeroDivisionError("mine"))
    env.reset(seed=1)
    with pytest.raises(ZeroDivisionError) as caught:
        env.reset(1)
    error: Any = caught.value
    assert error.partial.shape == (1, 3)
    with pytest.raises(ResetNeededError, match="env 1 has no running episode"):
        env.step(ONES)
    env.reset(1)
    env.step(ONES)


@here_and_in_processes
def test_error_of_an_env_is_the_context_of_one_raised_for_the_other_envs(make_env: MakeEnv) -> None:
    env = StackStates(Wrong(make_env([partial(Fragile, number) for number in range(2)]), IndexError("mine")), 2)
    env.reset()
    with pytest.raises(IndexError, match="mine") as caught:
        env.step([RAISE, GO_ON])
    assert isinstance(caught.value.__context__, ZeroDivisionError)
    error: Any = caught.value
    assert error.partial.states.tolist() == [[1.0, 1.0]]
