"""Provokes all faults and prints the table: ``python -m tests.faults [--mode subproc ...] [-k SIGKILL]``."""

from __future__ import annotations

import argparse
import compileall
import statistics
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import parallelenv
from parallelenv import backends, registry

if TYPE_CHECKING:
    from faults.columns import Column
    from faults.context import Fault

PLUGIN = "fault-table"
"""The plugin's name, by which the tests know that they must fill the table."""
_HERE = Path(__file__).parent
_NUM_SHOWN = 12
"""Number of lines shown of an error in a cell."""
_LEGEND = """
Seconds from the fault until all envs were stepped again, or until what had to end was gone. SLOW: it took more than
1 s beyond the user's timeout or that of close(), 3.3 s; where the caller was killed, 2 s. Ray gets 2.5 s more where the
interpreter ends, as it then ends itself, and 2 s where it starts an actor. A fault that took more at first was measured
three times: *, the median.
"""

Cell = tuple[str, str]  # names of a fault and a column


class Table:
    """A plugin of pytest that records the outcome of each cell."""

    def __init__(self, modes: Sequence[str]) -> None:
        self.__name__ = PLUGIN  # pytest's name of the plugin
        self._modes = modes
        self.faults: dict[Fault, None] = {}
        self.columns: dict[Column, None] = {}
        self.failures: dict[Cell, str] = {}
        self.skips: dict[Cell, str] = {}
        self.seconds: dict[Cell, list[float]] = {}
        self._of_node: dict[str, Cell] = {}

    # ---------------------------------------------------------------- called by pytest

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """Print errors of the collection."""
        if report.failed:
            print(report.longreprtext, file=sys.stderr)

    @pytest.hookimpl(trylast=True)  # after those that do not match -k were left out
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Drop the modes that were not selected."""
        items[:] = [item for item in items if self._take(item)]

    def _take(self, item: pytest.Item) -> bool:
        assert isinstance(item, pytest.Function)
        fault: Any = item.callspec.params["fault"]
        column: Any = item.callspec.params["column"]
        is_wanted: bool = column.mode in self._modes
        if is_wanted:
            self.faults[fault] = self.columns[column] = None
            self._of_node[item.nodeid] = fault.name, column.name
        return is_wanted

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Record the outcome of a cell, including its teardown, which checks for leaks."""
        cell = self._of_node[report.nodeid]
        if report.failed:
            self.failures[cell] = f"{self.failures.get(cell, '')}{report.longreprtext}\n"
        elif report.skipped and isinstance(report.longrepr, tuple):
            self.skips[cell] = report.longrepr[2].removeprefix("Skipped: ")
        if report.when == "call":
            self.seconds[cell] = [float(str(seconds)) for _, seconds in report.user_properties]
        if report.when == "teardown":
            outcome = (
                "FAIL"
                if cell in self.failures
                else self.skips.get(cell, " s, ".join(f"{one:.2f}" for one in self.seconds.get(cell, [])))
            )
            print(f"{cell[1]}: {cell[0]}: {outcome}", file=sys.stderr, flush=True)

    # ---------------------------------------------------------------- printing

    def text(self, fault: Fault, column: Column) -> str:
        """Return the text of a cell."""
        cell = fault.name, column.name
        if column.mode in fault.impossible or cell in self.skips:
            return "-"
        if cell in self.failures or not self.seconds.get(cell):
            return "FAIL"
        seconds, mark = statistics.median(self.seconds[cell]), "*" * (len(self.seconds[cell]) > 1)
        return f"{'ok' if seconds <= fault.allowed(column) else 'SLOW'} {seconds:.2f} s{mark}"

    def reasons(self) -> dict[str, list[str]]:
        """Return the empty cells, by reason."""
        found: dict[str, list[str]] = {}
        for fault in self.faults:
            modes: dict[str, list[str]] = {}
            for column in self.columns:
                reason = fault.impossible.get(column.mode) or self.skips.get((fault.name, column.name))
                if reason:
                    modes.setdefault(reason, []).append(column.name)
            for reason, names in modes.items():
                found.setdefault(f"{', '.join(names)}: {reason}", []).append(fault.name)
        return found


def _print(table: Table) -> bool:
    """Print the table; return whether all cells passed."""
    from faults.cases import FAULTS  # not before pytest has: it makes their asserts explain failures

    faults, columns = [fault for fault in FAULTS if fault in table.faults], list(table.columns)
    rows = [["", *(column.name for column in columns)]]
    rows += [[fault.name, *(table.text(fault, column) for column in columns)] for fault in faults]
    widths = [max(map(len, cells)) for cells in zip(*rows, strict=True)]
    for row in rows:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
    print(_LEGEND)
    for cell, seconds in table.seconds.items():
        if len(seconds) > 1:
            print("*", *cell, *(f"{one:.2f} s" for one in seconds))
    for reason, names in table.reasons().items():
        print(textwrap.fill(f"- {reason}. {'; '.join(names)}", 120, subsequent_indent="  "))
    for (name, column), text in table.failures.items():
        lines = [line for line in text.splitlines() if line.strip("E ^~")]
        told = [line for line in lines if line.startswith("E ")] or lines
        print(f"\nFAIL {name}, {column}", *told[-_NUM_SHOWN:], sep="\n  ")
    return not any(cell.startswith(("FAIL", "SLOW")) for row in rows[1:] for cell in row[1:])


def main() -> int:
    """Run the cells and print the table; return the exit status."""
    modes = registry.known_modes()
    parser = argparse.ArgumentParser(prog="python -m tests.faults", description=__doc__)
    parser.add_argument("--mode", nargs="+", choices=modes, default=modes, help="only the columns of these modes")
    parser.add_argument("-k", dest="expression", default="", help="only the rows that match, as with pytest")
    arguments = parser.parse_args()
    # As for an installed package: in a fresh checkout every process that starts would compile it, for 0.15 s each.
    for package in (parallelenv, backends):
        compileall.compile_dir(next(iter(package.__path__)), quiet=1)
    table = Table(arguments.mode)
    options = ["-p", "no:terminal", "-p", "no:cacheprovider", "-o", "addopts=", "--timeout=60"]
    pytest.main([str(_HERE), "-k", arguments.expression, *options], plugins=[table])
    if not table.faults:
        print("There is nothing of that kind.", file=sys.stderr)
        return 2
    return 0 if _print(table) else 1


if __name__ == "__main__":
    sys.exit(main())
