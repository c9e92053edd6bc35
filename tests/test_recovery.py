"""`on_failure="restart"`: failed envs are rebuilt, and their episodes are truncated."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from conftest import MakeEnv, needs_ray
from fragile import EXIT, GO_ON, RAISE, WAIT, Fragile
from modes import IN_BACKGROUND, IN_CALLER, IN_WORKERS, PROCESSES, in_modes

from parallelenv import ParallelEnv, errors
from parallelenv.engine import recovery
from parallelenv.testing.contract import drain

Make = Callable[..., ParallelEnv]

NUM_ENVS = 4


class Frail(Fragile):
    """Can also fail in its constructor and in resets. Its state also has a random number of its reset."""

    observation_space = gym.spaces.Box(-np.inf, np.inf, (3,), np.float64)
    drawn = 0.0

    def __init__(self, number: int, folder: str) -> None:
        super().__init__(number, folder)
        with Path(folder, f"births-{number}").open("a") as file:
            file.write("x")
        if Path(folder, f"barren-{number}").exists():
            raise RuntimeError(f"env {number} cannot be born")

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        super().reset(seed=seed)
        self.drawn = self.np_random.random()
        if options and "fail" in options:
            raise KeyError("no such option")
        for name, act in (("lame", self.wait), ("cursed", partial(os._exit, 3))):
            mark = Path(self.folder, f"{name}-{self.number}")
            if mark.exists():
                mark.unlink()
                act()
        return self._state(), {"drawn": self.drawn}

    def _state(self) -> Any:
        return np.array([self.number, self.steps, self.drawn])


@pytest.fixture(params=["restart", "continue", "idle", None])
def done_policy(request: pytest.FixtureRequest, mode: str) -> Any:
    if needs_ray(mode) and request.param != "restart":
        pytest.skip("takes seconds each; done policies are the same code in every mode")
    return request.param


@pytest.fixture(autouse=True)
def _no_delay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recovery, "_FIRST_DELAY", 0.0)


@pytest.fixture
def make(make_env: MakeEnv, tmp_path: Path, mode: str) -> Iterator[Make]:
    """Make four frail envs in two workers, which are restarted, and reset them. Those that wait end with the test."""

    def make(**kwargs: Any) -> ParallelEnv:
        kwargs = {"asynchronous": "restart", "num_cpus": 2, "on_failure": "restart", **kwargs}
        env = make_env([partial(Frail, number, str(tmp_path)) for number in range(NUM_ENVS)], **kwargs)
        env.reset(seed=3)
        return env

    yield make
    (tmp_path / "go").touch()  # before the envs are closed, which waits for them


def actions(**of_env: int) -> np.ndarray[Any, Any]:
    """Return actions; ``e0=RAISE`` sets that of env 0."""
    return np.array([of_env.get(f"e{env_id}", GO_ON) for env_id in range(NUM_ENVS)])


def births(folder: Path) -> list[int]:
    return [len(Path(folder, f"births-{env_id}").read_text()) for env_id in range(NUM_ENVS)]


def test_exception_truncates_the_episode_and_starts_the_next(make: Make, tmp_path: Path, done_policy: Any) -> None:
    env = make(asynchronous=done_policy)
    env.step(actions())
    result = env.step(actions(e1=RAISE))
    assert result.truncated.tolist() == [False, True, False, False]
    assert result.terminated.tolist() == [False] * NUM_ENVS
    assert result.dones.tolist() == [False, True, False, False]
    assert result.states[1][:2].tolist() == [1, 0]
    assert result.states[:, 1].tolist() == [2, 0, 2, 2]
    assert result.rewards.tolist() == [1, 0, 1, 1]
    failure = result.infos[1]["failure"]
    assert type(failure) is ZeroDivisionError
    assert "env 1 in step" in failure.__notes__[0]
    assert not any("failure" in info for info in result.infos[[0, 2, 3]])
    assert births(tmp_path) == [1, 2, 1, 1]
    assert env.reset_infos[1] == {"drawn": result.states[1][2]}
    if done_policy == "restart":
        assert result.infos[1]["reset"] is True
        assert result.infos[1]["ended_state"] is None
        assert result.infos[1]["reset_info"] == {"drawn": result.states[1][2]}
    assert env.all_done() if done_policy is None else env.done.tolist() == [False, True, False, False]


def test_steps_after_a_failure_follow_the_done_policy(make: Make, done_policy: Any) -> None:
    env = make(asynchronous=done_policy)
    env.step(actions(e1=RAISE))
    states, _, dones, infos = env.step(actions())
    stepped = {"restart": [2, 1, 2, 2], "continue": [2, 1, 2, 2], "idle": [2, None, 2, 2], None: [None] * 4}[
        done_policy
    ]
    assert [None if state is None else state[1] for state in states] == stepped
    assert dones.tolist() == [steps is None for steps in stepped]
    assert not any("failure" in info for info in infos)


@in_modes(*IN_WORKERS)
def test_death_of_worker_truncates_only_episodes_of_its_envs(make: Make) -> None:
    env = make()
    pids = env.customized_method("pid")
    result = env.step(actions(e0=EXIT))
    lost = [pid == pids[0] for pid in pids]
    assert lost[0]
    assert not all(lost)
    assert result.truncated.tolist() == lost
    assert [isinstance(info.get("failure"), errors.WorkerDiedError) for info in result.infos] == lost
    assert result.states[:, 1].tolist() == [0 if one else 1 for one in lost]
    after = env.step(actions())
    assert after.states[:, 1].tolist() == [1 if one else 2 for one in lost]
    assert not after.dones.any()


@in_modes(*IN_WORKERS)
def test_idle_envs_of_a_dead_worker_are_truncated_at_their_next_step(make: Make, tmp_path: Path) -> None:
    env = make()
    env.step([EXIT], id=[0])
    result = env.step(actions())
    assert result.truncated.tolist() == [False, True, False, False]
    assert isinstance(result.infos[1]["failure"], errors.WorkerDiedError)
    assert result.states[:, 1].tolist() == [1, 0, 1, 1]
    assert births(tmp_path) == [2, 2, 1, 1]


@in_modes(*IN_WORKERS)
def test_worker_killed_between_two_calls_is_restarted_by_the_next(make: Make) -> None:
    env = make()
    os.kill(env.customized_method("pid", id=[0])[0], signal.SIGKILL)
    with pytest.raises(errors.WorkerDiedError):
        env.get_env_attr("steps", id=[0])
    result = env.step(actions())
    assert result.truncated.tolist() == [True, True, False, False]
    assert not env.step(actions()).dones.any()


@in_modes(*IN_WORKERS)
def test_reset_restarts_a_killed_worker(make: Make, tmp_path: Path) -> None:
    env = make()
    first = env.reset(seed=3)
    os.kill(env.customized_method("pid", id=[0])[0], signal.SIGKILL)
    assert env.reset(seed=3).tolist() == first.tolist()
    assert not env.step(actions()).dones.any()
    (tmp_path / "cursed-2").touch()  # its reset kills the worker, once
    assert env.reset(seed=3).tolist() == first.tolist()
    assert not env.step(actions()).dones.any()


def test_error_of_the_reset_of_an_env_is_raised(make: Make, tmp_path: Path) -> None:
    env = make()
    with pytest.raises(KeyError):
        env.reset(seed=3, options=[None, {"fail": 1}, None, None])
    assert births(tmp_path) == [1] * NUM_ENVS


@in_modes(*IN_BACKGROUND)
def test_step_timeout_is_a_failure(make: Make) -> None:
    env = make(timeout=1.0)
    result = env.step(actions(e3=WAIT))
    assert result.truncated[3]
    assert isinstance(result.infos[3]["failure"], errors.WorkerTimeoutError)
    assert not result.truncated[:2].any()
    assert not env.step(actions()).dones.any()


@in_modes(*IN_WORKERS)
def test_sent_reset_is_repeated_if_the_worker_dies(make: Make, tmp_path: Path) -> None:
    env = make()
    Path(tmp_path, "cursed-1").touch()
    env.send_reset([1, 3], seed=[40, 41], options={"some": 1})
    landed = drain(env, min_envs=2)
    assert not Path(tmp_path, "cursed-1").exists()
    drawn = [np.random.Generator(np.random.PCG64(np.random.SeedSequence(seed))).random() for seed in (40, 41)]
    assert [landed[env_id][0].tolist() for env_id in (1, 3)] == [[1, 0, drawn[0]], [3, 0, drawn[1]]]
    assert landed[1][3] == {"drawn": drawn[0], "reset": True}
    assert landed[1][1:3] == (0.0, False)
    assert births(tmp_path) == [2, 2, 1, 1]
    result = env.step(actions())
    assert result.truncated.tolist() == [True, False, False, False]  # it was in the same worker
    assert result.states[:, 1].tolist() == [0, 1, 1, 1]


@in_modes(*IN_BACKGROUND)
def test_sent_reset_is_repeated_after_timeout(make: Make, tmp_path: Path, mode: str) -> None:
    env = make(timeout=1.0)
    Path(tmp_path, "lame-2").touch()
    env.send_reset(2, seed=[40])
    landed = asyncio.run(env.arecv()) if mode == PROCESSES else env.recv()
    drawn = np.random.Generator(np.random.PCG64(np.random.SeedSequence(40))).random()
    assert landed.states.tolist() == [[2, 0, drawn]]
    assert landed.dones.tolist() == [False]
    assert births(tmp_path) == [1, 1, 2, 2]


def test_error_of_a_sent_reset_is_raised(make: Make, tmp_path: Path) -> None:
    env = make()
    env.send_reset([0, 2], options=[{"fail": True}, None])
    with pytest.raises(KeyError, match="no such option") as caught:
        env.recv(min_envs=2)
    assert caught.value.partial.env_ids.tolist() == [2]  # type: ignore[attr-defined]
    assert births(tmp_path) == [1, 1, 1, 1]
    with pytest.raises(errors.ResetNeededError, match=r"\[0\]"):
        env.step(actions())
    env.reset(0)
    assert env.step(actions()).states[:, 1].tolist() == [1, 1, 1, 1]


@in_modes(*IN_BACKGROUND)
def test_timeout_of_a_sent_step_is_a_failure(make: Make) -> None:
    env = make(timeout=1.0)
    env.send(actions(e3=WAIT))
    with pytest.raises(errors.WorkerTimeoutError):  # the caller's own limit: nothing is given up
        env.recv(min_envs=NUM_ENVS, timeout=0.1)
    result = env.recv(min_envs=NUM_ENVS)
    assert result.truncated[result.env_ids == 3].tolist() == [True]


@in_modes(*IN_WORKERS)
def test_step_sent_to_a_worker_that_dies_is_a_failure(make: Make, tmp_path: Path) -> None:
    env = make()
    env.send(actions(e0=EXIT))
    truncated: dict[int, bool] = {}
    while len(truncated) < NUM_ENVS:
        result = env.recv(max_envs=1)
        truncated[int(result.env_ids[0])] = bool(result.truncated[0])
    assert truncated == {0: True, 1: True, 2: False, 3: False}
    assert births(tmp_path) == [2, 2, 1, 1]


@in_modes(*IN_WORKERS)
def test_received_step_is_kept_if_its_worker_dies_later(make: Make) -> None:
    env = make()
    env.send([GO_ON], id=[1])
    assert env.step([EXIT], id=[0]).truncated.tolist() == [True]
    arrived = env.recv()
    assert arrived.env_ids.tolist() == [1]
    assert arrived.states[0][1] == 1
    assert not arrived.dones[0]
    assert env.step([GO_ON], id=[1]).truncated.tolist() == [True]
    assert env.step([GO_ON], id=[1]).states[0][1] == 1


def test_restart_with_neighbours_in_flight_delivers_every_result(make: Make) -> None:
    env = make(num_cpus=1)
    env.send([RAISE], id=[0])
    env.send([GO_ON, GO_ON], id=[1, 2])
    received: list[int] = []
    while len(received) < 3:
        received += env.recv().env_ids.tolist()
    assert sorted(received) == [0, 1, 2]
    assert not env.step(actions()).dones[:3].any()


def test_seeds_after_restarts_derive_from_the_seed_of_the_user(make: Make) -> None:
    drawn = []
    for _ in range(2):
        env = make()
        once = env.step(actions(e1=RAISE)).states[1][2]
        twice = env.step(actions(e1=RAISE)).states[1][2]
        drawn.append((once, twice))
    assert drawn[0] == drawn[1]
    assert once != twice


def test_failure_is_raised_after_max_restarts(make: Make, tmp_path: Path) -> None:
    env = make(max_restarts=2)
    for _ in range(2):
        env.step(actions(e1=RAISE))
    with pytest.raises(ZeroDivisionError) as caught:
        env.step(actions(e1=RAISE))
    assert caught.value.partial.env_ids.tolist() == [0, 2, 3]  # type: ignore[attr-defined]
    assert births(tmp_path) == [1, 3, 1, 1]
    assert env.step(actions()).states[:, 1].tolist() == [4, 2, 4, 4]  # the env also counts the step in which it fails


def test_env_that_cannot_be_rebuilt_uses_up_max_restarts(make: Make, tmp_path: Path) -> None:
    env = make(max_restarts=3)
    (tmp_path / "barren-1").touch()
    with pytest.raises(RuntimeError, match="cannot be born"):
        env.step(actions(e1=RAISE))
    assert births(tmp_path) == [1, 4, 1, 1]


def test_delays_between_restarts_grow_and_old_restarts_expire(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    monkeypatch.setattr(recovery, "_FIRST_DELAY", 0.1)
    budget = recovery.Budget(8)
    delays = [budget.spend([0])[1] for _ in range(8)]
    assert delays == pytest.approx([0, 0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 5.0])
    assert budget.spend([0, 1]) == ([0], 0.0)
    now[0] = recovery.PERIOD + 1
    assert budget.spend([0]) == ([], 0.0)


@in_modes(*IN_CALLER)
def test_on_failure_restart_refuses_env_instances_in_the_same_process(mode: str) -> None:
    with pytest.raises(errors.InvalidEnvError, match="Give an env fn"):
        ParallelEnv([gym.make("CartPole-v1")], mode, on_failure="restart")
