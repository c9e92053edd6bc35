"""Draws the pictures of the documentation: ``python docs/pictures.py``.

The pictures of the done policies show the results of real steps. A test checks that all pictures are up to date.
"""

from __future__ import annotations

import ast
import sys
import tomllib
from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np

from parallelenv import ParallelEnv

FOLDER = Path(__file__).parent / "img"

INK, GREY, LINE = "#1f2933", "#616e7c", "#9aa5b1"
PAPER, PALE, SAND = "#ffffff", "#eef2f6", "#fdf3dc"
BLUE, NAVY, GREEN, AMBER, REST = "#8fbce6", "#2f6690", "#9bd19d", "#f0b35b", "#dde2e7"
IN_THE_DARK = {
    INK: "#e6e9ee",
    GREY: "#aeb8c3",
    LINE: "#5b6875",
    PAPER: "#1a1d21",
    PALE: "#262b31",
    SAND: "#3a3222",
    BLUE: "#2c5478",
    NAVY: "#7fb2e0",
    GREEN: "#2f6a3a",
    AMBER: "#8a5a14",
    REST: "#363c43",
}


# -------------------------------------------------------------------- strokes


def text(x: float, y: float, words: str, size: int = 13, anchor: str = "middle", **style: str) -> str:
    """Return a line of text, centred by default."""
    fill = style.pop("fill", INK)
    more = "".join(f' {name.replace("_", "-")}="{value}"' for name, value in style.items())
    where = f'x="{x:g}" y="{y:g}" text-anchor="{anchor}"'
    return f'<text {where} font-size="{size}" fill="{fill}"{more}>{escape(words)}</text>'


def box(x: float, y: float, width: float, height: float, fill: str = PALE, stroke: str = LINE, radius: int = 5) -> str:
    """Return a rectangle with round corners."""
    return (
        f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="{radius}" fill="{fill}" '
        f'stroke="{stroke}"/>'
    )


def arrow(x1: float, y1: float, x2: float, y2: float, colour: str = GREY) -> str:
    """Return a line with an arrowhead at its end."""
    line = f'<line x1="{x1:g}" y1="{y1:g}" x2="{x2:g}" y2="{y2:g}" stroke="{colour}" stroke-width="1.5" '
    return line + 'marker-end="url(#head)"/>'


def picture(width: int, height: int, title: str, parts: Iterable[str]) -> str:
    """Return a whole picture in the colours that the reader's browser prefers, light or dark.

    The background is part of the picture: a page may be dark although the browser prefers light pages.
    """
    rules = "".join(
        f'[fill="{light}"]{{fill:{dark}}}[stroke="{light}"]{{stroke:{dark}}}' for light, dark in IN_THE_DARK.items()
    )
    head = (
        '<defs><marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
        f'<path d="M0,0 L8,4 L0,8 z" fill="{GREY}"/></marker></defs>'
    )
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        'font-family="system-ui, Segoe UI, Helvetica, Arial, DejaVu Sans, sans-serif" role="img">',
        f"<title>{escape(title)}</title>",
        f"<style>@media (prefers-color-scheme: dark){{{rules}}}</style>",
        head,
        box(0.5, 0.5, width - 1, height - 1, PAPER, REST, 8),
        *parts,
        "</svg>",
    ]
    return "\n".join(lines) + "\n"


# -------------------------------------------------------------------- the house

_FLOORS = (
    ("your notebook or script", "env.step(actions)", PAPER),
    ("ParallelEnv", "checks arguments; defines done policies, seeds, errors and results, once for all modes", SAND),
    ("Pool", "sends each host its part of a command, gathers the replies, replaces dead workers", SAND),
)
_MODES = (
    ("dummy", "in your own thread", 1, "thread"),
    ("thread", "in threads", 2, "thread"),
    ("subproc", "in processes", 2, "process"),
    ("ray", "in actors, on any node", 2, "actor"),
    ("ray-subproc", "in processes of an actor", 2, "actor"),
)


