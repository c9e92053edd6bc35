"""Outputs of notebook cells, in a real kernel."""

from __future__ import annotations

import base64
import io
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from kernels import Notebook, open_notebook

Image = pytest.importorskip("PIL.Image")
pytestmark = pytest.mark.slow

SETUP = """
import os, sys
os.environ['TQDM_MININTERVAL'] = '0'
import numpy as np
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
"""


@pytest.fixture(scope="module")
def shared_notebook(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Notebook]:
    with open_notebook(tmp_path_factory.mktemp("notebook"), SETUP) as notebook:
        yield notebook


@pytest.fixture
def notebook(shared_notebook: Notebook) -> Notebook:
    shared_notebook.run("states = env.reset(seed=0)")
    return shared_notebook


def outputs(notebook: Notebook, request: str) -> list[dict[str, str]]:
    """Return what a cell shows at its end, by MIME type, without the empty places of bars that have gone."""
    latest: dict[str, dict[str, str]] = {}
    for number, content in enumerate(notebook.shown[request]):
        latest[content.get("transient", {}).get("display_id", str(number))] = content["data"]
    assert not notebook.printed[request]
    return [data for data in latest.values() if data.get("text/html") != ""]


def picture(output: dict[str, str]) -> Any:
    with Image.open(io.BytesIO(base64.b64decode(output["image/png"]))) as image:
        return np.asarray(image)


def test_show_replaces_the_previous_picture_below_the_same_cell(notebook: Notebook) -> None:
    request = notebook.run("env.show()\nfor _ in range(3):\n    result = env.step([1, 1, 1])\n    env.show()")
    (output,) = outputs(notebook, request)
    shown = picture(output)
    assert shown.shape == (49, 33, 3)
    assert (shown[:8, :16] == 120).all()
    (other,) = outputs(notebook, notebook.run("env.show([0])"))
    assert picture(other).shape == (8, 16, 3)
    assert len(outputs(notebook, request)) == 1


def test_play_leaves_the_last_frame_and_the_episodes(notebook: Notebook) -> None:
    shown, episodes = outputs(notebook, notebook.run("env.play(stay, 6)"))
    assert (picture(shown)[:8, :16] == 80).all()  # the second step of the second episode
    assert episodes["text/plain"].startswith("<Evaluation of 3 episodes")


@pytest.mark.parametrize(
    ("cell", "part"),
    [
        ("env.record(stay, 4, 'film.webp')", 'src="data:image/webp;base64,'),
        ("with env.profile() as p:\n    result = env.step([1, 1, 1])\np.plot()", "<svg "),
        ("env", 'title="env 0: running"'),
    ],
)
def test_film_timeline_and_env_are_shown_as_html(notebook: Notebook, cell: str, part: str) -> None:
    (output,) = outputs(notebook, notebook.run(cell))
    assert part in output["text/html"]


@pytest.mark.parametrize(
    ("call", "total", "unit"),
    [
        ("rollout(stay, 30", 30, "steps"),
        ("run_episodes(stay, 6", 6, "episodes"),
        ("play(stay, 6", 6, "steps"),
        ("record(stay, 4, 'film.webp'", 4, "steps"),
    ],
)
def test_progress_bars_show_without_ipywidgets_and_disappear(
    notebook: Notebook, call: str, total: int, unit: str
) -> None:
    def bars_of(request: str) -> list[str]:
        texts = [content["data"]["text/plain"] for content in notebook.shown[request]]
        return [text for text in texts if text.startswith(f"{call.partition('(')[0]}: ")]

    request = notebook.run(f"env.{call})")
    bars = bars_of(request)
    assert f" 0/{total} {unit} [" in bars[0]
    assert f" {total}/{total} {unit} [" in bars[-1], "it moves"
    assert not [output for output in outputs(notebook, request) if output["text/plain"] in bars], "and is gone"
    notebook.run("states = env.reset()")
    assert not bars_of(notebook.run(f"env.{call}, progress=False)"))
    assert notebook.evaluate("'ipywidgets' in sys.modules or 'tqdm.notebook' in sys.modules") is False
