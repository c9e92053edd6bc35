"""What a collector sends to the caller, packed tighter if that is wanted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import cloudpickle

from parallelenv.contract.copying import loads
from parallelenv.errors import MissingDependencyError
from parallelenv.rollouts.trajectory import Rollout

_LEVEL = 1
"""Steps of 16 CartPoles come to 0.47 of their size at 0.8 GB/s, and back at 1.3 GB/s, which is what counts: the caller
opens the parcels of all. LZ4 comes to 0.51, at 1.9 GB/s, but back at 1.0. Drawn frames of 84x84x4 come to 0.01 at 1.8
GB/s and back at 3.3; with LZ4 to 0.02, at 3.5 and 0.5. Higher levels take longer and gain 0.01."""


@dataclass(slots=True)
class Parcel:
    """A collection on its way.

    Attributes:
        content: The steps, or them pickled and compressed.
        info: What `Collector.collect` says of it.
        num_envs: Number of envs of its collector.
        under_way: Return and length so far of the episodes under way after it, of each env.
        before: Those that were made before, and not sent because something was raised.
    """

    content: Rollout | bytes
    info: dict[str, Any]
    num_envs: int
    under_way: list[tuple[Any, int]]
    before: Sequence[Parcel] = ()

    @classmethod
    def of(cls, data: Rollout, info: dict[str, Any], under_way: list[tuple[Any, int]], compresses: bool) -> Parcel:
        """Return a parcel."""
        if not compresses:
            return cls(data, info, len(data.env_ids), under_way)
        plain = cloudpickle.dumps(data)
        content = _zstandard().compress(plain, _LEVEL)
        sizes = {"num_bytes": len(plain), "num_bytes_sent": len(content)}
        return cls(content, {**info, **sizes}, len(data.env_ids), under_way)

    def open(self) -> Rollout:
        """Return the steps."""
        if isinstance(self.content, bytes):
            self.content = loads(_zstandard().decompress(self.content))
        return self.content  # type: ignore[return-value]

    def __deepcopy__(self, memo: Any) -> Parcel:
        """Return itself: who makes one lets go of what goes in. In one process that saves a copy of all."""
        return self


def require_compression() -> None:
    """Refuse to compress without the package for it.

    Raises:
        MissingDependencyError: If it is not installed.
    """
    _zstandard()


def _zstandard() -> Any:
    try:
        import zstandard
    except ModuleNotFoundError as error:
        if error.name != "zstandard":
            raise
        raise MissingDependencyError(
            "compress_data=True needs the package 'zstandard', which is not installed. Install it with: pip install "
            "zstandard"
        ) from error
    return zstandard
