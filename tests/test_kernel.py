"""Interrupted and rerun cells, restarted kernels, and outputs below cells, with real kernels.

The fault table has Ctrl-C in other calls, also to the whole process group as Jupyter sends it, and callers that
are killed.
"""

from __future__ import annotations

import base64
import io
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from holdings import survivors
from kernels import PATIENCE, Notebook, open_notebook
from modes import ORACLE, PROCESSES, THREADS

pytestmark = pytest.mark.slow

SOON = 3.0  # seconds from the interrupt to the end of the cell; a fraction of a second if nothing else runs
GONE = 5.0  # seconds until workers have exited after their kernel or their last reference in it is gone
NUM_WORKERS = 2

START_METHODS = ["forkserver", "spawn", "fork"]
every_start_method = pytest.mark.parametrize("way", START_METHODS)

DEFINITIONS = """
import os, signal, sys, time
os.environ['TQDM_MININTERVAL'] = '0'  # bars show each step; tqdm reads this when it is imported
from functools import partial
from pathlib import Path
import numpy as np
import parallelenv.rollouts.rollout as length
from fragile import GO_ON, WAIT, Fragile
from parallelenv import ParallelEnv
from parallelenv.testing.envs import Counter

PRINT, INTERRUPT = 4, 5

class Talking(Fragile):
    delay = 0.0

    def step(self, action):
        if action == INTERRUPT:
            self.delay = (self.delay + 10e-6) % 500e-6  # each time a little later: the caller is about to wait
            begin = time.perf_counter()
            while time.perf_counter() < begin + self.delay:
                pass
            os.killpg(os.getpgrp(), signal.SIGINT)  # as Jupyter does
            self.wait()
        if action == PRINT:
            print('step', self.steps)
        return super().step(action)

class Lamp(Counter):
    metadata = {"render_modes": ["rgb_array"], "render_fps": 200}
    render_mode = "rgb_array"
    def render(self):
        return np.full((8 + 8 * self.number, 16, 3), 40 * self.count, np.uint8)

stay = lambda states: [1] * len(states)
length._BAR_DELAY = 0.0
"""

INTERRUPTED_STEPS = """
seconds = []
for _ in range(200):
    begin = time.monotonic()
    try:
        env.step([INTERRUPT, GO_ON, GO_ON, GO_ON])
    except KeyboardInterrupt:
        seconds.append(time.monotonic() - begin)
    Path(folder, 'go').touch()
    states = env.reset()
    Path(folder, 'go').unlink()
"""


def constructing(way: str, *, name: str = "env", options: str = "") -> str:
    """Return a cell that assigns four envs in two workers."""
    envs = "[partial(Talking, number, folder) for number in range(4)]"
    mode = repr(way) if way in (ORACLE, THREADS) else f"{PROCESSES!r}, start_method={way!r}"
    return f"{name} = ParallelEnv({envs}, {mode}, num_cpus={NUM_WORKERS}{options})"


@pytest.fixture(scope="module")
def shared_notebook(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Notebook]:
    """A notebook whose kernel is shared by the whole file: starting one takes a second."""
    with open_notebook(tmp_path_factory.mktemp("notebook"), DEFINITIONS) as notebook:
        # The fork servers and the resource tracker, which a kernel keeps, are not leaks.
        for cell in (*map(constructing, START_METHODS), f"env = ParallelEnv([Lamp], {PROCESSES!r})", "env.close()"):
            notebook.run(cell)
        yield notebook


@pytest.fixture
def notebook(shared_notebook: Notebook, tmp_path: Path) -> Iterator[Notebook]:
    """The shared notebook, with its own folder."""
    shared_notebook.run(f"folder = {str(tmp_path)!r}")
    shared_notebook.printed.clear()
    yield shared_notebook
    (tmp_path / "go").touch()
    shared_notebook.run("ParallelEnv.close_all()")


def wait_until(condition: Callable[[], bool], patience: float) -> bool:
    """Wait until a condition holds or ``patience`` seconds have passed; return whether it holds."""
    deadline = time.monotonic() + patience
    while not (holds := condition()) and time.monotonic() < deadline:
        time.sleep(0.01)
    return holds


def begin_step(notebook: Notebook, folder: Path, cell: str) -> str:
    """Send a cell that waits in its last line, for a step of env 0; return its request when that step has begun."""
    request = notebook.send(cell)
    assert wait_until((folder / "began-0").exists, PATIENCE)
    return request


# ---------------------------------------------------------------- interrupts


