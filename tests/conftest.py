"""Fixtures of all tests: the mode under test, envs that are closed afterwards, and checks for leaks."""

from __future__ import annotations

import contextlib
import logging
import multiprocessing
import os
import re
import signal
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import hypothesis
import pytest
from holdings import Holdings
from modes import MODES, ON_RAY

from parallelenv import ParallelEnv, errors, get_worker_info, registry
from parallelenv.errors import MissingDependencyError
from parallelenv.tasks.task_pool import TaskPool

pytest.register_assert_rewrite("parallelenv.testing", "faults")  # before any test imports a part of them
# No example has a deadline: an example that had to wait for a core is not wrong.
hypothesis.settings.register_profile("short", deadline=None)
hypothesis.settings.register_profile("long", deadline=None, max_examples=300)  # chosen by `make test-all`
hypothesis.settings.load_profile("short")
MakeEnv = Callable[..., ParallelEnv]
MakePool = Callable[..., TaskPool]

PATIENCE = 2.0  # seconds that ending processes and threads have to exit
# Variables of pytest, of Ray when it starts, and of tensorboardX, Tianshou, RLlib and PyTorch when they are imported.
_SET_BY_OTHERS = (
    "PYTEST_CURRENT_TEST",
    *("PYTHONBREAKPOINT", "RAY_"),
    *("CRC32C_SW_MODE", "SDL_AUDIODRIVER", "TF_CPP_MIN_LOG_LEVEL", "TORCHINDUCTOR_CACHE_DIR"),
)

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as in a background job: no test could be interrupted
    signal.signal(signal.SIGINT, signal.default_int_handler)


# The tests that `make test` runs in the Ray modes, where a test takes seconds: files, functions, single tests. The rest
# has the marker `long` there and is run by `make test-all`. It tests the same code as in `subproc`, and `ray` and
# `ray-subproc` have the same backend.
_IN_RAY_MODES = {
    # all of these files
    "test_cli.py",
    "test_imports.py",
    "test_mpi_env.py",
    "test_package_version.py",
    "test_ray.py",
    "test_security.py",
    # of test_uncaught.py
    "test_kernel_shows_the_mistake_and_runs_the_next_cell[ray-an env raises in step]",
    "test_kernel_shows_the_mistake_and_runs_the_next_cell[ray-subproc-an env raises in its constructor]",
    # of the contract
    "test_failed_step_does_not_affect_other_envs",
    "test_close_closes_each_env_once",
    "test_get_worker_info_works_in_every_env_method[ray-subproc]",
    # of the fault table
    "test_fault[on_failure='restart': SIGKILL of a worker in a step-ray-subproc]",
    "test_fault[on_failure='restart': an env sleeps for ever-ray-subproc]",
    # of test_machine.py and test_real_envs.py
    "test_any_sequence_of_calls_equals_the_oracle[ray-restart]",
    "test_any_sequence_of_calls_equals_the_oracle[ray-subproc-continue]",
    "test_any_sequence_of_sampler_calls_equals_the_oracle[ray-subproc-True]",
    "test_results_equal_those_of_the_oracle[ray-mixed]",
    "test_results_equal_those_of_the_oracle[ray-subproc-mixed]",
    # of test_env_rng.py
    "test_results_with_seed_globals_are_equal_in_every_mode[ray-subproc-2]",
    # of test_output.py
    "test_each_line_is_prefixed_and_no_line_is_split[ray-subproc]",
    "test_standard_error_and_warnings_are_shown[ray-subproc]",
    "test_output_of_close_is_shown[ray-subproc-far]",
    "test_output_of_close_is_shown[ray-subproc-near]",
    # of test_recovery.py
    "test_worker_killed_between_two_calls_is_restarted_by_the_next[ray-subproc]",
    "test_exception_truncates_the_episode_and_starts_the_next[ray-subproc-restart]",
    "test_failed_env_is_rebuilt_without_disturbing_a_busy_neighbour[ray-subproc]",
}
# The tests that `make test` runs in `ray` but not in `ray-subproc`: the backend of the latter inherits how actors start
# and join clusters, and its envs are in processes as in `subproc`.
_ONLY_IN_RAY = {
    "test_real_envs.py",
    "test_actor_that_cannot_be_scheduled_raises",
    "test_cluster_started_by_a_pool_is_quiet_and_reused_by_the_next",
    "test_every_mode_gives_identical_results",  # of test_cli.py; `make demo` compares both
    "test_failed_construction_releases_its_placement_group",
}


