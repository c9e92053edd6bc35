"""Train MetaBox's agents with its own parallel environment and with ours, and compare the weights.

``python -m tests.metabox [NAME ...] [--modes MODE ...] [--keep FOLDER]``; made ready by ``make metabox``.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
from modes import IN_CALLER, MODES, ON_RAY, ORACLE

from .train import DIFFERENTIATED, UNSEEDED, same

NAMES = ("DEDDQN", "RLPSO", "GLEET", "RLDAS", "QLPSO", "RLHPSDE", "RLEPSO", "SYMBOL", *DIFFERENTIATED)
REFUSED = "gradients refused"
DRAWN = "other random numbers"
UNUSED = ("openai", "tianshou", "xgboost")
"""Large packages that MetaBox imports and no run here uses: empty modules stand for them."""
LIMIT = 900.0  # seconds for one run; Ray's workers each import MetaBox


def main() -> int:
    """Run everything, print a table in Markdown and return whether all is as expected."""
    parser = argparse.ArgumentParser(prog="python -m tests.metabox", description=__doc__)
    parser.add_argument("names", nargs="*", choices=[*NAMES, []], metavar="NAME")  # [] is the value without any
    parser.add_argument("--modes", nargs="+", default=MODES, choices=MODES)
    parser.add_argument("--keep", type=Path, help="keep what the runs print and write in this folder")
    given = parser.parse_args()
    wrong = []
    print("| | arrays that it changes | MetaBox's own, dummy |", *(f"ours, {mode} |" for mode in given.modes))
    print("|" + " --- |" * (3 + len(given.modes)))
    with tempfile.TemporaryDirectory() as temporary:
        bench = Bench(given.keep or Path(temporary))
        for name in given.names or NAMES:
            own, cells = bench.row(name, given.modes)
            print(f"| {name} | {own['moved']} | {own['took']} |", *(f"{cell} |" for cell in cells), flush=True)
            if own["moved"] == 0 or not all(cell.startswith("same") or cell in (REFUSED, DRAWN) for cell in cells):
                wrong.append(name)
    print(f"\nNot as in MetaBox's own: {', '.join(wrong)}" if wrong else "\nAll as in MetaBox's own.")
    return bool(wrong)


class Bench:
    """Runs trainers, each in a process and a folder of its own."""

    def __init__(self, root: Path) -> None:
        self._root = root
        stubs = root / "unused"
        stubs.mkdir(parents=True, exist_ok=True)
        for name in UNUSED:
            (stubs / f"{name}.py").touch()
        paths = (str(stubs), os.getcwd())
        # One thread each: with more, sums of torch differ, and small networks gain nothing.
        self._environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}

    def row(self, name: str, modes: Any) -> tuple[dict[str, Any], list[str]]:
        """Run a trainer with MetaBox's own class and with ours in these modes; return the result, and comparisons."""
        light = [("own", ORACLE), *(("ours", mode) for mode in modes if mode not in ON_RAY)]
        with ThreadPoolExecutor(2) as pool:
            found = dict(zip(light, pool.map(lambda one: self.run(name, *one), light), strict=True))
        for mode in modes:
            if mode in ON_RAY:  # Ray's start keeps the cores busy
                found["ours", mode] = self.run(name, "ours", mode)
        own = found["own", ORACLE]
        return own, [self._compare(name, own, found["ours", mode], mode) for mode in modes]

    def run(self, name: str, whose: str, mode: str) -> dict[str, Any]:
        """Run one trainer; return the place of its arrays and the number of those it has changed, or its error."""
        folder = self._root / f"{name}-{whose}-{mode}"
        folder.mkdir(exist_ok=True)
        out, log = folder / "learned.npz", folder / "log.txt"
        command = [sys.executable, "-m", "tests.metabox.train", name, mode, whose, str(out)]
        with log.open("w") as file:
            try:
                ended = subprocess.run(
                    command, cwd=folder, env=self._environment, stdout=file, stderr=file, timeout=LIMIT, check=False
                ).returncode
            except subprocess.TimeoutExpired:
                ended = None
        lines = log.read_text(errors="replace").strip().splitlines() or [""]
        results = [json.loads(line.partition(" ")[2]) for line in lines if line.startswith("RESULT ")]
        if ended == 0 and results:
            return {"out": out, **results[0]}
        error = f"longer than {LIMIT:g} s" if ended is None else lines[-1]
        return {"moved": 0, "took": f"ERROR: {error}", "error": error}

    def _compare(self, name: str, own: dict[str, Any], ours: dict[str, Any], mode: str) -> str:
        if name in DIFFERENTIATED and mode not in IN_CALLER:
            return REFUSED if "requires grad" in ours.get("error", "") else "gradients NOT REFUSED"
        if "error" in own or "error" in ours:
            return f"ERROR: {own.get('error') or ours.get('error')}"
        with np.load(own["out"]) as expected, np.load(ours["out"]) as found:
            unlike = [key for key in expected if key not in found or not same(expected[key], found[key])]
            if unlike and name in UNSEEDED and mode not in IN_CALLER:
                return DRAWN
            if unlike or set(found) != set(expected):
                return f"OTHER in {len(unlike)} of {len(set(expected))}"
        return f"same, {ours['took']}"


if __name__ == "__main__":
    sys.exit(main())
