"""Spaces given by the user instead of those that envs declare."""

from __future__ import annotations

from functools import partial
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from conftest import MakeEnv
from gymnasium.spaces import Box, Dict, Discrete
from gymnasium.vector.utils import concatenate
from modes import here_and_in_processes

from parallelenv import ParallelEnv, recommend
from parallelenv.errors import ActionError, ArgumentError, EnvContractError
from parallelenv.testing.envs import Old

SPACES = Box(-np.inf, np.inf, (2,), np.float64), Box(-9, 9, (), np.float64)


class Silent(gym.Env[Any, Any]):
    """Raises if its spaces are read."""

    @property
    def observation_space(self) -> Any:  # type: ignore[override]
        raise RuntimeError("this takes minutes")

    action_space = observation_space

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        return np.zeros(2), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        return np.full(2, float(action)), 1.0, False, False, {}


def test_given_spaces_are_used_without_asking_the_envs(make_env: MakeEnv) -> None:
    with pytest.raises(RuntimeError, match="this takes minutes"):
        make_env([Silent])
    env = make_env([Silent] * 2, spaces=SPACES)
    assert env.observation_spaces == [SPACES[0]] * 2
    assert env.action_spaces == [SPACES[1]] * 2
    for _ in range(2):
        env.reset()
        assert env.step(np.array([1.0, 2.0])).states.tolist() == [[1, 1], [2, 2]]
        env.restart()


@here_and_in_processes
def test_given_spaces_make_old_gym_envs_usable_with_to_gymnasium(make_env: MakeEnv) -> None:
    vector_env = make_env([partial(Old, number) for number in range(3)], spaces=SPACES).to_gymnasium()
    assert vector_env.reset(seed=1)[0] in vector_env.observation_space
    assert vector_env.step([1.0, 2.0, 3.0])[0][:, 0].tolist() == [2, 3, 4]


@here_and_in_processes
def test_wrong_given_spaces_raise_on_reset_and_step(make_env: MakeEnv) -> None:
    env = make_env([Silent] * 2, spaces=(Box(-1, 1, (3,), np.float64), Discrete(2)))
    with pytest.raises(EnvContractError, match=r"state is of shape \(2,\).*space is Box.*\(3,\).*give it as spaces="):
        env.reset(1)
    fitting = make_env([Silent] * 2, spaces=(SPACES[0], Discrete(2)))
    fitting.reset()
    with pytest.raises(ActionError, match="does not become int64"):
        fitting.step([0.5, 1.0])


class Image(Old):
    """Returns ints, in its steps a list of them."""

    def __init__(self, first: Any = (0, 255)) -> None:
        self.first = first

    def reset(self) -> Any:
        return self.first

    def step(self, action: Any) -> Any:
        assert action.dtype == np.uint8
        return [int(action[0]), 2], 1.0, False, {}


UNSIGNED = Box(0, 255, (2,), np.uint8), Box(0, 200, (2,), np.uint8)


@here_and_in_processes
def test_python_ints_are_cast_to_unsigned_dtypes_by_value(make_env: MakeEnv) -> None:
    env = make_env([Image] * 2, spaces=UNSIGNED)
    states = env.reset()
    assert states.dtype == np.uint8
    assert states.tolist() == [[0, 255]] * 2
    for actions in ([[1, 2], [3, 4]], np.array([[1, 2], [3, 4]]), np.array([[1, 2], [3, 4]], np.int8)):
        assert env.step(actions).states.tolist() == [[1, 2], [3, 2]]
    for outside in (-1, 256, 2**40):
        with pytest.raises(ActionError, match="has dtype int64, which does not become uint8 without loss of meaning"):
            env.step([[1, 2], [3, outside]])
    with pytest.raises(ActionError, match="has dtype float64, which does not become uint8"):
        env.step([[1.0, 2.0], [3.0, 4.0]])
    for wrong, shown in (
        ([0, -1], r"\[0, -1\] \(list\)"),
        ([0, 256], r"\[0, 256\] \(list\)"),
        (np.array([0, 256]), r"of shape \(2,\) and dtype int64"),
    ):
        with pytest.raises(EnvContractError, match=f"state is {shown}, but the observation space is"):
            make_env([partial(Image, wrong)], spaces=UNSIGNED).reset()


class OwnBox(Box):
    """A space of an unknown class."""


