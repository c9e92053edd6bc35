"""What every test gets: the mode under test, envs that are closed again, and a look for leaks."""

from __future__ import annotations

import contextlib
import gc
import logging
import multiprocessing
import os
import signal
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from multiprocessing import forkserver, resource_tracker
from pathlib import Path
from typing import Any

import hypothesis
import psutil
import pytest

from parallelenv import ParallelEnv, get_worker_info, registry
from parallelenv.errors import MissingDependencyError
from parallelenv.task_pool import TaskPool

pytest.register_assert_rewrite("parallelenv.testing")  # before any test imports a part of it
# No example has a deadline: one that has waited for a core is not wrong.
hypothesis.settings.register_profile("shared machine", deadline=None)
hypothesis.settings.load_profile("shared machine")
MakeEnv = Callable[..., ParallelEnv]
MakePool = Callable[..., TaskPool]

PATIENCE = 2.0  # seconds that what is ending gets to be gone
_RAY_DESCRIPTORS = 8  # connections that Ray opens and closes when it likes

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as in a job in the background: no test could be interrupted
    signal.signal(signal.SIGINT, signal.default_int_handler)


# -------------------------------------------------------------------- modes


_ADAPTERS = {"test_gymnasium_steps.py", "test_sb3.py", "test_tianshou.py"}
# Seconds for each test, and the same code as elsewhere: `ray` is reached as `subproc` is, and has the same backend and
# pool as `ray-subproc`; bad input is refused before anything is sent. With these, CI would take half an hour;
# `make test-ray` runs them.
_LONG_IN = {
    "ray": {
        *_ADAPTERS,
        "test_bad_input.py",
        "test_calls_per_env.py",
        "test_collector.py",
        "test_collector_set.py",
        "test_contract.py",
        "test_exhausted.py",
        "test_familiar.py",
        "test_faults.py",
        "test_gymnasium.py",
        "test_machine.py",
        "test_modes.py",
        "test_output.py",
        "test_portrait.py",
        "test_profile.py",
        "test_rebuilding.py",
        "test_recovery.py",
        "test_render.py",
        "test_rollout.py",
        "test_sampling.py",
        "test_saving.py",
        "test_score.py",
        "test_shown.py",
        "test_spaces_given.py",
        "test_task_worlds.py",
        "test_tasks.py",
        "test_tasks_under_way.py",
        "test_traffic.py",
    },
    "ray-subproc": {
        *_ADAPTERS,
        "test_bad_input.py",
        "test_collector.py",
        "test_collector_set.py",
        "test_contract.py",
        "test_exhausted.py",
        "test_faults.py",
        "test_rollout.py",
        "test_saving.py",
        "test_score.py",
        "test_tasks_under_way.py",
        "test_task_worlds.py",
        "test_tasks.py",
    },
}


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what is long in the Ray modes only."""
    for item in items:
        if isinstance(item, pytest.Function) and hasattr(item, "callspec"):
            mode = str(item.callspec.params.get("mode"))
            if item.path.name in _LONG_IN.get(mode, set()):
                item.add_marker("long")


@pytest.fixture(scope="session")
def ray_cluster() -> Iterator[None]:
    """Ray, started once; envs of the Ray modes join it."""
    import ray

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        ray.init(num_cpus=4, include_dashboard=False, logging_level=logging.ERROR)
    yield
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        ray.shutdown()


def needs_ray(word: str) -> bool:
    """Whether a mode starts Ray actors."""
    return word.startswith("ray")


def require_mode(word: str, request: pytest.FixtureRequest) -> str:
    """Return a mode's word when it is ready to be used; skip the test where its package is missing."""
    try:
        registry.load_backend(word)
    except MissingDependencyError as error:
        if os.environ.get("PARALLELENV_REQUIRE_RAY") == "1":
            pytest.fail(f"PARALLELENV_REQUIRE_RAY=1, but: {error}")
        pytest.skip(str(error))
    if needs_ray(word):
        request.getfixturevalue("ray_cluster")
    return word


@pytest.fixture(params=registry.known_modes())
def mode(request: pytest.FixtureRequest) -> str:
    """Each mode in turn."""
    return require_mode(request.param, request)


@pytest.fixture
def make_env(mode: str) -> Iterator[MakeEnv]:
    """Make a `ParallelEnv` in the mode under test; it is closed after the test."""
    made: list[ParallelEnv] = []

    def make(envs: Any, **kwargs: Any) -> ParallelEnv:
        made.append(ParallelEnv(envs, para_mode=mode, **kwargs))
        return made[-1]

    yield make
    for env in made:
        env.close()


@pytest.fixture
def make_pool(mode: str) -> Iterator[MakePool]:
    """Make a `TaskPool` in the mode under test, with two workers; it is closed after the test."""
    made: list[TaskPool] = []

    def make(make_sampler_fn: Any, sampler_fn_args: Any, auto: bool = True, **kwargs: Any) -> TaskPool:
        arguments = {"num_cpus": 2, **kwargs}
        made.append(ParallelEnv.from_samplers(make_sampler_fn, sampler_fn_args, mode, auto, **arguments))
        return made[-1]

    yield make
    for env in made:
        env.close()


