"""Uncaught errors as shown by a real kernel, IPython, Python, rich, pytest and the debugger."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import pytest
from conftest import needs_ray
from kernels import Notebook, open_notebook
from modes import IN_CALLER, MODES, ORACLE, PROCESSES

STARTED = 100.0  # seconds in which Ray has started its processes, even on a busy machine
SOON = 5.0  # seconds until a traceback is there; 2 are promised, but tests share the machine
IN_RAY = ("an env raises in step", "an env raises in its constructor", "a mistyped method", "a worker that dies")
"""Mistakes that are also tried in the Ray modes, where one takes seconds because Ray has to start actors for it."""

REFUSED, RAISED = 20, 35  # lines of a traceback

DEFINITIONS = """
import os, signal, time
from functools import partial
from parallelenv import ParallelEnv
from parallelenv.testing.envs import Counter

GO_ON, FALL, DIE, HANG = range(4)


class Clumsy(Counter):
    def __init__(self, number=0, level=None):
        super().__init__(number)
        if level is not None:
            raise LookupError(f"there is no level {level}")

    def reset(self, *, seed=None, options=None):
        if options is not None:
            raise OSError("the disk is full")
        return super().reset(seed=seed)

    def step(self, action):
        if action == FALL:
            self.fall("the cart fell over")
        if action == DIE:
            os.kill(os.getpid(), signal.SIGKILL)
        if action == HANG:
            time.sleep(20)
        return super().step(action)

    def fall(self, reason):
        raise ZeroDivisionError(reason)

    def differ(self):
        raise ValueError("even") if self.number % 2 == 0 else KeyError("odd")


def make(mode, **options):
    return ParallelEnv([partial(Clumsy, number) for number in range(4)], mode, num_cpus=2, **options)
"""
ENV = "env = make({mode!r})\nstates = env.reset()"


class Mistake(NamedTuple):
    """A cell that fails, and what is shown of its error."""

    cell: str  # with ``{mode!r}`` for the mode
    error: str  # a regular expression, in which a dot also matches a line break
    line: str = ""  # the line of the env, if one has raised
    unlike: tuple[str, ...] = ()  # modes in which the mistake cannot be made


FALLS = "raise ZeroDivisionError(reason)"
MISTAKES = {
    "an env raises in step": Mistake(
        "env.step([GO_ON, FALL, GO_ON, GO_ON])", "ZeroDivisionError: the cart fell over", FALLS
    ),
    "16 envs raise in step": Mistake(
        "many = ParallelEnv([Clumsy] * 16, {mode!r}, num_cpus=2)\nmany.reset()\nmany.step([FALL] * 16)",
        "ZeroDivisionError: .*env 0 and 15 other envs",
        FALLS,
    ),
    "an env raises in reset": Mistake(
        "env.reset(options={{'level': 3}})", "OSError: the disk is full", 'raise OSError("the disk is full")'
    ),
    "an env raises in its constructor": Mistake(
        "ParallelEnv([Clumsy, partial(Clumsy, level=3)], {mode!r}, num_cpus=1)",
        "LookupError: there is no level 3",
        'raise LookupError(f"there is no level {level}")',
    ),
    "envs raise different errors": Mistake(
        "env.customized_method('differ')", "ExceptionGroup: .*KeyError: 'odd'", 'raise ValueError("even")'
    ),
    "a mistyped method": Mistake("env.customized_method('fal')", "AbsentAttributeError: .*fal"),
    "actions of the wrong number": Mistake("env.step([GO_ON] * 3)", "ActionError: .*3"),
    "a missing argument": Mistake("env.step()", "TypeError: .*action"),
    "a vector env that is stepped wrong": Mistake(
        "carts = env.to_gymnasium()\ncarts.reset()\ncarts.step([GO_ON] * 2)", "ActionError: .*2 actions were given"
    ),
    "a step before the first reset": Mistake("make({mode!r}).step([GO_ON] * 4)", "ResetNeededError: .*reset"),
    "a step after close": Mistake("env.close()\nenv.step([GO_ON] * 4)", "ClosedError: .*closed"),
    "a worker that dies": Mistake("env.step([DIE] + [GO_ON] * 3)", "WorkerDiedError: .*is dead", unlike=IN_CALLER),
    "an env that hangs": Mistake(
        "late = make({mode!r}, timeout=0.3)\nlate.reset()\nlate.step([HANG, GO_ON, GO_ON, GO_ON])",
        "WorkerTimeoutError: .*0.3 s",
        unlike=IN_CALLER,  # a call in the caller's own process cannot be given up, and would be waited for
    ),
}


@pytest.fixture(scope="module")
def notebook(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Notebook]:
    with open_notebook(tmp_path_factory.mktemp("notebook"), DEFINITIONS) as notebook:
        # The fork server stays: it is not a leak.
        notebook.run(f"{ENV.format(mode=PROCESSES)}\nenv.close()")
        yield notebook


@pytest.mark.parametrize("name", MISTAKES)
@pytest.mark.parametrize("word", MODES)
def test_kernel_shows_the_mistake_and_runs_the_next_cell(notebook: Notebook, word: str, name: str) -> None:
    mistake = MISTAKES[name]
    if word in mistake.unlike:
        pytest.skip(f"it cannot be made in {word}")
    if needs_ray(word) and name not in IN_RAY:
        pytest.skip("the frames are left out by the same code as in subproc")
    if needs_ray(word):
        pytest.importorskip("ray")
        options = "num_cpus=4, include_dashboard=False, logging_level='ERROR'"
        notebook.run(f"import ray\nray.is_initialized() or ray.init({options}) and None", patience=STARTED)
    notebook.run(ENV.format(mode=word), patience=STARTED)
    cell = mistake.cell.format(mode=word)
    began = time.monotonic()
    request = notebook.send(cell)
    reply = notebook.finish(request, STARTED)
    assert time.monotonic() - began < SOON or needs_ray(word)
    # IPython prints exception groups, rather than to send them as the traceback.
    shown = "\n".join(reply.get("traceback", ())) or notebook.printed[request]
    shown = re.sub(r"\x1b\[[0-9;]*m", "", shown)
    assert len(shown.splitlines()) <= (RAISED if mistake.line else REFUSED), shown
    assert re.search(mistake.error, shown, re.DOTALL)
    assert mistake.line in shown
    assert cell.splitlines()[-1] in shown
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
