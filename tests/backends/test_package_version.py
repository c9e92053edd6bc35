"""Workers import the caller's copy of this package, or raise."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import MakeEnv
from scripts import environment

import parallelenv
from parallelenv.errors import WorkerStartError
from parallelenv.testing.envs import Counter

HERE = Path(parallelenv.__file__).resolve().parent

SCRIPT = """
import sys
{first}
sys.path.insert(0, sys.argv[1])
import parallelenv
import gymnasium as gym

class Where(gym.Env):
    observation_space = action_space = gym.spaces.Discrete(2)
    def file(self):
        import parallelenv
        return parallelenv.__file__

with parallelenv.ParallelEnv([Where], "subproc", start_method=sys.argv[2]) as env:
    files = {{parallelenv.__file__, *env.customized_method("file")}}
    print(*files)
import os
print(os.environ["PYTHONPATH"] == sys.argv[3])
"""
USE_SERVER = """
from multiprocessing import forkserver
forkserver.set_forkserver_preload(["this"])
import atexit
atexit.register(lambda: print(forkserver._forkserver._preload_modules))
"""
FOUND = os.pathsep.join([str(HERE.parent), *filter(None, sys.path)])


def run_copy(copy: Path, method: str, first: str = "", *, preferred: Path, cwd: str = "/") -> tuple[str, str]:
    """Run a script next to another copy of this package, with a preferred folder of modules; return its outputs."""
    shutil.copytree(HERE, copy / "parallelenv", ignore=shutil.ignore_patterns("__pycache__"))
    script = copy.parent / "script.py"
    script.write_text(SCRIPT.format(first=first))
    command = [sys.executable, str(script), str(preferred), method, FOUND]
    own = environment(PYTHONPATH=FOUND)
    ended = subprocess.run(command, cwd=cwd, env=own, capture_output=True, text=True, timeout=50, check=False)
    return ended.stdout, ended.stderr


@pytest.mark.parametrize("method", ["forkserver", "spawn", "fork"])
def test_workers_import_the_callers_copy_of_the_package_and_leave_the_users_fork_server_alone(
    method: str, tmp_path: Path
) -> None:
    out, err = run_copy(tmp_path / "copy", method, USE_SERVER, preferred=tmp_path / "copy")
    assert err == ""
    assert out.split() == [str(tmp_path / "copy" / "parallelenv" / "__init__.py"), "True", "['this']"]


def test_workers_with_another_copy_are_refused(tmp_path: Path) -> None:
    first = "import parallelenv"  # before the copy comes first
    _, err = run_copy(tmp_path / "copy", "spawn", first, preferred=tmp_path / "copy")
    assert "WorkerStartError: A worker runs a different copy of parallelenv from the caller" in err
    assert f"in {tmp_path / 'copy' / 'parallelenv'}, not {parallelenv.__version__} in {HERE}" in err
    assert f"PYTHONPATH={HERE.parent} before" in err


@pytest.mark.parametrize("mode", ["ray"], indirect=True)
def test_actors_need_the_same_version(make_env: MakeEnv, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parallelenv, "__version__", "0.0.1")
    with pytest.raises(WorkerStartError, match="but the caller has 0.0.1. Install the same version on all machines"):
        make_env([Counter])


def test_copy_in_the_current_directory_is_not_imported(tmp_path: Path) -> None:
    out, err = run_copy(tmp_path / "copy", "forkserver", preferred=tmp_path, cwd=str(tmp_path / "copy"))
    assert err == ""
    assert out.split() == [str(HERE / "__init__.py"), "True"]
