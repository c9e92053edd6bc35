"""Restarts of envs by `restart` and by `on_failure="restart"`: results, other envs, and interrupts. In every mode."""

from __future__ import annotations

import asyncio
import gc
import itertools
import os
import pickle
import signal
import threading
import time
import tracemalloc
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from conftest import MakeEnv
from fragile import EXIT, GO_ON, RAISE, WAIT, Fragile, interrupt, when_begun
from modes import IN_BACKGROUND, IN_WORKERS, LOCAL, ORACLE, PROCESSES, THREADS, in_modes

from parallelenv import ParallelEnv
from parallelenv.engine import recovery
from parallelenv.errors import InvalidEnvError, ResetNeededError, WorkerDiedError, WorkerTimeoutError
from parallelenv.testing.contract import DONE_POLICIES, drain
from parallelenv.testing.envs import Interrupter

NUM_ENVS = 4
RECOVERING = {"asynchronous": "restart", "on_failure": "restart"}


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
        if Path(folder, f"slow-{number}").exists():
            self.wait()

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

    def fail_as_if_dead(self) -> None:
        raise WorkerDiedError("a worker of this env's own", (0,))


@pytest.fixture(autouse=True)
def _no_delay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recovery, "_FIRST_DELAY", 0.0)


def frail(folder: Path) -> list[Any]:
    return [partial(Frail, number, str(folder)) for number in range(NUM_ENVS)]


@pytest.fixture
def make(make_env: MakeEnv, tmp_path: Path) -> Iterator[MakeEnv]:
    """Make four frail envs in two workers, and reset them. Those that wait end with the test."""

    def make(**options: Any) -> ParallelEnv:
        env = make_env(frail(tmp_path), **{"num_cpus": 2, **options})
        env.reset(seed=3)
        return env

    yield make
    (tmp_path / "go").touch()  # before the envs are closed, which waits for them


@pytest.fixture
def env(make: MakeEnv) -> ParallelEnv:
    """Four envs that are restarted."""
    return make(**RECOVERING)


def actions(**of_env: int) -> np.ndarray[Any, Any]:
    """Return actions; ``e0=RAISE`` sets that of env 0."""
    return np.array([of_env.get(f"e{env_id}", GO_ON) for env_id in range(NUM_ENVS)])


def births(folder: Path) -> list[int]:
    return [len(Path(folder, f"births-{env_id}").read_text()) for env_id in range(NUM_ENVS)]


def steps(states: Any) -> list[Any]:
    """Return how many steps each env has made, ``None`` where there is no state."""
    return [None if state is None else state[1] for state in states]


def kill_worker_of(env: ParallelEnv, env_id: int) -> None:
    os.kill(env.customized_method("pid", id=[env_id])[0], signal.SIGKILL)


# ---------------------------------------------------------------- on_failure="restart"


@pytest.mark.parametrize("done_policy", DONE_POLICIES)
def test_exception_truncates_the_episode_and_starts_the_next(make: MakeEnv, tmp_path: Path, done_policy: Any) -> None:
    env = make(asynchronous=done_policy, on_failure="restart")
    env.step(actions())
    result = env.step(actions(e1=RAISE))
    assert (
        result.truncated.tolist() == result.dones.tolist() == result.restarted.tolist() == [False, True, False, False]
    )
    assert result.terminated.tolist() == [False] * NUM_ENVS
    assert result.states[1][0] == 1
    assert steps(result.states) == [2, 0, 2, 2]
    assert result.rewards.tolist() == [1, 0, 1, 1]
    failure = result.infos[1]["failure"]
    assert type(failure) is ZeroDivisionError
    assert "env 1 in step" in failure.__notes__[0]
    assert births(tmp_path) == [1, 2, 1, 1]
    drawn = {"drawn": result.states[1][2]}
    assert env.reset_infos[1] == drawn
    if done_policy == "restart":
        assert result.infos[1] == {"reset": True, "ended_state": None, "reset_info": drawn, "failure": failure}
    assert env.all_done() if done_policy is None else env.done.tolist() == [False, True, False, False]
    after = env.step(actions())
    expected = {None: [None] * 4, "idle": [3, None, 3, 3]}.get(done_policy, [3, 1, 3, 3])
    assert steps(after.states) == expected
    assert after.dones.tolist() == [count is None for count in expected]
    assert not after.restarted.any()
    assert not any("failure" in info for info in (*result.infos[[0, 2, 3]], *after.infos))


