"""What a newcomer is offered: names behind a dot, and the page that groups them."""

from __future__ import annotations

import re
from pathlib import Path

import parallelenv
from parallelenv import ParallelEnv

PAGE = Path(__file__).parents[1] / "docs/api/parallel_env.md"


def test_only_public_names_are_offered() -> None:
    offered = dir(parallelenv)
    assert set(parallelenv.__all__) <= set(offered)
    assert set(offered) - set(parallelenv.__all__) == {"__version__", "errors", "wrappers"}
    assert all(hasattr(parallelenv, name) for name in offered)


def test_the_reference_has_each_public_name_in_one_group() -> None:
    listed = re.findall(r"^\.\. auto(?:method|property):: parallelenv\.ParallelEnv\.(\w+)$", PAGE.read_text(), re.M)
    assert sorted(listed) == sorted(name for name in dir(ParallelEnv) if not name.startswith("_"))


def test_the_reference_says_of_each_group_where_to_begin() -> None:
    groups = PAGE.read_text().split("\n## ")[1:-1]  # the last one is of what stands beside the class
    assert len(groups) == 9
    assert all("**Begin with**" in group for group in groups)
