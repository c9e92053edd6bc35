"""Every notebook runs from top to bottom, raises only expected errors, and leaks no process."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path
from typing import Any

import psutil
import pytest
from kernels import NOTEBOOKS, isolate, marked, read, shown
from nbclient import NotebookClient

PATHS = sorted(NOTEBOOKS.glob("*.ipynb"))
LARGEST = 300_000  # bytes, outputs included
CELL_TIMEOUT = 90  # seconds; the first Ray cell starts Ray

SHOWN = {
    "01_quickstart": [
        "thread gives the same states as dummy: True",
        "subproc gives the same states as dummy: True",
        r"<caption>asynchronous=None.*<caption>asynchronous='continue'",
        r"\[image/png\]",
        "message: action 7 must be 0, 1 or 2",
        "source line: raise ValueError",
        r"other envs: \[0 2\]",
        "ArgumentError: para_mode='subprocess' is not known",
    ],
    "02_modes_and_policies": [
        "thread   bit-identical to dummy: True",
        "subproc  bit-identical to dummy: True",
        r"Busy-v0: 8 envs[^\n]*\n[^\n]*\n([^\n]*\byes\n){3}",
        r"Waiting-v0: 8 envs[^\n]*\n[^\n]*\n([^\n]*\byes\n){3}",
        r"\[image/png\]",
        "Waiting-v0: para_mode=",
        r"\[image/png\]",
        r"restart +360 stepped, \d+ done, 0 not stepped",
        r"of 512 envs, para_mode=.subproc., .*2 workers>\neach env has ended \d+ to \d+ episodes",
    ],
    "03_methods_on_a_subset": [
        r"object \(32,\) - of env 0: \(4,\) - of env 31: \(35,\)",
        r"env ids: \[24 16  8  0\] - sizes: \[28, 20, 12, 4\]",
        r"now:     \[0.1, 0.2, 0.3, 0.4\]",
        r"adapting makes the worst value 241,570 times smaller",
        r"\[image/png\]",
    ],
    "04_failures": [
        r"The worker of envs 0, 1 \(process \d+\) is dead. It was killed by SIGKILL",
        r"2 failed",
        r"rebuilt: \(0, 1\)\n+array\(\[1., 1., 2., 2.\]",
        r"interrupted after (0\.[5-9]|1\.\d) s",
        "EnvBusyError: envs",
        r"received: \[0 1 2 3\] \[2. 2. 3. 3.\]",
        "ActionError: 3 actions .*AbsentAttributeError: .*IdRangeError: .*ArgumentError: .*ArgumentError: ",
        "the door does not close - Raised by env 1 in step",
        "env 3 did not answer within 0.5 s",
        r"rebuilt: \(3,\)\n+received: \[0 1 2\]",
        "0 stepped .*1 truncated ValueError\n2 truncated WorkerDiedError\n3 truncated WorkerDiedError",
        r"\[2. 1. 2. 2.\]",  # after the uncaught error
    ],
    "05_collect_and_train": [
        r"<parallelenv.CollectorSet of 2 collectors, para_mode='subproc', version 0>\n"
        r"<Rollout of 100 steps x 16 envs, \d+ episodes ended>\n"
        r"\{'num_samples': 1600, 'num_steps': array\(\[100, 100\]\), .*'lost_samples': 0\}",
        r"version  10: +\d+\.\d steps on average",
        r"version +\d+: (47[5-9]|4[89]\d|500)\.\d steps on average\n+solved after \d+ s",
        r"\[image/png\]",
        r"collector [01] version \d\d+ staleness 0\n+(collector [01] version \d\d+ staleness [1-9]\d*\n+){5}",
        r"<History of \d+ records, \d\d,\d00 samples in ",
    ],
    "06_cluster": [
        "3 nodes, 4.0 cores",
        r"nodes: \['north', 'south'\] - processes: 4\n+identical to dummy: True",
        r"nodes: \['north', 'south'\] - processes: 4\n+identical to dummy: True",
        r"from \{'north'\} envs .*from \{'south'\} envs",
    ],
    "07_profiling": [
        r"env steps per second\n+.*?2 workers.*?slowest env: 7, .*?advice: ",
        r"env steps per second\n+.*?8 workers.*?slowest env: 7, .*?advice: workers wait for the slowest of them",
        r"env steps per second\n+.*?8 workers.*?advice: envs take \d+% of the time",
        "para_mode=",
        "trace.json has",
    ],
}
"""The output that each must show, in this order: regular expressions, in which a dot also matches a line break."""

UNCAUGHT = {"04_failures": ["ValueError: the door does not close"]}
"""The errors that cells with the tag ``raises-exception`` let through."""

MARKS = {"06_cluster": [pytest.mark.cluster]}

every_notebook = pytest.mark.parametrize(
    "path", [pytest.param(path, marks=MARKS.get(path.stem, ())) for path in PATHS], ids=lambda path: path.stem
)


@pytest.fixture
def mark(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    return isolate(tmp_path, monkeypatch)


def outputs_of(book: Any) -> list[Any]:
    return [output for cell in book.cells for output in cell.get("outputs", ())]


def stderr_of(book: Any) -> str:
    """Return the stderr output of a notebook: progress bars, if there are no widgets, and nothing else."""
    return "".join(output.text for output in outputs_of(book) if output.get("name") == "stderr")


def assert_shown(path: Path, book: Any) -> None:
    """Fail unless a notebook shows what it should, and only these errors have ended a cell."""
    text, position = shown(book), 0
    for pattern in SHOWN.get(path.stem, ()):
        found = re.compile(pattern, re.DOTALL).search(text, position)
        assert found, f"{path.stem} does not show {pattern!r} where it should:\n{text[position:][:3000]}"
        position = found.end()
    errors = [f"{output.ename}: {output.evalue}" for output in outputs_of(book) if output.output_type == "error"]
    assert errors == UNCAUGHT.get(path.stem, [])


def test_expected_notebooks_exist() -> None:
    assert {path.stem for path in PATHS} >= set(SHOWN)


@pytest.mark.slow
@pytest.mark.timeout(300)
@every_notebook
def test_notebook_runs_and_leaks_no_process(path: Path, mark: str, tmp_path: Path) -> None:
    if path.stem == "06_cluster":
        pytest.importorskip("ray")
    client = NotebookClient(read(path), timeout=CELL_TIMEOUT, kernel_name="python3")
    seen: set[int] = set()
    client.on_cell_executed = lambda **_: seen.update(process.pid for process in marked(mark))

    asyncio.run(client.async_execute(cwd=str(tmp_path)))  # raises an error of a cell

    assert_shown(path, client.nb)
    assert not re.search("Warning|ipywidgets", stderr_of(client.nb)), stderr_of(client.nb)
    assert len(seen) > 1, "the kernel and its workers should have been seen, or the next line proves nothing"
    psutil.wait_procs(marked(mark), timeout=10)
    assert not marked(mark)


@every_notebook
def test_stored_outputs_are_small_and_from_one_clean_run(path: Path) -> None:
    assert path.stat().st_size < LARGEST
    book = read(path)
    assert_shown(path, book)
    cells = [cell for cell in book.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    assert outputs_of(book)
    assert not stderr_of(book)
