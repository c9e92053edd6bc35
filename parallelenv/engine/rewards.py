"""Rewards as numbers, for adapters and wrappers: elsewhere an env may reward with whatever it likes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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
    """Return a reward as a float; ``None`` if it is no number, or an int beyond what a float holds."""
    if not isinstance(reward, Real | Decimal | np.bool_):
        return None
    try:
        return float(reward)
    except OverflowError:
        return None


def refuse_other_rewards(batch: Batch, landed: Outcome, dtype: np.dtype[Any]) -> tuple[Outcome, Sequence[int]]:
    """Return a step whose rewards are all in the batch, and are numbers that a dtype holds.

    Args:
        batch: Where rewards are. What is a number of another type, as a `Fraction`, is written there too, and ``None``
            as nan.
        landed: What envs answered.
        dtype: A float.

    Returns:
        The same, but that envs with other rewards have failed in it, with an `EnvContractError`; and their ids,
        ascending. Their steps count all the same.
    """
    wrong = _too_large(batch, landed, dtype)
    if landed.extras:
        extras, others = _numbered(batch, landed)
        landed, wrong = replace(landed, extras=extras), {**wrong, **others}
    if not wrong:
        return landed, ()
    ids = sorted(wrong)
    told = ", ".join(f"env {env_id} {describe_value(wrong[env_id])}" for env_id in ids)
    message = f"A reward is a number that {dtype} holds here, and these are not: {told}. Return such a one from step()."
    failures = {env_id: Failure(EnvContractError(message), env_id, "step") for env_id in ids}
    return replace(landed, failures={**landed.failures, **failures}), ids


def _numbered(batch: Batch, landed: Outcome) -> tuple[Mapping[int, Any], dict[int, Any]]:
    """Return what envs answered beside the batch, without rewards, and by env id the rewards that are no numbers."""
    extras, wrong = dict(landed.extras), {}
    for env_id, extra in landed.extras.items():
        if extra.reward is None or env_id in landed.failures:
            continue
        reward = extra.reward[0]
        number = np.nan if reward is None else as_number(reward)  # as numpy makes it, and so the other libraries
        if number is None:
            wrong[env_id] = reward
        else:
            batch.rewards[env_id - batch.layout.first] = number
            extras[env_id] = extra._replace(reward=None)
    return extras, wrong


def _too_large(batch: Batch, landed: Outcome, dtype: np.dtype[Any]) -> dict[int, Any]:
    """Return, by env id, the finite rewards in the batch that the dtype would make infinite."""
    if dtype == batch.rewards.dtype:
        return {}
    rewards = batch.rewards[batch.rows(landed.stepped)]
    is_too_large = np.abs(rewards) > np.finfo(dtype).max
    if not is_too_large.any():
        return {}
    return {
        landed.stepped[position]: float(rewards[position])
        for position in np.flatnonzero(is_too_large & np.isfinite(rewards)).tolist()
        if landed.stepped[position] not in landed.failures
    }
