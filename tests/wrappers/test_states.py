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

from parallelenv import StateWrapper
from parallelenv.contract.value_difference import difference
from parallelenv.errors import ArgumentError, EnvContractError
from parallelenv.testing.envs import Chain, Counter, Net, Old, Pair, Ragged, Sheet, Words
from parallelenv.wrappers import AnswerWrapper, CheckFinite, NormalizeStates, RecordEpisodeStatistics, StackStates

nearby = pytest.mark.parametrize("mode", ["dummy", "subproc"], indirect=True)
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


@pytest.mark.parametrize("mode", ["dummy"], indirect=True)
@pytest.mark.parametrize("space", SAMPLED.values(), ids=SAMPLED)
@pytest.mark.parametrize("asynchronous", [None, "idle", "restart", "continue"])
@pytest.mark.parametrize("copy", [True, False])
def test_states_of_every_space_pass_unchanged(space: Any, asynchronous: Any, copy: bool, make_env: MakeEnv) -> None:
    plain, *wrapped = (
        make_env([partial(Drawn, space, length) for length in (1, 2, 5)], asynchronous=asynchronous, copy=copy)
        for _ in range(3)
    )
    for env in (Same(wrapped[0]), Same(CheckFinite(wrapped[1]))):
        assert difference(plain.reset(seed=1), env.reset(seed=1)) is None
        for align in ("item", "batch", "item", "item"):
            expected, found = plain.step([0, 0, 0], align=align), env.step([0, 0, 0], align=align)
            assert difference(list(expected), list(found)) is None


@nearby
@pytest.mark.parametrize("kind", [Words, Chain, Net, Sheet, Pair, Old, Ragged])
@pytest.mark.parametrize("asynchronous", ["idle", "restart"])
def test_states_of_unusual_envs_pass_unchanged(kind: Any, asynchronous: Any, make_env: MakeEnv) -> None:
    env_fns = [partial(kind, number, 2 + number) for number in range(2)]
    plain, env = (make_env(env_fns, asynchronous=asynchronous, copy=False) for _ in range(2))
    same = Same(env)
    plain.reset(seed=1)
    same.reset(seed=1)
    if plain.action_space is not None:
        plain.action_space.seed(1)
    for _ in range(4):
        actions: Any = [1.0, 0.5] if plain.action_space is None else plain.action_space.sample()
        expected, found = plain.step(actions, align="batch"), same.step(actions, align="batch")
        assert difference(list(expected), list(found)) is None


class Wrong(Same):
    """Returns a given object from its second call on."""

    def __init__(self, env: Any, answer: Any) -> None:
        super().__init__(env)
        self.answer = answer
        self.calls = 0

    def process(self, states: Any) -> Any:
        self.calls += 1
        if self.calls == 1 or self.calls > 3:
            return states
        if isinstance(self.answer, BaseException):
            raise self.answer
        return self.answer


@nearby
@pytest.mark.parametrize("align", ["item", "batch"])
@pytest.mark.parametrize(
    ("answer", "found"),
    [
        (None, r"None \(NoneType\)"),
        (5.0, r"5\.0 \(float\)"),
        ("ab", r"'ab' \(str\)"),
        (np.array(1.0), r"of shape \(\) and dtype float64"),
        (np.zeros((1, 3)), r"of shape \(1, 3\) and dtype float64"),
        ({"a": np.zeros((2, 3))}, r"a dict with the keys \['a'\]"),
    ],
)
def test_process_result_that_is_not_a_batch_is_refused(answer: Any, found: str, align: Any, make_env: MakeEnv) -> None:
    env = Wrong(make_env([partial(Counter, number, 9) for number in range(2)]), answer)
    env.reset(seed=1)
    for _ in range(2):
        with pytest.raises(ArgumentError, match=f"must have a row for each of 2 envs; found was {found}") as caught:
            env.step(ONES, align=align)
        error: Any = caught.value
        assert error.partial.states[1, 0] == 1.0
        assert error.refused[1][0][0] == 1.0
    assert env.step(ONES).states[:, 1].tolist() == [3.0, 3.0]


@nearby
def test_process_result_of_wrong_tuple_length_is_refused(make_env: MakeEnv) -> None:
    env = Wrong(make_env([Pair] * 2), (np.zeros(2),))
    env.reset(seed=1)
    with pytest.raises(ArgumentError, match=r"states must be a tuple of \d; found was \("):
        env.step(env.action_space.sample())


