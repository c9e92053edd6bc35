"""Core counts, read from fake machines."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from parallelenv.contract import cpu_cores
from parallelenv.contract.cpu_cores import Cores, describe_cores, usable_cores


def quota(root: Path, group: str, limits: dict[str, str]) -> float | None:
    """Return the quota on a machine with a ``/proc/self/cgroup`` and these files in ``/sys/fs/cgroup``."""
    for name, text in {"proc/self/cgroup": group, **{f"sys/fs/cgroup/{name}": limits[name] for name in limits}}.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text + "\n")
    return describe_cores(root).quota


def test_smallest_quota_of_all_parent_cgroups_applies(tmp_path: Path) -> None:
    limits = {"jobs/a/cpu.max": "max 100000", "jobs/cpu.max": "150000 100000", "cpu.max": "800000 100000"}
    assert quota(tmp_path, "0::/jobs/a", limits) == 1.5


@pytest.mark.parametrize(("microseconds", "expected"), [("50000", 0.5), ("-1", None)])
def test_cgroup_v1_quota_is_read(tmp_path: Path, microseconds: str, expected: float | None) -> None:
    limits = {"cpu/jobs/cpu.cfs_quota_us": microseconds, "cpu/jobs/cpu.cfs_period_us": "100000"}
    assert quota(tmp_path, "4:cpu,cpuacct:/jobs\n1:name=systemd:/x\n0::/", limits) == expected


def test_container_with_cgroup_path_of_the_host_reads_its_own_mount(tmp_path: Path) -> None:
    limits = {"cpu/cpu.cfs_quota_us": "300000", "cpu/cpu.cfs_period_us": "100000"}
    assert quota(tmp_path, "4:cpu,cpuacct:/docker/abc", limits) == 3.0


def test_cgroup_outside_the_namespace_reads_the_mount(tmp_path: Path) -> None:
    limits = {"cpu.max": "400000 100000", "../cpu.max": "100000 100000"}
    assert quota(tmp_path, "0::/../other", limits) == 4.0


@pytest.mark.parametrize("text", ["", "max", "x y", "0 100000", "100000 0", "1 2 3"])
def test_unreadable_quota_is_none(tmp_path: Path, text: str) -> None:
    assert quota(tmp_path, "0::/", {"cpu.max": text}) is None


@pytest.mark.parametrize("group", ["", "0::/"])
def test_machine_without_cgroups_has_no_quota(tmp_path: Path, group: str) -> None:
    assert quota(tmp_path, group, {}) is None


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


def test_usable_cores_is_between_one_and_all_cores_of_the_machine() -> None:
    assert 1 <= usable_cores() <= describe_cores().machine
