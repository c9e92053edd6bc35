"""A collector in the place of an env, so that hosts, modes, restarts and first-come answers are those of envs."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from typing import Any

from parallelenv.collect.collector import Collector
from parallelenv.collect.joining import without_rest
from parallelenv.collect.packing import Parcel
from parallelenv.collect.unsent import Unsent
from parallelenv.contract.failures import put
from parallelenv.rollouts.evaluation import Evaluation
from parallelenv.rollouts.trajectory import Rollout


@dataclass(frozen=True, slots=True)
class Order:
    """What a collector is to do next: what an action is to an env.

    Attributes:
        num_steps: So many steps, at most.
        seconds: It stops at its next step after so many; ``None``: it does not look at the clock.
    """

    num_steps: int
    seconds: float | None = None


class Seat:
    """Has what an env has. A step of it is a collection; it has no episodes.

    Args:
        arguments: Of the `Collector`.
        compresses: Whether collections are compressed.
        unsent: Where it counts what it has made and not sent.
    """

    def __init__(self, arguments: dict[str, Any], compresses: bool, unsent: Unsent) -> None:
        self.collector = Collector(**arguments)
        self._compresses = compresses
        self._rank = arguments["rank"]
        self._unsent = unsent
        self._kept: list[Parcel] = []  # made, and not sent

    @property
    def num_envs(self) -> int:
        """Number of envs of the collector."""
        return self.collector.num_envs

    def reset(self, seed: int | None = None) -> None:
        """Take another seed, if one is given: this collector is in the place of one that has died."""
        self._unsent.samples[self._rank] = sum(one.info["num_samples"] for one in self._kept)
        if seed is not None:
            self.collector.reseed(seed)

    def step(self, order: Order) -> tuple[Parcel, float, bool, dict[str, Any]]:
        """Collect."""
        end = math.inf if order.seconds is None else time.perf_counter() + order.seconds

        def is_over(num_made: int) -> bool:
            self._unsent.samples[self._rank] += num_made
            return time.perf_counter() >= end

        left = max(1, order.num_steps - sum(one.info["num_steps"] for one in self._kept))
        try:
            data, seconds = self.collector._gather(left, is_over, progress=False)
        except BaseException as error:
            self._keep(error)
            raise
        parcel = self._parcel(data, seconds)
        parcel.before, self._kept = self._kept, []
        return parcel, 0.0, False, {}

    def _keep(self, error: BaseException) -> None:
        """Keep the steps that were made before an error: they are sent with the next ones."""
        data = getattr(error, "partial", None)
        if isinstance(data, Rollout):
            put(error, "partial", None)  # else they would travel with the error, too
            data = without_rest(data)
            if len(data):
                self._kept.append(self._parcel(data, 0.0))

    def _parcel(self, data: Rollout, seconds: float) -> Parcel:
        tallies, info = self.collector._tallies, self.collector._told(data, seconds)
        return Parcel.of(data, info, tallies.under_way(data), self._compresses)

    def evaluate(self, num_episodes: int, seed: int | None) -> Evaluation:
        """Play whole episodes."""
        return self.collector.evaluate(num_episodes, seed=seed, progress=False)

    def close(self) -> None:
        """Close the envs."""
        self.collector.stop()
        self._unsent.close()
