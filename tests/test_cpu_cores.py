"""Core counts, read from fake machines."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import pytest

from parallelenv.contract import cpu_cores
from parallelenv.contract.cpu_cores import Cores, cpu_seconds, describe_cores, usable_cores

V2_MOUNT = "30 23 0:26 / /sys/fs/cgroup rw,nosuid shared:4 - cgroup2 cgroup2 rw,nsdelegate"
V1_MOUNT = "32 31 0:29 {inside} /sys/fs/cgroup/cpu rw,relatime - cgroup cgroup rw,cpu,cpuacct"


def pretend(root: Path, group: str, mount: str, limits: dict[str, str]) -> Path:
    """Write a fake ``/proc/self`` and the cgroup files in ``limits`` (path -> text)."""
    files = {"proc/self/cgroup": group, "proc/self/mountinfo": mount, **limits}
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text + "\n")
    return root


def test_cgroup_v2_quota_is_read(tmp_path: Path) -> None:
    limits = {"sys/fs/cgroup/jobs/a/cpu.max": "150000 100000"}
    assert describe_cores(pretend(tmp_path, "0::/jobs/a", V2_MOUNT, limits)).quota == 1.5


def test_smallest_quota_of_all_parent_cgroups_applies(tmp_path: Path) -> None:
    limits = {
        "sys/fs/cgroup/jobs/a/cpu.max": "max 100000",
        "sys/fs/cgroup/jobs/cpu.max": "200000 100000",
        "sys/fs/cgroup/cpu.max": "800000 100000",
    }
    assert describe_cores(pretend(tmp_path, "0::/jobs/a", V2_MOUNT, limits)).quota == 2.0


def test_cgroup_v1_quota_is_read(tmp_path: Path) -> None:
    folder = "sys/fs/cgroup/cpu/jobs"
    limits = {f"{folder}/cpu.cfs_quota_us": "50000", f"{folder}/cpu.cfs_period_us": "100000"}
    root = pretend(tmp_path, "4:cpu,cpuacct:/jobs\n1:name=systemd:/x", V1_MOUNT.format(inside="/"), limits)
    assert describe_cores(root).quota == 0.5


def test_cgroup_v1_without_quota_is_none(tmp_path: Path) -> None:
    folder = "sys/fs/cgroup/cpu"
    limits = {f"{folder}/cpu.cfs_quota_us": "-1", f"{folder}/cpu.cfs_period_us": "100000"}
    root = pretend(tmp_path, "4:cpu,cpuacct:/", V1_MOUNT.format(inside="/"), limits)
    assert describe_cores(root).quota is None


@pytest.mark.parametrize("inside", ["/docker/abc", "/another"])
def test_container_with_cgroup_path_of_the_host_reads_its_own_mount(tmp_path: Path, inside: str) -> None:
    folder = "sys/fs/cgroup/cpu"
    limits = {f"{folder}/cpu.cfs_quota_us": "300000", f"{folder}/cpu.cfs_period_us": "100000"}
    root = pretend(tmp_path, "4:cpu,cpuacct:/docker/abc", V1_MOUNT.format(inside=inside), limits)
    assert describe_cores(root).quota == 3.0


def test_cgroup_outside_the_namespace_reads_the_mount(tmp_path: Path) -> None:
    limits = {"sys/fs/cgroup/cpu.max": "400000 100000", "sys/fs/cpu.max": "100000 100000"}
    assert describe_cores(pretend(tmp_path, "0::/../other", V2_MOUNT, limits)).quota == 4.0


@pytest.mark.parametrize("text", ["", "max", "x y", "0 100000", "100000 0", "1 2 3"])
def test_unreadable_quota_is_none(tmp_path: Path, text: str) -> None:
    limits = {"sys/fs/cgroup/cpu.max": text}
    assert describe_cores(pretend(tmp_path, "0::/", V2_MOUNT, limits)).quota is None


@pytest.mark.parametrize(("group", "mount"), [("", ""), ("nonsense", "nonsense - x"), ("0::/", "")])
def test_machine_without_cgroups_has_no_quota(tmp_path: Path, group: str, mount: str) -> None:
    assert describe_cores(pretend(tmp_path, group, mount, {})).quota is None


@pytest.mark.parametrize(
    ("affinity", "quota", "usable"),
    [(8, None, 8), (8, 2.0, 2), (2, 8.0, 2), (8, 1.5, 2), (8, 0.1, 1), (0, None, 1)],
)
def test_usable_cores_is_the_smallest_limit_and_at_least_one(affinity: int, quota: float | None, usable: int) -> None:
    assert Cores(machine=16, affinity=affinity, quota=quota).usable == usable


def test_all_cores_count_without_sched_getaffinity(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)
    monkeypatch.delattr(os, "process_cpu_count", raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: 7)
    assert describe_cores(Path("/nowhere")) == Cores(machine=7, affinity=7, quota=None)


def test_usable_cores_equals_usable_of_describe_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_cores, "describe_cores", lambda: Cores(machine=64, affinity=4, quota=2.5))
    assert usable_cores() == 3


def test_usable_cores_is_between_one_and_all_cores_of_the_machine() -> None:
    assert 1 <= usable_cores() <= describe_cores().machine


@pytest.mark.skipif(sys.platform != "linux", reason="the system does not say")
def test_cpu_seconds_includes_time_of_this_process() -> None:
    before, own = cpu_seconds(), time.process_time()
    assert before is not None
    while time.process_time() - own < 0.3:
        pass
    after = cpu_seconds()
    assert after is not None
    assert 0.2 < after - before < 10  # ticks of 10 ms per core
