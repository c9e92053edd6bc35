"""The number of CPU cores that this process may use, and the limits that determine it.

`os.cpu_count` counts the machine's cores. A process may be allowed to use fewer, because of its CPU affinity (set by
`taskset`, a batch scheduler or a cpuset) or a cgroup's CPU quota (a container started with "1.5 CPUs" still sees every
core of the machine). ``loky.cpu_count`` is not used here: it reads only the quota of the topmost cgroup, not that of a
batch job, and it requires importing all of loky.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from parallelenv.contract.interrupts import Ignore


@dataclass(frozen=True, slots=True)
class Cores:
    """The limits on the number of cores that this process may use."""

    machine: int  # logical cores
    affinity: int  # cores this process may be scheduled on; all of them if the system has no affinity (macOS)
    quota: float | None  # CPU time that the strictest cgroup grants, in cores (1.5 is one and a half cores)

    @property
    def usable(self) -> int:
        """Number of usable cores, at least 1.

        The quota is rounded up, as in Go and Java.
        """
        return max(1, min(self.affinity, math.ceil(self.quota or self.affinity)))


def usable_cores() -> int:
    """Return how many cores this process may use, at least 1."""
    return describe_cores().usable


def describe_cores(root: Path = Path("/")) -> Cores:
    """Return the limits on the number of cores that this process may use.

    ``root`` is the parent folder of ``proc`` and ``sys``; tests pass a temporary folder.
    """
    machine = os.cpu_count() or 1
    affinity = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else machine
    quotas: list[float] = []
    for both, *each in cgroup_files("cpu", ("cpu.max", "cpu.cfs_quota_us", "cpu.cfs_period_us"), root):
        words = both.split()  # version 2: "max 100000" or "150000 100000"
        if len(words) != 2:  # version 1; a quota of -1 means no quota
            words = [one.strip() for one in each]
        quota, period = (int(word) if word.isdigit() else 0 for word in words)
        quotas += [quota / period] if quota and period else []
    return Cores(machine, affinity, min(quotas, default=None))


def cgroup_files(controller: str, names: Sequence[str], root: Path = Path("/")) -> Iterator[list[str]]:
    """Yield the contents of these files in each cgroup of this process; the limits of all these cgroups apply.

    A file that does not exist has the content ``""``. See `describe_cores` for ``root``.
    """
    for line in _read(root / "proc/self/cgroup").splitlines():  # hierarchy:controllers:path
        controllers, _, path = line.partition(":")[2].partition(":")
        if controllers and controller not in controllers.split(","):
            continue
        mount = root / "sys/fs/cgroup" / (controller if controllers else "")  # version 2 names no controllers
        # A container may see the host's path although only the container's group is mounted, as the root.
        group = Path(path.lstrip("/")) if ".." not in path else Path()
        for folder in (mount / group, *(mount / parent for parent in group.parents)):
            yield [_read(folder / name) for name in names]


def _read(path: Path) -> str:
    with Ignore(OSError):
        return path.read_text(encoding="utf-8", errors="replace")
    return ""
