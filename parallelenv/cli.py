"""The commands ``parallelenv compare``, ``recommend`` and ``doctor``.

Exit codes: 0 success; 1 a mode failed, or its results differ from those of the plain loop; 2 the command was invalid;
130 interrupted.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from parallelenv import __version__
from parallelenv.autotune import compare, doctor, report
from parallelenv.autotune.recommend import recommend
from parallelenv.contract.cpu_cores import usable_cores
from parallelenv.contract.error_text import did_you_mean, one_line
from parallelenv.contract.progress import open_bar
from parallelenv.errors import ArgumentError, ParallelEnvError


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code."""
    arguments = _parser().parse_args(argv)
    command: Callable[[argparse.Namespace], int] = arguments.command
    try:
        return command(arguments)
    except ParallelEnvError as error:
        print(f"parallelenv: {one_line(error)}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("parallelenv: interrupted", file=sys.stderr)
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("parallelenv", description="Measure, compare and diagnose ParallelEnv.")
    parser.add_argument("--version", action="version", version=f"parallelenv {__version__}")
    commands = parser.add_subparsers(title="commands", required=True, metavar="{compare,recommend,doctor}")
    _add_compare(commands)
    _add_recommend(commands)
    diagnose = commands.add_parser(
        "doctor",
        help="show what this machine offers",
        description="Show cores, memory, Ray and versions: what to look at, or to send along, when "
        "something is slow or fails. Starts nothing.",
    )
    diagnose.add_argument("--json", action="store_true", help="print JSON; docs/api/command_line.md lists the keys")
    diagnose.set_defaults(command=_doctor)
    return parser


def _add_compare(commands: Any) -> None:
    parser = commands.add_parser(
        "compare",
        help="measure every mode on your envs and recommend one",
        description="Step each env with the same random actions in every mode, check that the results are "
        "identical bit for bit, time the modes in turns, and recommend one.",
        epilog="Exit code 1 if a mode failed or gave other results than the plain loop.",
    )
    add = parser.add_argument
    add("envs", nargs="+", metavar="ENV", help="registered id, for example CartPole-v1 or module:Name-v0")
    add("--num-envs", type=_count, default=16, metavar="N", help="envs per mode (default: %(default)s)")
    add(
        "--modes", nargs="+", default=[], metavar="MODE", help=f"{', '.join(compare.comparable_words())} (default: all)"
    )
    add("--num-cpus", type=_count, metavar="K", help="cores the envs may use (default: all usable ones)")
    add("--steps", type=_count, default=200, metavar="S", help="steps to compare (default: %(default)s)")
    add("--seconds", type=_duration, default=2.0, help="how long to time each mode (default: %(default)s)")
    add("--seed", type=_seed, default=0, help="of envs and actions (default: %(default)s)")
    add("--plot", type=Path, metavar="FILE", help="draw the result into a picture; needs matplotlib")
    add("--no-progress", dest="progress", action="store_false", help="show no progress bar")
    add("--json", action="store_true", help="print JSON; docs/api/command_line.md lists the keys")
    parser.set_defaults(command=_compare)


def _add_recommend(commands: Any) -> None:
    parser = commands.add_parser(
        "recommend",
        help="try your envs for a moment and say which mode suits them",
        description="Step the envs for a moment with random actions in each mode that could be the fastest, and say in "
        'one line which is and why. It is what para_mode="auto" goes by.',
    )
    add = parser.add_argument
    add("envs", nargs="+", metavar="ENV", help="registered id, for example CartPole-v1 or module:Name-v0")
    add("--num-envs", type=_count, default=16, metavar="N", help="how many there would be (default: %(default)s)")
    add("--num-cpus", type=_count, metavar="K", help="cores the envs may use (default: what gives the best speed)")
    parser.set_defaults(command=_recommend)


def _recommend(arguments: argparse.Namespace) -> int:
    for name in arguments.envs:
        found = recommend([name] * arguments.num_envs, num_cpus=arguments.num_cpus)
        print(f"{name}: {found}", flush=True)
    return 0


def _compare(arguments: argparse.Namespace) -> int:
    plan = compare.ComparisonSettings(
        num_envs=arguments.num_envs,
        modes=_modes(arguments.modes),
        num_cpus=arguments.num_cpus,
        steps=arguments.steps,
        seconds=arguments.seconds,
        seed=arguments.seed,
    )
    if arguments.plot is not None:
        report.check_plot(arguments.plot)
    for name in arguments.envs:
        compare.check_env(name)
    # Keep the output of envs out of the JSON.
    with contextlib.redirect_stdout(sys.stderr) if arguments.json else contextlib.nullcontext():
        comparisons = [_compare_one(name, plan, arguments.progress) for name in arguments.envs]
        if arguments.plot is not None:
            report.plot(comparisons, arguments.plot)
            print(f"Picture: {arguments.plot}")
    if arguments.json:
        print(json.dumps([comparison.as_dict() for comparison in comparisons], indent=2))
    return 0 if all(comparison.is_sound for comparison in comparisons) else 1


def _compare_one(name: str, plan: compare.ComparisonSettings, shows_progress: bool) -> compare.Comparison:
    style = "{desc} {percentage:3.0f}%|{bar}| {elapsed}"
    # The progress adds up fractions: a rounding error above the total would make tqdm warn.
    total = compare.amount_of_work(plan) * (1 + 1e-9)
    with open_bar(shows_progress, total=total, bar_format=style) as progress:
        comparison = compare.compare(name, plan, progress)
    cores = plan.num_cpus or usable_cores()
    rounds = f"{compare.ROUNDS} rounds of {plan.seconds / compare.ROUNDS:g} s in turns with {compare.ORACLE}"
    print(f"{name}: {plan.num_envs} envs, {cores} cores; {plan.steps} steps compared; {rounds}, medians")
    print(f"{report.describe_comparison(comparison)}\n", flush=True)
    return comparison


def _modes(words: Sequence[str]) -> tuple[str, ...]:
    """Return the requested modes without duplicates, the oracle first; words may be separated by commas too."""
    known = compare.comparable_words()
    asked = [word for item in words for word in item.split(",") if word] or known
    for word in asked:
        if word not in known:
            hint = did_you_mean(word, known)
            raise ArgumentError(f"--modes {word} is not known; expected some of {', '.join(known)}.{hint}")
    return tuple(dict.fromkeys([compare.ORACLE, *asked]))


def _doctor(arguments: argparse.Namespace) -> int:
    print(json.dumps(doctor.facts(), indent=2) if arguments.json else doctor.describe())
    return 0


def _count(text: str) -> int:
    value = int(text) if text.isdecimal() else 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number of at least 1")
    return value


def _seed(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number of at least 0")
    return int(text)


def _duration(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is no number of seconds above 0")
    return value
