"""Public names of the package, and the page of the reference that groups them."""

from __future__ import annotations

import re
from pathlib import Path

import parallelenv
from parallelenv import ParallelEnv

PAGE = Path(__file__).parents[1] / "docs/api/parallel_env.md"


def test_dir_lists_only_public_names() -> None:
    offered = dir(parallelenv)
    assert set(parallelenv.__all__) <= set(offered)
    assert set(offered) - set(parallelenv.__all__) == {"__version__", "errors", "wrappers"}
    assert all(hasattr(parallelenv, name) for name in offered)


def test_reference_lists_each_public_method_in_one_group() -> None:
    listed = re.findall(r"^\.\. auto(?:method|property):: parallelenv\.ParallelEnv\.(\w+)$", PAGE.read_text(), re.M)
    assert sorted(listed) == sorted(name for name in dir(ParallelEnv) if not name.startswith("_"))


def test_each_group_of_the_reference_names_where_to_begin() -> None:
    groups = PAGE.read_text().split("\n## ")[1:-1]  # the last one is about names outside the class
    assert len(groups) == 9
    assert all("**Begin with**" in group for group in groups)
