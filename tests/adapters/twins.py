"""Pairs of vector envs that get the same calls and must return the same results, bit for bit."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np

from parallelenv.results import difference


class Pair:
    """Two vector envs that get the same calls."""

    def __init__(self, ours: Any, theirs: Any) -> None:
        self.ours = ours
        self.theirs = theirs

    def compare(self, ours: Any, theirs: Any) -> None:
        """Fail if two results differ."""
        assert difference(ours, theirs) is None, difference(ours, theirs)


class GymnasiumTwins(Pair):
    """An adapter for Gymnasium, or a wrapper around it, and the same of `SyncVectorEnv`."""

    def reset(self, seed: Any = None, options: dict[str, Any] | None = None) -> None:
        theirs = None if options is None else dict(options)  # the wrapper removes keys from the dict
        self.compare(self.ours.reset(seed=seed, options=options), self.theirs.reset(seed=seed, options=theirs))

    def step(self, actions: Any) -> Any:
        """Step both; return which envs have ended."""
        answers = self.ours.step(copy.deepcopy(actions)), self.theirs.step(actions)  # some wrappers write into them
        for answer in answers:
            forget_times(answer[-1])
        self.compare(*answers)
        return answers[0][2] | answers[0][3]


class Sb3Twins(Pair):
    """An adapter for Stable-Baselines3, or a wrapper around it, and the same of `DummyVecEnv`."""

    def reset(self) -> None:
        self.compare(plain(self.ours.reset()), plain(self.theirs.reset()))
        self.compare(self.ours.unwrapped.reset_infos, self.theirs.unwrapped.reset_infos)

    def step(self, actions: Any) -> Any:
        """Step both; return which envs have ended."""
        observations, *answer = self.ours.step(actions)
        expected, *others = self.theirs.step(actions)
        for infos in (answer[-1], others[-1]):
            forget_times(infos)
        self.compare(plain(observations), plain(expected))
        self.compare(answer, others)
        self.compare(self.ours.unwrapped.reset_infos, self.theirs.unwrapped.reset_infos)
        return answer[1]

    def play(self, num_steps: int) -> int:
        """Step both with random actions; return how many episodes have ended."""
        self.theirs.action_space.seed(5)
        self.reset()
        return sum(int(self.step(sample(self.theirs)).sum()) for _ in range(num_steps))


def sample(env: Any) -> Any:
    """Return an action for each env as SB3's algorithms give them."""
    return np.stack([env.action_space.sample() for _ in range(env.num_envs)])


def plain(value: Any) -> Any:
    """Return observations as plain dicts: theirs are ordered ones."""
    return dict(value) if isinstance(value, dict) else value


def forget_times(infos: Any) -> None:
    """Remove the durations of episodes from the infos: they differ in every run."""
    for info in infos if isinstance(infos, list) else [infos]:
        info.get("episode", {}).pop("t", None)
