"""Rollouts: the same steps as with `step`, made in the workers. In every mode."""

from __future__ import annotations

import contextlib
import io
import itertools
import os
import signal
import threading
import time
import traceback
import tracemalloc
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import gymnasium as gym
import numpy as np
import pytest
import tqdm
from conftest import MakeEnv
from fragile import EXIT, GO_ON, RAISE, WAIT, Fragile, fragile, interrupt, when_begun
from gymnasium.spaces import Box, Dict, Discrete
from modes import IN_BACKGROUND, IN_WORKERS, ORACLE, THREADS, in_modes

from parallelenv import ParallelEnv, Rollout
from parallelenv.contract.spaces import object_array
from parallelenv.engine import recovery
from parallelenv.errors import (
    ActionError,
    ArgumentError,
    EnvBusyError,
    ResetNeededError,
    UnpicklableError,
    WorkerDiedError,
    WorkerTimeoutError,
)
from parallelenv.rollouts import running_rollout
from parallelenv.testing import envs as zoo
from parallelenv.testing.contract import KINDS, assert_same

Policy = Callable[..., Any]

# ---------------------------------------------------------------- policies that only use the states


def _of_array(states: Any) -> Any:
    return (states[:, 0] * 2 + states[:, 1] + np.floor(states[:, 2] * 3)).astype(np.int64) % 5


def _of_dict(states: Any) -> Any:
    means = states["image"].mean(axis=(1, 2)) / 255
    moves = (states["inner"]["level"] + [len(word) for word in states["word"]]) % 3
    return {"force": np.stack([means, -means], axis=1).astype(np.float32), "move": moves}


def _of_tuple(states: Any) -> Any:
    first, (numbers, third) = states
    return np.stack([(first > 0).astype(np.int64), (numbers.sum(axis=1) + third) % 7], axis=1)


def _by_kind(state: Any) -> Any:
    if isinstance(state, str):
        return zoo.LETTERS[len(state) % 8]
    if isinstance(state, dict):
        return {"force": np.full(2, 0.5, np.float32), "move": len(state["word"]) % 3}
    return int(abs(np.sum(state))) % 5


def _of_any(states: Any) -> Any:
    return [float(np.sum(np.asarray(state))) % 1 for state in states]


POLICIES: dict[str, Policy] = {
    "array": _of_array,
    "dict": _of_dict,
    "tuple": _of_tuple,
    "text": lambda states: [zoo.LETTERS[len(text) % 8] * (1 + len(text) % 3) for text in states],
    "sequence": lambda states: np.array([[len(state) / 10, -len(state) / 10] for state in states], np.float32),
    "graph": lambda states: np.array([[len(state.nodes) > size for size in range(3)] for state in states], np.int8),
    "old": _of_any,
    "ragged": _of_any,
    "tensor": _of_any,
    "mixed": lambda states: [_by_kind(state) for state in states],
    "instances": _of_array,
}

# ---------------------------------------------------------------- the same steps made outside


def part(states: Any, row: Any, space: Any) -> Any:
    """Return one state of a batch of them."""
    if type(space) is Dict:
        return {key: part(states[key], row, child) for key, child in space.spaces.items()}
    if type(space) is gym.spaces.Tuple:
        return tuple(part(leaf, row, child) for leaf, child in zip(states, space.spaces, strict=True))
    return states[row]


def plain(action: Any) -> Any:
    return {key: plain(item) for key, item in action.items()} if type(action) is dict else np.asarray(action).tolist()


def steps_outside(env: ParallelEnv, policy: Policy, num_steps: int) -> Any:
    """Step envs as a rollout should; return all steps, the last state of each episode, and the state of each env."""
    space, action_space = env.single_observation_space, env.single_action_space
    states = env.reset(seed=3)
    now = [part(states, env_id, space) for env_id in range(len(env))]
    steps, ended = {}, []
    for number in range(num_steps):
        actions = policy(batched(now, space))
        batch = env.step(actions, align="batch")
        for env_id, (state, reward, done, info) in enumerate(batch):
            if state is None:  # it rests
                continue
            is_reset, last, reset_info = (info.pop(key, None) for key in ("reset", "ended_state", "reset_info"))
            ended += [last if is_reset else state] if done else []
            action, flags = part(actions, env_id, action_space), (batch.terminated[env_id], batch.truncated[env_id])
            steps[number, env_id] = now[env_id], plain(action), np.asarray(reward), flags, info, reset_info or {}
            now[env_id] = state
    return steps, ended, now


def batched(states: list[Any], space: Any) -> Any:
    if space is None:
        return states
    empty: Any = gym.vector.utils.create_empty_array(space, len(states))
    return gym.vector.utils.concatenate(space, states, empty)


def steps_of(rollout: Rollout, space: Any, action_space: Any) -> Any:
    """Return what `steps_outside` returns."""
    steps = {}
    for number, env_id in np.argwhere(rollout.valid).tolist():
        at = number, env_id
        action, flags = part(rollout.actions, at, action_space), (rollout.terminated[at], rollout.truncated[at])
        infos = rollout.infos.get(at, {}), rollout.reset_infos.get(at, {})
        steps[at] = part(rollout.states, at, space), plain(action), np.asarray(rollout.rewards[at]), flags, *infos
    ended = [part(rollout.ended_states, row, space) for row in range(rollout.dones.sum())]
    return steps, ended, [part(rollout.final_states, column, space) for column in range(len(rollout.env_ids))]


CASES = [*((kind, "restart") for kind in POLICIES), *itertools.product(("array", "text", "dict"), ("idle", "continue"))]


@pytest.mark.parametrize(("kind", "done_policy"), CASES)
def test_rollout_equals_steps_made_outside(make_env: MakeEnv, kind: str, done_policy: Any) -> None:
    if kind == "tensor":
        pytest.importorskip("torch")
    env = make_env(KINDS[kind](), asynchronous=done_policy, num_cpus=2)
    env.reset(seed=3)
    rollout = env.rollout(POLICIES[kind], 11)
    with ParallelEnv(KINDS[kind](), asynchronous=done_policy) as twin:
        expected = steps_outside(twin, POLICIES[kind], 11)
        assert_same(expected, steps_of(rollout, twin.single_observation_space, twin.single_action_space))
        assert_same(twin.done, env.done)
        assert_same(twin.reset_infos, env.reset_infos)


