"""Outputs of notebook cells, in a real kernel."""

from __future__ import annotations

import asyncio
import base64
import io
from pathlib import Path
from typing import Any

import nbformat
import numpy as np
import pytest
from kernels import isolate
from nbclient import NotebookClient

Image = pytest.importorskip("PIL.Image")
pytestmark = pytest.mark.slow

CELLS = [
    """
import gymnasium, numpy as np
from parallelenv import ParallelEnv
from parallelenv.testing.envs import Counter

class Lamp(Counter):
    metadata = {"render_modes": ["rgb_array"], "render_fps": 200}
    render_mode = "rgb_array"
    def render(self):
        return np.full((8 + 8 * self.number, 16, 3), 40 * self.count, np.uint8)

stay = lambda states: [1] * len(states)
env = ParallelEnv([lambda number=number: Lamp(number, 4) for number in range(3)], "subproc", "restart", 2)
states = env.reset(seed=0)
""",
    "env.show()\nfor _ in range(3):\n    result = env.step([1, 1, 1])\n    env.show()",
    "env.show([0])",
    "env.play(stay, 6)",
    "film = env.record(stay, 5, 'film.webp')\nfilm",
    """
states = env.reset()
with env.profile() as p:
    for _ in range(20):
        result = env.step([1, 1, 1])
p.summary()
""",
    "p.plot()",
    "env",
    "env.close()\nenv",
]


BAR_CELLS = [
    "import os, sys\nos.environ['TQDM_MININTERVAL'] = '0'\n"
    "import parallelenv.rollouts.rollout as length\nlength._BAR_DELAY = 0.0\n" + CELLS[0],
    "env.rollout(stay, 30)",
    "states = env.reset()\nenv.run_episodes(stay, 6)",
    "env.play(stay, 4)",
    "film = env.record(stay, 4)",
    "states = env.reset()\nenv.rollout(stay, 30, progress=False)\nfilm = env.record(stay, 4, progress=False)",
    "print('ipywidgets' in sys.modules, 'tqdm.notebook' in sys.modules)",
]


class Listening(NotebookClient):
    """Keeps each text shown below a cell, even if a later one replaces it."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.texts: dict[int, list[str]] = {}

    def process_message(self, message: Any, cell: Any, index: int) -> Any:
        if message["msg_type"] in ("display_data", "update_display_data"):
            self.texts.setdefault(index, []).append(message["content"]["data"]["text/plain"])
        return super().process_message(message, cell, index)


def execute(cells: list[str], folder: Path) -> Listening:
    """Run a notebook of these cells in a kernel of this interpreter."""
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(code) for code in cells])  # type: ignore[no-untyped-call]
    with pytest.MonkeyPatch.context() as patched:
        isolate(folder, patched)
        client = Listening(notebook, timeout=60, kernel_name="python3")
        asyncio.run(client.async_execute(cwd=str(folder)))
    return client


@pytest.fixture(scope="module")
def executed(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A notebook of these cells with its outputs."""
    folder: Path = tmp_path_factory.mktemp("notebook")
    notebook = execute(CELLS, folder).nb
    assert (folder / "film.webp").stat().st_size
    return notebook


def outputs(notebook: Any, cell: int) -> list[dict[str, str]]:
    """Return the outputs of a cell, by MIME type."""
    found = notebook.cells[cell].outputs
    assert all("data" in output for output in found), found
    return [dict(output["data"]) for output in found]


def picture(output: dict[str, str]) -> Any:
    with Image.open(io.BytesIO(base64.b64decode(output["image/png"]))) as image:
        return np.asarray(image)


def test_show_replaces_the_previous_picture_below_the_same_cell(executed: Any) -> None:
    (output,) = outputs(executed, 1)
    shown = picture(output)
    assert shown.shape == (49, 33, 3)
    assert (shown[:8, :16] == 120).all()
    (other,) = outputs(executed, 2)
    assert picture(other).shape == (8, 16, 3)


def test_play_leaves_the_last_frame_and_the_episodes(executed: Any) -> None:
    shown, episodes = outputs(executed, 3)
    assert (picture(shown)[:8, :16] == 80).all()  # the second step of the second episode
    assert episodes["text/plain"].startswith("<Evaluation of 3 episodes")


def test_film_table_and_timeline_are_shown_as_html(executed: Any) -> None:
    (film,), (summary,), (timeline,), (shown,), (closed,) = (outputs(executed, cell) for cell in range(4, 9))
    assert 'src="data:image/webp;base64,' in film["text/html"]
    assert "advice: " in summary["text/plain"]
    assert timeline["text/html"].startswith("<svg ")
    assert "3 running" in shown["text/html"]
    assert "memory" in shown["text/plain"]
    assert "closed" in closed["text/html"]


def test_nbconvert_keeps_all_outputs(executed: Any) -> None:
    exporter = pytest.importorskip("nbconvert").HTMLExporter()
    page, _ = exporter.from_notebook_node(executed)
    for part in ('title="env 0: running"', "data:image/webp;base64,", "<svg ", "data:image/png;base64,"):
        assert part in page


def test_progress_bars_show_without_ipywidgets_and_disappear(tmp_path: Path) -> None:
    client = execute(BAR_CELLS, tmp_path)
    for cell, (name, total) in enumerate(
        [("rollout", "30 steps"), ("run_episodes", "6 episodes"), ("play", "4 steps"), ("record", "4 steps")], start=1
    ):
        texts = client.texts[cell]
        bars = [text for text in texts if text.startswith(f"{name}: ")]
        assert f" 0/{total} [" in bars[0]
        assert f" {total.split()[0]}/{total} [" in bars[-1], "it moves"
        shown = [output["data"].get("text/html") for output in client.nb.cells[cell].outputs if "data" in output]
        assert "" in shown, "and is gone at the end"
        assert not [output for output in client.nb.cells[cell].outputs if output.output_type == "stream"]
    assert not client.nb.cells[5].outputs[:-1]
    assert client.nb.cells[6].outputs[0].text == "False False\n"
