"""Rebuilding of envs: effects on other envs, and interrupts. In every mode."""

from __future__ import annotations

import gc
import os
import signal
import threading
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from conftest import MakeEnv, needs_ray
from fragile import CAN_DIE, EXIT, GO_ON, IN_CALLER, RAISE, WAIT, Fragile, interrupt, when_begun

from parallelenv import ParallelEnv
from parallelenv.engine import recovery
from parallelenv.errors import InvalidEnvError, ResetNeededError, WorkerDiedError
from parallelenv.testing.envs import Interrupter

RECOVERING = {"asynchronous": "restart", "on_failure": "restart"}


class Slow(Fragile):
    """Is slow to construct on request, and counts how often it was made."""

    def __init__(self, number: int, folder: str) -> None:
        super().__init__(number, folder)
        with Path(folder, f"lives-{number}").open("a+") as file:
            file.write("x")
            self.life = file.tell()
        if Path(folder, f"slow-{number}").exists():
            self.wait()

    def fail_as_if_dead(self) -> None:
        raise WorkerDiedError("a worker of this env's own", (0,))


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """A folder of files that control the envs. Waiting threads end with the test."""
    yield tmp_path
    (tmp_path / "go").touch()


@pytest.fixture(autouse=True)
def _no_delay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recovery, "_FIRST_DELAY", 0.0)


def slow(folder: Path) -> list[Any]:
    return [partial(Slow, number, str(folder)) for number in range(4)]


def lives(env: ParallelEnv) -> list[int]:
    found: list[int] = env.get_env_attr("life")
    return found


def kill_worker_of(env: ParallelEnv, env_id: int) -> None:
    os.kill(env.customized_method("pid", id=[env_id])[0], signal.SIGKILL)


# ---------------------------------------------------------------- neighbours


def test_restart_waits_for_a_step_of_a_neighbour(make_env: MakeEnv, folder: Path) -> None:
    env = make_env(slow(folder), num_cpus=1)
    env.reset()
    env.send([WAIT], [1])
    with when_begun(folder, 1, (folder / "go").touch):
        assert env.restart(0) == (0,)
    assert env.recv().states.tolist() == [[1, 1]]
    assert lives(env) == [2, 1, 1, 1]


def test_failed_env_is_rebuilt_without_disturbing_a_busy_neighbour(make_env: MakeEnv, folder: Path, mode: str) -> None:
    env = make_env(slow(folder), num_cpus=1, **RECOVERING)
    env.reset()
    env.send([RAISE], [0])
    env.send([WAIT], [1])
    with when_begun(folder, 1, (folder / "go").touch):
        first = env.recv(max_envs=1)
    assert first.env_ids.tolist() == [0]
    assert isinstance(first.infos[0]["failure"], ZeroDivisionError)
    second = env.recv()
    assert second.states.tolist() == [[1, 1]]
    assert not second.dones[0]
    assert lives(env) == [2, 1, 1, 1]


def test_restart_also_rebuilds_a_neighbour_that_times_out(make_env: MakeEnv, folder: Path, mode: str) -> None:
    if mode in IN_CALLER:
        pytest.skip("a call in the caller's own thread has no timeout")
    env = make_env(slow(folder), num_cpus=1, timeout=0.5)
    env.reset()
    env.send([WAIT], [1])
    assert set(env.restart(0)) >= {0, 1}
    assert env.reset([0, 1])[:, 1].tolist() == [0, 0]
    assert lives(env)[:2] == [2, 2]


def test_worker_died_error_names_only_envs_of_the_call(make_env: MakeEnv, folder: Path, mode: str) -> None:
    if mode not in CAN_DIE:
        pytest.skip("its workers are not processes")
    env = make_env(slow(folder), num_cpus=2)
    env.reset()
    env.send([EXIT], [0])
    env.send([GO_ON], [1])
    named = []
    for _ in range(2):
        with pytest.raises(WorkerDiedError) as caught:
            env.recv(max_envs=1)
        named.append(caught.value.env_ids)
    assert named == [(0,), (1,)]


def test_failure_info_of_a_rebuilt_env_names_only_that_env(make_env: MakeEnv, folder: Path, mode: str) -> None:
    if mode not in CAN_DIE:
        pytest.skip("its workers are not processes")
    env = make_env(slow(folder), num_cpus=2, **RECOVERING)
    env.reset()
    infos = env.step([EXIT, GO_ON, GO_ON, GO_ON]).infos
    assert [info["failure"].env_ids for info in infos if "failure" in info] == [(0,), (1,)]
    env.step([EXIT], [2])
    failure = env.step([GO_ON] * 4).infos[3]["failure"]
    assert isinstance(failure, WorkerDiedError)
    assert failure.env_ids == (3,)


