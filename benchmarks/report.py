"""Writes RESULTS.md and results.json, with a description of the machine."""

from __future__ import annotations

import dataclasses
import datetime
import json
import os
import platform
import subprocess
import tomllib
from collections.abc import Iterable, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from statistics import median
from typing import Any

import psutil

from benchmarks.cases import LIMIT, UNITS, Case
from benchmarks.disturbance import QUIET
from benchmarks.runner import REPEATS, ROOT, Outcome, Outcomes, Results
from benchmarks.systems import BARE, BY_NAME, PROCESS_PEER, SIDE_BY_SIDE
from benchmarks.verdicts import Verdict, ratios, verdicts, wording
from parallelenv.contract.cpu_cores import usable_cores

_PACKAGES = (
    *("parallelenv", "gymnasium", "numpy", "ray", "stable_baselines3", "tianshou", "torchrl", "torch"),
    *("mujoco", "ale-py", "Box2D", "minigrid", "highway-env"),
)
_LIMITS = Path(__file__).parent / "limits.toml"
_HEAD = """# Results

Written by `{command}`. How it is measured: [README.md](README.md).
All rounds: [results.json](results.json).
{note}
A round in which other programs used more than {quiet:g} % of a core was measured again, up to {repeats} times. If they
were never quieter, the quietest measurement is kept and the round is *disturbed*: {disturbed} of {rounds} rounds.

Numbers are medians over the rounds, with the lowest and the highest round in brackets. Ratios are taken within a round.
*Bare* is a plain loop over the same envs that stores nothing; the *limit* is as many such loops as there are usable
cores. *Side by side* are as many bare loops, each over its share of the envs, that ran at the same time. The *best
process peer* is the fastest, in the same round, of the vector envs that run their envs in other processes.
"""


def write(folder: Path, cases: Sequence[Case], results: Results, machine: dict[str, str], command: str) -> None:
    """Write RESULTS.md and results.json into a folder."""
    ran = [case for case in cases if case.name in results]
    judged = verdicts(ran, results)
    folder.joinpath("results.json").write_text(_json(ran, results, machine, judged, command), encoding="utf-8")
    note = "" if len(ran) == len(cases) else f"\n**Interrupted: {len(ran)} of {len(cases)} cases were run.**\n"
    outcomes = [outcome for case in ran for outcome in results[case.name].values()]
    parts = [
        _HEAD.format(
            command=command,
            note=note,
            quiet=QUIET,
            repeats=REPEATS,
            disturbed=sum(len(outcome.disturbed) for outcome in outcomes),
            rounds=sum(len(outcome.rounds) for outcome in outcomes),
        ),
        "![Rates by step cost, by number of envs, and of real envs](results.png)\n",
        table(("", "machine"), machine.items()),
        _targets(judged),
        *(_case(case, results[case.name]) for case in ran),
    ]
    folder.joinpath("RESULTS.md").write_text("\n".join(parts), encoding="utf-8")


