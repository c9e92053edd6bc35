"""How many CPU cores this process may use, and by which limit.

`os.cpu_count` counts the machine's cores. A process may be allowed fewer: by its CPU affinity (`taskset`, a batch
scheduler, a cpuset), or by a cgroup's CPU quota (a container started with "1.5 CPUs" still sees every core of the
machine).
"""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from pathlib import Path, PurePosixPath


@dataclass(frozen=True, slots=True)
class Cores:
    """The limits on the cores of this process.

    Attributes:
        machine: Logical cores of the machine.
        affinity: Cores this process may be scheduled on; ``machine`` where the system has no affinity (macOS).
        quota: CPU time per unit of wall time granted by the tightest cgroup, in cores (1.5 is one and a half cores), or
            ``None`` without a quota.
    """

    machine: int
    affinity: int
    quota: float | None

    @property
    def usable(self) -> int:
        """The smaller of affinity and quota, at least 1; a fraction of a core counts as a core."""
        if self.quota is None:
            return max(1, self.affinity)
        # Rounded up, as in Go, Java and loky: the last fraction of a core is still worth a worker.
        return max(1, min(self.affinity, math.ceil(self.quota)))


def usable_cores() -> int:
    """Return how many cores this process may use, at least 1."""
    return describe_cores().usable


def describe_cores(root: Path = Path("/")) -> Cores:
    """Return the core counts that `usable_cores` is computed from.

    Args:
        root: Parent folder of ``proc`` and the cgroup mounts; tests pass a fake one.
    """
    return Cores(os.cpu_count() or 1, _affinity(), _cgroup_quota(root))


def cpu_seconds() -> float | None:
    """Return the CPU time that all programs together have used on this process's cores since the system started.

    In seconds; resolution: 10 ms per core. ``None`` where the system does not provide it (macOS, Windows).
    """
    if not hasattr(os, "sched_getaffinity"):
        return None
    cores = {f"cpu{number}" for number in os.sched_getaffinity(0)}
    lines = [line.split() for line in _read(Path("/proc/stat")).splitlines() if line.partition(" ")[0] in cores]
    # user, nice, system, idle, iowait, irq, softirq, and steal: the time of other virtual machines
    ticks = [sum(map(int, words[1:4])) + sum(map(int, words[6:9])) for words in lines]
    return sum(ticks) / os.sysconf("SC_CLK_TCK") if ticks else None


def _affinity() -> int:
    if hasattr(os, "sched_getaffinity"):  # Linux and some BSDs
        return len(os.sched_getaffinity(0))
    if hasattr(os, "process_cpu_count"):  # Python 3.13 and later, elsewhere
        return os.process_cpu_count() or 1
    return os.cpu_count() or 1


def _cgroup_quota(root: Path) -> float | None:
    """Return the tightest quota of this process's cgroup and of all groups above it."""
    quotas = [_read_quota(folder) for folder in _cgroup_folders(root)]
    return min((quota for quota in quotas if quota is not None), default=None)


def _cgroup_folders(root: Path) -> list[Path]:
    """Return the folders that may contain a quota, from the process's own group up to the mount.

    A limit on any group above also applies to this process, so all are read.
    """
    groups = _own_groups(_read(root / "proc/self/cgroup"))
    folders: list[Path] = []
    for line in _read(root / "proc/self/mountinfo").splitlines():
        mount = _cpu_mount(line)
        if mount is None or mount[0] not in groups:
            continue
        version, inside, point = mount
        folder = root / point.relative_to("/")
        below = _below(groups[version], inside)
        folders += [folder / below, *(folder / parent for parent in below.parents)]
    return folders


def _own_groups(text: str) -> dict[int, PurePosixPath]:
    """Return the process's cgroup by cgroup version, from ``/proc/self/cgroup``.

    A line is ``hierarchy:controllers:path``; version 2 has no controllers.
    """
    groups: dict[int, PurePosixPath] = {}
    for line in text.splitlines():
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if not controllers:
            groups[2] = PurePosixPath(path)
        elif "cpu" in controllers.split(","):
            groups[1] = PurePosixPath(path)
    return groups


def _cpu_mount(line: str) -> tuple[int, PurePosixPath, PurePosixPath] | None:
    """Return version, mounted folder and mount point if a ``mountinfo`` line mounts CPU cgroups.

    A line is ``id parent major:minor root point options [tags] - type source super-options``.
    """
    left, _, right = line.partition(" - ")
    fields, kind = left.split(), right.split()
    if len(fields) < 5 or len(kind) < 3:
        return None
    inside, point = PurePosixPath(fields[3]), PurePosixPath(fields[4])
    if kind[0] == "cgroup2":
        return 2, inside, point
    if kind[0] == "cgroup" and "cpu" in kind[2].split(","):
        return 1, inside, point
    return None


def _below(group: PurePosixPath, mounted: PurePosixPath) -> PurePosixPath:
    """Return the path from the mounted folder down to ``group``.

    A container may see the host's path but have only its own folder mounted; its own folder is then the mount itself.
    """
    if group.is_relative_to(mounted) and ".." not in group.parts:
        return group.relative_to(mounted)
    return PurePosixPath()


def _read_quota(folder: Path) -> float | None:
    """Return the quota set on one cgroup, in cores, or ``None`` if it sets none."""
    words = _read(folder / "cpu.max").split()  # version 2: "max 100000" or "150000 100000"
    if len(words) != 2:  # version 1; a quota of -1 is none
        words = [_read(folder / name).strip() for name in ("cpu.cfs_quota_us", "cpu.cfs_period_us")]
    quota, period = words
    if not quota.isdigit() or not period.isdigit() or int(period) == 0 or int(quota) == 0:
        return None
    return int(quota) / int(period)


def _read(path: Path) -> str:
    """Return the text of a file, or an empty string if it does not exist or cannot be read."""
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
