"""Tests of the contract suite: it must detect faulty backends, and accept a correct one."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest
from broken_backends import CATCHERS

pytestmark = pytest.mark.timeout(240)  # the first test runs a suite: 10 s alone, 60 s on a very busy machine
_FILE = Path(__file__).with_name("broken_backends.py")


@pytest.fixture(scope="module")
def failed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, set[str]]:
    """Run the suite over a correct backend, and over each faulty backend the test that must detect it.

    Returns:
        The names of the tests that failed, by backend.
    """
    report = tmp_path_factory.mktemp("suite") / "report.xml"
    options = ["-q", "--tb=no", "--timeout=30", "-p", "no:cacheprovider", f"--junitxml={report}"]
    chosen = ["TestBackend", *(f"Test{fault.__name__}::{catcher}" for fault, catcher in CATCHERS.items())]
    command = [sys.executable, "-m", "pytest", *options, *(f"{_FILE}::{name}" for name in chosen)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=220, check=False)
    assert report.exists(), done.stdout + done.stderr
    found: dict[str, set[str]] = {}
    for case in ElementTree.parse(report).iter("testcase"):
        names = found.setdefault(case.attrib["classname"].rpartition(".Test")[2], set())
        if case.find("failure") is not None or case.find("error") is not None:
            names.add(case.attrib["name"])
    return found


@pytest.mark.parametrize("fault", CATCHERS, ids=lambda fault: fault.__name__)
def test_contract_detects_each_faulty_backend(fault: type, failed: dict[str, set[str]]) -> None:
    assert CATCHERS[fault] in failed[fault.__name__]


def test_contract_accepts_a_correct_backend(failed: dict[str, set[str]]) -> None:
    assert failed["Backend"] == set()
