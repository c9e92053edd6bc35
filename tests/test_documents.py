"""The Python blocks of the README and of every page run as written, and print the output shown below them.

The blocks of one page run in order, in one namespace, in a fresh interpreter: a later block may use the
variables of an earlier one, as for a reader who types along. A ``text`` block right after a
``python`` block is the output of the latter. README and quickstart need nothing beyond ``pip install .``.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
PLAIN = ("README.md", "docs/quickstart.md")
"""The pages for readers who have installed only the package."""
OPTIONAL = ("Box2D", "IPython", "imageio_ffmpeg", "matplotlib", "pygame", "tensorboardX", "torch", "zstandard")
"""Modules that the tests may have, but that ``pip install .`` does not install."""
_BLOCK = re.compile(r"^```python\n(.*?)^```$(?:\s*^```text\n(.*?)^```$)?", re.MULTILINE | re.DOTALL)

_RUNNER = """
import contextlib, io, json, sys

outputs = []
name, blocks = json.loads(sys.stdin.read())
for line, code in blocks:
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        # Empty lines before the block: tracebacks then show the page's own line numbers.
        exec(compile("\\n" * line + code, name, "exec"), globals())
    outputs.append(printed.getvalue())
sys.stdout.write(json.dumps(outputs))
"""


def _blocks(text: str) -> list[tuple[int, str, str | None]]:
    """Return the line, the code and the documented output of each Python block."""
    return [(text.count("\n", 0, match.start(1)), match[1], match[2]) for match in _BLOCK.finditer(text)]


BLOCKS = {path.relative_to(ROOT).as_posix(): _blocks(path.read_text(encoding="utf-8")) for path in PAGES}
WITH_CODE = [name for name, blocks in BLOCKS.items() if blocks]


def test_documents_have_code_blocks() -> None:
    assert len(BLOCKS["README.md"]) > 3
    pages = ["quickstart", "making-envs", "stepping", "policies", "async-stepping", "errors-and-recovery", "backends"]
    assert {"README.md", *(f"docs/{page}.md" for page in pages)} <= {*WITH_CODE}
    for name in WITH_CODE:
        assert any(printed is not None for *_, printed in BLOCKS[name]), name


def _without_optional(folder: Path) -> dict[str, str]:
    """Return an environment in which optional modules cannot be imported, also in worker processes."""
    folder.mkdir()
    for name in OPTIONAL:
        (folder / f"{name}.py").write_text(f"raise ModuleNotFoundError('No module named {name}', name='{name}')\n")
    return {**os.environ, "PYTHONPATH": os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")])}


@pytest.mark.parametrize("name", WITH_CODE)
def test_code_blocks_print_the_documented_output(name: str, tmp_path: Path) -> None:
    environment = _without_optional(tmp_path / "absent") if name in PLAIN else None
    script = json.dumps((name, [(line, code) for line, code, _ in BLOCKS[name]]))
    done = subprocess.run(
        [sys.executable, "-c", _RUNNER],
        input=script,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
        cwd=tmp_path,
        env=environment,
    )
    assert done.returncode == 0, done.stderr
    assert not done.stderr, "a block warned, or left something behind"
    for (line, _, expected), printed in zip(BLOCKS[name], json.loads(done.stdout), strict=True):
        if expected is not None:
            assert printed == expected, f"{name}, line {line}"
