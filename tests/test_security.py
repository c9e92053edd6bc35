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
    own_files = set(_named_files(own)[1])
    with ParallelEnv([partial(Discreet, SECRET)] * 4, PROCESSES, num_cpus=2, start_method=start_method) as env:
        env.reset(options={"secret": SECRET})
        workers = {pid for pid, _ in env.customized_method("tell", {"word": SECRET})}
        env.step([0, 1, 0, 1])
        assert len(workers) == 2
        for pid in [*workers, *(fork_server_pids() if start_method == "forkserver" else ())]:
            process = psutil.Process(pid)
            assert {(one.laddr, one.raddr) for one in process.net_connections("inet")} <= own_connections
            assert not any(one.laddr for one in process.net_connections("unix"))
            named, opened = _named_files(process)
            assert named <= own_files
            assert any("memfd:parallelenv" in path for path in opened) or pid not in workers
            assert SECRET not in " ".join(process.cmdline())
            assert SECRET not in str(process.environ())


def _named_files(process: psutil.Process) -> tuple[set[str], list[str]]:
    """Return the files of a process that others can open, and all files that it has open or mapped."""
    opened = [str(path.readlink()) for path in Path(f"/proc/{process.pid}/fd").iterdir() if path.is_symlink()]
    mapped = [region.path for region in process.memory_maps()]
    shared = {path for path in opened + mapped if path.startswith("/dev/shm")}
    temporary = [path for path in opened if path.startswith(tempfile.gettempdir()) and not path.endswith("(deleted)")]
    return shared.union(temporary), opened + mapped


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
