"""Uncaught errors as shown by a real kernel, IPython, Python, rich, pytest and the debugger."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from conftest import needs_ray
from kernels import Notebook, open_notebook
from mistakes import DEFINITIONS, ENV, MISTAKES
from modes import MODES, ORACLE, PROCESSES

STARTED = 100.0  # seconds in which Ray has started its processes, even on a busy machine
SOON = 5.0  # seconds until a traceback is there; 2 are promised, but tests share the machine
IN_RAY = ("an env raises in step", "an env raises in its constructor", "a mistyped method", "a worker that dies")
"""Mistakes that are also tried in the Ray modes, where one takes seconds because Ray has to start actors for it."""


def start(notebook: Notebook, word: str) -> None:
    """Start Ray in the kernel if the mode needs it, for all tests of this file."""
    if needs_ray(word):
        pytest.importorskip("ray")
        options = "num_cpus=4, include_dashboard=False, logging_level='ERROR'"
        notebook.run(f"import ray\nray.is_initialized() or ray.init({options}) and None", patience=STARTED)


@pytest.fixture(scope="module")
def notebook(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Notebook]:
    with open_notebook(tmp_path_factory.mktemp("notebook"), DEFINITIONS) as notebook:
        # The fork servers stay: they are not leaks.
        notebook.run(f"{ENV.format(mode=PROCESSES)}\nenv.close()\nParallelEnv(['CartPole-v1'], {PROCESSES!r}).close()")
        yield notebook


@pytest.mark.parametrize("name", MISTAKES)
@pytest.mark.parametrize("word", MODES)
def test_kernel_shows_the_mistake_and_runs_the_next_cell(notebook: Notebook, word: str, name: str) -> None:
    mistake = MISTAKES[name]
    if word in mistake.unlike:
        pytest.skip(f"it cannot be made in {word}")
    if needs_ray(word) and name not in IN_RAY:
        pytest.skip("the frames are left out by the same code as in subproc")
    start(notebook, word)
    notebook.run(ENV.format(mode=word), patience=STARTED)
    cell = mistake.cell.format(mode=word)
    began = time.monotonic()
    request = notebook.send(cell)
    reply = notebook.finish(request, STARTED)
    assert time.monotonic() - began < SOON or needs_ray(word)
    # IPython prints exception groups, rather than to send them as the traceback.
    shown = "\n".join(reply.get("traceback", ())) or notebook.printed[request]
    shown = re.sub(r"\x1b\[[0-9;]*m", "", shown)
    assert len(shown.splitlines()) <= mistake.limit, shown
    for part in (f"{mistake.error}: ", mistake.text, mistake.line, cell.splitlines()[-1]):
        assert part in shown
    assert "parallelenv/" not in shown
    assert notebook.evaluate("40 + 2") == 42
    notebook.run("ParallelEnv.close_all()")


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
IPYTHON = ("-m", "IPython", "--colors=NoColor")
PYTEST = ("-m", "pytest", "-p", "no:cacheprovider")
FRONTENDS: dict[str, tuple[tuple[str, ...], str, str]] = {
    "python": (("trying.py",), CALL, ""),
    "ipython": ((*IPYTHON, "trying.py"), CALL, ""),
    "ipython -c": ((*IPYTHON, "-c", "import trying; trying.use()"), "", ""),
    "ipython, verbose": ((*IPYTHON, "--xmode=Verbose", "-c", "import trying; trying.use()"), "", ""),
    "rich": (("trying.py",), f"import rich.traceback\nrich.traceback.install(show_locals=True)\n{CALL}", ""),
    "pytest": ((*PYTEST, "trying.py"), "def test_use():\n    use()\n", ""),
    "pytest, with locals": ((*PYTEST, "--showlocals", "--tb=long", "trying.py"), "def test_use():\n    use()\n", ""),
    "pdb": (("trying.py",), IN_DEBUGGER, "where\nargs\nup\nlist\nup\nquit\n"),
}
"""Arguments of Python, the end of the script, and what is typed."""


def output_of(words: Sequence[str], folder: Path, script: str, typed: str = "", **variables: str) -> str:
    """Run Python in a folder with this script, and return what it prints."""
    (folder / "trying.py").write_text(script)
    # PYTEST_ADDOPTS and similar variables of the running tests are not for the pytest that is started here.
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    done = subprocess.run(
        [sys.executable, *words],
        input=typed,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=60,
        cwd=folder,
        env={**inherited, "IPYTHONDIR": str(folder), "COLUMNS": "120", **variables},
        check=False,
    )
    return done.stdout


@pytest.mark.parametrize("frontend", FRONTENDS)
def test_every_frontend_shows_the_failing_line(tmp_path: Path, frontend: str) -> None:
    if frontend == "rich":
        pytest.importorskip("rich")
    words, ending, typed = FRONTENDS[frontend]
    output = output_of(words, tmp_path, SCRIPT + ending, typed)
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
    script = SCRIPT.replace(repr(PROCESSES), repr(word)) + CALL
    output = output_of(["trying.py"], tmp_path, script, PARALLELENV_FULL_TRACEBACK="1")
    for part in ("failures.py", "host.py", "raise ZeroDivisionError(reason)"):
        assert part in output
