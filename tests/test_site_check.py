"""The checks of `make docs` on the built pages."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from scripts import load

PAGE = """
<script src="https://cdn.example/x.js"></script> <img alt="" src="//b.example/p"> <img src="picture.svg">
<a href="b.html#here">x</a> <a href="b.html#gone">x</a> <a href="c.html">x</a> <a href="https://gymnasium.farama.org">x</a>
"""


def test_each_problem_of_the_pages_is_found(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    check = load("docs/check.py")
    names = [problem.removeprefix("the reference lacks ") for problem in check.missing({})]
    assert {"parallelenv.recommend", "parallelenv.ParallelEnv.reset", "parallelenv.errors.ActionError"} <= set(names)
    names.remove("parallelenv.ParallelEnv.step")
    (tmp_path / "a.html").write_text(PAGE)
    (tmp_path / "b.html").write_text("".join(f'<p id="{name}">' for name in ["here", *names]))
    assert check.main(tmp_path) == 1
    *problems, _ = capsys.readouterr().out.splitlines()
    endings = {"https://cdn.example/x.js", "//b.example/p", "parallelenv.ParallelEnv.step", "b.html#gone", "c.html"}
    assert {re.split('[ "]', problem)[-1] for problem in problems} == endings
