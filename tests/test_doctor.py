"""The report of the command doctor."""

from __future__ import annotations

import os
import socket
import sys
from pathlib import Path

import pytest

from parallelenv.__main__ import main
from parallelenv.autotune import doctor
from parallelenv.contract.cpu_cores import Cores


@pytest.fixture(autouse=True)
def no_cluster(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Hide clusters of other programs, and return the file where Ray records its cluster."""
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    (tmp_path / "ray").mkdir()
    return tmp_path / "ray/ray_current_cluster"


def line(name: str) -> str:
    """Return the text under a name."""
    (found,) = [text for text in doctor.describe().splitlines() if text.startswith(f"  {name} ")]
    return found.removeprefix(f"  {name} ").strip()


def test_doctor_prints_every_subject_and_imports_no_ray(capsys: pytest.CaptureFixture[str]) -> None:
    before = set(sys.modules)
    assert main(["doctor"]) == 0
    output = capsys.readouterr().out
    titles = [text for text in output.splitlines() if text and not text.startswith(" ")]
    assert titles == ["Cores", "Worker processes", "Memory", "Ray", "Versions"]
    assert "ray" not in set(sys.modules) - before


def test_doctor_shows_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    for quota, text in (None, "none"), (1.5, "1.5"):
        cores = Cores(machine=8, affinity=4, quota=quota)
        monkeypatch.setattr(doctor, "describe_cores", lambda cores=cores: cores)
        assert line("cgroup quota") == text
        assert line("usable").startswith(f"{cores.usable} (the default")


def test_doctor_shows_what_is_missing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert line("running") == "no; a Ray mode starts it by itself"
    monkeypatch.setattr(doctor, "_version", lambda _: None)
    assert "pip install ray" in line("installed")
    assert line("numpy") == "not installed"
    monkeypatch.delattr(os, "memfd_create", raising=False)
    monkeypatch.setattr("tempfile.gettempdir", lambda: str(tmp_path))
    assert line("batches live in") == str(tmp_path)


def test_doctor_detects_a_cluster_that_has_ended(no_cluster: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    no_cluster.write_text(f"127.0.0.1:{port}\n")
    assert (line("running"), line("answers")) == (f"127.0.0.1:{port}", "no")


@pytest.mark.parametrize("scheme", ["", "ray://"])
def test_doctor_detects_a_running_cluster(monkeypatch: pytest.MonkeyPatch, scheme: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"{scheme}127.0.0.1:{server.getsockname()[1]}"
        monkeypatch.setenv("RAY_ADDRESS", address)
        assert (line("running"), line("answers")) == (address, "yes")


@pytest.mark.parametrize("address", ["auto", "host:what"])
def test_doctor_shows_unparsable_ray_address_unchanged(monkeypatch: pytest.MonkeyPatch, address: str) -> None:
    monkeypatch.setenv("RAY_ADDRESS", address)
    assert line("running") == address
