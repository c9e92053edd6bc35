"""Converts rewards to numbers for adapters and wrappers; elsewhere, rewards may be of any type."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from decimal import Decimal
from numbers import Real
from typing import Any

import numpy as np

from parallelenv.contract.batch import Batch
from parallelenv.contract.failures import Failure
from parallelenv.contract.spaces import describe_value
from parallelenv.engine.tickets import Outcome
from parallelenv.errors import EnvContractError


def as_number(reward: Any) -> float | None:
    """Return a reward as a float; ``None`` if it is not a number, or is an int too large for a float."""
    if not isinstance(reward, Real | Decimal | np.bool_):
        return None
    try:
        return float(reward)
    except OverflowError:
        return None


def refuse_other_rewards(batch: Batch, outcome: Outcome, dtype: np.dtype[Any]) -> tuple[Outcome, Sequence[int]]:
    """Write an outcome's rewards to the batch as numbers; rewards that do not fit ``dtype`` become failures.

    Numbers of other types, such as `Fraction`, are converted to float; ``None`` is converted to nan.

    Returns:
        The new outcome, and the ids of the envs whose rewards were refused, ascending. In the outcome, each of these
        envs has an `EnvContractError` as its failure, but its step still counts.
    """
    wrong = too_large_rewards(batch, outcome.stepped, dtype)
    extras = dict(outcome.extras)
    for env_id, extra in outcome.extras.items():
        if extra.reward is None:
            continue
        reward = extra.reward[0]
        number = np.nan if reward is None else as_number(reward)  # numpy, too, converts None to nan
        if number is None:
            wrong[env_id] = reward
        elif env_id not in outcome.failures:
            batch.rewards[env_id - batch.layout.first] = number
            extras[env_id] = extra._replace(reward=None)
    wrong = {env_id: reward for env_id, reward in wrong.items() if env_id not in outcome.failures}
    outcome = replace(outcome, extras=extras) if extras else outcome
    if not wrong:
        return outcome, ()
    ids = sorted(wrong)
    descriptions = ", ".join(f"env {env_id} {describe_value(wrong[env_id])}" for env_id in ids)
    message = f"A reward must be a number that fits {dtype}, and these do not: {descriptions}. Return one from step()."
    failures = {env_id: Failure(EnvContractError(message), env_id, "step") for env_id in ids}
    return replace(outcome, failures={**outcome.failures, **failures}), ids


def too_large_rewards(batch: Batch, env_ids: Sequence[int], dtype: np.dtype[Any]) -> dict[int, Any]:
    """Return, by env id, the finite rewards in the batch that would become infinite in the given dtype."""
    if dtype == batch.rewards.dtype:
        return {}
    rewards = batch.rewards[batch.rows(env_ids)]
    is_too_large = np.abs(rewards) > np.finfo(dtype).max
    if not is_too_large.any():
        return {}
    places = np.flatnonzero(is_too_large & np.isfinite(rewards)).tolist()
    return {env_ids[place]: float(rewards[place]) for place in places}
