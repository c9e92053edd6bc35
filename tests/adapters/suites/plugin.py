"""A pytest plugin that replaces a neighbour's vector envs by our adapters before its tests are collected.

Environment variables configure it: ``SUITES_MODE`` is a ``para_mode``, or ``theirs`` to replace nothing;
``SUITES_NAME`` is the name of the suite. Outcomes are written to ``SUITES_OUTCOMES``, a line per test.
"""

from __future__ import annotations

import os
import sys
from typing import Any

import gymnasium
import pytest

from parallelenv import ParallelEnv

MODE: Any = os.environ["SUITES_MODE"]


def how_to_start(method: Any) -> dict[str, Any]:
    return {"start_method": method} if method is not None and MODE == "subproc" else {}


def of_gymnasium() -> list[type]:
    from parallelenv.adapters.gymnasium import GymnasiumVectorEnv

    class SyncVectorEnv(GymnasiumVectorEnv):
        def __init__(
            self,
            env_fns: Any,
            copy: bool = True,
            observation_mode: Any = "same",
            autoreset_mode: Any = "NextStep",
            start_method: Any = None,
        ) -> None:
            pool = ParallelEnv(list(env_fns), MODE, copy=copy, **how_to_start(start_method))
            super().__init__(pool, autoreset_mode, observation_mode)

    class AsyncVectorEnv(SyncVectorEnv):
        def __init__(
            self, env_fns: Any, shared_memory: bool = True, copy: bool = True, context: Any = None, **kwargs: Any
        ) -> None:
            super().__init__(env_fns, copy, start_method=context, **kwargs)

    return [SyncVectorEnv, AsyncVectorEnv]


def of_sb3() -> list[type]:
    from parallelenv.adapters.sb3 import SB3VecEnv

    class DummyVecEnv(SB3VecEnv):
        def __init__(self, env_fns: Any) -> None:
            super().__init__(ParallelEnv(env_fns, MODE))

    class SubprocVecEnv(SB3VecEnv):
        def __init__(self, env_fns: Any, start_method: Any = None) -> None:
            super().__init__(ParallelEnv(env_fns, MODE, **how_to_start(start_method)))

    return [DummyVecEnv, SubprocVecEnv]


def of_tianshou() -> list[type]:
    from parallelenv.adapters.tianshou import TianshouVectorEnv

    class DummyVectorEnv(TianshouVectorEnv):
        def __init__(self, env_fns: Any, wait_num: Any = None, timeout: Any = None, **kwargs: Any) -> None:
            super().__init__(ParallelEnv(list(env_fns), MODE, num_cpus=len(env_fns)), wait_num, timeout)

    names = ["SubprocVectorEnv", "ShmemVectorEnv", "RayVectorEnv"]
    return [DummyVectorEnv, *(type(name, (DummyVectorEnv,), {}) for name in names)]


PACKAGES = {"gymnasium": "gymnasium.vector", "stable-baselines3": "stable_baselines3", "tianshou": "tianshou.env"}
CLASSES = {"gymnasium": of_gymnasium, "stable-baselines3": of_sb3, "tianshou": of_tianshou}


def pytest_configure() -> None:
    name = os.environ["SUITES_NAME"]
    if MODE == "theirs":
        return
    package = PACKAGES[name]
    home = __import__(package, fromlist=["*"])
    if name == "stable-baselines3":
        home = home.common.vec_env
    ours = {getattr(home, one.__name__): one for one in CLASSES[name]()}
    for module_name, module in list(sys.modules.items()):
        if module_name.split(".")[0] == package.split(".")[0]:
            for key, value in list(vars(module).items()):
                if isinstance(value, type) and value in ours:
                    setattr(module, key, ours[value])


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call() -> Any:
    """Skip a test that needs a package which is not installed."""
    try:
        return (yield)
    except (ModuleNotFoundError, gymnasium.error.DependencyNotInstalled) as error:
        pytest.skip(str(error))


def pytest_runtest_logreport(report: Any) -> None:
    """Record the outcome of a test: of its call, or of the setup or teardown that failed."""
    if "PYTEST_XDIST_WORKER" not in os.environ and (report.when == "call" or not report.passed):
        with open(os.environ["SUITES_OUTCOMES"], "a") as file:
            file.write(f"{report.outcome}\t{report.nodeid}\n")