def test_env_that_raises_worker_died_error_itself_is_usable(make_env: MakeEnv, folder: Path) -> None:
    env = make_env(slow(folder), num_cpus=1)
    env.reset()
    with pytest.raises(WorkerDiedError, match="of this env's own"):
        env.customized_method("fail_as_if_dead", id=[1])
    assert env.step([GO_ON] * 4).states[:, 1].tolist() == [1] * 4


def test_refused_reset_drops_no_step_in_flight(make_env: MakeEnv, folder: Path, mode: str) -> None:
    if mode not in CAN_DIE:
        pytest.skip("its workers are not processes")
    env = make_env(slow(folder), num_cpus=2)
    env.reset()
    kill_worker_of(env, 0)
    with pytest.raises(WorkerDiedError):
        env.get_env_attr("number", 0)
    env.send([GO_ON], [3])
    with pytest.raises(WorkerDiedError):
        env.reset()
    assert env.recv().states.tolist() == [[3, 1]]
    assert env.step([GO_ON] * 2, [2, 3]).states[:, 1].tolist() == [1, 2]


# ---------------------------------------------------------------- interrupts


def test_reset_is_needed_after_ctrl_c_in_restart(make_env: MakeEnv, folder: Path, mode: str) -> None:
    env = make_env(slow(folder), num_cpus=1)
    env.reset()
    (folder / "slow-1").touch()
    with when_begun(folder, 1, interrupt), pytest.raises(KeyboardInterrupt):
        env.restart([0, 1])
    (folder / "go").touch()
    with pytest.raises(ResetNeededError, match=r"envs \[0, 1\]"):
        env.step([GO_ON] * 4)
    assert env.step([GO_ON] * 2, [2, 3]).states[:, 1].tolist() == [1, 1]
    if mode in IN_CALLER:  # the interrupted rebuild cannot be resumed
        with pytest.raises(InvalidEnvError, match=r"could not be rebuilt. Try restart\(\) again"):
            env.reset([0, 1])
        assert env.restart(1) == (1,)
    assert env.reset([0, 1])[:, 1].tolist() == [0, 0]
    assert env.step([GO_ON] * 4).states[:, 1].tolist() == [1, 1, 2, 2]


def test_reset_is_needed_after_ctrl_c_in_restart_of_a_dead_worker(make_env: MakeEnv, folder: Path, mode: str) -> None:
    if mode not in CAN_DIE:
        pytest.skip("its workers are not processes")
    env = make_env(slow(folder), num_cpus=1)
    env.reset()
    kill_worker_of(env, 0)
    with pytest.raises(WorkerDiedError):
        env.get_env_attr("number")
    (folder / "slow-1").touch()
    with when_begun(folder, 1, interrupt), pytest.raises(KeyboardInterrupt):
        env.restart(0)
    (folder / "go").touch()
    with pytest.raises(ResetNeededError, match=r"envs \[0, 1, 2, 3\]"):
        env.step([GO_ON] * 4)
    assert env.reset()[:, 1].tolist() == [0] * 4
    assert env.step([GO_ON] * 4).states[:, 1].tolist() == [1] * 4
    assert lives(env) == [2] * 4


def test_results_can_be_received_after_ctrl_c_during_a_rebuild(make_env: MakeEnv, folder: Path, mode: str) -> None:
    env = make_env(slow(folder), num_cpus=1, timeout=5.0, **RECOVERING)
    env.reset()
    env.step([GO_ON] * 4)
    (folder / "slow-1").touch()
    with when_begun(folder, 1, interrupt), pytest.raises(KeyboardInterrupt):
        env.step([GO_ON, RAISE, GO_ON, GO_ON])
    (folder / "go").touch()
    result = env.recv(min_envs=4)
    assert result.states[:, 1].tolist() == [2, 0, 2, 2]
    assert result.truncated.tolist() == [False, True, False, False]
    assert isinstance(result.infos[1]["failure"], ZeroDivisionError)
    assert not any("failure" in info for info in result.infos[[0, 2, 3]])
    births = 3 if mode in IN_CALLER else 2  # there the interrupt aborted the constructor
    assert lives(env) == [1, births, 1, 1]


