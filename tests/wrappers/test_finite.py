"""Non-finite numbers in actions, states and rewards."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest
from conftest import MakeEnv
from gymnasium.spaces import Box, Dict, Discrete

from parallelenv.errors import ActionError, ArgumentError, EnvContractError, ResetNeededError
from parallelenv.testing.envs import Counter, Old, Ragged, Sheet
from parallelenv.wrappers import CheckFinite
from wrappers.envs import Told

NAN, INF = float("nan"), float("inf")


class Forces(Told):
    action_space = Box(-INF, INF, (2,))  # type: ignore[assignment]


class Parts(Told):
    action_space = Dict({"push": Box(-INF, INF, (2,)), "turn": Discrete(3)})  # type: ignore[assignment]


def told(state: float = 0.0, reward: float = 0.0, first: float = 0.0, length: int = 9, kind: Any = Told) -> Any:
    return partial(kind, [reward] * length, [state] * length, first)


def checked(make_env: MakeEnv, env_fns: Any, check_inf: bool = True, **kwargs: Any) -> CheckFinite:
    env = CheckFinite(make_env(env_fns, **kwargs), check_inf)
    env.reset()
    return env


def batch(*values: float) -> Any:
    return np.array([[0.0, value] for value in values], np.float32)


@pytest.mark.parametrize("call", ["step", "send", "step_async"])
@pytest.mark.parametrize(
    ("kind", "actions", "env_ids", "where"),
    [
        (Forces, batch(0, NAN, INF), None, "action of envs 1, 2"),
        (Forces, [np.zeros(2), [NAN, 0.0], np.zeros(2)], None, "action of env 1"),
        (Forces, batch(NAN), 2, "action of env 2"),
        (Parts, {"push": batch(0, 0, -INF), "turn": np.zeros(3, int)}, None, "action['push'] of env 2"),
        (Parts, [{"push": batch(value)[0], "turn": 0} for value in (NAN, 0, 0)], None, "action of env 0"),
        (Parts, [{"push": batch(NAN)[0], "turn": 0}], [2], "action of env 2"),
    ],
)
def test_non_finite_actions_are_refused_before_anything_is_sent(
    kind: Any, actions: Any, env_ids: Any, where: str, call: str, make_env: MakeEnv
) -> None:
    env = checked(make_env, [told(kind=kind)] * 3)
    with pytest.raises(EnvContractError) as caught:
        getattr(env, call)(actions, env_ids)
    assert str(caught.value) == f"A value is nan or infinite in: {where}. Nothing was sent."
    assert caught.value.env_ids
    assert env.get_env_attr("count") == [0, 0, 0]


def test_tensor_actions_are_checked(make_env: MakeEnv) -> None:
    torch = pytest.importorskip("torch")
    env = checked(make_env, [told(kind=Forces)] * 3)
    actions = torch.zeros(3, 2)
    env.step(actions)
    actions[1, 0] = NAN
    with pytest.raises(EnvContractError, match="action of env 1"):
        env.step(actions)


def test_actions_of_idle_envs_are_not_checked(make_env: MakeEnv) -> None:
    env_fns = [told(kind=Forces, length=length) for length in (1, 9)]
    idle, going = (checked(make_env, env_fns, asynchronous=policy) for policy in ("idle", "continue"))
    for env in (idle, going):
        env.step(batch(0, 0))
    assert idle.step(batch(NAN, 0)).rewards[0] is None
    with pytest.raises(EnvContractError, match="action of env 0"):
        going.step(batch(NAN, 0))


@pytest.mark.parametrize(
    ("kind", "actions"),
    [
        *((Parts, actions) for actions in (5, {"push": batch(NAN, 0, 0)}, [3, 4, 5], "abc")),
        *((Forces, actions) for actions in (None, batch(0, 0, 0, NAN), np.array(NAN))),
    ],
)
def test_otherwise_invalid_actions_raise_action_error(kind: Any, actions: Any, make_env: MakeEnv) -> None:
    with pytest.raises(ActionError):
        checked(make_env, [told(kind=kind)] * 3).step(actions)


def test_error_names_the_envs_and_the_places(make_env: MakeEnv) -> None:
    env = checked(make_env, [told(state=INF), told(reward=NAN, state=NAN), told(reward=2.0)])
    places = r"in: state of envs 0, 1; reward of env 1\. See error\.partial\. All envs of this call need a reset"
    with pytest.raises(EnvContractError, match=places) as caught:
        env.step([0, 0, 0], [2, 1, 0], align="batch")
    error: Any = caught.value
    assert error.env_ids == (0, 1)
    assert error.partial.env_ids.tolist() == [2, 1, 0]
    assert error.partial.states[2].tolist() == [INF]
    with pytest.raises(ResetNeededError, match="env 2 "):  # its own values were finite
        env.step([0], id=2)
    with pytest.raises(EnvContractError, match=r"state of env 0"):
        checked(make_env, [told(first=NAN)])
    with pytest.raises(EnvContractError, match="last state of envs 0, 1, 2"):
        checked(make_env, [told(state=NAN, length=1)] * 3, asynchronous="restart").step([0, 0, 0])


def test_check_inf_false_allows_infinite_numbers(make_env: MakeEnv) -> None:
    env = checked(make_env, [told(state=INF, reward=-INF)] * 2, check_inf=False)
    assert env.step([0, 0]).rewards.tolist() == [-INF, -INF]
    with pytest.raises(EnvContractError, match="A value is nan in: state"):
        checked(make_env, [told(state=NAN)] * 2, check_inf=False).step([0, 0])
    with pytest.raises(ArgumentError, match="check_inf='no' must be True or False"):
        CheckFinite(env, check_inf="no")  # type: ignore[arg-type]


class Poisoned(Old):
    def step(self, action: float) -> Any:
        state, reward, done, info = super().step(action)
        return (state * NAN if action > 1 else state), reward, done, info


def test_states_without_a_space_are_checked(make_env: MakeEnv) -> None:
    env = checked(make_env, [partial(Poisoned, 0), partial(Ragged, 1), Counter, Sheet])
    sheet = {"force": np.zeros(2, np.float32), "move": 0}
    env.step([0.0, 0.0, 0, sheet])
    with pytest.raises(EnvContractError, match="in: state of env 0"):
        env.step([2.0, 0.0, 0, sheet])
    with pytest.raises(EnvContractError, match="in: action of env 1"):
        env.step([0.0, NAN, 0, sheet])
