"""Describes this machine as `ParallelEnv` sees it, for users and for bug reports, without starting a process."""

from __future__ import annotations

import os
import platform
import shutil
import socket
import sys
import tempfile
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from parallelenv.backends._fork_server_client import SERVERS
from parallelenv.backends._process import start_methods
from parallelenv.backends._shared_memory import available_memory
from parallelenv.contract.cpu_cores import describe_cores
from parallelenv.contract.failures import one_line

_PACKAGES = ("gymnasium", "numpy", "cloudpickle", "pillow", "threadpoolctl", "tqdm", "ray")
_OPTIONAL = ("matplotlib", "torch", "ipykernel")
_NOTES = {
    "usable": "the default number of workers",
    "dev shm": "free; Ray's object store lives there",
    "imported once": "modules of envs, imported before subproc workers start",
}
_IF_NONE = {
    "installed": "no; the Ray modes need it: pip install ray",
    "running": "no; a Ray mode starts it by itself",
    **dict.fromkeys(_PACKAGES, "not installed"),
}


def describe() -> str:
    """Return all facts about this machine as one text with one paragraph per subject."""
    paragraphs = []
    for subject, values in facts().items():
        lines = [subject.replace("_", " ").capitalize()]
        for key, value in values.items():
            name = key.replace("_", " ")
            if name == "imported once":
                text = ", ".join(f"{module} ({seconds:.2f} s)" for module, seconds in value.items()) or "nothing yet"
            elif name == "in each worker":
                text = "; ".join(f"{module}, whose import {reason}" for module, reason in value.items()) or "nothing"
            elif value is None:
                text = "unknown" if "unreadable" in values else _IF_NONE.get(name, "none")
            elif name in ("memory available", "dev shm"):
                text = f"{value / 2**30:.1f} GiB"
            elif isinstance(value, bool):
                text = "yes" if value else "no"
            else:
                text = f"{value:,}" if isinstance(value, int) else str(value)
            lines.append(f"  {name:<18}{text}{f' ({_NOTES[name]})' if name in _NOTES else ''}")
        paragraphs.append("\n".join(lines))
    return "\n\n".join(paragraphs)


def facts() -> dict[str, dict[str, Any]]:
    """Return all facts about this machine as plain data, for ``--json``."""
    cores, shared = describe_cores(), Path("/dev/shm")
    return {
        "cores": {
            "usable": cores.usable,
            "machine": cores.machine,
            "affinity": cores.affinity,
            "cgroup_quota": cores.quota,
        },
        "worker_processes": {
            "start_method": start_methods()[0],
            "imported_once": {name: one.seconds for server in SERVERS.servers for name, one in server.loaded.items()},
            "in_each_worker": {name: one.reason for name, one in SERVERS.refused.items()},
            **_limits(),
        },
        "memory": {
            "batches_live_in": "anonymous memory" if hasattr(os, "memfd_create") else tempfile.gettempdir(),
            "memory_available": available_memory(),
            "dev_shm": shutil.disk_usage(shared).free if shared.is_dir() else None,
        },
        "ray": {
            "installed": _version("ray"),
            "actors_here": "a socket and shared memory, unless direct=False" if sys.platform == "linux" else "Ray",
            **_ray_cluster(),
        },
        "versions": {
            "python": platform.python_version(),
            "system": platform.platform(),
            "parallelenv": _version("parallelenv"),
            **{name: _version(name) for name in _PACKAGES},
            **{name: found for name in _OPTIONAL if (found := _version(name))},
        },
    }


def _limits() -> dict[str, int | None]:
    if sys.platform == "win32":
        return {}
    import resource

    kinds = {"process_limit": resource.RLIMIT_NPROC, "open_file_limit": resource.RLIMIT_NOFILE}
    limits = {name: resource.getrlimit(kind)[0] for name, kind in kinds.items()}
    return {name: None if limit == resource.RLIM_INFINITY else limit for name, limit in limits.items()}


def _ray_cluster() -> dict[str, object]:
    """Return the address of the cluster that a Ray mode would join, and whether the address responds.

    Ray is not imported.
    """
    # Ray uses /tmp on macOS, whatever TMPDIR is.
    folder = os.environ.get("RAY_TMPDIR") or ("/tmp" if sys.platform == "darwin" else tempfile.gettempdir())
    address = os.environ.get("RAY_ADDRESS", "")
    try:
        address = address or Path(folder, "ray", "ray_current_cluster").read_text(encoding="utf-8").strip()
    except (FileNotFoundError, NotADirectoryError):
        pass  # no cluster has been started here
    except (OSError, UnicodeDecodeError) as error:  # for example, the folder belongs to another user
        return {"running": None, "unreadable": one_line(error)}
    if ":" not in address:  # "auto" and "local" are resolved by Ray itself
        return {"running": address or None}
    host, _, port = address.rpartition("://")[2].rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=1.0).close()
    except (OSError, ValueError):
        return {"running": address, "answers": False}
    return {"running": address, "answers": True}


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
