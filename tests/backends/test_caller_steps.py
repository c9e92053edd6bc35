"""`caller_steps=True`: the caller is one of the workers. The whole contract, and more tests."""

from __future__ import annotations

import os
import signal
from functools import partial
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from parallelenv import ParallelEnv
from parallelenv.errors import EnvBusyError, EnvInterruptedError, WorkerDiedError, WorkerStartError
from parallelenv.testing import BackendContract
from parallelenv.testing.contract import NUM_ENVS, Make, drain, five_env_fns
from parallelenv.testing.envs import Counter, Sleeper, SteppedEnv

HERE = os.getpid()
INTERRUPT = 4  # an action


class TestCallerSteps(BackendContract):
    """The contract with two workers, the default: envs 0, 1 and 2 live in a process, envs 3 and 4 in the caller."""

    para_mode = "subproc"
    backend_options = {"caller_steps": True}  # noqa: RUF012 (a `Mapping`, as in the suite)

    def test_death_of_worker_raises_worker_died_error(self, make: Make) -> None:
        """The suite kills the worker of env 4, which would be this process."""
        env = make(five_env_fns(Sleeper))
        env.reset()
        os.kill(env.customized_method("process", id=0)[0], signal.SIGKILL)
        with pytest.raises(WorkerDiedError, match="env") as caught:
            env.step([0] * NUM_ENVS)
        assert caught.value.env_ids == (0, 1, 2)
        assert caught.value.partial.states[:, :2].tolist() == [[3, 1], [4, 1]]  # type: ignore[attr-defined]
        assert env.restart(0) == (0, 1, 2)
        env.reset()
        assert env.step([0] * NUM_ENVS).states[:, :2].tolist() == [[number, 1] for number in range(NUM_ENVS)]

    # The suite assumes that the env that interrupts, here one of the worker's, is the one interrupted: see below.
    test_envs_are_usable_after_an_interrupt = None  # type: ignore[assignment]


class Home(Counter):
    """Knows in which process it was made, and interrupts that process on request."""

    def prepare(self) -> None:
        super().prepare()
        self.pid = os.getpid()

    def step(self, action: int) -> SteppedEnv:
        if action == INTERRUPT:
            signal.raise_signal(signal.SIGINT)  # workers ignore it
        return super().step(action)


HOMES: list[Any] = [partial(Home, number, 50) for number in range(NUM_ENVS)]


def make(envs: Any = HOMES, num_cpus: int = 2) -> ParallelEnv:
    return ParallelEnv(envs, "subproc", "continue", num_cpus, caller_steps=True)


@pytest.mark.parametrize(("num_cpus", "ours"), [(1, [0, 1, 2, 3, 4]), (2, [3, 4]), (3, [4]), (5, [4])])
def test_caller_steps_the_last_and_smallest_share(num_cpus: int, ours: list[int]) -> None:
    with make(num_cpus=num_cpus) as env:
        pids = env.get_env_attr("pid")
        assert [env_id for env_id, pid in enumerate(pids) if pid == HERE] == ours
        assert len(set(pids)) == env.num_workers == num_cpus
        assert {child.pid for child in psutil.Process().children(recursive=True)} >= {*pids} - {HERE}


@pytest.mark.parametrize("num_cpus", [1, 2])
def test_env_instances_are_copied_in_caller_and_workers(num_cpus: int) -> None:
    originals = [Home(number, 50) for number in range(NUM_ENVS)]
    for original in originals:
        original.reset(seed=original.number)
        original.step(1)
    with make(originals, num_cpus=num_cpus) as env:
        originals[4].count = 7
        assert env.get_env_attr("count") == [1] * NUM_ENVS
        env.reset()
        env.step([1] * NUM_ENVS)
        assert env.get_env_attr("episode") == [2] * NUM_ENVS
        assert [original.episode for original in originals] == [1] * NUM_ENVS
        env.restart([0, 4])  # in their original state
        assert env.get_env_attr("episode") == [1, 2, 2, 2, 1]
        assert env.get_env_attr("count", [0, 4]) == [1, 1]


def test_daemonic_process_can_only_step_its_own_share(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("multiprocessing.current_process", lambda: SimpleNamespace(daemon=True))
    with make(num_cpus=1) as env:
        env.reset()
        assert env.step([1] * NUM_ENVS).states[:, 1].tolist() == [1] * NUM_ENVS
    with pytest.raises(WorkerStartError, match="daemonic process of multiprocessing, which cannot start processes"):
        make(num_cpus=2)


@pytest.mark.parametrize("env_ids", [[0, 2], [4], [1, 3], [0, 1, 2, 3, 4]], ids=str)
def test_restart_rebuilds_envs_in_the_same_process(env_ids: list[int]) -> None:
    with make() as env:
        pids = env.get_env_attr("pid")
        env.reset()
        env.set_env_attr("length", 9)
        assert env.restart(env_ids) == tuple(env_ids)
        assert env.get_env_attr("length") == [50 if env_id in env_ids else 9 for env_id in range(NUM_ENVS)]
        assert env.get_env_attr("pid") == pids
        env.reset()
        env.send([1, 1], [4, 0])
        assert env.restart(4) == (4,)  # even while it is busy
        assert sorted(drain(env)) == [0]
        env.reset(4)
        assert env.step([1] * NUM_ENVS).states[:, 1].tolist() == [2, 1, 1, 1, 1]


@pytest.mark.parametrize("interrupted", [3, 4])  # the caller's first and last
def test_recv_returns_other_envs_after_ctrl_c_in_env_of_the_caller(interrupted: int) -> None:
    others = [env_id for env_id in range(NUM_ENVS) if env_id != interrupted]
    with make() as env:
        env.reset()
        with pytest.raises(KeyboardInterrupt):
            env.step([INTERRUPT if env_id == interrupted else 1 for env_id in range(NUM_ENVS)])
        with pytest.raises(EnvBusyError, match=r"recv\(min_envs="):
            env.step([1] * NUM_ENVS)
        with pytest.raises(EnvInterruptedError, match=f"env {interrupted} was interrupted in .* step") as caught:
            env.recv(min_envs=NUM_ENVS)
        found: Any = getattr(caught.value, "partial")  # noqa: B009
        assert sorted(found.env_ids.tolist()) == others
        assert found.states[:, 1].tolist() == [1] * 4
        env.reset(interrupted)
        assert env.step([1] * NUM_ENVS).states[others, 1].tolist() == [2] * 4