class Scripted:
    """Returns a row of a script for each call, and the last one from then on."""

    def __init__(self, *script: Any) -> None:
        self.script = script
        self.calls = 0

    def __call__(self, states: Any) -> Any:
        self.calls += 1
        row = self.script[min(self.calls, len(self.script)) - 1]
        return np.array([row[int(number)] for number in states[:, 0]])


def zeros(states: Any) -> Any:
    return np.zeros(len(states), np.int64)


Begin = Callable[..., ParallelEnv]


@pytest.fixture
def begin(make_env: MakeEnv, monkeypatch: pytest.MonkeyPatch) -> Begin:
    """Make envs in two workers, which start new episodes by themselves, and reset them."""
    monkeypatch.setattr(recovery, "_FIRST_DELAY", 0.0)

    def begin(envs: Any, num_cpus: int = 2, **options: Any) -> ParallelEnv:
        env = make_env(envs, num_cpus=num_cpus, **{"asynchronous": "restart", **options})
        env.reset()
        return env

    return begin


class Count(gym.Env[Any, Any]):
    """State: number of the env, steps since the reset."""

    observation_space: Any = Box(-np.inf, np.inf, (2,), np.float64)
    action_space: Any = Discrete(100)

    def __init__(self, number: int, length: int = 1000) -> None:
        self.number, self.length, self.count = number, length, 0

    def _state(self) -> Any:
        return np.array([self.number, self.count], float)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.count = 0
        return self._state(), {}

    def step(self, action: Any) -> Any:
        self.count += 1
        return self._state(), float(action), self.count >= self.length, False, {}


def counts(*lengths: int) -> list[Any]:
    return [partial(Count, number, length) for number, length in enumerate(lengths)]


# ---------------------------------------------------------------- ids, continuation and episodes


def test_rollout_steps_only_the_given_unpaused_ids_in_order(begin: Begin) -> None:
    env = begin(counts(9, 9, 9, 9))
    rollout = env.rollout(zeros, 3, id=[3, 0, 1])
    assert rollout.env_ids.tolist() == [3, 0, 1]
    assert rollout.states.tolist() == [[[env_id, step] for env_id in (3, 0, 1)] for step in range(3)]
    assert rollout.final_states.tolist() == [[3, 3], [0, 3], [1, 3]]
    assert env.step(np.zeros(4, int)).states[:, 1].tolist() == [4, 4, 1, 4]
    nothing = env.rollout(zeros, 2, id=[])
    assert (nothing.states.shape, nothing.episode_returns.tolist()) == ((2, 0, 2), [])
    assert env.rollout(zeros, 2, id=2).states[:, 0, 1].tolist() == [1, 2]
    env.pause(1)
    assert env.rollout(zeros, 1).env_ids.tolist() == [0, 2, 3]
    with pytest.raises(EnvBusyError):
        env.rollout(zeros, 1, id=[1])


def test_rollouts_and_steps_continue_each_other(begin: Begin) -> None:
    env = begin(counts(4, 5, 100))
    first = env.rollout(zeros, 3)
    assert first.starts.tolist() == [True] * 3
    assert env.step([0, 0, 0]).states[:, 1].tolist() == [0, 4, 4]
    second = env.rollout(zeros, 3)
    assert second.starts.tolist() == [True, False, False]  # env 0 has just been reset
    assert second.states[:, :, 1].tolist() == [[0, 4, 4], [1, 0, 5], [2, 1, 6]]
    assert second.episode_lengths.tolist() == [1]
    assert second.whole_episodes.tolist() == [False]
    third = env.rollout(zeros, 3)
    assert third.states[0].tolist() == second.final_states.tolist()
    assert third.starts.tolist() == [False] * 3
    env.reset(1)
    assert env.rollout(zeros, 1).starts.tolist() == [False, True, False]


def test_ended_states_and_episodes_are_in_order_of_dones(begin: Begin) -> None:
    env = begin(counts(2, 3, 2))
    rollout = env.rollout(lambda states: states[:, 0].astype(int) + 1, 7)
    places = np.argwhere(rollout.dones).tolist()
    assert places == [[1, 0], [1, 2], [2, 1], [3, 0], [3, 2], [5, 0], [5, 1], [5, 2]]
    assert rollout.ended_states.tolist() == [[column, [2, 3, 2][column]] for _, column in places]
    assert rollout.episode_lengths.tolist() == [[2, 3, 2][column] for _, column in places]
    assert rollout.episode_returns.tolist() == [[2, 6, 6][column] for _, column in places]
    assert rollout.whole_episodes.all()
    assert repr(rollout) == "<Rollout of 7 steps x 3 envs, 8 episodes ended>"
    assert len(rollout) == 7


def test_idle_envs_are_not_stepped_and_have_one_episode_each(begin: Begin) -> None:
    env = begin(counts(2, 4, 3), asynchronous="idle")
    env.step([0, 0, 0])
    rollout = env.rollout(zeros, 10)
    assert rollout.valid.shape == (10, 3)
    assert rollout.valid.sum(axis=0).tolist() == [1, 3, 2]
    assert rollout.final_states[:, 1].tolist() == [2, 4, 3]
    assert rollout.episode_lengths.tolist() == [1, 2, 3]
    assert env.all_done()
    assert repr(env.rollout(zeros, 4)) == "<Rollout of 4 steps x 3 envs (0 valid), 0 episodes ended>"
    env.reset()
    assert env.rollout(zeros, num_episodes=2).valid.sum(axis=0).tolist() == [2, 4, 0]
    with pytest.raises(ResetNeededError, match=r"envs \[0, 1\] have ended"):
        env.rollout(zeros, num_episodes=3)
    assert env.rollout(zeros, num_episodes=1, id=[2]).episode_lengths.tolist() == [3]


def test_num_episodes_are_distributed_evenly(begin: Begin) -> None:
    env = begin(counts(2, 7, 3))
    env.step([0, 0, 0])
    rollout = env.rollout(zeros, num_episodes=5)
    assert rollout.dones.sum(axis=0).tolist() == [2, 2, 1]
    assert rollout.valid.sum(axis=0).tolist() == [1 + 2, 6 + 7, 2]  # the running episodes count
    assert len(rollout) == 13
    assert rollout.whole_episodes.tolist() == [False, False, True, False, True]
    assert rollout.final_states[:, 1].tolist() == [0, 0, 0]
    assert env.rollout(zeros, num_episodes=1).env_ids.tolist() == [0, 1, 2]
    assert env.step([0, 0, 0]).states[:, 1].tolist() == [1, 1, 1]


