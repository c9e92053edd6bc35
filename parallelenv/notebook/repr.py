"""The display of a `ParallelEnv`, made without sending anything to a worker or waiting for one."""

from __future__ import annotations

import html
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from parallelenv.contract.error_text import count, format_table, name_range, number
from parallelenv.contract.worker_info import UNKNOWN_PROCESS, ProcessInfo
from parallelenv.engine.episode_stats import LATEST, EpisodeSummary

if TYPE_CHECKING:
    from parallelenv.env import ParallelEnv


@dataclass(frozen=True, slots=True)
class StateStyle:
    """How a state of envs is displayed.

    Attributes:
        colour: Colour of its squares, distinct with any colour vision, on white and on black.
        sign: Character in its squares, for readers and printers without colours.
        meaning: Its meaning, for the tooltip.
        one: Text after the number of one env; empty means the state itself.
        more: Likewise for several envs.
    """

    colour: str
    sign: str
    meaning: str
    one: str = ""
    more: str = ""


LOOKS = {
    "running": StateStyle("#009e73", "", "in an episode"),
    "busy": StateStyle("#56b4e9", "…", "a step or another call is under way"),
    "done": StateStyle("#0072b2", "✓", "its episode has ended"),
    "needs reset": StateStyle("#f0e442", "!", "it has no episode: call reset()", "needs reset", "need reset"),
    "exhausted": StateStyle("#cc79a7", "∅", "it has no more tasks"),
    "paused": StateStyle("#e69f00", "‖", "left out until resume()"),
    "failed": StateStyle("#d55e00", "x", "its worker has died: call restart()", *["failed (worker died)"] * 2),
    "closed": StateStyle("#999999", "-", "close() was called"),
}
"""The states of envs, in the order of the legend."""
_MOST_SQUARES = 256
_MOST_WORKERS = 16
_GRID = "font:bold 11px/14px sans-serif;color:#000;"
_SQUARE = (
    "display:inline-block;vertical-align:top;width:14px;height:14px;margin:1px;border-radius:2px;text-align:center;"
    "background-color:"
)
_CELL = "padding:1px 10px 1px 0;text-align:"
_BOX = "display:inline-block;padding:8px 12px;border:1px solid #8888;border-radius:4px;font-size:13px;line-height:1.5"
_HEADER = {"envs": "left", "pid": "right", "memory": "right"}


@dataclass(frozen=True, slots=True)
class WorkerRow:
    """What is known of a worker.

    Attributes:
        env_ids: Its envs.
        process: Its process.
        memory: Memory of its process in bytes; ``None`` if unknown.
    """

    env_ids: tuple[int, ...]
    process: ProcessInfo
    memory: int | None


