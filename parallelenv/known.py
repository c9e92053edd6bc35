"""What a `ParallelEnv` knows without asking a worker."""

from __future__ import annotations

import copy
import functools
from typing import Any, cast

import gymnasium
import numpy as np

from parallelenv.autotune.recommend import Recommendation
from parallelenv.contract.arguments import parse_ids
from parallelenv.contract.batch import Array, has_true
from parallelenv.contract.copying import own
from parallelenv.contract.spaces import batched
from parallelenv.engine.engine import Sender
from parallelenv.engine.guard import Guarded
from parallelenv.engine.pool import Pool


class Known(Guarded):
    """The attributes of a `ParallelEnv`: cheap, and there after `close` too."""

    _pool: Pool
    _stepper: Sender
    _num_envs: int
    _everyone: tuple[int, ...]
    _recommendation: Recommendation | None
    _para_mode: str
    _asynchronous: Any

    @property
    def done(self) -> Array:
        """``(n,)`` bool: whose last step ended its episode, or who was ended by the policy."""
        return self._stepper.episodes.done.copy()

    def has_done(self) -> bool:
        """Whether any env is done."""
        return has_true(self._stepper.episodes.done)

    def all_done(self) -> bool:
        """Whether all envs are done."""
        return bool(self._stepper.episodes.done.all())

    @property
    def exhausted(self) -> Array:
        """``(n,)`` bool: who has no further episode, so that it rests. They are done, too."""
        flags: Array = np.zeros(self._num_envs, dtype=bool)
        flags[list(self._stepper.episodes.exhausted)] = True
        return flags

    def all_exhausted(self) -> bool:
        """Whether no env has a further episode."""
        return len(self._stepper.episodes.exhausted) == self._num_envs

    @property
    def paused(self) -> Array:
        """``(n,)`` bool: who is paused."""
        return self._stepper.episodes.paused.copy()

    @property
    def num_unpaused(self) -> int:
        """Number of envs that are not paused."""
        return len(self._stepper.episodes.unpaused)

    @property
    def reset_infos(self) -> list[dict[str, Any]]:
        """The info of each env's latest reset, in env id order."""
        return [own(info) for info in self._stepper.episodes.reset_infos]

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self._is_closed

    @property
    def num_envs(self) -> int:
        """Number of envs."""
        return self._num_envs

    @property
    def num_workers(self) -> int:
        """Number of workers among which the envs are dealt out."""
        return self._pool.num_hosts

    @property
    def num_hosts(self) -> int:
        """The same as `num_workers`."""
        return self._pool.num_hosts

    @property
    def para_mode(self) -> str:
        """The mode: the word given, of ``"auto"`` the one that was chosen, of a backend class its name."""
        return self._para_mode

    @property
    def asynchronous(self) -> str | None:
        """What happens when an episode ends, as given; an env handed over to an adapter follows the adapter's rule."""
        return cast("str | None", self._asynchronous)

    @property
    def recommendation(self) -> Recommendation | None:
        """What ``para_mode="auto"`` chose, and why; ``None`` if the mode was named."""
        return self._recommendation

    @functools.cached_property
    def observation_spaces(self) -> list[gymnasium.Space[Any] | None]:
        """The observation space of each env; ``None`` where it declares none."""
        return [copy.deepcopy(facts.observation_space) for facts in self._pool.facts]

    @functools.cached_property
    def action_spaces(self) -> list[gymnasium.Space[Any] | None]:
        """The action space of each env; ``None`` where it declares none."""
        return [copy.deepcopy(facts.action_space) for facts in self._pool.facts]

    @property
    def single_observation_space(self) -> gymnasium.Space[Any] | None:
        """The observation space that all envs share; ``None`` if they differ or declare none."""
        return self._pool.layout.observation_space  # type: ignore[no-any-return]

    @property
    def single_action_space(self) -> gymnasium.Space[Any] | None:
        """The action space that all envs share; ``None`` if they differ or declare none."""
        return self._pool.layout.action_space  # type: ignore[no-any-return]

    @functools.cached_property
    def observation_space(self) -> gymnasium.Space[Any] | None:
        """The batch of ``n`` shared observation spaces, or ``None``."""
        return batched(self.single_observation_space, self._num_envs)

    @functools.cached_property
    def action_space(self) -> gymnasium.Space[Any] | None:
        """The batch of ``n`` shared action spaces, or ``None``."""
        return batched(self.single_action_space, self._num_envs)

    def _ids(self, id: Any, everyone: bool = False) -> tuple[int, ...]:
        if id is not None:
            return parse_ids(id, self._num_envs)
        return self._everyone if everyone else self._stepper.episodes.unpaused
