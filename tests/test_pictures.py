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


def test_every_picture_of_a_page_exists_and_every_picture_is_used() -> None:
    pages = [REPOSITORY / "README.md", *DOCS.rglob("*.md")]
    text = "".join(page.read_text(encoding="utf-8") for page in pages)
    names = {path.name for path in (DOCS / "img").iterdir()}
    assert set(re.findall(r"\]\(img/(.*?)\)", text)) <= names
    assert [name for name in names if f"img/{name}" not in text] == []
