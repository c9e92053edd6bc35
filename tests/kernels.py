"""Jupyter kernels for tests: this interpreter, no user settings, and a mark on every process."""

from __future__ import annotations

import ast
import itertools
import json
import queue
import sys
import uuid
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import nbformat
import psutil
import pytest
from jupyter_client.kernelspec import KernelSpecManager
from jupyter_client.manager import KernelManager
from scripts import environment

MARK = "PARALLELENV_NOTEBOOK_TEST"
PATIENCE = 30.0  # seconds for slow operations
NOTEBOOKS = Path(__file__).parents[1] / "notebooks"


def isolate(folder: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Make ``python3`` a kernel of this very interpreter, whatever kernels are installed.

    Returns:
        A value in the environment of the kernel, and so of every process that comes from it.
    """
    argv = [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"]
    spec = {"argv": argv, "display_name": "Python 3", "language": "python"}
    kernel = folder / "jupyter" / "kernels" / "python3"
    kernel.mkdir(parents=True)
    (kernel / "kernel.json").write_text(json.dumps(spec), encoding="utf-8")
    for name in ("JUPYTER_PATH", "JUPYTER_RUNTIME_DIR", "JUPYTER_CONFIG_DIR", "JUPYTER_DATA_DIR", "IPYTHONDIR"):
        monkeypatch.setenv(name, str(folder / ("jupyter" if name == "JUPYTER_PATH" else name)))
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
        except psutil.Error:  # gone in the meantime, or of another user
            continue
    return found


def shown(book: Any) -> str:
    """Return everything that a notebook shows, in order; a picture is a line ``[image/png]``."""
    parts = []
    for cell in book.cells:
        for stream, outputs in itertools.groupby(cell.get("outputs", ()), lambda output: output.get("name")):
            if stream is not None:  # a kernel under load sends the text of one `print` in several outputs
                parts.append("".join(output.text for output in outputs) + "\n")
                continue
            for output in outputs:
                for kind, text in output.get("data", {}).items():
                    parts.append(f"[{kind}]\n" if kind.startswith("image/") else f"{text}\n")
    return "".join(parts)


class Notebook:
    """Runs cells in a kernel. A *request* is the id of the message that a cell was sent with.

    Attributes:
        manager: Interrupts and restarts the kernel, like the buttons of Jupyter.
        printed: The text below cells, by request.
        shown: The contents of messages about other outputs, by request.
    """

    def __init__(self, manager: KernelManager, client: Any, mark: str) -> None:
        self.manager = manager
        self.printed: defaultdict[str, str] = defaultdict(str)
        self.shown: defaultdict[str, list[dict[str, Any]]] = defaultdict(list)
        self._client = client
        self._mark = mark

    def send(self, code: str, cell_id: str | None = None, **expressions: str) -> str:
        """Send a cell, as JupyterLab does, and return its request. Without an id it is a cell of its own.

        If the id is empty, none is sent, as by front ends that have no such ids.
        """
        content = {
            "code": code,
            "silent": False,
            "store_history": True,
            "user_expressions": expressions,
            "allow_stdin": False,
            "stop_on_error": False,  # else a cell that is sent right after an error may be dropped
        }
        metadata = {} if cell_id == "" else {"cellId": cell_id or uuid.uuid4().hex}
        message = self._client.session.msg("execute_request", content, metadata=metadata)
        self._client.shell_channel.send(message)
        return str(message["header"]["msg_id"])

    def finish(self, request: str, patience: float = PATIENCE) -> dict[str, Any]:
        """Wait for the end of a cell and return the content of its reply."""
        try:
            reply: dict[str, Any] = {"parent_header": {}}
            while reply["parent_header"].get("msg_id") != request:
                reply = self._client.get_shell_msg(timeout=patience)
            cell = ""
            content: dict[str, Any] = {}
            while (cell, content.get("execution_state")) != (request, "idle"):  # its outputs come before that
                message = self._client.get_iopub_msg(timeout=4 * PATIENCE)
                cell, content = message["parent_header"].get("msg_id", ""), message["content"]
                if message["msg_type"] == "stream":
                    self.printed[cell] += content["text"]
                elif "data" in content:
                    self.shown[cell].append(content)
        except queue.Empty:
            raise AssertionError(f"the cell did not end within {patience} s") from None
        answer: dict[str, Any] = reply["content"]
        return answer

    def run(self, code: str, patience: float = PATIENCE) -> str:
        """Run a cell that is expected to succeed and return its request."""
        request = self.send(code)
        reply = self.finish(request, patience)
        assert reply["status"] == "ok", "\n".join(reply["traceback"])
        return request

    def evaluate(self, expression: str) -> Any:
        """Return the value of an expression that is plain data."""
        answer = self.finish(self.send("", value=expression))["user_expressions"]["value"]
        assert answer["status"] == "ok", "\n".join(answer["traceback"])
        return ast.literal_eval(answer["data"]["text/plain"])

    def processes(self) -> set[psutil.Process]:
        """Return the kernel and the living processes that come from it, whatever their parent is now."""
        return set(marked(self._mark))


@contextmanager
def open_notebook(folder: Path, definitions: str) -> Iterator[Notebook]:
    """Start a kernel of this very interpreter, whatever kernels are installed, and run a cell; end it afterwards."""
    mark = uuid.uuid4().hex
    own = KernelSpecManager(kernel_dirs=[])
    manager = KernelManager(kernel_spec_manager=own, connection_file=str(folder / "connection.json"))
    # Under pytest, which these variables show, a kernel does not capture the output of other processes.
    inherited = {name: value for name, value in environment().items() if not name.startswith("PYTEST_")}
    manager.start_kernel(cwd=str(folder), env={**inherited, MARK: mark, "IPYTHONDIR": str(folder / "ipython")})
    client: Any = manager.client()
    try:
        client.start_channels(stdin=False, hb=False, control=False)
        notebook = Notebook(manager, client, mark)
        client.wait_for_ready(timeout=PATIENCE)
        notebook.run(f"{definitions}\nfolder = {str(folder)!r}")
        yield notebook
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)
