"""What a step of an adapter raises, and the results of the other envs, in the format of the adapter."""

from __future__ import annotations

import pickle
import re
from collections.abc import Callable
from decimal import Decimal
from fractions import Fraction
from functools import partial
from typing import Any

import numpy as np
import pytest
from conftest import MakeEnv, MakePool
from modes import here_and_in_processes
from samplers import Walks

from adapters.conftest import OF_SB3, Adapter
from adapters.envs import Fragile, Looped
from adapters.neighbours import require
from parallelenv.errors import EnvBusyError, EnvContractError, ExhaustedError, NothingInFlightError, WorkerTimeoutError
from parallelenv.results import difference

ZEROS = np.zeros(3, np.int64)
ONE_ONE = np.array([0, 1, 0])
ENDS_FIRST = [partial(Fragile, 1), partial(Fragile, 9), partial(Fragile, 9)]
Step = Callable[[Any, Any], Any]


def whole_step(env: Any, actions: Any) -> Any:
    return env.step(actions)


def begun_and_awaited(env: Any, actions: Any) -> Any:
    env.step_async(actions)
    return env.step_wait()


both_ways = pytest.mark.parametrize("step", [whole_step, begun_and_awaited])
need_numbers = pytest.mark.parametrize("adapted", ["gymnasium", OF_SB3], indirect=True)


# -------------------------------------------------------------------- partial results


def failed(step: Step, env: Any) -> Any:
    """Return the partial result of a step in which env 1 failed."""
    env.reset()
    with pytest.raises(KeyError, match="one is too much") as caught:
        step(env, ONE_ONE)
    left = caught.value.partial  # type: ignore[attr-defined]
    assert left.env_ids.tolist() == [0, 2]
    again = pickle.loads(pickle.dumps(left))
    assert again.env_ids.tolist() == [0, 2]
    assert difference(tuple(again), tuple(left)) is None
    env.step(ZEROS)  # all envs are usable
    return left


@here_and_in_processes
@both_ways
def test_gymnasium_partial_result_has_episode_ends(step: Step, make: Any) -> None:
    *arrays, infos = failed(step, make(ENDS_FIRST, "SameStep"))
    assert [array.tolist() for array in arrays] == [[[0], [1]], [2, 2], [True, False], [False, False]]
    assert infos.keys() == {"final_obs", "_final_obs", "final_info", "_final_info"}
    assert infos["final_obs"][0].tolist() == [1]
    assert infos["_final_obs"].tolist() == [True, False]


@pytest.mark.neighbours
@here_and_in_processes
@both_ways
def test_sb3_partial_result_has_episode_ends(step: Step, make_env: MakeEnv) -> None:
    require("stable_baselines3.common.vec_env")
    *arrays, infos = failed(step, make_env(ENDS_FIRST).to_sb3())
    assert [array.tolist() for array in arrays] == [[[0], [1]], [2, 2], [True, False]]
    assert arrays[1].dtype == np.float32
    assert infos[0].pop("terminal_observation").tolist() == [1]
    assert infos == [{"TimeLimit.truncated": False}] * 2


@here_and_in_processes
def test_tianshou_partial_result_has_five_arrays(make_env: MakeEnv) -> None:
    *arrays, infos = failed(whole_step, make_env(ENDS_FIRST).to_tianshou())
    assert [array.tolist() for array in arrays] == [[[1], [1]], [2, 2], [True, False], [False, False]]
    assert infos.tolist() == [{"env_id": 0}, {"env_id": 2}]


# -------------------------------------------------------------------- errors that an env has from elsewhere


@here_and_in_processes
def test_exception_group_of_an_env_is_raised_whole(adapted: Adapter, make_env: MakeEnv) -> None:
    make_error = partial(ExceptionGroup, "two sensors failed", [ValueError("left"), KeyError("right")])
    env = adapted(make_env([partial(Fragile, 9, make_error)] * 3))
    env.reset()
    with pytest.raises(ExceptionGroup, match="two sensors failed") as caught:
        env.step(ONE_ONE)
    error: Any = caught.value
    assert error.failures == {1: error}
    assert error.partial.env_ids.tolist() == [0, 2]


