"""The cells of the fault table as tests."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from contextlib import closing
from typing import Any

import pytest
from conftest import require_mode

from faults import died, ended, raised, surrounded  # noqa: F401 (each enters its functions into the table)
from faults.context import COLUMNS, FAULTS, Column, Context, Fault

RECOVERY = 10.0
"""Seconds that a recovery may take here at least: other things run on the machine."""
NUM_MEASURED = 3
"""How often a recovery that took too long is measured again: a single time depends on the machine as well."""


def _cell(fault: Fault, column: Column) -> Any:
    is_long = fault.is_slow or column.start_method in ("spawn", "fork")
    marks = [pytest.mark.long] if is_long else []  # in the Ray modes all are, except for some
    return pytest.param(fault, column, id=f"{fault.name}-{column.name}", marks=marks)


@pytest.mark.parametrize(
    ("fault", "column"),
    # Those of Ray last, so that it does not slow down the others.
    [_cell(fault, column) for column in COLUMNS for fault in FAULTS if column.mode not in fault.impossible],
)
def test_fault(
    fault: Fault,
    column: Column,
    tmp_path_factory: pytest.TempPathFactory,
    request: pytest.FixtureRequest,
    record_property: Callable[[str, object], None],
) -> None:
    record_property("fault", fault.name)
    record_property("column", column.name)
    require_mode(column.mode, request)
    is_for_the_table = request.config.pluginmanager.has_plugin("fault-table")
    allowed = fault.limit + fault.more.get(column.mode, 0.0)
    times: list[float] = []
    while not times or (is_for_the_table and times[0] > allowed and len(times) < NUM_MEASURED):
        with closing(Context(column, tmp_path_factory.mktemp("fault"))) as context:
            times.append(fault.provoke(context))
        assert times[-1] <= max(RECOVERY, allowed)
    seconds = statistics.median(times)
    word = "ok" if seconds <= allowed else "SLOW"
    record_property("time", f"{word} {seconds:.2f} s{'*' * (len(times) > 1)}")
