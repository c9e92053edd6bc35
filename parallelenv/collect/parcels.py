"""What the collectors of a set have sent, until it is handed out."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from parallelenv.collect.joining import are_of_one_kind, join_in_time
from parallelenv.collect.packing import Parcel
from parallelenv.contract.batch import Array
from parallelenv.rollouts.trajectory import Rollout

Info = dict[str, Any]
Join = Callable[[Sequence[Rollout]], Rollout]


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
        return sum(map(_num_steps, self._parts[rank]))

    def take(self, ranks: Sequence[int], version: int, join: Join) -> tuple[Rollout, Info]:
        """Hand out what there is of collectors. What was made by other envs than the first of it comes the next time.

        Args:
            ranks: The collectors.
            version: Of the weights that were set last.
            join: Makes one rollout of those of each. If it raises, all stays here.

        Returns:
            The rollout, and what there is to say of it.
        """
        chosen = {rank: _of_one_kind(self._parts[rank]) for rank in ranks if self._parts[rank]}
        rollouts = [join_in_time([parcel.open() for parcel in parcels]) for parcels in chosen.values()]
        data = join(rollouts)
        for rank, parcels in chosen.items():
            del self._parts[rank][: len(parcels)]
        infos = [parcel.info for parcels in chosen.values() for parcel in parcels]
        parts = [chosen.get(rank, []) for rank in ranks]
        versions = np.array([min((one.info["version"] for one in part), default=version) for part in parts], np.int64)
        info: Info = {
            **_episodes(rollouts, list(chosen.values())),
            "num_steps": np.array([sum(map(_num_steps, part)) for part in parts], dtype=np.int64),
            "num_samples": sum(one["num_samples"] for one in infos),
            "version": versions,
            "staleness": version - versions,
        }
        for name in ("num_bytes", "num_bytes_sent"):
            if any(name in one for one in infos):
                info[name] = sum(one[name] for one in infos)
        return data, info


def _num_steps(parcel: Parcel) -> int:
    return int(parcel.info["num_steps"])


def _of_one_kind(parcels: Sequence[Parcel]) -> list[Parcel]:
    """Return those from the first on that can be joined in time."""
    first = parcels[0].open()
    return list(itertools.takewhile(lambda parcel: are_of_one_kind(first, parcel.open()), parcels))


def _episodes(rollouts: Sequence[Rollout], parcels: Sequence[Sequence[Parcel]]) -> Info:
    """Return returns and lengths in the order of the ends in rollouts that are put side by side."""
    columns = np.cumsum([0, *(len(rollout.env_ids) for rollout in rollouts)]).tolist()
    places = [np.add(np.argwhere(one.dones), (0, first)) for one, first in zip(rollouts, columns, strict=False)]
    steps, columns = np.concatenate(places).T
    order = np.lexsort((columns, steps))
    counted = [_counted(*one) for one in zip(rollouts, parcels, strict=True)]
    names = "episode_returns", "episode_lengths"
    return {name: np.concatenate(part)[order] for name, part in zip(names, zip(*counted, strict=True), strict=True)}


def _counted(rollout: Rollout, parcels: Sequence[Parcel]) -> tuple[Array, Array]:
    """Return returns and lengths of the episodes that end in a rollout, also of those cut off between its parts."""
    first, counted = 0, []
    for parcel in parcels:
        part = parcel.open()
        ends = np.argwhere(rollout.dones[first : first + len(part)])
        is_cut = ~part.dones[tuple(ends.T)]
        for name, index in (("episode_returns", 0), ("episode_lengths", 1)):
            told = parcel.info[name]
            values = np.empty(len(ends), told.dtype)
            values[~is_cut] = told
            for place in np.flatnonzero(is_cut).tolist():
                values[place] = parcel.under_way[int(ends[place, 1])][index]
            counted.append(values)
        first += len(part)
    return np.concatenate(counted[::2]), np.concatenate(counted[1::2])
