"""The pictures of the documentation equal the output of ``docs/pictures.py``."""

from __future__ import annotations

import re
from typing import Any

import pytest
from scripts import REPOSITORY, load

DOCS = REPOSITORY / "docs"


@pytest.fixture(scope="module")
def pictures() -> Any:
    return load("docs/pictures.py")


def test_stored_pictures_are_up_to_date(pictures: Any) -> None:
    drawn = pictures.draw()
    assert {path.name for path in (DOCS / "img").glob("*.svg")} == set(drawn)
    for name, picture in drawn.items():
        assert (DOCS / "img" / name).read_text(encoding="utf-8") == picture, f"{name}: python docs/pictures.py"


def test_every_colour_has_one_for_dark_pages(pictures: Any) -> None:
    drawn = "".join(pictures.draw().values())
    assert set(re.findall(r'(?:fill|stroke)="(.*?)"', drawn)) == set(pictures.IN_THE_DARK)


def test_every_picture_of_a_page_exists() -> None:
    for page in DOCS.rglob("*.md"):
        for part in page.read_text(encoding="utf-8").split("](img/")[1:]:
            assert (DOCS / "img" / part.partition(")")[0]).exists(), page.name


def test_every_picture_is_used() -> None:
    pages = [DOCS.parent / "README.md", *DOCS.rglob("*.md")]
    text = "".join(page.read_text(encoding="utf-8") for page in pages)
    assert [path.name for path in (DOCS / "img").iterdir() if f"img/{path.name}" not in text] == []


def test_pictures_of_done_policies_show_real_results(pictures: Any) -> None:
    assert [state for _, state in pictures.played("restart")[0]] == ["1", "0"] * 4 + ["1"]
    assert [kind for kind, _ in pictures.played("idle")[1]] == ["stepped"] * 3 + ["ended"] + ["rests"] * 5
    assert [kind for kind, _ in pictures.played(None)[2]] == ["stepped"] * 2 + ["rests"] * 7
    assert [kind for kind, _ in pictures.played("continue")[0]] == ["stepped", "ended"] + ["past"] * 7
