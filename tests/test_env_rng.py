"""``seed_globals=True``: each env has its own state of the generators that a process shares."""

from __future__ import annotations

import contextlib
import random
import sys
from collections.abc import Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from conftest import MakeEnv
from gymnasium.spaces import Box, Discrete
from modes import ORACLE, THREADS, here_and_in_processes, in_modes

from parallelenv import ParallelEnv
from parallelenv.errors import ArgumentError, EnvContractError
from parallelenv.results import difference
from parallelenv.testing.envs import Paced


class Gambler(Paced):
    """Draws from the global generators: an odd number of normal numbers, which are drawn in pairs."""

    observation_space = Box(-np.inf, np.inf, (3,), np.float64)
    action_space = Discrete(2)

    def prepare(self) -> None:
        self.first = random.random() + np.random.normal()

    def _state(self) -> Any:
        return np.array([self.first, random.gauss(0, 1), np.random.normal()])

    def _reward(self, action: Any) -> float:
        if action == 1:
            raise RuntimeError(f"crash at {np.random.random()}")
        return np.random.random()

    def draw(self) -> float:
        return float(np.random.normal())

    def reseed(self, seed: int) -> None:
        np.random.seed(seed)


def play(env: ParallelEnv) -> list[Any]:
    """Return the results of resets, interleaved steps, calls, a rollout and a failure."""
    zeros = [0] * len(env)
    answers: list[Any] = [env.reset(seed=3)]
    answers += [tuple(env.step(zeros)) for _ in range(6)]
    answers += [env.customized_method("draw"), tuple(env.step([0], id=1)), env.reset(2), env.get_env_attr("first")]
    with pytest.raises(RuntimeError, match="crash") as caught:
        env.step([0, 1, 0])
    answers.append(str(caught.value))
    env.reset(1)
    answers.append(env.rollout(lambda states: [0] * len(states), 5).states)
    env.customized_method("reseed", {"seed": 9}, id=0)
    answers += [env.step(zeros).states, env.step(zeros).states, env.reset(seed=[2**40, None, 7])]
    return answers


@contextlib.contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Seed this process's generators and restore them, also after an odd number of normal numbers."""
    states = random.getstate(), np.random.get_state()
    try:
        random.seed(seed)
        np.random.seed(seed)
        yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])


def make_three(make_env: MakeEnv, **arguments: Any) -> ParallelEnv:
    envs = [partial(Gambler, number, 3 + number) for number in range(3)]
    return make_env(envs, asynchronous="restart", seed_globals=True, seed=11, **arguments)


@pytest.mark.parametrize("num_cpus", [1, 2, 3])
def test_results_with_seed_globals_are_equal_in_every_mode(num_cpus: int, mode: str, make_env: MakeEnv) -> None:
    if mode == THREADS and num_cpus > 1:
        pytest.skip("its workers share generators")
    with make_three(ParallelEnv) as alone:
        expected = play(alone)
    assert difference(play(make_three(make_env, num_cpus=num_cpus)), expected) is None


@here_and_in_processes
def test_results_equal_those_of_an_env_in_its_own_process(make_env: MakeEnv) -> None:
    env = make_three(make_env, num_cpus=1)
    found = [env.reset(seed=3)[2], *(env.step([0] * 3).states[2] for _ in range(4))]
    with seeded(11 + 2):
        alone = Gambler(2)
    with seeded(3 + 2):
        expected = [alone.reset()[0], *(alone.step(0)[0] for _ in range(4))]
    assert difference(found, expected) is None


@in_modes(ORACLE, THREADS)
def test_global_generators_of_the_process_are_not_modified(make_env: MakeEnv) -> None:
    with seeded(5):
        expected = np.random.normal(), np.random.normal(), random.random()
    with seeded(5):
        first = np.random.normal()  # the second one is drawn already
        play(make_three(make_env, num_cpus=1))
        assert (first, np.random.normal(), random.random()) == expected


def test_policy_draws_from_the_global_generators_of_the_process() -> None:
    def guess(states: Any) -> list[int]:
        np.random.random()
        return [0] * len(states)

    with make_three(ParallelEnv) as env, seeded(5):
        env.reset(seed=3)
        env.rollout(guess, 3)
        found = np.random.random()
    with seeded(5):
        assert [np.random.random() for _ in range(4)][3] == found


@here_and_in_processes
def test_envs_without_a_seed_draw_different_numbers(make_env: MakeEnv) -> None:
    env = make_env([Gambler] * 3, seed_globals=True, num_cpus=1)
    assert len(np.unique(env.reset()[:, 1:])) == 6
    assert len(set(env.get_env_attr("first"))) == 3


@here_and_in_processes
def test_save_state_includes_global_generators(make_env: MakeEnv) -> None:
    env = make_three(make_env, num_cpus=2)
    env.reset(seed=1)
    env.step([0] * 3)
    state = env.save_state()
    expected = [env.step([0] * 3).states for _ in range(5)]
    with make_three(ParallelEnv) as other:
        other.load_state(state)
        assert difference([other.step([0] * 3).states for _ in range(5)], expected) is None
    with ParallelEnv([Gambler] * 3, asynchronous="restart") as plain:
        plain.reset()
        with pytest.raises(EnvContractError, match="was saved with seed_globals=True.*Make the ParallelEnv with"):
            plain.load_state(state)


def test_seed_globals_is_refused_with_several_threads() -> None:
    with pytest.raises(ArgumentError, match=r"3 threads cannot step envs at the same time.*num_cpus=1, or para_mode"):
        ParallelEnv([Gambler] * 3, THREADS, num_cpus=3, seed_globals=True)
    with pytest.raises(ArgumentError, match="seed_globals=1 must be True or False"):
        ParallelEnv([Gambler], seed_globals=1)  # type: ignore[arg-type]


class Chances(random.Random):
    """Has the methods of torch's generator."""

    get_state = random.Random.getstate
    set_state = random.Random.setstate
    manual_seed = random.Random.seed


class Importer(Gambler):
    """Imports torch in its first reset, and draws from that."""

    def _state(self) -> Any:
        if "torch" not in sys.modules:
            sys.modules["torch"] = SimpleNamespace(default_generator=Chances(0))  # type: ignore[assignment]
        return super()._state()

    def draw(self) -> float:
        return float(sys.modules["torch"].default_generator.random())


def test_torch_generator_is_isolated_after_torch_is_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    try:
        with ParallelEnv([Importer] * 2, seed_globals=True) as env:
            env.reset(seed=3)
            torch: Any = sys.modules["torch"]
            process = torch.default_generator.get_state()
            drawn = [env.customized_method("draw") for _ in range(2)]
            assert torch.default_generator.get_state() == process
            state = env.save_state()
            following = env.customized_method("draw")
            env.load_state(state)
            assert env.customized_method("draw") == following
            env.reset(seed=3)
            assert [env.customized_method("draw") for _ in range(2)] == drawn
    finally:
        sys.modules.pop("torch", None)
    chances = [Chances(3), Chances(4)]
    assert drawn == [[one.random() for one in chances] for _ in range(2)]