@in_modes(*IN_WORKERS)
def test_death_of_a_worker_truncates_steps_in_flight_and_the_next_of_idle_envs_and_keeps_results(
    env: ParallelEnv, tmp_path: Path
) -> None:
    env.send([GO_ON], id=[1])
    assert env.step([EXIT], id=[0]).truncated.tolist() == [True]
    arrived = env.recv()
    assert arrived.env_ids.tolist() == steps(arrived.states) == [1]
    assert not arrived.dones[0]
    result = env.step(actions())
    assert result.truncated.tolist() == [False, True, False, False]
    assert isinstance(result.infos[1]["failure"], WorkerDiedError)
    assert steps(result.states) == [1, 0, 1, 1]
    assert births(tmp_path) == [2, 2, 1, 1]
    env.send(actions(e0=EXIT))
    landed = drain(env, max_envs=1)
    assert [landed[env_id][5] for env_id in range(NUM_ENVS)] == [True, True, False, False]
    assert births(tmp_path) == [3, 3, 1, 1]


@in_modes(*IN_WORKERS)
def test_worker_killed_between_two_calls_is_restarted_by_the_next(env: ParallelEnv, tmp_path: Path) -> None:
    kill_worker_of(env, 0)
    with pytest.raises(WorkerDiedError):
        env.get_env_attr("steps", id=[0])
    assert env.step(actions()).truncated.tolist() == [True, True, False, False]
    assert not env.step(actions()).dones.any()
    first = env.reset(seed=3)
    kill_worker_of(env, 0)
    assert env.reset(seed=3).tolist() == first.tolist()
    (tmp_path / "cursed-2").touch()  # its reset kills the worker, once
    assert env.reset(seed=3).tolist() == first.tolist()
    assert not env.step(actions()).dones.any()


def test_error_of_a_reset_is_raised(env: ParallelEnv, tmp_path: Path) -> None:
    env.seed(3)
    with pytest.raises(KeyError) as caught:
        env.reset(options=[None, {"fail": 1}, None, None])
    assert caught.value.partial[:, 0].tolist() == [0, 2, 3]  # type: ignore[attr-defined]
    drawn = [np.random.default_rng(3 + env_id).random(2) for env_id in range(NUM_ENVS)]
    assert env.reset([0, 1])[:, 2].tolist() == [drawn[0][1], drawn[1][0]]  # only the seed of env 1 is left
    env.send_reset([0, 2], options=[{"fail": True}, None])
    with pytest.raises(KeyError, match="no such option") as caught:
        env.recv(min_envs=2)
    assert caught.value.partial.env_ids.tolist() == [2]  # type: ignore[attr-defined]
    assert births(tmp_path) == [1] * NUM_ENVS
    with pytest.raises(ResetNeededError, match=r"\[0\]"):
        env.step(actions())
    env.reset(0)
    assert steps(env.step(actions()).states) == [1, 1, 1, 1]


@in_modes(*IN_WORKERS)
def test_sent_reset_is_repeated_if_the_worker_dies(env: ParallelEnv, tmp_path: Path) -> None:
    Path(tmp_path, "cursed-1").touch()
    env.send_reset([1, 3], seed=[40, 41], options={"some": 1})
    landed = drain(env, min_envs=2)
    assert not Path(tmp_path, "cursed-1").exists()
    drawn = [np.random.default_rng(seed).random() for seed in (40, 41)]
    assert [landed[env_id][0].tolist() for env_id in (1, 3)] == [[1, 0, drawn[0]], [3, 0, drawn[1]]]
    assert landed[1][1:4] == (0.0, False, {"drawn": drawn[0], "reset": True})
    assert births(tmp_path) == [2, 2, 1, 1]
    result = env.step(actions())
    assert result.truncated.tolist() == [True, False, False, False]  # it was in the same worker
    assert steps(result.states) == [0, 1, 1, 1]


