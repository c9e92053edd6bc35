"""The events of each turn, drawn from the seed alone: the same seed gives the same events.

The situation of a turn, such as the envs that have a step in flight, depends on timing; its intention does not.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from modes import IN_WORKERS, ORACLE, THREADS

from .envs import CUT, END, EXIT, KNOT, QUIT, RAISE, WAIT

PERIOD = 8
"""One in so many turns brings a disturbance."""
_BRIEFLY = 0.08
"""Seconds that an env waits so that something can happen to it in the meantime."""
_HARMLESS = {"step": 40, "send": 12, "receive": 16, "echo": 5, "reset": 4}


@dataclass
class Turn:
    number: int
    dice: random.Random  # for choices that depend on the situation
    call: str
    disturbance: str = ""
    deeds: list[tuple[int, float]] = field(default_factory=list)  # of the first envs to step, with their seconds
    hit: str = ""  # what is hit: the "call", by an interrupt, or a "worker", a "node" or "all", which are killed
    delay: float | None = None  # seconds after which it is hit; `None`: before the call
    seconds: float = 0.0  # that the first env takes for its reset or method
    fails: bool = False  # whether its reset fails
    timeout: float | None = None  # seconds that `recv` waits, `None` for the pool's own limit


def turns(seed: int, mode: str, timeout: float) -> Iterator[Turn]:
    """Plan turns; the disturbances are dealt from a shuffled deck that has all of them."""
    deck: list[str] = []
    for number in itertools.count():
        dice = random.Random(f"{seed} {mode} {number}")
        turn = Turn(number, dice, dice.choices(list(_HARMLESS), list(_HARMLESS.values()))[0])
        if dice.random() < 0.3:
            turn.deeds = [(dice.choice((END, CUT)), 0.0) for _ in range(dice.randint(1, 3))]
        if dice.random() < 1 / PERIOD:
            table = _disturbances(dice, mode, timeout)
            deck = deck or dice.sample(list(table), len(table))
            turn.disturbance = deck.pop()
            for name, value in table[turn.disturbance].items():
                setattr(turn, name, value)
        yield turn


def _disturbances(dice: random.Random, mode: str, timeout: float) -> dict[str, dict[str, Any]]:
    """Return the disturbances that a mode has, each with its deviation from a harmless turn."""
    trouble, wait, leave = (dice.choice((RAISE, KNOT, QUIT)), 0.0), (WAIT, _BRIEFLY), (EXIT, 0.0)
    stepping, several = dice.choice(("step", "receive")), dice.randint(2, 4)
    slow: dict[str, dict[str, Any]] = {
        **{name: {"deeds": [wait]} for name in ("step", "receive")},
        **{name: {"seconds": _BRIEFLY} for name in ("echo", "reset")},
    }
    # In the middle of the waiting, or at its edges.
    interrupt: dict[str, Any] = {"hit": "call", "delay": dice.uniform(0, dice.choice((0.0005, 0.003, _BRIEFLY)))}
    table: dict[str, dict[str, Any]] = {
        "raise": {"call": stepping, "deeds": [trouble]},
        "several raise": {"call": stepping, "deeds": [trouble] * several},
        "failing reset": {"call": "reset", "fails": True},
        "glance": {"call": "receive", "deeds": [wait], "timeout": 0.02},
        **{name: {"call": name} for name in ("restart", "renew", "abandon")},
        **{
            f"interrupt {name}": {"call": name, **slow.get(name, {}), **interrupt}
            for name in ("step", "send", "receive", "echo", "reset", "restart", "renew", "make")
        },
    }
    if mode != ORACLE:
        # A thread cannot be ended: its env has to return before the soak looks for leaks.
        for_long = 3 * timeout if mode == THREADS else 60.0
        table |= {
            "hang shortly": {"call": stepping, "deeds": [(WAIT, 1.6 * timeout)]},
            "hang for long": {"call": stepping, "deeds": [(WAIT, for_long)]},
            "reset that hangs": {"call": "reset", "seconds": 1.6 * timeout},
            "echo that hangs": {"call": "echo", "seconds": 1.6 * timeout},
        }
    if mode in IN_WORKERS:
        meanwhile: dict[str, Any] = {"hit": "worker", "delay": dice.uniform(0, _BRIEFLY)}
        table |= {
            **{f"kill {what}": {"hit": what} for what in ("worker", "all", "node")},
            **{f"kill in {name}": {"call": name, **slow[name], **meanwhile} for name in ("step", "receive", "reset")},
            "exit": {"call": stepping, "deeds": [leave]},
            "several exit": {"call": stepping, "deeds": [leave] * several},
            "raise and exit": {"call": stepping, "deeds": [trouble, leave]},
        }
    return table
