"""A separate interpreter that uses a `ParallelEnv`, to be killed, interrupted or starved."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil
from holdings import shared_memory

_PATIENCE = 60.0
"""Seconds for slow operations: Ray's start."""


class Caller:
    """Runs a program of `faults.programs`, which reports in lines of JSON."""

    def __init__(self, prefix: Sequence[str], words: Sequence[str], folder: Path) -> None:
        self.folder = folder
        self._shared = shared_memory()
        self._errors = (folder / "stderr").open("w+")
        self.process = subprocess.Popen(
            [*prefix, sys.executable, "-m", "faults.programs", *words],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            start_new_session=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        )

    def read(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith("{"):
                facts: dict[str, Any] = json.loads(line)
                return facts
        raise AssertionError(f"the program ended early:\n{self.errors()}")

    def await_file(self, name: str) -> None:
        deadline = time.monotonic() + _PATIENCE
        while not (self.folder / name).exists():
            assert self.process.poll() is None, f"the program ended early:\n{self.errors()}"
            assert time.monotonic() < deadline, f"no {name}"
            time.sleep(0.002)

    def interrupt(self) -> float:
        """Send SIGINT as a terminal does at Ctrl-C; return the time."""
        moment = time.monotonic()
        os.killpg(self.process.pid, signal.SIGINT)
        return moment

    def kill(self) -> float:
        """Kill only this process; return the time."""
        moment = time.monotonic()
        self.process.kill()
        self.process.wait()
        return moment

    def finish(self, *, is_quiet: bool = True) -> None:
        """Wait for its end; check that it succeeds, prints nothing and leaks nothing."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        assert self.process.wait(_PATIENCE) == 0, self.errors()
        assert self.errors() == "" or not is_quiet
        self.check_nothing_left()

    def check_nothing_left(self, *, with_processes: bool = True) -> None:
        """Check that no shared memory has a name, and that no process of its session is alive after 2 s."""
        assert shared_memory() <= self._shared
        deadline = time.monotonic() + 2.0
        while with_processes and (left := self.members()):
            assert time.monotonic() < deadline, f"{left} live on"
            time.sleep(0.01)

    def members(self) -> list[psutil.Process]:
        """Return the living processes of its session."""
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.NoSuchProcess, ProcessLookupError):
                if process.status() != psutil.STATUS_ZOMBIE and os.getsid(process.pid) == self.process.pid:
                    found.append(process)
        return found

    def errors(self) -> str:
        self._errors.seek(0)
        return self._errors.read()

    def end(self) -> None:
        for process in self.members():
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        self.process.wait()
        for stream in (self.process.stdin, self.process.stdout, self._errors):
            if stream is not None:
                stream.close()
