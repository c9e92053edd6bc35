"""What the collectors of a set have sent, until it is handed out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from parallelenv.collect.joining import join_in_time
from parallelenv.collect.packing import Parcel
from parallelenv.trajectory import Rollout

Info = dict[str, Any]


class Parcels:
    """Parcels by collector, each after the one before.

    Args:
        num_workers: How many collectors there are.
    """

    def __init__(self, num_workers: int) -> None:
        self._parts: list[list[Parcel]] = [[] for _ in range(num_workers)]

    def add(self, rank: int, parcel: Parcel) -> None:
        """Keep what has come."""
        self._parts[rank].append(parcel)

    @property
    def waiting(self) -> list[int]:
        """Collectors of which there is something."""
        return [rank for rank, parts in enumerate(self._parts) if parts]

    def count(self, rank: int) -> int:
        """Return how many steps there are of a collector."""
        return sum(parcel.info["num_steps"] for parcel in self._parts[rank])

    def take(self, ranks: Sequence[int], version: int) -> tuple[list[Rollout], Info]:
        """Hand out what there is of collectors.

        Args:
            ranks: The collectors.
            version: Of the weights that were set last.

        Returns:
            A rollout of each of which there is something, and what there is to say of all.
        """
        parts = {rank: self._parts[rank] for rank in ranks if self._parts[rank]}
        rollouts = [join_in_time([parcel.open() for parcel in parcels]) for parcels in parts.values()]
        versions = [min((one.info["version"] for one in parts.get(rank, ())), default=version) for rank in ranks]
        infos = [parcel.info for parcels in parts.values() for parcel in parcels]
        info: Info = {
            **{name: np.concatenate([one[name] for one in infos]) for name in ("episode_returns", "episode_lengths")},
            "num_steps": np.array([self.count(rank) for rank in ranks], dtype=np.int64),
            "num_samples": sum(one["num_samples"] for one in infos),
            "version": np.array(versions, dtype=np.int64),
            "staleness": version - np.array(versions, dtype=np.int64),
        }
        for name in ("num_bytes", "num_bytes_sent"):
            if any(name in one for one in infos):
                info[name] = sum(one[name] for one in infos)
        for rank in parts:
            self._parts[rank] = []
        return rollouts, info
