"""Every notebook runs from top to bottom without an error and leaves no process behind."""

from __future__ import annotations

import asyncio
import json
import sys
import uuid
from pathlib import Path
from typing import Any

import nbformat
import psutil
import pytest
from nbclient import NotebookClient

NOTEBOOKS = sorted((Path(__file__).parents[1] / "notebooks").glob("*.ipynb"))
LARGEST = 200_000  # bytes, outputs included
CELL_TIMEOUT = 90  # seconds; the first Ray cell starts Ray
MARK = "PARALLELENV_NOTEBOOK_TEST"

every_notebook = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)


@pytest.fixture
def mark(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A value in the environment of the kernel, and so of every process that comes from it.

    Also makes ``python3`` a kernel of this very interpreter, whatever kernels are installed.
    """
    spec = {
        "argv": [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"],
        "display_name": "Python 3",
        "language": "python",
    }
    folder = tmp_path / "jupyter" / "kernels" / "python3"
    folder.mkdir(parents=True)
    (folder / "kernel.json").write_text(json.dumps(spec), encoding="utf-8")
    monkeypatch.setenv("JUPYTER_PATH", str(tmp_path / "jupyter"))
    monkeypatch.setenv("JUPYTER_RUNTIME_DIR", str(tmp_path / "runtime"))
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))  # nobody's own settings
    monkeypatch.setenv("SDL_VIDEODRIVER", "dummy")  # envs that draw need no screen
    value = uuid.uuid4().hex
    monkeypatch.setenv(MARK, value)
    return value


def _read(path: Path) -> Any:
    return nbformat.read(path, as_version=4)  # type: ignore[no-untyped-call]


def _marked(value: str) -> list[psutil.Process]:
    """Living processes that were started with this mark in their environment."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get(MARK) == value and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except psutil.Error:  # gone meanwhile, or somebody else's
            continue
    return found


def test_there_are_notebooks() -> None:
    assert NOTEBOOKS


@pytest.mark.slow
@pytest.mark.timeout(300)
@every_notebook
def test_a_notebook_runs_and_leaves_nothing_behind(path: Path, mark: str, tmp_path: Path) -> None:
    client = NotebookClient(_read(path), timeout=CELL_TIMEOUT, kernel_name="python3")
    seen: set[int] = set()
    client.on_cell_executed = lambda **_: seen.update(process.pid for process in _marked(mark))

    asyncio.run(client.async_execute(cwd=str(tmp_path)))  # raises what a cell raised

    assert len(seen) > 1, "the kernel and its workers should have been seen, or the next line proves nothing"
    psutil.wait_procs(_marked(mark), timeout=10)
    assert not _marked(mark)


@every_notebook
def test_the_outputs_in_the_file_are_small_and_of_one_clean_run(path: Path) -> None:
    assert path.stat().st_size < LARGEST
    cells = [cell for cell in _read(path).cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    outputs = [output for cell in cells for output in cell.outputs]
    assert outputs
    assert not [output for output in outputs if output.output_type == "error" or output.get("name") == "stderr"]