@here_and_in_processes
def test_python_ints_are_cast_by_value_for_subclasses_of_spaces(make_env: MakeEnv) -> None:
    env = make_env([partial(Image, [0, 255])] * 2, spaces=(OwnBox(0, 255, (2,), np.uint8), UNSIGNED[1]))
    for states in (env.reset(), env.step([[7, 0], [8, 0]]).states):
        assert states.dtype == np.uint8
    assert states.tolist() == [[7, 2], [8, 2]]


class Message(gym.Space[Any]):
    """Words, or ``None``."""

    def contains(self, x: Any) -> bool:
        return x is None or isinstance(x, str)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Message)

    __hash__ = None  # type: ignore[assignment]


class Telling(gym.Env[Any, Any]):
    """Says nothing in its first state."""

    observation_space, action_space = Dict(said=Message()), Discrete(2)

    def reset(self, **_: Any) -> Any:
        return {"said": None}, {}

    def step(self, action: Any) -> Any:
        return {"said": "word"}, 0.0, False, False, {}


@here_and_in_processes
def test_states_of_an_own_space_may_be_none(make_env: MakeEnv) -> None:
    env = make_env([Telling] * 2)
    assert env.reset() == {"said": (None, None)}
    assert env.step([0, 0]).states == {"said": ("word", "word")}


class OwnDict(Dict):
    """A space of an unknown class."""


class Broken(gym.Env[Any, Any]):
    """Fails in each step."""

    observation_space, action_space = OwnDict(place=Box(0, 1, (2,))), Discrete(2)

    def reset(self, **_: Any) -> Any:
        return {"place": np.zeros(2, np.float32)}, {}

    def step(self, action: Any) -> Any:
        raise KeyError("broken")


@here_and_in_processes
def test_error_of_all_envs_is_raised_although_their_space_is_of_an_unknown_class(make_env: MakeEnv) -> None:
    env = make_env([Broken] * 2)
    env.reset()
    with pytest.raises(KeyError, match="broken"):
        env.step([0, 0])


class Closed(OwnBox):
    """Its states cannot be batched while it is closed."""

    is_closed = True


@concatenate.register(Closed)
def stack_unless_closed(space: Any, items: Any, out: Any) -> Any:
    if space.is_closed:
        raise LookupError("closed")
    return np.stack(items)


@here_and_in_processes
def test_states_that_their_space_cannot_batch_are_named(make_env: MakeEnv, monkeypatch: pytest.MonkeyPatch) -> None:
    env = make_env([Image] * 2, spaces=(Closed(0, 255, (2,), np.uint8), UNSIGNED[1]))
    with pytest.raises(EnvContractError, match="results cannot be batched: closed"):
        env.reset()
    monkeypatch.setattr(Closed, "is_closed", False)
    env.reset()
    monkeypatch.undo()
    for _ in range(2):
        with pytest.raises(EnvContractError, match="results cannot be batched: closed"):
            env.step([[1, 2], [3, 4]])


def test_recommend_uses_given_spaces() -> None:
    with pytest.warns(UserWarning, match="No env could be tried: RuntimeError: this takes minutes"):
        recommend([Silent])
    for tried in (Silent, Old(1)):
        assert recommend([tried], spaces=SPACES).step_cost is not None
    with ParallelEnv([Silent] * 2, "auto", spaces=SPACES) as env:
        assert env.recommendation is not None
        assert env.recommendation.step_cost is not None


@pytest.mark.parametrize(
    "spaces", [SPACES[0], (SPACES[0], None), "ab", (*SPACES, SPACES[0]), list(SPACES), (gym.Space(), SPACES[1])]
)
def test_spaces_argument_that_is_not_a_pair_is_refused(spaces: Any) -> None:
    for call in (ParallelEnv, recommend):
        with pytest.raises(ArgumentError, match=r"is not a pair of spaces. Give \(observation_space, action_space\)"):
            call([Silent], spaces=spaces)


def test_make_accepts_and_copies_given_spaces() -> None:
    wider = Box(-np.inf, np.inf, (4,), np.float32)
    with ParallelEnv.make("CartPole-v1", 2, spaces=(wider, Discrete(2))) as env:
        assert env.single_observation_space == wider
        assert env.single_observation_space is not wider
        assert env.reset(seed=1).shape == (2, 4)
