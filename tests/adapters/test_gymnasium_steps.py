"""The adapter for Gymnasium equals `SyncVectorEnv`, step for step and bit for bit, also in Gymnasium's wrappers."""

from __future__ import annotations

from functools import partial
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from conftest import MakeEnv
from gymnasium.wrappers import vector
from modes import here_and_in_processes

from adapters.envs import SPACES, Looped, Varied
from adapters.neighbours import Twins
from parallelenv.adapters.gymnasium import gather_infos

NUM_ENVS = 5
MODES = ("NextStep", "SameStep", "Disabled")


@pytest.mark.parametrize("autoreset_mode", MODES)
@pytest.mark.parametrize("kind", SPACES)
def test_steps_and_resets_equal_those_of_sync_vector_env(
    kind: str, autoreset_mode: str, make_env: MakeEnv, num_steps: int
) -> None:
    env_fns = [partial(Varied, kind, 4.0 + number) for number in range(NUM_ENVS)]
    theirs = gym.vector.SyncVectorEnv(env_fns, autoreset_mode=autoreset_mode)
    twins = Twins(make_env(env_fns, num_cpus=2).to_gymnasium(autoreset_mode), theirs)
    twins.same("num_envs", "metadata", "render_mode", "spec")
    twins.same("observation_space", "single_observation_space", "action_space", "single_action_space")
    twins.reset(seed=3)
    theirs.action_space.seed(5)
    random = np.random.default_rng(7)
    for _ in range(num_steps):
        _, _, terminations, truncations, _ = twins.step(theirs.action_space.sample())
        ended = terminations | truncations
        if autoreset_mode == "Disabled" and ended.any():
            twins.reset(options={"reset_mask": ended, "level": 2})
        elif random.random() < 0.02:
            mask = random.random(NUM_ENVS) < 0.5
            mask[0] = True
            twins.reset(seed=[None, 1, 2, None, 4], options={"reset_mask": mask})
        elif random.random() < 0.01:
            twins.reset(options={"level": 3})


class Flagged(Looped):
    """Returns infos of one form, with values that Gymnasium puts into object arrays, and a key that is also a mask."""

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        state, *others, _ = super().step(action)
        is_odd = np.bool_(state[0] % 2)
        info = {"odd": is_odd, "array": np.array([is_odd]), "a": 1, "_a": 5, "final_obs": float(state[0])}
        return state, *others, info


@here_and_in_processes
def test_infos_in_columns_equal_those_of_sync_vector_env(make_env: MakeEnv) -> None:
    env_fns = [partial(Flagged, 99)] * 3
    ours = make_env(env_fns, num_cpus=2)
    twins = Twins(ours.to_gymnasium(), gym.vector.SyncVectorEnv(env_fns))
    twins.reset()
    for _ in range(8):
        twins.step(np.zeros(3, int))
    assert ours.engine.pool.batch.info_columns is not None


# -------------------------------------------------------------------- wrappers


# The results are equal, so a few stand for all: those that read infos, and one that changes the space. Gymnasium's own
# tests, which `make neighbours-suites` runs on the adapter, have all wrappers.
@here_and_in_processes
@pytest.mark.parametrize(
    ("env_fn", "wrap", "autoreset_mode"),
    [
        (Varied, vector.RecordEpisodeStatistics, "NextStep"),
        (Varied, vector.RecordEpisodeStatistics, "SameStep"),
        (Varied, vector.DictInfoToList, "SameStep"),
        (partial(Varied, "flat dict"), partial(vector.FilterObservation, filter_keys=["a"]), "NextStep"),
    ],
)
def test_wrappers_behave_as_on_sync_vector_env(env_fn: Any, wrap: Any, autoreset_mode: str, make_env: MakeEnv) -> None:
    ours = make_env([env_fn] * 4, num_cpus=2).to_gymnasium(autoreset_mode)
    theirs = gym.vector.SyncVectorEnv([env_fn] * 4, autoreset_mode=autoreset_mode)
    twins = Twins(wrap(ours), wrap(theirs))
    twins.reset(seed=1)
    action_space = twins.theirs.action_space
    action_space.seed(5)
    flags = [twins.step(action_space.sample())[2:4] for _ in range(120)]
    assert np.sum(flags) > 4
    twins.same("observation_space", "action_space")


# -------------------------------------------------------------------- infos of which Gymnasium would lose values


def gather(*values: Any) -> Any:
    """Return the array gathered from the values of three envs under one key; the third has none."""
    infos = [{"k": value} for value in values]
    gathered = gather_infos(enumerate(infos), 3)
    assert gathered["_k"].tolist() == [index < len(infos) for index in range(3)]
    return gathered["k"]


@pytest.mark.parametrize(
    ("values", "dtype"),
    [
        ((1, 1.5), np.float64),
        ((np.float32(0.1), 0.1), np.float64),
        ((np.int8(1), 1000), np.int64),
        ((np.float32(1), np.float64(0.1)), np.float64),
        ((float("nan"), 1), np.float64),
        ((2**62, 1), np.int64),
    ],
)
def test_numbers_get_a_dtype_that_holds_all_of_them(values: tuple[Any, ...], dtype: Any) -> None:
    column = gather(*values)
    assert column.dtype == dtype
    np.testing.assert_array_equal(column, [*values, 0])


MASKED = np.ma.MaskedArray([1, 2], [True, False])


@pytest.mark.parametrize(
    "values",
    [
        (MASKED, np.array([3, 4])),
        (np.array([3, 4]), MASKED),
        (MASKED, MASKED),
        (np.array([2**53 + 1]), np.array([0.5])),
        (np.bool_(True), np.bool_(False)),
        (np.array("x", dtype=object), "word"),
        (True, 7),
        (1, None),
        (None, 1),
        (1, {"a": 1}),
        ({"a": 1}, 1),
        (2**53 + 1, 1.5),
        (2**70, 1),
        (np.zeros(2), np.zeros(3)),
        (np.zeros(2), 1.0),
        (np.zeros(2, bool), np.zeros(2)),
        ([1, 2], [3, 4]),
    ],
    ids=repr,
)
def test_values_without_a_common_dtype_stay_objects(values: tuple[Any, ...]) -> None:
    column = gather(*values)
    assert column.dtype == object
    assert all(found is value for found, value in zip(column, values, strict=False))
    assert column[2] is None


def test_arrays_are_joined_and_masks_replace_infos_of_the_same_key() -> None:
    assert gather(np.array([1, 2]), np.array([0.5, 1.5])).tolist() == [[1, 2], [0.5, 1.5], [0, 0]]
    assert gather(np.array(["a"]), np.array(["abc"])).tolist() == [["a"], ["abc"], [""]]
    gathered = gather_infos([(0, {"a": 1, "_a": 5})], 2)
    assert gathered["_a"].tolist() == [True, False]