def _is_of_ray(name: str) -> bool:
    return re.search(r"[\[-]ray[\]-]", name) is not None


def pytest_itemcollected(item: pytest.Item) -> None:
    """Mark the tests that are long in the Ray modes only."""
    names = {item.path.name, item.name, item.name.partition("[")[0]}
    is_quick = names & _IN_RAY_MODES and not ("ray-subproc" in item.name and names & _ONLY_IN_RAY)
    if _is_of_ray(item.name) and not is_quick and not item.get_closest_marker("cluster"):
        item.add_marker("long")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Let parallel test processes start with the slow tests, so that they end at the same time."""
    if hasattr(config, "workerinput"):
        items.sort(key=lambda item: (not _is_of_ray(item.name), item.get_closest_marker("slow") is None))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Distribute tests by file, and all tests of the Ray modes to one process, so that Ray is started once."""
    from xdist.scheduler import LoadScopeScheduling

    class Scheduling(LoadScopeScheduling):  # type: ignore[misc]  # it has no types
        def _split_scope(self, nodeid: str) -> str:
            path, _, name = nodeid.partition("::")
            return "ray" if _is_of_ray(name) else path

    return Scheduling(config, log)


@contextlib.contextmanager
def running_ray() -> Iterator[None]:
    """A Ray cluster that stays while pools come and go."""
    import ray

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        ray.init("local", num_cpus=4, include_dashboard=False, logging_level=logging.ERROR)
    yield
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        ray.shutdown()


@pytest.fixture(scope="session")
def ray_cluster() -> Iterator[None]:
    """Start Ray once; envs of the Ray modes join it."""
    with running_ray():
        yield


def needs_ray(word: str) -> bool:
    return word in ON_RAY


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


@pytest.fixture(params=MODES)
def mode(request: pytest.FixtureRequest) -> str:
    return require_mode(request.param, request)


@pytest.fixture
def make_env(mode: str) -> Iterator[MakeEnv]:
    """Make a `ParallelEnv` in the mode under test; it is closed after the test."""
    with contextlib.ExitStack() as made:
        yield lambda envs, **kwargs: made.enter_context(ParallelEnv(envs, para_mode=mode, **kwargs))


@pytest.fixture
def make_pool(mode: str) -> Iterator[MakePool]:
    """Make a `TaskPool` in the mode under test, with two workers; it is closed after the test."""
    with contextlib.ExitStack() as made:

        def make(make_sampler_fn: Any, sampler_fn_args: Any, auto: bool = True, **kwargs: Any) -> TaskPool:
            arguments = {"num_cpus": 2, **kwargs}
            return made.enter_context(
                ParallelEnv.from_samplers(make_sampler_fn, sampler_fn_args, mode, auto, **arguments)
            )

        yield make


@pytest.fixture(autouse=True)
def no_leaks() -> Iterator[None]:
    """Fail a test that leaks a process, a thread, a descriptor or shared memory."""
    before = Holdings()
    yield
    if leaks := before.leaks(PATIENCE):
        pytest.fail(f"left behind: {'; '.join(leaks)}")


@pytest.fixture(autouse=True)
def unchanged_process() -> Iterator[None]:
    """Fail a test that does not restore the settings of this thread or process."""
    before = _settings()
    yield
    now = _settings()
    changed = [name for name in sorted(before.keys() | now.keys()) if before.get(name) != now.get(name)]
    if changed:
        told = (f"{name} was {before.get(name)!r} and is {now.get(name)!r}" for name in changed)
        pytest.fail(f"left changed: {'; '.join(told)}")


def _settings() -> dict[str, Any]:
    """Return the settings that a test must restore."""
    environment = {f"${name}": value for name, value in os.environ.items() if not name.startswith(_SET_BY_OTHERS)}
    # Libraries add filters of their own warnings, by text or by class, when they are imported.
    filters = [one for one in warnings.filters if one[1] is None and one[2].__module__ in ("builtins", errors.__name__)]
    return {
        **environment,
        "get_worker_info()": get_worker_info(),
        "the handler of SIGINT": signal.getsignal(signal.SIGINT),
        "warnings.filters": filters,
        # This look fixes the default; otherwise `multiprocessing` fixes it when the first process starts.
        "multiprocessing's start method": multiprocessing.get_start_method(),
    }
