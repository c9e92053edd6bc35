"""Workers do not inherit the environment variables of an MPI launcher."""

from __future__ import annotations

import os
import threading
from functools import partial
from typing import Any

import pytest
from conftest import MakeEnv

from parallelenv.testing.envs import Counter

OF_LAUNCHERS = {
    "OMPI_COMM_WORLD_RANK": "0",
    "OMPI_MCA_orte_hnp_uri": "1.0;tcp://10.0.0.1:1",
    "PMI_RANK": "0",
    "PMI_FD": "7",
    "PMIX_NAMESPACE": "job",
    "PRTE_LAUNCHED": "1",
    "HYDI_CONTROL_FD": "8",
    "MPI_LOCALRANKID": "0",
    "MV2_COMM_WORLD_RANK": "0",
    "PALS_RANKID": "0",
}
OTHERS = {"OMP_NUM_THREADS": "3", "MPICH_VERSION": "4", "SLURM_CPUS_PER_TASK": "2", "MY_PMI_RANK": "5"}
ALL = {**OF_LAUNCHERS, **OTHERS}


class Reporter(Counter):
    """Reports the variables it found when it was made, and those that C code sees and passes on."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.found = {name: os.environ[name] for name in ALL if name in os.environ}

    def of_child(self) -> list[str]:
        return [line.partition("=")[0] for line in os.popen("env")]


REPORTERS = [partial(Reporter, number) for number in range(2)]


def without_test() -> dict[str, str]:
    """Return the environment without the variables that pytest keeps changing."""
    return {name: value for name, value in os.environ.items() if name != "PYTEST_CURRENT_TEST"}


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Set the variables of a launcher in the caller; return its environment."""
    for name, value in ALL.items():
        monkeypatch.setenv(name, value)
    return without_test()


def assert_hidden(env: Any) -> None:
    assert env.get_env_attr("found") == [OTHERS] * 2
    for names in env.customized_method("of_child"):
        assert ALL.keys() & names == OTHERS.keys()


@pytest.mark.parametrize("mode", ["subproc"], indirect=True)
@pytest.mark.parametrize("start_method", ["forkserver", "spawn", "fork"])
def test_workers_do_not_inherit_variables_of_the_mpi_launcher(
    start_method: str, launched: dict[str, str], make_env: MakeEnv
) -> None:
    missed: list[str] = []
    is_over = threading.Event()

    def watch() -> None:
        while not is_over.is_set():
            missed.extend(name for name in ALL if name not in os.environ)

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        env = make_env(REPORTERS, num_cpus=2, start_method=start_method)
    finally:
        is_over.set()
        watcher.join()
    assert_hidden(env)
    assert missed == []  # not even while they started
    assert env.restart() == (0, 1)
    assert_hidden(env)
    env.close()
    assert without_test() == launched


@pytest.mark.parametrize("mode", ["subproc"], indirect=True)
def test_envs_of_the_caller_see_variables_of_the_mpi_launcher(launched: dict[str, str], make_env: MakeEnv) -> None:
    env = make_env(REPORTERS, num_cpus=2, caller_steps=True)
    assert env.get_env_attr("found") == [OTHERS, ALL]
    assert without_test() == launched


@pytest.mark.parametrize("mode", ["ray", "ray-subproc"], indirect=True)
def test_ray_actors_do_not_inherit_variables_of_the_mpi_launcher(make_env: MakeEnv) -> None:
    # As if Ray had been started by the launched process: its workers inherit what is set there.
    env = make_env(REPORTERS, num_cpus=2, ray_options={"runtime_env": {"env_vars": ALL}})
    assert_hidden(env)
