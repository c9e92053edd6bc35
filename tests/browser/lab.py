"""A JupyterLab server, and a page of it."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

PATIENCE = 60.0  # seconds for a page, or for a cell
_TOKEN = "of-a-test"
_NEWS = "@jupyterlab/apputils-extension/notification"
_SETTINGS: dict[str, dict[str, Any]] = {
    # Otherwise cells outside the visible part are not in the page.
    "@jupyterlab/notebook-extension/tracker": {"windowingMode": "none"},
    # Otherwise it looks for news on the network.
    _NEWS: {"fetchNews": "false", "checkForUpdates": False, "doNotDisturbMode": True},
}


@contextlib.contextmanager
def serve(folder: Path) -> Iterator[str]:
    """Run JupyterLab over a folder; give its address."""
    for name, settings in _SETTINGS.items():
        path = folder / "settings" / f"{name}.jupyterlab-settings"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(settings), encoding="utf-8")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    places = {"JUPYTERLAB_SETTINGS_DIR": "settings", "JUPYTERLAB_WORKSPACES_DIR": "workspaces"}
    options = ["--no-browser", "--allow-root", "--ip=127.0.0.1", f"--port={port}", "--ServerApp.port_retries=0"]
    options += [f"--IdentityProvider.token={_TOKEN}", f"--ServerApp.root_dir={folder}", "--LabApp.news_url="]
    environment = {**os.environ, **{name: str(folder / place) for name, place in places.items()}}
    log = folder / "server.log"
    command = [sys.executable, "-m", "jupyterlab", *options]
    with log.open("wb") as written:
        server = subprocess.Popen(command, env=environment, cwd=folder, stdout=subprocess.DEVNULL, stderr=written)
    try:
        _await(f"http://127.0.0.1:{port}/api/status?token={_TOKEN}", server, log)
        yield f"http://127.0.0.1:{port}"
    finally:
        server.terminate()  # it ends its kernels
        server.wait(timeout=20)


def _await(address: str, server: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + PATIENCE
    while time.monotonic() < deadline and server.poll() is None:
        with contextlib.suppress(urllib.error.URLError, ConnectionError), urllib.request.urlopen(address, timeout=5):
            return
        time.sleep(0.1)
    raise RuntimeError(f"JupyterLab did not start:\n{log.read_text(encoding='utf-8', errors='replace')}")


class Notebook:
    """A notebook that is open in JupyterLab."""

    def __init__(self, page: Any, address: str, name: str) -> None:
        self.page = page
        page.goto(f"{address}/lab/tree/{name}?token={_TOKEN}&reset")
        page.locator(".jp-Notebook .jp-CodeCell").first.wait_for(timeout=1000 * PATIENCE)
        # Until then the kernel is not connected, and cells that are run have no effect.
        page.get_by_text("Python 3 | Idle").wait_for(timeout=1000 * PATIENCE)

    def cell(self, text: str) -> Any:
        """Return the only code cell with this text in its source."""
        cells = self.page.locator(".jp-CodeCell")
        found = cells.filter(has=self.page.locator(".jp-InputArea-editor", has_text=text))
        found.first.wait_for()
        if found.count() != 1:
            raise LookupError(f"{found.count()} cells have {text!r}")
        return found

    def number(self, cell: Any) -> str:
        """Return the execution number of a cell: ``[3]:`` for the third that was run, ``[*]:`` while it runs."""
        return str(cell.locator(".jp-InputPrompt").inner_text()).strip()

    def start_all(self) -> None:
        """Run all cells by the menu."""
        self.page.locator(".lm-MenuBar-itemLabel", has_text="Run").first.click()
        self.page.locator('.lm-Menu-item[data-command="runmenu:run-all"]').click()

    def await_run(self, cell: Any, before: str = "[ ]:") -> None:
        """Wait until a cell has run, and has another number than before."""
        deadline = time.monotonic() + PATIENCE
        while (number := self.number(cell)) in (before, "[*]:", "[ ]:"):
            if time.monotonic() > deadline:
                raise TimeoutError(f"a cell still says {number}")
            self.page.wait_for_timeout(50)

    def rerun(self, cell: Any) -> None:
        """Run one cell again, by the keyboard, and wait for it."""
        before = self.number(cell)
        cell.locator(".jp-InputArea-prompt").click()
        self.page.keyboard.press("Control+Enter")
        self.await_run(cell, before)

    def interrupt(self) -> None:
        """Press the stop button."""
        self.page.locator('[data-command="notebook:interrupt-kernel"]').first.click()

    def output(self, cell: Any) -> str:
        """Return the output text of a cell."""
        return str(cell.locator(".jp-OutputArea").inner_text())
