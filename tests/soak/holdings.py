"""The resources of this process: processes, threads, descriptors, shared memory and memory."""

from __future__ import annotations

import contextlib
import gc
import os
import sys
import threading
import time
from pathlib import Path

import psutil

PATIENCE = 10.0
"""Seconds that what is ending gets to be gone: a Ray actor takes its time."""
_RAY_DESCRIPTORS = 8  # connections that Ray opens and closes when it likes


class Holdings:
    """The resources that this process has now.

    Attributes:
        processes: Children, and theirs, by process id.
        threads: Threads.
        shared: Names in /dev/shm; those of semaphores begin with ``sem.``.
        descriptors: Open files, by number.
    """

    def __init__(self) -> None:
        self.processes = _processes()
        self.threads = {thread for thread in threading.enumerate() if not _is_rays(thread)}
        self.shared = set(_listing("/dev/shm"))
        self.descriptors = _listing("/proc/self/fd")

    def beyond(self, before: Holdings) -> list[str]:
        """Return the resources that were not there before, one line each."""
        leaks = [f"process {pid} ({what})" for pid, what in self.processes.items() if pid not in before.processes]
        leaks += [f"thread {thread.name}" for thread in self.threads - before.threads]
        leaks += [f"/dev/shm/{name}" for name in self.shared - before.shared]
        more = len(self.descriptors) - len(before.descriptors)
        if more > (_RAY_DESCRIPTORS if _uses_ray() else 0):
            new = {number: target for number, target in self.descriptors.items() if number not in before.descriptors}
            leaks.append(f"{more} descriptors of {new}")
        return leaks


def leaks_beyond(before: Holdings) -> list[str]:
    """Return the resources that were not there before, after a timeout."""
    deadline = time.monotonic() + PATIENCE
    while (leaks := Holdings().beyond(before)) and time.monotonic() < deadline:
        gc.collect()
        time.sleep(0.05)
    return leaks


def survivors(pids: set[int]) -> list[int]:
    """Return which of these processes are still alive, after a timeout."""
    deadline = time.monotonic() + PATIENCE
    pids = pids - {0, os.getpid()}
    while (alive := [pid for pid in pids if _is_alive(pid)]) and time.monotonic() < deadline:
        time.sleep(0.02)
    return alive


def megabytes() -> float:
    """Return the memory of this process: its proportional share where the system tells, else what is resident."""
    try:
        lines = Path("/proc/self/smaps_rollup").read_text(encoding="ascii").splitlines()
    except OSError:
        return float(psutil.Process().memory_info().rss) / 1e6
    return next(int(line.split()[1]) for line in lines if line.startswith("Pss:")) / 1e3


def _is_alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _processes() -> dict[int, str]:
    found = {}
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            command = " ".join(process.cmdline()) if process.status() != psutil.STATUS_ZOMBIE else "a zombie"
            if not _is_rays_own(command) and not (command == "a zombie" and process.ppid() != os.getpid()):
                found[process.pid] = command[:80]
    return found


def _is_rays_own(command: str) -> bool:
    if command.startswith("ray::"):
        return "Host" not in command  # else it is an actor of ours
    return "/ray/" in command and "multiprocessing" not in command


def _is_rays(thread: threading.Thread) -> bool:
    owners = {type(thread).__module__, getattr(getattr(thread, "_target", None), "__module__", None) or ""}
    return thread.daemon and (thread.name.startswith("ray") or any(owner.startswith("ray") for owner in owners))


def _uses_ray() -> bool:
    return "ray" in sys.modules and bool(sys.modules["ray"].is_initialized())


def _listing(folder: str) -> dict[str, str]:
    found = {}
    for path in Path(folder).glob("*"):
        with contextlib.suppress(OSError):  # the descriptor that lists the folder, or something just going
            found[path.name] = str(path.readlink()) if path.is_symlink() else ""
    return found