def house() -> str:
    """Return the picture of the parts of the package, from the caller down to the envs."""
    parts = []
    for number, (name, does, fill) in enumerate(_FLOORS):
        y = 16 + 62 * number
        parts += [box(16, y, 868, 50, fill), text(32, y + 21, name, 15, "start", font_weight="bold")]
        parts.append(text(32, y + 40, does, 13, "start", fill=GREY))
    y = 214
    parts.append(f'<line x1="16" y1="{y}" x2="884" y2="{y}" stroke="{NAVY}" stroke-width="2" stroke-dasharray="7 5"/>')
    contract = "the contract with backends: commands, replies, and a batch of rows in shared memory"
    parts.append(text(450, y - 8, contract, 13, fill=NAVY))
    for number, mode in enumerate(_MODES):
        parts += _mode(16 + 175.5 * number, y + 16, *mode)
    host = "A host owns some envs (the circles) and steps them in order, with the same code in every mode."
    parts.append(text(450, 424, host, 13))
    return picture(900, 440, "Parts: ParallelEnv, pool, contract, backends, hosts, envs", parts)


def _mode(x: float, y: float, word: str, where: str, hosts: int, kind: str) -> list[str]:
    parts = [box(x, y, 166, 170), text(x + 83, y + 22, word, 15, font_weight="bold")]
    parts.append(text(x + 83, y + 40, where, 12, fill=GREY))
    if word == "ray-subproc":
        parts += [box(x + 6, y + 50, 154, 114, PAPER, NAVY), text(x + 83, y + 158, "one actor per node", 11, fill=GREY)]
    width = 66
    left = x + 83 - (hosts * width + (hosts - 1) * 6) / 2
    for host in range(hosts):
        parts += _host(left + host * (width + 6), y + 58, 3 - host, None if kind == "thread" else NAVY)
    return parts


def _host(x: float, y: float, envs: int, border: str | None) -> list[str]:
    parts = [box(x, y, 66, 86, BLUE, border or LINE), text(x + 33, y + 18, "Host", 12)]
    return parts + [
        f'<circle cx="{x + 33:g}" cy="{y + 32 + 20 * env:g}" r="7" fill="{PAPER}" stroke="{NAVY}"/>'
        for env in range(envs)
    ]


# -------------------------------------------------------------------- the layers

PROJECT = Path(__file__).parents[1]
_ROW, _CHARACTERS = 17, 104  # height of a line of text, and its maximum length


