"""Adapters refuse rewards that are not numbers."""

from __future__ import annotations

from decimal import Decimal
from fractions import Fraction
from functools import partial
from itertools import count
from typing import Any

import numpy as np
import pytest
from conftest import MakeEnv
from modes import here_and_in_processes

from adapters.conftest import OF_SB3, Adapter
from adapters.envs import Looped
from adapters.neighbours import require
from parallelenv.errors import EnvContractError

ZEROS = np.zeros(3, np.int64)


class Paid(Looped):
    """Returns a given reward for its second step, and raises for action 1."""

    def __init__(self, reward: Any = 1.0, length: int = 9) -> None:
        super().__init__(length)
        self.reward = reward

    def step(self, action: Any) -> Any:
        if action == 1:
            raise KeyError("one is too much")
        state, _, *rest = super().step(action)
        return state, self.reward if state[0] == 2 else 1.0, *rest


need_numbers = pytest.mark.parametrize("adapted", ["gymnasium", OF_SB3], indirect=True)


@here_and_in_processes
@need_numbers
@pytest.mark.parametrize(
    ("reward", "shown"),
    [
        ("1.5", r"env 1 '1.5' \(str\)"),
        (np.ones(3), r"env 1 of shape \(3,\) and dtype float64"),
        ([1.0], r"env 1 \[1.0\] \(list\)"),
        (np.clongdouble(1j), r"env 1 of shape \(\) and dtype complex\d+"),
        (10**400, r"env 1 10+\.\.\. \(int\)"),
        (10**5000, r"env 1 <int> \(int\)"),
    ],
    ids=count(),
)
def test_reward_that_is_not_a_number_is_refused(reward: Any, shown: str, adapted: Adapter, make_env: MakeEnv) -> None:
    env = adapted(make_env([Paid, partial(Paid, reward), Paid]))
    env.reset()
    env.step(ZEROS)
    with pytest.raises(EnvContractError, match=rf"and these do not: {shown}\. Return one") as caught:
        env.step(ZEROS)
    observations, rewards, *_ = caught.value.partial  # type: ignore[attr-defined]
    assert (observations.tolist(), rewards.tolist()) == ([[2], [2]], [1, 1])
    assert caught.value.partial.env_ids.tolist() == [0, 2]  # type: ignore[attr-defined]
    assert env.step(ZEROS)[0].tolist() == [[3]] * 3  # all have stepped


@here_and_in_processes
@need_numbers
def test_one_error_names_all_envs_with_invalid_rewards(adapted: Adapter, make_env: MakeEnv) -> None:
    env = adapted(make_env([partial(Paid, "none"), Paid, partial(Paid, "much")]))
    env.reset()
    env.step_async(ZEROS)
    env.step_wait()
    env.step_async(ZEROS)
    with pytest.raises(EnvContractError, match=r"env 0 'none' \(str\), env 2 'much' \(str\)") as caught:
        env.step_wait()
    assert caught.value.partial.env_ids.tolist() == [1]  # type: ignore[attr-defined]


@here_and_in_processes
@need_numbers
def test_invalid_reward_is_reported_with_other_failures(adapted: Adapter, make_env: MakeEnv) -> None:
    env = adapted(make_env([Paid, partial(Paid, "none"), Paid]))
    env.reset()
    env.step(ZEROS)
    with pytest.raises(KeyError) as caught:
        env.step(np.array([1, 0, 0]))
    error: Any = caught.value
    assert [type(one) for one in error.failures.values()] == [KeyError, EnvContractError]
    assert "Also: A reward must be a number" in error.__notes__[-1]
    assert "Raised by env 1 in step" in error.__notes__[-1]
    assert error.partial.env_ids.tolist() == [2]


@here_and_in_processes
@need_numbers
def test_rewards_of_any_number_type_are_accepted(adapted: Adapter, make_env: MakeEnv) -> None:
    given = [Fraction(1, 2), Decimal("0.25"), True, np.float16(3), np.array([[4]]), np.uint8(5), 6, None, -np.inf]
    env = adapted(make_env([partial(Paid, reward) for reward in given]))
    env.reset()
    env.step(np.zeros(len(given), int))
    _, rewards, *_ = env.step(np.zeros(len(given), int))
    np.testing.assert_array_equal(rewards, [0.5, 0.25, 1, 3, 4, 5, 6, np.nan, -np.inf])
    assert rewards.dtype.kind == "f"


@here_and_in_processes
@pytest.mark.parametrize(("autoreset_mode", "next_state"), [("NextStep", 0), ("SameStep", 1)])
def test_episode_end_in_step_with_invalid_reward_is_kept(autoreset_mode: str, next_state: int, make: Any) -> None:
    env = make([Paid, partial(Paid, "none", 2), Paid], autoreset_mode)
    env.reset()
    env.step(ZEROS)
    with pytest.raises(EnvContractError):
        env.step(ZEROS)
    assert env.step(ZEROS)[0].tolist() == [[3], [next_state], [3]]


@here_and_in_processes
@need_numbers
def test_on_failure_restart_applies_to_invalid_rewards(adapted: Adapter, make_env: MakeEnv) -> None:
    env = adapted(make_env([Paid, partial(Paid, "much"), Paid], on_failure="restart"))
    env.reset()
    env.step(ZEROS)
    observations, rewards, *_ = env.step(ZEROS)
    assert observations.tolist() == [[2], [0], [2]]
    assert rewards.tolist() == [1, 0, 1]


@pytest.mark.neighbours
@here_and_in_processes
def test_sb3_refuses_rewards_that_overflow_float32(make_env: MakeEnv) -> None:
    require("stable_baselines3.common.vec_env")
    env: Any = make_env([Paid, partial(Paid, -1e300), partial(Paid, np.inf)]).to_sb3()
    env.reset()
    env.step(ZEROS)
    with pytest.raises(EnvContractError, match=r"a number that fits float32.*: env 1 -1e\+300 \(float\)") as caught:
        env.step(ZEROS)
    assert caught.value.partial[1].tolist() == [1, np.inf]  # type: ignore[attr-defined]
    other: Any = make_env([partial(Paid, -1e300)]).to_gymnasium()
    other.reset()
    other.step([0])
    assert other.step([0])[1].tolist() == [-1e300]
