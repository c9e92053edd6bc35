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
from conftest import MakeEnv
from fragile import EXIT, GO_ON, RAISE, WAIT, Fragile, interrupt, when_begun
from modes import IN_BACKGROUND, IN_WORKERS, LOCAL, ORACLE, PROCESSES, in_modes

from parallelenv import ParallelEnv
from parallelenv.engine import recovery
from parallelenv.errors import InvalidEnvError, ResetNeededError, WorkerDiedError
from parallelenv.testing.envs import Interrupter

Make = Callable[..., ParallelEnv]
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


@pytest.fixture
def make(make_env: MakeEnv, folder: Path, mode: str) -> Make:
    """Make four slow envs, and reset them."""

    def make(num_cpus: int = 1, **options: Any) -> ParallelEnv:
        env = make_env(slow(folder), num_cpus=num_cpus, **options)
        env.reset()
        return env

    return make


def kill_worker_of(env: ParallelEnv, env_id: int) -> None:
    os.kill(env.customized_method("pid", id=[env_id])[0], signal.SIGKILL)


# ---------------------------------------------------------------- neighbours


def test_restart_waits_for_a_step_of_a_neighbour(make: Make, folder: Path) -> None:
    env = make()
    with when_begun(folder, 1, (folder / "go").touch):
        env.send([WAIT], [1])
        assert env.restart(0) == (0,)
    assert env.recv().states.tolist() == [[1, 1]]
    assert lives(env) == [2, 1, 1, 1]


def test_failed_env_is_rebuilt_without_disturbing_a_busy_neighbour(make: Make, folder: Path) -> None:
    env = make(**RECOVERING)
    env.send([RAISE], [0])
    with when_begun(folder, 1, (folder / "go").touch):
        env.send([WAIT], [1])
        first = env.recv(max_envs=1)
    assert first.env_ids.tolist() == [0]
    assert isinstance(first.infos[0]["failure"], ZeroDivisionError)
    second = env.recv()
    assert second.states.tolist() == [[1, 1]]
    assert not second.dones[0]
    assert lives(env) == [2, 1, 1, 1]


@in_modes(*IN_BACKGROUND)
def test_restart_also_rebuilds_a_neighbour_that_times_out(make: Make) -> None:
    env = make(timeout=0.5)
    env.send([WAIT], [1])
    assert set(env.restart(0)) >= {0, 1}
    assert env.reset([0, 1])[:, 1].tolist() == [0, 0]
    assert lives(env)[:2] == [2, 2]


@in_modes(*IN_WORKERS)
def test_worker_died_error_names_only_envs_of_the_call(make: Make) -> None:
    env = make(num_cpus=2)
    env.send([EXIT], [0])
    env.send([GO_ON], [1])
    named = []
    for _ in range(2):
        with pytest.raises(WorkerDiedError) as caught:
            env.recv(max_envs=1)
        named.append(caught.value.env_ids)
    assert named == [(0,), (1,)]


@in_modes(*IN_WORKERS)
def test_worker_died_error_mentions_other_envs_only_if_all_continue(make: Make) -> None:
    go_on = "All other envs continue"
    env = make(num_cpus=1)
    with pytest.raises(WorkerDiedError, match="is dead") as caught:
        env.step([EXIT, GO_ON, GO_ON, GO_ON])
    assert go_on not in str(caught.value)
    env = make(num_cpus=2)
    with pytest.raises(WorkerDiedError, match=go_on):
        env.step([EXIT, GO_ON, GO_ON, GO_ON])
    with pytest.raises(WorkerDiedError, match="is dead") as caught:
        env.step([EXIT, GO_ON], [2, 3])
    assert go_on not in str(caught.value)
    env.restart()
    env.reset()
    with pytest.raises(BaseExceptionGroup, match="4 envs failed") as both:  # the death of one is noticed first
        env.step([EXIT, GO_ON, EXIT, GO_ON])
    assert [go_on in str(error) for error in both.value.exceptions] == [False, False]
    with pytest.raises(WorkerDiedError, match="is dead") as caught:
        env.step([GO_ON, GO_ON], [0, 1])
    assert go_on not in str(caught.value)


def test_env_that_raises_worker_died_error_itself_is_usable(make: Make) -> None:
    env = make()
    with pytest.raises(WorkerDiedError, match="of this env's own"):
        env.customized_method("fail_as_if_dead", id=[1])
    assert env.step([GO_ON] * 4).states[:, 1].tolist() == [1] * 4


@in_modes(*IN_WORKERS)
def test_refused_reset_drops_no_step_in_flight(make: Make) -> None:
    env = make(num_cpus=2)
    kill_worker_of(env, 0)
    with pytest.raises(WorkerDiedError):
        env.get_env_attr("number", 0)
    env.send([GO_ON], [3])
    with pytest.raises(WorkerDiedError):
        env.reset()
    assert env.recv().states.tolist() == [[3, 1]]
    assert env.step([GO_ON] * 2, [2, 3]).states[:, 1].tolist() == [1, 2]