def layers() -> str:
    """Return the picture of the layers that the import linter checks, with the first line of each part's docstring."""
    settings = tomllib.loads((PROJECT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["importlinter"]
    parts: list[str] = []
    y = 16.0
    for number, layer in enumerate(settings["contracts"][0]["layers"]):
        names = layer.split(" | ")
        blocks = [_described(name) for name in names]
        height = sum(len(lines) for _, lines in blocks) * _ROW + len(blocks) * 8 + 8
        parts.append(box(16, y, 868, height, SAND if number % 2 else PALE))
        row = y + 20
        for name, lines in blocks:
            parts.append(text(28, row, name, anchor="start", font_weight="600"))
            for index, line in enumerate(lines):
                fill = INK if index == 0 else GREY
                parts.append(text(150, row, line, 13 if index == 0 else 12, "start", fill=fill))
                row += _ROW
            row += 8
        y += height + 6
    parts.append(
        text(
            450,
            y + 14,
            "A layer may import those below it; engine imports neither worker nor backends.",
            12,
        )
    )
    return picture(900, int(y + 28), "The layers of the package, from top to bottom", parts)


def _underscored_last(module: str) -> tuple[bool, str]:
    return module.startswith("_"), module


def _described(name: str) -> tuple[str, list[str]]:
    """Return the name of a part of the package, and lines: the first line of its docstring, then its modules."""
    folder = PROJECT / ("backends" if name == "backends" else f"parallelenv/{name}")
    source = folder / "__init__.py" if folder.is_dir() else folder.with_suffix(".py")
    doc = ast.get_docstring(ast.parse(source.read_text(encoding="utf-8"))) or ""
    lines = [doc.splitlines()[0].replace("`", "")]
    modules = sorted((path.stem for path in folder.glob("*.py") if path.stem != "__init__"), key=_underscored_last)
    for module in modules:
        if len(lines) == 1 or len(lines[-1]) + len(module) > _CHARACTERS:
            lines.append(module)
        else:
            lines[-1] += f", {module}"
    return name, lines


# -------------------------------------------------------------------- the way of a step

_LANES = (("you", 58), ("pool", 118), ("host 0", 196), ("host 1", 266))


def step() -> str:
    """Return the picture of a step of four envs in two workers, as a sequence from left to right."""
    parts = [text(20, y + 4, name, 14, "start", font_weight="bold") for name, y in _LANES]
    parts += [f'<line x1="86" y1="{y}" x2="884" y2="{y}" stroke="{REST}"/>' for _, y in _LANES]
    parts += _block(92, 58, 66, "step(a)", PAPER)
    parts += [arrow(158, 66, 172, 104)]
    parts += _block(164, 118, 124, "check and write", SAND)
    parts += [arrow(276, 134, 306, 180), arrow(276, 134, 306, 250)]
    parts += _block(308, 196, 74, "step env 0", BLUE) + _block(386, 196, 74, "step env 1", BLUE)
    parts += _block(464, 196, 56, "reset 1", GREEN)
    parts += _block(308, 266, 98, "step env 2", BLUE) + _block(410, 266, 74, "step env 3", BLUE)
    parts += [arrow(520, 184, 566, 136), arrow(484, 254, 604, 136)]
    parts += _block(562, 118, 210, "gather, apply done policy, copy", SAND)
    parts += [arrow(764, 104, 782, 74)]
    parts += _block(784, 58, 96, "4 items", PAPER)
    parts.append(text(246, 166, "one command per host", 12, "end", fill=GREY))
    parts.append(text(628, 166, "one reply per host", 12, "start", fill=GREY))
    parts += _rows(330, 300)
    return picture(900, 396, "A step: one command and one reply per host; arrays are in shared memory", parts)


def fast_path() -> str:
    """Return the picture of a planned step, with the events after which the general path continues the step."""
    parts = [text(20, y + 4, name, 14, "start", font_weight="bold") for name, y in _LANES]
    parts += [f'<line x1="86" y1="{y}" x2="884" y2="{y}" stroke="{REST}"/>' for _, y in _LANES]
    parts += _block(92, 58, 66, "step(a)", PAPER)
    parts += [arrow(158, 66, 172, 104)]
    parts += _block(164, 118, 84, "actions", SAND) + _block(252, 118, 66, "ring", AMBER)
    parts += [arrow(300, 134, 322, 180), arrow(300, 134, 322, 250)]
    parts += _block(324, 196, 74, "step env 0", BLUE) + _block(402, 196, 74, "step env 1", BLUE)
    parts += _block(480, 196, 46, "done", AMBER)
    parts += _block(324, 266, 98, "step env 2", BLUE) + _block(426, 266, 98, "step env 3", BLUE)
    parts += _block(528, 266, 46, "done", AMBER)
    parts += [arrow(526, 184, 562, 136), arrow(574, 254, 610, 136)]
    parts += _block(556, 118, 168, "copy rows, make infos", SAND)
    parts += [arrow(716, 104, 740, 74)]
    parts += _block(742, 58, 96, "4 items", PAPER)
    parts.append(text(338, 112, "a shared word per worker,", 12, "start", fill=GREY))
    parts.append(text(338, 128, "one eventfd wakes all", 12, "start", fill=GREY))
    parts += _block(
        164, 330, 560, "failure, printed text, dead worker, timeout, interrupt: the general path, with a ticket", PALE
    )
    parts += [arrow(670, 134, 670, 312), arrow(206, 134, 206, 312)]
    return picture(900, 366, "The fast path: a step like the one before, with nothing left to decide", parts)


def _block(x: float, y: float, width: float, words: str, fill: str) -> list[str]:
    return [box(x, y - 15, width, 30, fill), text(x + width / 2, y + 4, words, 12)]


def _rows(x: float, y: float) -> list[str]:
    columns = (("action", 70), ("state", 120), ("reward", 66), ("terminated", 84), ("truncated", 84))
    parts = [text(20, y + 26, "the batch: a row per env, in shared", 12, "start")]
    parts += [text(20, y + 43, "memory. Each host writes only its", 12, "start")]
    parts += [text(20, y + 60, "own rows, so no lock is needed", 12, "start")]
    for name, width in columns:
        parts.append(text(x + width / 2, y + 12, name, 12, fill=GREY))
        for row in range(4):
            fill = SAND if name == "action" else (BLUE if row != 1 else GREEN) if name == "state" else PALE
            parts.append(box(x, y + 18 + 15 * row, width - 4, 13, fill, LINE, 2))
        x += width
    return parts


# -------------------------------------------------------------------- the policies

_LIMITS = (2, 4, 7)
_NUM_STEPS = 9
_KINDS = {
    "stepped": (BLUE, "stepped"),
    "ended": (AMBER, "stepped, and its episode ended"),
    "begun": (GREEN, "ended and reset: the first state of the next episode"),
    "past": (SAND, "stepped after its end, done in every step"),
    "rests": (REST, "not stepped: (None, None, True, {})"),
}


class _Counting(gymnasium.Env[Any, Any]):
    """An env whose episodes end after ``limit`` steps. The state is the number of steps."""

    observation_space = gymnasium.spaces.Box(0, np.inf, (1,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.count = 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.count = 0
        return np.array([0.0], np.float32), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.count += 1
        return np.array([self.count], np.float32), 1.0, self.count >= self.limit, False, {}


def played(policy: Any) -> list[list[tuple[str, str]]]:
    """Step three envs with a done policy. Return, for each env, the kind and the returned state of each step."""
    rows: list[list[tuple[str, str]]] = [[] for _ in _LIMITS]
    with ParallelEnv([lambda limit=limit: _Counting(limit) for limit in _LIMITS], "dummy", policy) as env:
        env.reset()
        for _ in range(_NUM_STEPS):
            for row, (state, _, done, info) in zip(rows, env.step([0] * len(_LIMITS), align="batch"), strict=True):
                row.append((_kind(state, done, info, row), "None" if state is None else f"{state.item():g}"))
    return rows


def _kind(state: Any, done: bool, info: dict[str, Any], before: Sequence[tuple[str, str]]) -> str:
    if state is None:
        return "rests"
    if info.get("reset"):
        return "begun"
    if done:
        return "past" if before and before[-1][0] in ("ended", "past") else "ended"
    return "stepped"


def policy(word: str | None) -> str:
    """Return the picture of nine steps of three envs with a done policy."""
    rows = played(word)
    parts = [text(20, 28, f"asynchronous={word!r}", 15, "start", font_weight="bold")]
    parts += [text(135 + 62 * number, 52, f"step {number + 1}", 11, fill=GREY) for number in range(_NUM_STEPS)]
    for env_id, row in enumerate(rows):
        y = 60 + 34 * env_id
        parts.append(text(20, y + 19, f"env {env_id}", 13, "start"))
        for number, (kind, state) in enumerate(row):
            x = 106 + 62 * number
            parts.append(box(x, y, 58, 28, _KINDS[kind][0]))
            parts.append(text(x + 29, y + 18, state, 12, fill=GREY if kind == "rests" else INK))
    seen = [kind for kind in _KINDS if any(kind == found for row in rows for found, _ in row)]
    for number, kind in enumerate(seen):
        y = 176 + 20 * number
        parts.append(box(106, y - 11, 22, 13, _KINDS[kind][0], LINE, 3))
        parts.append(text(136, y, _KINDS[kind][1], 12, "start"))
    return picture(684, 184 + 20 * len(seen), f"Results of three envs with asynchronous={word!r}", parts)


def draw() -> dict[str, str]:
    """Return all pictures by file name."""
    policies = {f"policy-{str(word).lower()}.svg": policy(word) for word in (None, "idle", "restart", "continue")}
    return {
        "house.svg": house(),
        "layers.svg": layers(),
        "step.svg": step(),
        "fast_path.svg": fast_path(),
        **policies,
    }


if __name__ == "__main__":
    for name, drawn in draw().items():
        (FOLDER / name).write_text(drawn, encoding="utf-8")
        sys.stdout.write(f"{FOLDER / name}\n")
