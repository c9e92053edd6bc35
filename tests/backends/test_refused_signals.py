"""A sandbox may refuse to send a signal when the caller dies. A thread then notices the death."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from holdings import survivors
from scripts import environment, start

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="elsewhere no signal is asked for")

# Run by every Python process that has the folder in PYTHONPATH, before any other code.
SANDBOX = """
import errno, fcntl
def refuse(descriptor, command, *argument, allowed=fcntl.fcntl):
    if command in (fcntl.F_SETOWN, fcntl.F_SETSIG):
        raise OSError(errno.EPERM, "refused by the sandbox")
    return allowed(descriptor, command, *argument)
fcntl.fcntl = refuse
"""
SCRIPT = """
import os, sys, time
import gymnasium as gym
from parallelenv import ParallelEnv

class Sleeper(gym.Env):
    observation_space = action_space = gym.spaces.Discrete(2)
    def reset(self, seed=None, options=None):
        return 0, {}
    def sleep(self, seconds):
        print(seconds, flush=True)
        time.sleep(seconds)

method, way = sys.argv[1:]
env = ParallelEnv([Sleeper, Sleeper], "subproc", num_cpus=2, start_method=method)
print(env.reset().tolist(), flush=True)
if way == "busy":
    env.customized_method("sleep", {"seconds": 60})
time.sleep(60)
"""
IMPORTING = """
import os, sys
from parallelenv import ParallelEnv
os.environ["CALLER"] = str(os.getpid())
import slow
ParallelEnv([slow.Env] * 2, "subproc", num_cpus=2).reset()
"""
SLOW = """
import os, time
import gymnasium as gym
if os.getpid() != int(os.environ["CALLER"]):
    open(os.environ["BEGUN"], "w").close()
    time.sleep(60)
class Env(gym.Env):
    observation_space = action_space = gym.spaces.Discrete(2)
"""


@contextlib.contextmanager
def sandboxed(folder: Path, script: str, *arguments: str, **variables: str) -> Iterator[Any]:
    (folder / "sitecustomize.py").write_text(SANDBOX)
    variables = environment(**variables)
    variables["PYTHONPATH"] = os.pathsep.join([str(folder), variables["PYTHONPATH"]])
    with start(script, *arguments, env=variables) as process:
        try:
            yield process
        finally:
            process.kill()


def family(process: Any) -> list[int]:
    return [one.pid for one in psutil.Process(process.pid).children(recursive=True)]


@pytest.mark.parametrize("method", ["forkserver", "spawn", "fork"])
@pytest.mark.parametrize("way", ["idle", "busy"])
def test_workers_run_and_end_with_the_caller(tmp_path: Path, method: str, way: str) -> None:
    with sandboxed(tmp_path, SCRIPT, method, way) as process:
        line = process.stdout.readline()
        if line != "[0, 0]\n":
            pytest.fail(process.communicate(timeout=10)[1])
        if way == "busy":
            process.stdout.readline()
        pids = family(process)
        process.kill()
        assert survivors(pids, patience=2) == []


def test_server_that_imports_ends_with_the_caller(tmp_path: Path) -> None:
    (tmp_path / "slow.py").write_text(SLOW)
    begun = tmp_path / "begun"
    with sandboxed(tmp_path, IMPORTING, BEGUN=str(begun)) as process:
        while not begun.exists():
            assert process.poll() is None, process.communicate()
            time.sleep(0.01)
        pids = family(process)
        assert len(pids) >= 3  # the tracker, the root, and the server
        process.kill()
        assert survivors(pids, patience=2) == []
