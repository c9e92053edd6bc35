"""The README's Python blocks run as written, and print what stands below them.

They run in order, in one namespace, in a fresh interpreter: a later block may use what an
earlier one has made, as a reader would who types along. A ``text`` block right after a
``python`` block is what the latter prints.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

README = Path(__file__).parents[1] / "README.md"
_FENCED = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)

_RUNNER = """
import contextlib, io, json, sys

outputs = []
for line, code in json.loads(sys.stdin.read()):
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        # Empty lines before the block: tracebacks then show the README's own line numbers.
        exec(compile("\\n" * line + code, "README.md", "exec"), globals())
    outputs.append(printed.getvalue())
sys.stdout.write(json.dumps(outputs))
"""


@dataclass(frozen=True)
class Block:
    """One fenced Python block: where its code begins, the code, what it is said to print."""

    line: int
    code: str
    printed: str | None


def _blocks(text: str) -> list[Block]:
    found = list(_FENCED.finditer(text))
    blocks = []
    for match, following in zip(found, [*found[1:], None], strict=True):
        if match[1] != "python":
            continue
        adjacent = following is not None and not text[match.end() : following.start()].strip()
        printed = following[2] if following is not None and adjacent and following[1] == "text" else None
        blocks.append(Block(text.count("\n", 0, match.start(2)), match[2], printed))
    return blocks


BLOCKS = _blocks(README.read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def outputs(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """What each block printed."""
    done = subprocess.run(
        [sys.executable, "-c", _RUNNER],
        input=json.dumps([(block.line, block.code) for block in BLOCKS]),
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
        cwd=tmp_path_factory.mktemp("elsewhere"),
    )
    assert done.returncode == 0, done.stderr
    assert not done.stderr, "a block warned, or left something behind"
    printed: list[str] = json.loads(done.stdout)
    return printed


def test_there_are_blocks() -> None:
    assert len(BLOCKS) > 10
    assert sum(block.printed is not None for block in BLOCKS) > 10


@pytest.mark.parametrize("index", range(len(BLOCKS)), ids=[f"line{block.line}" for block in BLOCKS])
def test_a_block_prints_what_the_readme_says(index: int, outputs: list[str]) -> None:
    expected = BLOCKS[index].printed
    if expected is not None:
        assert outputs[index] == expected