# ---------------------------------------------------------------- garbage collection


def make_fail_and_drop(make: Callable[..., ParallelEnv], folder: Path, deed: int) -> weakref.ref[ParallelEnv]:
    """Let env 1 use up its restarts and env 0 fail, keep their results in variables, and drop the env."""
    env = make(slow(folder), num_cpus=2, max_restarts=1, **RECOVERING)
    env.reset()
    result = env.step([GO_ON, RAISE, GO_ON, GO_ON])
    assert "failure" in result.infos[1]
    try:
        result = env.step([deed, GO_ON, GO_ON, GO_ON])
    except WorkerDiedError as error:  # env 1 has lost the same worker
        result = error.partial  # type: ignore[attr-defined]
    assert "failure" in result.infos[0]
    return weakref.ref(env)


@pytest.mark.parametrize("deed", [RAISE, EXIT])
def test_failures_do_not_keep_the_env_alive(mode: str, folder: Path, deed: int) -> None:
    """An exception in an info holds frames, and numpy's arrays of objects hide it from garbage collection."""
    if deed == EXIT and mode not in CAN_DIE:
        pytest.skip("its workers are not processes")
    if needs_ray(mode):
        pytest.skip("the traceback is rebuilt by the same code as in subproc")
    kept = make_fail_and_drop(partial(ParallelEnv, para_mode=mode), folder, deed)
    gc.collect()
    assert kept() is None


def test_unfetched_failure_does_not_keep_the_env_alive(mode: str, folder: Path) -> None:
    if needs_ray(mode):
        pytest.skip("the traceback is rebuilt by the same code as in subproc")

    def make_fail_and_drop_in_flight() -> weakref.ref[ParallelEnv]:
        env = ParallelEnv(slow(folder), mode, num_cpus=2)
        env.reset()
        env.send([RAISE], [0])
        env.send([GO_ON if mode in IN_CALLER else WAIT], [3])
        env.get_env_attr("number", [0])  # the failure arrives meanwhile
        threading.Timer(0.0, (folder / "go").touch).start()
        return weakref.ref(env)

    kept = make_fail_and_drop_in_flight()
    gc.collect()
    assert kept() is None


def test_failure_received_before_other_results_does_not_keep_the_env_alive(mode: str, folder: Path) -> None:
    if mode == "dummy" or needs_ray(mode):
        pytest.skip("one result does not arrive before the other, or as in subproc")

    def make_catch_and_drop() -> weakref.ref[ParallelEnv]:
        env = ParallelEnv(slow(folder), mode, num_cpus=2)
        env.reset()
        env.send([RAISE, WAIT], [0, 3])
        with pytest.raises(ZeroDivisionError):
            env.recv()
        threading.Timer(0.0, (folder / "go").touch).start()
        return weakref.ref(env)

    kept = make_catch_and_drop()
    gc.collect()
    assert kept() is None


@pytest.mark.parametrize("options", [{}, {"caller_steps": True}], ids=str)
def test_interrupted_step_does_not_keep_the_engine_alive(mode: str, options: dict[str, Any]) -> None:
    if needs_ray(mode) or (options and mode != "subproc"):
        pytest.skip("as in subproc, or without this option")

    def make_interrupt_and_drop() -> weakref.ref[Any]:
        env = ParallelEnv([partial(Interrupter, number) for number in range(2)], mode, num_cpus=2, **options)
        env.reset()
        for _ in range(3):
            env.step([0, 0])
        with pytest.raises(KeyboardInterrupt):
            env.step([os.getpid(), 0])
        return weakref.ref(env.engine)

    kept = make_interrupt_and_drop()
    gc.collect()
    assert kept() is None  # `conftest` looks for workers that are left


@pytest.mark.parametrize("is_sent", [False, True], ids=["stepped", "sent"])
def test_raised_failure_does_not_keep_the_env_alive(mode: str, folder: Path, is_sent: bool) -> None:
    if needs_ray(mode):
        pytest.skip("the traceback is rebuilt by the same code as in subproc")

    def make_catch_and_drop() -> weakref.ref[ParallelEnv]:
        env = ParallelEnv(slow(folder), mode, num_cpus=2)
        env.reset()
        if is_sent:
            env.send([RAISE], [0])
        with pytest.raises(ZeroDivisionError):
            env.recv() if is_sent else env.step([RAISE], [0])
        return weakref.ref(env)

    kept = make_catch_and_drop()
    gc.collect()
    assert kept() is None