@in_modes(*IN_BACKGROUND)
def test_timeout_of_a_sent_step_or_reset_is_a_failure(make: MakeEnv, tmp_path: Path, mode: str) -> None:
    env = make(timeout=1.0, **RECOVERING)
    Path(tmp_path, "lame-2").touch()
    env.send_reset(2, seed=[40])
    landed = asyncio.run(env.arecv()) if mode == PROCESSES else env.recv()
    assert landed.states.tolist() == [[2, 0, np.random.default_rng(40).random()]]
    assert landed.dones.tolist() == [False]
    assert births(tmp_path) == [1, 1, 2, 2]
    env.reset()
    env.send(actions(e3=WAIT))
    with pytest.raises(WorkerTimeoutError):  # the caller's own limit: nothing is given up
        env.recv(min_envs=NUM_ENVS, timeout=0.1)
    result = env.recv(min_envs=NUM_ENVS)
    assert result.truncated[result.env_ids == 3].tolist() == [True]


def test_failed_env_is_rebuilt_without_disturbing_a_busy_neighbour(make: MakeEnv, tmp_path: Path) -> None:
    env = make(num_cpus=1, **RECOVERING)
    env.send([RAISE], [0])
    with when_begun(tmp_path, 1, (tmp_path / "go").touch):
        env.send([WAIT, GO_ON], [1, 2])
        first = env.recv(max_envs=1)
    assert first.env_ids.tolist() == [0]
    assert isinstance(first.infos[0]["failure"], ZeroDivisionError)
    rest = drain(env)
    assert {env_id: (landed[0][1], landed[2]) for env_id, landed in rest.items()} == {1: (1, False), 2: (1, False)}
    assert births(tmp_path) == [2, 1, 1, 1]


def test_seeds_after_restarts_derive_from_the_seed_of_the_user(make: MakeEnv) -> None:
    drawn = []
    for _ in range(2):
        env = make(**RECOVERING)
        drawn.append([env.step(actions(e1=RAISE)).states[1][2] for _ in range(2)])
    assert drawn[0] == drawn[1]
    assert drawn[0][0] != drawn[0][1]


def test_seeds_after_restarts_continue_after_load_state(make: MakeEnv) -> None:
    env, other = make(num_cpus=1, **RECOVERING), make(num_cpus=1, **RECOVERING)
    env.step(actions(e1=RAISE))
    state = env.save_state()
    expected = [env.step(actions(e1=RAISE)).states[1][2] for _ in range(2)]
    other.reset(seed=7)
    for loader in (env, other):
        loader.load_state(pickle.loads(pickle.dumps(state)))
        assert [loader.step(actions(e1=RAISE)).states[1][2] for _ in range(2)] == expected
    other = make(num_cpus=1, asynchronous="restart")
    for _ in range(2):  # a state without seeds of restarts changes none
        env.reset(seed=7)
        env.load_state(other.save_state())
        drawn = env.step(actions(e1=RAISE)).states[1][2]
        expected.append(drawn)
    assert expected[-2] == expected[-1]


def test_episodes_after_restarts_are_counted_although_the_done_policy_starts_none(make: MakeEnv) -> None:
    env = make(asynchronous="continue", on_failure="restart")
    for _ in range(3):
        env.step(actions(e1=RAISE))
    assert env.engine.table.stats.summary().num_episodes == 3
    env.rollout(lambda states: [RAISE if state[0] == 1 else GO_ON for state in states], 2, progress=False)
    assert env.engine.table.stats.summary().num_episodes == 5


def test_failure_is_raised_after_max_restarts(make: MakeEnv, tmp_path: Path) -> None:
    env = make(max_restarts=2, **RECOVERING)
    for _ in range(2):
        env.step(actions(e1=RAISE))
    with pytest.raises(ZeroDivisionError) as caught:
        env.step(actions(e1=RAISE))
    assert caught.value.partial.env_ids.tolist() == [0, 2, 3]  # type: ignore[attr-defined]
    assert births(tmp_path) == [1, 3, 1, 1]
    assert steps(env.step(actions()).states) == [4, 2, 4, 4]  # the env also counts the step in which it fails
    (tmp_path / "barren-2").touch()
    with pytest.raises(RuntimeError, match="cannot be born"):
        env.step(actions(e2=RAISE))
    assert births(tmp_path) == [1, 3, 3, 1]


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


