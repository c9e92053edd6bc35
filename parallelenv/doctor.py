"""What this machine offers to `ParallelEnv`, for a look or for a bug report. Starts nothing."""

from __future__ import annotations

import os
import platform
import shutil
import socket
import sys
import tempfile
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from parallelenv.backends.subproc import start_methods
from parallelenv.cores import describe_cores

_PACKAGES = ("gymnasium", "numpy", "cloudpickle", "threadpoolctl", "tqdm", "ray")
_OPTIONAL = ("matplotlib", "pillow", "torch", "ipykernel")

Lines = Iterator[tuple[str, str]]


def describe() -> str:
    """Return everything as one text with a paragraph per subject."""
    parts = {
        "Cores": _cores(),
        "Worker processes": _workers(),
        "Memory": _memory(),
        "Ray": _ray(),
        "Versions": _versions(),
    }
    return "\n\n".join(_paragraph(title, lines) for title, lines in parts.items())


def _paragraph(title: str, lines: Lines) -> str:
    return "\n".join([title, *(f"  {name:<18}{value}" for name, value in lines)])


def _cores() -> Lines:
    cores = describe_cores()
    yield "usable", f"{cores.usable}, the default number of workers"
    yield "machine", f"{cores.machine} logical cores"
    yield "affinity", f"{cores.affinity} of them may be used by this process"
    yield "cgroup quota", "none" if cores.quota is None else f"CPU time of {cores.quota:g} cores"


def _workers() -> Lines:
    methods = start_methods()
    yield "start method", f"{methods[0]}; available: {', '.join(methods)}"
    if sys.platform == "win32":
        return
    import resource

    yield "process limit", _limit(resource.getrlimit(resource.RLIMIT_NPROC)[0])
    yield "open file limit", _limit(resource.getrlimit(resource.RLIMIT_NOFILE)[0])


def _limit(value: int) -> str:
    import resource

    return "none" if value == resource.RLIM_INFINITY else f"{value:,}"


def _memory() -> Lines:
    if hasattr(os, "memfd_create"):
        yield "batches live in", "anonymous memory, so /dev/shm may be small"
    else:
        folder = tempfile.gettempdir()
        yield "batches live in", f"a nameless file in {folder}: {_room(Path(folder))}"
    available = _available_memory()
    if available is not None:
        yield "memory available", _size(available)
    shared = Path("/dev/shm")
    yield "/dev/shm", f"{_room(shared)}; Ray's object store lives there" if shared.is_dir() else "none here"


def _available_memory() -> int | None:
    """Return bytes that new allocations may use, or ``None`` where the system does not say."""
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    found = (int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    return next(found, None)


def _room(folder: Path) -> str:
    usage = shutil.disk_usage(folder)
    return f"{_size(usage.free)} free of {_size(usage.total)}"


def _size(nbytes: int) -> str:
    return f"{nbytes / 2**30:.1f} GiB" if nbytes >= 2**30 else f"{nbytes / 2**20:.0f} MiB"


def _ray() -> Lines:
    yield "installed", _version("ray") or "no; the Ray modes need it: pip install ray"
    way = "a socket and shared memory, unless direct=False" if sys.platform == "linux" else "Ray's calls"
    yield "actors here", f"are reached by {way}; those on other machines by Ray's calls"
    address, source = _ray_address()
    if address is None:
        yield "running", "no; a Ray mode starts it by itself"
    elif ":" not in address:  # "auto" and "local", which Ray itself resolves
        yield "running", f"{address} ({source})"
    else:
        state = "answers" if _answers(address) else "does not answer"
        yield "running", f"{address} {state} ({source})"


def _ray_address() -> tuple[str | None, str]:
    """Return the cluster that a Ray mode would join, and who says so. Ray is not imported."""
    if os.environ.get("RAY_ADDRESS"):
        return os.environ["RAY_ADDRESS"], "from RAY_ADDRESS"
    # Ray looks in /tmp on macOS, whatever TMPDIR says.
    folder = os.environ.get("RAY_TMPDIR") or ("/tmp" if sys.platform == "darwin" else tempfile.gettempdir())
    file = Path(folder, "ray", "ray_current_cluster")
    try:
        return file.read_text(encoding="utf-8").strip() or None, f"from {file}"
    except OSError:
        return None, ""


def _answers(address: str) -> bool:
    host, _, port = address.rpartition("://")[2].rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=1.0).close()
    except (OSError, ValueError):
        return False
    return True


def _versions() -> Lines:
    yield "python", f"{platform.python_version()} ({platform.python_implementation()})"
    yield "system", platform.platform()
    yield "parallelenv", f"{_version('parallelenv') or 'not installed'}, in {Path(__file__).parent}"
    for name in _PACKAGES:
        yield name, _version(name) or "not installed"
    for name in _OPTIONAL:
        if found := _version(name):
            yield name, found


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
