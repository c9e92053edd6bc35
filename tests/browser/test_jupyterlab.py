"""JupyterLab in Chromium: notebooks are run, interrupted and rerun by menus and buttons."""

from __future__ import annotations

import io
import os
import re
import shutil
import time
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import nbformat
import numpy as np
import psutil
import pytest
from kernels import NOTEBOOKS, isolate, marked, read
from PIL import Image

from browser.lab import Notebook, serve
from parallelenv import ParallelEnv
from parallelenv.notebook.repr import LOOKS
from parallelenv.testing.contract import DONE_POLICIES

pytestmark = [pytest.mark.slow, pytest.mark.browser, pytest.mark.timeout(240)]

_ENDLESS = """from pathlib import Path

class Stuck(Lift):
    def stay(self):
        Path({begun!r}).touch()
        time.sleep(600)

stuck = ParallelEnv([Stuck] * 2, "subproc", num_cpus=2)
stuck.customized_method("stay")"""

_FIRST_LOOK = (
    """from parallelenv import ParallelEnv

env = ParallelEnv.make(
    "LunarLander-v3", num_envs=6, para_mode="subproc", num_cpus=2,
    asynchronous="idle", render_mode="rgb_array",
)
env.reset(seed=3)
env.action_space.seed(0)
for _ in range(80):
    env.step(env.action_space.sample())
env""",
    "env.show()",
    """import time


def hover(states):
    time.sleep(0.05)
    return [0] * len(states)


env.reset(seed=3)
env.rollout(hover, 60)""",
    "env.close()\nenv",
)
"""Code that a newcomer may run first; the front page shows it."""


def _chromium() -> str:
    """Return the path of the system's Chromium; if there is none, skip the test, or fail where it is required."""
    missing = [name for name in ("jupyterlab", "playwright") if find_spec(name) is None]
    found = shutil.which("chromium") or shutil.which("chromium-headless-shell")
    if found and not missing:
        return found
    reason = f"not installed: {', '.join([*missing, *([] if found else ['chromium'])])}"
    if os.environ.get("PARALLELENV_REQUIRE_BROWSER") == "1":
        pytest.fail(f"PARALLELENV_REQUIRE_BROWSER=1, but {reason}")
    pytest.skip(f"{reason}; make browser, after apt-get install chromium")


@pytest.fixture
def page(tmp_path: Path) -> Iterator[Any]:
    """A window of Chromium; a picture of it at the end is kept with the test's files."""
    executable = _chromium()
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=executable, args=["--no-sandbox", "--disable-gpu"])
        page = browser.new_page(viewport={"width": 1280, "height": 1000})
        yield page
        page.screenshot(path=tmp_path / "at-the-end.png")
        browser.close()


@pytest.fixture
def address(page: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """JupyterLab over copies of two notebooks without outputs; the second has a cell more, which never ends."""
    mark = isolate(tmp_path, monkeypatch)
    for name in ("01_quickstart", "04_failures"):
        book = read(NOTEBOOKS / f"{name}.ipynb")
        for cell in book.cells:
            if cell.cell_type == "code":
                cell.outputs, cell.execution_count = [], None
        if name == "04_failures":
            # Before the last three, at the error of which the menu's "Run All" ends.
            book.cells.insert(-3, nbformat.v4.new_code_cell(_ENDLESS.format(begun=str(tmp_path / "begun"))))  # type: ignore[no-untyped-call]
        nbformat.write(book, tmp_path / f"{name}.ipynb")  # type: ignore[no-untyped-call]
    first_look = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(code) for code in _FIRST_LOOK])  # type: ignore[no-untyped-call]
    first_look.metadata = book.metadata  # which names the kernel
    nbformat.write(first_look, tmp_path / "first_look.ipynb")  # type: ignore[no-untyped-call]
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))  # otherwise SDL warns in each worker that it is not set
    with serve(tmp_path) as address:
        yield address
    psutil.wait_procs(marked(mark), timeout=10)
    assert not marked(mark), "kernels and workers end with JupyterLab"


def test_notebooks_in_jupyterlab(page: Any, address: str, tmp_path: Path) -> None:
    first = Notebook(page, address, "01_quickstart.ipynb")
    first.start_all()
    first.await_run(page.locator(".jp-CodeCell").last)
    _check_tables(first)
    _check_frames(first)

    fourth = Notebook(page, address, "04_failures.ipynb")
    fourth.start_all()
    endless = fourth.cell("class Stuck(Lift)")
    deadline = time.monotonic() + 60
    while not (tmp_path / "begun").exists():
        assert time.monotonic() < deadline
        time.sleep(0.05)
    began = time.monotonic()
    fourth.interrupt()
    fourth.await_run(endless)
    assert time.monotonic() - began < 5
    assert "KeyboardInterrupt" in fourth.output(endless)

    made = fourth.cell('print(env.reset(), "in"')
    fourth.rerun(made)
    fourth.rerun(made)
    assert "Closed 1 ParallelEnv that an earlier run of this cell had made" in fourth.output(made)
    killed = fourth.cell("except WorkerDiedError as error:")
    fourth.rerun(killed)
    assert "It was killed by SIGKILL" in fourth.output(killed)
    _check_portrait(fourth, killed)
    cells = page.locator(".jp-CodeCell")
    uncaught = cells.nth(cells.count() - 2)
    fourth.rerun(uncaught)
    text = fourth.output(uncaught)
    assert 'raise ValueError("the door does not close")' in text
    assert "ValueError: the door does not close" in text
    assert len(text.splitlines()) <= 35
    _keep(page, "uncaught.png", uncaught)