@in_modes(*IN_WORKERS)
def test_saved_env_that_was_rebuilt_but_not_yet_reset_needs_a_reset(env: ParallelEnv) -> None:
    env.step([EXIT], id=[0])  # env 1 has the same worker
    state = env.save_state()
    assert env.load_state(state) == (1,)
    with pytest.raises(ResetNeededError, match="env 1 has"):
        env.step(actions())


@in_modes(THREADS)
def test_late_reset_of_a_replaced_thread_changes_no_state(make: MakeEnv, tmp_path: Path) -> None:
    class Brief(Frail):
        def step(self, action: Any) -> Any:
            return *super().step(action)[:3], True, {}

    env = ParallelEnv(
        [partial(Brief, number, str(tmp_path)) for number in range(2)],
        THREADS,
        "restart",
        num_cpus=2,
        timeout=0.3,
        copy=False,
    )
    with env:
        env.reset(seed=3)
        Path(tmp_path, "lame-0").touch()  # its next reset waits, once
        with pytest.raises(WorkerTimeoutError):
            env.step([GO_ON, GO_ON])
        (late,) = [thread for thread in threading.enumerate() if thread.name == "parallelenv-0"]
        env.restart(0)
        states = env.reset(seed=4)
        before = states.copy()
        (tmp_path / "go").touch()
        late.join(30)
        assert states.tolist() == before.tolist()


# ---------------------------------------------------------------- restart


def test_restart_waits_for_a_step_of_a_neighbour(make: MakeEnv, tmp_path: Path) -> None:
    env = make(num_cpus=1)
    with when_begun(tmp_path, 1, (tmp_path / "go").touch):
        env.send([WAIT], [1])
        assert env.restart(0) == (0,)
    assert steps(env.recv().states) == [1]
    assert births(tmp_path) == [2, 1, 1, 1]


def test_restart_replaces_no_worker_that_has_finished_and_keeps_the_results(
    make: MakeEnv, tmp_path: Path, mode: str
) -> None:
    env = make()
    (tmp_path / "go").touch()  # so that the steps only leave their marks
    env.send([WAIT] * NUM_ENVS)
    while mode != ORACLE and not all((tmp_path / f"began-{env_id}").exists() for env_id in range(NUM_ENVS)):
        time.sleep(0.01)
    time.sleep(0.3)  # the replies follow the marks
    assert env.restart(0) == (0,)
    assert sorted(drain(env)) == [1, 2, 3]
    assert births(tmp_path) == [2, 1, 1, 1]


@in_modes(*IN_WORKERS)
def test_new_worker_gets_env_instances_as_they_were_at_the_start(make_env: MakeEnv) -> None:
    instances = [Fragile(number) for number in range(2)]
    env = make_env(instances, num_cpus=1)
    instances[0].steps = 99
    kept = weakref.ref(instances.pop())
    gc.collect()
    assert kept() is None
    kill_worker_of(env, 0)
    with pytest.raises(WorkerDiedError):
        env.get_env_attr("steps")
    assert env.restart() == (0, 1)
    assert env.get_env_attr("steps") == [0, 0]


@in_modes(*IN_WORKERS)
def test_caller_keeps_no_pickles_of_env_fns(make_env: MakeEnv) -> None:
    env_fns = [partial(Fragile, number, str(number) * 2**20) for number in range(4)]
    tracemalloc.start()
    env = make_env(env_fns, num_cpus=2)
    size, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert env.reset().shape == (4, 2)
    assert size < 2**20


@in_modes(*IN_BACKGROUND)
def test_restart_also_rebuilds_a_neighbour_that_times_out(make: MakeEnv, tmp_path: Path) -> None:
    env = make(num_cpus=1, timeout=0.5)
    env.send([WAIT], [1])
    assert set(env.restart(0)) >= {0, 1}
    assert steps(env.reset([0, 1])) == [0, 0]
    assert births(tmp_path)[:2] == [2, 2]


# ---------------------------------------------------------------- dead workers


