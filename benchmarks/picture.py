"""Draws results.png: rates by the cost of a step, rates by the number of envs, and rates of real envs."""

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
from benchmarks.systems import BARE, BY_NAME, OURS, SIDE_BY_SIDE
from benchmarks.verdicts import ratios
from parallelenv.contract.cpu_cores import usable_cores

Points = list[tuple[float, float, float, float]]  # x; median, lowest and highest rate


def draw(path: Path, cases: Sequence[Case], results: Results, machine: dict[str, str]) -> None:
    """Draw the panels of the cases that were run."""
    matplotlib.rcParams.update({"font.size": 10, "axes.spines.top": False, "axes.spines.right": False})
    figure = Figure(figsize=(13, 12), dpi=130, layout="constrained")
    panels = figure.subplot_mosaic([["cost", "envs"], ["real", "real"]], height_ratios=(1.2, 1))
    cost, envs, real = panels["cost"], panels["envs"], panels["real"]
    _panel(cost, "cost", cases, results)
    cost.set(title="16 envs, by what a step costs", xlabel="CPU time of a step")
    cost.xaxis.set_major_formatter(FuncFormatter(seconds_label))
    _panel(envs, "envs", cases, results)
    envs.set(title="CartPole-v1, by the number of envs", xlabel="envs")
    envs.xaxis.set_major_formatter(FuncFormatter(count_label))
    envs.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    envs.yaxis.set_minor_locator(NullLocator())
    _bars(real, [case for case in cases if case.curve == "real"], results)
    _legend(figure, (cost, envs, real))
    disturbed = sum(len(outcome.disturbed) for outcomes in results.values() for outcome in outcomes.values())
    figure.suptitle(
        f"{machine['usable cores']} cores, {machine['CPU']}, {machine['date']}"
        + f"; other programs disturbed {disturbed} rounds" * bool(disturbed),
        fontsize=9,
        color="#555555",
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
    """Return the points of a system on one curve, from left to right."""
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
    """Draw a system's median rates as a line, and the spread of its rates as a band."""
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


def _bars(axes: Any, cases: Sequence[Case], results: Results) -> None:
    """Draw the rates of real envs, with their spread, as multiples of the bare loop's rate."""
    axes.set(title="Real envs, 16 of each", ylabel="times one bare loop")
    axes.set_xticks(range(len(cases)), [case.envs.title for case in cases])
    axes.grid(axis="y", color="#dddddd", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.axhline(1, color=BY_NAME["bare"].colour, linewidth=2.2)
    for number, case in enumerate(cases):
        limit = _multiples(SIDE_BY_SIDE, case, results)
        if limit:
            label = BY_NAME[SIDE_BY_SIDE].title
            axes.hlines(median(limit), number - 0.45, number + 0.45, "#000000", ":", linewidth=1.6, label=label)
    names = dict.fromkeys(name for case in cases for name in case.systems if name not in ("bare", SIDE_BY_SIDE))
    width = 0.84 / max(1, len(names))
    for place, name in enumerate(names):
        for number, case in enumerate(cases):
            found = _multiples(name, case, results)
            if found:
                middle = median(found)
                axes.bar(
                    number + (place - (len(names) - 1) / 2) * width,
                    middle,
                    0.9 * width,
                    yerr=[[middle - min(found)], [max(found) - middle]],
                    color=BY_NAME[name].colour,
                    ecolor="#555555",
                    label=BY_NAME[name].title,
                )


def _multiples(name: str, case: Case, results: Results) -> list[float]:
    """Return a system's rates as multiples of the bare loop's rate. Empty if the system did not take part or failed."""
    outcomes = results.get(case.name, {})
    if name not in outcomes or outcomes[name].failure:
        return []
    return list(ratios(outcomes, name, BARE, "rate").values())


def _legend(figure: Figure, panels: Sequence[Any]) -> None:
    """Put one legend below all panels, in which each system appears once."""
    found: dict[str, Any] = {}
    for axes in panels:
        handles, labels = axes.get_legend_handles_labels()
        found.update(zip(labels, handles, strict=True))
    if found:
        figure.legend(found.values(), found.keys(), loc="outside lower center", ncols=4, frameon=False)


def seconds_label(value: float, _: int) -> str:
    """Return a duration in the form of an axis label."""
    for size, unit in ((1e-6, "us"), (1e-3, "ms")):
        if value < 1000 * size * 0.999:
            return f"{value / size:g} {unit}"
    return f"{value:g} s"


def count_label(value: float, _: int) -> str:
    """Return a number in the form of an axis label."""
    if value >= 1e6:
        return f"{value / 1e6:g}M"
    return f"{value / 1e3:g}k" if value >= 1e4 else f"{value:,g}"
