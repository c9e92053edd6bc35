"""The report of the command doctor."""

from __future__ import annotations

import json
import os
import socket
import sys
from pathlib import Path
from typing import Any

import pytest

from parallelenv.__main__ import main
from parallelenv.autotune import doctor
from parallelenv.contract.cpu_cores import Cores


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
    monkeypatch.setattr(doctor, "_version", lambda _: None)
    assert "pip install ray" in line("installed")
    assert line("numpy") == "not installed"
    monkeypatch.delattr(os, "memfd_create", raising=False)
    monkeypatch.setattr("tempfile.gettempdir", lambda: str(tmp_path))
    assert line("batches live in") == str(tmp_path)


def test_doctor_shows_the_cluster_that_a_ray_mode_would_join(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    assert line("running") == "no; a Ray mode starts it by itself"
    with socket.create_server(("127.0.0.1", 0)) as server:
        place = f"127.0.0.1:{server.getsockname()[1]}"
        for address in (place, f"ray://{place}"):
            monkeypatch.setenv("RAY_ADDRESS", address)
            assert (line("running"), line("answers")) == (address, "yes")
    for address in ("auto", "host:what"):  # which are not parsed
        monkeypatch.setenv("RAY_ADDRESS", address)
        assert line("running") == address
    monkeypatch.delenv("RAY_ADDRESS")
    (tmp_path / "ray").mkdir()
    (tmp_path / "ray/ray_current_cluster").write_text(f"{place}\n")  # Ray's record of a cluster, which has ended
    assert (line("running"), line("answers")) == (place, "no")


@pytest.mark.parametrize("kind", ["refused", "no text", "a folder"])
def test_doctor_reports_a_record_of_ray_that_cannot_be_read(
    kind: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    file, read = tmp_path / "ray/ray_current_cluster", Path.read_text
    file.parent.mkdir()
    if kind == "refused":  # as for the folder of another user; root can read everything

        def read_text(path: Path, *args: Any, **kwargs: Any) -> str:
            if path == file:
                raise PermissionError(13, "Permission denied", str(path))
            return read(path, *args, **kwargs)

        monkeypatch.setattr(Path, "read_text", read_text)
        monkeypatch.setattr(Path, "is_file", read_text)  # of Python 3.11
        text = "PermissionError: [Errno 13] Permission denied: "
    elif kind == "no text":
        file.write_bytes(b"\xff\xfe:1")
        text = "UnicodeDecodeError: "
    else:
        file.mkdir()
        text = "IsADirectoryError: "
    assert line("running") == "unknown"
    assert line("unreadable").startswith(text)
    assert main(["doctor", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["ray"]
    assert (found["running"], found["unreadable"].startswith(text)) == (None, True)
    monkeypatch.setenv("RAY_ADDRESS", "auto")  # the record does not matter
    assert line("running") == "auto"