@in_modes(*IN_WORKERS)
def test_worker_died_error_names_only_envs_of_the_call_and_mentions_others_only_if_all_continue(make: MakeEnv) -> None:
    env = make()
    env.send([EXIT], [0])
    env.send([GO_ON], [1])
    named = []
    for _ in range(2):
        with pytest.raises(WorkerDiedError) as caught:
            env.recv(max_envs=1)
        named.append(caught.value.env_ids)
    assert named == [(0,), (1,)]
    env.close()  # the cluster of the tests has four cores

    def dies(env: ParallelEnv, *arguments: Any) -> bool:
        """Return whether the error of a step says so."""
        with pytest.raises(WorkerDiedError, match="is dead") as caught:
            env.step(*arguments)
        return "All other envs continue" in str(caught.value)

    assert not dies(make(num_cpus=1), [EXIT, GO_ON, GO_ON, GO_ON])
    env = make()
    assert dies(env, [EXIT, GO_ON, GO_ON, GO_ON])
    assert not dies(env, [EXIT, GO_ON], [2, 3])
    env.restart()
    env.reset()
    with pytest.raises(BaseExceptionGroup, match="4 envs failed") as both:  # the death of one is noticed first
        env.step([EXIT, GO_ON, EXIT, GO_ON])
    assert not any("All other envs continue" in str(error) for error in both.value.exceptions)
    assert not dies(env, [GO_ON, GO_ON], [0, 1])


@in_modes(*IN_WORKERS)
def test_envs_of_a_dead_worker_are_left_out_of_the_saved_state(make: MakeEnv) -> None:
    env = make()
    kill_worker_of(env, 0)
    for _ in range(2):  # the first call notices the death
        state = env.save_state()
        assert state.unsaved == (0, 1)
    env.restart([0, 1])
    assert env.load_state(state) == (0, 1)
    assert steps(env.step([GO_ON] * 2, [2, 3]).states) == [1, 1]


def test_env_that_raises_worker_died_error_itself_is_usable(make: MakeEnv) -> None:
    env = make(num_cpus=1)
    with pytest.raises(WorkerDiedError, match="of this env's own"):
        env.customized_method("fail_as_if_dead", id=[1])
    assert steps(env.step(actions()).states) == [1] * 4


@in_modes(*IN_WORKERS)
def test_refused_reset_drops_no_step_in_flight(make: MakeEnv) -> None:
    env = make()
    kill_worker_of(env, 0)
    with pytest.raises(WorkerDiedError):
        env.get_env_attr("number", 0)
    env.send([GO_ON], [3])
    with pytest.raises(WorkerDiedError):
        env.reset()
    assert steps(env.recv().states) == [1]
    assert steps(env.step([GO_ON] * 2, [2, 3]).states) == [1, 2]


# ---------------------------------------------------------------- interrupts


def interrupt_the_rebuild(env: ParallelEnv, folder: Path, call: Callable[[], Any]) -> None:
    """Make a call that rebuilds env 1, and interrupt it in the constructor."""
    (folder / "slow-1").touch()
    (folder / "go").unlink(missing_ok=True)
    with when_begun(folder, 1, interrupt), pytest.raises(KeyboardInterrupt):
        call()
    (folder / "go").touch()


def test_reset_is_needed_after_ctrl_c_in_a_restart(make: MakeEnv, tmp_path: Path, mode: str) -> None:
    env = make(num_cpus=1)
    interrupt_the_rebuild(env, tmp_path, lambda: env.restart([0, 1]))
    with pytest.raises(ResetNeededError, match=r"envs \[0, 1\]"):
        env.step(actions())
    assert steps(env.step([GO_ON] * 2, [2, 3]).states) == [1, 1]
    if mode == ORACLE:  # the interrupted rebuild cannot be resumed
        with pytest.raises(InvalidEnvError, match=r"could not be rebuilt. Try restart\(\) again"):
            env.reset([0, 1])
        assert env.restart(1) == (1,)
    assert steps(env.reset([0, 1])) == [0, 0]
    assert steps(env.step(actions()).states) == [1, 1, 2, 2]
    if mode in IN_WORKERS:
        kill_worker_of(env, 0)
        with pytest.raises(WorkerDiedError):
            env.get_env_attr("number")
        interrupt_the_rebuild(env, tmp_path, lambda: env.restart(0))
        with pytest.raises(ResetNeededError, match=r"envs \[0, 1, 2, 3\]"):
            env.step(actions())
        assert steps(env.reset()) == [0] * 4
        assert births(tmp_path) == [3, 3, 2, 2]


