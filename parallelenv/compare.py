"""Measures every mode on an env, and checks that all of them give the same results.

What makes the numbers fair: all modes are open at the same time and are timed in turns, in
several short rounds, so that a slow moment of the machine meets all of them; each round starts
with another mode; medians are taken over the rounds; actions are drawn beforehand.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any, Protocol

import gymnasium

from parallelenv import ParallelEnv
from parallelenv.errors import InvalidEnvError, MissingDependencyError, ParallelEnvError
from parallelenv.identity import difference

ORACLE = "dummy"  # the mode whose results are right by definition
ROUNDS = 5
PHASES = 3  # start, compare, time: each moves the progress bar by 1 in all
_CLOSE_ENOUGH = 1.05  # a mode must be faster by more than this to be worth another word


@dataclass(frozen=True, slots=True)
class Plan:
    """What is measured.

    Attributes:
        num_envs: Envs per mode.
        modes: Words, in the order of the table; the oracle first.
        num_cpus: Cores the envs may use; ``None`` means all usable ones.
        steps: Steps whose results are compared bit for bit.
        seconds: Time for which each mode is timed, all rounds together.
        seed: Seed of the envs and of the actions.
    """

    num_envs: int
    modes: tuple[str, ...]
    num_cpus: int | None
    steps: int
    seconds: float
    seed: int


@dataclass(slots=True)
class Row:
    """What was found for one mode.

    Attributes:
        mode: Its word.
        workers: Number of hosts.
        startup: Seconds from nothing to the first states, with whatever had to be started.
        rates: Steps of single envs per second, one number per round.
        deviation: Where its results first differ from the oracle's; ``None`` if nowhere.
        failure: Why there are no numbers, one line; ``None`` if there are.
        is_missing: Whether the failure is only that a package is not installed.
    """

    mode: str
    workers: int = 0
    startup: float = 0.0
    rates: list[float] = field(default_factory=list)
    deviation: str | None = None
    failure: str | None = None
    is_missing: bool = False

    @property
    def rate(self) -> float:
        """Median of the rates."""
        return median(self.rates)


@dataclass(frozen=True, slots=True)
class Comparison:
    """All modes on one env.

    Attributes:
        name: Registered id of the env.
        rows: One per mode, the oracle first.
    """

    name: str
    rows: tuple[Row, ...]

    @property
    def is_reproducible(self) -> bool:
        """Whether the env itself gives the same results twice; if not, no mode can."""
        return self.rows[0].deviation is None

    @property
    def is_sound(self) -> bool:
        """Whether no mode failed, and none differs though the env is reproducible."""
        differs = any(row.deviation for row in self.rows) and self.is_reproducible
        return not differs and all(row.failure is None or row.is_missing for row in self.rows)

    def ratio(self, row: Row) -> float:
        """Return how many times as fast as the oracle a mode is.

        The median over the rounds of the ratio within a round: a slow round slows both.
        """
        pairs = zip(row.rates, self.rows[0].rates, strict=True)
        return median(rate / base for rate, base in pairs)

    def recommended(self) -> Row:
        """Return the first of the modes that are about as fast as the fastest correct one."""
        ran = [row for row in self.rows if row.failure is None]
        correct = [row for row in ran if row.deviation is None] if self.is_reproducible else ran
        fastest = max(row.rate for row in correct)
        return next(row for row in correct if row.rate * _CLOSE_ENOUGH >= fastest)


class Progress(Protocol):
    """The part of a tqdm bar that is used."""

    def update(self, n: float | None = 1) -> bool | None:
        """Move on by ``n``."""
        ...

    def set_description_str(self, desc: str | None = None, refresh: bool | None = True) -> None:
        """Show what is being done."""
        ...


def check_env(name: str) -> None:
    """Make an env once and close it, so that a wrong id shows before anything is measured.

    Raises:
        InvalidEnvError: If it cannot be made, whatever the reason.
    """
    try:
        gymnasium.make(name).close()
    except Exception as error:
        raise InvalidEnvError(f"The env {name!r} cannot be made: {one_line(error)}") from error


def compare(name: str, plan: Plan, progress: Progress) -> Comparison:
    """Measure one env in every mode.

    Raises:
        InvalidEnvError: If the env fails in the oracle's mode: it is the env that is broken.
    """
    with contextlib.ExitStack() as stack:
        reference = stack.enter_context(contextlib.closing(_make(name, ORACLE, plan)))
        runs = _start(name, plan, progress, stack)
        actions = _draw_actions(name, reference, plan)
        progress.set_description_str(f"{name}: comparing results")
        _check(name, reference, runs, actions, plan.seed, progress)
        progress.set_description_str(f"{name}: timing")
        _time(runs, actions, plan.seconds, progress)
    if runs[0].row.failure:
        raise InvalidEnvError(_broken(name, runs[0].row.failure))
    return Comparison(name, tuple(run.row for run in runs))


class _Run:
    """One mode while it is measured; after a failure nothing more is asked of it."""

    def __init__(self, mode: str) -> None:
        self.row = Row(mode)
        self._env: Any = None

    def attempt(self, action: Callable[..., None], *arguments: Any) -> None:
        """Do something unless the mode has failed; a failure ends the mode, not the comparison."""
        if self.row.failure:
            return
        try:
            action(*arguments)
        except Exception as error:  # noqa: BLE001 (envs raise anything; it goes into the table)
            self.row.failure = one_line(error)
            self.row.is_missing = isinstance(error, MissingDependencyError)
            self.close()

    def start(self, name: str, plan: Plan) -> None:
        """Open the mode and take the time until it shows its first states."""
        begin = time.perf_counter()
        self._env = _make(name, self.row.mode, plan)
        self._env.reset(seed=plan.seed)
        self.row.startup = time.perf_counter() - begin
        self.row.workers = self._env.num_hosts

    def check_reset(self, expected: dict[str, Any], seed: int) -> None:
        """Reset, and note where the results differ from those expected."""
        self._note(expected, reset(self._env, seed), "reset")

    def check_step(self, expected: dict[str, Any], action: Any, number: int) -> None:
        """Step, and note where the results differ from those expected."""
        self._note(expected, step(self._env, action), f"step {number}")

    def _note(self, expected: dict[str, Any], found: dict[str, Any], when: str) -> None:
        if self.row.deviation is None:
            self.row.deviation = difference(expected, found, when)

    def time(self, actions: Sequence[Any], seconds: float) -> None:
        """Step for some time and note how many steps of single envs a second had."""
        self._env.step(actions[0])  # not timed: wakes workers that slept while others were timed
        count = 0
        begin = now = time.perf_counter()
        while now - begin < seconds:
            self._env.step(actions[count % len(actions)])
            count += 1
            now = time.perf_counter()
        self.row.rates.append(count * len(self._env) / (now - begin))

    def close(self) -> None:
        """Close the mode's envs, if there are any."""
        if self._env is not None:
            self._env.close()


