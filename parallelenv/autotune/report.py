"""A comparison as a table, a one-line recommendation, and a plot."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from parallelenv.autotune.compare import ORACLE, Comparison, ComparisonRow, arguments_of
from parallelenv.contract.error_text import format_table
from parallelenv.errors import ArgumentError, MissingDependencyError

_HEADER = ("mode", "workers", "start-up s", "steps/s", "ratio", "identical", "note")
_RATIO = f"ratio: times as fast as {ORACLE} in the same round"
_CHOSEN, _CORRECT, _WRONG = "#0072b2", "#a9b8c4", "#d55e00"  # distinct with any colour vision


def describe_comparison(comparison: Comparison) -> str:
    """Return the table of one env and, below it, the recommended mode."""
    rows = [_cells(row) for row in comparison.rows]
    return f"{format_table(_HEADER, rows, left=('mode', 'identical', 'note'))}\n{_RATIO}\n{_advice(comparison)}"


def _cells(row: ComparisonRow) -> tuple[str, ...]:
    if row.failure:
        return (row.mode, "-", "-", "-", "-", "-", row.failure)
    return (
        row.mode,
        str(row.workers),
        f"{row.startup:.2f}",
        f"{row.rate:,.0f}" if row.rate >= 100 else f"{row.rate:.3g}",
        f"{row.ratio:.2f}",
        "no" if row.deviation else "yes",
        f"first differs at {row.deviation}" if row.deviation else "",
    )


def _advice(comparison: Comparison) -> str:
    best = comparison.recommended()
    if best.mode == ORACLE:
        reason = "no other mode is clearly faster here"
    else:
        reason = f"{best.ratio:.1f} times as fast as {ORACLE}"
    if comparison.is_disturbed:
        line = (
            f"No recommendation for {comparison.name}: other programs kept {comparison.others:.1f} cores busy. Measure "
            f"again without them. Beside them {_as_written(best.mode, best.num_cpus)} was best ({reason})."
        )
    else:
        line = f"Recommended for {comparison.name}: {_as_written(best.mode, best.num_cpus)} ({reason})."
    if comparison.chosen != best.mode:
        line += f" recommend(), which tries for a moment, chose {_as_written(comparison.chosen)}."
    if comparison.is_reproducible:
        return line
    return (
        f"{comparison.name} is not reproducible from its seeds: already two {ORACLE} runs differ, "
        f"so the other modes cannot be judged by it.\n{line}"
    )


def _as_written(word: str, num_cpus: int | None = None) -> str:
    """Return the arguments of `ParallelEnv` in the user's notation."""
    return ", ".join(f"{name}={value!r}" for name, value in arguments_of(word, num_cpus).items())


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
        _draw(panel, comparison)
    panels[-1].set_xlabel(f"times as fast as {ORACLE} (median of the rounds)")
    figure.savefig(path)


def _figure(panels: int, bars: int = 5) -> Any:
    from matplotlib.figure import Figure  # without pyplot: no window, no global state

    return Figure(figsize=(8, 0.7 + panels * (0.7 + 0.35 * bars)), dpi=150, layout="constrained")


def _draw(panel: Any, comparison: Comparison) -> None:
    best = comparison.recommended()
    ratios = [0.0 if row.failure else row.ratio for row in comparison.rows]
    bars = panel.barh(
        [row.mode for row in comparison.rows], ratios, color=[_colour(row, best) for row in comparison.rows]
    )
    behind = {"facecolor": "white", "edgecolor": "none", "pad": 1}  # keeps the dotted line from crossing the texts
    panel.bar_label(bars, [_label(row) for row in comparison.rows], padding=4, fontsize=9, bbox=behind)
    panel.axvline(1, color="black", linewidth=0.8, linestyle=":", zorder=0)
    panel.invert_yaxis()  # the first mode on top, as in the table
    panel.set_xlim(0, 1.35 * max(ratios))  # room for the labels
    panel.spines[["top", "right"]].set_visible(False)
    panel.set_title(f"{comparison.name}: {best.mode} recommended", loc="left", fontsize=11)


def _colour(row: ComparisonRow, best: ComparisonRow) -> str:
    if row.deviation:
        return _WRONG
    return _CHOSEN if row is best else _CORRECT


def _label(row: ComparisonRow) -> str:
    if row.failure:
        return "package not installed" if row.is_missing else "failed"
    text = f"{row.rate:,.0f} steps/s"
    return f"{text}, results differ" if row.deviation else text
