"""The processes, threads, descriptors and shared memory of this process, to find leaks of a test."""

from __future__ import annotations

import contextlib
import gc
import os
import sys
import threading
import time
from multiprocessing import forkserver, resource_tracker
from typing import Any

import psutil

from parallelenv.backends._fork_server_client import SERVERS

_RAY_DESCRIPTORS = 8  # connections that Ray opens and closes at any time


class Holdings:
    """The resources that this process has now."""

    def __init__(self) -> None:
        self.processes = _processes()
        self.threads = {thread for thread in threading.enumerate() if not _is_foreign(thread)}
        self.descriptors = _descriptors()
        self.shared = shared_memory()
        self.ray_runs = "ray" in sys.modules and bool(sys.modules["ray"].is_initialized())
        self.singletons = (self.ray_runs, *_helper_pids())

    def leaks(self, patience: float) -> list[str]:
        """Return the resources that exist now beyond these, a line each, unless they disappear within some seconds."""
        deadline = time.monotonic() + patience
        found = Holdings()
        while (leaks := found._beyond(self)) and time.monotonic() < deadline:
            gc.collect()
            time.sleep(0.05)
            earlier, found = found, Holdings()
            # Without new shared memory: tests in other processes create and remove some.
            found.shared &= earlier.shared
        return leaks

    def _beyond(self, before: Holdings) -> list[str]:
        leaks = [f"process {pid} ({what})" for pid, what in self.processes.items() if pid not in before.processes]
        leaks += [f"thread {thread.name}" for thread in self.threads - before.threads]
        leaks += [f"/dev/shm/{name}" for name in self.shared - before.shared]
        more = len(self.descriptors) - len(before.descriptors)
        if self.singletons == before.singletons and more > (_RAY_DESCRIPTORS if self.ray_runs else 0):
            new = {number: target for number, target in self.descriptors.items() if number not in before.descriptors}
            leaks.append(f"{more} descriptors of {new}")
        return leaks


def _processes() -> dict[int, str]:
    """Return our child processes, without those that serve the whole session."""
    found = {}
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):  # gone in the meantime
            command = _command(process)
            if command and process.pid not in _helper_pids() and not _belongs_to_ray(command):
                found[process.pid] = command[:80]
    return found


def _command(process: psutil.Process) -> str:
    """Return a process's command line; nothing for a dead child of another process."""
    if process.status() == psutil.STATUS_ZOMBIE:
        return "a zombie" if process.ppid() == os.getpid() else ""
    try:
        return " ".join(process.cmdline()) or process.name()
    except psutil.ZombieProcess:  # it has just ended: the next look shows its parent
        return "dying"


def _belongs_to_ray(command: str) -> bool:
    if command.startswith("ray::"):
        return "Host" not in command  # else it is an actor of ours
    return "/ray/" in command and "multiprocessing" not in command


def _helper_pids() -> tuple[int | None, ...]:
    servers: Any = forkserver  # of other libraries' vector envs
    trackers: Any = resource_tracker
    return (*fork_server_pids(), servers._forkserver._forkserver_pid, trackers._resource_tracker._pid)


def fork_server_pids() -> tuple[int, ...]:
    """Return the ids of the fork servers, and of the processes that these are forked from."""
    found: dict[int, None] = {}
    for server in (SERVERS.root, *SERVERS.servers):
        line: list[Any] = [server] if server is not None else []
        while line and (parent := getattr(line[-1]._process._process, "_server", None)) is not None:
            line.append(parent)
        found.update(dict.fromkeys(one.pid for one in reversed(line)))
    return tuple(found)


def _is_foreign(thread: threading.Thread) -> bool:
    """Return whether it is one of the threads that libraries keep for the whole session."""
    owners = {type(thread).__module__, getattr(getattr(thread, "_target", None), "__module__", None) or ""}
    return thread.daemon and (
        thread.name.startswith("ray") or any(owner.startswith(("ray", "grpc", "tqdm")) for owner in owners)
    )


def _descriptors() -> dict[str, str]:
    """Return the open descriptors, each with what it is."""
    found = {}
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # the descriptor that listed them
            found[name] = os.readlink(f"/proc/self/fd/{name}")
    return found


def shared_memory() -> set[str]:
    """Return the entries of /dev/shm without semaphores, which only other libraries and other processes make."""
    return {name for name in os.listdir("/dev/shm") if not name.startswith("sem.")}


def is_alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def survivors(pids: Any, patience: float) -> list[int]:
    """Return which of these processes are still alive after some seconds."""
    deadline = time.monotonic() + patience
    while (alive := [pid for pid in pids if is_alive(pid)]) and time.monotonic() < deadline:
        time.sleep(0.005)
    return alive
