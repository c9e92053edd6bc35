"""The commands ``parallelenv compare``, ``recommend`` and ``doctor``, which ``python -m parallelenv`` runs as well.

Exit codes: 0 for success; 1 if an env or a mode failed, or a mode's results differ from those of mode ``"dummy"``; 2 if
the command was invalid; 130 if the command was interrupted.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import gymnasium

from parallelenv import __version__
from parallelenv.autotune import compare, doctor
from parallelenv.autotune.recommend import ROUNDS, choose
from parallelenv.contract.cpu_cores import usable_cores
from parallelenv.contract.env_specs import make_factories
from parallelenv.contract.error_text import did_you_mean
from parallelenv.contract.failures import one_line
from parallelenv.errors import ArgumentError, InvalidEnvError, ParallelEnvError
from parallelenv.progress import open_bar


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code."""
    arguments = _parser().parse_args(argv)
    try:
        if arguments.command == "compare":
            return _compare(arguments)
        if arguments.command == "recommend":
            return _recommend(arguments)
        print(json.dumps(doctor.facts(), indent=2) if arguments.json else doctor.describe())
        return 0
    except ParallelEnvError as error:
        print(f"parallelenv: {one_line(error)}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("parallelenv: interrupted", file=sys.stderr)
        return 130


def _number(kind: type[float], least: float, text: str) -> float:
    with contextlib.suppress(ValueError):
        if least <= (value := kind(text)) < float("inf"):
            return value
    what = "a whole number" if kind is int else "a number of seconds"
    raise argparse.ArgumentTypeError(f"{text!r} must be {what} of at least {least}")


_COUNT = functools.partial(_number, int, 1)
_SEED = functools.partial(_number, int, 0)
_SECONDS = functools.partial(_number, float, 0.001)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("parallelenv", description="Measure, compare and diagnose ParallelEnv.")
    parser.add_argument("--version", action="version", version=f"parallelenv {__version__}")
    commands = parser.add_subparsers(
        title="commands", dest="command", required=True, metavar="{compare,recommend,doctor}"
    )
    env = {"nargs": "+", "metavar": "ENV", "help": "registered id, for example CartPole-v1 or module:Name-v0"}
    as_json = {"action": "store_true", "help": "print JSON; docs/api/command_line.md lists the keys"}
    words = ", ".join(compare.comparable_words())
    default = "(default: %(default)s)"
    arguments: list[tuple[str, str, dict[str, Any]]] = [
        ("compare recommend", "envs", env),
        ("compare recommend", "--num-envs", {"type": _COUNT, "default": 16, "metavar": "N", "help": f"envs {default}"}),
        ("compare recommend", "--num-cpus", {"type": _COUNT, "metavar": "K", "help": "cores the envs may use"}),
        ("compare", "--modes", {"nargs": "+", "default": [], "metavar": "MODE", "help": f"{words} (default: all)"}),
        ("compare", "--steps", {"type": _COUNT, "default": 200, "metavar": "S", "help": f"steps to compare {default}"}),
        ("compare", "--seconds", {"type": _SECONDS, "default": 2.0, "help": f"how long to time each mode {default}"}),
        ("compare", "--seed", {"type": _SEED, "default": 0, "help": f"of envs and actions {default}"}),
        ("compare", "--plot", {"type": Path, "metavar": "FILE", "help": "draw the result; needs matplotlib"}),
        ("compare", "--no-progress", {"dest": "progress", "action": "store_false", "help": "show no progress bar"}),
        ("compare doctor", "--json", as_json),
    ]
    for name, summary, details in (
        (
            "compare",
            "measure every mode on your envs and recommend one",
            "Step each env with the same random actions in every mode, check that the results are identical bit for "
            "bit, time the modes in turns, and recommend one. Exit code 1 if a mode failed or gave other results than "
            "the plain loop.",
        ),
        (
            "recommend",
            "try your envs briefly and recommend a mode",
            "Step the envs briefly with random actions in each mode that could be the fastest, and print one line with "
            'the fastest mode and the reason. para_mode="auto" uses the same trial. Exit code 1 if an env fails in the '
            "plain loop.",
        ),
        (
            "doctor",
            "show what this machine offers",
            "Show cores, memory, Ray and versions, to diagnose what is slow or fails, or for a bug report. Starts no "
            "process.",
        ),
    ):
        command = commands.add_parser(name, help=summary, description=details)
        for users, flag, look in arguments:
            if name in users:
                command.add_argument(flag, **look)
    return parser


def _recommend(arguments: argparse.Namespace) -> int:
    code = 0
    for name in arguments.envs:
        found = choose(make_factories([name] * arguments.num_envs), arguments.num_cpus)
        if found.step_cost is None:  # the mode is a guess
            print(f"parallelenv: {name}: {found.problem}", file=sys.stderr)
            code = 1
        else:
            print(f"{name}: {found}", flush=True)
    return code


def _compare(arguments: argparse.Namespace) -> int:
    known = compare.comparable_words()
    # Users separate the modes by spaces or commas. The oracle, with which results are compared, is put first.
    words = [word for item in arguments.modes for word in item.split(",") if word] or known
    if unknown := [word for word in words if word not in known]:
        hint = did_you_mean(unknown[0], known)
        raise ArgumentError(f"--modes {unknown[0]} is not known; expected some of {', '.join(known)}.{hint}")
    modes = tuple(dict.fromkeys([compare.ORACLE, *words]))
    given = {name: getattr(arguments, name) for name in ("num_envs", "num_cpus", "steps", "seconds", "seed")}
    settings = compare.ComparisonSettings(modes=modes, **given)
    if arguments.plot is not None:
        compare.check_plot(arguments.plot)
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0  # without that of the measurement itself
    comparisons = []
    # Keep the output of envs out of the JSON.
    with contextlib.redirect_stdout(sys.stderr) if arguments.json else contextlib.nullcontext():
        for name in arguments.envs:  # before any env is measured
            try:
                gymnasium.make(name).close()
            except Exception as error:
                raise InvalidEnvError(f"The env {name!r} cannot be made: {one_line(error)}") from error
        rounds = f"medians of {ROUNDS} rounds of {settings.seconds / ROUNDS:g} s, alternating with {compare.ORACLE}"
        for name in arguments.envs:
            style = "{desc} {n}/{total} |{bar}| {elapsed}"
            try:
                with open_bar(arguments.progress, total=len(settings.modes), bar_format=style) as progress:
                    comparisons.append(compare.compare(name, settings, progress))
            except InvalidEnvError as error:  # the other envs are measured all the same
                print(f"parallelenv: {one_line(error)}", file=sys.stderr)
                continue
            size = f"{settings.num_envs} envs, {settings.num_cpus or usable_cores()} cores"
            print(f"{name}: {size}; {settings.steps} steps compared; {rounds}")
            print(f"{comparisons[-1]}\n", flush=True)
        if load > usable_cores() / 2:
            print(f"Other programs keep cores busy and affect the results (load average {load:.1f}).")
        if arguments.plot is not None and comparisons:
            compare.plot(comparisons, arguments.plot)
            print(f"Picture: {arguments.plot}")
    if arguments.json:
        print(json.dumps([comparison.as_dict() for comparison in comparisons], indent=2))
    return 0 if sum(comparison.is_sound for comparison in comparisons) == len(arguments.envs) else 1


if __name__ == "__main__":
    sys.exit(main())
