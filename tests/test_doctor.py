"""The report of the command doctor."""

from __future__ import annotations

import os
import socket
import sys
from pathlib import Path

import pytest

from parallelenv.autotune import doctor
from parallelenv.cli import main
from parallelenv.contract.cpu_cores import Cores, usable_cores


@pytest.fixture(autouse=True)
def no_cluster(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Hide clusters of other programs, and return the directory where Ray records its cluster."""
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    (tmp_path / "ray").mkdir()
    return tmp_path / "ray"


def line(name: str) -> str:
    """Return the text under a name."""
    (found,) = [text for text in doctor.describe().splitlines() if text.startswith(f"  {name} ")]
    return found.removeprefix(f"  {name} ").strip()


def test_doctor_prints_every_subject(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor"]) == 0
    output = capsys.readouterr().out
    titles = [text for text in output.splitlines() if text and not text.startswith(" ")]
    assert titles == ["Cores", "Worker processes", "Memory", "Ray", "Versions"]


def test_doctor_shows_usable_cores() -> None:
    assert line("usable").startswith(f"{usable_cores()},")


@pytest.mark.parametrize(("quota", "text"), [(None, "none"), (1.5, "CPU time of 1.5 cores")])
def test_doctor_shows_the_cgroup_quota(monkeypatch: pytest.MonkeyPatch, quota: float | None, text: str) -> None:
    monkeypatch.setattr(doctor, "describe_cores", lambda: Cores(machine=8, affinity=4, quota=quota))
    assert line("cgroup quota") == text


def test_doctor_shows_versions() -> None:
    assert line("python").startswith(".".join(map(str, sys.version_info[:3])))
    assert line("gymnasium")[0].isdigit()


def test_doctor_says_that_ray_starts_automatically() -> None:
    assert line("running") == "no; a Ray mode starts it by itself"


def test_doctor_detects_a_cluster_that_has_ended(no_cluster: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    (no_cluster / "ray_current_cluster").write_text(f"127.0.0.1:{port}\n")
    assert line("running").startswith(f"127.0.0.1:{port} does not answer (from ")


@pytest.mark.parametrize("scheme", ["", "ray://"])
def test_doctor_detects_a_running_cluster(monkeypatch: pytest.MonkeyPatch, scheme: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"{scheme}127.0.0.1:{server.getsockname()[1]}"
        monkeypatch.setenv("RAY_ADDRESS", address)
        assert line("running") == f"{address} answers (from RAY_ADDRESS)"


@pytest.mark.parametrize(
    ("address", "text"), [("auto", "auto (from RAY_ADDRESS)"), ("host:what", "host:what does not answer")]
)
def test_doctor_shows_unparsable_ray_address_unchanged(
    monkeypatch: pytest.MonkeyPatch, address: str, text: str
) -> None:
    monkeypatch.setenv("RAY_ADDRESS", address)
    assert line("running").startswith(text)


def test_doctor_says_how_to_install_missing_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "_version", lambda _: None)
    assert "pip install ray" in line("installed")
    assert line("numpy") == "not installed"


def test_doctor_shows_shared_memory_directory_without_memfd(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "memfd_create", raising=False)
    assert " free of " in line("batches live in")


def test_doctor_does_not_import_ray() -> None:
    before = set(sys.modules)
    doctor.describe()
    assert "ray" not in set(sys.modules) - before