def test_pictures_of_the_front_page_in_jupyterlab(page: Any, address: str) -> None:
    """The repr, tiled frames and a running progress bar; the first two are the picture of the front page."""
    page.set_viewport_size({"width": 1000, "height": 1000})
    notebook = Notebook(page, address, "first_look.ipynb")
    page.keyboard.press("Control+b")  # without the list of files
    notebook.start_all()
    rollout = notebook.cell("def hover")
    bar = re.compile(r"rollout: +\d+%\|.*\| \d+/60 steps \[00:0\d<00:0\d, +[\d.]+ step/s\]")
    rollout.get_by_text(bar).wait_for(timeout=60_000)
    _keep(page, "bar.png", rollout)
    closed = notebook.cell("env.close()")
    notebook.await_run(closed)
    assert "rollout:" not in notebook.output(rollout), "the bar is gone"
    assert "6 closed" in notebook.output(closed)
    assert "running" not in notebook.output(closed)
    assert _number_of(LOOKS["closed"].colour, closed) > 6 * 100
    assert not _number_of(LOOKS["running"].colour, closed)

    made = notebook.cell("num_envs=6")
    text = notebook.output(made)
    assert re.search(r"\d running\s*✓\s*\d done\s", text), text
    assert re.search(r"\d+ steps of all envs together", text), text
    frames = _pixels(notebook.cell("env.show").locator(".jp-OutputArea-output img"))
    assert abs(frames.shape[1] - 800) <= 2
    is_grey = (np.abs(frames.astype(int) - 128) < 3).all(axis=2)
    assert (is_grey.mean(axis=0) > 0.95).sum() >= 2 * 3, "two gaps between three columns"
    _keep(page, "notebook.png", made, until=rollout)


def _number_of(colour: str, cell: Any) -> int:
    """Return how many pixels of the portrait below a cell have a colour."""
    wanted = [int(colour[i : i + 2], 16) for i in (1, 3, 5)]
    pixels = _pixels(cell.locator(".jp-RenderedHTMLCommon").last).astype(int)
    return int((np.abs(pixels - wanted).max(axis=2) < 8).sum())


def _check_tables(notebook: Notebook) -> None:
    """The four tables are in the output, fit the page, and are drawn."""
    tables = notebook.cell("def show(policy").locator(".jp-OutputArea-output table")
    captions = [tables.nth(i).locator("caption").inner_text() for i in range(tables.count())]
    assert captions == [f"asynchronous={policy!r}" for policy in DONE_POLICIES]
    assert "0 (ended at 2), -2, done" in tables.nth(2).inner_text().replace("\n", " ").replace(".0", "")
    for i in range(tables.count()):
        pixels = _pixels(tables.nth(i))
        dark = (pixels.max(axis=2) < 128).mean()
        assert 0.005 < dark < 0.3, "letters are dark, and most of a table is not"
        assert pixels.shape[1] > 150


def _check_portrait(notebook: Notebook, cell: Any) -> None:
    """The repr of a `ParallelEnv` has two squares of failed envs, and a table of workers."""
    assert "2 failed" in notebook.output(cell)
    portrait = cell.locator(".jp-RenderedHTMLCommon").last
    assert [portrait.locator("th").nth(i).inner_text() for i in range(3)] == ["envs", "pid", "memory"]
    for state in ("failed", "running"):
        assert _number_of(LOOKS[state].colour, cell) > 2 * 100, f"two squares of 14 by 14 pixels are {state}"


def _check_frames(notebook: Notebook) -> None:
    """The tiled frame is on the screen, as the plain loop draws it."""
    with ParallelEnv.make("CartPole-v1", num_envs=4, render_mode="rgb_array") as env:
        env.reset(seed=0)
        for _ in range(6):
            env.step([0, 1, 0, 1])
        picture = Image.fromarray(env.render(tile=True, labels=True))
    expected = picture.resize((picture.width // 3, picture.height // 3), Image.Resampling.BOX)
    image = notebook.cell("env.render(tile=True, labels=True)").locator(".jp-OutputArea-output img")
    image.scroll_into_view_if_needed()
    found = _pixels(image)
    assert found.shape[1:] == (expected.width, 3)
    assert 0 <= found.shape[0] - expected.height <= 1, "it may be between two rows of the screen"
    rows = [found[i : i + expected.height] for i in range(found.shape[0] - expected.height + 1)]
    likeness = max(np.corrcoef(some.ravel(), np.asarray(expected).ravel())[0, 1] for some in rows)
    assert likeness > 0.98, "a step before or after it is 0.97, a row too low 0.85"


def _pixels(element: Any) -> Any:
    return np.asarray(Image.open(io.BytesIO(element.screenshot())).convert("RGB"))


def _keep(page: Any, name: str, cell: Any, until: Any = None) -> None:
    """Save a picture of the window, or of the part above a cell, to the folder ``PARALLELENV_SCREENSHOTS``."""
    folder = os.environ.get("PARALLELENV_SCREENSHOTS")
    if folder:
        cell.scroll_into_view_if_needed()
        Path(folder).mkdir(parents=True, exist_ok=True)
        size = page.viewport_size
        if until is not None:
            size["height"] = int(until.bounding_box()["y"])
        page.screenshot(path=Path(folder) / name, clip={"x": 0, "y": 0, **size})