@pytest.mark.parametrize("way", [ORACLE, "forkserver"])
def test_reset_works_after_an_interrupted_step(notebook: Notebook, tmp_path: Path, way: str) -> None:
    notebook.run(f"{constructing(way)}\nstates = env.reset()")
    pids = notebook.evaluate("env.customized_method('pid')")
    request = begin_step(notebook, tmp_path, "env.step([WAIT, GO_ON, GO_ON, GO_ON])")
    began = time.monotonic()
    notebook.manager.interrupt_kernel()
    reply = notebook.finish(request)
    assert time.monotonic() - began < SOON
    assert reply["ename"] == "KeyboardInterrupt"
    assert "parallelenv/" not in "".join(reply["traceback"])
    (tmp_path / "go").touch()
    assert notebook.evaluate("env.reset()[:, 1].tolist()") == [0, 0, 0, 0]
    assert notebook.evaluate("env.step([GO_ON] * 4)[0].tolist()") == [[0, 1], [1, 1], [2, 1], [3, 1]]
    assert notebook.evaluate("env.customized_method('pid')") == pids


@pytest.mark.parametrize("way", [THREADS, "forkserver"])
def test_interrupt_at_the_start_of_a_step_is_not_missed(notebook: Notebook, way: str) -> None:
    notebook.run(f"{constructing(way)}\nstates = env.reset()")
    notebook.run(INTERRUPTED_STEPS)
    assert notebook.evaluate("len(seconds)") == 200
    assert notebook.evaluate("max(seconds)") < SOON


# ---------------------------------------------------------------- rerun cells


def run_three_times(notebook: Notebook, cell: str, cell_id: str | None) -> list[str]:
    """Run a cell three times; workers of its earlier runs are gone after each. Return what each run has printed."""
    before = notebook.processes()
    requests = []
    for _ in range(3):
        requests.append(notebook.send(cell, cell_id))
        notebook.finish(requests[-1])
        assert len(notebook.processes() - before) >= NUM_WORKERS
        assert wait_until(lambda: len(notebook.processes() - before) <= NUM_WORKERS, GONE)
    return [notebook.printed[request] for request in requests]


@every_start_method
def test_reassigning_a_variable_ends_its_workers(notebook: Notebook, way: str) -> None:
    assert run_three_times(notebook, constructing(way), cell_id=None) == ["", "", ""]


@pytest.mark.parametrize("ending", ["env", "env.step([GO_ON])"], ids=["shown", "failed"])
def test_rerun_cell_closes_envs_that_the_kernel_keeps(notebook: Notebook, ending: str) -> None:
    line = "Closed 1 ParallelEnv that an earlier run of this cell had made (keep=True prevents that).\n"
    assert run_three_times(notebook, f"{constructing('forkserver')}\n{ending}", cell_id="c2") == ["", line, line]


def test_rerun_cell_keeps_envs_of_other_cells_and_with_keep_true(notebook: Notebook) -> None:
    for cell_id, name, options in (
        ("c3", "other", ""),
        ("c2", "kept", ", keep=True"),
        ("c2", "env", ""),
        ("c2", "env", ""),
    ):
        notebook.finish(notebook.send(constructing("forkserver", name=name, options=options), cell_id))
    assert notebook.evaluate("[one.closed for one in (other, kept, env)]") == [False, False, False]


@pytest.mark.parametrize("cell_ids", [("", ""), ("c4", "c5"), ("", "c6")])
def test_cells_with_the_same_text_are_different_cells(notebook: Notebook, cell_ids: tuple[str, str]) -> None:
    notebook.run("made = []")
    for cell_id in cell_ids:
        request = notebook.send("made.append(ParallelEnv([Lamp]))", cell_id)
        notebook.finish(request)
        assert not notebook.printed[request]
    assert notebook.evaluate("[one.closed for one in made]") == [False, False]
    notebook.run("for one in made: one.close()")


def test_closed_and_collected_envs_of_cells_are_forgotten(notebook: Notebook) -> None:
    notebook.run("import gc, parallelenv.engine.cell_reruns as reruns")
    for _ in range(3):
        notebook.run("one = ParallelEnv([Lamp]); one.close()")
        notebook.run("ParallelEnv([Lamp]); gc.collect()")
    kept = notebook.send("kept = ParallelEnv([Lamp])", "c7")
    notebook.finish(kept)
    assert notebook.evaluate("len(reruns._made)") == 1
    notebook.run("kept.close()")


# ---------------------------------------------------------------- restarted kernels, and output


