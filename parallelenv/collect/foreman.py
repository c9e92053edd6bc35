"""Who of a set works on, and for how long, until all or enough have collected what is wanted."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from parallelenv.collect.crew import Crew
from parallelenv.collect.parcels import Parcels
from parallelenv.collect.seat import Order

_SLICE = 0.5
"""Seconds after which a collector sends what it has, and goes on. What a dead one loses is of that order."""
_QUICK_SLICE = 0.05
"""The same where others may have to wait for it to stop."""
_FIRST = 16
"""Steps of the first slice of a collector: nobody knows how long one takes."""


class Foreman:
    """Lets the collectors of a set work in slices.

    Args:
        crew: The collectors.
        parcels: Where what they send is kept.
        fraction: When so large a share of them is done, the others stop.

    Attributes:
        fraction: As given.
        enough: So many of them that is.
    """

    def __init__(self, crew: Crew, parcels: Parcels, fraction: float) -> None:
        self.fraction = fraction
        self._crew, self._parcels = crew, parcels
        # Not half a collector more because 0.07 * 100 is 7.000000000000001.
        self.enough = math.ceil(round(fraction * len(crew.sizes), 9))
        self._paces = [0.0] * len(crew.sizes)  # steps per second of each, when last heard of

    def work(
        self, goals: Sequence[int], is_quick: bool, is_over: Callable[[], bool], advance: Callable[[int], object]
    ) -> None:
        """Let collectors work until they, or enough of them, have reached their goals.

        Args:
            goals: Steps that each shall have, with those that are waiting.
            is_quick: Whether they stop soon when they are to.
            is_over: Asked between slices whether to stop. Who has nothing yet then makes one step.
            advance: Told of steps as they come.
        """
        crew = self._crew
        seconds = _QUICK_SLICE if is_quick else _SLICE
        while True:
            left = [goal - self._parcels.count(rank) for rank, goal in enumerate(goals)]
            is_enough = sum(one <= 0 for one in left) >= self.enough or is_over()
            waiting = self._parcels.waiting  # who has nothing yet makes a step in any case: no env may be missing
            chosen = [rank for rank in crew.idle if left[rank] > 0 and not (is_enough and rank in waiting)]
            if chosen:
                crew.order({rank: self._slice(rank, 1 if is_enough else left[rank], seconds) for rank in chosen})
            if not crew.is_busy:
                return
            for rank, parcel in crew.receive():
                self._parcels.add(rank, parcel)
                advance(parcel.info["num_steps"])
                self._paces[rank] = parcel.info["num_steps"] / max(parcel.info["seconds"], 1e-6)

    def _slice(self, rank: int, left: int, seconds: float) -> Order:
        """Return what a collector should do next: about as much as it has time for, so that little can be lost."""
        pace = self._paces[rank]
        return Order(max(1, min(left, int(pace * seconds) if pace else _FIRST)), seconds)
