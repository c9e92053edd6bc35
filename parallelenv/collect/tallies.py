"""Episodes that go on from one collection to the next: how much of each came before."""

from __future__ import annotations

from typing import Any

import numpy as np

from parallelenv.batch import Array
from parallelenv.trajectory import Rollout


class Tallies:
    """What has been of the episodes under way, one for each env.

    Args:
        num_envs: How many envs.
    """

    def __init__(self, num_envs: int) -> None:
        self._returns: list[Any] = [0.0] * num_envs
        self._lengths = [0] * num_envs

    def count(self, rollout: Rollout) -> tuple[Array, Array]:
        """Return the whole returns and lengths of the episodes that have ended in a rollout of all envs.

        Returns:
            ``(num_ended,)`` each, in the order of `Rollout.ended_states`; float64, or objects if rewards are no
            numbers, and int64.
        """
        self._forget(rollout.starts)
        returns, lengths = rollout.episode_returns, rollout.episode_lengths
        begins = np.zeros(len(self._lengths), dtype=np.int64)
        for place, (step, column) in enumerate(np.argwhere(rollout.dones).tolist()):
            if not begins[column]:
                returns[place] += self._returns[column]
                lengths[place] += self._lengths[column]
                self._returns[column], self._lengths[column] = 0.0, 0
            begins[column] = step + 1
        for column, begin in enumerate(begins.tolist()):
            valid = rollout.valid[begin:, column]
            if valid.any():
                self._returns[column] += rollout.rewards[begin:, column][valid].sum()
                self._lengths[column] += int(valid.sum())
        return returns, lengths

    def _forget(self, starts: Array) -> None:
        for column in np.flatnonzero(starts).tolist():
            self._returns[column], self._lengths[column] = 0.0, 0
