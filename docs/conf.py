"""Configuration of Sphinx for ``make docs``. Neither the build nor the pages fetch anything from a network."""

from __future__ import annotations

import os
import posixpath
import re
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sphinx.application import Sphinx

sys.path.insert(0, os.path.abspath(".."))

from sphinx.util.nodes import make_refnode

import parallelenv

project = "parallelenv"
author = "ParallelEnv contributors"
copyright = author
version = release = parallelenv.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx_copybutton"]
exclude_patterns = ["examples"]
html_theme = "furo"
html_title = f"parallelenv {version}"
html_logo = html_favicon = "logo.svg"
html_static_path, html_css_files = ["static"], ["site.css"]
html_theme_options = {"sidebar_hide_name": False}
_repository = os.environ.get("READTHEDOCS_GIT_CLONE_URL", "").removesuffix(".git")
if _repository.startswith("https://"):  # each page then has a link for editing its source
    html_theme_options |= {"source_repository": _repository, "source_branch": "main", "source_directory": "docs/"}
html_copy_source = False
copybutton_selector = "div:not(.highlight-text) > div.highlight pre"  # no copy button on output
copybutton_prompt_text = "$ "

myst_heading_anchors = 4  # links may point to headings
myst_enable_extensions = ["colon_fence"]
default_role = "py:obj"  # `step` in a docstring is a link if there is an object of that name, else plain text
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
python_use_unqualified_type_names = True
python_maximum_signature_line_length = 88
napoleon_numpy_docstring = False
napoleon_use_rtype = False
napoleon_use_ivar = True  # otherwise the fields of a NamedTuple appear twice
toc_object_entries_show_parents = "hide"

# Links to these files of the repository become links to pages of the site; links to other files become plain text.
_PAGES = {
    "README.md": "index.md",
    "CHANGELOG.md": "changelog.md",
    "SECURITY.md": "security.md",
    "benchmarks/RESULTS.md": "results.md",
    "notebooks/01_quickstart.ipynb": "notebooks.md",
    "parallelenv/contract/protocol.py": "api/protocol.md",
}
_CODE = re.compile(r"(^```.*?^```$)", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"(?<!!)\[([^\]]*)\]\(([^)#\s]*)(#[^)\s]*)?\)")


def _as_on_the_site(text: str, path: str) -> str:
    """Convert the links of a file of the repository, outside code, into links between pages."""

    def link(match: re.Match[str]) -> str:
        words, target, anchor = match[1], match[2], match[3] or ""
        if "://" in target or not target:
            return match[0]
        there = posixpath.normpath(posixpath.join(posixpath.dirname(path), target))
        if there in _PAGES:
            return f"[{words}]({_PAGES[there]}{anchor})"
        return f"[{words}]({there.removeprefix('docs/')}{anchor})" if there.startswith("docs/") else words

    parts = _CODE.split(text)
    return "".join(part if part.startswith("```") else _LINK.sub(link, part) for part in parts)


def _read(app: Sphinx, docname: str, text: list[str]) -> None:
    if "/" not in docname:  # the reference has no such links
        text[0] = _as_on_the_site(text[0], f"docs/{docname}.md")


def _read_included(app: Sphinx, path: Any, docname: str, text: list[str]) -> None:
    text[0] = _as_on_the_site(text[0], posixpath.normpath(posixpath.join("docs", path.as_posix())))


def _find(app: Sphinx, env: Any, node: Any, words: Any) -> Any:
    """Link a bare name in a docstring to the one class or function of that name, wherever it is documented."""
    if node.get("refdomain") != "py":
        return None
    kinds = ("class", "exception", "function")
    objects = env.get_domain("py").objects.items()
    found = [item for name, item in objects if name.rpartition(".")[2] == node["reftarget"] and item.objtype in kinds]
    if len(found) != 1:
        return None
    return make_refnode(app.builder, node["refdoc"], found[0].docname, found[0].node_id, words, node["reftarget"])


def setup(app: Sphinx) -> dict[str, bool]:
    """Register the functions above. Sphinx calls this function."""
    app.connect("source-read", _read)
    app.connect("include-read", _read_included)
    app.connect("missing-reference", _find)
    return {"parallel_read_safe": True}
