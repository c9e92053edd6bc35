"""results.png: rates against the cost of a step, and against the number of envs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

import matplotlib
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

from benchmarks.cases import CURVE, Case
from benchmarks.runner import Results
from benchmarks.systems import BARE, BY_NAME, OURS
from parallelenv.contract.cpu_cores import usable_cores

Points = list[tuple[float, float, float, float]]  # x, and rate: median, lowest, highest


def draw(path: Path, cases: Sequence[Case], results: Results, machine: dict[str, str]) -> None:
    """Draw both panels, as far as their cases were run."""
    matplotlib.rcParams.update({"font.size": 10, "axes.spines.top": False, "axes.spines.right": False})
    figure = Figure(figsize=(13, 7), dpi=130, layout="constrained")
    cost, envs = figure.subplots(1, 2)
    _panel(cost, "cost", cases, results)
    cost.set(title="16 envs, by what a step costs", xlabel="CPU time of a step")
    cost.xaxis.set_major_formatter(FuncFormatter(seconds_label))
    _panel(envs, "envs", cases, results)
    envs.set(title="CartPole-v1, by the number of envs", xlabel="envs")
    envs.xaxis.set_major_formatter(FuncFormatter(count_label))
    envs.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    envs.yaxis.set_minor_locator(NullLocator())
    _legend(figure, (cost, envs))
    figure.suptitle(
        f"{machine['usable cores']} cores, {machine['CPU']}, {machine['date']}", fontsize=9, color="#555555"
    )
    figure.savefig(path)


def _panel(axes: Any, curve: str, cases: Sequence[Case], results: Results) -> None:
    axes.set(xscale="log", yscale="log", ylabel="env steps per second")
    axes.yaxis.set_major_formatter(FuncFormatter(count_label))
    axes.grid(color="#dddddd", linewidth=0.8)
    axes.set_axisbelow(True)
    bare = _points("bare", curve, cases, results)
    if bare:
        axes.set_xticks([point[0] for point in bare], minor=False)
        axes.xaxis.set_minor_locator(NullLocator())
        limit = [usable_cores() * rate for _, rate, _, _ in bare]
        label = f"limit: {usable_cores()} bare loops"
        axes.plot([point[0] for point in bare], limit, "--", color="#000000", linewidth=1.3, label=label)
    for name in CURVE:
        points = _points(name, curve, cases, results)
        if points:
            _line(axes, name, points)


def _points(name: str, curve: str, cases: Sequence[Case], results: Results) -> Points:
    """Return the points of a system on one curve, from the left."""
    found: Points = []
    for case in cases:
        if case.curve != curve:
            continue
        outcome = results.get(case.name, {}).get(name)
        rates = outcome.values("rate") if outcome and not outcome.failure else []
        if rates:
            x = case.num_envs if curve == "envs" else case.envs.arguments["seconds"]
            found.append((x, median(rates), min(rates), max(rates)))
    return sorted(found)


def _line(axes: Any, name: str, points: Points) -> None:
    """Draw a system's line, and its spread as a band."""
    system = BY_NAME[name]
    x, rates, lowest, highest = zip(*points, strict=True)
    is_ours, is_bare = system.kind == OURS, system.kind == BARE
    marker = "o" if is_ours else "" if is_bare else "s"
    axes.plot(
        x,
        rates,
        color=system.colour,
        label=system.title,
        marker=marker,
        markersize=5 if is_ours else 4,
        linewidth=2.2 if is_ours or is_bare else 1.3,
        zorder=3 if is_ours else 2,
    )
    axes.fill_between(x, lowest, highest, color=system.colour, alpha=0.15, linewidth=0)


def _legend(figure: Figure, panels: Sequence[Any]) -> None:
    """Put one legend below both panels, each system once."""
    found: dict[str, Any] = {}
    for axes in panels:
        handles, labels = axes.get_legend_handles_labels()
        found.update(zip(labels, handles, strict=True))
    if found:
        figure.legend(found.values(), found.keys(), loc="outside lower center", ncols=4, frameon=False)


def seconds_label(value: float, _: int) -> str:
    """Return a duration as an axis shows it."""
    for size, unit in ((1e-6, "us"), (1e-3, "ms")):
        if value < 1000 * size * 0.999:
            return f"{value / size:g} {unit}"
    return f"{value:g} s"


def count_label(value: float, _: int) -> str:
    """Return a number as an axis shows it."""
    if value >= 1e6:
        return f"{value / 1e6:g}M"
    return f"{value / 1e3:g}k" if value >= 1e4 else f"{value:,g}"
