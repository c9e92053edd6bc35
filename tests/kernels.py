"""A Jupyter of the tests' own: this interpreter as its kernel, nobody's settings, and a mark on every process."""

from __future__ import annotations

import json
import sys
import uuid
from pathlib import Path
from typing import Any

import nbformat
import psutil
import pytest

MARK = "PARALLELENV_NOTEBOOK_TEST"
NOTEBOOKS = Path(__file__).parents[1] / "notebooks"


def isolate(folder: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Make ``python3`` a kernel of this very interpreter, whatever kernels are installed.

    Returns:
        A value in the environment of the kernel, and so of every process that comes from it.
    """
    spec = {
        "argv": [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"],
        "display_name": "Python 3",
        "language": "python",
    }
    kernel = folder / "jupyter" / "kernels" / "python3"
    kernel.mkdir(parents=True)
    (kernel / "kernel.json").write_text(json.dumps(spec), encoding="utf-8")
    places = {
        "JUPYTER_PATH": "jupyter",
        "JUPYTER_RUNTIME_DIR": "runtime",
        "JUPYTER_CONFIG_DIR": "config",
        "JUPYTER_DATA_DIR": "data",
        "IPYTHONDIR": "ipython",
    }
    for name, place in places.items():
        monkeypatch.setenv(name, str(folder / place))
    monkeypatch.setenv("SDL_VIDEODRIVER", "dummy")  # envs that draw need no screen
    value = uuid.uuid4().hex
    monkeypatch.setenv(MARK, value)
    return value


def read(path: Path) -> Any:
    """Return a notebook."""
    return nbformat.read(path, as_version=4)  # type: ignore[no-untyped-call]


def marked(value: str) -> list[psutil.Process]:
    """Living processes that were started with this mark in their environment."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get(MARK) == value and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except psutil.Error:  # gone meanwhile, or somebody else's
            continue
    return found


def shown(book: Any) -> str:
    """Return all that a notebook shows, in order; a picture is a line ``[image/png]``."""
    outputs = [output for cell in book.cells if cell.cell_type == "code" for output in cell.outputs]
    return "\n".join(_texts(output) for output in outputs)


def _texts(output: Any) -> str:
    data = output.get("data", {})
    kinds = [f"[{kind}]" if kind.startswith("image/") else str(text) for kind, text in data.items()]
    return "\n".join([str(output.get("text", "")), *kinds])