def read(folder: Path) -> tuple[Results, dict[str, str], str]:
    """Return the results, the machine and the command from the results.json that `write` wrote."""
    content = json.loads(folder.joinpath("results.json").read_text(encoding="utf-8"))
    results = {
        name: {
            system: Outcome(
                {int(turn): numbers for turn, numbers in found["rounds"].items()},
                found["failure"],
                found.get("absence", ""),
            )
            for system, found in case["systems"].items()
        }
        for name, case in content["cases"].items()
    }
    return results, content["machine"], content["command"]


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table in Markdown."""
    lines = [header, ["---"] * len(header), *rows]
    return "".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |\n" for line in lines)


def _targets(judged: Sequence[Verdict]) -> str:
    met = sum(verdict.word == "met" for verdict in judged)
    rows = [
        (
            verdict.case,
            BY_NAME[verdict.target.system].title,
            wording(verdict.target),
            _measured(verdict),
            (verdict.word if verdict.word == "met" else f"**{verdict.word}**")
            + f", {verdict.disturbed} of {len(verdict.values)} rounds disturbed" * bool(verdict.disturbed),
        )
        for verdict in judged
    ]
    header = ("case", "system", "target", "measured", "")
    return f"## Targets: {met} of {len(judged)} met\n\n{table(header, rows)}\n{_limits(judged)}"


def _measured(verdict: Verdict) -> str:
    if verdict.failure:
        return f"failed: {verdict.failure}"
    if not verdict.values:
        return "nothing to compare with"
    style = ".3g" if verdict.target.against else UNITS[verdict.target.metric][1]
    style = ".3f" if verdict.target.against and verdict.target.bound < 2 else style
    low, high = min(verdict.values), max(verdict.values)
    return f"{verdict.measured:{style}} ({low:{style}} .. {high:{style}})"


def _limits(judged: Sequence[Verdict]) -> str:
    """Return a list of the cases in which a target was not met, with the explanations from limits.toml."""
    texts = tomllib.loads(_LIMITS.read_text(encoding="utf-8"))
    missed = dict.fromkeys(verdict.case for verdict in judged if verdict.word != "met")
    lines = [f"* **{case}**: {texts.get(case, 'no explanation yet (limits.toml).').strip()}" for case in missed]
    return "What limits the cases with a target that was not met:\n\n" + "\n".join(lines) + "\n" if lines else ""


def _case(case: Case, outcomes: Outcomes) -> str:
    metrics = [metric for metric in UNITS if any(outcome.values(metric) for outcome in outcomes.values())]
    has_rates = "rate" in metrics
    header = ["system", "rounds", *(UNITS[metric][0] for metric in metrics)]
    columns = {BARE: "x bare", LIMIT: "x limit", SIDE_BY_SIDE: "x side by side", PROCESS_PEER: "x best process peer"}
    if SIDE_BY_SIDE not in case.systems:
        del columns[SIDE_BY_SIDE]
    header += columns.values() if has_rates else ()
    rows = []
    for name, outcome in outcomes.items():
        rounds = str(len(outcome.rounds)) + f", {len(outcome.disturbed)} disturbed" * bool(outcome.disturbed)
        row = [BY_NAME[name].title, rounds, *(_cell(outcome, metric) for metric in metrics)]
        row += [_ratio(outcomes, name, other) for other in columns] if has_rates else []
        rows.append(row if outcome.failure is None and outcome.rounds else _without(case, row, outcome))
    return f"### {case.name}\n\n{_envs(case)}\n\n{table(header, rows)}"


def _envs(case: Case) -> str:
    noun = "env" if case.num_envs == 1 else "envs"
    options = "".join(f", {key}={value!r}" for key, value in case.options.items())
    return f"{case.num_envs:,} {noun}: {case.envs.title}{options}"


def _without(case: Case, row: list[str], outcome: Outcome) -> list[str]:
    """Return a row that has the reason for missing numbers instead of the rounds."""
    words = "does not accept it" if case.may_refuse else "failed"
    reason = f"{words}: {outcome.failure}" if outcome.failure else f"left out: {outcome.absence or '--quick'}"
    return [row[0], f"{row[1]}; {reason}", *row[2:]]


def _cell(outcome: Outcome, metric: str) -> str:
    values, style = outcome.values(metric), UNITS[metric][1]
    if not values:
        return ""
    spread = f" ({min(values):{style}} .. {max(values):{style}})" if len(values) > 1 else ""
    return f"{median(values):{style}}{spread}"


def _ratio(outcomes: Outcomes, name: str, against: str) -> str:
    values = ratios(outcomes, name, against, "rate").values()
    return f"{median(values):.2f}" if values else ""


def _json(
    cases: Sequence[Case], results: Results, machine: dict[str, str], judged: Sequence[Verdict], command: str
) -> str:
    content: dict[str, Any] = {
        "command": command,
        "machine": machine,
        "targets": [
            {**dataclasses.asdict(verdict), "verdict": verdict.word, "wording": wording(verdict.target)}
            for verdict in judged
        ],
        "cases": {
            case.name: {
                "envs": case.envs.title,
                "num_envs": case.num_envs,
                "systems": {name: dataclasses.asdict(outcome) for name, outcome in results[case.name].items()},
            }
            for case in cases
        },
    }
    return json.dumps(content, indent=1) + "\n"


def describe_machine() -> dict[str, str]:
    """Return a description of the machine and its software, by label."""
    return {
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "commit": _commit(),
        "usable cores": f"{usable_cores()} of {os.cpu_count()}",
        "CPU": _cpu_model(),
        "memory": f"{psutil.virtual_memory().total / 1e9:.0f} GB",
        "system": platform.platform(),
        "load average before the start": f"{os.getloadavg()[0]:.2f}" if hasattr(os, "getloadavg") else "unknown",
        "Python": platform.python_version(),
        **{name: _version(name) for name in _PACKAGES},
    }


def _commit() -> str:
    """Return the commit that is checked out, with a mark if files differ from the commit."""
    command = ["git", "describe", "--always", "--dirty", "--abbrev=12"]
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    return found.stdout.strip() or "not a git checkout"


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or "unknown"
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "absent"
