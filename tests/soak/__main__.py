"""Steps 32 envs in every mode while a seeded adversary disturbs them, and accounts for every transition.

Usage: python -m tests.soak [--seconds S] [--modes MODE...] [--seed N]
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import sys
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence

from modes import MODES, ON_RAY

from .caller import StopError
from .course import Course, format_tallies


def main(arguments: Sequence[str] | None = None) -> int:
    options = _options(arguments)
    tallies: dict[str, Counter[str]] = {}
    try:
        for mode in options.modes:
            with _ray() if mode in ON_RAY else contextlib.nullcontext():
                tallies[mode] = Course(mode, options.seed).run(options.seconds / len(options.modes))
    except StopError:
        return 130
    print(f"seed {options.seed}\n{format_tallies(tallies)}")
    return 1 if any(tally["wrong"] or tally["leaks"] for tally in tallies.values()) else 0


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.soak", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seconds", type=float, default=600.0, help="in all; shared out evenly (default: 600)")
    parser.add_argument("--modes", nargs="+", choices=MODES, default=MODES, metavar="MODE", help=f"of {MODES}")
    parser.add_argument("--seed", type=int, default=0, help="what the adversary does follows from it")
    return parser.parse_args(arguments)


@contextlib.contextmanager
def _ray() -> Iterator[None]:
    """A Ray cluster that stays while pools come and go."""
    import ray

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        ray.init(num_cpus=4, include_dashboard=False, logging_level=logging.ERROR, log_to_driver=False)
    try:
        yield
    finally:
        ray.shutdown()


if __name__ == "__main__":
    sys.exit(main())