@pytest.mark.parametrize(("is_busy", "now"), [(False, False), (True, True)], ids=["idle-graceful", "busy-now"])
def test_kernel_restart_ends_all_processes(tmp_path: Path, now: bool, is_busy: bool) -> None:
    with open_notebook(tmp_path, DEFINITIONS) as notebook:
        for way in START_METHODS:
            notebook.run(f"{constructing(way, name=way)}\nstates = {way}.reset()")
        old = {process.pid for process in notebook.processes()}
        assert len(old) > NUM_WORKERS * len(START_METHODS)
        if is_busy:
            sent = "".join(f"{way}.send([GO_ON, GO_ON, WAIT, WAIT])\n" for way in START_METHODS[:2])
            begin_step(notebook, tmp_path, f"{sent}{START_METHODS[2]}.step([WAIT, GO_ON, GO_ON, WAIT])")
        notebook.manager.restart_kernel(now=now)
        assert not survivors(old, GONE)


@every_start_method
def test_output_appears_below_the_cell_whose_call_printed_it(notebook: Notebook, way: str) -> None:
    made = notebook.run(f"{constructing(way)}\nstates = env.reset()")
    first = notebook.run("result = env.step([GO_ON, GO_ON, GO_ON, PRINT])")
    silent = notebook.run("result = env.step([GO_ON, GO_ON, GO_ON, GO_ON])")
    last = notebook.run("result = env.step([PRINT, GO_ON, GO_ON, PRINT])")
    assert notebook.printed[first] == "[env 3] step 0\n"
    assert sorted(notebook.printed[last].splitlines()) == ["[env 0] step 2", "[env 3] step 2"]
    assert notebook.printed[made] + notebook.printed[silent] == ""


# ---------------------------------------------------------------- pictures, pages and progress bars


@pytest.fixture
def lamps(notebook: Notebook) -> Notebook:
    """A notebook with three envs that draw."""
    envs = "[lambda number=number: Lamp(number, 4) for number in range(3)]"
    notebook.run(f"env = ParallelEnv({envs}, {PROCESSES!r}, 'restart', {NUM_WORKERS})\nstates = env.reset(seed=0)")
    return notebook


def outputs(notebook: Notebook, request: str) -> list[dict[str, str]]:
    """Return what a cell shows at its end, by MIME type, without the empty places of bars that have gone."""
    latest: dict[str, dict[str, str]] = {}
    for number, content in enumerate(notebook.shown[request]):
        latest[content.get("transient", {}).get("display_id", str(number))] = content["data"]
    assert not notebook.printed[request]
    return [data for data in latest.values() if data.get("text/html") != ""]


def picture(output: dict[str, str]) -> Any:
    from PIL import Image

    with Image.open(io.BytesIO(base64.b64decode(output["image/png"]))) as image:
        return np.asarray(image)


def test_show_replaces_the_previous_picture_below_the_same_cell(lamps: Notebook) -> None:
    request = lamps.run("env.show()\nfor _ in range(3):\n    result = env.step([1, 1, 1])\n    env.show()")
    (output,) = outputs(lamps, request)
    shown = picture(output)
    assert shown.shape == (49, 33, 3)
    assert (shown[:8, :16] == 120).all()
    (other,) = outputs(lamps, lamps.run("env.show([0])"))
    assert picture(other).shape == (8, 16, 3)
    assert len(outputs(lamps, request)) == 1


def test_play_leaves_the_last_frame_and_the_episodes(lamps: Notebook) -> None:
    shown, episodes = outputs(lamps, lamps.run("env.play(stay, 6)"))
    assert (picture(shown)[:8, :16] == 80).all()  # the second step of the second episode
    assert episodes["text/plain"].startswith("<Evaluation of 3 episodes")


@pytest.mark.parametrize(
    ("call", "total", "unit"),
    [
        ("rollout(stay, 30", 30, "steps"),
        ("run_episodes(stay, 6", 6, "episodes"),
        ("play(stay, 6", 6, "steps"),
        ("record(stay, 4, 'film.webp'", 4, "steps"),
    ],
)
def test_progress_bars_show_without_ipywidgets_and_disappear(lamps: Notebook, call: str, total: int, unit: str) -> None:
    def bars_of(request: str) -> list[str]:
        texts = [content["data"]["text/plain"] for content in lamps.shown[request]]
        return [text for text in texts if text.startswith(f"{call.partition('(')[0]}: ")]

    request = lamps.run(f"env.{call})")
    bars = bars_of(request)
    assert f" 0/{total} {unit} [" in bars[0]
    assert f" {total}/{total} {unit} [" in bars[-1], "it moves"
    assert not [output for output in outputs(lamps, request) if output["text/plain"] in bars], "and is gone"
    lamps.run("states = env.reset()")
    assert not bars_of(lamps.run(f"env.{call}, progress=False)"))
    assert lamps.evaluate("'ipywidgets' in sys.modules or 'tqdm.notebook' in sys.modules") is False
