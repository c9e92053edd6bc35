"""Uncaught errors as shown by a real kernel, IPython, Python, rich, pytest and the debugger."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from conftest import needs_ray
from kernels import Notebook, open_notebook
from mistakes import DEFINITIONS, ENV, MISTAKES, make_mistake
from modes import ORACLE, PROCESSES

from parallelenv import registry

SOON = 5.0  # seconds until a traceback is there; 2 are promised, but tests share the machine
IN_RAY = ("an env raises in step", "an env raises in its constructor", "a mistyped method", "a worker that dies")
"""Mistakes that are also tried in the Ray modes, where one takes seconds because Ray has to start actors for it."""


every_mode = pytest.mark.parametrize("word", registry.known_modes())


def start(notebook: Notebook, word: str) -> None:
    """Start Ray in the kernel if the mode needs it, for all tests of this file."""
    if needs_ray(word):
        pytest.importorskip("ray")
        options = "num_cpus=4, include_dashboard=False, logging_level='ERROR'"
        notebook.run(f"import ray\nray.is_initialized() or ray.init({options}) and None", patience=100)


@pytest.fixture(scope="module")
def notebook(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Notebook]:
    with open_notebook(tmp_path_factory.mktemp("notebook"), DEFINITIONS) as notebook:
        # The fork servers stay: they are not leaks.
        notebook.run(f"{ENV.format(mode=PROCESSES)}\nenv.close()\nParallelEnv(['CartPole-v1'], {PROCESSES!r}).close()")
        yield notebook


@pytest.mark.parametrize("name", MISTAKES)
@every_mode
def test_kernel_shows_the_mistake_and_runs_the_next_cell(notebook: Notebook, word: str, name: str) -> None:
    mistake = MISTAKES[name]
    if word in mistake.unlike:
        pytest.skip(f"it cannot be made in {word}")
    if needs_ray(word) and name not in IN_RAY:
        pytest.skip("the frames are left out by the same code as in subproc")
    start(notebook, word)
    reading = make_mistake(notebook, mistake, word)
    assert reading.seconds < SOON or needs_ray(word)
    assert reading.num_lines <= mistake.limit, reading.traceback
    assert f"{mistake.error}: " in reading.traceback
    assert mistake.text in reading.traceback
    assert mistake.line in reading.traceback
    assert mistake.cell.format(mode=word).splitlines()[-1] in reading.traceback
    assert "parallelenv/" not in reading.traceback


@every_mode
def test_kernel_shows_the_interrupted_line_and_runs_the_next_cell(notebook: Notebook, word: str) -> None:
    start(notebook, word)
    notebook.run(ENV.format(mode=word), patience=100)
    request = notebook.send("print('here')\nenv.step([HANG, GO_ON, GO_ON, GO_ON])")
    while "here" not in notebook.printed[request]:
        notebook.read_output(request)
    notebook.manager.interrupt_kernel()
    reply = notebook.finish(request)
    assert reply["ename"] == "KeyboardInterrupt"
    assert len("\n".join(reply["traceback"]).splitlines()) <= 20
    assert notebook.evaluate("40 + 2") == 42
    notebook.run("env.close(0)")


SCRIPT = f"""{DEFINITIONS}

def use():
    env = make({PROCESSES!r})
    env.reset()
    env.step([GO_ON, FALL, GO_ON, GO_ON])


"""
CALL = 'if __name__ == "__main__":\n    use()\n'
IN_DEBUGGER = """
import pdb, sys
try:
    use()
except ZeroDivisionError as error:
    sys.last_traceback = error.__traceback__
pdb.pm()
"""
FRONTENDS = {
    "python": (["{python}", "{script}"], CALL, ""),
    "ipython": (["{python}", "-m", "IPython", "--colors=NoColor", "{script}"], CALL, ""),
    "ipython -c": (["{python}", "-m", "IPython", "--colors=NoColor", "-c", "import trying; trying.use()"], "", ""),
    "ipython, verbose": (
        ["{python}", "-m", "IPython", "--colors=NoColor", "--xmode=Verbose", "-c", "import trying; trying.use()"],
        "",
        "",
    ),
    "rich": (["{python}", "{script}"], f"import rich.traceback\nrich.traceback.install(show_locals=True)\n{CALL}", ""),
    "pytest": (["{python}", "-m", "pytest", "-p", "no:cacheprovider", "{script}"], "def test_use():\n    use()\n", ""),
    "pytest, with locals": (
        ["{python}", "-m", "pytest", "-p", "no:cacheprovider", "--showlocals", "--tb=long", "{script}"],
        "def test_use():\n    use()\n",
        "",
    ),
    "pdb": (["{python}", "{script}"], IN_DEBUGGER, "where\nargs\nup\nlist\nup\nquit\n"),
}


@pytest.mark.parametrize("frontend", FRONTENDS)
def test_every_frontend_shows_the_failing_line(tmp_path: Path, frontend: str) -> None:
    if frontend == "rich":
        pytest.importorskip("rich")
    words, ending, typed = FRONTENDS[frontend]
    script = tmp_path / "trying.py"
    script.write_text(SCRIPT + ending)
    # PYTEST_ADDOPTS and similar variables of the running tests are not for the pytest that is started here.
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    done = subprocess.run(
        [word.format(python=sys.executable, script=script) for word in words],
        input=typed,
        capture_output=True,
        text=True,
        timeout=60,
        cwd=tmp_path,
        env={**environment, "IPYTHONDIR": str(tmp_path), "COLUMNS": "120"},
        check=False,
    )
    output = done.stdout + done.stderr
    assert "raise ZeroDivisionError(reason)" in output, output
    assert "env.step([GO_ON, FALL, GO_ON, GO_ON])" in output
    assert "parallelenv/" not in output
    if frontend != "pdb":
        assert "the cart fell over" in output
        assert "Raised by env 1 in step, process " in output
    if frontend == "python":
        assert len(output.splitlines()) <= 20


@pytest.mark.parametrize("word", [ORACLE, PROCESSES])
def test_all_frames_are_shown_with_full_traceback_variable(tmp_path: Path, word: str) -> None:
    script = tmp_path / "trying.py"
    script.write_text(SCRIPT.replace(repr(PROCESSES), repr(word)) + CALL)
    done = subprocess.run(
        [sys.executable, str(script)],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, "PARALLELENV_FULL_TRACEBACK": "1"},
        check=False,
    )
    assert "failures.py" in done.stderr
    assert "host.py" in done.stderr
    assert "raise ZeroDivisionError(reason)" in done.stderr
