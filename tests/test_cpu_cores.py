"""Core counts and available memory, read from fake machines."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from parallelenv.backends._shared_memory import available_memory
from parallelenv.contract import cpu_cores
from parallelenv.contract.cpu_cores import Cores, describe_cores, usable_cores

STATISTICS = "anon 100\nfile 900\nshmem 200\nactive_file 300\ninactive_file 400"


def v1(folder: str, microseconds: str) -> dict[str, str]:
    """Return the files of a quota of cgroups of version 1."""
    return {f"{folder}/cpu.cfs_quota_us": microseconds, f"{folder}/cpu.cfs_period_us": "100000"}


@pytest.mark.parametrize(
    ("group", "limits", "expected"),
    [
        # the smallest quota of all levels
        (
            "0::/jobs/a",
            {"jobs/a/cpu.max": "max 100000", "jobs/cpu.max": "150000 100000", "cpu.max": "800000 100000"},
            1.5,
        ),
        ("4:cpu,cpuacct:/jobs\n1:name=systemd:/x\n0::/", v1("cpu/jobs", "50000"), 0.5),
        ("4:cpu,cpuacct:/jobs\n1:name=systemd:/x\n0::/", v1("cpu/jobs", "-1"), None),
        ("4:cpu,cpuacct:/docker/abc", v1("cpu", "300000"), 3.0),  # a container that sees the path of the host
        ("0::/../other", {"cpu.max": "400000 100000", "../cpu.max": "100000 100000"}, 4.0),  # outside the namespace
        *[("0::/", {"cpu.max": text}, None) for text in ("", "max", "x y", "0 100000", "100000 0", "1 2 3")],
        ("0::/", {}, None),
        ("", {}, None),
    ],
)
def test_cgroup_quota_is_read(tmp_path: Path, group: str, limits: dict[str, str], expected: float | None) -> None:
    write(tmp_path, group, limits)
    assert describe_cores(tmp_path).quota == expected


def write(root: Path, group: str, limits: dict[str, str], **others: str) -> None:
    files = {"proc/self/cgroup": group, **{f"sys/fs/cgroup/{name}": text for name, text in limits.items()}, **others}
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text + "\n")


@pytest.mark.parametrize(
    ("limits", "expected"),
    [
        ({"a/memory.max": "4000", "a/memory.current": "1000"}, 3000),
        ({"memory/b/memory.limit_in_bytes": "4000", "memory/b/memory.usage_in_bytes": "1000"}, 3000),  # version 1
        # 700 bytes of cached files, but not the shared memory, can be freed
        ({"a/memory.max": "4000", "a/memory.current": "3000", "a/memory.stat": STATISTICS}, 1700),
        ({"a/memory.max": "max", "a/memory.current": "1000", "memory.max": "2000", "memory.current": "1500"}, 500),
        ({"a/memory.max": "90000", "a/memory.current": "1000"}, 8192),  # the machine has less
        ({"a/memory.max": "4000"}, 8192),
        ({}, 8192),
    ],
)
def test_memory_limit_of_cgroups_is_read(tmp_path: Path, limits: dict[str, str], expected: int) -> None:
    write(tmp_path, "3:memory:/b\n0::/a", limits, **{"proc/meminfo": "MemTotal: 16 kB\nMemAvailable: 8 kB"})
    assert available_memory(tmp_path) == expected


@pytest.mark.parametrize(
    ("affinity", "quota", "usable"), [(8, None, 8), (8, 2.0, 2), (2, 8.0, 2), (8, 1.5, 2), (8, 0.1, 1), (0, None, 1)]
)
def test_usable_cores_is_the_smallest_limit_and_at_least_one(
    affinity: int, quota: float | None, usable: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpu_cores, "describe_cores", lambda: Cores(machine=16, affinity=affinity, quota=quota))
    assert usable_cores() == usable


def test_all_cores_count_without_sched_getaffinity(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: 7)
    assert describe_cores(Path("/nowhere")) == Cores(machine=7, affinity=7, quota=None)
