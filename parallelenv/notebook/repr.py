"""Displays a `ParallelEnv` as text or HTML, without contacting a worker."""

from __future__ import annotations

import html
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from parallelenv.contract.error_text import count, format_table, name_range, number
from parallelenv.contract.worker_info import UNKNOWN_PROCESS, ProcessInfo
from parallelenv.engine.episode_stats import LATEST, EpisodeSummary

if TYPE_CHECKING:
    from parallelenv.env import ParallelEnv


class StateStyle(NamedTuple):
    """The style in which envs in a certain state are displayed."""

    colour: str  # colour of the squares, distinct with any colour vision, on white and on black
    sign: str  # letter in the squares, for readers and printers without colours
    meaning: str  # for the tooltip
    one: str = ""  # text after the number of envs in this state if the number is 1; empty means the state's name
    more: str = ""  # text after a number other than 1; empty means the state's name


LOOKS = {
    "running": StateStyle("#009e73", "", "in an episode"),
    "busy": StateStyle("#56b4e9", "…", "a step or another call is in flight"),
    "done": StateStyle("#0072b2", "✓", "its episode has ended"),
    "needs reset": StateStyle("#f0e442", "!", "it has no episode: call reset()", "needs reset", "need reset"),
    "exhausted": StateStyle("#cc79a7", "∅", "it has no more tasks"),
    "for calls only": StateStyle("#cccccc", "()", "it lacks reset() or step()"),
    "paused": StateStyle("#e69f00", "‖", "left out until resume()"),
    "failed": StateStyle("#d55e00", "x", "its worker has died: call restart()", *["failed (worker died)"] * 2),
    "closed": StateStyle("#999999", "-", "close() was called"),
}
"""The states of envs, in the order of the legend."""
_MOST_SQUARES = 256
MOST_WORKERS = 16
"""Maximum number of workers in a display."""
_GRID = "font:bold 11px/14px sans-serif;color:#000;"
_SQUARE = (
    "display:inline-block;vertical-align:top;width:14px;height:14px;margin:1px;border-radius:2px;text-align:center;"
    "background-color:"
)
_BOX = "display:inline-block;padding:8px 12px;border:1px solid #8888;border-radius:4px;font-size:13px;line-height:1.5"
_HEADER = ("envs", "pid", "memory")


class WorkerRow(NamedTuple):
    """A worker: its envs, its process, and the memory of the process in bytes (``None`` if unknown)."""

    env_ids: tuple[int, ...]
    process: ProcessInfo
    memory: int | None


