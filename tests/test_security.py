"""The promises of SECURITY.md: worker processes are not reachable, and expose no data."""

from __future__ import annotations

import os
import socket
import stat
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest
from holdings import fork_server_pids
from modes import ON_RAY, PROCESSES, in_modes

from parallelenv import ParallelEnv
from parallelenv.backends._process import start_methods
from parallelenv.testing.envs import Counter

SECRET = "open-sesame-4711"


class Discreet(Counter):
    def __init__(self, secret: str) -> None:
        super().__init__()
        self.secret = secret

    def tell(self, word: str) -> tuple[int, str]:
        return os.getpid(), word + self.secret


@pytest.mark.parametrize("start_method", start_methods())
def test_workers_accept_no_connections_and_expose_no_data(start_method: str) -> None:
    """Not even to programs that may list processes, open files and shared memory of the machine."""
    own = psutil.Process()  # workers inherit what it has open by fork, such as the connections of Ray
    own_connections = {(one.laddr, one.raddr) for one in own.net_connections("inet")}
    own_files = set(_open_and_mapped(own))
    with ParallelEnv([partial(Discreet, SECRET)] * 4, PROCESSES, num_cpus=2, start_method=start_method) as env:
        env.reset(options={"secret": SECRET})
        workers = {pid for pid, _ in env.customized_method("tell", {"word": SECRET})}
        env.step([0, 1, 0, 1])
        assert len(workers) == 2
        for pid in [*workers, *(fork_server_pids() if start_method == "forkserver" else ())]:
            process = psutil.Process(pid)
            assert {(one.laddr, one.raddr) for one in process.net_connections("inet")} <= own_connections
            assert not any(one.laddr for one in process.net_connections("unix"))
            opened = _open_and_mapped(process)
            named = {path for path in opened if path.startswith("/dev/shm") or path in _files_in_tmp(process)}
            assert named <= own_files
            assert any("memfd:parallelenv" in path for path in opened) or pid not in workers
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

    paths: list[Path] = []

    def admit(listener: socket.socket, actors: Any) -> None:
        paths.append(Path(listener.getsockname()))
        assert stat.S_IMODE(paths[0].parent.stat().st_mode) == 0o700
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as stranger:  # not an actor
            stranger.connect(listener.getsockname())
            admit_actors(listener, actors)

    admit_actors = _ray_actors.admit
    monkeypatch.setattr("parallelenv.backends.ray.admit", admit)
    with ParallelEnv([partial(Discreet, SECRET)] * 4, mode, num_cpus=2) as env:
        assert len(paths) == 1
        assert not paths[0].parent.exists()
        assert "actors reached directly" in repr(env)
        assert env.reset().shape == (4, 3)