@nearby
@pytest.mark.parametrize("align", ["item", "batch"])
def test_error_in_process_has_unprocessed_results_in_partial(align: Any, make_env: MakeEnv) -> None:
    once = ZeroDivisionError("mine")  # the same object twice
    inner = Wrong(make_env([partial(Counter, number, 2) for number in range(2)], asynchronous="restart"), once)
    env = RecordEpisodeStatistics(StackStates(NormalizeStates(inner), 2))
    env.reset(seed=1)
    for step in (1, 2):
        with pytest.raises(ZeroDivisionError, match="mine") as caught:
            env.step(ONES, align=align)
        error: Any = caught.value
        assert error.partial.states[:, 1].tolist() == [step % 2, step % 2]  # as the envs gave them
        assert error.partial.states.shape == (2, 3)
        assert error.refused[1][2] is (step == 2)
    assert error.partial.infos[0]["ended_state"][1] == 2
    told: Any = env.step(ONES).infos
    assert "episode" not in told[0]
    assert env.step(ONES).infos[0]["episode"]["l"] == 2  # not 4


class Late(Same):
    """Changes a last state, and then raises."""

    def process(self, states: Any) -> Any:
        if states[0, 1] == 0 and self.done[0]:
            raise ZeroDivisionError("mine")
        return states * 2.0


@nearby
def test_error_in_process_keeps_last_states_unchanged(make_env: MakeEnv) -> None:
    env = Late(make_env([partial(Counter, 0, 1)], asynchronous="restart"))
    env.reset(seed=1)
    with pytest.raises(ZeroDivisionError) as caught:
        env.step([0])
    error: Any = caught.value
    assert error.partial.infos[0]["ended_state"][1] == 1.0


class Fallen(Fragile):
    """Raises in a reset with options, if its number is 0; else its first state is nan then."""

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        state, info = super().reset(seed=seed)
        if options and self.number == 0:
            raise ZeroDivisionError("at the beginning")
        return (state * np.nan if options and self.number == 1 else state), info


@nearby
@pytest.mark.parametrize("kind", [CheckFinite, NormalizeStates])
def test_error_of_a_reset_is_raised_before_refusals_of_wrappers(kind: Any, make_env: MakeEnv) -> None:
    env = StackStates(kind(make_env([partial(Fallen, number) for number in range(3)])), 2)
    env.reset()
    with pytest.raises(ZeroDivisionError, match="at the beginning") as caught:
        env.reset([2, 1, 0], options={"fall": 1})
    error: Any = caught.value
    assert any("And of what is left: " in note and "state of env 1" in note for note in error.__notes__)
    assert error.partial.shape == (1, 2, 2)
    assert error.refused.keys() == {1}
    assert np.isnan(error.refused[1]).any()
    assert env.step([GO_ON] * 2, [1, 2]).states.shape == (2, 2, 2)


@nearby
def test_error_of_a_step_is_raised_before_errors_of_wrappers(make_env: MakeEnv) -> None:
    env = Wrong(make_env([partial(Fallen, number) for number in range(2)]), IndexError("mine"))
    outer = StackStates(env, 2)
    outer.reset()
    with pytest.raises(ZeroDivisionError, match="fell over") as caught:
        outer.step([RAISE, GO_ON])
    error: Any = caught.value
    assert "And of what is left: mine" in error.__notes__
    assert error.partial.states.tolist() == [[1.0, 1.0]]
    assert error.refused.keys() == {1}


class Choosy(AnswerWrapper):
    """Refuses env 1."""

    def began(self, states: Any, env_ids: tuple[int, ...]) -> Any:
        if 1 in env_ids:
            self.refuse_begun(EnvContractError("not 1"), states, env_ids, [1])
        return states

    def answered(self, result: Any) -> Any:
        if 1 in result.env_ids:
            self.refuse(EnvContractError("not 1"), result, [1])
        return result


class Choosier(Choosy):
    """Refuses env 0, too."""

    def answered(self, result: Any) -> Any:
        if 0 in result.env_ids:
            self.refuse(EnvContractError("not 0"), result, [0])
        return super().answered(result)


@nearby
@pytest.mark.parametrize("kind", [Words, Net, Sheet, Pair, Old])
def test_custom_wrappers_can_refuse_envs_of_every_space(kind: Any, make_env: MakeEnv) -> None:
    env = Choosier(Choosy(make_env([partial(kind, number, 9) for number in range(3)])))
    with pytest.raises(EnvContractError, match="not 1") as caught:
        env.reset(seed=1)
    error: Any = caught.value
    assert error.refused.keys() == {1}
    actions: Any = [0.5] * 3 if env.action_space is None else env.action_space.sample()
    with pytest.raises(EnvContractError, match="not 1") as caught:
        env.step(actions, align="batch")
    error = caught.value
    assert error.__notes__ == ["And of what is left: not 0"]
    assert error.refused.keys() == {0, 1}
    assert error.partial.env_ids.tolist() == [2]
    assert len(error.partial) == 1
    assert not hasattr(error.partial[0][0], "__len__") or len(error.partial[0][0])