@here_and_in_processes
@need_numbers
@both_ways
@pytest.mark.parametrize("kind", [WorkerTimeoutError, NothingInFlightError])
def test_error_of_a_parallel_env_in_an_env_is_raised_unchanged(
    kind: Any, step: Step, adapted: Adapter, make_env: MakeEnv
) -> None:
    env = adapted(make_env([partial(Fragile, 9, partial(kind, "inside"))] * 3))
    env.reset()
    with pytest.raises(kind, match="inside") as caught:
        step(env, ONE_ONE)
    assert caught.value.partial.env_ids.tolist() == [0, 2]


# -------------------------------------------------------------------- paused envs


@here_and_in_processes
def test_step_of_a_paused_env_is_refused_with_advice_that_helps(adapted: Adapter, make_env: MakeEnv) -> None:
    env = adapted(make_env([Looped] * 3))
    env.reset()
    env.parallel_env.pause(0)
    for name in ("step", "step_async"):
        if hasattr(env, name):
            with pytest.raises(EnvBusyError, match=r"envs \[0\] are paused\. Call resume\(\[0\]\) first"):
                getattr(env, name)(ZEROS)
    env.parallel_env.resume([0])
    assert env.step(ZEROS)[0].tolist() == [[1]] * 3


# -------------------------------------------------------------------- rewards that are not numbers


class Paid(Fragile):
    """Returns a given reward for its second step."""

    def __init__(self, reward: Any = 1.0, length: int = 9) -> None:
        super().__init__(length)
        self.reward = reward

    def step(self, action: Any) -> Any:
        state, _, *rest = super().step(action)
        return state, self.reward if state[0] == 2 else 1.0, *rest


NO_NUMBERS: dict[str, Any] = {
    r"env 1 '1.5' \(str\)": "1.5",
    r"env 2 of shape \(3,\) and dtype float64": np.ones(3),
    r"env 3 \[1.0\] \(list\)": [1.0],
    r"env 4 of shape \(\) and dtype complex\d+": np.clongdouble(1j),
    r"env 5 10+\.\.\. \(int\)": 10**400,
    r"env 6 <int> \(int\)": 10**5000,
}


@here_and_in_processes
@need_numbers
@both_ways
def test_one_error_names_all_rewards_that_are_not_numbers(step: Step, adapted: Adapter, make_env: MakeEnv) -> None:
    env = adapted(make_env([Paid, *(partial(Paid, reward) for reward in NO_NUMBERS.values()), Paid]))
    zeros = np.zeros(8, int)
    env.reset()
    step(env, zeros)
    with pytest.raises(EnvContractError, match=rf"and these do not: {', '.join(NO_NUMBERS)}\. Return one") as caught:
        step(env, zeros)
    error: Any = caught.value
    assert [part.tolist() for part in error.partial[:2]] == [[[2], [2]], [1, 1]]
    assert error.partial.env_ids.tolist() == [0, 7]
    assert step(env, zeros)[0].tolist() == [[3]] * 8  # all have stepped


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
    assert re.search("Also: A reward must be a number.*Raised by env 1 in step", error.__notes__[-1])
    assert error.partial.env_ids.tolist() == [2]


@here_and_in_processes
@need_numbers
def test_rewards_of_any_number_type_are_accepted(adapted: Adapter, make_env: MakeEnv) -> None:
    given = [Fraction(1, 2), Decimal("0.25"), True, np.float16(3), np.array([[4]]), np.uint8(5), 6, None, -np.inf]
    env = adapted(make_env([partial(Paid, reward) for reward in given]))
    env.reset()
    for _ in range(2):
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
    for _ in range(2):
        observations, rewards, *_ = env.step(ZEROS)
    assert (observations.tolist(), rewards.tolist()) == ([[2], [0], [2]], [1, 0, 1])