@dataclass(frozen=True, slots=True)
class ReprData:
    """The facts about a `ParallelEnv` that are displayed."""

    title: str  # ``repr`` of the `ParallelEnv` or of a wrapper around it
    states: list[str]  # a key of `LOOKS` for each env
    standing: EpisodeSummary
    workers: list[WorkerRow]  # the workers that are alive

    def _counts(self) -> dict[str, str]:
        counts = Counter(self.states)
        return {
            state: f"{counts[state]:,} {(look.one if counts[state] == 1 else look.more) or state}"
            for state, look in LOOKS.items()
            if counts[state]
        }

    def _facts(self) -> dict[str, str]:
        facts, standing = {}, self.standing
        if standing.num_steps:
            together = " of all envs together" if len(self.states) > 1 else ""
            facts["so far"] = f"{count(standing.num_steps, 'step')}{together}"
        if standing.num_episodes:
            latest = min(standing.num_episodes, LATEST)
            means = [("return", standing.mean_return), ("length", standing.mean_length)]
            known = ", ".join(f"{name} {number(mean)}" for name, mean in means if mean is not None)
            of_latest = ":" if latest == 1 else f"; mean of the last {latest}:"
            facts["episodes"] = f"{standing.num_episodes:,} ended" + (f"{of_latest} {known}" if known else "")
        return facts

    def _rows(self) -> list[tuple[str, str, str]]:
        rows = []
        for env_ids, process, memory in self.workers[:MOST_WORKERS]:
            pid = str(process.pid) if process.is_near else f"{process.pid} on {process.machine}"
            size = "" if memory is None else f"{memory / 1e6:,.0f} MB"
            rows.append((name_range(env_ids), pid if process.pid else "", size))
        left = len(self.workers) - MOST_WORKERS
        return [*rows, (f"... and {count(left, 'more worker')}", "", "")] if left > 0 else rows

    def text(self) -> str:
        """Return the display as plain text."""
        facts = {"envs": ", ".join(self._counts().values()), **self._facts()}
        lines = [self.title, *(f"  {name:<9} {fact}" for name, fact in facts.items())]
        if rows := self._rows():
            lines += ["", *(f"  {line}" for line in format_table(_HEADER, rows, left=("envs",)).splitlines())]
        return "\n".join(lines)

    def html(self) -> str:
        """Return the display as HTML for light and dark backgrounds, without style sheets, scripts or downloads."""

        def square(state: str, font: str = "") -> str:
            return f'style="{font}{_SQUARE}{LOOKS[state].colour}">{LOOKS[state].sign}</span>'

        left = len(self.states) - _MOST_SQUARES
        squares = "".join(
            f'<span title="env {env_id}: {state}" {square(state)}'
            for env_id, state in enumerate(self.states[:_MOST_SQUARES])
        )
        legend = "".join(
            f'<span title="{LOOKS[state].meaning}" style="margin-right:14px;white-space:nowrap">'
            f"<span {square(state, _GRID)} {label}</span>"
            for state, label in self._counts().items()
        )
        rows, rest = self._rows(), f"<div>... and {left:,} more</div>" if left > 0 else ""
        return (
            f'<div style="{_BOX}"><div><code>{html.escape(self.title)}</code></div>'
            f'<div style="margin:6px 0;max-width:560px"><div style="{_GRID}">{squares}</div>{rest}</div>{legend}'
            f"{_html_table(self._facts().items())}{_html_table(rows, _HEADER) if rows else ''}</div>"
        )


def _html_table(rows: Iterable[Sequence[str]], header: Sequence[str] = ()) -> str:
    lines = []
    for kind, cells in [*([("th", header)] if header else []), *(("td", row) for row in rows)]:
        sides = ["left", *["right" if header else "left"] * len(cells)]
        line = "".join(
            f'<{kind} style="padding:1px 10px 1px 0;text-align:{side}">{html.escape(cell)}</{kind}>'
            for side, cell in zip(sides, cells, strict=False)
        )
        lines.append(f"<tr>{line}</tr>")
    return f'<table style="margin:6px 0 0;font-size:inherit">{"".join(lines)}</table>'


def repr_data(env: ParallelEnv, title: str) -> ReprData:
    """Return the facts about a `ParallelEnv`, which may be closed, busy, or in use by another thread."""
    engine, table, pool = env.engine, env.engine.table, env.engine.pool
    if env.closed:
        states = ["closed"] * env.num_envs
    else:
        states = [table.phase(env_id).value for env_id in engine.env_ids]
        marked = {"busy": engine.in_flight, "paused": table.paused.nonzero()[0].tolist(), "failed": pool.dead_env_ids}
        for state, env_ids in marked.items():
            for env_id in env_ids:
                states[env_id] = state
    workers: list[WorkerRow] = []
    memory: dict[ProcessInfo, int | None] = {}
    for host in pool.living:
        parts: dict[ProcessInfo, list[int]] = {}  # one host may have several processes
        for env_id in host:
            parts.setdefault(pool.processes.get(env_id, UNKNOWN_PROCESS), []).append(env_id)
        for process, owned in parts.items():
            if process not in memory:
                memory[process] = process.memory() if len(workers) < MOST_WORKERS else None
            workers.append(WorkerRow(tuple(owned), process, memory[process]))
    return ReprData(title, states, table.stats.summary(), workers)


def mime_bundle(env: Any) -> dict[str, str]:
    """Return the display of a `ParallelEnv` or of a wrapper around one, by MIME type."""
    whole = env.unwrapped
    if not hasattr(whole, "_engine"):  # the constructor failed
        return {"text/plain": repr(env)}
    data = repr_data(whole, repr(env))
    return {"text/plain": data.text(), "text/html": data.html()}
