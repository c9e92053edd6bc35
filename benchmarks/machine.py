"""What the numbers were measured on."""

from __future__ import annotations

import datetime
import os
import platform
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import psutil

from benchmarks.processes import ROOT
from parallelenv.contract.cpu_cores import usable_cores

_PACKAGES = (
    *("parallelenv", "gymnasium", "numpy", "ray", "stable_baselines3", "tianshou", "torchrl", "torch"),
    *("mujoco", "ale-py", "Box2D", "minigrid", "highway-env"),
)


def describe() -> dict[str, str]:
    """Return the machine's description, line by line."""
    return {
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "commit": _commit(),
        "usable cores": f"{usable_cores()} of {os.cpu_count()}",
        "CPU": _cpu_model(),
        "memory": f"{psutil.virtual_memory().total / 1e9:.0f} GB",
        "system": platform.platform(),
        "load average before the start": f"{os.getloadavg()[0]:.2f}" if hasattr(os, "getloadavg") else "unknown",
        "Python": platform.python_version(),
        **{name: _version(name) for name in _PACKAGES},
    }


def _commit() -> str:
    """Return the commit that is checked out, and whether files differ from it."""
    command = ["git", "describe", "--always", "--dirty", "--abbrev=12"]
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    return found.stdout.strip() or "not a git checkout"


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or "unknown"
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "absent"
