"""The length of a rollout, and its progress bar."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from parallelenv.contract.arguments import check_positive
from parallelenv.contract.error_text import count, show
from parallelenv.engine.done_policies import DonePolicy
from parallelenv.errors import ArgumentError
from parallelenv.progress import open_bar

_BAR_DELAY = 1.0
"""Seconds until a bar appears."""


@dataclass(frozen=True, slots=True)
class RolloutLength:
    """The length of a rollout, as either of the two numbers."""

    num_steps: int | None
    num_episodes: int | None

    @classmethod
    def of(cls, num_steps: Any, num_episodes: Any) -> RolloutLength:
        """Return a length.

        Raises:
            ArgumentError: If not exactly one number is given, or it is not an int of at least 1.
        """
        if (num_steps is None) == (num_episodes is None):
            raise ArgumentError(
                f"num_steps={show(num_steps)} and num_episodes={show(num_episodes)}: give exactly one of them, "
                "rollout(policy, 100) or rollout(policy, num_episodes=20)."
            )
        name, value = ("num_steps", num_steps) if num_episodes is None else ("num_episodes", num_episodes)
        check_positive(name, value)
        return cls(num_steps, num_episodes)

    def check(self, policy: DonePolicy, env_ids: Sequence[int]) -> None:
        """Refuse a length that the done policy makes impossible.

        Raises:
            ArgumentError: If the end of one env would have to stop the others, or there are fewer episodes.
        """
        if policy.resets_next:
            raise ArgumentError(
                "rollout() does not know envs that are reset in the next step. Make the ParallelEnv with "
                "asynchronous='restart', or use to_gymnasium('SameStep')."
            )
        if policy.is_shared:
            raise ArgumentError(
                "With asynchronous=None the end of one env ends all, and in a rollout no worker knows of the envs of "
                "another. Make the ParallelEnv with asynchronous='restart' (ended envs begin anew) or 'idle' (they "
                "rest)."
            )
        most = max((share or 0 for share in self.shares(env_ids).values()), default=0)
        if most > policy.max_episodes:
            raise ArgumentError(
                f"num_episodes={self.num_episodes} is more than {count(len(env_ids), 'env')} can play: with "
                f"asynchronous={policy.word!r} {policy.after_end}, which allows for "
                f"{policy.max_episodes * len(env_ids):.0f}. Make the ParallelEnv with asynchronous='restart', which "
                "allows for any number, or give num_steps."
            )

    def shares(self, env_ids: Sequence[int]) -> dict[int, int | None]:
        """Return the number of episodes that each env should end; ``None``: any number."""
        if self.num_episodes is None:
            return dict.fromkeys(env_ids)
        share, rest = divmod(self.num_episodes, len(env_ids) or 1)
        return {env_id: share + (place < rest) for place, env_id in enumerate(env_ids)}


@contextlib.contextmanager
def progress_bar(goal: RolloutLength, is_wanted: bool, name: str = "rollout") -> Iterator[Callable[[int], object]]:
    """Show a progress bar in a notebook or on a terminal, and yield the function that advances it."""
    total, unit = (goal.num_steps, " step") if goal.num_episodes is None else (goal.num_episodes, " episode")
    look = "{l_bar}{bar}| {n:,}/{total:,}{unit}s [{elapsed}<{remaining}, {rate_noinv_fmt}]"
    with open_bar(is_wanted, total=total, unit=unit, desc=name, delay=_BAR_DELAY, bar_format=look) as bar:
        yield bar.update
