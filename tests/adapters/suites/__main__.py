"""Run the tests of Gymnasium, Stable-Baselines3 and Tianshou against the adapters, and compare with the known failures.

``python -m tests.adapters.suites FOLDER [--suite NAME] [--mode MODE]``: the folder contains a checkout of
each. Nothing of them is stored here. A test that fails and is not in `known_failures.txt`, or is there and passes, is
an error.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from collections import Counter
from fnmatch import fnmatchcase
from pathlib import Path
from typing import NamedTuple

HERE = Path(__file__).parent
SUITES = {  # those of their tests that make a vector env
    "gymnasium": ["tests/vector/test_*.py", "tests/wrappers/vector", "tests/envs/registration/test_make_vec.py"],
    "stable-baselines3": ["tests/test_vec_*.py", "tests/test_run.py", "tests/test_gae.py", "tests/test_callbacks.py"],
    "tianshou": ["test/base/test_env.py", "test/base/test_env_finite.py", "test/base/test_collector.py"],
}
MODES = ["theirs", "dummy", "thread", "subproc"]
REASONS = ["private detail", "other text", "nature of the mode", "their own fault", "fails unpatched, too"]


class Known(NamedTuple):
    """Tests that are known to fail."""

    suite: str
    reason: str
    modes: list[str]
    pattern: str

    def covers(self, suite: str, mode: str, test: str) -> bool:
        # In a pattern only "*" is special: names of parametrized tests have brackets.
        return suite == self.suite and mode in self.modes and fnmatchcase(test, self.pattern.replace("[", "[[]"))


def read_known() -> list[Known]:
    """Return the entries of `known_failures.txt`."""
    known, suite, reason = [], "", ""
    for line in (HERE / "known_failures.txt").read_text().splitlines():
        text = line.partition("#")[0].strip()
        if text.startswith("["):
            suite, _, reason = text[1:-1].partition(": ")
            if suite not in SUITES or reason not in REASONS:
                raise ValueError(f"{line!r} names no suite or no reason.")
        elif text:
            pattern, *modes = text.split("  ")
            in_all = MODES if reason == "fails unpatched, too" else MODES[1:]
            chosen = modes[-1].split() if modes else in_all
            known.append(Known(suite, reason, chosen, pattern))
    return known


def run(folder: Path, suite: str, mode: str) -> dict[str, str]:
    """Return the outcome of each test: passed, failed or skipped; pytest's own output is in ``build/suites``."""
    root = folder.resolve() / suite
    paths = [str(found.relative_to(root)) for pattern in SUITES[suite] for found in sorted(root.glob(pattern))]
    with tempfile.TemporaryDirectory() as temporary:
        outcomes = Path(temporary, "outcomes")
        outcomes.touch()
        says = {"SUITES_MODE": mode, "SUITES_NAME": suite, "SUITES_OUTCOMES": str(outcomes)}
        options = ["-c", os.devnull, "--rootdir", ".", "-p", "no:cacheprovider", "-p", "plugin", "--timeout", "300"]
        command = [sys.executable, "-m", "pytest", *options, "-n", "2", "-q", "--tb", "short", *paths]
        # One thread for each process of torch: two that compute with two each took four times as long on two cores.
        others = {"PYTHONPATH": str(HERE), "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1"}
        environment = os.environ | says | others
        log = Path(f"build/suites/{suite}-{mode}.log")
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("w") as file:
            subprocess.run(command, cwd=root, env=environment, stdout=file, stderr=subprocess.STDOUT, check=False)
        found: dict[str, str] = {}
        for line in outcomes.read_text().splitlines():
            outcome, test = line.split("\t")
            if found.get(test) != "failed":
                found[test] = outcome
        return found


def compare(suite: str, mode: str, outcomes: dict[str, str], known: list[Known]) -> tuple[Counter[str], list[str]]:
    """Return the number of tests that passed, or failed for each reason, and the deviations from the list."""
    counts: Counter[str] = Counter()
    wrong = [] if outcomes else ["No test has run."]
    for test, outcome in sorted(outcomes.items()):
        reason = next((one.reason for one in known if one.covers(suite, mode, test)), None)
        counts[reason or "not listed" if outcome == "failed" else outcome] += 1
        if outcome == "failed" and reason is None:
            wrong.append(f"fails and is not listed: {test}")
        if outcome == "passed" and reason is not None:
            wrong.append(f"passes and is listed: {test}")
    return counts, wrong


def main() -> int:
    """Run the suites and print how many tests passed, or failed for each reason."""
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--suite", choices=SUITES, action="append")
    parser.add_argument("--mode", choices=MODES, action="append")
    arguments = parser.parse_args()
    known, all_wrong = read_known(), 0
    for suite in arguments.suite or SUITES:
        for mode in arguments.mode or MODES:
            counts, wrong = compare(suite, mode, run(arguments.folder, suite, mode), known)
            told = ", ".join(f"{number} {outcome}" for outcome, number in sorted(counts.items()))
            print(f"{suite}, {mode}: {told}", *wrong, sep="\n  ", flush=True)
            all_wrong += len(wrong)
    return int(all_wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
