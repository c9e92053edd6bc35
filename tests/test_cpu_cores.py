"""Core counts, read from fake machines."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from parallelenv.contract import cpu_cores
from parallelenv.contract.cpu_cores import Cores, describe_cores, usable_cores


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
    files = {"proc/self/cgroup": group, **{f"sys/fs/cgroup/{name}": text for name, text in limits.items()}}
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text + "\n")
    assert describe_cores(tmp_path).quota == expected


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
