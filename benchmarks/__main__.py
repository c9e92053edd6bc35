"""Steps the same envs in every mode and with other libraries, and writes a report of the speeds.

Usage: python -m benchmarks [--only CASE...] [--rounds N] [--seconds S] [--quick] [--out DIR] [--again]
"""

from __future__ import annotations

import argparse
import os
import shlex
import signal
import sys
from pathlib import Path

from benchmarks import picture, report
from benchmarks.cases import CASES, Case
from benchmarks.runner import ROOT, Pace, Results, run

_COMMITTED = ROOT / "benchmarks"
_ELSEWHERE = ROOT / "build" / "benchmarks"


def main() -> int:
    """Run the requested cases, and return the exit code."""
    options = _options()
    cases = [case for case in CASES if not options.only or case.name in options.only]
    if options.again:
        _write(options.out or _COMMITTED, cases, *report.read(options.out or _COMMITTED))
        return 0
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # an exception, so that child processes are ended
    about, results = report.describe_machine(), Results()
    print(f"usable cores: {about['usable cores']}, load average {about['load average before the start']}")
    is_interrupted = False
    try:
        run(cases, Pace(options.rounds, options.seconds, options.quick), results)
    except KeyboardInterrupt:
        is_interrupted = True
        if results:
            results.popitem()  # the case in progress
    folder = _folder(options, is_interrupted)
    _write(folder, cases, results, about, shlex.join(["python", "-m", "benchmarks", *sys.argv[1:]]))
    return 130 if is_interrupted else 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", metavar="CASE", choices=[case.name for case in CASES], help="these cases")
    parser.add_argument("--rounds", type=_positive_int, help="rounds of each system (default: see the case)")
    parser.add_argument("--seconds", type=_positive_float, help="seconds per system and round (default: see the case)")
    parser.add_argument("--quick", action="store_true", help="one round and a fifth of the time: for a first look only")
    parser.add_argument("--out", type=Path, help="folder of the results (default: benchmarks/ for a full run)")
    parser.add_argument("--again", action="store_true", help="measure nothing; rewrite the tables of results.json")
    return parser.parse_args()


def _positive_int(text: str) -> int:
    if int(text) < 1:
        raise ValueError(text)
    return int(text)


def _positive_float(text: str) -> float:
    if not 0 < float(text) < float("inf"):
        raise ValueError(text)
    return float(text)


def _folder(options: argparse.Namespace, is_interrupted: bool) -> Path:
    """Return the folder to write to. Only a full run replaces the committed results."""
    if options.out:
        return options.out
    is_full = not (options.only or options.rounds or options.seconds or options.quick or is_interrupted)
    return _COMMITTED if is_full else _ELSEWHERE


def _write(folder: Path, cases: list[Case], results: Results, about: dict[str, str], command: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    report.write(folder, cases, results, about, command)
    picture.draw(folder / "results.png", cases, results, about)
    print(f"written: {os.path.relpath(folder)}/RESULTS.md, results.json, results.png")


if __name__ == "__main__":
    sys.exit(main())