# ---------------------------------------------------------------- policies that act


def recurrent(states: Any, rnn_state: Any = None, done: Any = None) -> Any:
    """Count the steps of each episode in the recurrent state, and return them as extras."""
    if rnn_state is None:
        assert done.all()
        rnn_state = {"count": np.zeros(len(states)), "pair": (np.zeros((len(states), 2)),)}
    count = np.where(done, 0, rnn_state["count"])
    wide = np.broadcast_to(count[:, None, None], (len(states), 2, 3)).astype(np.float32)
    extras = {"count": count, "done": done, "wide": wide}
    return zeros(states), {"count": count + 1, "pair": (rnn_state["pair"][0] + states,)}, extras


@pytest.mark.parametrize("done_policy", ["restart", "idle"])
def test_recurrent_state_begins_with_each_episode_and_continues_in_the_next_rollout(
    begin: Begin, done_policy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(running_rollout, "_GROWTH", 1)  # the state is kept between chunks of one step each
    env = begin(counts(4, 30, 5, 2), asynchronous=done_policy)
    memory: Any = None
    for _ in range(2):
        rollout = env.rollout(recurrent, 3, id=[3, 0, 1, 2], rnn_state=memory)
        extras, where = rollout.extras, rollout.valid
        assert set(extras) == {"count", "done", "wide"}
        assert extras["count"][where].tolist() == rollout.states[..., 1][where].tolist()
        assert extras["done"][where].tolist() == (rollout.states[..., 1][where] == 0).tolist()
        assert extras["wide"].shape == (3, 4, 2, 3)
        assert extras["wide"].dtype == np.float32
        assert (extras["wide"][..., 1, 2] == extras["count"]).all()
        memory = rollout.rnn_state
        env.reset([1])
    assert memory["pair"][0].shape == (4, 2)
    again = env.rollout(recurrent, 1)
    assert again.extras["done"][again.valid].all()
    assert env.rollout(zeros, 1).rnn_state is None
    with pytest.raises(ArgumentError, match=r"rnn_state is of shape \(4,\)"):
        env.rollout(recurrent, 1, id=[0, 1], rnn_state=memory)


class Worded(Count):
    """An env with states that are sent as objects, which its host returns even if it is idle."""

    observation_space = gym.spaces.Text(8)

    def _state(self) -> Any:
        return "word"


def counting(states: Any, rnn_state: Any, done: Any) -> Any:
    count = np.zeros(len(states)) if rnn_state is None else np.where(done, 0, rnn_state)
    return zeros(states), count + 1, None


def test_recurrent_state_is_kept_where_some_envs_make_no_step(begin: Begin) -> None:
    env = begin([partial(Worded, 0, 100), partial(Worded, 1, 1)], asynchronous="idle")
    first = env.rollout(counting, 3)
    assert first.rnn_state.tolist() == [3, 0]
    assert env.rollout(counting, 1, rnn_state=first.rnn_state).rnn_state.tolist() == [4, 0]
    env = begin(counts(4, 30))
    before = env.rollout(counting, 2)
    played = env.rollout(counting, num_episodes=1, rnn_state=before.rnn_state)
    assert played.valid.sum(axis=0).tolist() == [2, 0]
    assert played.rnn_state.tolist() == [0, 2]
    assert env.rollout(counting, 1, rnn_state=played.rnn_state).rnn_state.tolist() == [1, 3]


def test_policy_gets_only_arguments_that_it_accepts(begin: Begin) -> None:
    def by_place(states: Any, memory: Any, begins: Any) -> Any:
        return zeros(states), None, {"begins": begins, "has_none": np.full(len(states), memory is None)}

    def only_memory(states: Any, *, rnn_state: Any) -> Any:
        seen = np.zeros(len(states)) if rnn_state is None else rnn_state[0]
        return zeros(states), [seen + 1], {"seen": seen}

    env = begin(counts(2, 3), num_cpus=1)
    extras = env.rollout(by_place, 4).extras
    assert extras["begins"].tolist() == [[True, True], [False, False], [True, False], [False, True]]
    assert extras["has_none"].all()
    assert env.rollout(only_memory, 3).extras["seen"][:, 0].tolist() == [0, 1, 2]
    assert env.rollout(lambda *states: (zeros(*states), None, None), 3).extras == {}


def test_policy_can_be_a_torch_module(begin: Begin) -> None:
    torch = pytest.importorskip("torch")

    class Net(torch.nn.Linear):  # type: ignore[misc, name-defined]
        def forward(self, states: Any, rnn_state: Any = None, done: Any = None) -> Any:
            scores = super().forward(torch.as_tensor(states, dtype=torch.float32)).detach()
            memory = torch.zeros(len(states)) if rnn_state is None else rnn_state
            memory = torch.where(torch.as_tensor(done), 0, memory)
            return scores.argmax(dim=1), memory + 1, {"scores": scores, "memory": memory}

    env, net = begin(counts(3, 4, 5)), Net(2, 3)
    rollout = env.rollout(net, 7)
    expected = rollout.states @ net.weight.detach().numpy().T + net.bias.detach().numpy()
    np.testing.assert_allclose(rollout.extras["scores"], expected, rtol=1e-5)
    assert (rollout.actions == rollout.extras["scores"].argmax(axis=2)).all()
    assert isinstance(rollout.rnn_state, torch.Tensor)
    after = env.rollout(net, 7, rnn_state=rollout.rnn_state)
    for one in (rollout, after):
        assert one.extras["memory"].tolist() == one.states[..., 1].tolist()


def test_recurrent_state_of_a_torch_module_has_no_graph(begin: Begin) -> None:
    torch = pytest.importorskip("torch")

    class Net(torch.nn.Linear):  # type: ignore[misc, name-defined]
        def forward(self, states: Any, rnn_state: Any, done: Any) -> Any:
            memory = torch.zeros(len(states), 1) if rnn_state is None else rnn_state["h"]
            memory[torch.as_tensor(done)] = 0  # not possible in a tensor that requires gradients
            return zeros(states), {"h": super().forward(memory)}, None

    env, net = begin(counts(3, 4, 5)), Net(1, 1)
    memory = env.rollout(net, 7).rnn_state
    assert not memory["h"].requires_grad
    assert not env.rollout(net, 7, rnn_state=memory).rnn_state["h"].requires_grad


class Foreign:
    """An array of a library that NumPy can read."""

    def __init__(self, array: Any) -> None:
        self.array = np.asarray(array)
        self.shape = self.array.shape

    def __getitem__(self, rows: Any) -> Foreign:
        return Foreign(self.array[rows])

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
        return self.array


def test_recurrent_state_of_another_library_is_returned_as_a_numpy_array(begin: Begin) -> None:
    def foreign(states: Any, rnn_state: Any, done: Any) -> Any:
        count = np.zeros(len(states)) if rnn_state is None else np.where(done, 0, np.asarray(rnn_state))
        return zeros(states), Foreign(count + 1), None

    env = begin(counts(4, 30))
    first = env.rollout(foreign, 3)
    assert (first.rnn_state.dtype, first.rnn_state.tolist()) == (np.float64, [3, 3])
    assert env.rollout(foreign, 2, rnn_state=first.rnn_state).rnn_state.tolist() == [1, 5]


class Noted:
    """Counts the policies that have acted in this process and still exist, and overwrites its states."""

    alive: ClassVar = weakref.WeakSet[Any]()

    def __call__(self, states: Any) -> Any:
        self.alive.add(self)
        states[:] = -1
        return zeros(states)


def test_each_worker_has_its_own_copy_of_the_policy_during_the_rollout(begin: Begin) -> None:
    env = begin(counts(9, 9))
    policy = Scripted([1, 2], [3, 4], [5, 6])
    for _ in range(2):
        assert env.rollout(policy, 3).actions.tolist() == [[1, 2], [3, 4], [5, 6]]
    assert policy.calls == 0
    rollout = env.rollout(Noted(), 2)
    assert rollout.states[:, :, 1].tolist() == [[6, 6], [7, 7]]
    assert rollout.final_states.tolist() == [[0, 8], [1, 8]]
    assert not Noted.alive


# ---------------------------------------------------------------- failures


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """A folder of files that control the envs. Waiting threads end with the test."""
    yield tmp_path
    (tmp_path / "go").touch()


def at(step: int, folder: Path, **deeds: int) -> Policy:
    """Return a policy that lets some envs do something in one of their steps, once, and all others step."""

    def choose(number: int, count: float) -> int:
        deed, mark = deeds.get(f"e{number}", GO_ON), folder / f"deed-{number}"
        if deed == GO_ON or count != step or mark.exists():
            return GO_ON
        mark.touch()
        return deed

    return lambda states: np.array([choose(int(number), count) for number, count in states])


def partial_of(caught: Any) -> Rollout:
    found = caught.value.partial
    assert isinstance(found, Rollout)
    return found


@pytest.mark.parametrize("growth", [1, 16])
def test_failed_envs_do_not_affect_other_envs(
    begin: Begin, folder: Path, growth: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(running_rollout, "_GROWTH", growth)
    env = begin(fragile(folder))
    with pytest.raises(ZeroDivisionError, match="env 1 fell over") as caught:
        env.rollout(at(3, folder, e1=RAISE), 8)
    assert "Raised by env 1 in step" in caught.value.__notes__[0]
    rollout = partial_of(caught)
    assert rollout.valid.sum(axis=0).tolist() == [8, 3, 8, 8]
    assert rollout.valid[:3].all()
    assert rollout.final_states.tolist() == [[0, 8], [1, 3], [2, 8], [3, 8]]
    assert not rollout.dones.any()
    with pytest.raises(ExceptionGroup, match=r"2 envs failed: \(0, 2\)") as several:
        env.rollout(at(9, folder, e0=RAISE, e2=RAISE), 4)
    assert partial_of(several).valid.sum(axis=0).tolist() == [1, 4, 1, 4]
    assert env.step([GO_ON] * 2, [1, 3]).states[:, 1].tolist() == [9, 13]


def test_failed_env_is_restarted_with_on_failure_restart(
    begin: Begin, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(running_rollout, "_GROWTH", 4)
    monkeypatch.setattr(running_rollout, "CHUNK", 100.0)  # so that chunks have 1, 4 and 5 steps
    env = begin(fragile(folder), on_failure="restart")
    rollout = env.rollout(at(3, folder, e1=RAISE), 10)
    assert np.argwhere(~rollout.valid).tolist() == [[4, 1]]
    assert np.argwhere(rollout.dones).tolist() == np.argwhere(rollout.truncated).tolist() == [[3, 1]]
    assert rollout.rewards[3, 1] == 0
    assert {place: str(info["failure"]) for place, info in rollout.infos.items()} == {(3, 1): "env 1 fell over"}
    assert rollout.ended_states.tolist() == [[1, 3]]
    assert rollout.states[5:, 1, 1].tolist() == [0, 1, 2, 3, 4]
    assert rollout.final_states[:, 1].tolist() == [10, 5, 10, 10]
    assert env.step([GO_ON] * 4).states[:, 1].tolist() == [11, 6, 11, 11]


@pytest.mark.parametrize(
    ("mode", "deed", "error", "match"),
    [
        *[(mode, WAIT, WorkerTimeoutError, r"are lost: start again with reset\(\[0, 1\]\)") for mode in IN_BACKGROUND],
        *[(mode, EXIT, WorkerDiedError, "is dead") for mode in IN_WORKERS],
    ],
    indirect=["mode"],
)
def test_late_or_dead_worker_raises_with_other_steps_in_partial(
    begin: Begin, folder: Path, deed: int, error: Any, match: str
) -> None:
    env = begin(fragile(folder), timeout=1.0 if deed == WAIT else None)
    with pytest.raises(error, match=match) as caught:
        env.rollout(at(4, folder, e1=deed), 1000)
    assert caught.value.env_ids == (0, 1)
    rollout = partial_of(caught)
    assert rollout.valid[0].all()
    assert rollout.valid[:, 2].sum() >= rollout.valid[:, 0].sum()
    if deed == WAIT:
        (folder / "go").touch()
    else:
        env.restart([0, 1])
    with pytest.raises(ResetNeededError, match=r"envs \[0, 1\]"):
        env.rollout(zeros, 2)
    env.reset([0, 1])
    after = env.rollout(zeros, 2)
    assert after.states[0, :2, 1].tolist() == [0, 0]
    assert after.states[0, 2].tolist() == rollout.final_states[2].tolist()


class SubBox(Box):
    """A space whose values are sent as objects, like those of all subclasses."""


class SubDict(Dict):
    """See `SubBox`."""


class OfSubBox(Fragile):
    observation_space = SubBox(-np.inf, np.inf, (2,), np.float64)


class OfSubDict(Fragile):
    observation_space: Any = SubDict({"place": Fragile.observation_space})

    def _state(self) -> Any:
        return {"place": super()._state()}


def place_of(state: Any) -> Any:
    return state["place"] if isinstance(state, dict) else state


@pytest.mark.parametrize("kind", [OfSubBox, OfSubDict])
@pytest.mark.parametrize(
    ("mode", "deed", "error"),
    [
        *[(mode, WAIT, WorkerTimeoutError) for mode in IN_BACKGROUND],
        *[(mode, EXIT, WorkerDiedError) for mode in IN_WORKERS],
    ],
    indirect=["mode"],
)
def test_state_that_never_arrived_is_none_in_partial(
    begin: Begin, folder: Path, kind: Any, deed: int, error: Any
) -> None:
    def act(states: Any) -> Any:
        return np.where(place_of(states)[:, 0] == 1, deed, GO_ON)

    envs = [partial(kind, number, str(folder)) for number in range(2)]
    with pytest.raises(error) as caught:
        begin(envs, timeout=1.0 if deed == WAIT else None).rollout(act, 9)
    (folder / "go").touch()
    rollout = partial_of(caught)
    assert rollout.valid.sum(axis=0).tolist() == [1, 0]
    known, lost = rollout.final_states
    assert (place_of(known).tolist(), lost) == ([0, 1], None)


@pytest.mark.parametrize("done_policy", ["restart", "idle"])
@in_modes(*IN_WORKERS)
def test_dead_worker_is_replaced_with_on_failure_restart(begin: Begin, folder: Path, done_policy: str) -> None:
    env = begin(fragile(folder), asynchronous=done_policy, on_failure="restart")
    rollout = env.rollout(at(4, folder, e1=EXIT), 100)
    assert rollout.valid[:, 2:].all()
    for column in (0, 1):
        (step,) = np.flatnonzero(rollout.dones[:, column]).tolist()
        assert isinstance(rollout.infos[step, column]["failure"], WorkerDiedError)
        assert rollout.truncated[step, column]
        assert not rollout.valid[step, column]
        assert rollout.valid[:step, column].all()
        again = rollout.states[step:, column, 1][rollout.valid[step:, column]]
        assert again.tolist() == list(range(len(again)))
        assert (len(again) > 0) == (done_policy == "restart")
    assert rollout.ended_states[:, 0].tolist() == [0, 1]
    assert env.done.tolist() == [done_policy == "idle"] * 2 + [False] * 2


@in_modes(*IN_BACKGROUND)
def test_worker_that_is_busy_with_another_env_is_late_or_replaced(begin: Begin, folder: Path) -> None:
    replaced = begin(fragile(folder), num_cpus=1, on_failure="restart", timeout=0.5)
    replaced.send([WAIT], id=[1])
    rollout = replaced.rollout(zeros, 3, id=[0])
    assert rollout.truncated[:, 0].tolist() == [True, False, False]
    assert isinstance(rollout.infos[0, 0]["failure"], WorkerTimeoutError)
    assert rollout.states[1:, 0, 1].tolist() == [0, 1]
    assert isinstance(replaced.recv().infos[0]["failure"], WorkerTimeoutError)
    env = begin(fragile(folder), num_cpus=1, timeout=0.5)
    with pytest.raises(WorkerTimeoutError, match=r"env 1 did not .* Continue to wait with recv\(min_envs=1\)"):
        env.step([WAIT], id=[1])
    begun = time.monotonic()
    with pytest.raises(WorkerTimeoutError, match=r"envs 0, 3 did not answer within 0\.5 s") as caught:
        env.rollout(zeros, 5, id=[0, 3])
    assert time.monotonic() - begun < 10
    assert partial_of(caught).valid.sum() == 0
    (folder / "go").touch()
    assert env.recv(timeout=10).states.tolist() == [[1, 1]]  # nothing was lost
    assert env.rollout(zeros, 2).states[:, :, 1].tolist() == [[0, 1, 0, 0], [1, 2, 1, 1]]


@in_modes(*IN_WORKERS)
def test_worker_that_died_before_the_rollout_is_replaced(begin: Begin, folder: Path) -> None:
    env = begin(fragile(folder), on_failure="restart")
    os.kill(env.customized_method("pid", id=[0])[0], signal.SIGKILL)
    with pytest.raises(WorkerDiedError):
        env.get_env_attr("steps", id=[0])
    rollout = env.rollout(zeros, 4)
    assert rollout.valid[:, 2:].all()
    assert rollout.truncated[0].tolist() == [True, True, False, False]
    assert rollout.states[1:, :, 1].tolist() == [[0, 0, 1, 1], [1, 1, 2, 2], [2, 2, 3, 3]]


class Late:
    """Acts too late, with actions that no other policy chooses."""

    release: ClassVar = threading.Event()

    def __call__(self, states: Any) -> Any:
        self.release.wait(10)
        return np.full(len(states), 99)


@in_modes(THREADS)
def test_late_policy_in_an_abandoned_thread_writes_no_actions(begin: Begin) -> None:
    env = begin(counts(9, 9), timeout=0.3)
    with pytest.raises(WorkerTimeoutError):
        env.rollout(Late(), 2)
    late = [thread for thread in threading.enumerate() if thread.name.startswith("parallelenv-")]
    env.restart()
    env.reset()
    env.step([1, 2])
    Late.release.set()
    for thread in late:
        thread.join(10)
    assert env.engine.pool.batch.actions[0].tolist() == [1, 2]


class Deadly:
    """Ends the first process that unpickles it."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __setstate__(self, state: Any) -> None:
        with contextlib.suppress(FileExistsError):
            state["mark"].mkdir()
            os._exit(7)

    def __call__(self, states: Any) -> Any:
        return zeros(states)


@in_modes(*IN_WORKERS)
def test_worker_killed_by_the_policy_raises_or_is_replaced(begin: Begin, folder: Path) -> None:
    with pytest.raises(WorkerDiedError):
        begin(fragile(folder)).rollout(Deadly(folder / "first"), 4)
    rollout = begin(fragile(folder), on_failure="restart").rollout(Deadly(folder / "second"), 4)
    dead = rollout.dones[0].tolist()
    assert dead in ([True, True, False, False], [False, False, True, True])
    assert (rollout.valid[0] == ~rollout.dones[0]).all()
    assert rollout.valid[1:].all()
    assert rollout.states[3, :, 1].tolist() == [2 if is_dead else 3 for is_dead in dead]


class Locked(Count):
    """Has an info that cannot be copied in its second step."""

    def step(self, action: Any) -> Any:
        *results, _ = super().step(action)
        return *results, {"lock": threading.Lock()} if self.count == 2 else {}


def test_uncopyable_info_fails_only_its_env(begin: Begin) -> None:
    env = begin([*counts(9, 9), partial(Locked, 2), partial(Count, 3)])
    with pytest.raises(UnpicklableError, match="lock") as caught:
        env.rollout(zeros, 5)
    assert partial_of(caught).valid.sum(axis=0).tolist() == [5, 5, 1, 5]
    with pytest.raises(ResetNeededError, match="env 2 has no"):
        env.rollout(zeros, 1)
    env.reset()
    assert env.rollout(zeros, 1).states[0, :, 1].tolist() == [0] * 4


class Listed:
    """An env without spaces, whose state is its own list; methods, setters and getters change the list."""

    def __init__(self) -> None:
        self.steps: list[int] = []

    def reset(self) -> list[int]:
        self.steps.clear()
        return self.steps

    def step(self, action: int) -> Any:
        self.steps.append(action)
        return self.steps, 0.0, False, {}

    def change(self) -> None:
        self.steps.append(-1)

    @property
    def changing(self) -> None:
        self.change()

    @changing.setter
    def changing(self, value: object) -> None:
        self.change()


CHANGES: dict[str, Callable[[ParallelEnv], object]] = {
    "method": lambda env: env.customized_method("change", id=[0]),
    "set": lambda env: env.set_env_attr("changing", 1, id=[0]),
    "get": lambda env: env.get_env_attr("changing", id=[0]),
}


@pytest.mark.parametrize("way", CHANGES)
@pytest.mark.parametrize("begins", [False, True], ids=["step", "reset"])
def test_state_that_an_env_changes_later_reaches_the_policy_as_it_was_returned(
    make_env: MakeEnv, way: str, begins: bool
) -> None:
    env = make_env([Listed] * 2, asynchronous="continue", num_cpus=1)
    states = env.reset()
    if not begins:
        states = env.step([5, 6]).states
    CHANGES[way](env)
    CHANGES[way](env)
    assert env.rollout(lambda states: [7] * len(states), 1).states[0].tolist() == states.tolist()
    # The env's own list does contain the changes.
    assert env.step([8, 9]).states[0] == [*states[0], -1, -1, 7, 8]
    seen: list[Any] = []

    def watch(states: Any) -> list[int]:
        seen.extend(states.tolist())
        return [7] * len(states)

    states = env.step([1, 2]).states
    CHANGES[way](env)
    next(iter(env.stream(watch, num_steps=2)))
    assert seen[:2] == states.tolist()


class LockedState(Count):
    """Has no space; env 2 has a state that cannot be copied after its second step."""

    observation_space = None

    def _state(self) -> Any:
        return [self.number, self.count, *([threading.Lock()] if (self.number, self.count) == (2, 2) else [])]


@pytest.mark.parametrize(("done_policy", "length"), [("restart", 9), ("idle", 9), ("idle", 2), ("continue", 2)])
def test_uncopyable_state_fails_only_its_env(begin: Begin, done_policy: str, length: int) -> None:
    lengths = 9, 9, length, 9
    env = begin([partial(LockedState, *one) for one in enumerate(lengths)], asynchronous=done_policy)
    with pytest.raises(UnpicklableError, match="contains a lock, which cannot be copied") as caught:
        env.rollout(zeros, 5)
    assert "Raised by env 2 in the copying of its result" in caught.value.__notes__[0]
    rollout = partial_of(caught)
    assert rollout.valid.sum(axis=0).tolist() == [5, 5, 1, 5]
    assert list(rollout.final_states) == [[0, 5], [1, 5], [2, 1], [3, 5]]
    with pytest.raises(ResetNeededError, match="env 2 has no"):
        env.rollout(zeros, 1)
    env.reset()
    assert [list(state) for state in env.rollout(zeros, 1).states[0]] == [[number, 0] for number in range(4)]


def test_error_of_the_policy_has_earlier_steps_in_partial(begin: Begin) -> None:
    def failing(states: Any) -> Any:
        if states[0, 1] == 3:
            raise LookupError("no such action")
        return zeros(states)

    env = begin(counts(9, 9, 9, 9))
    with pytest.raises(LookupError, match="no such action") as caught:
        env.rollout(failing, 6)
    assert "Raised by the policy for envs 0" in caught.value.__notes__[0]
    assert 'raise LookupError("no such action")' in "".join(traceback.format_exception(caught.value))
    assert partial_of(caught).valid.sum(axis=0).tolist() == [3] * 4
    assert env.rollout(zeros, 2).states[0, :, 1].tolist() == [3] * 4
    assert env.step(np.zeros(4, int)).states[:, 1].tolist() == [6] * 4


class NotBack:
    """Can be pickled, but not unpickled."""

    def __reduce__(self) -> Any:
        return int, ("x",)

    def __call__(self, states: Any) -> Any: ...


def test_invalid_policies_are_refused(begin: Begin) -> None:
    env = begin(counts(9, 9), num_cpus=1)
    lock = threading.Lock()
    cases: list[tuple[Any, type[Exception], str]] = [
        (None, ArgumentError, r"without a policy\. Give one: rollout\(policy"),
        (3, ArgumentError, "policy is a int, which cannot be called"),
        (lambda states: lock, UnpicklableError, "The policy, a function, cannot be copied"),
        (NotBack(), ValueError, "invalid literal"),
        (lambda states: np.zeros(3, int), ActionError, "3 actions .* one per env, in the order of the states"),
        (lambda states: np.zeros((2, 2), int), ActionError, r"shape \(2, 2\)"),
        (lambda states: np.zeros(2), ActionError, "dtype float64"),
        (lambda states: None, ActionError, "The policy's result does not fit"),
        (lambda states: (zeros(states), np.zeros(3), {}), ArgumentError, r"extras\) the rnn_state is of shape \(3,\)"),
        (lambda states: (zeros(states), None, {"v": np.zeros(5)}), ArgumentError, r"extras\['v'\] is of shape"),
        (lambda states: (zeros(states), None, {"v": 3.0}), ArgumentError, r"extras\['v'\]"),
        (lambda states: np.ma.masked_array(zeros(states), True), ActionError, "is a MaskedArray, whose mask would"),
        (lambda states: (zeros(states), None, {"v": np.ma.zeros(2)}), ArgumentError, r"extras\['v'\] is a MaskedArray"),
        (lambda: 3, TypeError, "positional argument"),
    ]
    for policy, kind, match in cases:
        with pytest.raises(kind, match=match):
            env.rollout(policy, 3)
    assert env.rollout(zeros, 1).states[0, :, 1].tolist() == [0, 0]


def fickle(answer: Callable[[int], Any], other: Callable[[int], Any] | None = None) -> Policy:
    """Return a policy with a recurrent state and extras, which returns others from its fourth call on."""
    calls = itertools.count(1)
    return lambda states, rnn_state, done: (
        zeros(states),
        *(other if next(calls) > 3 and other else answer)(len(states)),
    )


def extra(value: Any) -> Any:
    return lambda num_envs: (None, {"v": value(num_envs)})


def memory(value: Any) -> Any:
    return lambda num_envs: (value(num_envs), {})


def objects(make: Callable[[], Any]) -> Any:
    return lambda num_envs: object_array([make() for _ in range(num_envs)])


UNFIT: dict[str, tuple[Any, type[Exception], str]] = {
    "another shape": (extra(lambda k: np.zeros((k, 2))), ArgumentError, "must be alike in every step"),
    "another dtype": (extra(lambda k: np.zeros(k, "M8[s]")), ArgumentError, r"datetime64\[s\] per env, but earlier"),
    "another name": (lambda k: (None, {"w": np.zeros(k)}), ArgumentError, r"extras \['w'\], but earlier \['v'\]"),
    "a lock": (extra(objects(threading.Lock)), UnpicklableError, r"extras\['v'\] cannot be copied to the caller"),
    "a weak reference": (extra(objects(lambda: weakref.ref(Count))), UnpicklableError, "cannot be copied"),
    "not to be unpickled": (extra(objects(NotBack)), UnpicklableError, "ValueError: invalid literal"),
    "ragged": (extra(lambda k: [[0] * n for n in range(k)]), ArgumentError, "does not form an array"),
    "a nest": (extra(lambda k: {"u": np.zeros(k)}), ArgumentError, r"extras\['v'\] is a dict, but extras are flat"),
}


@pytest.mark.parametrize("growth", [1, 16])
@pytest.mark.parametrize("what", UNFIT)
def test_extras_that_cannot_be_stacked_raise(
    begin: Begin, what: str, growth: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(running_rollout, "_GROWTH", growth)
    other, kind, match = UNFIT[what]
    env = begin(counts(9, 9, 9, 9))
    with pytest.raises(kind, match=match) as caught:
        env.rollout(fickle(extra(np.zeros), other), 20)
    assert "Raised by the policy for envs 0" in caught.value.__notes__[0]
    assert partial_of(caught).valid.sum(axis=0).tolist() == [3] * 4
    assert env.step(np.zeros(4, int)).states[:, 1].tolist() == [4] * 4


@in_modes(*IN_BACKGROUND)  # the oracle has one worker
def test_extras_and_recurrent_states_that_differ_between_workers_raise(begin: Begin) -> None:
    def by_env(first: Callable[[int], Any], second: Callable[[int], Any]) -> Any:
        return lambda states, rnn_state, done: (zeros(states), *(second if states[0, 0] else first)(len(states)))

    def dates(num_envs: int) -> Any:
        return np.zeros(num_envs, "M8[s]")

    env = begin(counts(9, 9))
    with pytest.raises(ArgumentError, match=r"extras\['v'\] .* or for other envs") as caught:
        env.rollout(by_env(extra(np.zeros), extra(dates)), 20)
    assert "Raised by the policy for envs 1" in caught.value.__notes__[0]
    assert partial_of(caught).valid.sum(axis=0).tolist() == [1, 1]
    assert env.step([0, 0]).states[:, 1].tolist() == [2, 2]
    with pytest.raises(ArgumentError, match=r"rnn_state is \['array'\] for some envs, but {'m': 'array'}") as caught:
        env.rollout(by_env(memory(lambda k: [np.zeros(k)]), memory(lambda k: {"m": np.zeros(k)})), 5)
    assert partial_of(caught).valid.all()
    assert len(partial_of(caught)) == 5
    rnn_state = env.rollout(by_env(memory(np.zeros), memory(dates)), 5).rnn_state
    assert rnn_state.tolist() == [0, np.datetime64(0, "s")]


def test_recurrent_state_that_cannot_be_copied_raises(begin: Begin) -> None:
    env = begin(counts(9, 9, 9, 9))
    for make in (threading.Lock, NotBack):
        states = env.reset()
        with pytest.raises(UnpicklableError, match="The policy's rnn_state cannot be copied") as caught:
            env.rollout(fickle(memory(objects(make))), 20)
        assert "Raised by the policy for envs 0" in caught.value.__notes__[0]
        steps = partial_of(caught).valid.sum(axis=0).tolist()
        assert steps == [1] * 4  # noticed with the first chunk, which was not lost
        assert env.step(np.zeros(4, int)).states[:, 1].tolist() == (states[:, 1] + 2).tolist()


def test_recurrent_state_may_become_none(begin: Begin) -> None:
    env = begin(counts(99, 99))
    before = env.rollout(fickle(memory(np.ones)), 3).rnn_state
    assert before.tolist() == [1, 1]
    for rnn_state in (None, before):
        policy = fickle(memory(np.ones), memory(lambda k: None))
        assert env.rollout(policy, 20, rnn_state=rnn_state).rnn_state is None


def test_objects_in_extras_are_copied(begin: Begin) -> None:
    said = [{"calls": 0}, {"calls": 0}]

    def updating(states: Any) -> Any:  # returns the same objects in each step, and changes them later
        for one in said:
            one["calls"] += 1
        return zeros(states), None, {"v": said[: len(states)]}

    env = begin(counts(9, 3), asynchronous="idle", num_cpus=1)
    extras = env.rollout(updating, num_episodes=2).extras["v"]
    assert extras.shape == (9, 2)
    assert [one["calls"] for one in extras[:, 0]] == list(range(1, 10))
    assert extras[3:, 1].tolist() == [None] * 6


@pytest.mark.parametrize("num_envs", [1, 2, 3])
@pytest.mark.parametrize("kind", [Count, zoo.Old], ids=["box", "no space"])
def test_policy_result_tuple_must_have_three_items(begin: Begin, kind: Any, num_envs: int) -> None:
    env = begin([partial(kind, number) for number in range(num_envs)], num_cpus=1)
    assert env.rollout(lambda states: [0] * len(states), 2).valid.all()
    assert env.rollout(lambda states: ([0] * len(states), None, None), 2).valid.all()
    for last in (0, {"u": 1}, None):
        with pytest.raises(ArgumentError, match=r"tuple.* \(actions, rnn_state, extras\)"):
            env.rollout(lambda states, last=last: (*[0] * (len(states) - 1), last), 2)
    with pytest.raises(ActionError, match=r"returned a tuple of 2\. A tuple must be"):
        env.rollout(lambda states: ([0] * len(states), None), 2)


class OfParts(Count):
    action_space = gym.spaces.Tuple((Discrete(3), Discrete(4), Dict({"u": Discrete(5)})))

    def step(self, action: Any) -> Any:
        assert self.action_space.contains(action)
        return super().step(0)


def test_actions_of_a_tuple_space_are_a_nested_tuple(begin: Begin) -> None:
    def parts(states: Any) -> Any:
        return zeros(states), zeros(states), {"u": zeros(states)}

    env = begin([partial(OfParts, number) for number in range(3)], num_cpus=1)
    assert env.rollout(lambda states: (parts(states), None, None), 2).actions[2]["u"].shape == (2, 3)
    assert env.rollout(lambda states: [(1, 2, {"u": 3})] * len(states), 2).actions[1].tolist() == [[2] * 3] * 2
    with pytest.raises(ArgumentError):
        env.rollout(parts, 2)


@pytest.mark.parametrize(
    ("done_policy", "arguments", "match"),
    [
        (None, {"num_steps": 4}, "asynchronous='restart'"),
        ("continue", {"num_episodes": 1}, "'continue' .* allows for 0.*asynchronous='restart'"),
        ("idle", {"num_episodes": 3}, "num_episodes=3 is more than 2 envs can run: .*'idle' .* allows for 2"),
        ("restart", {}, "exactly one"),
        ("restart", {"num_steps": 3, "num_episodes": 3}, "exactly one"),
        *[("restart", {"num_steps": wrong}, "at least 1") for wrong in (0, 2.5, True)],
        ("restart", {"num_episodes": 0}, "at least 1"),
    ],
)
def test_invalid_lengths_are_refused(begin: Begin, done_policy: Any, arguments: Any, match: str) -> None:
    env = begin(counts(9, 9), asynchronous=done_policy)
    with pytest.raises(ArgumentError, match=match):
        env.rollout(zeros, **arguments)
    assert env.step([0, 0]).states[:, 1].tolist() == [1, 1]


def test_rollout_needs_known_states_and_no_step_in_flight(make_env: MakeEnv) -> None:
    env = make_env(counts(9, 9), asynchronous="restart")
    with pytest.raises(ResetNeededError):
        env.rollout(zeros, 3)
    env.reset()
    env.send([0], [1])
    with pytest.raises(EnvBusyError):
        env.rollout(zeros, 3)
    env.recv()
    assert env.rollout(zeros, 1).states[0, :, 1].tolist() == [0, 1]
    env.load_state(env.save_state())
    with pytest.raises(ResetNeededError, match="not known after load_state"):
        env.rollout(zeros, 1)
    env.step([0, 0])
    assert env.rollout(zeros, 1).states[0, :, 1].tolist() == [2, 3]


def test_reset_works_after_ctrl_c_in_a_rollout(begin: Begin, folder: Path) -> None:
    def touching(states: Any, mark: Path = folder / "began-7") -> Any:
        if states[0, 1] == 9:
            mark.mkdir(exist_ok=True)  # an interrupt in `touch` would leave the file open
        return zeros(states)

    env = begin(fragile(folder))
    for number, policy in ((1, at(2, folder, e1=WAIT)), (7, touching)):
        with when_begun(folder, number, interrupt), pytest.raises(KeyboardInterrupt):
            env.rollout(policy, 10**9)
        begun = time.monotonic()
        (folder / "go").touch()
        for call in (partial(env.step, [GO_ON] * 4), partial(env.rollout, zeros, 2)):
            with pytest.raises(ResetNeededError):
                call()
        assert env.reset()[:, 1].tolist() == [0] * 4
        assert time.monotonic() - begun < 5  # workers stop after a chunk at most
        assert env.rollout(zeros, 3).states[:, :, 1].tolist() == [[0] * 4, [1] * 4, [2] * 4]
        assert env.step([GO_ON] * 4).states[:, 1].tolist() == [4] * 4


# ---------------------------------------------------------------- memory and progress bar


class Sheets(Count):
    """Its states have eight parts of 100 kB each."""

    observation_space = Dict({f"sheet {number}": Box(0, 255, (100_000,), np.uint8) for number in range(8)})

    def _state(self) -> Any:
        return {name: np.zeros(100_000, np.uint8) for name in self.observation_space}


@in_modes(ORACLE)  # where all memory is that of this process
def test_rollout_takes_little_more_memory_than_its_result(begin: Begin) -> None:
    env = begin([partial(Sheets, 0)])
    tracemalloc.start()
    try:
        rollout = env.rollout(lambda states: [0], 50)
        most = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert most < 1.5 * sum(leaf.nbytes for leaf in rollout.states.values())


@pytest.mark.parametrize(("arguments", "total"), [({"num_steps": 40}, 40), ({"num_episodes": 6}, 6)])
def test_progress_bar_is_shown_on_a_terminal_only(
    begin: Begin, monkeypatch: pytest.MonkeyPatch, arguments: Any, total: int
) -> None:
    monkeypatch.setattr("parallelenv.rollouts.rollout._BAR_DELAY", 0.0)
    monkeypatch.setattr(tqdm, "tqdm", partial(tqdm.tqdm, mininterval=0.0))  # every advance is shown
    screen, closed = io.StringIO(), io.StringIO()
    closed.close()
    env = begin(counts(2, 5))
    for no_terminal in (None, closed, screen):
        monkeypatch.setattr("sys.stderr", no_terminal)
        assert env.rollout(zeros, **arguments).valid.any()
    monkeypatch.setattr(screen, "isatty", lambda: True)
    env.rollout(zeros, progress=False, **arguments)
    assert not screen.getvalue()
    env.rollout(zeros, **arguments)
    unit = next(iter(arguments)).removeprefix("num_")
    assert f"rollout:   0%|          | 0/{total} {unit} [" in screen.getvalue()
    assert f"| {total}/{total} {unit} [" in screen.getvalue()
