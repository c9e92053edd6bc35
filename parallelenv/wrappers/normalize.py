"""Normalisation of states and rewards by running statistics."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from gymnasium import spaces

from parallelenv.contract.arguments import check_flags, is_number
from parallelenv.contract.batch import Array
from parallelenv.contract.error_text import show
from parallelenv.contract.spaces import Structure
from parallelenv.errors import ArgumentError
from parallelenv.results import StepResult
from parallelenv.wrappers.answer_rows import States, changed, numeric_rewards, rebuilt
from parallelenv.wrappers.base import ParallelWrapper, StateWrapper, Wrappable, shared_structure
from parallelenv.wrappers.running_statistics import RunningStatistics


@dataclass(frozen=True)
class Normalizer:
    """A function that normalises states. A pickled copy has its own copy of the statistics.

    Attributes:
        structure: Structure of the states.
        places: Indices of the leaves to normalise, by their names in the statistics.
        statistics: Statistics of these leaves.
        epsilon: Added to the variance.
        clip: Bound of the absolute values returned.
    """

    structure: Structure
    places: Mapping[str, int]
    statistics: RunningStatistics
    epsilon: float
    clip: float

    def __call__(self, states: States) -> States:
        """Return normalised states, batched as envs return them."""
        leaves = self.structure.split(states)
        for name, index in self.places.items():
            mean, variance = self.statistics.leaves[name].guess()
            scaled = (leaves[index] - mean) / np.sqrt(variance + self.epsilon)
            leaves[index] = np.clip(scaled, -self.clip, self.clip).astype(np.float32)
        return self.structure.join(leaves)


class NormalizeStates(StateWrapper):
    """Normalises states to mean 0 and variance 1, each number by itself, by statistics of all states so far.

    The statistics count the states that `reset`, `step` and `recv` return for envs that acted: not those of resting
    envs, nor ``info["ended_state"]``, which is normalised too. Only the `Box` parts of a state change; they become
    float32, within ``-clip .. clip``. States that would make mean or variance nan or infinite raise `EnvContractError`.

    Args:
        env: A `ParallelEnv`, or another wrapper. Its envs must share an observation space.
        keys: Keys of a `Dict` space to normalise; ``None`` means all.
        statistics: Statistics to start from, or to share with another wrapper, for instance in evaluation with that of
            training; ``None`` starts new ones.
        frozen: Whether this wrapper leaves the statistics unchanged.
        epsilon: Added to the variance.
        clip: Bound of the absolute values returned; `math.inf` for none.

    Attributes:
        normalizer: The `Normalizer`, for use in a policy given to `ParallelEnv.rollout`.
        frozen: Whether statistics are frozen. See `ParallelWrapper`.

    Raises:
        ArgumentError: If the envs share no space, it has no `Box` to normalise, or an argument has an invalid value.
    """

    _saved = ("statistics",)

    def __init__(
        self,
        env: Wrappable,
        keys: Sequence[str] | None = None,
        *,
        statistics: RunningStatistics | None = None,
        frozen: bool = False,
        epsilon: float = 1e-8,
        clip: float = 10.0,
    ) -> None:
        structure = shared_structure(env, "have no common scale")
        known = list(structure.space.spaces) if isinstance(structure.space, spaces.Dict) else []
        if keys is not None and (
            isinstance(keys, str) or not isinstance(keys, Iterable) or any(key not in known for key in keys)
        ):
            raise ArgumentError(f"keys={show(keys)} must be a list of keys of the observation space, {known}, or None.")
        chosen = ("",) if keys is None else tuple(f"[{key!r}]" for key in keys)
        leaves = [
            (index, structure.describe(index), tuple(leaf.shape))
            for index, leaf in enumerate(structure.leaves)
            if type(leaf) is spaces.Box and structure.describe(index).startswith(chosen)
        ]
        if not leaves:
            raise ArgumentError(f"There is no Box to normalise in {structure.space}, keys={show(keys)}.")
        shapes = {name: shape for _, name, shape in leaves}
        places = {name: index for index, name, _ in leaves}
        self.normalizer = Normalizer(structure, places, *_checked(shapes, statistics, frozen, epsilon, clip))
        self.is_frozen = bool(frozen)
        super().__init__(env, _with_boxes(structure.space, places, self.normalizer.clip))

    @property
    def statistics(self) -> RunningStatistics:
        """The statistics, to be saved, loaded or merged."""
        return self.normalizer.statistics

    @property
    def state_statistics(self) -> RunningStatistics:
        """The same as ``statistics``, also reachable through a `NormalizeRewards` around this wrapper."""
        return self.statistics

    def process(self, states: States) -> States:
        """Return normalised states, batched as the wrapped object returns them, without counting them."""
        return self.normalizer(states)

    def on_reset(self, states: States, env_ids: tuple[int, ...]) -> States:
        """Count first states, and return them normalised."""
        self._count(states, env_ids)
        return super().on_reset(states, env_ids)

    def on_step(self, result: StepResult) -> StepResult:
        """Count the states, and return the result with normalised states."""
        self._count(result.states, result.env_ids)
        return super().on_step(result)

    def _count(self, states: States, env_ids: Sequence[int] | Array) -> None:
        if not self.is_frozen:
            leaves = self.normalizer.structure.split(states)
            batch = {name: leaves[index] for name, index in self.normalizer.places.items()}
            self.statistics.update(batch, env_ids)


class NormalizeRewards(ParallelWrapper):
    """Divides rewards by the standard deviation of the discounted returns so far.

    Only envs that acted count. A return starts from 0 when its env's episode ends or is reset. Wrappers inside this
    one, such as `RecordEpisodeStatistics`, see the original rewards. A step raises `EnvContractError` if a reward is
    not a number, or would make the variance nan or infinite.

    Args:
        env: A `ParallelEnv`, or another wrapper.
        gamma: Discount of the returns, from 0 to 1.
        statistics: Statistics of returns to start from or share; ``None`` starts new ones.
        frozen: Whether this wrapper leaves the statistics unchanged.
        epsilon: Added to the variance.
        clip: Bound of the absolute values returned; `math.inf` for none.

    Attributes:
        statistics: `RunningStatistics` of the returns.
        frozen: Whether statistics are frozen. See `ParallelWrapper`.

    Raises:
        ArgumentError: If an argument has an invalid value.
    """

    _saved = ("statistics", "returns")

    def __init__(
        self,
        env: Wrappable,
        gamma: float = 0.99,
        *,
        statistics: RunningStatistics | None = None,
        frozen: bool = False,
        epsilon: float = 1e-8,
        clip: float = 10.0,
    ) -> None:
        super().__init__(env)
        if not is_number(gamma) or not 0 <= gamma <= 1:
            raise ArgumentError(f"gamma={show(gamma)} is no discount. Give a number from 0 to 1.")
        self.statistics, self.epsilon, self.clip = _checked({"": ()}, statistics, frozen, epsilon, clip)
        self.gamma, self.is_frozen = float(gamma), bool(frozen)
        self.returns: Array = np.zeros(len(env))

    @property
    def reward_statistics(self) -> RunningStatistics:
        """The same as ``statistics``, also reachable through a `NormalizeStates` around this wrapper."""
        return self.statistics

    def on_reset(self, states: States, env_ids: tuple[int, ...]) -> States:
        """Start the returns of new episodes from 0."""
        self.returns[list(env_ids)] = 0.0
        return states

    def on_step(self, result: StepResult) -> StepResult:
        """Count the returns, and return the result with scaled rewards."""
        rewards, given = numeric_rewards(result), ~rebuilt(result)
        if not self.is_frozen:
            env_ids = result.env_ids[given]
            with np.errstate(all="ignore"):  # update() detects overflows
                returns = self.returns[env_ids] * self.gamma + rewards[given]
            self.statistics.update({"": returns}, env_ids)
            self.returns[env_ids] = returns
        self.returns[result.env_ids[result.dones]] = 0.0
        _, variance = self.statistics.leaves[""].guess()
        scaled = np.clip(rewards / np.sqrt(variance + self.epsilon), -self.clip, self.clip)
        return changed(result, rewards=scaled)

    def remembered(self) -> dict[str, object]:
        """Return the statistics, the current returns and the discount."""
        return {**super().remembered(), "settings": {"gamma": self.gamma}}


def _with_boxes(space: Any, places: Collection[str], clip: float, path: str = "") -> Any:
    """Return a space with the normalised leaves, named by their paths, as boxes of ``-clip .. clip``."""
    if type(space) is spaces.Dict:
        parts = space.spaces.items()
        return spaces.Dict({key: _with_boxes(part, places, clip, f"{path}[{key!r}]") for key, part in parts})
    if type(space) is spaces.Tuple:
        numbered = enumerate(space.spaces)
        return spaces.Tuple([_with_boxes(part, places, clip, f"{path}[{index}]") for index, part in numbered])
    return spaces.Box(-clip, clip, space.shape, np.float32) if path in places else space


def _checked(
    shapes: Mapping[str, tuple[int, ...]], statistics: object, frozen: bool, epsilon: float, clip: float
) -> tuple[RunningStatistics, float, float]:
    """Return statistics, those given or new ones, epsilon and clip, after a check."""
    check_flags(frozen=frozen)
    for name, value in (("epsilon", epsilon), ("clip", clip)):
        if not is_number(value) or not value > 0:
            raise ArgumentError(f"{name}={show(value)} must be a positive number.")
    statistics = RunningStatistics(shapes) if statistics is None else statistics
    if not isinstance(statistics, RunningStatistics) or statistics.shapes != dict(shapes):
        raise ArgumentError(f"statistics={show(statistics)} do not fit; the shapes here are {shapes}.")
    return statistics, float(epsilon), float(clip)
