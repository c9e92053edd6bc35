"""SCALE.md and scale.png: what the model of scale says, and how it was checked."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from statistics import median
from typing import Any

import matplotlib
import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter

from benchmarks.model import (
    Costs,
    Load,
    driver_limit,
    enough_nodes,
    ideal_rate,
    in_chunks,
    rate,
    round_seconds,
)
from benchmarks.picture import count_label, seconds_label
from benchmarks.report import table

_BASE = Load(nodes=100, envs=8, step=1e-3)
_SIZES = (10, 100, 1000)
_STEPS = (1e-3, 1e-2, 1e-1)
_ENVS = (1, 8, 64)
_MEANING = {
    "fixed": "driver, per round",
    "send": "driver, per message",
    "receive": "driver, per answer",
    "per_env": "driver, per env and step",
    "latency": "way to a node and back",
    "background": "Ray's threads in the driver, per message and answer",
    "host_per_step": "node, per step of all its envs (in the latency, by `step`)",
    "host_per_env": "node, per env and step",
}
_TEXT = """# Many nodes

Written by `python -m benchmarks.scale` (`make bench-scale`). How it is measured: [README.md](README.md).

![Rates by nodes, envs per node, cost of a step and cost of a message](scale.png)

{machine}
## What was measured

In microseconds. By `step` a round is one step of every env, in a rollout a chunk of about 0.2 s.

{costs}
## What the model makes of it, beside what was measured

One actor on each of 1 to 3 nodes of this machine, `ray` with `direct=False`, with envs that sleep. Env steps per
second; ratios are measured / modelled. The model gives the driver and each node a core of their own; here all of them
share {cores} with whoever else keeps them busy, as the last column says of the moment before. And its costs were
measured around envs that do nothing: a round of one env on one node took {beside} longer than the steps of the envs,
where the model has {modelled:.1f} ms.

{checks}
Measured / modelled, median: {by_step:.2f} by `step`, {by_rollout:.2f} in a rollout.

## How far the driver reaches

The number of nodes, each with one core, up to which a round by `step` takes at most twice as long as on its nodes. Then
the driver is what is waited for: {limits}.

{reach}
## Up to a thousand nodes

Modelled env steps per second with {envs} envs a node. A rollout pays for messages and for the way once per chunk, not
once per step. A chunk has as many steps as a node makes in 0.2 s, however long the messages take.

