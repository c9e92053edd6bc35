"""The check of words finds them in prose, and only there."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from scripts import load

prose = load("docs/prose.py")
RULES = [(re.compile(r"\bgizmo\b|\bodd phrase\b"), "name it", ["gizmo's fault"])]


@pytest.mark.parametrize(
    ("name", "text", "lines"),
    [
        ("page.md", "Nothing.\n\nIt is gizmo's fault.\nAn odd\nphrase.\n", [4]),
        ("page.md", "```python\ngizmo = 1\n```\n`gizmo` is code. So is this\ngizmo.\n", [5]),
        ("module.py", "x = 1  # gizmo\n\n# an odd\n# phrase\ny = 'gizmo'\n", [1, 3]),
        ("module.py", '"""A text.\n\nOf gizmo, and ``gizmo``."""\ngizmo = f"{1} gizmo"\n', [3, 4]),
        ("test_it.py", "import x\n\n\ndef test_gizmo_is_there():\n    pass\n", [4]),
        ("settings.toml", 'gizmo = 1\nname = "x" # gizmo\n', [2]),
        ("cells.ipynb", json.dumps({"cells": [{"cell_type": "markdown", "source": ["One\n", "gizmo"]}]}), [2]),
        ("code.ipynb", json.dumps({"cells": [{"cell_type": "code", "source": ["# gizmo"]}]}), []),
    ],
)
def test_words_are_found_in_prose_with_their_line(name: str, text: str, lines: list[int], tmp_path: Path) -> None:
    path = tmp_path / name
    path.write_text(text)
    found: list[Any] = list(prose.findings(path, RULES))
    assert [int(finding.removeprefix(f"{path}:").split(":")[0]) for finding in found] == lines
