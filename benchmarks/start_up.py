"""Measures start-up: the time of `ParallelEnv(...)` and `reset()` if the envs' package takes long to import.

Three pools are opened one after the other, with every start method, in a script and in a Jupyter kernel. The caller has
already imported the package.

Usage: python -m benchmarks.start_up [--seconds 3.0] [--workers 8] [--pools 3] [--modes forkserver spawn fork dummy]
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

from parallelenv.contract.cpu_cores import usable_cores
from parallelenv.contract.error_text import format_table

# Source of the envs' package. Its import computes for some seconds, and adds a line to a file.
_PACKAGE = """
import pathlib, time
with open(pathlib.Path(__file__).with_name("imports"), "a") as file:
    file.write("imported\\n")
end = time.process_time() + {seconds}
while time.process_time() < end:
    pass
import gymnasium as gym

class Env(gym.Env):
    observation_space = action_space = gym.spaces.Discrete(2)
    def reset(self, *, seed=None, options=None):
        return 0, {{}}
    def step(self, action):
        return 0, 0.0, False, False, {{}}
"""
_SCRIPT = """
import json, sys, time
sys.path.insert(0, {folder!r})
from slow_package import Env
from parallelenv import ParallelEnv
times = []
for _ in range({pools}):
    begin = time.perf_counter()
    with ParallelEnv([Env] * {workers}, {mode!r}, num_cpus={workers}, **{options!r}) as env:
        env.reset()
        times.append(time.perf_counter() - begin)
print(json.dumps(times))
"""


def _in_script(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout


def _in_kernel(code: str) -> str:
    from jupyter_client.manager import start_new_kernel

    manager, client = start_new_kernel()
    output: list[str] = []
    try:
        reply = client.execute_interactive(code, output_hook=lambda one: output.append(one["content"].get("text", "")))
        if reply["content"]["status"] != "ok":
            raise RuntimeError("\n".join(reply["content"]["traceback"]))
    finally:
        client.stop_channels()
        manager.shutdown_kernel()
    return "".join(output)


def _measure(mode: str, place: str, options: argparse.Namespace) -> list[str]:
    """Return a row of the table."""
    with tempfile.TemporaryDirectory() as folder:
        package = Path(folder, "slow_package")
        package.mkdir()
        (package / "__init__.py").write_text(_PACKAGE.format(seconds=options.seconds))
        is_method = mode in ("forkserver", "spawn", "fork")
        code = _SCRIPT.format(
            folder=folder,
            pools=options.pools,
            workers=options.workers,
            mode="subproc" if is_method else mode,
            options={"start_method": mode} if is_method else {},
        )
        times = json.loads((_in_kernel if place == "Jupyter" else _in_script)(code))
        imports = len((package / "imports").read_text().splitlines()) - 1  # without the caller's import
    return [mode, place, *(f"{seconds:.2f}" for seconds in times), str(imports)]


def main() -> None:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=3.0, help="seconds of computing to import the package")
    parser.add_argument("--workers", type=int, default=8)
    parser.add_argument("--pools", type=int, default=3)
    parser.add_argument("--modes", nargs="+", default=["forkserver", "spawn", "fork", "dummy"], help="also: thread ray")
    options = parser.parse_args()
    rows = [_measure(mode, place, options) for mode in options.modes for place in ("script", "Jupyter")]
    header = ["start method", "in", *(f"pool {number} s" for number in range(1, options.pools + 1)), "imports"]
    print(
        f"{usable_cores()} usable cores, {options.workers} workers; importing takes {options.seconds:g} s of computing"
    )
    print(format_table(header, rows, left=("start method", "in")))


if __name__ == "__main__":
    main()
