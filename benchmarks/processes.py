"""Processes of the systems: started, asked, and ended whatever happens."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import uuid
from multiprocessing import Pipe
from pathlib import Path
from typing import Any

import psutil

ROOT = Path(__file__).resolve().parent.parent
_TOKEN = "PARALLELENV_BENCHMARK"  # set in the environment of a child, inherited by all that it starts
_QUIET = {"PYTHONWARNINGS": "ignore", "RAY_DEDUP_LOGS": "0", "TF_CPP_MIN_LOG_LEVEL": "3"}
_IMPORT_TIMEOUT = 120
_FAREWELL = 5  # seconds for a child to leave by itself


class SystemFailedError(Exception):
    """A system gave no numbers. The message is the reason, in one line."""


class Child:
    """The process of one system, which lives for many cases.

    Args:
        system: Its name.
    """

    def __init__(self, system: str) -> None:
        self._token = uuid.uuid4().hex
        self._output = tempfile.TemporaryFile()  # noqa: SIM115 (closed in `end`)
        self._folder = tempfile.TemporaryDirectory()  # where it runs: MuJoCo writes a log into the current folder
        self._pipe, theirs = Pipe()
        # A session of its own: Ctrl-C reaches the runner alone, which then ends everybody.
        self._process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.child", system, str(theirs.fileno())],
            cwd=self._folder.name,
            env={**os.environ, **_QUIET, "PYTHONPATH": _python_path(), _TOKEN: self._token},
            stdin=subprocess.DEVNULL,
            stdout=self._output,
            stderr=subprocess.STDOUT,
            pass_fds=[theirs.fileno()],
            start_new_session=True,
        )
        theirs.close()

    def start(self) -> None:
        """Wait until its packages are imported.

        Raises:
            SystemFailedError: If they cannot be.
        """
        self._receive(_IMPORT_TIMEOUT)

    def measure(self, case: str, seconds: float, timeout: float) -> dict[str, float]:
        """Let it measure one round of a case.

        Args:
            case: Its name.
            seconds: For which to time.
            timeout: Seconds after which it is held to hang.

        Raises:
            SystemFailedError: If it did not.
        """
        self._pipe.send((case, seconds))
        numbers: dict[str, float] = self._receive(timeout)
        return numbers

    def _receive(self, timeout: float) -> Any:
        try:
            if not self._pipe.poll(timeout):
                raise SystemFailedError(f"no answer within {timeout:.0f} s: it hangs")
            numbers, failure = self._pipe.recv()
        except (EOFError, OSError):
            raise SystemFailedError(f"its process died ({self._exit()}): {self._last_words()}") from None
        if failure is not None:
            raise SystemFailedError(failure)
        return numbers

    def _exit(self) -> str:
        try:
            return f"exit code {self._process.wait(_FAREWELL)}"
        except subprocess.TimeoutExpired:
            return "it has no exit code yet"

    def _last_words(self) -> str:
        self._output.seek(0)
        lines = self._output.read().decode(errors="replace").split("\n")
        return next((line.strip()[:200] for line in reversed(lines) if line.strip()), "it said nothing")

    def end(self, patiently: bool = True) -> None:
        """End it and everything it started.

        Args:
            patiently: Whether it may leave by itself first.
        """
        self._pipe.close()
        if patiently:
            self._exit()
        self._process.kill()
        self._process.wait()
        _kill_marked(self._token)
        self._output.close()
        self._folder.cleanup()


def _kill_marked(token: str) -> None:
    """Kill what carries the token of a child: also what left its session, or outlived its parent."""
    marked = [process for process in psutil.process_iter() if _has(process, token)]
    for process in marked:
        process.kill()  # psutil makes sure that the id was not given to another process meanwhile
    psutil.wait_procs(marked, timeout=_FAREWELL)


def _has(process: psutil.Process, token: str) -> bool:
    try:
        return process.environ().get(_TOKEN) == token
    except psutil.Error:  # gone, or not ours
        return False


def _python_path() -> str:
    """Return a search path with the checkout in it: the child and workers that are spawned find `benchmarks` there."""
    return os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
