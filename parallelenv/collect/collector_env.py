"""A collector as an env, so that `ParallelEnv` runs, restarts and schedules collectors like envs."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, replace
from typing import Any

import cloudpickle
import numpy as np

from parallelenv.collect.collector import Collector
from parallelenv.contract.copying import loads
from parallelenv.contract.failures import Failure, put
from parallelenv.contract.rollout_data import map_leaves
from parallelenv.errors import MissingDependencyError
from parallelenv.rollouts.evaluation import Evaluation
from parallelenv.rollouts.trajectory import Rollout

_LEVEL = 1
"""zstd, ratio and speeds: steps of 16 CartPoles 0.47, compress 0.8 GB/s, decompress 1.3 GB/s; decompression counts, as
the caller opens all collections. LZ4: 0.51, 1.9 and 1.0 GB/s. Drawn frames of 84x84x4: zstd 0.01, 1.8 and 3.3 GB/s;
LZ4 0.02, 3.5 and 0.5. Higher levels take longer and gain 0.01."""


@dataclass(frozen=True, slots=True)
class CollectRequest:
    """The next task of a collector: the action of its `CollectorEnv`.

    Attributes:
        num_steps: Maximum number of steps.
        seconds: The collector stops at its next step after so many.
    """

    num_steps: int
    seconds: float = math.inf


@dataclass(slots=True)
class Part:
    """Steps of a collector, ready to be sent: the state of its `CollectorEnv`.

    Attributes:
        num_envs: Number of envs of the collector.
        version: Version of its policy.
        seconds: Time that the steps took.
        failure: Why the collector stopped before its request was done; ``None`` if it did not.
        num_steps: Number of steps of each env.
        num_samples: Number of steps of all envs together.
        num_bytes: Size of the steps before and after compression; ``None`` without compression.
    """

    num_envs: int
    version: int
    seconds: float
    failure: Failure | None
    num_steps: int = 0
    num_samples: int = 0
    num_bytes: tuple[int, int] | None = None
    _content: Rollout | bytes | None = None

    def fill(self, data: Rollout, compresses: bool) -> None:
        """Add the steps."""
        self.num_steps, self.num_samples, self._content = len(data), int(data.valid.sum()), data
        if compresses:
            plain = cloudpickle.dumps(data)
            self._content = zstandard().compress(plain, _LEVEL)
            self.num_bytes = len(plain), len(self._content)

    def open(self) -> Rollout:
        """Return the steps."""
        if isinstance(self._content, bytes):
            self._content = loads(zstandard().decompress(self._content))
        return self._content  # type: ignore[return-value]

    def __deepcopy__(self, memo: Any) -> Part:
        """Return itself: the sender never changes it. Within one process this saves a copy of all steps."""
        return self


class CollectorEnv:
    """A collector with the interface of an env: one step is one request, and there are no episodes.

    Args:
        arguments: Arguments of the `Collector`.
        compresses: Whether to compress what is sent.
    """

    def __init__(self, arguments: dict[str, Any], compresses: bool) -> None:
        self.collector = Collector(**arguments)
        self._rank = arguments["rank"]
        self._compresses = compresses

    @property
    def num_envs(self) -> int:
        """Number of envs of the collector."""
        return self.collector.num_envs

    def reset(self, seed: int | None = None) -> None:
        """Take a seed if one is given, that is, if this collector replaces one that died."""
        if seed is not None:
            self.collector.reseed(seed)

    def step(self, request: CollectRequest) -> tuple[Part, float, bool, dict[str, Any]]:
        """Collect. What an env or the policy raises is returned with the steps made until then."""
        end = time.perf_counter() + request.seconds
        collector, failure = self.collector, None
        data: Rollout | None = None
        seconds = 0.0
        try:
            data, seconds = collector._gather(
                request.num_steps, lambda num_made: num_made > 0 and time.perf_counter() >= end, progress=False
            )
        except Exception as error:  # noqa: BLE001 (users' code runs; the error is sent)
            made = getattr(error, "partial", None)
            if isinstance(made, Rollout):
                data = _without_rest(made)
                put(error, "partial", None)  # else the error would carry the steps as well
            failure = Failure(error, self._rank, "collect")
        part = Part(collector.num_envs, collector.version, seconds, failure)
        if data is not None:
            part.fill(data, self._compresses)
        return part, 0.0, False, {}

    def evaluate(self, num_episodes: int, seed: int | None) -> Evaluation:
        """Play whole episodes."""
        return self.collector.evaluate(num_episodes, seed=seed, progress=False)

    def close(self) -> None:
        """Close the envs."""
        self.collector.stop()


def _without_rest(data: Rollout) -> Rollout:
    """Return a rollout without trailing steps that no env made."""
    num_steps = int(np.flatnonzero((data.valid | data.dones).any(axis=1)).max(initial=-1)) + 1
    names = ("states", "actions", "rewards", "terminated", "truncated", "valid", "extras")
    return replace(data, **{name: map_leaves(getattr(data, name), lambda leaf: leaf[:num_steps]) for name in names})


def zstandard() -> Any:
    """Return the module for compression.

    Raises:
        MissingDependencyError: If it is not installed.
    """
    try:
        import zstandard as module
    except ModuleNotFoundError as error:
        if error.name != "zstandard":
            raise
        raise MissingDependencyError(
            "compress_data=True needs the package 'zstandard', which is not installed. Install it with: pip install "
            "zstandard"
        ) from error
    return module
