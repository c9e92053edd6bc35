"""The events of each turn, drawn from the seed alone: the same seed gives the same events.

The situation of a turn, such as the envs that have a step in flight, depends on timing; its intention does not.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

from modes import IN_WORKERS, ORACLE, THREADS

from .envs import CUT, END, EXIT, KNOT, QUIT, RAISE, STUMBLE, WAIT

PERIOD = 8
"""One in so many turns brings a disturbance."""
_BRIEFLY = 0.08
"""Seconds that an env waits so that something can happen to it in the meantime."""

_HARMLESS = {
    "step": 40,
    "send": 12,
    "receive": 16,
    "echo": 5,
    "attribute": 5,
    "reset": 4,
    "pause": 2,
    "resume": 4,
    "refused": 2,
}
_IN_ALL_MODES = (
    *("raise", "raise", "several raise", "stumble", "failing reset", "restart", "rebuild", "abandon"),
    *("interrupt step", "interrupt step", "interrupt send", "interrupt receive", "interrupt echo", "interrupt reset"),
    *("interrupt restart", "interrupt rebuild", "interrupt make", "glance"),
)
_WITH_CLOCK = ("hang shortly", "hang for long", "hang for long", "reset that hangs", "echo that hangs")
_WITH_PROCESSES = (
    *("kill", "kill", "kill in step", "kill in step", "kill in receive", "kill in reset", "kill all", "kill node"),
    *("exit", "exit", "several exit", "raise and exit"),
)


@dataclass
class Turn:
    """One turn."""

    number: int  # counts from 0
    call: str
    disturbance: str  # the adversary's action; empty for none
    rank: list[int]  # all env ids, in the order in which some are picked
    count: int | None  # of envs to name; `None`: all, without naming them if that is possible
    window: tuple[int, int | None]  # `min_envs` and `max_envs` of `recv`
    align: Any
    form: str  # of ids: a list, tuple, array or mask
    mood: float  # evenly distributed in [0, 1): for choices that depend on the situation of a turn
    deeds: list[tuple[int, float]] = field(default_factory=list)  # of the first envs named, with their seconds
    interrupt_after: float | None = None  # seconds after which the call is interrupted
    kill: str = ""  # the target that is killed: "worker", "node" or "all"
    kill_after: float | None = None  # seconds after which it is killed; `None`: before the call
    seconds: float = 0.0  # that the first env named takes for its reset or method
    fails: bool = False  # whether its reset fails
    timeout: float | None = None  # seconds that `recv` waits, `None` for the pool's own limit


class Adversary:
    """Plans turns."""

    def __init__(self, seed: int, mode: str, num_envs: int, timeout: float) -> None:
        self._seed = f"{seed} {mode}"
        self._num_envs = num_envs
        self._timeout = timeout
        self._kinds = list(_IN_ALL_MODES)
        if mode != ORACLE:
            self._kinds += _WITH_CLOCK
        if mode in IN_WORKERS:
            self._kinds += _WITH_PROCESSES
        # A thread cannot be ended: its env has to return before the soak looks for leaks.
        self._for_long = 3 * timeout if mode == THREADS else 60.0

    def dice(self, *what: Any) -> random.Random:
        """Return a source of randomness for one purpose."""
        return random.Random(" ".join([self._seed, *map(str, what)]))

    def plan(self, number: int) -> Turn:
        """Return a turn."""
        dice = self.dice("turn", number)
        turn = Turn(
            number=number,
            call=dice.choices(list(_HARMLESS), list(_HARMLESS.values()))[0],
            disturbance=self._disturbance(number),
            rank=dice.sample(range(self._num_envs), self._num_envs),
            count=dice.choice((None, None, 1, dice.randint(1, self._num_envs))),
            window=_window(dice, self._num_envs),
            align=dice.choice(("item", "batch")),
            form=dice.choice(("list", "tuple", "array", "mask")),
            mood=dice.random(),
        )
        if dice.random() < 0.3:
            turn.deeds = [(dice.choice((END, CUT)), 0.0) for _ in range(dice.randint(1, 3))]
        if turn.disturbance:
            self._disturb(turn, dice)
        return turn

    def _disturbance(self, number: int) -> str:
        """Return the next of a shuffled deck of all disturbances, or nothing if it is not the time."""
        period, moment = divmod(number, PERIOD)
        if moment != self.dice("moment", period).randrange(PERIOD):
            return ""
        round_number, place = divmod(period, len(self._kinds))
        return self.dice("deck", round_number).sample(self._kinds, len(self._kinds))[place]

    def _disturb(self, turn: Turn, dice: random.Random) -> None:
        kind, _, when = turn.disturbance.partition(" ")
        trouble = (dice.choice((RAISE, KNOT, QUIT)), 0.0)
        wait = (WAIT, _BRIEFLY)
        several = dice.randint(2, 4)
        acts: dict[str, dict[str, Any]] = {
            "raise": {"call": _stepping(dice), "deeds": [trouble]},
            "several raise": {"call": _stepping(dice), "deeds": [trouble] * several},
            "stumble": {"call": _stepping(dice), "deeds": [(STUMBLE, 0.0)]},
            "failing reset": {"call": "reset", "fails": True},
            "hang shortly": {"call": _stepping(dice), "deeds": [(WAIT, 1.6 * self._timeout)]},
            "hang for long": {"call": _stepping(dice), "deeds": [(WAIT, self._for_long)]},
            "exit": {"call": _stepping(dice), "deeds": [(EXIT, 0.0)]},
            "several exit": {"call": _stepping(dice), "deeds": [(EXIT, 0.0)] * several, "count": None},
            "raise and exit": {"call": _stepping(dice), "deeds": [trouble, (EXIT, 0.0)], "count": None},
            "kill": {"kill": "worker"},
            "kill all": {"kill": "all"},
            "kill node": {"kill": "node"},
            "kill in step": {"call": "step", "deeds": [wait], "kill": "worker"},
            "kill in receive": {"call": "receive", "deeds": [wait], "kill": "worker"},
            "kill in reset": {"call": "reset", "seconds": _BRIEFLY, "kill": "worker"},
            "interrupt step": {"call": "step", "deeds": [wait]},
            "interrupt send": {"call": "send"},
            "interrupt receive": {"call": "receive", "deeds": [wait]},
            "interrupt echo": {"call": "echo", "seconds": _BRIEFLY},
            "interrupt reset": {"call": "reset", "seconds": _BRIEFLY},
            "interrupt restart": {"call": "restart"},
            "interrupt rebuild": {"call": "rebuild"},
            "interrupt make": {"call": "make"},
            "reset that hangs": {"call": "reset", "seconds": 1.6 * self._timeout},
            "echo that hangs": {"call": "echo", "seconds": 1.6 * self._timeout},
            "glance": {"call": "receive", "deeds": [wait], "timeout": 0.02},
        }
        for name, value in acts.get(turn.disturbance, {"call": turn.disturbance}).items():
            setattr(turn, name, value)
        if kind == "kill" and when.startswith("in "):
            turn.kill_after = dice.uniform(0, _BRIEFLY)
        if kind == "interrupt":  # in the middle of the waiting, or at its edges
            longest = 0.0005 if turn.call == "send" else dice.choice((0.003, _BRIEFLY, _BRIEFLY))
            turn.interrupt_after = dice.uniform(0, longest)


def _stepping(dice: random.Random) -> str:
    return dice.choice(("step", "step", "receive"))


def _window(dice: random.Random, num_envs: int) -> tuple[int, int | None]:
    lowest = dice.choice((1, 1, dice.randint(1, num_envs)))
    return lowest, dice.choice((None, lowest, lowest + dice.randint(0, 5)))
