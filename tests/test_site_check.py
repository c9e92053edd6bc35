"""The checks of `make docs` on the built pages."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from scripts import load

import parallelenv


@pytest.fixture(scope="module")
def check() -> Any:
    return load("docs/check.py")


def test_resources_loaded_from_other_sites_are_found(
    check: Any, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "a.html").write_text(
        '<script src="https://cdn.example/x.js"></script> <img alt="" src="//b.example/p">'
    )
    assert check.main(tmp_path) == 1
    printed = capsys.readouterr().out
    assert "cdn.example" in printed
    assert "b.example" in printed


def test_links_to_other_sites_are_allowed(check: Any) -> None:
    pages = {Path("/a.html"): '<a href="https://gymnasium.farama.org">it</a> <img src="picture.svg">'}
    assert not check.foreign(pages)
    assert not check.broken(pages)


def test_broken_links_are_found(check: Any, tmp_path: Path) -> None:
    texts = {
        "a.html": '<a href="b.html#here">x</a> <a href="b.html#gone">x</a> <a href="c.html">x</a>',
        "b.html": '<p id="here">',
    }
    pages = {tmp_path / name: text for name, text in texts.items()}
    for path, text in pages.items():
        path.write_text(text)
    assert sorted(problem.rpartition(" ")[2] for problem in check.broken(pages)) == ["b.html#gone", "c.html"]


def test_undocumented_public_names_are_found(check: Any) -> None:
    names = [f"parallelenv.{name}" for name in parallelenv.__all__]
    names += [f"parallelenv.ParallelEnv.{name}" for name in dir(parallelenv.ParallelEnv) if not name.startswith("_")]
    errors = vars(parallelenv.errors).items()
    names += [f"parallelenv.errors.{name}" for name, item in errors if isinstance(item, type)]
    page = "".join(f'<dt id="{name}">' for name in names)
    assert check.missing({Path("all.html"): page}) == []
    assert check.missing({Path("all.html"): page.replace('ParallelEnv.step"', 'ParallelEnv.stop"')}) == [
        "the reference lacks parallelenv.ParallelEnv.step"
    ]
