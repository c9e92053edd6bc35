"""Envs that are a `gymnasium.Env` with the API of the old gym: supported, with one warning."""

from __future__ import annotations

import re
import warnings
from functools import partial
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from conftest import MakeEnv
from gymnasium.spaces import Box, Dict, Discrete, Tuple
from gymnasium.vector import SyncVectorEnv
from modes import here_and_in_processes

from parallelenv import ParallelEnv, recommend
from parallelenv.errors import EnvContractError, OldApiWarning
from parallelenv.notebook.film import refuse_dark_envs
from parallelenv.results import difference
from parallelenv.testing.envs import Counter, Old
from parallelenv.wrappers import RecordVideo


class FourItems(Counter):
    def step(self, action: Any) -> Any:
        state, reward, terminated, truncated, info = super().step(action)
        if truncated:
            info["TimeLimit.truncated"] = True
        return state, reward, terminated or truncated, info


class BareState(Counter):
    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        return super().reset(seed=seed)[0]


class NoOptions(Counter):
    def reset(self, seed: int | None = None) -> Any:  # type: ignore[override]
        return super().reset(seed=seed)


class Unseeded(FourItems):
    """Without ``seed(s)``: it draws from ``np_random``."""

    def reset(self) -> Any:  # type: ignore[override]
        return super().reset()[0]


class OfOld(Unseeded):
    """The whole old API, with ``seed(s)``."""

    metadata = {"render.modes": ["human", "rgb_array"]}  # noqa: RUF012

    def seed(self, seed: int | None = None) -> list[int | None]:
        gym.Env.reset(self, seed=seed)
        return [seed]

    def render(self, mode: str = "human") -> Any:
        return np.full((2, 3, 3), self.number, np.uint8) if mode == "rgb_array" else None


NOTHING_TAKEN = r"reset\(\) takes no seed and no options\. .* a seed goes to seed\(\), or to np_random"
WAYS = {
    FourItems: r"step\(\) returned four items, not .*truncated if info\['TimeLimit.truncated'\] is true",
    BareState: r"reset\(\) returned the state alone, not \(state, info\)\. The info is taken to be empty",
    NoOptions: r"reset\(\) takes no options\. It is reset without\.",
    OfOld: NOTHING_TAKEN,
    Unseeded: NOTHING_TAKEN,
}


def play(env: ParallelEnv) -> list[Any]:
    answers: list[Any] = [env.reset(seed=3)]
    for _ in range(7):
        result = env.step([0] * len(env))
        answers.append((*result[:3], result.terminated, result.truncated))
    return answers


@pytest.mark.parametrize("kind", WAYS)
def test_old_gym_env_behaves_like_a_modern_one_and_warns_once(kind: Any, make_env: MakeEnv) -> None:
    pattern = rf"^env [012], {kind.__name__}, is a gymnasium\.Env, but its {WAYS[kind]}"
    with ParallelEnv([partial(Counter, number) for number in range(3)], asynchronous="restart") as modern:
        expected = play(modern)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        env = make_env([partial(kind, number) for number in range(3)], asynchronous="restart", num_cpus=2)
        assert difference(play(env), expected) is None
        assert difference(play(env), expected) is None
    (warning,) = caught
    assert warning.category is OldApiWarning
    assert re.search(pattern, str(warning.message))
    assert "/tests/" in warning.filename, "it is the user's line that is named"


class Pool(SyncVectorEnv):
    """Looks like an EnvPool, which ignores the seed of a reset."""

    all_env_ids = async_reset = None
    config = {"batch_size": 1}  # noqa: RUF012

    def __init__(self) -> None:
        super().__init__([Counter])

    def reset(self, env_ids: Any = None, *, options: Any = None) -> Any:  # type: ignore[override]
        return super().reset(options=options)


def test_each_kind_of_warning_is_issued(make_env: MakeEnv) -> None:
    env = make_env([FourItems, Pool], asynchronous="continue", num_cpus=2)
    env.reset()
    with pytest.warns(OldApiWarning, match="four items"):
        env.step([0, 0])
    with pytest.warns(UserWarning, match="keeps the seed that EnvPool was made with"):
        env.reset(seed=0)


@here_and_in_processes
def test_old_gym_env_works_in_a_rollout(make_env: MakeEnv) -> None:
    env = make_env([partial(FourItems, 0, 3), Counter], asynchronous="restart")
    env.reset(seed=1)
    with pytest.warns(OldApiWarning, match="four items"):
        rollout = env.rollout(lambda states: [0] * len(states), 4)
    assert rollout.dones[:, 0].tolist() == [False, False, True, False]


