"""Provokes all faults and prints the table: ``python -m tests.faults [-k "SIGKILL and spawn"]``."""

from __future__ import annotations

import compileall
import sys
from pathlib import Path

import pytest

import parallelenv
from parallelenv import backends
from parallelenv.contract.error_text import format_table

_LEGEND = """
Seconds from the fault until all envs were stepped again, or until what had to end was gone; -: it cannot happen there.
SLOW: it took more than 1 s beyond the user's timeout or that of close(), 3.3 s; where the caller was killed, 2 s. Ray
gets 2.5 s more where the interpreter ends, as it then ends itself, and 2 s where it starts an actor. A fault that took
more at first was measured three times: *, the median.
"""


class Table:
    """A plugin of pytest that records the outcome of each cell."""

    def __init__(self) -> None:
        self.__name__ = "fault-table"  # pytest's name of the plugin, by which the tests know that they fill the table
        self.rows: dict[str, dict[str, str]] = {}
        self._failed: set[str] = set()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Record the outcome of a cell, including its teardown, which checks for leaks."""
        if report.failed:
            self._failed.add(report.nodeid)
        if report.when == "teardown":
            facts = {name: str(value) for name, value in report.user_properties}
            text = "FAIL" if report.nodeid in self._failed else facts.get("time", "-")
            self.rows.setdefault(facts["fault"], {})[facts["column"]] = text


def main() -> int:
    # As for an installed package: in a fresh checkout every process that starts would compile it, for 0.15 s each.
    for package in (parallelenv, backends):
        compileall.compile_dir(next(iter(package.__path__)), quiet=1)
    table = Table()
    options = ["-q", "--no-header", "--tb=short", "-rs", "-p", "no:cacheprovider", "-o", "addopts=", "--timeout=60"]
    status = pytest.main([str(Path(__file__).parent), *options, *sys.argv[1:]], plugins=[table])
    columns = list(dict.fromkeys(column for row in table.rows.values() for column in row))
    rows = [[name, *(row.get(column, "-") for column in columns)] for name, row in table.rows.items()]
    print(format_table(["fault", *columns], rows, left=["fault", *columns]), _LEGEND, sep="\n")
    is_slow = any(cell.startswith("SLOW") for row in rows for cell in row[1:])
    return int(status) or int(is_slow)


if __name__ == "__main__":
    sys.exit(main())