def test_results_can_be_received_after_ctrl_c_during_a_rebuild(make: MakeEnv, tmp_path: Path, mode: str) -> None:
    env = make(num_cpus=1, timeout=5.0, **RECOVERING)
    env.step(actions())
    interrupt_the_rebuild(env, tmp_path, lambda: env.step(actions(e1=RAISE)))
    result = env.recv(min_envs=4)
    assert steps(result.states) == [2, 0, 2, 2]
    assert result.truncated.tolist() == [False, True, False, False]
    assert isinstance(result.infos[1]["failure"], ZeroDivisionError)
    assert not any("failure" in info for info in result.infos[[0, 2, 3]])
    # In the oracle the interrupt aborted the constructor.
    assert births(tmp_path) == [1, 3 if mode == ORACLE else 2, 1, 1]


# ---------------------------------------------------------------- garbage collection
#
# An exception holds frames, and numpy's arrays of objects hide it from garbage collection. Each of these functions
# makes an env, lets it fail, and keeps the error or the result in its variables. `conftest` looks for workers left.


def keep_failures_of_infos(make: MakeEnv, folder: Path, deed: int = RAISE) -> ParallelEnv:
    """Env 1 uses up its restarts, and then env 0 fails."""
    env = make(frail(folder), max_restarts=1, **RECOVERING)
    env.reset()
    result = env.step(actions(e1=RAISE))
    assert "failure" in result.infos[1]
    try:
        result = env.step(actions(e0=deed))
    except WorkerDiedError as error:  # env 1 has lost the same worker
        result = error.partial  # type: ignore[attr-defined]
    assert "failure" in result.infos[0]
    return env


def keep_a_failure(make: MakeEnv, folder: Path, call: Callable[[ParallelEnv], Any]) -> ParallelEnv:
    """Env 0 fails, while env 3 is in the middle of its step if that is possible."""
    env = make(frail(folder))
    env.reset()
    env.send([RAISE, GO_ON if env.para_mode == ORACLE else WAIT], [0, 3])
    call(env)
    (folder / "go").touch()
    return env


def let_it_arrive(env: ParallelEnv) -> None:
    env.get_env_attr("number", [0])


def receive_it_and_fail_again(env: ParallelEnv) -> None:
    with pytest.raises(ZeroDivisionError):
        env.recv()
    with pytest.raises(ZeroDivisionError):
        env.step([RAISE], [0])


def keep_an_interrupt(make: MakeEnv, folder: Path, **options: Any) -> ParallelEnv:
    env = make([partial(Interrupter, number) for number in range(2)], **options)
    env.reset()
    for _ in range(3):
        env.step([0, 0])
    with pytest.raises(KeyboardInterrupt):
        env.step([os.getpid(), 0])
    return env


FAILURES = {
    "in infos": keep_failures_of_infos,
    "in flight": partial(keep_a_failure, call=let_it_arrive),
    "raised": partial(keep_a_failure, call=receive_it_and_fail_again),
    "interrupt": keep_an_interrupt,
}
IN_PROCESSES = {
    "of a death": partial(keep_failures_of_infos, deed=EXIT),
    "interrupt of caller_steps": partial(keep_an_interrupt, caller_steps=True),
}


@pytest.mark.parametrize(
    ("mode", "failure"), [*itertools.product(LOCAL, FAILURES), *itertools.product([PROCESSES], IN_PROCESSES)]
)
def test_failure_does_not_keep_the_env_alive(mode: str, tmp_path: Path, failure: str) -> None:
    fail: Any = {**FAILURES, **IN_PROCESSES}[failure]
    kept = weakref.ref(fail(partial(ParallelEnv, para_mode=mode, num_cpus=2), tmp_path).engine)
    gc.collect()
    assert kept() is None
