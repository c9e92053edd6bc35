"""Comparisons as a picture, which needs matplotlib."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from parallelenv.autotune.compare import ORACLE, Comparison
from parallelenv.errors import ArgumentError, MissingDependencyError

_CHOSEN, _CORRECT, _WRONG = "#0072b2", "#a9b8c4", "#d55e00"  # distinct with any colour vision


def check_plot(path: Path) -> None:
    """Check, before anything is measured, that a plot can be written.

    Raises:
        MissingDependencyError: If matplotlib is not installed.
        ArgumentError: If the folder does not exist or the suffix is not a picture format.
    """
    if find_spec("matplotlib") is None:
        raise MissingDependencyError(
            f"--plot {path} needs the package 'matplotlib', which is not installed. "
            "Install it with: pip install 'parallelenv[plot]'"
        )
    if not path.parent.is_dir():
        raise ArgumentError(f"--plot {path}: the folder {path.parent} does not exist.")
    formats = _figure(1).canvas.get_supported_filetypes()
    if path.suffix[1:].lower() not in formats:
        raise ArgumentError(f"--plot {path}: the name must end in one of .{', .'.join(sorted(formats))}")


def plot(comparisons: Sequence[Comparison], path: Path) -> None:
    """Plot the speed of each mode relative to the oracle, one panel per env, into a file."""
    figure = _figure(len(comparisons), max(len(comparison.rows) for comparison in comparisons))
    panels = figure.subplots(len(comparisons), 1, squeeze=False)[:, 0]
    for panel, comparison in zip(panels, comparisons, strict=True):
        best = comparison.recommended()
        colours, labels = [], []
        for row in comparison.rows:
            colours.append(_WRONG if row.deviation else _CHOSEN if row is best else _CORRECT)
            failed = "package not installed" if row.is_missing else "failed"
            differs = ", results differ" if row.deviation else ""
            labels.append(failed if row.steps_per_second is None else f"{row.steps_per_second:,.0f} steps/s{differs}")
        ratios = [row.ratio or 0.0 for row in comparison.rows]
        bars = panel.barh([row.mode for row in comparison.rows], ratios, color=colours)
        behind = {"facecolor": "white", "edgecolor": "none", "pad": 1}  # keeps the dotted line from crossing the texts
        panel.bar_label(bars, labels, padding=4, fontsize=9, bbox=behind)
        panel.axvline(1, color="black", linewidth=0.8, linestyle=":", zorder=0)
        panel.invert_yaxis()  # the first mode on top, as in the table
        panel.set_xlim(0, 1.35 * max(ratios))  # room for the labels
        panel.spines[["top", "right"]].set_visible(False)
        panel.set_title(f"{comparison.name}: {best.mode} recommended", loc="left", fontsize=11)
    panels[-1].set_xlabel(f"times as fast as {ORACLE} (median of the rounds)")
    figure.savefig(path)


def _figure(panels: int, bars: int = 5) -> Any:
    from matplotlib.figure import Figure  # without pyplot: no window, no global state

    return Figure(figsize=(8, 0.7 + panels * (0.7 + 0.35 * bars)), dpi=150, layout="constrained")
