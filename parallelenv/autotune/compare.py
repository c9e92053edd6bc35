"""Measures every mode on an env, and checks that all modes give the same results.

For fair numbers, each mode is timed in turns with the plain loop, in several short rounds, so that a slow moment of the
machine affects both; the ratio is taken per round, then the median over rounds; actions are drawn beforehand. Modes are
opened one after the other: two that reserve the same cores of a Ray cluster could not be open at the same time.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import gymnasium

from parallelenv.autotune.recommend import recommend
from parallelenv.autotune.trial import CLOSE_ENOUGH
from parallelenv.contract.cpu_cores import cpu_seconds, describe_cores
from parallelenv.contract.error_text import one_line
from parallelenv.contract.progress import Bar
from parallelenv.contract.value_difference import difference
from parallelenv.env import ParallelEnv
from parallelenv.errors import InvalidEnvError, MissingDependencyError
from parallelenv.registry import known_modes

ORACLE = "dummy"  # the mode whose results are correct by definition
ROUNDS = 5
_CALLER_STEPS = "subproc+caller_steps"
_CHOOSABLE = ("thread", "subproc", _CALLER_STEPS)
"""Words that `recommend` chooses from, measured with its number of workers."""
_BUSY = 0.8
"""If less than this share of the usable cores is free, other programs disturb the measurement."""
_LEAST = 0.5
"""Minimum seconds for a statement on this, as the system counts in steps of 10 ms."""


def comparable_words() -> tuple[str, ...]:
    """Return the words that can be measured: every mode, and after ``subproc`` the same with ``caller_steps``."""
    modes = known_modes()
    place = modes.index("subproc") + 1
    return (*modes[:place], _CALLER_STEPS, *modes[place:])


def arguments_of(word: str, num_cpus: int | None = None) -> dict[str, Any]:
    """Return the arguments of `ParallelEnv` for a word of `comparable_words`."""
    mode, *options = word.split("+") if word == _CALLER_STEPS else [word]
    cores = {} if num_cpus is None else {"num_cpus": num_cpus}
    return {"para_mode": mode, **cores, **dict.fromkeys(options, True)}


@dataclass(frozen=True, slots=True)
class ComparisonSettings:
    """What to measure.

    Attributes:
        num_envs: Envs per mode.
        modes: Words of `comparable_words`, in the order of the table; the oracle first.
        num_cpus: Cores the envs may use; ``None`` means all usable ones.
        steps: Number of steps whose results are compared bit for bit.
        seconds: Timing per mode in seconds, over all rounds.
        seed: Seed of the envs and of the actions.
    """

    num_envs: int
    modes: tuple[str, ...]
    num_cpus: int | None
    steps: int
    seconds: float
    seed: int


@dataclass(slots=True)
class ComparisonRow:
    """The results of one mode.

    Attributes:
        mode: Its word, of `comparable_words`.
        workers: Number of hosts.
        num_cpus: The argument of `ParallelEnv`.
        startup: Seconds until the first states, including the start of workers.
        rates: Env steps per second, one number per round.
        ratios: Speed relative to the oracle in the same round.
        deviation: Where its results first differ from the oracle's; ``None`` if nowhere.
        failure: Why there are no numbers, in one line; ``None`` if there are.
        is_missing: Whether it failed only because a package is not installed.
    """

    mode: str
    workers: int = 0
    num_cpus: int | None = None
    startup: float = 0.0
    rates: list[float] = field(default_factory=list)
    ratios: list[float] = field(default_factory=list)
    deviation: str | None = None
    failure: str | None = None
    is_missing: bool = False

    @property
    def rate(self) -> float:
        """Median of the rates."""
        return median(self.rates)

    @property
    def ratio(self) -> float:
        """Median of the ratios; 1 for the oracle itself."""
        return median(self.ratios) if self.ratios else 1.0

    def as_dict(self) -> dict[str, Any]:
        """Return everything as plain data; without figures if the mode failed."""
        has_run = self.failure is None
        return {
            "arguments": arguments_of(self.mode, self.num_cpus),
            "workers": self.workers if has_run else None,
            "startup_seconds": self.startup if has_run else None,
            "steps_per_second": self.rate if has_run else None,
            "ratio": self.ratio if has_run else None,
            "deviation": self.deviation,
            "failure": self.failure,
        }


@dataclass(frozen=True, slots=True)
class Comparison:
    """The results of all modes on one env.

    Attributes:
        name: Registered id of the env.
        rows: One per mode, the oracle first.
        chosen: The mode that `recommend` chooses.
        others: Cores that other programs used in the meantime; ``None`` if unknown.
    """

    name: str
    rows: tuple[ComparisonRow, ...]
    chosen: str = ORACLE
    others: float | None = None

    @property
    def is_reproducible(self) -> bool:
        """Whether the env itself gives the same results twice; otherwise no mode can."""
        return self.rows[0].deviation is None

    @property
    def is_sound(self) -> bool:
        """Whether no mode failed, and, if the env is reproducible, none differs."""
        differs = any(row.deviation for row in self.rows) and self.is_reproducible
        return not differs and all(row.failure is None or row.is_missing for row in self.rows)

    @property
    def is_disturbed(self) -> bool:
        """Whether other programs used cores that the envs could have used."""
        cores = describe_cores()
        return self.others is not None and cores.affinity - self.others < _BUSY * cores.usable

    def recommended(self) -> ComparisonRow:
        """Return one of the modes that are about as fast as the fastest correct one.

        This is the mode that `recommend` chooses, if it is among them, so that the two agree unless measurements
        differ; otherwise the first.
        """
        ran = [row for row in self.rows if row.failure is None]
        correct = [row for row in ran if row.deviation is None] if self.is_reproducible else ran
        fastest = max(row.ratio for row in correct)
        good = [row for row in correct if row.ratio * CLOSE_ENOUGH >= fastest]
        return next((row for row in good if row.mode == self.chosen), good[0])

    def as_dict(self) -> dict[str, Any]:
        """Return everything as plain data, for ``--json``; see ``docs/api/command_line.md`` for the keys."""
        best = self.recommended()
        return {
            "env": self.name,
            "is_reproducible": self.is_reproducible,
            "modes": [row.as_dict() for row in self.rows],
            "recommended": arguments_of(best.mode, best.num_cpus),
            "estimated": arguments_of(self.chosen),
            "other_programs_cores": None if self.others is None else round(self.others, 2),
            "other_programs_disturb": self.is_disturbed,
        }


def check_env(name: str) -> None:
    """Make an env once and close it, so that an invalid id is reported before the measurement.

    Raises:
        InvalidEnvError: If it cannot be made, for any reason.
    """
    try:
        gymnasium.make(name).close()
    except Exception as error:
        raise InvalidEnvError(f"The env {name!r} cannot be made: {one_line(error)}") from error


def amount_of_work(settings: ComparisonSettings) -> int:
    """Return the total by which `compare` advances its progress bar, 1 per part.

    Parts are the recording, and the start, comparison and timing of each mode; the oracle is timed
    separately only if there is no other mode.
    """
    return max(4, 3 * len(settings.modes))


def compare(name: str, settings: ComparisonSettings, progress: Bar) -> Comparison:
    """Measure one env in every mode.

    Raises:
        InvalidEnvError: If the env fails in the oracle's mode, which means that the env itself is broken.
    """
    try:
        record = _record(name, settings, progress)
    except Exception as error:
        raise InvalidEnvError(_broken(name, one_line(error))) from error
    chosen = recommend([name] * settings.num_envs, num_cpus=settings.num_cpus)
    with contextlib.closing(_ModeRun(ORACLE, name, settings, progress)) as oracle:
        oracle.attempt("comparing", oracle.check, record)
        rows = [oracle.row]
        for mode in settings.modes[1:]:
            is_choosable = mode in _CHOOSABLE and chosen.mode != ORACLE
            num_cpus = chosen.num_cpus if is_choosable else settings.num_cpus
            rows.append(_measure(mode, num_cpus, oracle, record))
        if not oracle.row.rates:  # no other mode was timed in turns with it
            _take_turns([oracle], record.actions)
    if oracle.row.failure:
        raise InvalidEnvError(_broken(name, oracle.row.failure))
    return Comparison(name, tuple(rows), "+".join([chosen.mode, *chosen.options]), oracle.others())


def _broken(name: str, failure: str) -> str:
    return f"The env {name!r} fails in a plain loop: {failure}"


@dataclass(frozen=True, slots=True)
class _OracleRecord:
    """Random actions, and their results in the oracle's mode.

    Attributes:
        actions: One batch per step.
        results: Result of the reset, then of each step.
    """

    actions: list[Any]
    results: list[dict[str, Any]]


def _record(name: str, settings: ComparisonSettings, progress: Bar) -> _OracleRecord:
    progress.set_description_str(f"{name}: recording")
    with contextlib.closing(_make(name, ORACLE, settings.num_cpus, settings)) as env:
        space = env.action_space
        if space is None:
            raise InvalidEnvError("it declares no action space to draw random actions from.")
        space.seed(settings.seed)
        actions = [space.sample() for _ in range(settings.steps)]
        results = [_reset(env, settings.seed)]
        for action in actions:
            results.append(_step(env, action))
            progress.update(1 / settings.steps)
    return _OracleRecord(actions, results)


def _make(name: str, word: str, num_cpus: int | None, settings: ComparisonSettings) -> ParallelEnv:
    return ParallelEnv([name] * settings.num_envs, asynchronous="restart", **arguments_of(word, num_cpus))


def _reset(env: ParallelEnv, seed: int) -> dict[str, Any]:
    """Return all results of a reset."""
    return {"states": env.reset(seed=seed), "infos": env.reset_infos}


def _step(env: ParallelEnv, action: Any) -> dict[str, Any]:
    """Return all results of a step."""
    result = env.step(action)
    names = ("states", "rewards", "terminated", "truncated", "infos")
    return {name: getattr(result, name) for name in names}


class _ModeRun:
    """One mode, open until `close`; not used any more after a failure."""

    def __init__(
        self, mode: str, name: str, settings: ComparisonSettings, progress: Bar, num_cpus: int | None = None
    ) -> None:
        self.row = ComparisonRow(mode, num_cpus=num_cpus)
        self._own = self._all = self._wall = 0.0
        self.name = name
        self.settings = settings
        self.progress = progress
        self._env: Any = None
        self.attempt("starting", self.start)

    def attempt(self, phase: str, action: Callable[..., None], *arguments: Any) -> None:
        """Run an action unless the mode has failed; a failure ends the mode, not the comparison."""
        if self.row.failure:
            return
        self.progress.set_description_str(f"{self.name}: {phase} {self.row.mode}")
        try:
            action(*arguments)
        except Exception as error:  # noqa: BLE001 (envs raise anything; it goes into the table)
            self.row.failure = one_line(error)
            self.row.is_missing = isinstance(error, MissingDependencyError)

    def start(self) -> None:
        """Open the mode and time it until its first states."""
        begin = time.perf_counter()
        self._env = _make(self.name, self.row.mode, self.row.num_cpus, self.settings)
        self._env.reset(seed=self.settings.seed)
        self.row.startup = time.perf_counter() - begin
        self.row.workers = self._env.num_hosts
        self.progress.update()

    def check(self, record: _OracleRecord) -> None:
        """Repeat the recorded actions and note where the results first differ."""
        self._note(record.results[0], _reset(self._env, self.settings.seed), "reset")
        for number, action in enumerate(record.actions, start=1):
            self._note(record.results[number], _step(self._env, action), f"step {number}")
            self.progress.update(1 / len(record.actions))

    def _note(self, expected: dict[str, Any], found: dict[str, Any], when: str) -> None:
        if self.row.deviation is None:
            self.row.deviation = difference(expected, found, when)

    def time(self, actions: Sequence[Any]) -> None:
        """Step for one round's share of the time and note the speed."""
        self._env.step(actions[0])  # not timed: wakes sleeping workers
        count = 0
        busy, own = cpu_seconds(), time.process_time()
        begin = now = time.perf_counter()
        while now - begin < self.settings.seconds / ROUNDS:
            self._env.step(actions[count % len(actions)])
            count += 1
            now = time.perf_counter()
        self.row.rates.append(count * self.settings.num_envs / (now - begin))
        self._all += (cpu_seconds() or 0.0) - (busy or 0.0)
        self._own += time.process_time() - own
        self._wall += now - begin

    def others(self) -> float | None:
        """Return how many cores other programs used while this mode was timed, if it steps in this process."""
        is_known = cpu_seconds() is not None and self._wall >= _LEAST
        return max(0.0, (self._all - self._own) / self._wall) if is_known else None

    def close(self) -> None:
        """Close the mode's envs, if they were made."""
        if self._env is not None:
            self._env.close()


def _measure(mode: str, num_cpus: int | None, oracle: _ModeRun, record: _OracleRecord) -> ComparisonRow:
    """Open another mode, check it, time it in turns with the oracle, and close it."""
    with contextlib.closing(_ModeRun(mode, oracle.name, oracle.settings, oracle.progress, num_cpus)) as run:
        run.attempt("comparing", run.check, record)
        if run.row.failure is None:
            _take_turns([run, oracle], record.actions)
    return run.row


def _take_turns(runs: Sequence[_ModeRun], actions: Sequence[Any]) -> None:
    """Time modes in turns; notes the ratio of the first to the last per round."""
    first, last = runs[0].row, runs[-1].row
    for turn in range(ROUNDS):
        for run in runs if turn % 2 else reversed(runs):
            run.attempt("timing", run.time, actions)
        if first.failure or last.failure:
            return
        first.ratios.append(first.rates[-1] / last.rates[-1])
        runs[0].progress.update(1 / ROUNDS)
