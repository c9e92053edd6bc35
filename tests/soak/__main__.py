"""Steps 32 envs in every mode while a seeded adversary disturbs them, and accounts for every transition.

Usage: python -m tests.soak [--seconds S] [--modes MODE...] [--seed N]
"""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections import Counter

from conftest import running_ray
from modes import MODES, ON_RAY

from .caller import StopError
from .course import Course, format_tallies


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.soak", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seconds", type=float, default=600.0, help="in all; shared out evenly (default: 600)")
    parser.add_argument("--modes", nargs="+", choices=MODES, default=MODES, metavar="MODE", help=f"of {MODES}")
    parser.add_argument("--seed", type=int, default=0, help="what the adversary does follows from it")
    options = parser.parse_args()
    tallies: dict[str, Counter[str]] = {}
    try:
        for mode in options.modes:
            with running_ray() if mode in ON_RAY else contextlib.nullcontext():
                tallies[mode] = Course(mode, options.seed).run(options.seconds / len(options.modes))
    except StopError:
        return 130
    print(f"seed {options.seed}\n{format_tallies(tallies)}")
    return 1 if any(tally["wrong"] or tally["leaks"] for tally in tallies.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