@pytest.mark.neighbours
@here_and_in_processes
def test_sb3_refuses_rewards_that_overflow_float32(make_env: MakeEnv) -> None:
    require("stable_baselines3.common.vec_env")
    env_fns = [Paid, *(partial(Paid, reward) for reward in (-1e300, np.inf, Decimal("1e300"), Fraction(10**300)))]
    env, other = make_env(env_fns).to_sb3(), make_env(env_fns).to_gymnasium()
    zeros = np.zeros(5, int)
    for one in (env, other):
        one.reset()
        one.step(zeros)
    wrong = r"env 1 -1e\+300 \(float\), env 3 1e\+300 \(float\), env 4 1e\+300 \(float\)\."
    with pytest.raises(EnvContractError, match=rf"a number that fits float32.*: {wrong}") as caught:
        env.step(zeros)
    assert caught.value.partial[1].tolist() == [1, np.inf]  # type: ignore[attr-defined]
    assert other.step(zeros)[1].tolist() == [1, -1e300, np.inf, 1e300, 1e300]


# -------------------------------------------------------------------- envs without a further episode


ONE_AND_NINE = [{"total": 1}, {"total": 9}]


def refuse(*calls: Callable[[], Any]) -> None:
    for call in calls:
        with pytest.raises(ExhaustedError, match=r"envs \[0\] have no further episode"):
            call()


@here_and_in_processes
def test_next_step_reports_exhaustion_once_then_raises(make_pool: MakePool) -> None:
    vector_env = make_pool(Walks, ONE_AND_NINE).to_gymnasium()
    vector_env.reset(options={"length": 1})
    assert vector_env.step([1, 1])[2].tolist() == [True, True]
    states, *arrays, infos = vector_env.step([1, 1])  # the step in which both are reset
    assert states[:, :2].tolist() == [[1, 1], [2, 0]]
    assert [array.tolist() for array in arrays] == [[0, 0], [False, False], [True, False]]
    assert infos["exhausted"].tolist() == [True, False]
    refuse(partial(vector_env.step, [1, 1]))


@here_and_in_processes
def test_same_step_ends_the_last_task_then_raises(make_pool: MakePool) -> None:
    vector_env = make_pool(Walks, [{**one, "kind": "sheet"} for one in ONE_AND_NINE]).to_gymnasium("SameStep")
    vector_env.reset(options={"length": 1})
    states, rewards, terminations, _, infos = vector_env.step([2, 2])
    assert (terminations.tolist(), rewards.tolist()) == ([True, True], [3, 3])
    assert states["place"][:, :2].tolist() == [[1, 1], [2, 0]]
    assert infos["final_obs"][0]["word"] == "ab"
    assert infos["exhausted"].tolist() == [True, False]
    refuse(*[partial(vector_env.step, [1, 1])] * 2)


@here_and_in_processes
def test_disabled_reset_of_exhausted_env_raises(make_pool: MakePool) -> None:
    vector_env = make_pool(Walks, ONE_AND_NINE).to_gymnasium("Disabled")
    vector_env.reset(options={"length": 1})
    vector_env.step([1, 1])
    with pytest.raises(ExhaustedError, match=r"envs \[0\]") as caught:
        vector_env.reset(options={"reset_mask": np.array([True, True])})
    assert caught.value.partial[1][:2].tolist() == [2, 0]  # type: ignore[attr-defined]


@here_and_in_processes
def test_tianshou_reset_and_step_of_exhausted_env_raise(make_pool: MakePool) -> None:
    env = make_pool(Walks, ONE_AND_NINE)
    taken = env.to_tianshou()
    taken.reset()
    refuse(partial(taken.reset, [0]), partial(taken.step, [1, 1]))
    taken.step([1], [1])
    env.call("_rewind", id=0)
    taken.reset([0])
    taken.step([1, 1])


@pytest.mark.neighbours
def test_sb3_returns_the_last_step_then_raises(make_pool: MakePool) -> None:
    require("stable_baselines3")
    venv = make_pool(Walks, ONE_AND_NINE).to_sb3()
    venv.set_options({"length": 1})
    venv.reset()
    _, rewards, dones, infos = venv.step(np.array([1, 1]))
    assert (rewards.tolist(), dones.tolist()) == ([2, 2], [True, True])
    assert infos[0]["terminal_observation"][:2].tolist() == [1, 1]
    assert ["exhausted" in info for info in infos] == [True, False]
    refuse(partial(venv.step, np.array([1, 1])), venv.reset)