def _make(name: str, mode: str, plan: Plan) -> ParallelEnv:
    return ParallelEnv.make(
        name, num_envs=plan.num_envs, para_mode=mode, asynchronous="restart", num_cpus=plan.num_cpus
    )


def _start(name: str, plan: Plan, progress: Progress, stack: contextlib.ExitStack) -> list[_Run]:
    runs = [_Run(mode) for mode in plan.modes]
    for run in runs:
        progress.set_description_str(f"{name}: starting {run.row.mode}")
        stack.callback(run.close)
        run.attempt(run.start, name, plan)
        progress.update(1 / len(runs))
    return runs


def _draw_actions(name: str, env: ParallelEnv, plan: Plan) -> list[Any]:
    """Return one batch of random actions per step that is compared."""
    space = env.action_space
    if space is None:
        raise InvalidEnvError(f"The env {name!r} declares no action space to draw random actions from.")
    space.seed(plan.seed)
    return [space.sample() for _ in range(plan.steps)]


def _check(
    name: str,
    reference: ParallelEnv,
    runs: Sequence[_Run],
    actions: Sequence[Any],
    seed: int,
    progress: Progress,
) -> None:
    """Step all modes side by side and note where one first differs from the reference."""
    expected = _blaming_env(name, reset, reference, seed)
    for run in runs:
        run.attempt(run.check_reset, expected, seed)
    for number, action in enumerate(actions, start=1):
        expected = _blaming_env(name, step, reference, action)
        for run in runs:
            run.attempt(run.check_step, expected, action, number)
        progress.update(1 / len(actions))


def _blaming_env(name: str, action: Callable[..., dict[str, Any]], *arguments: Any) -> dict[str, Any]:
    """Do something in the oracle's mode, where whatever fails is the env's fault."""
    try:
        return action(*arguments)
    except Exception as error:
        raise InvalidEnvError(_broken(name, one_line(error))) from error


def _broken(name: str, failure: str) -> str:
    return f"The env {name!r} fails in a plain loop: {failure}"


def reset(env: ParallelEnv, seed: int) -> dict[str, Any]:
    """Return everything a reset answers."""
    return {"states": env.reset(seed=seed), "infos": env.reset_infos}


def step(env: ParallelEnv, action: Any) -> dict[str, Any]:
    """Return everything a step answers."""
    result = env.step(action)
    names = ("states", "rewards", "terminated", "truncated", "infos")
    return {name: getattr(result, name) for name in names}


def _time(runs: Sequence[_Run], actions: Sequence[Any], seconds: float, progress: Progress) -> None:
    """Time the modes in turns; each round starts with another one."""
    for turn in range(ROUNDS):
        first = turn % len(runs)
        for run in (*runs[first:], *runs[:first]):
            run.attempt(run.time, actions, seconds / ROUNDS)
            progress.update(1 / (ROUNDS * len(runs)))


def one_line(error: BaseException) -> str:
    """Return what an error says in one line, with its type unless it is one of ours."""
    if isinstance(error, BaseExceptionGroup):  # several envs failed, most often in the same way
        return f"{one_line(error.exceptions[0])} (and {len(error.exceptions) - 1} more)"
    text = " ".join(str(error).split())
    return text if isinstance(error, ParallelEnvError) else f"{type(error).__name__}: {text}"