# ---------------------------------------------------------------- interrupts


def test_reset_is_needed_after_ctrl_c_in_restart(make: Make, folder: Path, mode: str) -> None:
    env = make()
    (folder / "slow-1").touch()
    with when_begun(folder, 1, interrupt), pytest.raises(KeyboardInterrupt):
        env.restart([0, 1])
    (folder / "go").touch()
    with pytest.raises(ResetNeededError, match=r"envs \[0, 1\]"):
        env.step([GO_ON] * 4)
    assert env.step([GO_ON] * 2, [2, 3]).states[:, 1].tolist() == [1, 1]
    if mode == ORACLE:  # the interrupted rebuild cannot be resumed
        with pytest.raises(InvalidEnvError, match=r"could not be rebuilt. Try restart\(\) again"):
            env.reset([0, 1])
        assert env.restart(1) == (1,)
    assert env.reset([0, 1])[:, 1].tolist() == [0, 0]
    assert env.step([GO_ON] * 4).states[:, 1].tolist() == [1, 1, 2, 2]


@in_modes(*IN_WORKERS)
def test_reset_is_needed_after_ctrl_c_in_restart_of_a_dead_worker(make: Make, folder: Path) -> None:
    env = make()
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
    assert lives(env) == [2] * 4


def test_results_can_be_received_after_ctrl_c_during_a_rebuild(make: Make, folder: Path, mode: str) -> None:
    env = make(timeout=5.0, **RECOVERING)
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
    births = 3 if mode == ORACLE else 2  # there the interrupt aborted the constructor
    assert lives(env) == [1, births, 1, 1]


# ---------------------------------------------------------------- garbage collection
#
# An exception holds frames, and numpy's arrays of objects hide it from garbage collection. Each of these functions
# makes an env, lets it fail, and keeps the error or the result in its variables. `conftest` looks for workers left.


def keep_failures_of_infos(make: Make, folder: Path, deed: int = RAISE) -> ParallelEnv:
    """Env 1 uses up its restarts, and then env 0 fails."""
    env = make(slow(folder), max_restarts=1, **RECOVERING)
    env.reset()
    result = env.step([GO_ON, RAISE, GO_ON, GO_ON])
    assert "failure" in result.infos[1]
    try:
        result = env.step([deed, GO_ON, GO_ON, GO_ON])
    except WorkerDiedError as error:  # env 1 has lost the same worker
        result = error.partial  # type: ignore[attr-defined]
    assert "failure" in result.infos[0]
    return env


def keep_a_failure_in_flight(make: Make, folder: Path) -> ParallelEnv:
    env = make(slow(folder))
    env.reset()
    env.send([RAISE], [0])
    env.send([GO_ON if env.para_mode == ORACLE else WAIT], [3])
    env.get_env_attr("number", [0])  # the failure arrives in the meantime
    threading.Timer(0.0, (folder / "go").touch).start()
    return env


def keep_a_failure_received_before_others(make: Make, folder: Path) -> ParallelEnv:
    env = make(slow(folder))
    env.reset()
    env.send([RAISE, GO_ON if env.para_mode == ORACLE else WAIT], [0, 3])
    with pytest.raises(ZeroDivisionError):
        env.recv()
    threading.Timer(0.0, (folder / "go").touch).start()
    return env


def keep_a_failure_of_a_step(make: Make, folder: Path) -> ParallelEnv:
    env = make(slow(folder))
    env.reset()
    with pytest.raises(ZeroDivisionError):
        env.step([RAISE], [0])
    return env


def keep_an_interrupt(make: Make, folder: Path, **options: Any) -> ParallelEnv:
    env = make([partial(Interrupter, number) for number in range(2)], **options)
    env.reset()
    for _ in range(3):
        env.step([0, 0])
    with pytest.raises(KeyboardInterrupt):
        env.step([os.getpid(), 0])
    return env


@in_modes(*LOCAL)
@pytest.mark.parametrize(
    ("fail", "only_in"),
    [
        (keep_failures_of_infos, LOCAL),
        (partial(keep_failures_of_infos, deed=EXIT), IN_WORKERS),
        (keep_a_failure_in_flight, LOCAL),
        (keep_a_failure_received_before_others, LOCAL),
        (keep_a_failure_of_a_step, LOCAL),
        (keep_an_interrupt, LOCAL),
        (partial(keep_an_interrupt, caller_steps=True), [PROCESSES]),
    ],
    ids=["in infos", "of a death", "in flight", "received", "raised", "interrupt", "interrupt of caller_steps"],
)
def test_failure_does_not_keep_the_env_alive(mode: str, folder: Path, fail: Any, only_in: Any) -> None:
    if mode not in only_in:
        pytest.skip("its workers cannot do this")
    kept = weakref.ref(fail(partial(ParallelEnv, para_mode=mode, num_cpus=2), folder).engine)
    gc.collect()
    assert kept() is None
