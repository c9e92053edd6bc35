"""A wrapper that records the return, length and duration of episodes."""

from __future__ import annotations

import time
from collections import deque
from typing import Any

import numpy as np

from parallelenv.contract.arguments import check_positive
from parallelenv.contract.batch import Array
from parallelenv.engine.episode_stats import OpenEpisodes
from parallelenv.errors import EnvContractError
from parallelenv.results import StepResult
from parallelenv.wrappers.base import ParallelWrapper, States, Wrappable, numeric_rewards


class RecordEpisodeStatistics(ParallelWrapper):
    """Adds the statistics of an episode to the info of its last step, as ``info["episode"]`` with Gymnasium's keys.

    ``"r"`` is the sum of rewards (a float), ``"l"`` is the number of steps, and ``"t"`` is the duration in seconds. If
    an env failed in a step and was restarted, this step still counts, with reward 0. With ``asynchronous="continue"``,
    steps after the end of an episode do not count until the env is reset. A step raises `EnvContractError` if a reward
    is not a number or the last info of an episode already has the key ``stats_key``.

    Args:
        env: A `ParallelEnv`, or another wrapper.
        buffer_length: Number of episodes to keep in the queues; older ones are dropped.
        stats_key: Key of the statistics in the info.

    Attributes:
        episode_count: Number of episodes that have ended.
        return_queue: Returns of the latest episodes, oldest first.
        length_queue: Lengths of the same episodes.
        time_queue: Durations of the same episodes, in seconds.

    Raises:
        ArgumentError: If ``buffer_length`` is not an int of at least 1.
    """

    _saved = ("episode_count", "return_queue", "length_queue", "time_queue", "_is_over", "_running")

    def __init__(self, env: Wrappable, buffer_length: int = 100, stats_key: str = "episode") -> None:
        super().__init__(env)
        check_positive("buffer_length", buffer_length)
        self._key, self._buffer_length = stats_key, buffer_length
        self.episode_count = 0
        self.return_queue: deque[float] = deque(maxlen=buffer_length)
        self.length_queue: deque[int] = deque(maxlen=buffer_length)
        self.time_queue: deque[float] = deque(maxlen=buffer_length)
        self._running = OpenEpisodes(len(env))
        self._begins: Array = np.full(len(env), time.perf_counter())
        self._is_over: Array = np.zeros(len(env), dtype=bool)

    def on_reset(self, states: States, env_ids: tuple[int, ...]) -> States:
        """Reset the counts of the envs that start new episodes."""
        self._begin(list(env_ids))
        return states

    def on_step(self, result: StepResult) -> StepResult:
        """Count the steps, and add statistics to the infos of ended episodes."""
        rows, dones = result.env_ids, result.dones
        rewards, runs = numeric_rewards(result), ~self._is_over[rows]
        ended = list(zip(rows[dones & runs].tolist(), result.infos[dones & runs], strict=True))
        clashes = tuple(env_id for env_id, info in ended if self._key in info)
        if clashes:
            raise EnvContractError(
                f"The info of envs {list(clashes)} already has the key {self._key!r}, perhaps from a wrapper around "
                "the single env. Drop one of the two, or give another stats_key.",
                clashes,
            )
        self._running.add(rows[runs], rewards[runs])
        for env_id, info in ended:
            total, length = float(self._running.returns[env_id]), int(self._running.lengths[env_id])
            seconds = round(time.perf_counter() - float(self._begins[env_id]), 6)
            info[self._key] = {"r": total, "l": length, "t": seconds}
            self.return_queue.append(total)
            self.length_queue.append(length)
            self.time_queue.append(seconds)
        self.episode_count += len(ended)
        begun = result.restarted | (dones & self.restarts)
        self._begin(rows[begun])
        self._is_over[rows[dones & ~begun]] = True
        return result

    def _begin(self, rows: Array | list[int]) -> None:
        self._running.begin(rows)
        self._is_over[rows] = False
        self._begins[rows] = time.perf_counter()

    def remembered(self) -> dict[str, object]:
        """Return the counts, the latest episodes, and the time elapsed in each running episode."""
        return {**super().remembered(), "_begins": time.perf_counter() - self._begins}

    def remember(self, memory: dict[str, Any]) -> None:
        """Restore the counts and the latest episodes, at most ``buffer_length`` of them.

        The time between `save_state` and `load_state` does not count towards an episode's duration.
        """
        queues = {name: deque(memory[name], maxlen=self._buffer_length) for name in memory if name.endswith("_queue")}
        super().remember({**memory, **queues, "_begins": time.perf_counter() - memory["_begins"]})
