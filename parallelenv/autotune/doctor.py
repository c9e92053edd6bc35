"""A description of this machine for `ParallelEnv`, to read or to put into a bug report. Starts nothing."""

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
from typing import Any

from parallelenv.backends._fork_server import SERVERS
from parallelenv.backends.subproc import start_methods
from parallelenv.contract.cpu_cores import describe_cores

_PACKAGES = ("gymnasium", "numpy", "cloudpickle", "threadpoolctl", "tqdm", "ray")
_OPTIONAL = ("matplotlib", "pillow", "torch", "ipykernel")

Lines = Iterator[tuple[str, Any, str]]
"""Name, value as plain data, and value as text."""


def describe() -> str:
    """Return everything as one text with one paragraph per subject."""
    paragraphs = [
        "\n".join([title, *(f"  {name:<18}{text}" for name, _, text in lines)]) for title, lines in _subjects().items()
    ]
    return "\n\n".join(paragraphs)


def facts() -> dict[str, dict[str, Any]]:
    """Return everything as plain data, for ``--json``."""
    return {_key(title): {_key(name): value for name, value, _ in lines} for title, lines in _subjects().items()}


def _key(words: str) -> str:
    return words.lower().strip("/").replace(" ", "_").replace("/", "_")


def _subjects() -> dict[str, Lines]:
    return {
        "Cores": _cores(),
        "Worker processes": _workers(),
        "Memory": _memory(),
        "Ray": _ray(),
        "Versions": _versions(),
    }


def _cores() -> Lines:
    cores = describe_cores()
    yield "usable", cores.usable, f"{cores.usable}, the default number of workers"
    yield "machine", cores.machine, f"{cores.machine} logical cores"
    yield "affinity", cores.affinity, f"{cores.affinity} of them may be used by this process"
    yield "cgroup quota", cores.quota, "none" if cores.quota is None else f"CPU time of {cores.quota:g} cores"


def _workers() -> Lines:
    methods = start_methods()
    yield "start method", methods[0], f"{methods[0]}; available: {', '.join(methods)}"
    loaded = {name: seconds for server in SERVERS.servers for name, seconds in server.loaded.items()}
    refused = {name: one.reason for name, one in SERVERS.refused.items()}
    times = ", ".join(f"{name} ({seconds:.2f} s)" for name, seconds in loaded.items())
    yield "imported once", loaded, times or "nothing yet; modules that envs of subproc come from, before workers start"
    if refused:
        reasons = "; ".join(f"{name}, whose import {reason}" for name, reason in refused.items())
        yield "in each worker", refused, reasons
    if sys.platform == "win32":
        return
    import resource

    for name, kind in (("process limit", resource.RLIMIT_NPROC), ("open file limit", resource.RLIMIT_NOFILE)):
        limit = resource.getrlimit(kind)[0]
        is_set = limit != resource.RLIM_INFINITY
        yield name, limit if is_set else None, f"{limit:,}" if is_set else "none"


def _memory() -> Lines:
    if hasattr(os, "memfd_create"):
        yield "batches live in", "anonymous memory", "anonymous memory, so /dev/shm may be small"
    else:
        folder = tempfile.gettempdir()
        yield "batches live in", folder, f"a nameless file in {folder}: {_room(Path(folder))}"
    available = _available_memory()
    if available is not None:
        yield "memory available", available, _size(available)
    shared = Path("/dev/shm")
    if shared.is_dir():
        yield "/dev/shm", shutil.disk_usage(shared).free, f"{_room(shared)}; Ray's object store lives there"
    else:
        yield "/dev/shm", None, "none here"


def _available_memory() -> int | None:
    """Return the bytes available for new allocations, or ``None`` if the system does not report it."""
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
    installed = _version("ray")
    yield "installed", installed, installed or "no; the Ray modes need it: pip install ray"
    way = "a socket and shared memory, unless direct=False" if sys.platform == "linux" else "Ray's calls"
    yield "actors here", way, f"are reached by {way}; those on other machines by Ray's calls"
    address, source = _ray_address()
    if address is None:
        yield "running", None, "no; a Ray mode starts it by itself"
    elif ":" not in address:  # "auto" and "local" are resolved by Ray itself
        yield "running", address, f"{address} ({source})"
    else:
        state = "answers" if _answers(address) else "does not answer"
        yield "running", address, f"{address} {state} ({source})"


def _ray_address() -> tuple[str | None, str]:
    """Return the address of the cluster that a Ray mode would join, and its source. Does not import Ray."""
    if os.environ.get("RAY_ADDRESS"):
        return os.environ["RAY_ADDRESS"], "from RAY_ADDRESS"
    # Ray uses /tmp on macOS, whatever TMPDIR is.
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
    python, ours = platform.python_version(), _version("parallelenv")
    yield "python", python, f"{python} ({platform.python_implementation()})"
    yield "system", platform.platform(), platform.platform()
    yield "parallelenv", ours, f"{ours or 'not installed'}, in {Path(__file__).parent}"
    for name in _PACKAGES + _OPTIONAL:
        found = _version(name)
        if found or name in _PACKAGES:
            yield name, found, found or "not installed"


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