{rates}"""


@dataclass(frozen=True, slots=True)
class Check:
    """What was modelled and what was measured, in env steps per second.

    Attributes:
        load: Of what; its step is what a step took.
        nap: Seconds that a step was to take.
        foreign: Cores that other programs kept busy just before.
        stepped: By `step`, as measured.
        stepped_model: As modelled.
        rolled: In a rollout, as measured.
        rolled_model: As modelled.
    """

    load: Load
    nap: float
    foreign: float
    stepped: float
    stepped_model: float
    rolled: float
    rolled_model: float


@dataclass(frozen=True, slots=True)
class Ways:
    """The costs of both ways to step.

    Attributes:
        stepping: By `step`.
        rolling: In rollouts.
    """

    stepping: Costs
    rolling: Costs

    def by_step(self, load: Load) -> float:
        """Return the rate by `step`."""
        return rate(self.stepping, load)

    def by_rollout(self, load: Load) -> float:
        """Return the rate of long rollouts."""
        return rate(self.rolling, in_chunks(self.rolling, load))

    def with_messages_of(self, seconds: float) -> Ways:
        """Return these with another cost of a message and its answer."""
        half = {"send": seconds / 2, "receive": seconds / 2, "background": 0.0}
        return Ways(replace(self.stepping, **half), replace(self.rolling, **half))


def write(folder: Path, about: dict[str, str], ways: Ways, checks: Sequence[Check]) -> None:
    """Write both files into a folder."""
    text = _TEXT.format(
        machine=table(("", "machine"), about.items()),
        costs=_costs(ways),
        checks=_checks(checks),
        beside=_beside_steps(checks),
        modelled=1e3 * round_seconds(ways.stepping, Load(1, 1, 0.0)),
        by_step=median(check.stepped / check.stepped_model for check in checks),
        by_rollout=median(check.rolled / check.rolled_model for check in checks),
        limits=_limits(ways.stepping),
        reach=_reach(ways.stepping),
        envs=_BASE.envs,
        cores=about["usable cores"].split()[0] + " cores",
        rates=_rates(ways),
    )
    folder.joinpath("SCALE.md").write_text(text, encoding="utf-8")
    draw(folder / "scale.png", about, ways, checks)


def _costs(ways: Ways) -> str:
    rows = [
        (_MEANING[field.name], *(f"{1e6 * getattr(costs, field.name):,.2f}" for costs in (ways.stepping, ways.rolling)))
        for field in fields(Costs)
    ]
    return table(("", "by step", "in a rollout"), rows)


def _checks(checks: Sequence[Check]) -> str:
    rows = [
        (
            f"{check.load.nodes}",
            f"{check.load.envs}",
            f"{1e3 * check.load.step:.2f} ms",
            *_pair(check.stepped, check.stepped_model),
            *_pair(check.rolled, check.rolled_model),
            f"{check.foreign:.1f}",
        )
        for check in checks
    ]
    header = (
        "nodes",
        "envs a node",
        "a step",
        "by step",
        "modelled",
        "ratio",
        "in a rollout",
        "modelled",
        "ratio",
        "others",
    )
    return table(header, rows)


def _beside_steps(checks: Sequence[Check]) -> str:
    """Say how much longer rounds of a single env were than its steps."""
    single = [check for check in checks if (check.load.nodes, check.load.envs) == (1, 1)]
    return ", ".join(f"{1e3 * (1 / check.stepped - check.load.step):.1f} ms" for check in single)


def _pair(measured: float, modelled: float) -> tuple[str, str, str]:
    return f"{measured:,.0f}", f"{modelled:,.0f}", f"{measured / modelled:.2f}"


def _limits(costs: Costs) -> str:
    limits = [f"{driver_limit(costs, replace(_BASE, envs=envs)):,.0f} with {envs}" for envs in _ENVS]
    return f"env steps per second stay below {', '.join(limits)} envs a node, whatever a step costs"


def _reach(costs: Costs) -> str:
    rows = [
        (seconds_label(step, 0), *(f"{enough_nodes(costs, Load(1, envs, step)):,}" for envs in _ENVS))
        for step in _STEPS
    ]
    return table(("a step", *(f"{envs} envs a node" for envs in _ENVS)), rows)


def _rates(ways: Ways) -> str:
    rows = []
    for step in _STEPS[:2]:
        for nodes in _SIZES:
            load = replace(_BASE, nodes=nodes, step=step)
            found = [ideal_rate(load), ways.by_step(load), ways.by_rollout(load)]
            rows.append((seconds_label(step, 0), f"{nodes:,}", *(f"{value:,.0f}" for value in found)))
    return table(("a step", "nodes", "the envs alone", "by step", "rollout"), rows)


Models = Callable[[float], tuple[Ways, Load]]
"""From a place on the axis."""


def draw(path: Path, about: dict[str, str], ways: Ways, checks: Sequence[Check]) -> None:
    """Draw the rate against all that it depends on."""
    matplotlib.rcParams.update({"font.size": 10, "axes.spines.top": False, "axes.spines.right": False})
    figure = Figure(figsize=(11, 8.5), dpi=100, layout="constrained")
    nodes, envs, steps, messages = figure.subplots(2, 2).flat
    _panel(nodes, "nodes", np.geomspace(1, 1000, 60).round(), lambda x: (ways, replace(_BASE, nodes=int(x))))
    _dots(nodes, checks)
    _panel(envs, "envs a node", np.geomspace(1, 1000, 60).round(), lambda x: (ways, replace(_BASE, envs=int(x))))
    _panel(steps, "time of a step", np.geomspace(1e-5, 1, 60), lambda x: (ways, replace(_BASE, step=float(x))))
    _panel(messages, "driver's time for a message", np.geomspace(1e-6, 1e-2, 60), _messages(ways))
    here = ways.stepping.send + ways.stepping.receive
    messages.axvline(here, color="#888888", linewidth=1)
    messages.annotate(" Ray's calls", (here, 0.04), xycoords=("data", "axes fraction"), color="#555555")
    for axes in (steps, messages):
        axes.xaxis.set_major_formatter(FuncFormatter(seconds_label))
    figure.legend(*nodes.get_legend_handles_labels(), loc="outside lower center", ncols=3, frameon=False)
    figure.suptitle(
        f"Modelled: {_BASE.nodes} nodes of one core, {_BASE.envs} envs on each, {seconds_label(_BASE.step, 0)} a step, "
        f"unless the axis says otherwise.\nCosts measured on {about['CPU']}, {about['date']}",
        fontsize=9,
        color="#555555",
    )
    figure.savefig(path)


def _messages(ways: Ways) -> Models:
    return lambda seconds: (ways.with_messages_of(float(seconds)), _BASE)


def _panel(axes: Any, label: str, places: Sequence[float], model: Models) -> None:
    axes.set(xscale="log", yscale="log", xlabel=label, ylabel="env steps per second")
    axes.grid(color="#dddddd", linewidth=0.8)
    axes.set_axisbelow(True)
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(FuncFormatter(count_label))
    points = [model(place) for place in places]
    for name, style, rates in _lines(points):
        axes.plot(places, rates, label=name, **style)


def _lines(points: Sequence[tuple[Ways, Load]]) -> Iterator[tuple[str, dict[str, Any], list[float]]]:
    """Return name, look and rates of each line."""
    ideal = {"color": "#000000", "linestyle": "--", "linewidth": 1.3}
    yield "the envs alone", ideal, [ideal_rate(load) for _, load in points]
    yield "rollout", {"color": "#1f77b4", "linewidth": 2}, [ways.by_rollout(load) for ways, load in points]
    yield "step", {"color": "#d62728", "linewidth": 2}, [ways.by_step(load) for ways, load in points]


def _dots(axes: Any, checks: Sequence[Check]) -> None:
    """Show what was measured of such loads."""
    found = [check for check in checks if (check.load.envs, check.nap) == (_BASE.envs, _BASE.step)]
    nodes = [check.load.nodes for check in found]
    axes.plot(nodes, [check.rolled for check in found], "o", color="#1f77b4", label="rollout, measured")
    axes.plot(nodes, [check.stepped for check in found], "o", color="#d62728", label="step, measured")
