"""Tests of reset and step: order, form and end of episodes."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest

from parallelenv.errors import ResetNeededError
from parallelenv.testing.base import Contract, Make, all_forms
from parallelenv.testing.envs import Counter, Old, Sheet
from parallelenv.testing.odd_envs import Witness
from parallelenv.testing.scenario import (
    DONE_POLICIES,
    KINDS,
    LENGTHS,
    NUM_ENVS,
    Actions,
    assert_same,
    five_env_fns,
    play,
    selected_ids,
)

ONES = [1] * NUM_ENVS
ABSENT: Any = (None, None, True, {})


def _expected_states(number: int, seed: int, steps: int = 0) -> Any:
    """Return the state of a `Counter` stepped without the package."""
    env = Counter(number, LENGTHS[number])
    state, _ = env.reset(seed=seed)
    for _ in range(steps):
        state = env.step(1)[0]
    return state.copy()


def _counting(states: Any, rnn_state: Any, done: Any) -> Any:
    """Use the step of the episode as action, and return it as an extra."""
    count = np.where(done, 0, 0 if rnn_state is None else rnn_state)
    return (count + states[:, 0].astype(np.int64)) % 5, count + 1, {"count": count}


class StepContract(Contract):
    """Tests of reset and step."""

    @pytest.mark.parametrize("kind", KINDS)
    def test_results_equal_those_of_the_oracle(self, kind: str, make: Make, make_oracle: Make) -> None:
        """Bit for bit, for all kinds of envs, done policies, forms of ``id`` and numbers of workers."""
        if kind == "tensor":
            pytest.importorskip("torch")
        for done_policy, num_cpus in self._combinations(kind):
            with make(KINDS[kind](), done_policy, num_cpus=num_cpus) as env:
                found = play(env)
            context = f"asynchronous={done_policy!r}, num_cpus={num_cpus}, "
            found.check_unchanged(context)
            found.assert_equals(play(make_oracle(KINDS[kind](), done_policy)), context)

    def _combinations(self, kind: str) -> list[tuple[Any, int]]:
        """Return done policies and numbers of workers to test; five envs divide unevenly by two and by three."""
        if kind == "tensor":  # every worker imports torch
            return [("restart", 2)]
        row = list(KINDS).index(kind)
        if self.starts_slowly:
            return [("restart", 3 if row == 0 else 2), ((None, "idle", "continue")[row % 3], 1)]
        return [(done_policy, 1 + (row + column) % 3) for column, done_policy in enumerate(DONE_POLICIES)]

    def test_rollout_equals_that_of_the_oracle(self, make: Make, make_oracle: Make) -> None:
        """Bit for bit, for a recurrent policy, including later calls."""
        env, oracle = make(five_env_fns(Counter), "restart"), make_oracle(five_env_fns(Counter), "restart")
        for each in (env, oracle):
            each.reset(seed=2)
        arguments: Any
        for arguments in ({"num_steps": 11}, {"num_episodes": 7, "id": [4, 0, 2]}):
            assert_same(vars(oracle.rollout(_counting, **arguments)), vars(env.rollout(_counting, **arguments)))
            assert_same(list(oracle.step(ONES)), list(env.step(ONES)))

    def test_rows_are_in_order_of_id(self, make: Make) -> None:
        """The first number of each state identifies its env."""
        env = make(five_env_fns(Counter), "continue")
        assert env.reset()[:, 0].tolist() == [0, 1, 2, 3, 4]
        for form in all_forms():
            env_ids = selected_ids(env, form)
            result = env.step([1] * len(env_ids), form)
            assert result.env_ids.tolist() == env_ids, f"id={form}"
            assert result.states[:, 0].tolist() == env_ids, f"id={form}"
            batch = env.step([1] * len(env_ids), form, align="batch")
            assert [state[0] for state, *_ in batch] == env_ids, f"id={form}, align=batch"
            assert env.reset(form)[:, 0].tolist() == env_ids, f"reset, id={form}"

    def test_each_env_gets_its_own_action(self, make: Make) -> None:
        """In order of ``id``, also if other envs were stepped before."""
        env = make(five_env_fns(Counter), "continue")
        env.reset(seed=1)
        plain = env.step([0, 0, 0], [4, 0, 2]).rewards
        env.reset(seed=1)
        assert np.allclose(env.step([3, 1, 2], [4, 0, 2]).rewards - plain, [3, 1, 2])

    def test_results_have_the_documented_types(self, make: Make) -> None:
        """Float64 rewards, bool flags, int64 ids, an object array of dicts, states as in their space."""
        env = make(five_env_fns(Sheet))
        states = env.reset(seed=1)
        result = env.step(env.action_space.sample())  # type: ignore[union-attr]
        for found in (states, result.states):
            types = (found["image"].dtype, found["inner"]["bits"].dtype, found["inner"]["level"].dtype)
            assert types == (np.uint8, np.int8, np.int64)
            assert found["image"].shape == (NUM_ENVS, 2, 3)
            assert all(type(word) is str for word in found["word"])
        assert result.rewards.dtype == np.float64
        assert {flags.dtype for flags in (result.dones, result.terminated, result.truncated)} == {np.dtype(bool)}
        assert result.env_ids.dtype == np.int64
        assert result.infos.dtype == object
        assert all(type(info) is dict for info in result.infos)

    def test_calls_affect_only_the_envs_in_id(self, make: Make, tmp_path: Any) -> None:
        """Each of them is called once."""
        env = make(five_env_fns(Witness, str(tmp_path)))
        env.reset()
        env.reset([3, 0])
        env.step([1, 1], [1, 3])
        words = [(tmp_path / str(number)).read_text().split() for number in range(NUM_ENVS)]
        expected = [["reset"], ["stepped"], [], ["reset", "stepped"], []]
        assert words == [["made", "reset", *more] for more in expected]

    def test_step_before_reset_is_refused(self, make: Make) -> None:
        """No env is stepped."""
        env = make(five_env_fns(Counter))
        env.reset([0, 1, 2, 4])
        with pytest.raises(ResetNeededError, match="3"):
            env.step(ONES)
        assert env.get_env_attr("count") == [0] * NUM_ENVS

    def test_spaces_equal_those_of_the_envs(self, make: Make) -> None:
        """Each env has its own spaces: seeding one does not affect samples of another."""
        env = make(five_env_fns(Counter))
        assert env.observation_spaces == [Counter.observation_space] * NUM_ENVS
        alone = [copy.deepcopy(Counter.action_space) for _ in range(NUM_ENVS)]
        for number, space in enumerate(env.action_spaces):
            assert space is not None
            alone[number].seed(number)
            space.seed(number)
        expected = [[space.sample() for _ in range(9)] for space in alone]
        assert_same(expected, [[space.sample() for _ in range(9)] for space in env.action_spaces if space])

    # ---------------------------------------------------------------- seeds

    def test_int_seed_gives_each_env_its_own_seed(self, make: Make) -> None:
        """Int ``s`` gives env i the seed ``s + i``, wherever it runs and whichever others are reset."""
        env = make(five_env_fns(Counter))
        expected = [_expected_states(number, 7 + number) for number in range(NUM_ENVS)]
        assert_same(np.stack(expected), env.reset(seed=7))
        assert_same(np.stack([expected[3], expected[1]]), env.reset([3, 1], seed=7))
        assert_same(np.stack([_expected_states(2, 40), _expected_states(0, 50)]), env.reset([2, 0], seed=[40, 50]))

    def test_seeds_set_beforehand_are_used_once(self, make: Make) -> None:
        """Used by the next reset of each env."""
        env = make(five_env_fns(Counter))
        env.seed(7)
        first = env.reset([4, 2])
        rest = env.reset()
        assert_same(np.stack([_expected_states(4, 11), _expected_states(2, 9)]), first)
        assert_same(np.stack([_expected_states(number, 7 + number) for number in (0, 1, 3)]), rest[[0, 1, 3]])
        assert rest[4, 2] != first[0, 2]

    def test_reset_options_are_passed_to_the_envs(self, make: Make) -> None:
        """One dict for all, or a list with one per env."""
        env = make(five_env_fns(Counter))
        env.reset(options={"level": 3})
        assert [info["options"] for info in env.reset_infos] == [{"level": 3}] * NUM_ENVS
        env.reset([2, 0], options=[{"level": 2}, None])
        assert [info["options"] for info in env.reset_infos] == [None, {"level": 3}, {"level": 2}] + [{"level": 3}] * 2

    # ---------------------------------------------------------------- done policies

    def test_done_policy_none_stops_all_envs(self, make: Make) -> None:
        """The step that ends one env is returned unchanged; then all envs are absent and none is stepped."""
        env = make(five_env_fns(Counter))  # env 2 ends first, after three steps
        env.reset()
        for _ in range(3):
            last = env.step(ONES)
        assert last.dones.tolist() == [False, False, True, False, False]
        assert last.states[:, 1].tolist() == [3] * NUM_ENVS
        assert env.all_done()
        assert env.step(ONES, align="batch") == [ABSENT] * NUM_ENVS
        assert env.step(ONES).rewards.tolist() == [None] * NUM_ENVS
        assert env.get_env_attr("count") == [3] * NUM_ENVS
        env.reset(1)
        assert [reward is None for reward in env.step(ONES).rewards] == [True, False, True, True, True]

    def test_done_policy_idle_skips_ended_envs(self, make: Make) -> None:
        """The others continue."""
        env = make(five_env_fns(Counter), "idle")
        env.reset()
        for _ in range(5):
            last = env.step(ONES, align="batch")
        assert [item[0] is None for item in last] == [True, False, True, False, True]
        assert [last[number] for number in (0, 2, 4)] == [ABSENT] * 3
        assert env.get_env_attr("count") == [4, 5, 3, 5, 4]
        assert env.step([1] * 3, [3, 4, 0]).states[0].tolist()[:2] == [3, 6]
        env.reset([2])
        assert env.step([1], 2).states[0, 1] == 1

    def test_done_policy_restart_resets_within_the_step(self, make: Make) -> None:
        """Within the step; the last state is that of the ended episode, even if the env overwrites it."""
        env = make(five_env_fns(Counter), "restart")
        env.reset(seed=7)
        for _ in range(3):
            result = env.step(ONES)
        info = result.infos[2]
        assert_same(_expected_states(2, 9, steps=3), info["ended_state"])
        assert result.states[2, 1] == 0
        assert result.dones.tolist() == [number == 2 for number in range(NUM_ENVS)]
        assert result.terminated[2]
        assert [info["reset"] for info in result.infos] == result.dones.tolist()
        assert (info["trace"], info["reset_info"]["trace"]) == ([0, 1, 2, 3], [0])
        assert env.step(ONES).states[2, 1] == 1
        assert env.done.tolist() == [True, False, False, False, True]

    def test_done_policy_restart_copies_last_states_of_any_type(self, make: Make) -> None:
        """Also of envs that declare no spaces and overwrite what they returned."""
        env = make(five_env_fns(Old), "restart")
        env.reset(seed=7)
        for _ in range(3):
            result = env.step([0.5] * NUM_ENVS)
        alone = Old(2)
        alone.seed(9)
        alone.reset()
        ended = [alone.step(0.5)[0].copy() for _ in range(3)][-1]
        assert_same(ended, result.infos[2]["ended_state"])
        assert_same(alone.reset(), result.states[2])

    def test_done_policy_continue_steps_ended_envs(self, make: Make) -> None:
        """Even after the end of an episode."""
        env = make(five_env_fns(Counter), "continue")
        env.reset()
        for _ in range(6):
            result = env.step(ONES)
        assert result.states[:, 1].tolist() == [6] * NUM_ENVS
        assert result.dones.tolist() == [True, False, True, True, True]
        assert result.truncated.tolist() == [False, False, False, True, False]

    def test_actions_of_absent_envs_are_ignored(self, make: Make) -> None:
        """An item for them must still be given."""
        env = make(five_env_fns(Counter), "idle")
        env.reset()
        actions = Actions(env, 0)
        for _ in range(3):
            env.step(actions.draw(range(NUM_ENVS)))
        env.step([1, 1, None, 1, 1])
        assert env.get_env_attr("count") == [4, 4, 3, 4, 4]
