"""Episodes that go on from one collection to the next: how much of each came before."""

from __future__ import annotations

from typing import Any

import numpy as np

from parallelenv.contract.batch import Array
from parallelenv.rollouts.trajectory import Rollout


class Tallies:
    """What has been of the episodes under way, by env."""

    def __init__(self) -> None:
        self._returns: dict[int, Any] = {}
        self._lengths: dict[int, int] = {}

    def count(self, rollout: Rollout) -> tuple[Array, Array]:
        """Return the whole returns and lengths of the episodes that have ended in a rollout, the next of its envs.

        Returns:
            ``(num_ended,)`` each, in the order of `Rollout.ended_states`; float64, or objects if rewards are no
            numbers, and int64.
        """
        ids = rollout.env_ids.tolist()
        for column in np.flatnonzero(rollout.starts).tolist():
            self._forget(ids[column])
        returns, lengths = rollout.episode_returns, rollout.episode_lengths
        begins = np.zeros(len(ids), dtype=np.int64)
        for place, (step, column) in enumerate(np.argwhere(rollout.dones).tolist()):
            if not begins[column]:
                returns[place] = returns[place] + self._returns.get(
                    ids[column], 0.0
                )  # not in place: it may be an array
                lengths[place] += self._lengths.get(ids[column], 0)
                self._forget(ids[column])
            begins[column] = step + 1
        for column, begin in enumerate(begins.tolist()):
            valid = rollout.valid[begin:, column]
            if valid.any():
                env_id = ids[column]
                self._returns[env_id] = self._returns.get(env_id, 0.0) + rollout.rewards[begin:, column][valid].sum()
                self._lengths[env_id] = self._lengths.get(env_id, 0) + int(valid.sum())
        return returns, lengths

    def under_way(self, rollout: Rollout) -> list[tuple[Any, int]]:
        """Return the return and length so far of each env's episode under way, in the order of a rollout's envs."""
        return [(self._returns.get(one, 0.0), self._lengths.get(one, 0)) for one in rollout.env_ids.tolist()]

    def _forget(self, env_id: int) -> None:
        self._returns.pop(env_id, None)
        self._lengths.pop(env_id, None)