@here_and_in_processes
def test_reset_options_that_the_env_does_not_accept_and_results_of_wrong_length_are_refused(make_env: MakeEnv) -> None:
    with pytest.warns(OldApiWarning, match="no options"):
        env = make_env([NoOptions])
    env.reset(options={})
    with pytest.raises(EnvContractError, match="NoOptions takes no options, but options={'level': 2} were given"):
        env.reset(options={"level": 2})

    class Three(Counter):
        def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
            return np.zeros(3), {}, 5

    with pytest.raises(EnvContractError, match=r"reset\(\) of Three returned a tuple of 3; a gymnasium.Env returns"):
        make_env([Three]).reset()


@here_and_in_processes
def test_info_that_is_none_counts_as_empty(make_env: MakeEnv) -> None:
    class NoInfo(Counter):
        def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
            return super().reset(seed=seed)[0], None

        def step(self, action: Any) -> Any:
            return *super().step(action)[:4], None

    env = make_env([partial(NoInfo, 0, 2), Counter], asynchronous="restart", num_cpus=1)
    env.reset()
    assert env.reset_infos[0] == {}
    assert [env.step([0, 0]).infos[0] for _ in range(2)][1]["reset_info"] == {}


def test_old_gym_env_can_be_rendered(make_env: MakeEnv, tmp_path: Any) -> None:
    with pytest.warns(OldApiWarning):
        env = make_env([partial(OfOld, number) for number in (5, 7)])
    env.reset()
    assert [frame.max() for frame in env.render()] == [frame.max() for frame in env.get_images()] == [5, 7]
    assert env.render(tile=True).shape == (2, 6, 3)
    refuse_dark_envs(env.engine, (0, 1))  # as `show` and `play` do
    RecordVideo(env, tmp_path, video_length=1)


@pytest.mark.filterwarnings("ignore::parallelenv.errors.OldApiWarning")
def test_recommend_accepts_old_gym_envs() -> None:
    assert recommend([OfOld] * 2).mode


PARTS = Tuple((Box(0, 9, (2,), np.float64), Dict(level=Discrete(9))))


class Parted:
    """The whole old API. Its states are tuples of two whose second item is a dict, as results of modern resets are."""

    def _state(self) -> Any:
        return np.full(2, float(self.count)), {"level": self.count}

    def reset(self) -> Any:
        self.count = 0
        return self._state()

    def step(self, action: int) -> Any:
        self.count += 1
        return self._state(), 0.0, self.count == 2, {}


class Declared(Parted):
    observation_space, action_space = PARTS, Discrete(2)


class Modern(Declared):
    """Returns the same states as Gymnasium's API does, with an info that has the keys of a state's second part."""

    def reset(self) -> Any:
        return super().reset(), {"level": -1}


@pytest.mark.parametrize(
    ("envs", "options"),
    [
        ([Declared] * 2, {}),
        ([Parted] * 2, {"spaces": (PARTS, Discrete(2))}),
        ([Declared, partial(Counter, 0)], {}),  # there is no common space
        ([Modern] * 2, {}),
        ([Modern, partial(Counter, 0)], {}),
    ],
)
def test_space_decides_whether_a_pair_returned_by_reset_is_a_state(make_env: MakeEnv, envs: Any, options: Any) -> None:
    env = make_env(envs, asynchronous="restart", num_cpus=1, **options)
    all_states = [env.reset(), *(env.step([0, 0]).states for _ in range(2))]  # the second step begins an episode
    for states, count in zip(all_states, (0, 1, 0), strict=True):
        numbers, others = states if isinstance(states, tuple) else states[0]
        assert np.ravel(numbers)[0] == np.ravel(others["level"])[0] == count
    given = {"level": -1} if envs[0] is Modern else {}
    assert env.reset_infos[0] == given
    env.step([0, 0])
    info = env.step([0, 0]).infos[0]
    assert info["reset_info"] == given
    assert info["ended_state"][1]["level"] == 2


def test_state_of_a_step_that_a_reset_would_return_as_state_and_info_is_refused(make_env: MakeEnv) -> None:
    env = make_env([Parted, Old], asynchronous="continue", num_cpus=1)
    env.reset()
    with pytest.raises(
        EnvContractError, match=r"step\(\) returned the state \(.*Return \(state, \{\}\) from reset\(\)"
    ):
        env.step([0, 0])
    assert env.step([0], id=[1]).states.shape == (1, 2)
