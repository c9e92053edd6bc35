"""The check of words finds them in prose, and only there."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from scripts import load

prose = load("docs/prose.py")
RULES = [(re.compile(r"\bnobody\b|\bgoes round\b"), "name it", ["nobody's fault"])]


@pytest.mark.parametrize(
    ("name", "text", "lines"),
    [
        ("page.md", "Nothing.\n\nIt is nobody's fault.\nIt goes\nround.\n", [4]),
        ("page.md", "```python\nnobody = 1\n```\n`nobody` is code. So is this\nnobody.\n", [5]),
        ("module.py", "x = 1  # nobody\n\n# it goes\n# round\ny = 'nobody'\n", [1, 3]),
        ("module.py", '"""A text.\n\nOf nobody, and ``nobody``."""\nnobody = f"{1} nobody"\n', [3, 4]),
        ("test_it.py", "import x\n\n\ndef test_nobody_is_there():\n    pass\n", [4]),
        ("settings.toml", 'nobody = 1\nname = "x" # nobody\n', [2]),
        ("cells.ipynb", json.dumps({"cells": [{"cell_type": "markdown", "source": ["One\n", "nobody"]}]}), [2]),
        ("code.ipynb", json.dumps({"cells": [{"cell_type": "code", "source": ["# nobody"]}]}), []),
    ],
)
def test_words_are_found_in_prose_with_their_line(name: str, text: str, lines: list[int], tmp_path: Path) -> None:
    path = tmp_path / name
    path.write_text(text)
    found: list[Any] = list(prose.findings(path, RULES))
    assert [int(finding.removeprefix(f"{path}:").split(":")[0]) for finding in found] == lines
