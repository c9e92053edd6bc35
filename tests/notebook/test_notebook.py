"""Outputs of notebook cells, in a real kernel."""

from __future__ import annotations

import asyncio
import base64
import io
from typing import Any

import nbformat
import numpy as np
import pytest
from kernels import isolate
from nbclient import NotebookClient

Image = pytest.importorskip("PIL.Image")
pytestmark = pytest.mark.slow

SETUP = """
import os, sys
os.environ['TQDM_MININTERVAL'] = '0'
import gymnasium, numpy as np
import parallelenv.rollouts.rollout as length
length._BAR_DELAY = 0.0
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
"""
CELLS = {
    "setup": SETUP,
    "show": "env.show()\nfor _ in range(3):\n    result = env.step([1, 1, 1])\n    env.show()",
    "show one": "env.show([0])",
    "play": "env.play(stay, 6)",
    "film": "film = env.record(stay, 4, 'film.webp')\nfilm",
    "rollout": "states = env.reset()\nenv.rollout(stay, 30)",
    "episodes": "states = env.reset()\nenv.run_episodes(stay, 6)",
    "no bars": "states = env.reset()\nresult = env.rollout(stay, 30, progress=False)\n"
    "film = env.record(stay, 4, progress=False)",
    "modules": "print('ipywidgets' in sys.modules, 'tqdm.notebook' in sys.modules)",
    "profile": "states = env.reset()\nwith env.profile() as p:\n    result = env.step([1, 1, 1])\np.plot()",
    "env": "env",
}


class Listening(NotebookClient):
    """Keeps each text shown below a cell, even if a later one replaces it."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.texts: list[list[str]] = [[] for _ in CELLS]

    def process_message(self, message: Any, cell: Any, index: int) -> Any:
        if message["msg_type"] in ("display_data", "update_display_data"):
            self.texts[index].append(message["content"]["data"]["text/plain"])
        return super().process_message(message, cell, index)


@pytest.fixture(scope="module")
def executed(tmp_path_factory: pytest.TempPathFactory) -> Listening:
    """A notebook of these cells, after a run in a kernel of this interpreter."""
    folder = tmp_path_factory.mktemp("notebook")
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(code) for code in CELLS.values()])  # type: ignore[no-untyped-call]
    with pytest.MonkeyPatch.context() as patched:
        isolate(folder, patched)
        client = Listening(notebook, timeout=60, kernel_name="python3")
        asyncio.run(client.async_execute(cwd=str(folder)))
    return client


def outputs(executed: Listening, cell: str) -> list[dict[str, str]]:
    """Return the outputs of a cell, by MIME type, without the empty places of bars that have gone."""
    found = [dict(output["data"]) for output in executed.nb.cells[list(CELLS).index(cell)].outputs]
    return [output for output in found if output.get("text/html") != ""]


def picture(output: dict[str, str]) -> Any:
    with Image.open(io.BytesIO(base64.b64decode(output["image/png"]))) as image:
        return np.asarray(image)


def test_show_replaces_the_previous_picture_below_the_same_cell(executed: Listening) -> None:
    (output,) = outputs(executed, "show")
    shown = picture(output)
    assert shown.shape == (49, 33, 3)
    assert (shown[:8, :16] == 120).all()
    (other,) = outputs(executed, "show one")
    assert picture(other).shape == (8, 16, 3)


def test_play_leaves_the_last_frame_and_the_episodes(executed: Listening) -> None:
    shown, episodes = outputs(executed, "play")
    assert (picture(shown)[:8, :16] == 80).all()  # the second step of the second episode
    assert episodes["text/plain"].startswith("<Evaluation of 3 episodes")


def test_film_timeline_and_env_are_shown_as_html(executed: Listening) -> None:
    parts = {"film": 'src="data:image/webp;base64,', "profile": "<svg ", "env": 'title="env 0: running"'}
    for cell, part in parts.items():
        (output,) = outputs(executed, cell)
        assert part in output["text/html"]


@pytest.mark.parametrize(
    ("cell", "name", "total", "unit"),
    [
        ("rollout", "rollout", 30, "steps"),
        ("episodes", "run_episodes", 6, "episodes"),
        ("play", "play", 6, "steps"),
        ("film", "record", 4, "steps"),
    ],
)
def test_progress_bars_show_without_ipywidgets_and_disappear(
    executed: Listening, cell: str, name: str, total: int, unit: str
) -> None:
    index = list(CELLS).index(cell)
    bars = [text for text in executed.texts[index] if text.startswith(f"{name}: ")]
    assert f" 0/{total} {unit} [" in bars[0]
    assert f" {total}/{total} {unit} [" in bars[-1], "it moves"
    assert "" in [output["data"].get("text/html") for output in executed.nb.cells[index].outputs], "and is gone"
    assert not outputs(executed, "no bars")
    (modules,) = executed.nb.cells[list(CELLS).index("modules")].outputs
    assert modules.text == "False False\n"