# -------------------------------------------------------------------- leaks


@pytest.fixture(autouse=True)
def no_leaks() -> Iterator[None]:
    """Fail a test that leaves a process, a thread, a descriptor or shared memory behind."""
    before = _Holdings()
    yield
    deadline = time.monotonic() + PATIENCE
    found = _Holdings()
    while leaks := found.beyond(before):
        if time.monotonic() > deadline:
            pytest.fail(f"left behind: {'; '.join(leaks)}")
        gc.collect()
        time.sleep(0.05)
        found = _Holdings().that_stay(found)


@pytest.fixture(autouse=True)
def unchanged_process() -> Iterator[None]:
    """Fail a test that leaves something changed in this thread, or in what the whole process shares."""
    before = _settings()
    yield
    now = _settings()
    changed = [name for name in sorted(before.keys() | now.keys()) if before.get(name) != now.get(name)]
    if changed:
        told = (f"{name} was {before.get(name)!r} and is {now.get(name)!r}" for name in changed)
        pytest.fail(f"left changed: {'; '.join(told)}")


def _settings() -> dict[str, Any]:
    """Return what a test must leave as it was."""
    environment = {f"${name}": value for name, value in os.environ.items() if name != "PYTEST_CURRENT_TEST"}
    return {
        **environment,
        "get_worker_info()": get_worker_info(),
        "the handler of SIGINT": signal.getsignal(signal.SIGINT),
        "warnings.filters": list(warnings.filters),
        # The default, settled by this look: else `multiprocessing` settles on it when the first process starts.
        "multiprocessing's start method": multiprocessing.get_start_method(),
    }


class _Holdings:
    """What this process has now."""

    def __init__(self) -> None:
        self.processes = _processes()
        self.threads = {thread for thread in threading.enumerate() if not _is_foreign(thread)}
        self.descriptors = _listing("/proc/self/fd")
        self.shared = _listing("/dev/shm")
        self.ray_runs = _ray_runs()
        self.singletons = (self.ray_runs, *_helper_pids())

    def that_stay(self, earlier: _Holdings) -> _Holdings:
        """Return this without shared memory that was not there: tests beside us make some, and it comes and goes."""
        self.shared = {name: target for name, target in self.shared.items() if name in earlier.shared}
        return self

    def beyond(self, before: _Holdings) -> list[str]:
        """Return what is here that was not before, one line each."""
        leaks = [f"process {pid} ({what})" for pid, what in self.processes.items() if pid not in before.processes]
        leaks += [f"thread {thread.name}" for thread in self.threads - before.threads]
        leaks += [f"/dev/shm/{name}" for name in self.shared.keys() - before.shared.keys()]
        more = len(self.descriptors) - len(before.descriptors)
        if self.singletons == before.singletons and more > (_RAY_DESCRIPTORS if self.ray_runs else 0):
            new = {number: target for number, target in self.descriptors.items() if number not in before.descriptors}
            leaks.append(f"{more} descriptors of {new}")
        return leaks


def _processes() -> dict[int, str]:
    """Return our child processes, without those that serve the whole session."""
    found = {}
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):  # gone meanwhile
            command = _command(process)
            if command and process.pid not in _helper_pids() and not _belongs_to_ray(command):
                found[process.pid] = command[:80]
    return found


def _command(process: psutil.Process) -> str:
    """Return a process's command line; of a dead child of another process nothing, for that is not ours."""
    if process.status() == psutil.STATUS_ZOMBIE:
        return "a zombie" if process.ppid() == os.getpid() else ""
    try:
        return " ".join(process.cmdline()) or process.name()
    except psutil.ZombieProcess:  # since a moment: the next look tells whose it is
        return "dying"


def _belongs_to_ray(command: str) -> bool:
    if command.startswith("ray::"):
        return "Host" not in command  # else it is an actor of ours
    return "/ray/" in command and "multiprocessing" not in command


def _helper_pids() -> tuple[int | None, int | None]:
    servers: Any = forkserver
    trackers: Any = resource_tracker
    return servers._forkserver._forkserver_pid, trackers._resource_tracker._pid


def _is_foreign(thread: threading.Thread) -> bool:
    """Whether it is one of the threads that libraries keep for the whole session."""
    owners = {type(thread).__module__, getattr(getattr(thread, "_target", None), "__module__", None) or ""}
    return thread.daemon and (
        thread.name.startswith("ray") or any(owner.startswith(("ray", "grpc", "tqdm")) for owner in owners)
    )


def _ray_runs() -> bool:
    return "ray" in sys.modules and bool(sys.modules["ray"].is_initialized())


def _listing(folder: str) -> dict[str, str]:
    found = {}
    for path in Path(folder).glob("*"):
        try:
            found[path.name] = str(path.readlink()) if path.is_symlink() else ""
        except OSError:  # the descriptor that listed the folder, or something that is just going
            continue
    return found
