"""Measures an env in every mode, and checks that all modes give the same results as the oracle, ``"dummy"``.

Apart from the oracle, only one mode is open at a time, because two modes cannot reserve the same cores of a Ray
cluster.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from time import perf_counter
from typing import Any

from parallelenv.autotune.recommend import CLOSE_ENOUGH, ROUNDS, TimedEnv, choose, random_actions
from parallelenv.contract.env_specs import make_factories
from parallelenv.contract.error_text import format_table, number
from parallelenv.contract.failures import one_line
from parallelenv.env import ParallelEnv
from parallelenv.errors import ArgumentError, InvalidEnvError, MissingDependencyError
from parallelenv.progress import Bar
from parallelenv.registry import known_modes
from parallelenv.results import difference

ORACLE = "dummy"  # the mode whose results are correct by definition
_CALLER_STEPS = "subproc+caller_steps"
_CHOOSABLE = ("thread", "subproc", _CALLER_STEPS)
"""Modes that `recommend` chooses from, besides the oracle.

They are measured with the number of workers that it chose.
"""
_HEADER = ("mode", "workers", "start-up s", "steps/s", "ratio", "identical", "note")
_CHOSEN, _CORRECT, _WRONG = "#0072b2", "#a9b8c4", "#d55e00"  # distinct with any colour vision


def comparable_words() -> tuple[str, ...]:
    """Return the names of all modes that can be measured, including ``subproc+caller_steps``."""
    modes = known_modes()
    place = modes.index("subproc") + 1
    return (*modes[:place], _CALLER_STEPS, *modes[place:])


def arguments_of(word: str, num_cpus: int | None = None) -> dict[str, object]:
    """Return the arguments of `ParallelEnv` that select the mode ``word``, one of `comparable_words`."""
    mode, *options = word.split("+") if word == _CALLER_STEPS else [word]
    cores = {} if num_cpus is None else {"num_cpus": num_cpus}
    return {"para_mode": mode, **cores, **dict.fromkeys(options, True)}


@dataclass(frozen=True, slots=True)
class ComparisonSettings:
    """The settings of a comparison."""

    num_envs: int  # per mode
    modes: tuple[str, ...]  # some of `comparable_words`, the oracle first
    num_cpus: int | None  # `None` means all usable cores
    steps: int  # number of steps whose results are compared bit for bit
    seconds: float  # seconds of timing per mode
    seed: int  # of the envs and of the actions


@dataclass(slots=True)
class ComparisonRow:
    """The results of one mode."""

    mode: str  # of `comparable_words`
    num_cpus: int | None = None
    workers: int | None = None  # number of hosts
    startup_seconds: float | None = None  # seconds until the first states
    steps_per_second: float | None = None  # env steps per second: the median over the rounds
    ratio: float | None = None  # speed relative to the oracle in the same round: the median over the rounds
    deviation: str | None = None  # the place where the results first differ from the oracle's
    failure: str | None = None  # the reason why there are no figures, in one line
    is_missing: bool = False  # whether the only reason is a package that is not installed

    def cells(self) -> tuple[str, ...]:
        """Return the cells of this mode's row in the table."""
        if self.steps_per_second is None:
            return (self.mode, *"-----", self.failure or "")
        figures = f"{self.workers}", f"{self.startup_seconds:.2f}", number(self.steps_per_second), f"{self.ratio:.2f}"
        note = ("no", f"first differs at {self.deviation}") if self.deviation else ("yes", "")
        return (self.mode, *figures, *note)


