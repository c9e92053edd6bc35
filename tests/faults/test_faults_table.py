"""The cells of the fault table as tests."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from conftest import require_mode

from faults.cases import FAULTS
from faults.columns import COLUMNS, Column
from faults.context import Context, Fault

RECOVERY = 10.0
"""Seconds that a recovery may take here at least: other things run on the machine."""

NUM_MEASURED = 3
"""How often a recovery that took too long is measured again: a single time depends on the machine as well."""


def _is_for_the_table(config: pytest.Config) -> bool:
    return config.pluginmanager.has_plugin("fault-table")


def _cells(*, of_all: bool) -> Iterator[Any]:
    """Return the cells; those of Ray last, so that it does not slow down the others. Slow cells are marked long."""
    for column in COLUMNS:
        for fault in FAULTS:
            is_spared = fault.is_slow and (column.needs_ray or column.start_method in ("spawn", "fork"))
            if column.mode not in fault.impossible and (of_all or not is_spared):
                is_long = fault.is_slow or column.start_method in ("spawn", "fork")
                marks = [pytest.mark.long] if is_long else []  # in the Ray modes all are, except for some
                yield pytest.param(fault, column, id=f"{fault.name}-{column.name}", marks=marks)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Make a test of each cell; all cells only for the table, as some are slow."""
    cells = list(_cells(of_all=_is_for_the_table(metafunc.config)))
    metafunc.parametrize(("fault", "column"), cells)


def test_fault(
    fault: Fault,
    column: Column,
    tmp_path_factory: pytest.TempPathFactory,
    request: pytest.FixtureRequest,
    record_property: Callable[[str, object], None],
) -> None:
    require_mode(column.mode, request)
    for number in range(NUM_MEASURED):
        folder = tmp_path_factory.mktemp("fault")
        with Context(column, folder) as context:
            seconds = fault.provoke(context)
        record_property("seconds", seconds)
        assert seconds <= max(RECOVERY, fault.allowed(column))
        if number == 0 and (seconds <= fault.allowed(column) or not _is_for_the_table(request.config)):
            break
