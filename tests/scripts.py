"""Scripts that are run by an interpreter of their own."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).parents[1]


def load(path: str) -> Any:
    """Import a file of the repository that belongs to no package."""
    spec = importlib.util.spec_from_file_location(Path(path).stem, REPOSITORY / path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def environment(**more: str) -> dict[str, str]:
    """Return environment variables with which a script finds the modules of this process but does not join its Ray."""
    own = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    return {**own, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), **more}


def start(script: str, *arguments: str, **options: Any) -> subprocess.Popen[str]:
    """Start a script, and give its outputs as pipes of text."""
    command: Sequence[str] = [sys.executable, "-c", script, *arguments]
    options = {"env": environment(), "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, **options}
    return subprocess.Popen(command, **options)


def run(script: str, *arguments: str, timeout: float = 60.0, **options: Any) -> tuple[str, str, int]:
    """Run a script; return what it has written to standard output and error, and its exit status."""
    with start(script, *arguments, **options) as process:
        try:
            return *process.communicate(timeout=timeout), process.returncode
        except subprocess.TimeoutExpired:
            process.kill()
            raise