@dataclass(frozen=True, slots=True)
class Comparison:
    """The results of all modes on one env."""

    name: str  # registered id of the env
    rows: tuple[ComparisonRow, ...]  # one per mode, the oracle first
    chosen: str = ORACLE  # the mode that `recommend` chooses
    chosen_cpus: int | None = None  # the number of workers that it chooses

    @property
    def is_reproducible(self) -> bool:
        """True if the env gave the same results in two runs of ``"dummy"``. Otherwise no mode can be checked."""
        return self.rows[0].deviation is None

    @property
    def is_sound(self) -> bool:
        """True if no mode failed and, if the env is reproducible, all modes gave the same results.

        A mode whose package is not installed does not count as failed.
        """
        differs = any(row.deviation for row in self.rows) and self.is_reproducible
        return not differs and all(row.failure is None or row.is_missing for row in self.rows)

    def recommended(self) -> ComparisonRow:
        """Return the row of the mode that `recommend` chooses, or of another correct mode if that is clearly faster."""
        correct = [row for row in self.rows if row.ratio and not (row.deviation and self.is_reproducible)]
        best = next((row for row in correct if row.mode == self.chosen), self.rows[0])
        for row in correct:
            if (row.ratio or 0.0) > CLOSE_ENOUGH * (best.ratio or 0.0):
                best = row
        return best

    def as_dict(self) -> dict[str, object]:
        """Return all results as plain data, for ``--json``. See ``docs/api/command_line.md`` for the keys."""
        modes, best = [asdict(row) for row in self.rows], self.recommended()
        for mode in modes:
            mode["arguments"] = arguments_of(mode.pop("mode"), mode.pop("num_cpus"))
            del mode["is_missing"]
        return {
            "env": self.name,
            "is_reproducible": self.is_reproducible,
            "modes": modes,
            "recommended": arguments_of(best.mode, best.num_cpus),
            "estimated": arguments_of(self.chosen, self.chosen_cpus),
        }

    def __str__(self) -> str:
        """Return a table and, below it, the recommended mode."""
        table = format_table(_HEADER, [row.cells() for row in self.rows], left=("mode", "identical", "note"))
        lines = [table, f"ratio: times as fast as {ORACLE} in the same round"]
        if not self.is_reproducible:
            lines.append(
                f"{self.name} is not reproducible from its seeds: two {ORACLE} runs differ, so other modes cannot be "
                "checked with it."
            )
        best = self.recommended()
        measured, estimated = (
            ", ".join(f"{name}={value!r}" for name, value in arguments_of(*which).items())
            for which in ((best.mode, best.num_cpus), (self.chosen, self.chosen_cpus))
        )
        reason = f"{best.ratio:.1f} times as fast as {ORACLE}"
        if best.mode == ORACLE:
            reason = "no other mode is clearly faster here"
        line = f"Recommended for {self.name}: {measured} ({reason})."
        if self.chosen != best.mode:
            line += f" recommend(), after a short trial, chose {estimated}."
        return "\n".join([*lines, line])


def compare(name: str, settings: ComparisonSettings, progress: Bar) -> Comparison:
    """Measure one env in each mode in ``settings``; raise `InvalidEnvError` if the env fails in ``"dummy"``.

    ``progress`` advances by one after each mode.
    """
    oracle = ComparisonRow(ORACLE)
    rows = [oracle]
    with ExitStack() as opened:
        progress.set_description_str(f"{name}: {ORACLE}")
        try:
            with ExitStack() as before:
                env = _open(oracle, name, settings, before)
                actions = random_actions(env, settings.steps, settings.seed)
                record = list(_play(env, actions, settings.seed))
            loop = _measure(oracle, _open(oracle, name, settings, opened), settings, actions, record)
        except Exception as error:
            raise InvalidEnvError(f"The env {name!r} fails in a plain loop: {one_line(error)}") from error
        progress.update()
        chosen = choose(make_factories([name] * settings.num_envs), settings.num_cpus)  # the table shows what failed
        for word in settings.modes[1:]:
            progress.set_description_str(f"{name}: {word}")
            is_choosable = word in _CHOOSABLE and chosen.mode != ORACLE
            rows.append(row := ComparisonRow(word, chosen.num_cpus if is_choosable else settings.num_cpus))
            try:
                with ExitStack() as during:
                    _measure(row, _open(row, name, settings, during), settings, actions, record, loop)
            except Exception as error:  # noqa: BLE001 (envs raise anything; it goes into the table)
                row.failure, row.is_missing = one_line(error), isinstance(error, MissingDependencyError)
            progress.update()
    return Comparison(name, tuple(rows), "+".join([chosen.mode, *chosen.options]), chosen.num_cpus)


def _open(row: ComparisonRow, name: str, settings: ComparisonSettings, opened: ExitStack) -> ParallelEnv:
    """Open a `ParallelEnv` that ``opened`` will close; record in ``row`` how long it took to get the first states."""
    begin = perf_counter()
    mode: Any = arguments_of(row.mode, row.num_cpus)
    env = opened.enter_context(ParallelEnv([name] * settings.num_envs, asynchronous="restart", **mode))
    env.reset(seed=settings.seed)
    row.startup_seconds, row.workers = perf_counter() - begin, env.num_workers
    return env


