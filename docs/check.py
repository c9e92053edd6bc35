"""Checks the built pages: ``python docs/check.py build/docs``.

Pages must load nothing from other sites, the reference must have every public name, and links within the site must
work.
"""

from __future__ import annotations

import re
import sys
from html import unescape
from pathlib import Path
from urllib.parse import unquote

import parallelenv
import parallelenv.errors
import parallelenv.wrappers

_LOADED = re.compile(r"""<(?:script|img|link|iframe|source)\b[^>]*?\b(?:src|href)=["'](?:https?:)?//[^"']*""")
_LINKED = re.compile(r"""<a\b[^>]*?\bhref=["']([^"']+)["']""")
_IDENTIFIED = re.compile(r"""\bid=["']([^"']+)["']""")
_FOREIGN = re.compile(r"[a-z]+:")


def foreign(pages: dict[Path, str]) -> list[str]:
    """Return a message for everything that a page would load from a different site."""
    return [f"{path}: loads {found}" for path, text in pages.items() for found in _LOADED.findall(text)]


def missing(pages: dict[Path, str]) -> list[str]:
    """Return a message for every public name that the reference lacks."""
    known = {name for text in pages.values() for name in _IDENTIFIED.findall(text)}
    errors = [name for name, item in vars(parallelenv.errors).items() if isinstance(item, type)]
    names = [f"parallelenv.{name}" for name in parallelenv.__all__]
    names += [f"parallelenv.errors.{name}" for name in errors if name != "ParallelEnvError"]
    names += [f"parallelenv.ParallelEnv.{name}" for name in dir(parallelenv.ParallelEnv) if not name.startswith("_")]
    return [f"the reference lacks {name}" for name in names if name not in known | _elsewhere(known)]


def _elsewhere(known: set[str]) -> set[str]:
    """Return ``parallelenv.NAME`` for each object that is documented as ``parallelenv.MODULE.NAME``."""
    return {f"parallelenv.{name.rpartition('.')[2]}" for name in known if name.startswith("parallelenv.")}


def broken(pages: dict[Path, str]) -> list[str]:
    """Return a message for every link within the site whose target does not exist."""
    found = []
    for path, text in pages.items():
        for link in {unescape(link) for link in _LINKED.findall(text)}:
            target, _, anchor = link.partition("#")
            if _FOREIGN.match(target):
                continue
            there = (path.parent / unquote(target)).resolve() if target else path.resolve()
            known = pages.get(there, "") if there.suffix == ".html" else None
            if not there.exists() or (anchor and known is not None and f'id="{unquote(anchor)}"' not in known):
                found.append(f"{path}: links to {link}")
    return found


def main(folder: Path) -> int:
    """Print all problems; return the exit code."""
    pages = {path.resolve(): path.read_text(encoding="utf-8") for path in folder.rglob("*.html")}
    problems = [*foreign(pages), *missing(pages), *broken(pages)]
    sys.stdout.write("".join(f"{problem}\n" for problem in problems))
    sys.stdout.write(f"docs: {len(pages)} pages, {len(problems)} problems\n")
    return 1 if problems or not pages else 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
