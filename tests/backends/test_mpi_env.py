"""Workers do not inherit the environment variables of an MPI launcher."""

from __future__ import annotations

import os
import threading
from functools import partial
from typing import Any

import pytest
from conftest import MakeEnv

from parallelenv.testing.envs import Counter

OF_LAUNCHERS = dict.fromkeys(
    (
        *("OMPI_COMM_WORLD_RANK", "OMPI_MCA_orte_hnp_uri", "PMI_RANK", "PMI_FD", "PMIX_NAMESPACE", "PRTE_LAUNCHED"),
        *("HYDI_CONTROL_FD", "MPI_LOCALRANKID", "MV2_COMM_WORLD_RANK", "PALS_RANKID"),
    ),
    "7",
)
OTHERS = {"OMP_NUM_THREADS": "3", "MPICH_VERSION": "4", "SLURM_CPUS_PER_TASK": "2", "MY_PMI_RANK": "5"}
ALL = {**OF_LAUNCHERS, **OTHERS}


class Reporter(Counter):
    """Reports the variables it found when it was made, and those that C code sees and passes on."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.found = {name: os.environ[name] for name in ALL if name in os.environ}

    def of_child(self) -> list[str]:
        with os.popen("env") as lines:
            return [line.partition("=")[0] for line in lines]


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


def assert_found(env: Any, *found: dict[str, str]) -> None:
    assert env.get_env_attr("found") == list(found)
    assert [ALL.keys() & names for names in env.customized_method("of_child")] == [one.keys() for one in found]


@pytest.mark.parametrize("mode", ["subproc"], indirect=True)
@pytest.mark.parametrize(
    ("options", "of_last_env"),
    [
        *[({"start_method": method}, OTHERS) for method in ("forkserver", "spawn", "fork")],
        ({"caller_steps": True}, ALL),  # it is in the caller
    ],
    ids=["forkserver", "spawn", "fork", "caller_steps"],
)
def test_workers_do_not_inherit_variables_of_the_mpi_launcher(
    options: Any, of_last_env: dict[str, str], launched: dict[str, str], make_env: MakeEnv
) -> None:
    missed: list[str] = []
    is_over = threading.Event()

    def watch() -> None:
        while not is_over.is_set():
            missed.extend(name for name in ALL if name not in os.environ)

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        env = make_env(REPORTERS, num_cpus=2, **options)
    finally:
        is_over.set()
        watcher.join()
    assert_found(env, OTHERS, of_last_env)
    assert missed == []  # not even while they started
    assert env.restart() == (0, 1)
    assert_found(env, OTHERS, of_last_env)
    env.close()
    assert without_test() == launched


@pytest.mark.parametrize("mode", ["ray", "ray-subproc"], indirect=True)
def test_ray_actors_do_not_inherit_variables_of_the_mpi_launcher(make_env: MakeEnv) -> None:
    # As if Ray had been started by the launched process: its workers inherit what is set there.
    assert_found(make_env(REPORTERS, num_cpus=2, ray_options={"runtime_env": {"env_vars": ALL}}), OTHERS, OTHERS)