def _measure(
    row: ComparisonRow,
    env: ParallelEnv,
    settings: ComparisonSettings,
    actions: Sequence[object],
    record: Sequence[tuple[str, object]],
    loop: TimedEnv | None = None,
) -> TimedEnv:
    """Compare a mode's results with ``record``, the results of ``"dummy"``, and time the mode.

    ``loop`` is the `TimedEnv` of ``"dummy"``. If it is given, it and the mode are timed alternately, and their speeds
    are compared.
    """
    for (when, expected), (_, found) in zip(record, _play(env, actions, settings.seed), strict=True):
        row.deviation = row.deviation or difference(expected, found, when)
    timed = TimedEnv(env, actions, settings.seconds / ROUNDS)
    row.ratio = timed.speedup(loop or timed)
    row.steps_per_second = settings.num_envs / timed.seconds
    return timed


def _play(env: ParallelEnv, actions: Sequence[object], seed: int) -> Iterator[tuple[str, dict[str, object]]]:
    yield "reset", {"states": env.reset(seed=seed), "infos": env.reset_infos}
    for index, action in enumerate(actions, start=1):
        result = env.step(action)
        names = ("states", "rewards", "terminated", "truncated", "infos")
        yield f"step {index}", {name: getattr(result, name) for name in names}


# ---------------------------------------------------------------- as a picture


def check_plot(path: Path) -> None:
    """Raise an error if matplotlib or the folder of ``path`` is missing, or if the file type is not supported."""
    if find_spec("matplotlib") is None:
        raise MissingDependencyError(
            f"--plot {path} needs the package 'matplotlib', which is not installed. "
            "Install it with: pip install 'parallelenv[plot]'"
        )
    if not path.parent.is_dir():
        raise ArgumentError(f"--plot {path}: the folder {path.parent} does not exist.")
    from matplotlib.figure import Figure

    formats = Figure().canvas.get_supported_filetypes()
    if path.suffix[1:].lower() not in formats:
        raise ArgumentError(f"--plot {path}: the name must end in one of .{', .'.join(sorted(formats))}")


def plot(comparisons: Sequence[Comparison], path: Path) -> None:
    """Write a plot to a file: the speed of each mode relative to ``"dummy"``, with one panel per env."""
    from matplotlib.figure import Figure  # without pyplot: no window, no global state

    most_rows = max(len(comparison.rows) for comparison in comparisons)
    height = 0.7 + len(comparisons) * (0.7 + 0.35 * most_rows)
    figure = Figure(figsize=(8, height), dpi=150, layout="constrained")
    panels = figure.subplots(len(comparisons), 1, squeeze=False)[:, 0]
    for panel, comparison in zip(panels, comparisons, strict=True):
        best = comparison.recommended()
        colours, labels = [], []
        for row in comparison.rows:
            colours.append(_WRONG if row.deviation else _CHOSEN if row is best else _CORRECT)
            failed = "package not installed" if row.is_missing else "failed"
            differs = ", results differ" if row.deviation else ""
            labels.append(failed if row.steps_per_second is None else f"{row.steps_per_second:,.0f} steps/s{differs}")
        ratios = [row.ratio or 0.0 for row in comparison.rows]
        bars = panel.barh([row.mode for row in comparison.rows], ratios, color=colours)
        behind = {"facecolor": "white", "edgecolor": "none", "pad": 1}  # keeps the dotted line from crossing the text
        panel.bar_label(bars, labels, padding=4, fontsize=9, bbox=behind)
        panel.axvline(1, color="black", linewidth=0.8, linestyle=":", zorder=0)
        panel.invert_yaxis()  # the first mode on top, as in the table
        panel.set_xlim(0, 1.35 * max(ratios))  # room for the labels
        panel.spines[["top", "right"]].set_visible(False)
        panel.set_title(f"{comparison.name}: {best.mode} recommended", loc="left", fontsize=11)
    panels[-1].set_xlabel(f"times as fast as {ORACLE} (median of the rounds)")
    figure.savefig(path)
