"""Looks for words that this project does not use in its texts: ``python docs/prose.py``. The words are in prose.toml.

Texts are Markdown files and Markdown cells of notebooks, without code, and the comments, strings and names of tests in
Python files. A general prose linter has no rules for these words, and rules for it would be as long as this module.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tokenize
import tomllib
from collections.abc import Iterator, Sequence
from pathlib import Path

_HERE = Path(__file__)
_CODE = re.compile(r"^( *)(```|~~~).*?^\1\2$|``[^`]+``|`[^`]+`", re.MULTILINE | re.DOTALL)
_TEST = re.compile(r"^ *(?:async )?def (test_\w+)", re.MULTILINE)
_KINDS = (".md", ".py", ".ipynb", ".toml", "")  # the empty suffix is that of Makefile and .ci/run
_COMMENT = re.compile(r"(?:^|\s)# .*", re.MULTILINE)

Text = tuple[int, str]
"""The number of the line in which a text starts, and the text."""
Rule = tuple[re.Pattern[str], str, Sequence[str]]
"""A pattern that finds the words, what to write instead, and phrases in which the words are allowed."""


def _blank(match: re.Match[str]) -> str:
    """Return a replacement for code that has as many lines as the code."""
    return "`" + "\n" * match[0].count("\n")


def markdown(text: str) -> Iterator[Text]:
    """Yield the prose of a Markdown text."""
    yield 1, _CODE.sub(_blank, text)


def notebook(text: str) -> Iterator[Text]:
    """Yield the prose of a notebook. Lines are counted from the start of each cell."""
    for cell in json.loads(text)["cells"]:
        if cell["cell_type"] == "markdown":
            yield from markdown("".join(cell["source"]))


def python(path: Path) -> Iterator[Text]:
    """Yield comments, strings that have spaces, and names of tests as words. Consecutive comments are one text."""
    comment: list[str] = []
    first = 0  # line in which the comment starts
    with path.open("rb") as file:
        tokens = list(tokenize.tokenize(file.readline))
    for token in tokens:
        if token.type == tokenize.COMMENT:
            first = first if comment else token.start[0]
            comment.append(token.string.lstrip("#: "))
            continue
        if token.type == tokenize.NL:
            continue
        if comment:
            yield first, _CODE.sub(_blank, "\n".join(comment))
            comment = []
        if token.type == tokenize.STRING and " " in token.string:
            yield token.start[0], _CODE.sub(_blank, token.string)
    for match in _TEST.finditer(path.read_text()):
        yield path.read_text()[: match.start()].count("\n") + 1, match[1].replace("_", " ")


def texts(path: Path) -> Iterator[Text]:
    """Yield the texts of a file."""
    if path.suffix == ".md":
        yield from markdown(path.read_text())
    elif path.suffix == ".ipynb":
        yield from notebook(path.read_text())
    elif path.suffix == ".py":
        yield from python(path)
    else:
        for number, line in enumerate(path.read_text().splitlines(), 1):
            yield from ((number, found) for found in _COMMENT.findall(line))


def flattened(first: int, text: str) -> tuple[str, list[int]]:
    """Return a text with single spaces, and the line of each of its characters."""
    flat, lines = "", []
    for number, line in enumerate(text.splitlines(), first):
        words = " ".join(line.split()) + " "
        flat += words
        lines += [number] * len(words)
    return flat, lines


def findings(path: Path, rules: Sequence[Rule]) -> Iterator[str]:
    """Yield a message for each occurrence of the words in a file: where it is, and what to write instead."""
    for first, text in texts(path):
        flat, lines = flattened(first, text)
        for pattern, instead, allowed in rules:
            for match in pattern.finditer(flat):
                begin, end = match.span()
                if not any(phrase in flat[max(0, end - len(phrase)) : begin + len(phrase)] for phrase in allowed):
                    around = flat[max(0, begin - 50) : end + 50].strip()
                    yield f"{path}:{lines[begin]}: {match[0]!r}; write: {instead}\n    {around}\n"


def main() -> int:
    """Print what was found; return the exit code."""
    settings = tomllib.loads(_HERE.with_suffix(".toml").read_text())
    rules = [(re.compile(rule["words"]), rule["instead"], rule.get("allow", ())) for rule in settings["rule"]]
    listed = subprocess.run(["git", "ls-files", "-z", "-co", "--exclude-standard"], capture_output=True, check=True)
    names = set(listed.stdout.decode().split("\0")).difference(settings["not_read"])
    paths = (path for path in map(Path, sorted(names)) if path.is_file() and path.suffix in _KINDS)
    found = [finding for path in paths for finding in findings(path, rules)]
    sys.stdout.write("".join(found) + f"prose: {len(found)} phrases to rewrite, or to allow in docs/prose.toml\n")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
