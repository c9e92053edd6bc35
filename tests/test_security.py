"""The promises of SECURITY.md: worker processes are not reachable, and expose no data."""

from __future__ import annotations

import os
import socket
import stat
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import psutil
import pytest
from holdings import fork_server_pids
from modes import ON_RAY, PROCESSES, in_modes

from parallelenv import ParallelEnv
from parallelenv.backends._process import start_methods

SECRET = "open-sesame-4711"


class Discreet(gym.Env[Any, Any]):
    observation_space = gym.spaces.Box(0, 1, (2,), np.float32)
    action_space = gym.spaces.Discrete(2)

    def __init__(self, secret: str) -> None:
        self.secret = secret

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        return np.zeros(2, np.float32), {}

    def step(self, action: Any) -> Any:
        return np.ones(2, np.float32), 1.0, False, False, {}

    def tell(self, word: str) -> tuple[int, str]:
        return os.getpid(), word + self.secret


@pytest.fixture(params=start_methods())
def processes(request: pytest.FixtureRequest) -> Iterator[list[psutil.Process]]:
    """Workers that have received a secret, with the fork server if they have one."""
    with ParallelEnv([partial(Discreet, SECRET)] * 4, PROCESSES, num_cpus=2, start_method=request.param) as env:
        env.reset(options={"secret": SECRET})
        answers = env.customized_method("tell", {"word": SECRET})
        env.step([0, 1, 0, 1])
        pids = {pid for pid, _ in answers}
        servers = fork_server_pids() if request.param == "forkserver" else ()
        pids.update(servers)
        assert len(pids) == 2 + len(servers)
        yield [psutil.Process(pid) for pid in pids]


def test_workers_accept_no_connections(processes: list[psutil.Process]) -> None:
    inherited = {
        (own.laddr, own.raddr) for own in psutil.Process().net_connections("inet")
    }  # inherited by fork, such as those of Ray
    for process in processes:
        opened = [one for one in process.net_connections("inet") if (one.laddr, one.raddr) not in inherited]
        assert opened == []
        for connection in process.net_connections("unix"):
            assert not connection.laddr


def test_shared_memory_and_output_files_are_anonymous(processes: list[psutil.Process]) -> None:
    inherited = set(_open_and_mapped(psutil.Process()))  # inherited by fork
    for process in processes:
        opened = _open_and_mapped(process)
        named = [path for path in opened if path.startswith("/dev/shm") or path in _files_in_tmp(process)]
        assert [path for path in named if path not in inherited] == []
        assert any("memfd:parallelenv" in path for path in opened) or process.pid in fork_server_pids()


def test_command_lines_and_environments_contain_no_env_data(processes: list[psutil.Process]) -> None:
    for process in processes:
        assert SECRET not in " ".join(process.cmdline())
        assert SECRET not in str(process.environ())


def _open_and_mapped(process: psutil.Process) -> list[str]:
    """Return the names of the files that a process has open or mapped."""
    return _opened(process) + [region.path for region in process.memory_maps()]


def _files_in_tmp(process: psutil.Process) -> list[str]:
    """Return the open temporary files of a process that are not deleted."""
    folder = tempfile.gettempdir()
    return [path for path in _opened(process) if path.startswith(folder) and not path.endswith("(deleted)")]


def _opened(process: psutil.Process) -> list[str]:
    return [str(path.readlink()) for path in Path(f"/proc/{process.pid}/fd").iterdir() if path.is_symlink()]


@in_modes(*ON_RAY)
def test_socket_for_ray_actors_is_private_and_removed_after_start(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from parallelenv.backends import _ray_actors

    modes: list[int] = []
    paths: list[Path] = []

    def admit(listener: socket.socket, actors: Any) -> None:
        paths.append(Path(listener.getsockname()))
        modes.append(stat.S_IMODE(paths[0].parent.stat().st_mode))
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as stranger:  # not an actor
            stranger.connect(listener.getsockname())
            admit_actors(listener, actors)

    admit_actors = _ray_actors.admit
    monkeypatch.setattr("parallelenv.backends.ray.admit", admit)
    with ParallelEnv([partial(Discreet, SECRET)] * 4, mode, num_cpus=2) as env:
        assert modes == [0o700]
        assert not paths[0].parent.exists()
        assert "actors reached directly" in repr(env)
        assert env.reset().shape == (4, 2)