@dataclass(frozen=True, slots=True)
class ReprData:
    """What is known of a `ParallelEnv`.

    Attributes:
        title: Its ``repr``, or that of a wrapper around it.
        states: State of each env, a key of `LOOKS`.
        standing: Episodes and their results.
        workers: The workers that are alive.
    """

    title: str
    states: list[str]
    standing: EpisodeSummary
    workers: list[WorkerRow]

    def counts(self) -> dict[str, str]:
        """Return the number of envs in each state that occurs, as text, by state."""
        counts = {}
        for state, envs in Counter(self.states).items():
            look = LOOKS[state]
            counts[state] = f"{envs:,} {(look.one if envs == 1 else look.more) or state}"
        return {state: counts[state] for state in LOOKS if state in counts}

    def facts(self) -> dict[str, str]:
        """Return facts about steps and episodes, by label."""
        facts = {}
        standing = self.standing
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

    def rows(self) -> list[tuple[str, ...]]:
        """Return the table of workers."""
        return [
            (
                name_range(worker.env_ids),
                _name_process(worker.process),
                "" if worker.memory is None else f"{worker.memory / 1e6:,.0f} MB",
            )
            for worker in self.workers[:_MOST_WORKERS]
        ]

    @property
    def rest(self) -> str:
        """Text on rows that the table omits."""
        left = len(self.workers) - _MOST_WORKERS
        return f"... and {count(left, 'more worker')}" if left > 0 else ""

    def text(self) -> str:
        """Return the display as plain text."""
        facts = {"envs": ", ".join(self.counts().values()), **self.facts()}
        lines = [self.title, *(f"  {name:<9} {said}" for name, said in facts.items())]
        if self.workers:
            table = format_table(list(_HEADER), self.rows(), left=("envs",))
            lines += ["", *(f"  {line}" for line in table.splitlines())]
        if self.rest:
            lines.append(f"  {self.rest}")
        return "\n".join(lines)

    def html(self) -> str:
        """Return the display as HTML without style sheet, script or network, for light and dark backgrounds."""
        facts = "".join(
            f'<tr><td style="{_CELL}left;opacity:0.7">{name}</td><td style="{_CELL}left">{html.escape(said)}</td></tr>'
            for name, said in self.facts().items()
        )
        table = self._html_table() if self.workers else ""
        return (
            f'<div style="{_BOX}"><div><code>{html.escape(self.title)}</code></div>'
            f'<div style="margin:6px 0;max-width:560px">{self._html_grid()}</div>{self._html_legend()}'
            f'<table style="margin:6px 0 0;font-size:inherit">{facts}</table>{table}</div>'
        )

    def _html_grid(self) -> str:
        squares = "".join(
            f'<span title="env {env_id}: {state}" style="{_SQUARE}{LOOKS[state].colour}">{LOOKS[state].sign}</span>'
            for env_id, state in enumerate(self.states[:_MOST_SQUARES])
        )
        left = len(self.states) - _MOST_SQUARES
        return f'<div style="{_GRID}">{squares}</div>' + (f"<div>... and {left:,} more</div>" if left > 0 else "")

    def _html_legend(self) -> str:
        return "".join(
            f'<span title="{LOOKS[state].meaning}" style="margin-right:14px;white-space:nowrap">'
            f'<span style="{_GRID}{_SQUARE}{LOOKS[state].colour}">{LOOKS[state].sign}</span> {said}</span>'
            for state, said in self.counts().items()
        )

    def _html_table(self) -> str:
        head = "".join(f'<th style="{_CELL}{side}">{name}</th>' for name, side in _HEADER.items())
        body = "".join(f"<tr>{_html_row(row)}</tr>" for row in self.rows())
        rest = f"<div>{self.rest}</div>" if self.rest else ""
        rows = f"<thead><tr>{head}</tr></thead><tbody>{body}</tbody>"
        return f'<table style="margin:6px 0 0;font-size:inherit">{rows}</table>{rest}'


def _html_row(row: Sequence[str]) -> str:
    cells = zip(row, _HEADER.values(), strict=True)
    return "".join(f'<td style="{_CELL}{side}">{html.escape(cell)}</td>' for cell, side in cells)


def repr_data(env: ParallelEnv, title: str) -> ReprData:
    """Return what is known of a `ParallelEnv`, open or closed, even while it or another thread is busy."""
    pool = env.engine.pool
    standing = env.engine.table.score.look()
    return ReprData(title, _states(env), standing, _workers(pool.processes, pool.living))


def mime_bundle(env: Any) -> dict[str, str]:
    """Return the display of a `ParallelEnv` or of a wrapper around one, by MIME type."""
    whole = env.unwrapped
    if not hasattr(whole, "_engine"):  # the constructor failed
        return {"text/plain": repr(env)}
    portrait = repr_data(whole, repr(env))
    return {"text/plain": portrait.text(), "text/html": portrait.html()}


def _states(env: ParallelEnv) -> list[str]:
    if env.closed:
        return ["closed"] * env.num_envs
    table = env.engine.table
    states = [table.phase(env_id).value for env_id in env.engine.env_ids]
    marked = {
        "busy": env.engine.under_way,
        "paused": table.paused.nonzero()[0].tolist(),
        "failed": env.engine.pool.lost,
    }
    for state, env_ids in marked.items():
        for env_id in env_ids:
            states[env_id] = state
    return states


def _workers(processes: dict[int, ProcessInfo], hosts: Sequence[tuple[int, ...]]) -> list[WorkerRow]:
    """Return the workers: hosts, or the processes behind a host if it has several."""
    found: list[WorkerRow] = []
    memory: dict[ProcessInfo, int | None] = {}
    for env_ids in hosts:
        parts: dict[ProcessInfo, list[int]] = {}
        for env_id in env_ids:
            parts.setdefault(processes.get(env_id, UNKNOWN_PROCESS), []).append(env_id)
        for process, owned in parts.items():
            if process not in memory:
                memory[process] = process.memory() if len(found) < _MOST_WORKERS else None
            found.append(WorkerRow(tuple(owned), process, memory[process]))
    return found


def _name_process(process: ProcessInfo) -> str:
    if not process.pid:
        return ""
    return str(process.pid) if process.is_near else f"{process.pid} on {process.machine}"
